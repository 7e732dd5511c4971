"""Which parts have replayed their proof on which provider: remembered on disk, so that it is asked once and not each time.

Entries lie in $VOXPORT_CACHE if set, else under `voxport` in the user's cache folder ($XDG_CACHE_HOME or the system's usual
one). A build, ONNX Runtime or machine that is new has none. An entry that cannot be read or is not about exactly this build
counts as none; where nothing can be written, each speaker asks once.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from voxport.errors import UserError, WorkError
from voxport.files import read_json, write_json
from voxport.manifest import Manifest
from voxport.run.proof import FAIL, QUICK, check_proof, explain, machine_name, replay, runtime_name
from voxport.run.session import Parts


def cache_folder() -> Path | None:
    """Where this toolkit keeps what may be lost; None if there is no home."""
    given = os.environ.get("VOXPORT_CACHE")
    if given:
        return Path(given)
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):  # its specification lets a relative path count as unset
        return Path(given) / "voxport"
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "voxport"
    try:
        return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "voxport"
    except RuntimeError:
        return None


class Trust:
    """Asks parts of one build for their proof before they are first used; remembers those that gave it."""

    def __init__(self, parts: Parts, manifest: Manifest):
        self.parts, self.manifest = parts, manifest
        self._entry: Entry | None = None
        self._lock = threading.Lock()  # threads that share a speaker wait for one replay

    def require(self, *names: str) -> None:
        """WorkError unless the parts called `names` compute what the build proved. A build without a proof is let pass."""
        if self.manifest.proof is not None:
            with self._lock:
                self._ask(names)

    def _ask(self, names: tuple[str, ...]) -> None:
        if self._entry is None:
            self._entry = Entry(self.manifest)
        missing = [name for name in names if self._place(name) not in self._entry.passed]
        if missing:
            check_proof(self.manifest)
            for verdict in replay(self.parts, self.manifest, QUICK, missing):
                if verdict.state == FAIL:
                    raise WorkError(explain(verdict, self.manifest.proof))
            self._entry.add(self._place(name) for name in missing)

    def _place(self, name: str) -> str:
        return f"{name} on {self.parts[name].provider}"


class Entry:
    """What is remembered of one build on one machine: `passed` holds "PART on PROVIDER"."""

    def __init__(self, manifest: Manifest):
        self.key = build_key(manifest)
        self.path = entry_path(self.key)
        self.passed = self._read()

    def add(self, places: Iterable[str]) -> None:
        """Remember more, on disk if it can be."""
        self.passed |= set(places)
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, {"key": self.key, "passed": sorted(self.passed)})
        except (OSError, UserError):
            pass  # a full or read-only disk must not keep anybody from speaking

    def _read(self) -> set[str]:
        try:
            entry = read_json(self.path, "proved parts") if self.path else {}
        except UserError:
            return set()
        passed = entry.get("passed")
        if entry.get("key") != self.key or not isinstance(passed, list):
            return set()
        return {place for place in passed if isinstance(place, str)}


def build_key(manifest: Manifest) -> dict[str, str]:
    """What a replay that passed holds for: these files and answers, this ONNX Runtime, this machine."""
    told = {name: asdict(part) for name, part in manifest.parts.items()} | {"proof": asdict(manifest.proof)}
    build = hashlib.sha256(json.dumps(told, sort_keys=True).encode("utf-8")).hexdigest()
    return {"build": build, "onnxruntime": runtime_name(), "machine": machine_name(), "version": str(manifest.proof.version)}


def entry_path(key: dict[str, str]) -> Path | None:
    folder = cache_folder()
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode("utf-8")).hexdigest()[:32]
    return folder / "proved" / f"{name}.json" if folder else None
