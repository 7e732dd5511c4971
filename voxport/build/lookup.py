"""A lookup table as an ONNX graph, written without ever holding the table: rows stream from the checkpoint to the data file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnx.external_data_helper import set_external_data
from torch import Tensor

from voxport.build.mapped import read_tensor, tensor_shape
from voxport.build.parts import OPSET
from voxport.progress import bar

CHUNK_ROWS = 4096  # of 2560 channels: 40 MB in float32
IR_VERSION = 8  # that of the opset
DTYPES = {"fp32": np.float32, "fp16": np.float16}


def table_rows(path: Path, name: str, chunk_rows: int = CHUNK_ROWS) -> Iterator[Tensor]:
    """A matrix of a safetensors file, `chunk_rows` rows at a time."""
    for start in range(0, tensor_shape(path, name)[0], chunk_rows):
        yield read_tensor(path, name, slice(start, start + chunk_rows))


def write_lookup(graph: Path, shape: tuple[int, int], rows: Iterator[Tensor], precision: str) -> Path:
    """input_ids [B, S] int64 -> inputs_embeds [B, S, D]: one Gather from a table [V, D], whose `rows` go to GRAPH.data."""
    data, dtype = graph.with_name(graph.name + ".data"), DTYPES[precision]
    with open(data, "wb") as file, bar(shape[0], graph.stem, "row") as progress:
        for chunk in rows:
            file.write(chunk.float().numpy().astype(dtype).tobytes())
            progress.update(len(chunk))
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    table = TensorProto(name="weight", data_type=kind, dims=shape, raw_data=b"")
    set_external_data(table, data.name, 0, data.stat().st_size)
    table.ClearField("raw_data")
    axes = ["batch", "sequence"]
    made = helper.make_graph(
        [helper.make_node("Gather", ["weight", "input_ids"], ["inputs_embeds"])],
        graph.stem,
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, axes)],
        [helper.make_tensor_value_info("inputs_embeds", kind, [*axes, shape[1]])],
        [table],
    )
    opsets = [helper.make_opsetid("", OPSET)]
    onnx.save(helper.make_model(made, producer_name="voxport", opset_imports=opsets, ir_version=IR_VERSION), graph)
    return graph
