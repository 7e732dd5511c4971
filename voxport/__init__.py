"""voxport: large speech models in ONNX, built, spoken and judged."""

__version__ = "0.1.0"
