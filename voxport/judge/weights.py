"""The weights that a decoder graph computes with, read back from the graph itself, under their checkpoint names.

`_ref` run on them tells a kernel's error from the loss of rounding. Names in the graph are ModelBuilder's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx.external_data_helper import ExternalDataInfo

from _ref.higgs import FINAL_NORM, LAYER
from voxport.build.quantise import BlockFormat, QuantisedMatrix, dequantise, pack
from voxport.errors import UserError
from voxport.files import check_plain_name

PROJECTION = re.compile(r"model\.layers\.(\d+)\.(attn|mlp)\.(\w+)_proj\.")
NORM = re.compile(
    r"model\.layers\.(\d+)\.(?:attn\.)?"
    r"(input_layernorm|post_attention_layernorm|[qk]_norm(?=\.layernorm)|final_norm(?=_layernorm))(?:[._]layernorm)?\.weight"
)
GROUPS = {"attn": "self_attn", "mlp": "mlp"}


@dataclass(frozen=True)
class Matrix:
    """Rows [first, last) of one MatMul or MatMulNBits node; a packed node holds several matrices."""

    node: onnx.NodeProto
    first: int
    last: int


@dataclass(frozen=True)
class Storage:
    """Bits a weight, and the scales [outputs, blocks] of a rounded matrix (None where it is stored as floats)."""

    bits: int
    scales: torch.Tensor | None


def decoder_weights(graph: Path, layer: str = LAYER, final_norm: str = FINAL_NORM) -> GraphWeights:
    """Open a decoder graph: checkpoint name -> float32 tensor, read (and dequantised) at each access.

    Handles plain matrices in float32 and float16, and MatMulNBits of 4 and 8 bits with or without zero points. `layer` is what
    the names of layer {} begin with in the checkpoint.
    """
    return GraphWeights(Path(graph), onnx.load(graph, load_external_data=False).graph, layer, final_norm)


@dataclass(frozen=True, eq=False)
class GraphWeights(Mapping):
    """Mapping of checkpoint names to float32 tensors in the checkpoint's layout, [outputs, inputs]."""

    path: Path
    graph: onnx.GraphProto
    layer: str = LAYER
    final_norm: str = FINAL_NORM

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._norms:
            return torch.from_numpy(self._read(self._norms[name]).astype(np.float32))
        return self._weight(self._matrices[name])

    def _weight(self, matrix: Matrix) -> torch.Tensor:
        if matrix.node.op_type == "MatMul":
            columns = self._read(matrix.node.input[1])[:, matrix.first : matrix.last]
            return torch.from_numpy(np.ascontiguousarray(columns.T, dtype=np.float32))
        return self._dequantised(matrix)

    def __iter__(self) -> Iterator[str]:
        return iter([*self._matrices, *self._norms])

    def __len__(self) -> int:
        return len(self._matrices) + len(self._norms)

    def form(self, name: str) -> Storage:
        """How a tensor is stored."""
        matrix = self._matrices.get(name)
        if matrix is None or matrix.node.op_type == "MatMul":
            tensor = self._tensors[self._norms[name] if matrix is None else matrix.node.input[1]]
            return Storage(8 * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize, None)
        return Storage(attributes(matrix.node)["bits"], self._rows(matrix, 2).float())

    def bytes_of(self, name: str) -> int:
        """Bytes that a tensor takes in the graph, scales and zero points included."""
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._read(self._norms[name]).nbytes
        inputs = [n for n in matrix.node.input[1:] if n in self._tensors]
        total = self._read(inputs[0]).nbytes if matrix.node.op_type == "MatMul" else sum(self._read(n).nbytes for n in inputs)
        return total * (matrix.last - matrix.first) // self._outputs(matrix.node)

    def _rows(self, matrix: Matrix, place: int) -> torch.Tensor:
        """The matrix's rows of one input of its node, [rows, ...]."""
        data = self._read(matrix.node.input[place]).reshape(self._outputs(matrix.node), -1)
        return torch.from_numpy(data[matrix.first : matrix.last].copy())

    def _dequantised(self, matrix: Matrix) -> torch.Tensor:
        node, figures = matrix.node, attributes(matrix.node)
        form = BlockFormat(figures["bits"], figures["block_size"])
        blocks = -(-figures["K"] // form.block_size)
        scales = self._rows(matrix, 2).float()
        if len(node.input) > 3 and node.input[3]:
            zeros = self._rows(matrix, 3)
        else:  # the kernel's default: the middle code
            zeros = pack(torch.full((len(scales), blocks), 1 << (form.bits - 1), dtype=torch.uint8), form.bits)
        return dequantise(QuantisedMatrix(self._rows(matrix, 1), scales, zeros), form)[:, : figures["K"]]

    @functools.cached_property
    def _tensors(self) -> dict[str, onnx.TensorProto]:
        return {tensor.name: tensor for tensor in self.graph.initializer}

    @functools.cached_property
    def _norms(self) -> dict[str, str]:
        return {self._norm_name(*match.groups()): name for name in self._tensors if (match := NORM.fullmatch(name))}

    @functools.cached_property
    def _matrices(self) -> dict[str, Matrix]:
        made = {}
        for node in self.graph.node:
            match = PROJECTION.match(node.input[1]) if node.op_type in ("MatMul", "MatMulNBits") else None
            if match:
                layer, group, name = match.groups()
                prefix = self.layer.format(layer) + GROUPS[group]
                made |= {f"{prefix}.{part}_proj.weight": matrix for part, matrix in self._unpack(node, name).items()}
        if not made:
            raise UserError(f"{self.path} has no projection named as ModelBuilder names them; is it a decoder?")
        return made

    def _norm_name(self, layer: str, kind: str) -> str:
        """Checkpoint name of a norm; ModelBuilder counts the final one as that of a further layer."""
        if kind == "final_norm":
            return self.final_norm
        return self.layer.format(layer) + ("self_attn." if kind in ("q_norm", "k_norm") else "") + f"{kind}.weight"

    def _unpack(self, node: onnx.NodeProto, name: str) -> dict[str, Matrix]:
        """The matrices of one node; `qkv` packs queries, keys and values in the proportions of their heads."""
        outputs = self._outputs(node)
        if name != "qkv":
            return {name: Matrix(node, 0, outputs)}
        attention = next(attributes(n) for n in self.graph.node if n.op_type == "GroupQueryAttention")
        heads, kv_heads = attention["num_heads"], attention["kv_num_heads"]
        head_dim = outputs // (heads + 2 * kv_heads)
        q, k = heads * head_dim, (heads + kv_heads) * head_dim
        return {"q": Matrix(node, 0, q), "k": Matrix(node, q, k), "v": Matrix(node, k, outputs)}

    def _outputs(self, node: onnx.NodeProto) -> int:
        return attributes(node)["N"] if node.op_type == "MatMulNBits" else self._tensors[node.input[1]].dims[1]

    def _read(self, name: str) -> np.ndarray:
        """One initialiser, mapped from its file where it is external."""
        tensor = self._tensors[name]
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            return onnx.numpy_helper.to_array(tensor)
        info = ExternalDataInfo(tensor)
        data = self.path.with_name(check_plain_name(info.location, str(self.path)))
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        return np.memmap(data, dtype, "r", offset=info.offset or 0, shape=tuple(tensor.dims))


def attributes(node: onnx.NodeProto) -> dict:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
