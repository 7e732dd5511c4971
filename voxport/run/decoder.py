"""The language model with its cache: prefill a prompt, then one step a row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnxruntime as ort

from voxport.errors import UserError
from voxport.manifest import Dims, KVCache
from voxport.run.session import Graph, check_alive

EMBEDS, MASK, POSITIONS, HIDDEN = "inputs_embeds", "attention_mask", "position_ids", "hidden_states"


@dataclass(frozen=True)
class Cache:
    """Keys and values of `length` positions, as OrtValues in the provider's memory.

    A step makes a new Cache and leaves the old one whole, so a cache can be kept and continued more than once.
    """

    values: tuple[ort.OrtValue, ...]
    length: int


class Decoder:
    """Qwen3 body: embeddings in, hidden state of the last position out. Holds no state of any utterance."""

    def __init__(self, graph: Graph, names: KVCache, dims: Dims):
        self.graph = graph
        layers = range(dims.num_layers)
        self.past_names = _each(names.past_key, names.past_value, layers)
        self.present_names = _each(names.present_key, names.present_value, layers)
        graph.require([EMBEDS, *self.past_names], [HIDDEN, *self.present_names])
        self._check_kinds(names)
        self.empty_shape = [1, dims.num_kv_heads, 0, dims.head_dim]

    def _check_kinds(self, names: KVCache) -> None:
        declared = np.dtype(self.graph.input_types[self.past_names[0]])
        if declared != np.dtype(names.dtype):
            raise UserError(f"{self.graph.name}: the cache is {declared}, the manifest says {names.dtype}; build it again")

    def prefill(self, embeds: np.ndarray) -> tuple[np.ndarray, Cache]:
        """Read a prompt [1, S, D]. Returns the hidden state [1, 1, D] that predicts row 0, and the cache.

        A provider that computes nothing (zeros, NaN) is stopped here, before it speaks noise.
        """
        hidden, cache = self.step(self.empty_cache(), embeds)
        return check_alive(hidden, "hidden states of the prompt", self.graph), cache

    def empty_cache(self) -> Cache:
        """A cache of no positions."""
        kind, memory = self.graph.input_types[self.past_names[0]], self.graph.memory
        with self.graph.explained():
            empty = [ort.OrtValue.ortvalue_from_shape_and_type(self.empty_shape, kind, memory) for _ in self.past_names]
        return Cache(tuple(empty), 0)

    def step(self, cache: Cache, embeds: np.ndarray) -> tuple[np.ndarray, Cache]:
        """Read [1, S, D] after what `cache` holds. Returns the last hidden state [1, 1, D] and the longer cache."""
        hidden, cache = self._advance(cache, embeds)
        return hidden[:, -1:], cache

    def states(self, embeds: np.ndarray) -> np.ndarray:
        """Hidden states [1, S, D] of every position of a sequence [1, S, D] that stands alone."""
        return self._advance(self.empty_cache(), embeds)[0]

    def _advance(self, cache: Cache, embeds: np.ndarray) -> tuple[np.ndarray, Cache]:
        length = cache.length + embeds.shape[1]
        feeds = self._feeds(embeds, cache.length, length)  # held until the run is over: a binding borrows their memory
        with self.graph.explained():
            binding = self._bind(cache, feeds)
            self.graph.session.run_with_iobinding(binding)
            hidden, *present = binding.get_outputs()
            last = hidden.numpy()[:, -1:].copy()  # a view would keep the hidden states of the whole prompt alive
            return last, Cache(tuple(present), length)

    def _bind(self, cache: Cache, feeds: dict[str, np.ndarray]) -> ort.IOBinding:
        """Past by handle, hidden states to the host, present where the provider keeps it: no copy through NumPy."""
        binding = self.graph.session.io_binding()
        for name, value in feeds.items():
            binding.bind_cpu_input(name, value)
        for name, value in zip(self.past_names, cache.values, strict=True):
            binding.bind_ortvalue_input(name, value)
        binding.bind_output(HIDDEN, "cpu")
        for name in self.present_names:
            binding.bind_output(name, self.graph.memory)
        return binding

    def _feeds(self, embeds: np.ndarray, start: int, length: int) -> dict[str, np.ndarray]:
        feeds = {EMBEDS: embeds, MASK: np.ones((1, length)), POSITIONS: np.arange(start, length)[None]}
        return {name: self.graph.cast(name, value) for name, value in feeds.items() if name in self.graph.input_types}


def _each(key: str, value: str, layers: range) -> list[str]:
    return [template.format(layer) for layer in layers for template in (key, value)]
