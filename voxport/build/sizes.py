"""Sizes for the screen: a need is rounded up and what is to be had down, so that where one does not fit the two differ."""

from __future__ import annotations

import math
from collections.abc import Callable

MB, GB = 1e6, 1e9


def at_least(size: float) -> str:
    """Bytes that are needed."""
    return _spell(size, math.ceil)


def at_most(size: float) -> str:
    """Bytes that are to be had."""
    return _spell(size, math.floor)


def _spell(size: float, rounded: Callable[[float], int]) -> str:
    return f"{rounded(10 * size / GB) / 10:.1f} GB" if size >= GB else f"{rounded(size / MB)} MB"
