"""Blockwise 4- and 8-bit rounding of weight matrices, one tensor at a time, and its inverse.

Layout (Olive's): `qweight` [O, I * bits / 8] uint8, low bits first; `scales` [O, I / block] float32; `qzeros`
[O, ceil(I / block * bits / 8)] uint8, packed likewise. A weight is (q - zero) * scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class BlockFormat:
    """`bits` a weight, `block_size` input channels that share a scale, and the kernel's accuracy level.

    Accuracy level 4 lets the CPU kernel round activations to int8 by block, which is what makes it fast.
    """

    bits: int = 4
    block_size: int = 32
    symmetric: bool = True
    accuracy_level: int = 4


@dataclass(frozen=True)
class QuantisedMatrix:
    """One rounded weight matrix in the layout above."""

    qweight: Tensor
    scales: Tensor
    qzeros: Tensor


def quantise(weight: Tensor, form: BlockFormat) -> QuantisedMatrix:
    """Round weight [O, I] to nearest. ValueError if I is not a multiple of the block."""
    outputs, inputs = weight.shape
    if inputs % form.block_size:
        raise ValueError(f"{inputs} input channels are not a multiple of the block size {form.block_size}")
    blocks = weight.float().view(outputs, -1, form.block_size)
    scales, zeros = symmetric_range(blocks, form.bits) if form.symmetric else asymmetric_range(blocks, form.bits)
    inverse = torch.where(scales == 0, 0.0, 1.0 / scales)
    q = torch.round(blocks * inverse[..., None] + zeros[..., None]).clamp_(0, 2**form.bits - 1).to(torch.uint8)
    return QuantisedMatrix(pack(q.view(outputs, inputs), form.bits), scales, pack(zeros.to(torch.uint8), form.bits))


def symmetric_range(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scales and zeros [O, blocks]: the entry of largest magnitude maps to the lowest code, the zero is the middle one.

    The convention of ONNX Runtime's MatMulNBits quantiser, which uses all 2**bits codes.
    """
    middle = 2 ** (bits - 1)
    extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))[..., 0]
    return extreme / -middle, torch.full_like(extreme, middle)


def asymmetric_range(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scales and zeros [O, blocks] of the range that spans the block and zero."""
    top = 2**bits - 1
    low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
    scales = (high - low) / top
    zeros = torch.where(scales == 0, torch.zeros_like(low), torch.round(-low / scales)).clamp_(0, top)
    return scales, zeros


def dequantise(matrix: QuantisedMatrix, form: BlockFormat) -> Tensor:
    """The weights that the kernel computes with, [O, I] float32."""
    outputs, blocks = matrix.scales.shape
    q = unpack(matrix.qweight, form.bits).view(outputs, blocks, form.block_size).float()
    zeros = unpack(matrix.qzeros, form.bits)[:, :blocks].float()
    return ((q - zeros[..., None]) * matrix.scales.float()[..., None]).view(outputs, -1)


def pack(codes: Tensor, bits: int) -> Tensor:
    """codes [O, K] uint8 -> [O, ceil(K * bits / 8)]: two 4-bit codes a byte, the first in the low half."""
    if bits == 8:
        return codes
    codes = F.pad(codes, (0, codes.shape[-1] % 2))
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Inverse of `pack`; an odd count comes back with one surplus code."""
    if bits == 8:
        return packed
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
