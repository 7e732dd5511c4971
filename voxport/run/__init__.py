"""NumPy and ONNX Runtime side: a folder of ONNX parts to speech."""
