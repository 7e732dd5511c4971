"""The language model's dims in PyTorch, one frame at a time with a pre-allocated cache: what ONNX is compared with in speed.

Weights are random and laid out as the model has them: every frame reads all of them, as it would of the real ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from voxport.manifest import Audio, Dims


@dataclass
class Layer:
    """Weights of one layer and its cache [2, H, C, head_dim]."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    norms: Tensor
    cache: Tensor


class TorchBody:
    """Body and heads for one utterance."""

    def __init__(self, dims: Dims, audio: Audio, dtype: torch.dtype, capacity: int):
        self.dims, self.dtype = dims, dtype
        width, inner = dims.hidden_size, dims.num_heads * dims.head_dim
        kv = dims.num_kv_heads * dims.head_dim
        self.block = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).to(dtype)
        self.layers = [
            Layer(
                self.fill(inner + 2 * kv, width),
                self.fill(width, inner),
                self.fill(2 * dims.intermediate_size, width),
                self.fill(width, dims.intermediate_size),
                torch.ones(2, width, dtype=dtype),
                torch.zeros(2, dims.num_kv_heads, capacity, dims.head_dim, dtype=dtype),
            )
            for _ in range(dims.num_layers)
        ]
        self.heads = self.fill(audio.num_codebooks * audio.vocab_size, width)

    def fill(self, rows: int, columns: int) -> Tensor:
        """A matrix made of one random block over and over: random numbers for billions of weights would take minutes."""
        size = rows * columns
        return (self.block.repeat(-(-size // len(self.block)))[:size] / columns**0.5).reshape(rows, columns)

    @torch.inference_mode()
    def frame(self, x: Tensor, position: int) -> Tensor:
        """Hidden [1, D] in, logits [1, N * V] out, at `position` of the cache."""
        for layer in self.layers:
            x = x + self.attend(F.rms_norm(x, x.shape[-1:], layer.norms[0]), layer, position)
            gate, up = F.linear(F.rms_norm(x, x.shape[-1:], layer.norms[1]), layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return F.linear(x, self.heads)

    def attend(self, x: Tensor, layer: Layer, position: int) -> Tensor:
        """[1, D] -> [1, D]. Rotary positions are left out: they cost next to nothing, and speed is all that is asked here."""
        dims = self.dims
        queries, keys, values = F.linear(x, layer.qkv).split(
            [n * dims.head_dim for n in (dims.num_heads, dims.num_kv_heads, dims.num_kv_heads)], -1
        )
        layer.cache[0, :, position] = keys.reshape(dims.num_kv_heads, dims.head_dim)
        layer.cache[1, :, position] = values.reshape(dims.num_kv_heads, dims.head_dim)
        past = layer.cache[:, None, :, : position + 1]
        heads = F.scaled_dot_product_attention(queries.reshape(1, dims.num_heads, 1, dims.head_dim), *past, enable_gqa=True)
        return F.linear(heads.reshape(1, -1), layer.out)
