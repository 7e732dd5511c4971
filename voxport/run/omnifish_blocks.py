"""Block diffusion over semantic ids: a block of B frames is all unknown, and a few rounds reveal it, most confident first.

One graph serves every pass: each sees the positions kept before it and the whole of itself. What a pass adds is kept or
dropped by continuing from its cache or from the one before.

Shapes: S positions of a pass, D hidden, N codebooks, V ids of an input table, T frames, B frames of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from voxport.errors import UserError, WorkError
from voxport.manifest import Sampling
from voxport.manifest_omnifish import AUDIO_EMBED, BODY, FULL, SEMANTIC_HEAD, TEXT_EMBED, Codebooks, OmniFishManifest
from voxport.run.cache import Cache
from voxport.run.decoder import Decoder
from voxport.run.omnifish_body import PlainCache, PlainDecoder, make_decoder
from voxport.run.sampler import draw, is_greedy, softmax
from voxport.run.session import Parts, check_alive
from voxport.run.speech import Stopwatch

PROBE_POSITIONS, PROBE_SEED = 8, 0
LEAST_REACH = 1e-4  # of a state's size: what a change at the last position must do to the first; a causal graph gives 0
SEMANTIC_LEVEL = 0  # of the random numbers; level j of the residual decoder draws code j + 1

Kept = Cache | PlainCache


@dataclass(frozen=True)
class Dice:
    """How one utterance is drawn. A draw depends on seed, block, level, round and frame only: streaming changes none."""

    seed: int
    semantic: Sampling
    residual: Sampling

    def choose(self, logits: np.ndarray, block: int, level: int, step: int) -> np.ndarray:
        """logits [S, ids] -> ids [S]."""
        sampling = self.residual if level else self.semantic
        if is_greedy(sampling):
            return logits.argmax(axis=-1)
        raw = np.random.Philox(key=self.seed, counter=[0, block, level, step]).random_raw(len(logits))
        return draw(logits, sampling, (raw >> np.uint64(11)) * 2.0**-53)


def still_masked(size: int, step: int, steps: int) -> int:
    """Frames of `size` that stay masked after round `step` of `steps` (from 0), rounded down: a cosine from all to none."""
    return max(0, math.floor(size * math.cos(math.pi / 2 * (step + 1) / steps)))  # a rounded cos(pi / 2) may be below 0


def confidence_of(logits: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Probability [S] of the chosen id [S] under logits [S, ids], at temperature 1 whatever chose it."""
    return np.take_along_axis(softmax(logits), chosen[:, None], axis=-1)[:, 0]


def reveal(
    ids: np.ndarray, mask_id: int, chosen: np.ndarray, confidence: np.ndarray, keep: int, threshold: float | None = None
) -> np.ndarray:
    """ids [S] with the most confident masked frames (the earlier ones on ties) set to `chosen` until `keep` stay masked.

    With a threshold, every masked frame whose confidence is above it is revealed as well.
    """
    masked = ids == mask_id
    order = np.argsort(np.where(masked, -confidence, 1.0), kind="stable")
    shown = np.zeros_like(masked)
    shown[order[: max(0, int(masked.sum()) - keep)]] = True
    if threshold is not None:
        shown |= confidence > threshold
    return np.where(masked & shown, chosen, ids)


def close_block(ids: np.ndarray, books: Codebooks) -> tuple[np.ndarray, int]:
    """ids [B] -> what training showed of them, and how many frames are speech: the first END or PAD ends it, PADs follow."""
    special = np.flatnonzero(ids >= books.end_id)
    if not len(special):
        return ids, len(ids)
    speech = int(special[0])
    pads = [books.pad_ids[i % len(books.pad_ids)] for i in range(len(ids) - speech - 1)]
    return np.concatenate([ids[:speech], [books.end_id, *pads]]).astype(np.int64), speech


@dataclass
class Block:
    """One block: ids after each round [B], `semantic` ids as closed [B], of which `speech` are spoken, `hidden` [B, D] of the
    pass over them, and once the residual decoder is done `codes` [N, speech]."""

    rounds: list[np.ndarray]
    semantic: np.ndarray
    speech: int
    hidden: np.ndarray
    codes: np.ndarray


@dataclass
class Model:
    """The parts that every pass of the body needs."""

    parts: Parts
    manifest: OmniFishManifest
    decoder: Decoder | PlainDecoder = field(init=False)

    def __post_init__(self):
        self.parts.load(TEXT_EMBED, AUDIO_EMBED, BODY, SEMANTIC_HEAD)
        self.decoder = make_decoder(self.parts, self.manifest)
        check_sees_ahead(self.decoder)

    def embed_text(self, ids: list[int]) -> np.ndarray:
        """ids [S] -> [1, S, D] float32."""
        return self.parts[TEXT_EMBED].run(input_ids=np.array(ids, np.int64)[None]).astype(np.float32)

    def embed_audio(self, codes: np.ndarray) -> np.ndarray:
        """codes [N, T] -> [1, T, D] float32. UserError on an id that would read another codebook's rows."""
        books = self.manifest.codebooks
        if len(codes) != len(books.sizes) or codes.size and not 0 <= codes.min() <= codes.max() < books.vocab_size:
            raise UserError(f"codes {list(codes.shape)} are not {len(books.sizes)} rows of ids below {books.vocab_size}")
        return self.parts[AUDIO_EMBED].run(codes=codes[None]).astype(np.float32)

    def semantic_only(self, semantic: np.ndarray) -> np.ndarray:
        """Semantic ids [T] as codes [N, T] with every residual code masked."""
        books = self.manifest.codebooks
        codes = np.full((len(books.sizes), len(semantic)), books.mask_id, np.int64)
        codes[0] = semantic
        return codes

    def read(self, codes: np.ndarray, cache: Kept) -> tuple[np.ndarray, Kept]:
        """Frames [N, T] behind `cache`: states [T, D] float32, and the longer cache."""
        hidden, cache = self.decoder.advance(cache, self.embed_audio(codes))
        return hidden[0].astype(np.float32), cache

    def prefill(self, ids: list[int], ref_codes: np.ndarray) -> tuple[np.ndarray, Kept]:
        """Text, then reference frames [N, P]: states [P, D] of the frames, and the cache."""
        embeds = [self.embed_text(ids)] + ([self.embed_audio(ref_codes)] if ref_codes.size else [])
        hidden, cache = self.decoder.advance(self.decoder.empty_cache(), np.concatenate(embeds, axis=1))
        check_alive(hidden, "hidden states of the prompt", self.decoder.graph)
        return hidden[0, len(ids) :].astype(np.float32), cache

    def semantic_logits(self, hidden: np.ndarray) -> np.ndarray:
        """hidden [S, D] -> logits [S, V] float32; MASK is no answer."""
        graph = self.parts[SEMANTIC_HEAD]
        logits = graph.run(hidden_states=hidden[None])[0].astype(np.float32)
        if logits.shape[-1] != self.manifest.codebooks.vocab_size:
            wanted = self.manifest.codebooks.vocab_size
            raise UserError(f"{graph.name} gives {logits.shape[-1]} logits, the manifest says {wanted}; build it again")
        check_alive(logits, "logits", graph)[:, self.manifest.codebooks.mask_id] = -np.inf
        return logits


def check_sees_ahead(decoder: Decoder | PlainDecoder) -> None:
    """WorkError if the last position does not reach the first state: a causal decoder speaks noise, and nothing else fails."""
    embeds = np.random.default_rng(PROBE_SEED).standard_normal((1, PROBE_POSITIONS, decoder.dims.hidden_size), np.float32)
    changed = embeds.copy()
    changed[:, -1] *= -1
    first, other = (decoder.states(x)[0, 0] for x in (embeds, changed))
    if np.abs(first - other).max() <= LEAST_REACH * np.abs(first).max():
        raise WorkError(
            f"{decoder.graph.name} on {decoder.graph.provider} attends to the past only, and this model looks ahead: the "
            "provider ignores the attribute `causal`; install onnxruntime 1.30 or newer, build with --attention explicit, or "
            "speak with --provider cpu"
        )


@dataclass
class BlockWriter:
    """Writes one utterance block by block: what is kept of it, and how it is drawn.

    `residual` turns states and semantic ids of a block into codes; `steps` and `threshold` are the run's own.
    """

    model: Model
    cache: Kept
    residual: object
    dice: Dice
    steps: int
    threshold: float | None
    watch: Stopwatch
    count: int = 0

    def write(self) -> Block:
        """The next block."""
        with self.watch.lap("body"):
            rounds = self.denoise()
            semantic, speech = close_block(rounds[-1], self.model.manifest.codebooks)
            hidden, seen = self.model.read(self.model.semantic_only(semantic), self.cache)
        with self.watch.lap("residual"):
            codes = self.fill(hidden[:speech], semantic[:speech])
        with self.watch.lap("body"):
            self.keep(codes, seen)
        self.count += 1
        return Block(rounds, semantic, speech, hidden, codes)

    def denoise(self) -> list[np.ndarray]:
        """ids [B] after each round; the cache stays as it is."""
        books, size = self.model.manifest.codebooks, self.model.manifest.generation.block_size
        ids, rounds = np.full(size, books.mask_id, np.int64), []
        for step in range(self.steps):
            hidden, _ = self.model.read(self.model.semantic_only(ids), self.cache)
            logits = self.model.semantic_logits(hidden)
            chosen = self.dice.choose(logits, self.count, SEMANTIC_LEVEL, step)
            confidence = confidence_of(logits, chosen)
            ids = reveal(ids, books.mask_id, chosen, confidence, still_masked(size, step, self.steps), self.threshold)
            rounds.append(ids)
            if not (ids == books.mask_id).any():
                break
        return rounds

    def fill(self, hidden: np.ndarray, semantic: np.ndarray) -> np.ndarray:
        """All codes [N, n] of the n frames of speech; the pass that made the states saw END and PAD too."""
        if not len(semantic):
            return np.empty((len(self.model.manifest.codebooks.sizes), 0), np.int64)
        choose = lambda logits, level, step: self.dice.choose(logits, self.count, level, step)
        return self.residual.decode(hidden, semantic, choose)

    def keep(self, codes: np.ndarray, seen: Kept) -> None:
        """Later blocks see all codes of this one, or what the last pass saw. Nothing follows a block that ended."""
        generation = self.model.manifest.generation
        if codes.shape[1] < generation.block_size:
            return
        self.cache = self.model.read(codes, self.cache)[1] if generation.context_mode == FULL else seen
