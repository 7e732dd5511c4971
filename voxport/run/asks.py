"""What a wish of any family asks for, as JSON: enough to ask for it again, and to tell whether what is there answers it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from typing import Any

import numpy as np

from voxport.files import is_file, sha256_file


def describe_wish(wish: Any) -> dict:
    """Every field but the arrays. Names may come to mean another recording: beside them stands what was in it."""
    names = [field.name for field in dataclasses.fields(wish) if field.name not in ("ref_audio", "voice")]
    told = {name: _plain(getattr(wish, name)) for name in names}
    told["ref_audio"] = os.fspath(wish.ref_audio) if isinstance(wish.ref_audio, (str, os.PathLike)) else None
    told["ref_audio_sha256"] = hash_sound(wish.ref_audio)
    return told | {"voice_sha256": None if wish.voice is None else hash_array(wish.voice.codes)}


def hash_sound(source: Any) -> str | None:
    """SHA-256 of a file, or of samples with their rate; None if none can be read. A file that has not changed is read once."""
    if isinstance(source, tuple):
        return hashlib.sha256("/".join(hash_array(each) for each in source).encode("ascii")).hexdigest()
    if source is None or not is_file(source):
        return None
    try:
        seen = os.stat(source)
        return _hash(os.fspath(source), seen.st_size, seen.st_mtime_ns)
    except OSError:  # whoever opens it to listen says what is wrong
        return None


def hash_array(array: Any) -> str:
    """SHA-256 of an array's bytes, or of a number's."""
    return hashlib.sha256(np.asarray(array).tobytes()).hexdigest()


@functools.lru_cache(maxsize=64)
def _hash(path: str, size: int, changed: int) -> str:
    return sha256_file(path)


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return [_plain(each) for each in value] if isinstance(value, tuple) else value
