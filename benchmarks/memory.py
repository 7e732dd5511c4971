"""Peak memory of a process and its children, anonymous (private) and file-backed apart, sampled from smaps_rollup."""

from __future__ import annotations

import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

INTERVAL = 0.1  # seconds between samples: short against any tensor of a large model


@dataclass
class Peak:
    """Largest sums over the process tree in bytes: anonymous memory, resident memory (mapped files included)."""

    private: int = 0
    resident: int = 0
    seconds: float = 0.0


def run_watched(command: list[str], **options) -> tuple[int, Peak]:
    """Run a command to its end; its exit code and peak memory. Linux only."""
    start = time.perf_counter()
    process = subprocess.Popen(command, **options)
    peak, done = Peak(), threading.Event()
    watcher = threading.Thread(target=_watch, args=(process.pid, peak, done))
    watcher.start()
    code = process.wait()
    done.set()
    watcher.join()
    peak.seconds = time.perf_counter() - start
    return code, peak


def _watch(pid: int, peak: Peak, done: threading.Event) -> None:
    while not done.wait(INTERVAL):
        figures = [read_memory(p) for p in _tree(pid)]
        peak.private = max(peak.private, sum(f[0] for f in figures))
        peak.resident = max(peak.resident, sum(f[1] for f in figures))


def _tree(pid: int) -> list[int]:
    """The process and all its descendants."""
    found, todo = [], [pid]
    while todo:
        pid = todo.pop()
        found.append(pid)
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                todo += [int(child) for child in path.read_text(encoding="ascii").split()]
            except OSError:
                continue
    return found


def read_memory(pid: int | str = "self") -> tuple[int, int]:
    """Anonymous and resident memory of one process in bytes; zeros if it is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0, 0
    figures = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in text.splitlines()[1:] if "kB" in line}
    return figures.get("Anonymous", 0), figures.get("Rss", 0)
