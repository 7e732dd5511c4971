"""Blockwise 4- and 8-bit rounding of weight matrices, one tensor at a time, and its inverse.

Layout (Olive's): `qweight` [O, I * bits / 8] uint8, low bits first; `scales` [O, I / block] float32; `qzeros`
[O, ceil(I / block * bits / 8)] uint8, packed likewise. A weight is (q - zero) * scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_WEIGHTS = 1 << 19  # rounded together: 2 MB of float32, so that the passes over them stay in a core's cache
# Ranges that the scale search tries, as shares of the block's own. Clipping the largest weight pays as far as the rest gains;
# below 0.8 no block of normal weights gained any more.
SEARCH_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)


@dataclass(frozen=True)
class BlockFormat:
    """`bits` a weight, `block_size` input channels that share a scale, and the kernel's accuracy level.

    Accuracy level 4 lets the CPU kernel round activations to int8 by block, which is what makes it fast. `search` looks for the
    scale and zero of least squared error in each block; `wide` names projections that get 8 bits whatever `bits` is.
    """

    bits: int = 4
    block_size: int = 32
    symmetric: bool = True
    accuracy_level: int = 4
    search: bool = False
    wide: tuple[str, ...] = ()

    def of(self, name: str) -> BlockFormat:
        """The format of one tensor, by its name in any spelling."""
        projection = name.removesuffix(".").removesuffix(".weight").rsplit(".", 1)[-1]
        return replace(self, bits=8, wide=()) if projection in self.wide else self

    def record(self) -> dict:
        """As JSON gives it back."""
        return asdict(self) | {"wide": list(self.wide)}


@dataclass(frozen=True)
class QuantisedMatrix:
    """One rounded weight matrix in the layout above."""

    qweight: Tensor
    scales: Tensor
    qzeros: Tensor


def quantise(weight: Tensor, form: BlockFormat) -> QuantisedMatrix:
    """Round weight [O, I], some rows at a time. ValueError if I is not a multiple of the block."""
    outputs, inputs = weight.shape
    if inputs % form.block_size:
        raise ValueError(f"{inputs} input channels are not a multiple of the block size {form.block_size}")
    blocks = inputs // form.block_size
    qweight = torch.empty(outputs, inputs * form.bits // 8, dtype=torch.uint8)
    scales = torch.empty(outputs, blocks)
    qzeros = torch.empty(outputs, -(-blocks * form.bits // 8), dtype=torch.uint8)
    rows = max(1, CHUNK_WEIGHTS // inputs)

    def fill(start: int) -> None:
        chunk = slice(start, start + rows)
        qweight[chunk], scales[chunk], qzeros[chunk] = _quantise_rows(weight[chunk], form)

    share_out(fill, range(0, outputs, rows))
    return QuantisedMatrix(qweight, scales, qzeros)


def share_out(work: Callable[[int], None], items: Iterable[int]) -> None:
    """Call `work` on each item, one thread a core.

    torch's own threads wait for each other after every operation, which on a busy machine takes longer than the operation.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(work, items):
                pass
    finally:
        torch.set_num_threads(threads)


def _quantise_rows(weight: Tensor, form: BlockFormat) -> tuple[Tensor, Tensor, Tensor]:
    blocks = weight.to(torch.float32, copy=True).view(len(weight), -1, form.block_size)
    steps, zeros = symmetric_range(blocks, form.bits) if form.symmetric else asymmetric_range(blocks, form.bits)
    scales = steps
    if form.search:
        steps, scales, zeros = search_range(blocks, steps, zeros, form)
    codes = encode(blocks, steps, zeros, form.bits).to(torch.uint8)
    return pack(codes.view(len(weight), -1), form.bits), scales, pack(zeros.to(torch.uint8), form.bits)


def encode(blocks: Tensor, steps: Tensor, zeros: Tensor, bits: int, out: Tensor | None = None) -> Tensor:
    """Codes of blocks [O, blocks, block] as floats, into `out` (default: in place of `blocks`).

    Halves go up, as in the stock quantiser; torch.round would send them to the even code.
    """
    inverse = torch.where(steps == 0, 0.0, 1.0 / steps)
    codes = torch.mul(blocks, inverse[..., None], out=blocks if out is None else out)
    return codes.add_(zeros[..., None]).add_(0.5).floor_().clamp_(0, 2**bits - 1)


def symmetric_range(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scales and zeros [O, blocks]: the entry of largest magnitude maps to the lowest code, the zero is the middle one.

    The convention of ONNX Runtime's MatMulNBits quantiser, which uses all 2**bits codes; of two entries that differ in sign
    only, the negative one counts.
    """
    middle = 2 ** (bits - 1)
    low, high = blocks.amin(-1), blocks.amax(-1)
    extreme = torch.where(high > -low, high, low)
    return extreme / -middle, torch.full_like(extreme, middle)


def asymmetric_range(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scales and zeros [O, blocks] of the range that spans the block and zero."""
    top = 2**bits - 1
    low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
    scales = (high - low) / top
    zeros = torch.where(scales == 0, torch.zeros_like(low), torch.round(-low / scales)).clamp_(0, top)
    return scales, zeros


def search_range(blocks: Tensor, steps: Tensor, zeros: Tensor, form: BlockFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Steps to code with, scales to decode with, and zeros [O, blocks], of least squared error among the candidates.

    For codes c the best scale is sum(wc) / sum(cc), and it lowers the squared error by sum(wc)^2 / sum(cc): that gain is what is
    compared. The range itself is a candidate, so that no block loses by the search.
    """
    best = [torch.full_like(steps, -1.0), steps, steps, zeros]
    work = torch.empty_like(blocks)
    for step, zero in _candidates(steps, zeros, form):
        codes = encode(blocks, step, zero, form.bits, out=work).sub_(zero[..., None])
        energy = torch.linalg.vecdot(codes, codes)
        product = torch.linalg.vecdot(codes, blocks)
        scale = torch.where(energy == 0, 0.0, product / energy)
        gain = product * scale
        better = gain > best[0]
        best = [torch.where(better, new, old) for new, old in zip((gain, step, scale, zero), best)]
    return best[1], best[2], best[3]


def _candidates(steps: Tensor, zeros: Tensor, form: BlockFormat) -> Iterator[tuple[Tensor, Tensor]]:
    """Shorter ranges; for symmetric blocks also the extreme at the other end, for others the zero one code aside."""
    for share in SEARCH_SHARES:
        if form.symmetric:
            yield steps * share, zeros
            yield steps * -share, zeros
        else:
            for shift in (0, -1, 1):
                yield steps * share, (zeros + shift).clamp(0, 2**form.bits - 1)


def dequantise(matrix: QuantisedMatrix, form: BlockFormat) -> Tensor:
    """The weights that the kernel computes with, [O, I] float32."""
    outputs, blocks = matrix.scales.shape
    q = unpack(matrix.qweight, form.bits).view(outputs, blocks, form.block_size).float()
    zeros = unpack(matrix.qzeros, form.bits)[:, :blocks].float()
    return q.sub_(zeros[..., None]).mul_(matrix.scales.float()[..., None]).view(outputs, -1)


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
