"""Speech written as it comes: to a WAV file that grows, or to stdout for a player."""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from voxport.errors import UserError, WorkError, describe, silence
from voxport.files import SHORT_NAME
from voxport.run.audio import to_pcm16

STDOUT = "-"
UNKNOWN = 0xFFFFFFFF  # length of a WAV that is not at its end; players take it as "until it ends"
SAMPLE_BYTES, HEADER_BYTES = 2, 44


class PipeClosed(Exception):
    """The listener has gone: no error, only the end."""


def wav_header(rate: int, num_samples: int | None = None) -> bytes:
    """Header of a mono 16-bit WAV; None while its length is not known."""
    data = UNKNOWN if num_samples is None else num_samples * SAMPLE_BYTES
    whole = UNKNOWN if num_samples is None else data + HEADER_BYTES - 8
    form = struct.pack("<HHIIHH", 1, 1, rate, rate * SAMPLE_BYTES, SAMPLE_BYTES, 8 * SAMPLE_BYTES)
    return struct.pack("<4sI4s4sI", b"RIFF", whole, b"WAVE", b"fmt ", len(form)) + form + struct.pack("<4sI", b"data", data)


class Player:
    """Takes chunks [n] float32 and writes them as 16-bit samples; `raw` leaves the header out. `name` is for messages."""

    def __init__(self, file: BinaryIO, rate: int, raw: bool, name: str):
        self.file, self.rate, self.raw, self.name = file, rate, raw, name
        self.num_samples = 0
        if not raw:
            self._write(wav_header(rate))

    def play(self, chunk: np.ndarray) -> None:
        """Write a chunk at once. PipeClosed if nobody reads any more."""
        self._write(to_pcm16(chunk).tobytes())
        self.num_samples += len(chunk)

    def finish(self) -> None:
        """Put the length where it was not known."""
        if not self.raw and self.file.seekable():
            self.file.seek(0)
            self._write(wav_header(self.rate, self.num_samples))

    def _write(self, content: bytes) -> None:
        try:
            self.file.write(content)
            self.file.flush()
        except BrokenPipeError:
            raise PipeClosed from None
        except OSError as error:
            raise WorkError(f"cannot write the stream to {self.name}: {describe(error)}") from error


@contextlib.contextmanager
def open_player(target: str, rate: int, raw: bool) -> Iterator[Player]:
    """A player to a file or, for "-", to stdout. A file that was not played to its end is removed."""
    if target == STDOUT:
        yield _to_stdout(rate, raw)
        return
    path = Path(os.path.realpath(target))
    with _replaced(path, target):
        try:
            file = open(path, "wb")
        except OSError as error:
            raise WorkError(f"cannot write {target}: {describe(error)}") from error
        try:
            player = Player(file, rate, raw, target)
            yield player
            player.finish()
        finally:
            with contextlib.suppress(OSError):  # what could not be written before: that was told
                file.close()


@contextlib.contextmanager
def _replaced(path: Path, target: str) -> Iterator[None]:
    """A file that is there gives way to one that is made inside, and comes back if that is not made to its end."""
    aside = path.with_name(f".{path.stem[:SHORT_NAME]}.{secrets.token_hex(8)}.old{path.suffix}")
    try:
        if path.is_file():  # a pipe stays where it is
            os.rename(path, aside)
    except OSError as error:
        raise WorkError(f"cannot write {target}: {describe(error)}") from error
    try:
        yield
    except BaseException:
        if path.is_file():
            path.unlink()
        if aside.exists():
            os.rename(aside, path)
        raise
    aside.unlink(missing_ok=True)


def _to_stdout(rate: int, raw: bool) -> Player:
    if sys.stdout is None:
        raise UserError("--stream - needs stdout, and this process was started without one; name a file")
    if sys.platform == "win32":
        import msvcrt

        msvcrt.setmode(sys.stdout.fileno(), os.O_BINARY)
    return Player(sys.stdout.buffer, rate, raw, "stdout")


def silence_stdout() -> None:
    """Let what is still in the buffer of a closed pipe go nowhere, so that Python does not complain of it when it ends."""
    silence(sys.stdout)
