"""voxport: large speech models in ONNX, built, spoken and judged."""

import os

# ONNX Runtime 1.32 notes a device id and queues events in the user's cache as soon as it is imported, unless told before.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__version__ = "0.1.0"
