"""The parts of an OmniFish build: which there are and in which precision, and how one is rounded after its export.

Olive exports every part in float32, which is compared with `_ref` as it is; only then are weights rounded. So a rounded part is
held to the float32 graph with the weights that it holds, and no tolerance has to excuse two kinds of error at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import ExternalDataInfo

from _ref import omnifish as ref
from _ref.fish_codec import FishCodec
from voxport.build.hollow import export_hollow
from voxport.build.omnifish_checkpoint import DECODE_ONLY, ENCODE_ONLY, OmniFishCheckpoint
from voxport.build.parts import OPSET, PartPlan, build_part, load_module, load_script, place_graph
from voxport.build.quantise import BlockFormat, QuantisedMatrix, dequantise, quantise
from voxport.errors import WorkError
from voxport.manifest_omnifish import (
    AUDIO_EMBED,
    BODY,
    CODEC_DECODER,
    CODEC_ENCODER,
    MTP_LAYERS,
    MTP_PRIME,
    MTP_STEP,
    SEMANTIC_HEAD,
    TEXT_EMBED,
)

SCRIPT = Path(__file__).parents[2] / "user_script_omnifish.py"
CODEC_VARIABLE = "VOXPORT_FISH_CODEC"  # SCRIPT reads it; empty means the usual places
HOLLOW_WEIGHTS = 1 << 26  # Olive holds a module's weights some four times over: of one of this size more than 1 GB
TABLES = (TEXT_EMBED, AUDIO_EMBED)
RESIDUAL_PARTS = (MTP_PRIME, MTP_STEP, *MTP_LAYERS)
CODEC_PARTS = (CODEC_DECODER, CODEC_ENCODER)
COMPONENTS = (BODY, *TABLES, SEMANTIC_HEAD, *RESIDUAL_PARTS, *CODEC_PARTS)  # of both kinds of residual decoder


def part_names(checkpoint: OmniFishCheckpoint) -> tuple[str, ...]:
    """The parts that this checkpoint's kind of residual decoder needs."""
    residual = (MTP_PRIME, MTP_STEP) if checkpoint.is_axial else MTP_LAYERS
    return (BODY, *TABLES, SEMANTIC_HEAD, *residual, *CODEC_PARTS)


def part_precision(name: str, precision: str) -> str:
    """Precision of a part's weights in a build of `precision`; all but the decoder compute in float32.

    The codec stays fp32: in half precision Snake's epsilon vanishes. So does the semantic head, which decides where speech ends.
    """
    if precision == "fp32" or name in (SEMANTIC_HEAD, *CODEC_PARTS):
        return "fp32"
    if name in TABLES:
        return "fp16"
    return precision if name == BODY or precision == "int4" else "fp32"


def export_part(name: str, checkpoint: OmniFishCheckpoint, work: Path, out: Path) -> Path:
    """Export one part in float32, with Olive unless that would hold too many weights at once. Returns the graph."""
    os.environ[CODEC_VARIABLE] = str(checkpoint.codec_folder or "")
    plan = PartPlan(name, "fp32", SCRIPT)
    if count_weights(name, checkpoint) < HOLLOW_WEIGHTS:
        return build_part(plan, checkpoint.folder, work, out)
    script, model = load_script(plan), SimpleNamespace(model_path=str(checkpoint.folder))
    inputs, io = getattr(script, f"get_{name}_dummy_inputs")(model), getattr(script, f"get_{name}_io_config")(model)
    inputs = tuple(inputs.values()) if isinstance(inputs, dict) else inputs
    return export_hollow(load_module(plan, checkpoint.folder), inputs, io, OPSET, out / f"{name}.onnx")


def count_weights(name: str, checkpoint: OmniFishCheckpoint) -> int:
    """Weights of a part, give or take what both sides of the codec share."""
    if name in CODEC_PARTS:
        with torch.device("meta"):
            state = FishCodec(checkpoint.codec_config(), max_frames=1).state_dict()
        return sum(t.numel() for n, t in state.items() if n.startswith(DECODE_ONLY if name == CODEC_DECODER else ENCODE_ONLY))
    prefix = {BODY: "llm.layers.", TEXT_EMBED: ref.TEXT_EMBEDDING, AUDIO_EMBED: ref.AUDIO_EMBEDDING}
    prefix |= {SEMANTIC_HEAD: ref.SEMANTIC_HEAD}
    names = prefix.get(name, f"mtp.layers.{MTP_LAYERS.index(name)}." if name in MTP_LAYERS else ref.RESIDUAL_PREFIX)
    return sum(tensor.numel() for n, tensor in checkpoint.items() if n.startswith(names))


def round_part(graph: Path, out: Path, precision: str, form: BlockFormat) -> Path:
    """Write a float32 part into `out` with its weights in `precision`. Returns the graph."""
    model = onnx.load(graph, load_external_data=False)
    if precision == "fp16":
        store_table(model, graph.parent)
    elif precision == "int4":
        round_matrices(model, graph.parent, form)
    keep_shapes_inside(model, graph.parent)
    edited = graph.with_name("edited.onnx")
    onnx.save(model, edited)
    try:
        return place_graph(edited, out, graph.stem)
    finally:
        edited.unlink()


def keep_shapes_inside(model: onnx.ModelProto, folder: Path) -> None:
    """Make constants of stored integers: ONNX Runtime infers shapes from them, and does not look for them in a data file."""
    integers = [tensor for tensor in model.graph.initializer if tensor.data_type == TensorProto.INT64]
    for tensor in integers:
        value = numpy_helper.from_array(np.array(read_array(tensor, folder)))
        model.graph.initializer.remove(tensor)
        model.graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=value))


def store_table(model: onnx.ModelProto, folder: Path) -> None:
    """Keep the largest lookup table in fp16, and widen only the rows that were looked up."""
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    lookups = [node for node in model.graph.node if node.op_type == "Gather" and node.input[0] in stored]
    if not lookups:
        raise WorkError("no lookup table found that could be stored in fp16")
    node = max(lookups, key=lambda lookup: np.prod(stored[lookup.input[0]].dims))
    table, result = stored[node.input[0]], node.output[0]
    table.CopyFrom(numpy_helper.from_array(read_array(table, folder).astype(np.float16), table.name))
    node.output[0] = f"{result}_fp16"
    cast = helper.make_node("Cast", [node.output[0]], [result], to=TensorProto.FLOAT)
    model.graph.node.insert(list(model.graph.node).index(node) + 1, cast)


def round_matrices(model: onnx.ModelProto, folder: Path, form: BlockFormat) -> None:
    """Replace every product with a stored matrix by MatMulNBits."""
    for node, stored in matrix_products(model):
        matrix = quantise(padded(read_array(stored, folder), form), form)
        outputs, blocks = matrix.scales.shape
        arrays = {"q": matrix.qweight.view(outputs, blocks, -1), "scales": matrix.scales.flatten()}
        if not form.symmetric:
            arrays["zeros"] = matrix.qzeros.flatten()
        names = {kind: f"{stored.name}_{kind}" for kind in arrays}
        product = helper.make_node(
            "MatMulNBits", [node.input[0], *names.values()], list(node.output), node.name, domain="com.microsoft",
            K=stored.dims[0], N=outputs, bits=form.bits, block_size=form.block_size, accuracy_level=form.accuracy_level,
        )  # fmt: skip
        node.CopyFrom(product)
        model.graph.initializer.remove(stored)
        model.graph.initializer.extend(numpy_helper.from_array(array.numpy(), names[kind]) for kind, array in arrays.items())
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def matrix_products(model: onnx.ModelProto) -> Iterator[tuple[onnx.NodeProto, TensorProto]]:
    """Every MatMul with a stored right side [I, O], and that."""
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    users = [name for node in model.graph.node for name in node.input]
    for node in list(model.graph.node):
        if node.op_type == "MatMul" and node.input[1] in stored:
            if users.count(node.input[1]) > 1:
                raise WorkError(f"the matrix {node.input[1]} has several users; it cannot be rounded in place")
            yield node, stored[node.input[1]]


def padded(weight: np.ndarray, form: BlockFormat) -> torch.Tensor:
    """A stored matrix [I, O] as [O, I] with whole blocks; the kernel reads I of them only."""
    return torch.from_numpy(np.pad(weight.T, ((0, 0), (0, -len(weight) % form.block_size))))


def with_rounded_weights(graph: Path, form: BlockFormat) -> bytes:
    """A float32 part that computes with the weights that `round_matrices` leaves of its own."""
    model = onnx.load(graph, load_external_data=False)
    for _, stored in matrix_products(model):
        weight = padded(read_array(stored, graph.parent), form)
        rounded: QuantisedMatrix = quantise(weight, form)
        values = dequantise(rounded, form)[:, : stored.dims[0]].t().contiguous().numpy()
        stored.CopyFrom(numpy_helper.from_array(values, stored.name))
    return model.SerializeToString()


def read_array(tensor: TensorProto, folder: Path) -> np.ndarray:
    """An initialiser's values; external ones are mapped from their file in `folder`."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return numpy_helper.to_array(tensor)
    info = ExternalDataInfo(tensor)
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.memmap(folder / info.location, dtype, "r", offset=info.offset or 0, shape=tuple(tensor.dims))
