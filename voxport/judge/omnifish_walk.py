"""One utterance of an OmniFish build, and the same choices as the original sees them: each pass of the body, each residual code.

The build speaks greedily; then build and original are led along what it chose, so that no difference can lead to the next one.

Shapes: S positions of a pass, D hidden, N codebooks, T frames, B frames of a block, P frames of a reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from _ref import omnifish as ref
from _ref.omnifish import OmniFish
from voxport.build.check import PartSession
from voxport.build.omnifish_checkpoint import OmniFishCheckpoint
from voxport.judge.marks import MARKS, Marks
from voxport.judge.omnifish_weights import MatchedWeights
from voxport.judge.weights import GraphWeights, decoder_weights
from voxport.manifest_omnifish import AXIAL, BODY, FULL, GQA, OmniFishManifest
from voxport.run.omnifish import Speaker
from voxport.run.omnifish_blocks import Block
from voxport.run.omnifish_request import Wish, check_wish
from voxport.run.omnifish_residual import AxialDecoder, ChainDecoder, make_residual
from voxport.run.speech import Stopwatch

Advance = Callable[[np.ndarray, Any], tuple[np.ndarray, Any]]  # embeds [S, D], what is kept -> states [S, D], what is kept
Levels = list[list[np.ndarray]]  # logits [S, ids] of each round of each level of one block


@dataclass(frozen=True)
class Bench:
    """What is judged and against what."""

    speaker: Speaker
    checkpoint: OmniFishCheckpoint

    @property
    def manifest(self) -> OmniFishManifest:
        return self.speaker.manifest

    @property
    def marks(self) -> Marks:
        return MARKS[self.manifest.target.precision]

    @cached_property
    def original(self) -> OmniFish:
        """The original, its body read layer by layer."""
        return self.with_weights({})

    def with_weights(self, weights: Any) -> OmniFish:
        """The original with `weights` in place of its own."""
        tensors = {**dict.fromkeys(self.checkpoint), **dict.fromkeys(weights)}
        read = _Chain(tensors, weights, self.checkpoint)
        return OmniFish(self.checkpoint.config, read, self.checkpoint.lang_start, self.checkpoint.languages)

    @property
    def graph(self) -> Path:
        return self.speaker.folder / self.manifest.part(BODY).graph

    @cached_property
    def weights(self) -> GraphWeights | None:
        """What the body's graph holds; None where its attention is spelt out, and matrices have no names."""
        return decoder_weights(self.graph, ref.LAYER, ref.FINAL_NORM) if self.manifest.attention == GQA else None

    def matched(self, part: str) -> MatchedWeights:
        """The matrices of a residual part under the names of their sources."""
        return MatchedWeights.open(self.speaker.folder / self.manifest.part(part).graph, part, self.checkpoint)

    def overlaid(self, weights: MatchedWeights) -> OmniFishCheckpoint:
        """The checkpoint with the matrices that a part holds in place of its own."""
        return replace(self.checkpoint, tensors={**self.checkpoint.tensors, **weights.split()})

    def session(self, part: str, edited: bytes | None = None) -> PartSession:
        return PartSession(self.speaker.folder / self.manifest.part(part).graph, edited)


class _Chain(dict):
    """Names of tensors, each read when it is asked for: from `first` if it has it, else from `second`."""

    def __init__(self, names: dict, first: Any, second: Any):
        super().__init__(names)
        self.first, self.second = first, second

    def __getitem__(self, name: str):
        return self.first[name] if name in self.first else self.second[name]


@dataclass(frozen=True)
class Case:
    """One utterance as the build spoke it: the build's embeddings [S, D] of its text, codes [N, P] of its reference, and blocks."""

    name: str
    text: np.ndarray
    reference: np.ndarray
    blocks: list[Block]

    @property
    def codes(self) -> np.ndarray:
        """[N, T]."""
        return np.concatenate([block.codes for block in self.blocks], axis=1)


@dataclass(frozen=True)
class Step:
    """One pass over a block: codes [N, B] that it is shown, whether what follows sees it, and of a round the ids [B] before and
    after it, with the number of its first frame."""

    codes: np.ndarray
    keeps: bool
    start: int
    ids: tuple[np.ndarray, np.ndarray] | None = None


@dataclass(frozen=True)
class View:
    """A case as build and original see it: states of the prompt and of every step, logits of the rounds [B, V], and of every block
    with speech those of the residual decoders."""

    case: Case
    steps: list[Step]
    states: list[np.ndarray]
    expected: list[np.ndarray]
    logits: list[np.ndarray]
    expected_logits: list[np.ndarray]
    levels: list[Levels]
    expected_levels: list[Levels]

    @property
    def rounds(self) -> Iterator[tuple[Step, np.ndarray, np.ndarray]]:
        """Each round with the logits of both."""
        yield from zip([step for step in self.steps if step.ids], self.logits, self.expected_logits)

    @property
    def spoken(self) -> Iterator[tuple[int, Block, Levels, Levels]]:
        """Each block with speech, the number of its first frame, and the residual logits of both."""
        start, sides = 0, zip(self.levels, self.expected_levels)
        for block in self.case.blocks:
            if block.speech:
                yield start, block, *next(sides)
            start += block.speech


def speak_cases(speaker: Speaker, requests: list[dict], max_frames: int) -> list[Case]:
    """Speak each request greedily for at most `max_frames` frames."""
    cases = []
    for request in requests:
        wish = Wish(**request, temperature=0.0, residual_temperature=0.0, seed=0, max_frames=max_frames)
        take = speaker.begin(check_wish(wish, speaker.manifest), Stopwatch())
        reference = take.voice.codes if take.voice else np.empty((len(speaker.manifest.codebooks.sizes), 0), np.int64)
        text = speaker.model.embed_text(take.prompt_ids.tolist())[0]
        cases.append(Case(request["text"], text, reference, list(take.blocks())))
    return cases


def list_steps(case: Case, speaker: Speaker) -> list[Step]:
    """The passes in which a case came about."""
    model, generation, start = speaker.model, speaker.manifest.generation, 0
    steps = []
    for block in case.blocks:
        ids = [np.full_like(block.semantic, speaker.manifest.codebooks.mask_id), *block.rounds]
        steps += [Step(model.semantic_only(before), False, start, (before, after)) for before, after in zip(ids, ids[1:])]
        is_full, sees_all = block.speech == generation.block_size, generation.context_mode == FULL
        steps.append(Step(model.semantic_only(block.semantic), is_full and not sees_all, start))
        if is_full and sees_all:
            steps.append(Step(block.codes, True, start))
        start += block.speech
    return steps


def walk(steps: list[Step], prompt: np.ndarray, embed: Callable, advance: Advance, nothing: Any) -> list[np.ndarray]:
    """States [S, D] of the prompt and of each step, as one side computes them."""
    states, kept = advance(prompt, nothing)
    made = [states]
    for step in steps:
        states, longer = advance(embed(step.codes), kept)
        kept = longer if step.keeps else kept
        made.append(states)
    return made


def take_view(bench: Bench, case: Case) -> View:
    """Run build and original along a case."""
    speaker, original = bench.speaker, bench.original
    model, steps = speaker.model, list_steps(case, speaker)

    def ours(embeds: np.ndarray, kept: Any) -> tuple[np.ndarray, Any]:
        hidden, kept = model.decoder.advance(kept, embeds[None])
        return hidden[0].astype(np.float32), kept

    def theirs(embeds: np.ndarray, kept: Any) -> tuple[np.ndarray, Any]:
        hidden, kept = original.hidden_states(torch.from_numpy(embeds), kept)
        return hidden.numpy(), kept

    read = lambda codes: original.embed_audio(torch.from_numpy(codes)).numpy()
    write = lambda codes: model.embed_audio(codes)[0]
    prompt = lambda embed: np.concatenate([case.text, embed(case.reference)]) if case.reference.size else case.text
    with torch.no_grad():
        states = walk(steps, prompt(write), write, ours, model.decoder.empty_cache())
        expected = walk(steps, prompt(read), read, theirs, None)
        rounds = [i for i, step in enumerate(steps, 1) if step.ids]
        logits = [model.semantic_logits(states[i]) for i in rounds]
        expected_logits = [original.semantic_logits(torch.from_numpy(expected[i])).numpy() for i in rounds]
        for values in expected_logits:
            values[:, bench.manifest.codebooks.mask_id] = -np.inf
        levels = [lead_residual(bench, case, steps, side, own) for side, own in ((states, True), (expected, False))]
    return View(case, steps, states, expected, logits, expected_logits, *levels)


def lead_residual(bench: Bench, case: Case, steps: list[Step], states: list[np.ndarray], own: bool) -> list[Levels]:
    """Logits of the residual decoder, the build's `own` or the original's, along the codes of each block with speech."""
    rounds, frames = bench.manifest.generation.residual_rounds, case.reference.shape[1]
    decoder = make_residual(bench.speaker.parts, bench.manifest) if own else _Torch(bench.original.residual_decoder(rounds))
    decoder.prime(states[0][len(case.text) :], case.reference)
    assert len(states[0]) == len(case.text) + frames
    finished = [i for i, step in enumerate(steps, 1) if not step.ids and (step.codes[1:] == bench.manifest.codebooks.mask_id).all()]
    lead = lead_axial if bench.manifest.residual.kind == AXIAL else lead_chain
    return [lead(decoder, states[i][: block.speech], block.codes) for i, block in zip(finished, case.blocks) if block.speech]


def lead_axial(decoder: AxialDecoder | _Torch, h: np.ndarray, codes: np.ndarray) -> Levels:
    """Every level is shown the codes [N, S] below it."""
    made: Levels = []

    def choose(logits: np.ndarray, *_: int) -> np.ndarray:
        made.append([logits])
        return codes[len(made)]

    decoder.decode(h, codes[0], choose)
    return made


def lead_chain(decoder: ChainDecoder | _Torch, h: np.ndarray, codes: np.ndarray) -> Levels:
    """The rounds of a link are its own; the next link is shown the codes [N, S] below it."""
    made: Levels = []
    for k in range(len(codes) - 1):
        made.append([])
        decoder.unmask(k, h, codes[k], lambda logits, *_: made[-1].append(logits) or logits.argmax(-1))
        h = decoder.clean(k, h, codes[k], codes[k + 1])
    decoder.count += codes.shape[1]
    return made


class _Torch:
    """A residual decoder of `_ref` that takes and gives arrays, as those of the run side do."""

    def __init__(self, decoder: ref.AxialDecoder | ref.ChainDecoder):
        self.decoder = decoder

    @property
    def count(self) -> int:
        return self.decoder.count

    @count.setter
    def count(self, frames: int) -> None:
        self.decoder.count = frames

    def prime(self, h: np.ndarray, codes: np.ndarray) -> None:
        self.decoder.prime(torch.from_numpy(h), torch.from_numpy(codes))

    def decode(self, h: np.ndarray, semantic: np.ndarray, choose: Callable) -> None:
        self.decoder.decode(torch.from_numpy(h), torch.from_numpy(semantic), lambda logits: torch.from_numpy(choose(logits.numpy())))

    def unmask(self, k: int, h: np.ndarray, code: np.ndarray, choose: Callable) -> None:
        chooser = lambda logits: torch.from_numpy(choose(logits.numpy()))
        self.decoder.unmask(k, torch.from_numpy(h), torch.from_numpy(code), self._positions(len(h)), chooser)

    def clean(self, k: int, h: np.ndarray, code: np.ndarray, revealed: np.ndarray) -> np.ndarray:
        codes = torch.zeros(ref.NUM_CODEBOOKS, len(h), dtype=torch.int64)
        codes[k], codes[k + 1] = torch.from_numpy(code), torch.from_numpy(revealed)
        return self.decoder.clean(k, torch.from_numpy(h), codes, self._positions(len(h))).numpy()

    def _positions(self, frames: int) -> torch.Tensor:
        return torch.arange(self.count, self.count + frames)
