"""One large file over HTTP, continued where it broke off: in this run, or in a later one after a kill.

The hub's own client resumes within one process only, and a checkpoint is one file of 9 GB.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from voxport.errors import WorkError
from voxport.files import sha256_file
from voxport.lock import Lock
from voxport.progress import bar

ATTEMPTS = 5  # in a row that bring nothing
PAUSE = 0.5  # seconds before the second attempt, twice as many before each further one
TIMEOUT = 30.0  # seconds without a byte
BLOCK = 1 << 20


def partial_path(target: Path, sha256: str) -> Path:
    """Where the file is kept until it is whole; its name tells one version from another."""
    return target.with_name(f".{target.name}.{sha256[:16]}.partial")


def size_of(path: Path) -> int:
    """Bytes there; 0 if there is no file."""
    return path.stat().st_size if path.is_file() else 0


def fetch(url: str, target: Path, size: int, sha256: str, headers: Mapping[str, str]) -> None:
    """Bring `url` to `target`, which appears when all `size` bytes have the hash and not before.

    UserError if another process is at it; WorkError if what came is not the file; the HTTP library's errors if the connection
    fails for good. What has come is kept.
    """
    partial = partial_path(target, sha256)
    lock = Lock(partial.with_suffix(".lock"), f"{target} is being downloaded by process {{process}}; wait for it")
    try:
        _fetch(url, target, partial, size, sha256, headers)
    finally:
        lock.release()


def _fetch(url: str, target: Path, partial: Path, size: int, sha256: str, headers: Mapping[str, str]) -> None:
    with bar(size, target.name, "B") as progress:
        progress.unit_scale = True
        progress.update(size_of(partial))
        _fetch_all(url, partial, size, headers, progress.update)
    if size_of(partial) != size or sha256_file(partial) != sha256:
        partial.unlink(missing_ok=True)
        raise WorkError(f"{target.name} arrived damaged and was thrown away; run again to fetch it anew")
    os.replace(partial, target)


def _fetch_all(url: str, partial: Path, size: int, headers: Mapping[str, str], tell) -> None:
    from huggingface_hub.errors import HfHubHTTPError

    failures, reason = 0, None
    while (start := size_of(partial)) < size:
        if failures:
            time.sleep(PAUSE * 2 ** (failures - 1))
        try:
            _append(url, partial, start, headers, tell)
        except HfHubHTTPError:  # the server answered, and says no
            raise
        except HfHubHTTPError.__bases__ as error:  # OSError, and the base of whichever HTTP library the hub's client uses
            reason = error
        failures = failures + 1 if size_of(partial) <= start else 0
        if failures == ATTEMPTS:
            raise reason or WorkError(f"{url} ends after {start} of {size} bytes")


def _append(url: str, partial: Path, start: int, headers: Mapping[str, str], tell) -> None:
    """Ask for the file from byte `start` on and append what comes. A server that sends all of it is taken at its word."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    asked = {**headers, "Range": f"bytes={start}-", "Accept-Encoding": "identity"}
    with get_session().stream("GET", url, headers=asked, follow_redirects=True, timeout=TIMEOUT) as response:
        hf_raise_for_status(response)
        whole = response.status_code != 206
        if whole:
            tell(-start)
            partial.unlink(missing_ok=True)
        with open(partial, "ab") as file:
            for block in response.iter_bytes(BLOCK):
                file.write(block)
                tell(len(block))
