"""The arithmetic that every model with a Qwen3 body shares, in plain PyTorch and float32.

Shapes: H heads, S sequence, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

ROPE_THETA = 1_000_000.0  # what a checkpoint means that names none (its training config)


class Rotary(Protocol):
    """What a rotary table depends on."""

    head_dim: int
    rope_theta: float


class Body(Rotary, Protocol):
    """What the shapes of a layer depend on."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int


def layer_shapes(config: Body) -> dict[str, tuple[int, ...]]:
    """Name within its layer, and shape, of every tensor of a layer."""
    d, ffn, hd = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * hd, config.num_kv_heads * hd
    shapes = {
        "input_layernorm": (d,), "post_attention_layernorm": (d,),
        "self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d), "self_attn.o_proj": (d, q),
        "self_attn.q_norm": (hd,), "self_attn.k_norm": (hd,),
        "mlp.gate_proj": (ffn, d), "mlp.up_proj": (ffn, d), "mlp.down_proj": (d, ffn),
    }  # fmt: skip
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def rope_theta(text_config: Mapping) -> float:
    """Base of the rotary angles: the flat key, else the nested one, else 1e6. A null flat key means 'not said'."""
    nested = text_config.get("rope_parameters") or {}
    if nested.get("rope_type", "default") != "default":
        raise ValueError(f"rope_parameters.rope_type is {nested['rope_type']!r}, not 'default'")
    for theta in (text_config.get("rope_theta"), nested.get("rope_theta")):
        if theta is not None:
            return float(theta)
    return ROPE_THETA


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope_table(config: Rotary, positions: Tensor, bf16: bool) -> tuple[Tensor, Tensor]:
    """cos and sin [S, head_dim / 2] in float32; rounded to bf16 values if `bf16`, as in the published engine."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = positions.float()[:, None] * (1.0 / config.rope_theta**exponents)
    cos, sin = angles.cos(), angles.sin()
    return (cos.bfloat16().float(), sin.bfloat16().float()) if bf16 else (cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [H, S, head_dim], halves paired (not interleaved)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def feed_forward(x: Tensor, w: Mapping[str, Tensor]) -> Tensor:
    """Gated SiLU network, [S, D] -> [S, D]."""
    gate = F.silu(x @ w["mlp.gate_proj.weight"].t())
    return (gate * (x @ w["mlp.up_proj.weight"].t())) @ w["mlp.down_proj.weight"].t()
