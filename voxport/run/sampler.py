"""From logits to the next row: temperature, top-k, top-p, and the state machine that starts and ends speech.

Random numbers are this toolkit's own: the uniform of codebook c at step s is the c-th of
`numpy.random.Philox(key=seed, counter=[0, s, 0, 0]).random_raw(N) >> 11` times 2**-53. A draw thus depends on (seed, step,
codebook) only, never on batch, streaming or what was drawn before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from voxport.errors import UserError
from voxport.manifest import Audio, Sampling
from voxport.run.values import is_number, is_whole

STOP = -1  # what a finished utterance returns for every codebook
SEED_LIMIT = 1 << 63  # seeds are signed 64-bit numbers, as most tools print and parse them


def check_sampling(sampling: Sampling, prefix: str = "") -> Sampling:
    """Return `sampling`; UserError names the value that cannot be used, with `prefix` before its name where there are several."""
    flag = f"--{prefix}"
    if not (is_number(sampling.temperature) and math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise UserError(f"{flag}temperature must be a number of at least 0, not {sampling.temperature!r}")
    if not (is_number(sampling.top_p) and 0 < sampling.top_p <= 1):
        raise UserError(f"{flag}top-p must lie above 0 and not above 1 (1 is off), not {sampling.top_p!r}")
    if not (is_whole(sampling.top_k) and sampling.top_k >= 0):
        raise UserError(f"{flag}top-k must be 0 (off) or a whole number above, not {sampling.top_k!r}")
    return sampling


def check_seed(seed: int) -> int:
    """Return `seed`; UserError unless it is a whole number from 0 to 2**63 - 1."""
    if not (is_whole(seed) and 0 <= seed < SEED_LIMIT):
        raise UserError(f"--seed must be a whole number from 0 to {SEED_LIMIT - 1}, not {seed!r}")
    return int(seed)


def check_frames(max_frames: int, most: int) -> int:
    """Return `max_frames`; UserError unless it is a whole number from 1 to `most`."""
    if not (is_whole(max_frames) and 1 <= max_frames <= most):
        raise UserError(f"--max-frames must be a whole number in 1..{most}, not {max_frames!r}")
    return int(max_frames)


def is_greedy(sampling: Sampling) -> bool:
    """Whether the argmax is taken and no random number is used."""
    return sampling.temperature <= sampling.greedy_temperature or sampling.top_k == 1


def keep_top_k(logits: np.ndarray, top_k: int) -> np.ndarray:
    """bool [..., V]: ids at or above the k-th largest logit; all of a tie at the k-th place are kept. 0 is off."""
    vocab_size = logits.shape[-1]
    if top_k <= 0 or top_k >= vocab_size:
        return np.ones(logits.shape, bool)
    place = vocab_size - top_k
    return logits >= np.partition(logits, place, axis=-1)[..., place, None]


def keep_top_p(logits: np.ndarray, top_p: float) -> np.ndarray:
    """bool [..., V]: the likeliest ids up to and including the one that takes the sum past `top_p`. 1 is off."""
    if top_p >= 1:
        return np.ones(logits.shape, bool)
    order = np.argsort(-logits, axis=-1, kind="stable")
    total = np.cumsum(softmax(np.take_along_axis(logits, order, axis=-1)), axis=-1)
    kept_sorted = np.concatenate([np.ones_like(total[..., :1], bool), total[..., :-1] <= top_p], axis=-1)
    kept = np.empty_like(kept_sorted)
    np.put_along_axis(kept, order, kept_sorted, axis=-1)
    return kept


def softmax(logits: np.ndarray) -> np.ndarray:
    """float64 probabilities over the last axis; -inf becomes 0."""
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """float64 [..., V]: what is drawn from, 0 for ids that a filter dropped. Top-p sees what top-k left."""
    scaled = logits.astype(np.float32) / np.float32(sampling.temperature)
    scaled = np.where(keep_top_k(scaled, sampling.top_k), scaled, -np.inf)
    scaled = np.where(keep_top_p(scaled, sampling.top_p), scaled, -np.inf)
    return softmax(scaled)


def uniforms(seed: int, step: int, num_codebooks: int) -> np.ndarray:
    """float64 [N] in [0, 1): the random numbers of one step."""
    raw = np.random.Philox(key=seed, counter=[0, step, 0, 0]).random_raw(num_codebooks)
    return (raw >> np.uint64(11)) * 2.0**-53


def draw(logits: np.ndarray, sampling: Sampling, uniform: np.ndarray | None) -> np.ndarray:
    """[..., N, V] logits and [..., N] uniforms -> [..., N] ids, each codebook by itself (inverse CDF in id order)."""
    if is_greedy(sampling):
        return logits.argmax(axis=-1)
    total = np.cumsum(probabilities(logits, sampling), axis=-1)
    # the last sum stands for 1 whatever rounding made of it, so an id of probability 0 is never reached
    return (total <= uniform[..., None] * total[..., -1:]).sum(axis=-1)


def distance(logits: np.ndarray, sampling: Sampling, uniform: np.ndarray) -> np.ndarray:
    """[N, V] logits and [N] uniforms -> [N]: how far each draw lies from another outcome.

    Greedy: between the two largest logits. Sampled: the least of the distances between the last logit that top-k and top-p keep
    and the next, of the sum at which top-p cuts, and of the uniform from the edges of the interval that it fell into.
    """
    if is_greedy(sampling):
        best = np.sort(logits, axis=-1)[:, -2:]
        return best[:, 1] - best[:, 0]
    total = np.cumsum(probabilities(logits, sampling), axis=-1)
    edges = np.abs(total - uniform[:, None] * total[:, -1:]).min(axis=-1)
    scaled = logits.astype(np.float32) / np.float32(sampling.temperature)
    return np.minimum(edges, _distance_of_filters(scaled, sampling))


def _distance_of_filters(scaled: np.ndarray, sampling: Sampling) -> np.ndarray:
    nearest, descending = np.full(len(scaled), np.inf), -np.sort(-scaled, axis=-1)
    if 0 < sampling.top_k < scaled.shape[-1]:
        nearest = descending[:, sampling.top_k - 1] - descending[:, sampling.top_k]
        descending[:, sampling.top_k :] = -np.inf
    if sampling.top_p < 1:
        sums = np.cumsum(softmax(descending), axis=-1)
        last = (sums <= sampling.top_p).sum(axis=-1, keepdims=True).clip(max=sums.shape[-1] - 2)
        kept, dropped = (np.take_along_axis(descending, place, axis=-1)[:, 0] for place in (last, last + 1))
        gap = np.where(np.isneginf(dropped), np.inf, kept - np.where(np.isneginf(dropped), 0, dropped))
        nearest = np.minimum(nearest, np.minimum(np.abs(sums - sampling.top_p).min(axis=-1), gap))
    return nearest


@dataclass(frozen=True)
class Dice:
    """How one utterance is sampled: the settings and its seed. Greedy sampling uses no random number."""

    sampling: Sampling
    seed: int

    def roll(self, logits: np.ndarray, step: int) -> np.ndarray:
        """[N, V] logits of row `step` -> [N] ids."""
        greedy = is_greedy(self.sampling)
        return draw(logits, self.sampling, None if greedy else uniforms(self.seed, step, logits.shape[-2]))


class DelayMachine:
    """Start and end of speech, one row at a time (spec 9).

    The first N rows ramp in: codebook c is BOC until row c. From then on EOC in codebook 0 starts a wind-down of N - 2 more
    rows, which let the other codebooks finish. `last_codes` [N] is the row that the model hears next.
    """

    def __init__(self, audio: Audio):
        self.audio = audio
        self.delay_count = 0
        self.eoc_countdown: int | None = None
        self.done = False
        self.last_codes: np.ndarray | None = None

    def advance(self, codes: np.ndarray) -> np.ndarray:
        """[N] sampled ids -> [N] the row that is emitted; -1 everywhere once speech is over."""
        if self.done:
            return np.full(self.audio.num_codebooks, STOP, np.int64)
        row = codes.astype(np.int64)
        if self.delay_count < self.audio.num_codebooks:
            self._ramp_in(row)
        else:
            self._watch_end(row)
        if not self.done:
            self.last_codes = row
        return row

    def _ramp_in(self, row: np.ndarray) -> None:
        row[self.delay_count + 1 :] = self.audio.boc_id
        self.delay_count += 1

    def _watch_end(self, row: np.ndarray) -> None:
        if self.eoc_countdown is not None:
            self.eoc_countdown -= 1
        elif row[0] == self.audio.eoc_id:
            self.eoc_countdown = self.audio.num_codebooks - 2
        self.done = self.eoc_countdown is not None and self.eoc_countdown <= 0
