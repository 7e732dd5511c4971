"""Progress bars on stderr: quiet when nobody watches."""

import sys

from tqdm import tqdm


def bar(total: int | None, label: str, unit: str, show: bool | None = None) -> tqdm:
    """A tqdm bar on stderr. Shown on a terminal unless `show` says otherwise; ASCII so that any console can print it."""
    visible = sys.stderr is not None and (sys.stderr.isatty() if show is None else show)
    return tqdm(total=total, desc=label, unit=unit, file=sys.stderr, disable=not visible, leave=False, ascii=True)


def clock(seconds: float | None) -> str:
    """Seconds as m:ss; a question mark if nobody knows."""
    return "?" if seconds is None else f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def plural(number: int, what: str) -> str:
    """`1 voice`, `2 voices`."""
    return f"{number} {what}{'' if number == 1 else 's'}"
