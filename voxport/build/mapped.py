"""Tensors of safetensors files that stay on disk until they are read, and a ModelBuilder that works on them."""

from __future__ import annotations

import contextlib
import importlib
import json
import struct
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# numpy has no bfloat16: its bits are mapped and given their name by torch
DTYPES = {"BF16": (np.uint16, torch.bfloat16), "F16": (np.float16, torch.float16), "F32": (np.float32, torch.float32),
          "U8": (np.uint8, torch.uint8)}  # fmt: skip


def map_safetensors(path: str | Path) -> dict[str, Tensor]:
    """All tensors of a file as read-only maps: pages that the system may drop and read again, no private memory."""
    start, entries = _read_header(path)
    data = np.memmap(path, np.uint8, "r", offset=start)
    return {name: _view(data, entry) for name, entry in entries.items()}


def read_tensor(path: str | Path, name: str, rows: slice = slice(None)) -> Tensor:
    """One tensor of a file, or some of its rows, in memory of its own.

    safetensors' own reader maps the whole file as writable private memory, which a limit on memory counts.
    """
    start, entries = _read_header(path)
    return _view(np.memmap(path, np.uint8, "r", offset=start), entries[name])[rows].clone()


def tensor_shape(path: str | Path, name: str) -> tuple[int, ...]:
    return tuple(_read_header(path)[1][name]["shape"])


def _read_header(path: str | Path) -> tuple[int, dict[str, dict]]:
    """Where the data begin, and name -> dtype, shape and offsets."""
    with open(path, "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(length))
    return 8 + length, {name: entry for name, entry in header.items() if name != "__metadata__"}


def _view(data: np.ndarray, entry: dict) -> Tensor:
    start, end = entry["data_offsets"]
    stored, dtype = DTYPES[entry["dtype"]]
    return _as_tensor(data[start:end].view(stored).reshape(entry["shape"])).view(dtype)


def _as_tensor(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the array cannot be written to; nobody does
        return torch.from_numpy(array)


@contextlib.contextmanager
def mapped_builder() -> Iterator[None]:
    """Inside, ModelBuilder maps weights from disk; by itself it holds all of them in private memory.

    What it makes of them is cast and written one tensor at a time, so that only packed query, key and value matrices stay.
    """
    Model, loader = _builder_modules()
    load_weights, to_nbits, load_file = Model.load_weights, Model.to_nbits, loader.load_file
    loader.load_file = map_safetensors
    Model.load_weights = lambda self, path: load_weights(self, path) if self.quant_type else mapped_qwen3(Path(path))
    Model.to_nbits = lambda self: self.model if self.quant_type else to_nbits(self)  # a pass over a copy of all that is rounded
    try:
        yield
    finally:
        Model.load_weights, Model.to_nbits, loader.load_file = load_weights, to_nbits, load_file


def _builder_modules() -> tuple[type, types.ModuleType]:
    """ModelBuilder's base class and the module that reads rounded weights. It imports itself under top-level names, or did."""
    from onnxruntime_genai.models.builder import Qwen3Model

    base = next(kind for kind in Qwen3Model.__mro__ if kind.__name__ == "Model")
    package = base.__module__.removesuffix("builders.base")
    return base, importlib.import_module(f"{package}loaders.base")


def mapped_qwen3(folder: Path) -> torch.nn.Module:
    """The transformers model of a plain Qwen3 checkpoint, built without storage and given mapped tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= map_safetensors(path)
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    if unexpected or set(missing) - {"lm_head.weight"}:  # tied to the embedding, and excluded from the graph
        raise ValueError(f"{folder} is no plain Qwen3 checkpoint: {[*missing, *unexpected][:3]}")
    return model
