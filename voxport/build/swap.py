"""Put a finished build in the place of the one before it, so that a process killed at any moment leaves one of them whole.

Linux can exchange two folders in one step, and does. Elsewhere, and where the build folder is itself a mount point, files are
renamed one after the other, the manifest last: a kill in those milliseconds leaves a mixture, which `recover` completes.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from voxport.lock import Lock
from voxport.manifest import MANIFEST_NAME

WORK = ".build"  # scratch space inside a build folder, which moves on to the folder that replaces it
LOCK, NEXT, ARRIVING, TRASH = "lock", "next", "arriving", "trash"
AT_CWD, EXCHANGE = -100, 2  # of Linux' renameat2


def exchange(first: Path, second: Path) -> bool:
    """Let two folders change names in one step; False where the system or the file system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return rename is not None and rename(AT_CWD, os.fsencode(first), AT_CWD, os.fsencode(second), EXCHANGE) == 0


def aside(folder: Path) -> Path:
    """Where one of two builds stands while they change places: beside the folder, which cannot change with its own child."""
    return folder.with_name(f".{folder.name}.aside")


def replace_build(folder: Path, owned: set[str], lock: Lock) -> Lock:
    """Move `folder`/.build/next to `folder`. `owned` are the files of the build that was there; others stay.

    Returns the lock that holds from then on.
    """
    if owned:
        other = exchange_builds(folder)
        if other is not None:
            _move_strangers(folder, owned)
            lock.path = aside(folder) / WORK / LOCK
            lock.release()
            discard(folder, aside(folder))
            return other
    os.rename(folder / WORK / NEXT, folder / WORK / ARRIVING)
    _arrive(folder, owned)
    return lock


def exchange_builds(folder: Path) -> Lock | None:
    """Exchange folder and its .build/next by way of `aside`; None, and nothing has changed, if that cannot be done here.

    The newcomer is locked before it is in place, so that no other build can begin in between.
    """
    made, beside = folder / WORK / NEXT, aside(folder)
    try:
        os.rename(made, beside)
    except OSError:  # the parent cannot be written to, or is another file system
        return None
    (beside / WORK).mkdir(exist_ok=True)
    shutil.copymode(folder, beside)
    lock = Lock(beside / WORK / LOCK)
    if exchange(beside, folder):
        lock.path = folder / WORK / LOCK
        return lock
    lock.release()
    shutil.rmtree(beside / WORK)
    os.rename(beside, made)
    return None


def _move_strangers(folder: Path, owned: set[str]) -> None:
    """Move from `aside` to `folder` what is not part of the build there: the user's own files, and scratch space."""
    beside, work = aside(folder), folder / WORK
    work.mkdir(exist_ok=True)
    strangers = [path for path in beside.iterdir() if path.name not in {*owned, MANIFEST_NAME, WORK}]
    scratch = [path for path in (beside / WORK).iterdir() if path.name != LOCK] if (beside / WORK).is_dir() else []
    for path, home in [(path, folder) for path in strangers] + [(path, work) for path in scratch]:
        if not (home / path.name).exists():
            os.rename(path, home / path.name)


def _arrive(folder: Path, owned: set[str]) -> None:
    """Rename each file of .build/arriving into the folder, the manifest last, and remove files that only the old build had."""
    arriving = folder / WORK / ARRIVING
    names = sorted((path.name for path in arriving.iterdir()), key=lambda name: (name == MANIFEST_NAME, name))
    for name in names:
        os.replace(arriving / name, folder / name)
        (arriving / name).unlink(missing_ok=True)  # POSIX leaves both names where they are links to one file
    arriving.rmdir()
    for name in owned - set(names):
        (folder / name).unlink(missing_ok=True)


def discard(folder: Path, path: Path) -> None:
    """Remove a folder; what a kill leaves of it lies in .build, where the next run removes it."""
    trash = folder / WORK / TRASH
    shutil.rmtree(trash, ignore_errors=True)
    os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)


def recover(folder: Path, owned_by: Callable[[Path], set[str]]) -> None:
    """Finish what a killed run had begun. `owned_by(folder)` names the files of the build that lies in a folder."""
    beside = aside(folder)
    if (folder / WORK / ARRIVING).is_dir():
        _arrive(folder, set())
    if beside.is_dir():  # before the exchange it held the newcomer, after it the old build: either may lend parts to the next
        _move_strangers(folder, owned_by(beside))
        if (folder / WORK / NEXT).exists():
            discard(folder, beside)
        else:
            os.rename(beside, folder / WORK / NEXT)
