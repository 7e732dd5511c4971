"""Which files an ONNX graph reads beside itself: only those that the manifest lists and hashes may be among them.

ONNX Runtime follows whatever a graph names, and older ones out of its folder too. The onnx package is not at hand where speech
is made, so the few fields of the format that matter are read here (onnx.proto3, protocol buffers' wire format).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from voxport.errors import UserError, WorkError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
# message -> number of a field that may hold a tensor, however deep -> its message
FIELDS = {
    "Model": {7: "Graph", 25: "Function"},
    "Graph": {1: "Node", 5: "Tensor", 15: "Sparse"},
    "Function": {7: "Node", 11: "Attribute"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "Sparse", 23: "Sparse"},
    "Sparse": {1: "Tensor", 2: "Tensor"},
    "Tensor": {13: "Entry"},
}
KEY, VALUE, LOCATION = 1, 2, b"location"


def check_external(path: Path, allowed: set[str]) -> None:
    """UserError if the graph reads a file that is not among `allowed` names of its folder; WorkError if it is none."""
    try:
        named = external_files(path)
    except (ValueError, IndexError, RecursionError, OSError) as error:
        raise WorkError(f"{path} cannot be loaded: it is no ONNX graph ({error}); build it again") from error
    foreign = sorted(named - allowed)
    if foreign:
        raise UserError(f"{path} reads {foreign[0]!r}, which the manifest does not list for it; build it again, or do not trust it")


def external_files(path: Path) -> set[str]:
    """The `location` of every tensor whose numbers lie in another file."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held, memoryview(held) as data:
        return set(_locations(data, "Model", 0, len(data)))


def _locations(data: memoryview, message: str, start: int, stop: int) -> Iterator[str]:
    """Locations named in the message that lies in bytes [start, stop)."""
    if message == "Entry":
        entry = {number: bytes(data[begin:end]) for number, begin, end in _fields(data, start, stop)}
        if entry.get(KEY) == LOCATION:
            yield entry.get(VALUE, b"").decode("utf-8", "replace")
        return
    for number, begin, end in _fields(data, start, stop):
        if number in FIELDS[message]:
            yield from _locations(data, FIELDS[message][number], begin, end)


def _fields(data: memoryview, at: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Number and place of each field that holds bytes; ValueError if the bytes are not a message."""
    while at < stop:
        tag, at = _varint(data, at)
        kind, number = tag & 7, tag >> 3
        if kind == VARINT:
            _, at = _varint(data, at)
        elif kind in (FIXED64, FIXED32):
            at += 8 if kind == FIXED64 else 4
        elif kind == BYTES:
            size, at = _varint(data, at)
            if at + size > stop:
                raise ValueError(f"a field of {size} bytes does not end")
            yield number, at, at + size
            at += size
        else:
            raise ValueError(f"wire type {kind}")
    if at != stop:
        raise ValueError("the last field does not end")


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """An integer in groups of seven bits, and where it ends."""
    value = shift = 0
    while shift < 64:
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError("an integer does not end")
