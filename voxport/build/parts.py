"""Every part but the decoder: one Olive run config each, from `user_script.py` to an ONNX graph with its data beside it."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
import torch
from onnx.external_data_helper import ExternalDataInfo, set_external_data

from voxport.build.quiet import quiet
from voxport.errors import WorkError

USER_SCRIPT = Path(__file__).parents[2] / "user_script.py"
OPSET = 17  # the newest that the TorchScript exporter writes without conversion; LayerNormalization is an operator since
TEXT_EMBED, AUDIO_EMBED, AUDIO_HEADS = "text_embed", "audio_embed", "audio_heads"
AUDIO_TOKENIZER, AUDIO_ENCODER = "audio_tokenizer", "audio_encoder"
OLIVE_PARTS = (TEXT_EMBED, AUDIO_EMBED, AUDIO_HEADS, AUDIO_TOKENIZER, AUDIO_ENCODER)
CODEC_PARTS = (AUDIO_TOKENIZER, AUDIO_ENCODER)
WEIGHT_BITS = {"int8": 8, "int4": 4}
WEIGHT_BLOCK = 32  # input channels that share a scale where a head is rounded


@dataclass(frozen=True)
class PartPlan:
    """One Olive part: its name, the precision of its weights (fp32, fp16, int8, int4), and the script that has its module."""

    name: str
    precision: str
    script: Path = USER_SCRIPT

    @property
    def compute_dtype(self) -> str:
        """Dtype that the module is exported in; rounded weights start from float32."""
        return "float16" if self.precision == "fp16" else "float32"


def plan_parts(device: str, precision: str, heads_precision: str | None) -> dict[str, PartPlan]:
    """Precision of each Olive part of a target.

    The codec stays fp32: in half precision Snake's epsilon vanishes. The heads decide eight codebooks at once, so they stay
    unrounded unless asked (4-bit heads were seen to pick another code one time in eight). fp16 on CPU is stored, not computed: only the
    text embedding, a lookup, gains from it.
    """
    wide = "fp16" if device == "cuda" and precision != "fp32" else "fp32"
    lookup = "fp32" if precision == "fp32" else "fp16"
    chosen = {TEXT_EMBED: lookup, AUDIO_EMBED: wide, AUDIO_HEADS: heads_precision or wide}
    return {name: PartPlan(name, chosen.get(name, "fp32")) for name in OLIVE_PARTS}


def olive_config(plan: PartPlan, checkpoint: Path, work: Path) -> dict:
    """Olive run config: load from user_script.py, convert to ONNX, round the weights if the plan says so."""
    external = {"save_as_external_data": True, "all_tensors_to_one_file": True, "size_threshold": 0}
    passes = {
        "conversion": {
            "type": "OnnxConversion",
            "target_opset": OPSET,
            "use_dynamo_exporter": False,
            "torch_dtype": plan.compute_dtype,
            **external,
        }
    }
    if plan.precision in WEIGHT_BITS:
        passes["rounding"] = {
            "type": "OnnxBlockWiseRtnQuantization",
            "bits": WEIGHT_BITS[plan.precision],
            "block_size": WEIGHT_BLOCK,
            **external,
        }
    return {
        "input_model": {
            "type": "PyTorchModel",
            "model_path": str(checkpoint),
            "model_script": str(plan.script),
            "script_dir": str(plan.script.parent),
            "model_loader": f"get_{plan.name}_model",
            "io_config": f"get_{plan.name}_io_config",
            "dummy_inputs_func": f"get_{plan.name}_dummy_inputs",
        },
        "passes": passes,
        "log_severity_level": 3,
        "cache_dir": str(work / "olive_cache"),
        "output_dir": str(work / "olive_out"),
        "no_artifacts": True,
    }


def switch_off_telemetry() -> None:
    """Keep Olive from reporting anything. Its own switch alone still sends one heartbeat with a device id (0.13.0)."""
    os.environ["OLIVE_DISABLE_TELEMETRY"] = "1"
    from olive.telemetry.telemetry import Telemetry

    Telemetry._create_logger = lambda self: None


def run_olive(config: dict) -> Path:
    """Run Olive and return the path of the graph that it made. WorkError carries the last lines of its log."""
    folder = Path(config["output_dir"])
    with quiet("Olive"):
        switch_off_telemetry()
        from olive.workflows import run

        with caught_log() as errors:
            run(config)
    made = sorted(folder.rglob("*.onnx"))
    if errors:  # Olive logs what went wrong and returns as if nothing had
        raise WorkError(f"Olive failed: {type(errors[0]).__name__}: {errors[0]}") from errors[0]
    if len(made) != 1:
        raise WorkError(f"Olive left {len(made)} graphs, one was expected")
    return made[0]


@contextlib.contextmanager
def caught_log() -> Iterator[list[BaseException]]:
    """Keep Olive's log off the screen and collect the exceptions in it."""
    errors: list[BaseException] = []

    def collect(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1] is not None:
            errors.append(record.exc_info[1])
        return False

    handlers = list(logging.getLogger("olive").handlers)
    for handler in handlers:
        handler.addFilter(collect)
    try:
        yield errors
    finally:
        for handler in handlers:
            handler.removeFilter(collect)


@contextlib.contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """Let tools that ask for temporary files get them in `folder`, which is removed with them if this process is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


def build_part(plan: PartPlan, checkpoint: Path, work: Path, out: Path) -> Path:
    """Export one part with Olive and place its graph and data in `out` under their final names. Returns the graph.

    WorkError names the part.
    """
    scratch = work / plan.name
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        made = run_olive(olive_config(plan, checkpoint, scratch))
        return place_graph(made, out, plan.name)
    except WorkError as error:
        raise WorkError(f"{plan.name}: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def load_module(plan: PartPlan, checkpoint: Path) -> torch.nn.Module:
    """The part's PyTorch module as it is exported."""
    return getattr(load_script(plan), f"get_{plan.name}_model")(str(checkpoint)).to(getattr(torch, plan.compute_dtype))


def load_script(plan: PartPlan) -> types.ModuleType:
    """The part's user script, as Olive would load it."""
    spec = importlib.util.spec_from_file_location(plan.script.stem, plan.script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def place_graph(made: Path, out: Path, name: str) -> Path:
    """Write `made` as out/NAME.onnx with all weights in out/NAME.onnx.data, referred to by its bare name."""
    model = onnx.load(made, load_external_data=False)
    graph = out / f"{name}.onnx"
    data = graph.with_name(graph.name + ".data")
    out.mkdir(parents=True, exist_ok=True)
    for path in (graph, data):
        path.unlink(missing_ok=True)
    with open(data, "wb") as file:
        for tensor in model.graph.initializer:
            _move_out(tensor, made.parent, file, data.name)
    onnx.save(model, graph)
    return graph


def _move_out(tensor: onnx.TensorProto, source: Path, file: BinaryIO, location: str) -> None:
    """Append one initialiser's bytes to `file`, aligned as ONNX Runtime likes to map them, and point the tensor there."""
    raw = _raw_bytes(tensor, source)
    file.write(b"\0" * (-file.tell() % 4096 if len(raw) >= 4096 else 0))
    offset = file.tell()
    file.write(raw)
    for kind in ("float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
        tensor.ClearField(kind)
    tensor.raw_data = b""
    set_external_data(tensor, location, offset, len(raw))
    tensor.ClearField("raw_data")


def _raw_bytes(tensor: onnx.TensorProto, source: Path) -> bytes | np.ndarray:
    """An initialiser's bytes; those of an external one stay in their file in `source` until they are written on."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return onnx.numpy_helper.to_array(tensor).tobytes()
    info = ExternalDataInfo(tensor)
    return np.memmap(source / info.location, np.uint8, "r", offset=info.offset or 0, shape=(info.length,)) if info.length else b""
