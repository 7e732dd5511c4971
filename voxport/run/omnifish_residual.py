"""The nine residual codes of each frame, by either kind of decoder, with keys and values of earlier frames kept.

Shapes: S frames of a block, P frames before it, D hidden, M width of the decoder, N codebooks, L layers, H key heads, d head
size, j levels.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from voxport.manifest_omnifish import AXIAL, MTP_LAYERS, MTP_PRIME, MTP_STEP, OmniFishManifest
from voxport.run.omnifish_blocks import confidence_of, reveal, still_masked
from voxport.run.session import Graph, Parts, check_alive

Choose = Callable[[np.ndarray, int, int], np.ndarray]  # logits [S, ids], level (from 1), round -> ids [S]
KV = tuple[np.ndarray, np.ndarray]


def run_all(graph: Graph, **feeds: np.ndarray) -> list[np.ndarray]:
    """All outputs in graph order."""
    with graph.explained():
        return graph.session.run(None, {name: graph.cast(name, value) for name, value in feeds.items()})


def extend(kept: KV, new: KV, axis: int) -> KV:
    """Keys and values with those of the next frames behind them."""
    return tuple(np.concatenate(pair, axis=axis) for pair in zip(kept, new))


def empty(*shape: int) -> KV:
    return np.empty(shape, np.float32), np.empty(shape, np.float32)


class AxialDecoder:
    """Level after level over a grid of frames and codebooks. `frames[j]` are keys and values [L, H, P, d] of level j."""

    def __init__(self, parts: Parts, manifest: OmniFishManifest):
        self.parts, self.config = parts, manifest.residual
        self.levels = len(manifest.codebooks.sizes) - 1
        self.count = 0

    def needs(self, frames: int) -> tuple[str, ...]:
        """The parts that speaking behind a reference of so many frames takes."""
        return (MTP_PRIME, MTP_STEP) if frames else (MTP_STEP,)

    def prime(self, h: np.ndarray, codes: np.ndarray) -> None:
        """Begin with a reference of P frames, states h [P, D] and codes [N, P]; P may be 0."""
        shape = (self.config.num_layers, self.config.num_kv_heads, 0, self.config.head_dim)
        self.count, self.prompt = len(h), empty(*shape)
        self.frames = [empty(*shape)] * self.levels
        if not len(h):
            return
        k, v, *self.prompt = run_all(self.parts[MTP_PRIME], h=h[None], codes=codes[None])
        self.frames = [(k[:, level], v[:, level]) for level in range(self.levels)]

    def decode(self, h: np.ndarray, semantic: np.ndarray, choose: Choose) -> np.ndarray:
        """The next block's states h [S, D] and semantic codes [S] -> all its codes [N, S]."""
        config, codes = self.config, [semantic]
        own = empty(config.num_layers, len(h), config.num_kv_heads, 0, config.head_dim)
        for level in range(self.levels):
            logits, own = self.step(level, h, codes[-1], own)
            codes.append(choose(logits, level + 1, 0))
        self.count += len(h)
        return np.stack(codes).astype(np.int64)

    def step(self, level: int, h: np.ndarray, code: np.ndarray, own: KV) -> tuple[np.ndarray, KV]:
        """Logits [S, ids] of the next level, and the block's own keys and values, this level included."""
        graph, frames = self.parts[MTP_STEP], self.frames[level]
        positions = np.arange(self.count, self.count + len(h))
        feeds = {"h": h[None], "code": code[None], "level": np.array(level), "position": positions[None]}
        feeds |= {"lvl_k": own[0], "lvl_v": own[1], "frm_k": frames[0], "frm_v": frames[1]}
        if self.config.prompt_cross:
            feeds |= {"px_k": self.prompt[0], "px_v": self.prompt[1]}
        logits, *kept = run_all(graph, **feeds)
        self.frames[level] = extend(frames, kept[2:], axis=2)
        return check_alive(logits[0, :, level], "logits", graph), (kept[0], kept[1])


class ChainDecoder:
    """Nine small transformers over frames, one a codebook. `past[k]` are the *clean* keys and values [L, H, P, d] of link k:
    those of a pass that was shown the code it predicts."""

    def __init__(self, parts: Parts, manifest: OmniFishManifest):
        self.parts, self.config, self.rounds = parts, manifest.residual, manifest.generation.residual_rounds
        self.mask_ids = manifest.codebooks.sizes[1:]  # the id behind a link's codes
        self.count = 0

    def needs(self, frames: int) -> tuple[str, ...]:
        """The parts that speaking behind a reference of so many frames takes."""
        return MTP_LAYERS

    def prime(self, h: np.ndarray, codes: np.ndarray) -> None:
        """Begin with a reference of P frames, states h [P, D] and codes [N, P]; P may be 0."""
        shape = (self.config.num_layers, self.config.num_kv_heads, 0, self.config.head_dim)
        self.past = [empty(*shape) for _ in MTP_LAYERS]
        self.count = 0
        for k in range(len(MTP_LAYERS)) if len(h) else ():
            h = self.clean(k, h, codes[k], codes[k + 1])
        self.count = codes.shape[1]

    def decode(self, h: np.ndarray, semantic: np.ndarray, choose: Choose) -> np.ndarray:
        """The next block's states h [S, D] and semantic codes [S] -> all its codes [N, S]."""
        codes = [semantic]
        for k in range(len(MTP_LAYERS)):
            codes.append(self.unmask(k, h, codes[k], choose))
            h = self.clean(k, h, codes[k], codes[k + 1])
        self.count += len(semantic)
        return np.stack(codes).astype(np.int64)

    def unmask(self, k: int, h: np.ndarray, code: np.ndarray, choose: Choose) -> np.ndarray:
        """Code k + 1 [S] of the block's frames, revealed in a few rounds."""
        mask_id = self.mask_ids[k]
        ids = np.full(len(code), mask_id, np.int64)
        for step in range(self.rounds):
            _, logits, *_ = self.link(k, h, code, ids)
            chosen = choose(logits[0], k + 1, step)
            confidence = confidence_of(logits[0], chosen)
            ids = reveal(ids, mask_id, chosen, confidence, still_masked(len(ids), step, self.rounds))
        return ids

    def clean(self, k: int, h: np.ndarray, code: np.ndarray, revealed: np.ndarray) -> np.ndarray:
        """Keep link k's keys and values of frames whose codes are known; returns their states [S, M]."""
        state, _, *new = self.link(k, h, code, revealed)
        self.past[k] = extend(self.past[k], new, axis=2)
        return check_alive(state[0], "states", self.parts[MTP_LAYERS[k]])

    def link(self, k: int, h: np.ndarray, code: np.ndarray, revealed: np.ndarray) -> list[np.ndarray]:
        """States, logits, keys and values of one link."""
        positions = np.arange(self.count, self.count + len(h))
        past_k, past_v = self.past[k]
        feeds = {"h": h[None], "code": code[None], "revealed": revealed[None], "position": positions[None]}
        return run_all(self.parts[MTP_LAYERS[k]], past_k=past_k, past_v=past_v, **feeds)


def make_residual(parts: Parts, manifest: OmniFishManifest) -> AxialDecoder | ChainDecoder:
    """A fresh decoder of the build's kind."""
    return (AxialDecoder if manifest.residual.kind == AXIAL else ChainDecoder)(parts, manifest)
