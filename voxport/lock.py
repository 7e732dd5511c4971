"""One process at a time in a folder: a lock file that the operating system gives back when its holder dies."""

from __future__ import annotations

import os
import types
from pathlib import Path

from voxport.errors import UserError

BUILDING = "{folder} is being built by process {process}; wait for it or choose another --output"

if os.name == "nt":
    import msvcrt

    FAR = 1 << 30  # a byte beyond the text: Windows refuses to read what is locked

    def _try_lock(handle: int) -> None:
        os.lseek(handle, FAR, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _try_lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


class Lock:
    """An exclusive lock on `path`, held until `release`. Nothing is stale: the lock is the system's, the file only its name."""

    def __init__(self, path: Path, taken: str = BUILDING):
        """UserError with the words `taken`, in which {process} is who holds it, if the lock is taken."""
        self.path, self.taken = path, taken.replace("{folder}", str(path.absolute().parents[1]))
        self.handle = self._acquire()
        os.ftruncate(self.handle, 0)
        os.lseek(self.handle, 0, os.SEEK_SET)
        os.write(self.handle, str(os.getpid()).encode())

    def _acquire(self) -> int:
        while True:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            except FileNotFoundError:  # who was there before has just removed the folder of its lock
                continue
            try:
                _try_lock(handle)
            except OSError:
                os.close(handle)
                raise UserError(self.taken.replace("{process}", self._holder())) from None
            if self._is_current(handle):
                return handle
            os.close(handle)  # its last holder removed the file between our opening and locking it

    def _is_current(self, handle: int) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(handle))
        except FileNotFoundError:
            return False

    def _holder(self) -> str:
        try:
            return self.path.read_text(encoding="ascii") or "unknown"
        except OSError:
            return "unknown"

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        self.release()

    def release(self) -> None:
        """Give the lock back and remove its file. May be called twice."""
        if self.handle is None:
            return
        if os.name != "nt":
            self.path.unlink(missing_ok=True)  # while held, so that nobody locks a file that is about to go
        os.close(self.handle)
        self.handle = None
        if os.name == "nt":
            self.path.unlink(missing_ok=True)
