"""The matrices of a residual decoder's graph under the names of the tensors that they were made from.

The exporter gives transposed weights numbers for names. So each matrix is matched with the tensor of its shape that is nearest to
it: rounding moves it a little, another tensor is far away, and a damaged one is still nearer to its source than to any other.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import torch
from torch import Tensor

from _ref import omnifish as ref
from voxport.build.omnifish_checkpoint import OmniFishCheckpoint
from voxport.judge.weights import GraphWeights, Matrix
from voxport.manifest_omnifish import MTP_LAYERS

HEADS = f"{ref.RESIDUAL_PREFIX}heads"  # of all levels, which the graph holds as one matrix


@dataclass(frozen=True, eq=False)
class MatchedWeights(GraphWeights):
    """Source name -> float32 tensor [outputs, inputs], read and dequantised at each access."""

    sources: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def open(cls, graph: Path, part: str, checkpoint: OmniFishCheckpoint) -> MatchedWeights:
        """The matrices of a residual part."""
        return cls(graph, onnx.load(graph, load_external_data=False).graph, sources=residual_sources(part, checkpoint))

    def split(self) -> dict[str, Tensor]:
        """All of them by checkpoint name, the heads one by one."""
        made = {name: self[name] for name in self}
        heads = made.pop(HEADS, None)
        if heads is not None:
            made |= {f"{HEADS}.{j}.weight": part for j, part in enumerate(heads.split(ref.CODEBOOK_SIZES[1:]))}
        return made

    @functools.cached_property
    def _norms(self) -> dict[str, str]:
        return {}

    @functools.cached_property
    def _matrices(self) -> dict[str, Matrix]:
        made: dict[str, Matrix] = {}
        for node in self.graph.node:
            if node.op_type == "MatMulNBits" or node.op_type == "MatMul" and node.input[1] in self._tensors:
                matrix = Matrix(node, 0, self._outputs(node))
                made[self._nearest(self._weight(matrix), made)] = matrix
        return made

    def _nearest(self, weight: Tensor, taken: Mapping) -> str:
        alike = {name: tensor for name, tensor in self.sources.items() if tensor.shape == weight.shape and name not in taken}
        if not alike:
            return f"no tensor of shape {list(weight.shape)}"
        return min(alike, key=lambda name: float((weight - alike[name].float()).norm()))


def residual_sources(part: str, checkpoint: OmniFishCheckpoint) -> dict[str, Tensor]:
    """The matrices that a part may be made of, as stored."""
    prefix = f"{ref.RESIDUAL_PREFIX}layers.{MTP_LAYERS.index(part)}." if part in MTP_LAYERS else ref.RESIDUAL_PREFIX
    tables = ("emb.weight", "embedding.weight", "revealed.weight")
    found = {name: tensor for name, tensor in checkpoint.items() if name.startswith(prefix) and tensor.ndim == 2}
    heads = [name for name in found if name.startswith(f"{HEADS}.")]
    joined = {HEADS: torch.cat([found[f"{HEADS}.{j}.weight"] for j in range(len(heads))])} if heads else {}
    return {name: tensor for name, tensor in found.items() if name not in heads and not name.endswith(tables)} | joined
