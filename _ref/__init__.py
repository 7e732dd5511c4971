"""The models in plain PyTorch: what each ONNX part must equal. No ONNX in here."""
