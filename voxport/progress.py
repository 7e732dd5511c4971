"""Progress bars on stderr: quiet when nobody watches."""

import sys

from tqdm import tqdm


def bar(total: int | None, label: str, unit: str, show: bool | None = None) -> tqdm:
    """A tqdm bar on stderr. Shown on a terminal unless `show` says otherwise; ASCII so that any console can print it."""
    visible = sys.stderr.isatty() if show is None else show
    return tqdm(total=total, desc=label, unit=unit, file=sys.stderr, disable=not visible, leave=False, ascii=True)
