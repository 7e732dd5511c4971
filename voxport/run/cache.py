"""Memory for the keys and values of one utterance or several, which the decoder writes in place."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort

from voxport.errors import WorkError

GROWTH = 256  # positions by which the memory grows, some 10 s of speech: few copies, and little that is never used
DEVICE = 0  # ONNX Runtime numbers devices; sessions are opened on the first


class Store:
    """Keys and values of B rows, for each layer two tensors [B, H, C, head_dim]: H key-value heads, room for C positions.

    GroupQueryAttention gets the same memory as past and as present and then writes behind what is there, so a step copies
    nothing. Only growth copies, once. `memory` names where the tensors lie: NumPy arrays on the CPU, OrtValues elsewhere.
    """

    def __init__(self, num_tensors: int, shape: tuple[int, int, int], kind: type, memory: str):
        self.num_rows, self.num_heads, self.head_dim = shape
        self.kind, self.memory = kind, memory
        self.capacity = 0
        self.used = 0  # rows from the first on that were ever written: memory of the others is never touched
        self.bindings: dict[tuple[int, int], ort.IOBinding] = {}
        self._tensors = [np.zeros((self.num_rows, self.num_heads, 0, self.head_dim), kind)] * num_tensors

    def reserve(self, positions: int) -> None:
        """Make room for `positions` in every row, or in none (WorkError). What is held stays; memory moves."""
        if positions <= self.capacity:
            return
        capacity = -(-positions // GROWTH) * GROWTH
        rooms = self._find_room(capacity)
        if self.memory == "cpu":  # nothing can fail from here on, so that each old tensor may go as soon as it is copied
            for i, room in enumerate(rooms):
                self._tensors[i] = self._carry(i, room)
        else:
            self._tensors = [self._place(self._carry(i, room)) for i, room in enumerate(rooms)]
        self.capacity = capacity
        self.bindings.clear()

    def _find_room(self, capacity: int) -> list[np.ndarray]:
        """Zeros for every tensor. WorkError, and nothing has changed, if there is no memory for all of them.

        Zeros cost none until they are written: the system hands out pages at the first touch.
        """
        shape = (self.num_rows, self.num_heads, capacity, self.head_dim)
        try:
            return [np.zeros(shape, self.kind) for _ in self._tensors]
        except (MemoryError, ValueError) as error:  # NumPy's name for a size beyond all addresses is ValueError
            size = len(self._tensors) * math.prod(shape) * np.dtype(self.kind).itemsize / 1e9
            raise WorkError(
                f"no memory for {self.num_rows} texts of {capacity} positions ({size:.1f} GB): lower --batch, or shorten the text"
            ) from error

    def _carry(self, i: int, room: np.ndarray) -> np.ndarray:
        """`room` with what tensor i holds."""
        if self.capacity:
            room[: self.used, :, : self.capacity] = self._fetch(self._tensors[i])[: self.used]
        return room

    def bind(self, binding: ort.IOBinding, past: list[str], present: list[str], row: int, count: int) -> None:
        """Bind `count` rows from `row` on as past and as present."""
        self.used = max(self.used, row + count)
        shape = (count, self.num_heads, self.capacity, self.head_dim)
        offset = row * self.num_heads * self.capacity * self.head_dim * np.dtype(self.kind).itemsize
        for tensor, old, new in zip(self._tensors, past, present, strict=True):
            pointer = offset + (tensor.ctypes.data if isinstance(tensor, np.ndarray) else tensor.data_ptr())
            binding.bind_input(old, self.memory, DEVICE, self.kind, shape, pointer)
            binding.bind_output(new, self.memory, DEVICE, self.kind, shape, pointer)

    def read(self, row: int, length: int) -> list[np.ndarray]:
        """Copies [H, length, head_dim] of every tensor of one row."""
        return [self._fetch(tensor)[row, :, :length].copy() for tensor in self._tensors]

    def write(self, row: int, pieces: list[np.ndarray]) -> None:
        """Put pieces [H, length, head_dim] at the start of one row."""
        length = pieces[0].shape[1]
        self.used = max(self.used, row + 1)
        self.reserve(length)
        for i, (tensor, piece) in enumerate(zip(self._tensors, pieces, strict=True)):
            self._edit(i, tensor, row, piece, length)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first positions of row `source` over row `target`."""
        for i, tensor in enumerate(self._tensors):
            self._edit(i, tensor, target, self._fetch(tensor)[source, :, :length], length)

    def _edit(self, i: int, tensor, row: int, piece: np.ndarray, length: int) -> None:
        host = self._fetch(tensor)
        host[row, :, :length] = piece
        if host is not tensor:
            self._tensors[i] = self._place(host)
            self.bindings.clear()

    def _fetch(self, tensor) -> np.ndarray:
        return tensor if isinstance(tensor, np.ndarray) else tensor.numpy()

    def _place(self, array: np.ndarray):
        return array if self.memory == "cpu" else ort.OrtValue.ortvalue_from_numpy(array, self.memory, DEVICE)

    @property
    def nbytes(self) -> int:
        """Bytes set aside."""
        row = self.num_heads * self.capacity * self.head_dim * np.dtype(self.kind).itemsize
        return len(self._tensors) * self.num_rows * row


@dataclass(frozen=True)
class Cache:
    """A place in a store: the rows from `row` on, holding `lengths` positions each.

    A step returns a new Cache over the same memory and leaves this one valid, so that a cache may be continued again; what
    an earlier continuation wrote behind `lengths` is then overwritten.
    """

    store: Store
    lengths: tuple[int, ...]
    row: int = 0

    @property
    def length(self) -> int:
        """Positions of the longest row."""
        return max(self.lengths)

    def read(self) -> list[np.ndarray]:
        """Copies of the keys and values of a single row: [H, length, head_dim] each."""
        (length,) = self.lengths
        return self.store.read(self.row, length)

    def write(self, pieces: list[np.ndarray]) -> Cache:
        """Begin a single row with what another held."""
        self.store.write(self.row, pieces)
        return Cache(self.store, (pieces[0].shape[1],), self.row)
