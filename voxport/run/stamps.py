"""Which files were hashed before and have not been touched since: so that loading need not read gigabytes twice.

A stamp holds a file's size, times of change, inode and the SHA-256 that it had. It counts only while all of them are the same,
and only for the hash that the manifest asks for; a file that is written to gets new times, whatever was written. Stamps lie
under `hashed` in the toolkit's cache folder; without one, or where it cannot be written, every process hashes anew.
`--verify` and `--selftest` take no notice of them.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path

from voxport.errors import UserError
from voxport.files import read_json, write_json
from voxport.manifest import FileRecord, verify_files
from voxport.run.trust import cache_folder

SETTLED_SECONDS = 2  # a file changed this recently could change again within one tick of its clock


class Stamps:
    """The stamps of one build folder."""

    def __init__(self, folder: str | os.PathLike):
        self.folder, self._lock = Path(folder), threading.Lock()
        home = cache_folder()
        name = hashlib.sha256(os.fsencode(os.path.abspath(folder))).hexdigest()[:32]
        self.path = home / "hashed" / f"{name}.json" if home else None

    def verify(self, files: dict[str, FileRecord]) -> None:
        """Compare files with their records; UserError names the first that differs. Those with a valid stamp are not read."""
        stamps, fresh = self._read(), {}
        for name, record in files.items():
            before = self._look(name, record)
            if before is not None and before == stamps.get(name):
                continue
            verify_files(self.folder, {name: record})
            if before is not None and before == self._look(name, record) and time.time() - before[1] / 1e9 > SETTLED_SECONDS:
                fresh[name] = before
        if fresh:
            self._write(fresh)

    def _look(self, name: str, record: FileRecord) -> list | None:
        """The stamp that the file would get if it had the hash of its record; None if it cannot be looked at."""
        try:
            facts = os.stat(self.folder / name)
        except OSError:
            return None
        changed = max(facts.st_mtime_ns, facts.st_ctime_ns)
        return [facts.st_size, changed, facts.st_mtime_ns, facts.st_ino, record.sha256]

    def _read(self) -> dict[str, list]:
        try:
            return read_json(self.path, "stamps") if self.path else {}
        except UserError:
            return {}

    def _write(self, fresh: dict[str, list]) -> None:
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock:
                write_json(self.path, self._read() | fresh)  # parts are verified side by side
        except (OSError, UserError):
            pass  # a full or read-only disk must not keep anybody from speaking
