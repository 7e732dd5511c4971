"""Weights that are numbers: a checkpoint is read once, from its mapped files, before anything is made of it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

from voxport.errors import UserError
from voxport.progress import bar

CHUNK = 1 << 24  # weights looked at in one go


def check_finite(tensors: Iterable[tuple[str, Tensor, str]], total: int) -> None:
    """UserError naming the first of (name, tensor, file) that holds NaN or Inf; `total` weights in all."""
    with bar(total, "reading weights", "weight") as progress:
        for name, tensor, file in tensors:
            for chunk in tensor.reshape(-1).split(CHUNK) if tensor.is_floating_point() else ():
                # the largest and the smallest of some numbers are finite if all are: NaN passes through both
                if not all(math.isfinite(edge) for edge in chunk.aminmax()):
                    raise UserError(f"{file}: {name} holds NaN or infinite weights; download the checkpoint again")
                progress.update(len(chunk))
