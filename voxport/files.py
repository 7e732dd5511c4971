"""Files that are whole or absent: hashes, atomic writes, names that stay inside their folder."""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from voxport.errors import UserError

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
    if bad:
        raise UserError(f"{where}: {name!r} is not a plain file name; files must lie in the folder itself")
    return name


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it takes the final name, on any failure it is removed."""
    path = Path(path)
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(8)}.tmp{path.suffix}")
    try:  # made by open(), whose mode obeys the umask: that can only be asked by changing it, which other threads would see
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose a folder that exists and is writable") from error
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def free_disk(path: Path) -> float:
    """Free bytes where `path` lies or will lie."""
    path = Path(path).absolute()
    while not path.exists():
        path = path.parent
    return float(shutil.disk_usage(path).free)


def write_json(path: Path, value: object) -> None:
    """Write `value` as UTF-8 JSON with a final newline, atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path, what: str) -> dict:
    """Read a JSON object. A missing file, bad UTF-8, bad JSON or another type is a UserError naming `what` and the file."""
    value = read_any_json(path, what)
    if not isinstance(value, dict):
        raise UserError(f"{what}: {path} must hold a JSON object, not {type(value).__name__}")
    return value


def read_any_json(path: Path, what: str) -> Any:
    """Read JSON of any type; UserError as for `read_json`."""
    try:
        return parse_json(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{what}: {path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{what}: {path} cannot be read as JSON ({error})") from error


def parse_json(text: str) -> Any:
    """JSON whose strings are Unicode: an escape for half a character, which nothing could write again, is a ValueError."""
    value = json.loads(text)
    if "\\ud" in text.lower() and LONE_SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        raise ValueError("a string in it holds half of a surrogate pair")
    return value
