"""Memory that this process may still take: what the machine has, or less if a container or a limit says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from voxport.errors import UserError

PAGE = 4096  # bytes; only to turn a limit into what is left of it, where a little more or less is no matter
GROUPS = Path("/sys/fs/cgroup")
# version of control groups -> limit, use, statistics, and what in them the system gives back when memory is asked for
GROUP_FILES = {2: ("memory.max", "memory.current", "memory.stat", ("inactive_file", "active_file")),
               1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat",
                   ("total_inactive_file", "total_active_file"))}  # fmt: skip


def available_memory() -> float | None:
    """Bytes that a new process may take: what the system calls available, or less if this process or its group is limited."""
    found = [_meminfo("MemAvailable"), group_room(), _own_limit()]
    return min((value for value in found if value is not None), default=None)


def require_memory(need: float, what: str) -> None:
    """UserError if `need` bytes are not to be had even with what can be swapped out. Nothing known: nothing refused."""
    available = available_memory()
    if available is not None and need > available + (_meminfo("SwapFree") or 0):
        raise UserError(
            f"{what} takes {need / 1e9:.1f} GB of memory and {available / 1e9:.1f} GB is available; close other programs, raise the"
            " limit of this process or container, or take a smaller build (int4)"
        )


def _meminfo(key: str) -> float | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) * 1024.0 for line in lines if line.startswith(f"{key}:")), None)
    except (OSError, ValueError, IndexError):
        return None


def group_room(root: Path = GROUPS, own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Room under the tightest limit of this process's control groups, version 2 or 1; None without any.

    Cached files count as used there, but the system drops them when memory is asked for.
    """
    return min((room for version, place in _groups(root, own) if (room := _room(version, place)) is not None), default=None)


def _groups(root: Path, own: Path) -> Iterator[tuple[int, Path]]:
    """The groups that hold this process, outwards; in a container the root itself is its group."""
    yield from ((2, root), (1, root / "memory"))
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        version = 2 if not controllers else 1 if "memory" in controllers.split(",") else None
        base = root if version == 2 else root / "memory"
        for place in (Path(path.lstrip("/")), *Path(path.lstrip("/")).parents) if version else ():
            yield version, base / place


def _room(version: int, place: Path) -> float | None:
    limit, used, statistics, kinds = GROUP_FILES[version]
    try:
        most, taken = ((place / name).read_text(encoding="ascii").strip() for name in (limit, used))
        return None if most == "max" else float(most) - float(taken) + _cached(place / statistics, kinds)
    except (OSError, ValueError):
        return None


def _cached(statistics: Path, kinds: tuple[str, ...]) -> float:
    try:
        lines = statistics.read_text(encoding="ascii").splitlines()
        facts = dict(fields for line in lines if len(fields := line.split()) == 2)
        return sum(float(facts.get(kind, 0)) for kind in kinds)
    except (OSError, ValueError):
        return 0.0


def _own_limit() -> float | None:
    """What is left of the limits set on this process (ulimit -v, -d)."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    taken = _taken()
    limits = ((resource.RLIMIT_AS, taken[0]), (resource.RLIMIT_DATA, taken[1]))
    rooms = [float(most) - used for kind, used in limits if (most := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY]
    return max(0.0, min(rooms)) if rooms else None


def _taken() -> tuple[float, float]:
    """Bytes of addresses and of private data that this process has; 0 where the system does not say."""
    try:
        fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
        return float(fields[0]) * PAGE, float(fields[5]) * PAGE
    except (OSError, ValueError, IndexError):
        return 0.0, 0.0
