"""PyTorch side: checkpoint to a folder of ONNX parts."""
