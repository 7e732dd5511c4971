"""Files that are whole or absent: hashes, atomic writes, names that stay inside their folder."""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from voxport.errors import UserError, WorkError

LONGEST_NAME = 255  # bytes of a file's name on nearly every system
SHORT_NAME = 32  # characters of it that a temporary name shows: with what is added it stays within the longest
RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{i}" for port in ("com", "lpt") for i in range(10))}  # names on Windows
LARGEST_JSON = 1 << 28  # bytes; the tokenizers of large models have some 10 MB
BY_EFFECT = os.access in os.supports_effective_ids  # ask for the user that this process acts for
HASH_CHUNK = 1 << 20  # bytes read at a time: large enough to be I/O bound, small enough for any machine
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes in lowercase hex, read in chunks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def check_plain_name(name: str, where: str) -> str:
    """Return `name` if it is a bare file name; a separator, a drive, `.` or `..` is a UserError naming `where`."""
    bad = not isinstance(name, str) or not name or name in (".", "..") or any(c in name for c in "/\\:\0")
    if bad or any("\ud800" <= c <= "\udfff" for c in name):  # half of a character, which no file system takes
        raise UserError(f"{where}: {name!r} is not a plain file name; files must lie in the folder itself")
    return name


def is_reserved(name: str) -> bool:
    """Whether Windows takes a name for a device, whatever its ending."""
    return name.split(".")[0].rstrip(" ").lower() in RESERVED


def is_file(path: str | os.PathLike) -> bool:
    """Whether a file can be seen there: a name that no system could hold, or a folder that may not be entered, holds none."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: str | os.PathLike) -> bool:
    """Whether a folder can be seen there."""
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):
        return False


def check_folder(path: str | os.PathLike, flag: str) -> Path:
    """The path of a folder to be made or filled; UserError before any work if it can be none, or its name is no text."""
    path = Path(path)
    try:
        str(path).encode("utf-8")  # graphs and JSON spell it
        if not stat.S_ISDIR(os.stat(path).st_mode):
            raise UserError(f"{flag} {path} is a file; name a folder")
    except FileNotFoundError:  # it will be made
        pass
    except (OSError, ValueError) as error:
        raise UserError(f"{flag} {path} cannot be a folder ({error}); choose another name") from None
    return path


def is_same_file(one: str | os.PathLike, other: str | os.PathLike) -> bool:
    """Whether two names lead to one file that is there."""
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):
        return False


def check_target(path: str | os.PathLike, pipe: bool = False) -> Path:
    """The path of a file to be written; UserError before any work if it cannot be one. A link leads to what is written.

    Devices are never written over, and pipes only where `pipe` says that the writer goes from start to end.
    """
    path = Path(path)
    try:
        mode = os.stat(path).st_mode if os.path.lexists(path) and os.path.exists(path) else stat.S_IFREG
        home = Path(os.path.realpath(path)).parent
        fits = stat.S_ISDIR(os.stat(home).st_mode) and os.access(home, os.W_OK, effective_ids=BY_EFFECT) and len(os.fsencode(path.name)) <= LONGEST_NAME
    except (OSError, ValueError):
        mode, fits = stat.S_IFREG, False
    if not fits or stat.S_ISDIR(mode):
        raise UserError(f"cannot write {path}: it must be a file in a folder that exists and is writable")
    if not (stat.S_ISREG(mode) or (pipe and stat.S_ISFIFO(mode))):
        raise UserError(f"cannot write {path}: it must be a file, and is a pipe or a device")
    return path


@contextmanager
def atomic_path(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it takes the final name, on any failure it is removed.

    A link stays, and what it leads to is replaced. WorkError if the disk fails, UserError if nothing can be written there.
    """
    final = Path(os.path.realpath(check_target(path)))
    temporary = final.with_name(f".{final.stem[:SHORT_NAME]}.{secrets.token_hex(8)}.tmp{final.suffix[:SHORT_NAME]}")
    try:
        try:  # made by open(), whose mode obeys the umask: that can only be asked by changing it, which other threads would see
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except PermissionError as error:  # a system that says so only when asked to write
            raise UserError(f"cannot write {path}: {error.strerror}; choose a folder that exists and is writable") from error
        yield temporary
        os.replace(temporary, final)
    except OSError as error:
        raise WorkError(f"cannot write {path}: {error.strerror or error}{_remedy(error)}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _remedy(error: OSError) -> str:
    return "; free some space, or choose another disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""


def free_disk(path: Path) -> float:
    """Free bytes where `path` lies or will lie."""
    return float(shutil.disk_usage(_ground(path)).free)


def share_disk(one: Path, other: Path) -> bool:
    """Whether two paths lie, or will lie, on one file system."""
    return os.stat(_ground(one)).st_dev == os.stat(_ground(other)).st_dev


def _ground(path: Path) -> Path:
    """What is there of a path."""
    path = Path(path).absolute()
    while not path.exists():
        path = path.parent
    return path


def write_json(path: Path, value: object) -> None:
    """Write `value` as UTF-8 JSON with a final newline, atomically."""
    with atomic_path(path) as temporary:
        text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
        # bytes in a path that are not UTF-8 become lone surrogates, which JSON can only hold escaped
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def read_utf8(path: str | os.PathLike, what: str) -> str:
    """The text of a UTF-8 file, without a byte order mark; UserError naming `what` if there is none."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{what} {path} does not exist") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{what} {path} is not UTF-8 text ({error}); save it as UTF-8") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{what} {path} cannot be read ({getattr(error, 'strerror', None) or error})") from None


def read_json(path: Path, what: str) -> dict:
    """Read a JSON object. A missing file, bad UTF-8, bad JSON or another type is a UserError naming `what` and the file."""
    value = read_any_json(path, what)
    if not isinstance(value, dict):
        raise UserError(f"{what}: {path} must hold a JSON object, not {type(value).__name__}")
    return value


def read_any_json(path: Path, what: str) -> Any:
    """Read JSON of any type; UserError as for `read_json`."""
    try:
        size = os.stat(path).st_size
        if size > LARGEST_JSON:
            raise UserError(f"{what}: {path} has {size} bytes, more than any such file needs; get it again")
        return parse_json(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{what}: {path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{what}: {path} cannot be read as JSON ({error})") from error


def parse_json(text: str, unique: bool = False) -> Any:
    """JSON whose strings are Unicode: an escape for half a character, which nothing could write again, is a ValueError. With
    `unique` so is a key that stands twice in an object."""
    value = json.loads(text, object_pairs_hook=_unique if unique else None)
    if "\\ud" in text.lower() and LONE_SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        raise ValueError("a string in it holds half of a surrogate pair")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict:
    """The pairs of an object; ValueError for a key that stands there twice."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name} is given twice")
        found[name] = value
    return found
