"""Runs cases under limits: each either ends with a value that holds, or with one line for the user."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from voxport.errors import UserError

CPU_SECONDS = 5.0  # that one case may compute; counted as processor time, since machines are shared
STUCK_SECONDS = 120  # of wall time, after which a case that no signal reaches is ended with its process
SPARE_BYTES = 512 << 20  # that a case may take beyond what the process holds before the first: the largest legal reference needs 400 MB
ACCEPTED, REFUSED = "accepted", "refused"
ROOT = Path(__file__).parents[1]


class Reader(Protocol):
    """Something that reads files or text. `name` says what; `weight` is its share of all cases."""

    name: str
    weight: int

    def prepare(self) -> None:
        """Make what cases are made of; outside of the limits."""

    def run(self, rng: random.Random, folder: Path) -> None:
        """Write a damaged file into `folder`, read it, and assert that what was read holds. UserError refuses."""


@dataclass(frozen=True)
class Fault:
    """A case that neither held nor was refused."""

    reader: str
    case: int
    what: str
    where: str


class TookTooLong(BaseException):
    """No `except Exception` may swallow it."""


class Strayed(BaseException):
    """A file outside of the case's folder was opened."""


def run_case(reader: Reader, seed: int, case: int) -> str | Fault:
    """One case, in a folder of its own that stands in an otherwise empty one."""
    rng = random.Random(f"{seed}/{reader.name}/{case}")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as home:
        folder = Path(home) / "case"
        folder.mkdir()
        try:
            with limited_time(), watched_files(folder):
                reader.run(rng, folder)
            outcome: str | Fault = ACCEPTED
        except UserError as error:
            outcome = REFUSED if _is_one_line(error) else Fault(reader.name, case, f"a message of several lines: {error!r}"[:300], "")
        except (Exception, TookTooLong, Strayed) as error:
            outcome = Fault(reader.name, case, f"{type(error).__name__}: {error}"[:300], _place(error))
        left = sorted(path.name for path in Path(home).iterdir())
        return outcome if left == ["case"] else Fault(reader.name, case, f"{left} beside its folder", "")


def _is_one_line(error: UserError) -> bool:
    return bool(str(error).strip()) and len(str(error).splitlines()) == 1


def _place(error: BaseException) -> str:
    """The innermost line of this project that was running."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(str(ROOT))]
    return f"{Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno}" if frames else ""


@contextlib.contextmanager
def limited_time() -> Iterator[None]:
    def stop(number, frame):
        raise TookTooLong(f"more than {CPU_SECONDS:g} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


_watched: list[Path] = []  # the folder of the case that is running; an audit hook cannot be taken off again


def _look(event: str, arguments: tuple) -> None:
    if not _watched or event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.symlink", "os.link"):
        return
    writes = (
        event != "open"
        or (isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"))
        or bool(isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    )
    for path in arguments[:2] if event == "os.rename" else arguments[1:2] if event in ("os.symlink", "os.link") else arguments[:1]:
        is_path = isinstance(path, (str, bytes)) and not _is_in_open_folder(event, arguments)
        if is_path and not _is_allowed(os.path.abspath(os.fsdecode(path)), writes):
            raise Strayed(f"{event} of {os.fsdecode(path)}")


def _is_in_open_folder(event: str, arguments: tuple) -> bool:
    """Whether the path is relative to a folder that was opened, and so seen, before: shutil.rmtree works like that."""
    return event == "os.remove" and arguments[1] >= 0


def _is_allowed(path: str, writes: bool) -> bool:
    """Inside the folder; Python and this project's own files may also be read, for imports come late."""
    if path.startswith(str(_watched[0].parent) + os.sep + "case"):
        return True
    own = (str(ROOT), sys.prefix, sys.base_prefix, "/usr/lib", "/usr/local/lib", "/dev/", "/proc/", "/sys/")
    return path == os.devnull or (not writes and path.startswith(own))


@contextlib.contextmanager
def watched_files(folder: Path) -> Iterator[None]:
    _watched.append(folder)
    try:
        yield
    finally:
        _watched.pop()


def limit_memory() -> None:
    """What is private and can be written to may grow by `SPARE_BYTES`, not more."""
    if not Path("/proc/self/status").is_file():
        return
    status = Path("/proc/self/status").read_text(encoding="ascii")
    held = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (held + SPARE_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def start_watching() -> None:
    """Once a process: the hook that sees which files are opened, and quiet libraries."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.addaudithook(_look)
    sys.set_int_max_str_digits(4300)
