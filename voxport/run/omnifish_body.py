"""The body as a graph of plain operators, for providers that do not know GroupQueryAttention's attribute `causal`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from voxport.manifest import Dims, KVCache
from voxport.manifest_omnifish import BODY, EXPLICIT, OmniFishManifest
from voxport.run.decoder import EMBEDS, HIDDEN, Decoder
from voxport.run.session import Graph, Parts


@dataclass(frozen=True)
class PlainCache:
    """Keys and values [1, H, P, d] of every layer. It is never written to, so that it may be continued again."""

    tensors: list[np.ndarray]


class PlainDecoder:
    """What `Decoder` does, with a cache that each pass copies: correct on every provider, slower with a long past."""

    def __init__(self, graph: Graph, names: KVCache, dims: Dims):
        self.graph, self.dims = graph, dims
        templates = ((names.past_key, names.present_key), (names.past_value, names.present_value))
        pairs = [(past.format(i), present.format(i)) for i in range(dims.num_layers) for past, present in templates]
        self.past_names, self.present_names = zip(*pairs)
        graph.require([EMBEDS, *self.past_names], [HIDDEN, *self.present_names])

    def empty_cache(self) -> PlainCache:
        """A cache of no positions."""
        shape = (1, self.dims.num_kv_heads, 0, self.dims.head_dim)
        return PlainCache([np.empty(shape, np.float32)] * len(self.past_names))

    def advance(self, cache: PlainCache, embeds: np.ndarray) -> tuple[np.ndarray, PlainCache]:
        """Read [1, S, D] after what the cache holds. Returns the hidden states [1, S, D] and the longer cache."""
        feeds = {EMBEDS: embeds, **dict(zip(self.past_names, cache.tensors, strict=True))}
        with self.graph.explained():
            feeds = {name: self.graph.cast(name, value) for name, value in feeds.items()}
            hidden, *present = self.graph.session.run([HIDDEN, *self.present_names], feeds)
        return hidden, PlainCache(present)

    def states(self, embeds: np.ndarray) -> np.ndarray:
        """Hidden states [1, S, D] of a sequence [1, S, D] that stands alone."""
        return self.advance(self.empty_cache(), embeds)[0]


def make_decoder(parts: Parts, manifest: OmniFishManifest) -> Decoder | PlainDecoder:
    """The body's decoder, of the kind that was built."""
    kind = PlainDecoder if manifest.attention == EXPLICIT else Decoder
    return kind(parts[BODY], manifest.kv_cache, manifest.dims)
