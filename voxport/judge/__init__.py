"""Judging side: a folder of ONNX parts against the original."""
