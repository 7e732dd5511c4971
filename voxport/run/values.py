"""Whether what a caller gave is a number at all."""

from __future__ import annotations

import numbers


def is_whole(value: object) -> bool:
    """Whether a value is an integer, of Python or NumPy; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a real number, of Python or NumPy; True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
