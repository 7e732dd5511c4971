"""Export a large module without holding its weights several times over.

A tracing exporter copies every weight into its graph, then into a message, then into bytes. So the module is traced with *hollow*
weights, which have a shape and no storage, and are left out of the graph; the real ones go straight to the data file.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from onnx.external_data_helper import set_external_data
from torch import Tensor, nn

from voxport.build.quiet import quiet

ALIGNMENT = 4096  # of a tensor in the data file, as ONNX Runtime likes to map them


def export_hollow(module: nn.Module, inputs: tuple[Tensor, ...], io: Mapping, opset: int, graph: Path) -> Path:
    """Write a module with float32 parameters as `graph`, its weights in the data file beside it. The module is left hollow.

    `io` has `input_names`, `output_names` and `dynamic_axes`. Returns the graph; WorkError if the exporter fails.
    """
    weights = hollow(module)
    graph.parent.mkdir(parents=True, exist_ok=True)
    with quiet("torch.onnx"), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of traced branches: the part is run at other lengths before it is used
        # Folding constants would give a weight that was computed with a name that nobody knows.
        options = {"export_params": False, "do_constant_folding": False, "opset_version": opset, "dynamo": False}
        torch.onnx.export(module, inputs, graph, **options, **io)
    model = onnx.load(graph)
    fill(model, weights, graph.with_name(graph.name + ".data"))
    onnx.save(model, graph)
    return graph


def hollow(module: nn.Module) -> dict[str, Tensor]:
    """Give every parameter of a module one number for storage. Returns what they held, by name."""
    weights = {}
    for prefix, part in module.named_modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            weights[f"{prefix}.{name}".lstrip(".")] = parameter.data
            number = torch.tensor(float(len(weights)))  # of its own: the exporter makes one of two weights that are equal
            part._parameters[name] = nn.Parameter(number.expand(parameter.shape), requires_grad=False)
    return weights


def fill(model: onnx.ModelProto, weights: Mapping[str, Tensor], data: Path) -> None:
    """Make initialisers of the inputs that are named like weights, written to `data` one after the other.

    A transposition of a weight is done here, so that a matrix product finds its right side stored as it is used.
    """
    folded = fold_transpositions(model, weights)
    used = {name for node in model.graph.node for name in node.input}
    for value in [value for value in model.graph.input if value.name in weights]:
        model.graph.input.remove(value)
    with open(data, "wb") as file:
        for name, (source, order) in (folded | {name: (name, None) for name in weights if name in used}).items():
            array = weights[source].permute(order).contiguous().numpy() if order else weights[source].contiguous().numpy()
            file.write(b"\0" * (-file.tell() % ALIGNMENT))
            model.graph.initializer.append(external(name, array, data.name, file.tell()))
            file.write(array.data)


def fold_transpositions(model: onnx.ModelProto, weights: Mapping[str, Tensor]) -> dict[str, tuple[str, list[int]]]:
    """Remove every Transpose of a weight; its output -> the weight and the order of axes."""
    folded = {}
    for node in [node for node in model.graph.node if node.op_type == "Transpose" and node.input[0] in weights]:
        folded[node.output[0]] = (node.input[0], list(node.attribute[0].ints))
        model.graph.node.remove(node)
    return folded


def external(name: str, array: np.ndarray, location: str, offset: int) -> TensorProto:
    """An initialiser whose values lie in a data file."""
    tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(array.dtype), dims=array.shape, raw_data=b"")
    set_external_data(tensor, location, offset, array.nbytes)
    tensor.ClearField("raw_data")
    return tensor
