"""The language model with its cache: prefill a prompt, then one step a row, for one utterance or several at once."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort

from voxport.errors import UserError
from voxport.manifest import Dims, KVCache
from voxport.run.cache import Cache, Store
from voxport.run.session import Graph, check_alive

EMBEDS, MASK, POSITIONS, HIDDEN = "inputs_embeds", "attention_mask", "position_ids", "hidden_states"


class Decoder:
    """Qwen3 body: embeddings in, hidden state of the last position out. Holds no state of any utterance."""

    def __init__(self, graph: Graph, names: KVCache, dims: Dims):
        self.graph, self.dims = graph, dims
        layers = range(dims.num_layers)
        self.past_names = _each(names.past_key, names.past_value, layers)
        self.present_names = _each(names.present_key, names.present_value, layers)
        graph.require([EMBEDS, *self.past_names], [HIDDEN, *self.present_names])
        self._check_kinds(names)
        self.kind = graph.input_types[self.past_names[0]]
        # float32 attention exists on the CPU only, whatever the provider: there the cache is at hand
        self.memory = "cpu" if self.kind is np.float32 else graph.memory

    def _check_kinds(self, names: KVCache) -> None:
        declared = np.dtype(self.graph.input_types[self.past_names[0]])
        if declared != np.dtype(names.dtype):
            raise UserError(f"{self.graph.name}: the cache is {declared}, the manifest says {names.dtype}; build it again")

    def prefill(self, embeds: np.ndarray, cache: Cache | None = None) -> tuple[np.ndarray, Cache]:
        """Read a prompt [1, S, D], or the rest of one. Returns the hidden state [1, 1, D] that predicts row 0, and the cache.

        A provider that computes nothing (zeros, NaN) is stopped here, before it speaks noise.
        """
        hidden, cache = self.step(cache or self.empty_cache(), embeds)
        return check_alive(hidden, "hidden states of the prompt", self.graph), cache

    def empty_cache(self, num_rows: int = 1) -> Cache:
        """A cache of `num_rows` rows and no positions."""
        shape = (num_rows, self.dims.num_kv_heads, self.dims.head_dim)
        with self.graph.explained():
            return Cache(Store(len(self.past_names), shape, self.kind, self.memory), (0,) * num_rows)

    def step(self, cache: Cache, embeds: np.ndarray) -> tuple[np.ndarray, Cache]:
        """Read [B, S, D] after what `cache` holds. Returns the last hidden states [B, 1, D] and the longer cache."""
        hidden, cache = self.advance(cache, embeds)
        if hidden.shape[1] > 1:
            hidden = hidden[:, -1:].copy()  # a view would keep the hidden states of the whole prompt alive
        return hidden, cache

    def states(self, embeds: np.ndarray) -> np.ndarray:
        """Hidden states [1, S, D] of every position of a sequence [1, S, D] that stands alone."""
        return self.advance(self.empty_cache(), embeds)[0]

    def advance(self, cache: Cache, embeds: np.ndarray) -> tuple[np.ndarray, Cache]:
        """Read [B, S, D] after what each row of `cache` holds. Returns the hidden states [B, S, D] and the longer cache.

        ONNX Runtime takes more than one position behind a past for one row only: S > 1 needs B = 1.
        """
        longer = Cache(cache.store, tuple(length + embeds.shape[1] for length in cache.lengths), cache.row)
        hidden = np.empty((*embeds.shape[:2], self.dims.hidden_size), self.graph.output_types[HIDDEN])
        feeds = self._feeds(embeds, cache.lengths)  # held until the run is over: a binding borrows their memory
        with self.graph.explained():
            cache.store.reserve(longer.length)
            binding = self._binding(cache)
            for name, value in feeds.items():
                binding.bind_cpu_input(name, value)
            binding.bind_output(HIDDEN, "cpu", 0, hidden.dtype.type, hidden.shape, hidden.ctypes.data)
            self.graph.session.run_with_iobinding(binding)
        return hidden, longer

    def _binding(self, cache: Cache) -> ort.IOBinding:
        """Past and present of these rows, bound once and kept until the memory moves."""
        place = (cache.row, len(cache.lengths))
        if place not in cache.store.bindings:
            binding = self.graph.session.io_binding()
            cache.store.bind(binding, self.past_names, self.present_names, *place)
            cache.store.bindings[place] = binding
        return cache.store.bindings[place]

    def _feeds(self, embeds: np.ndarray, starts: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Rows of unequal length are told apart by their masks: the attention counts the ones of each row."""
        begin, new = np.array(starts)[:, None], embeds.shape[1]
        mask = np.arange(max(starts) + new) < begin + new
        feeds = {EMBEDS: embeds, MASK: mask, POSITIONS: begin + np.arange(new)}
        return {name: self.graph.cast(name, value) for name, value in feeds.items() if name in self.graph.input_types}


def _each(key: str, value: str, layers: range) -> list[str]:
    return [template.format(layer) for layer in layers for template in (key, value)]
