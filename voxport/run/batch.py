"""Several utterances that share one reading of the weights: each has a row of the cache, joins when a row is free, and leaves
when it is over. One utterance is a batch of one.

A prompt is read alone, into its own row: on the CPU reading is bound by arithmetic from some 16 positions on, so padding
prompts to one length would only add work, and ONNX Runtime continues a voice that is already in the cache one row at a time.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from voxport.errors import UserError
from voxport.run.audio import fade_end
from voxport.run.cache import Cache
from voxport.run.codec import Codec
from voxport.run.decoder import Decoder
from voxport.run.request import Request, Voice
from voxport.run.speech import Stopwatch
from voxport.run.stream import Playback, Tail
from voxport.run.take import EOC, Take
from voxport.run.text import Prompt
from voxport.run.values import is_whole

BATCH = 4  # utterances at once: the weights are read once for all, and arithmetic is not yet the limit on two cores
REMEMBERED = 4  # voices kept at hand within one batch, some 90 MB each at full size for 10 s of reference


def check_size(size: int) -> None:
    """UserError unless a batch can hold so many texts."""
    if not (is_whole(size) and size >= 1):
        raise UserError(f"a batch holds one text or more, a whole number, not {size!r}")


class Model(Protocol):
    """What a batch needs of a speaker."""

    decoder: Decoder

    def embed_rows(self, rows: np.ndarray) -> np.ndarray:
        """[L, N] rows -> [1, L, D]."""

    def read_logits(self, hidden: np.ndarray) -> np.ndarray:
        """[B, 1, D] hidden states -> [B, N, V]."""


@dataclass(frozen=True)
class Cue:
    """What the model hears before it speaks: the prompt, the voice it begins with, embeddings [1, S, D] of the rest."""

    prompt: Prompt
    voice: Voice | None
    embeds: np.ndarray


@dataclass(eq=False)
class Performance:
    """One utterance being spoken. `hidden` [1, D] predicts the next row; None once that row is made, until it is heard."""

    request: Request
    cue: Cue
    take: Take
    watch: Stopwatch
    playback: Playback
    tail: Tail
    length: int = 0
    hidden: np.ndarray | None = field(default=None, repr=False)

    @classmethod
    def begin(cls, request: Request, cue: Cue, take: Take, watch: Stopwatch, codec: Codec) -> Performance:
        """An utterance of which nothing is spoken yet."""
        return cls(request, cue, take, watch, Playback(take, codec), Tail(codec.figures))

    def add_row(self, logits: np.ndarray) -> None:
        """Roll the next row from its logits [N, V]."""
        started = time.perf_counter()
        self.take.add(self.request.dice.roll(logits, len(self.take)))
        self.hidden = None
        self.watch.add("rows", time.perf_counter() - started)
        self.watch.mark("first_row")

    def sound(self) -> Iterator[np.ndarray]:
        """Samples [n] float32 of what has become final. Speech that was cut ends without the silence into which such speech
        often runs, and is faded at the very end."""
        chunks = self.playback.ready()
        while True:
            with self.watch.lap("decode"):
                chunk = next(chunks, None)
            if chunk is None:
                return
            self.watch.mark("first_sound")
            sound = self.tail.join(chunk)
            if self.playback.is_over:
                sound = np.concatenate([sound, self._end()])
                sound = sound if self.take.finish_reason == EOC else fade_end(sound, self.playback.sample_rate)
            if len(sound):
                yield sound

    def _end(self) -> np.ndarray:
        """What of the silence at the end is kept: all of it if speech ended by itself."""
        silence = self.tail.held
        if self.take.finish_reason == EOC:
            return silence
        dropped = max(0, len(silence) // self.tail.hop - self.tail.kept_frames)
        self.take.drop(dropped)
        return silence[: len(silence) - dropped * self.tail.hop]


class Heard:
    """The voices that were heard last: lines of one batch often share theirs."""

    def __init__(self):
        self.voices: dict[tuple, Voice] = {}

    def find(self, request: Request) -> Voice | None:
        """The voice of this request's reference if it was heard before."""
        return self.voices.get(_name_reference(request)) if request.reference else None

    def keep(self, request: Request, voice: Voice) -> Voice:
        """Remember a voice, and forget the oldest beyond `REMEMBERED`."""
        self.voices[_name_reference(request)] = voice
        for name in list(self.voices)[:-REMEMBERED]:
            del self.voices[name]
        return voice


def _name_reference(request: Request) -> tuple:
    return hashlib.sha256(request.reference.samples.tobytes()).digest(), request.ref_text


class Batch:
    """Up to `size` performances; the one at place b of `members` has row b of the cache."""

    def __init__(self, model: Model, size: int):
        check_size(size)
        self.model, self.size = model, size
        self.members: list[Performance] = []
        self.store = model.decoder.empty_cache(size).store

    @property
    def has_room(self) -> bool:
        """Whether one more can join."""
        return len(self.members) < self.size

    def admit(self, member: Performance) -> None:
        """Read its prompt into a free row."""
        with member.watch.lap("prefill"):
            place = Cache(self.store, (0,), len(self.members))
            if member.cue.voice is not None:
                place = place.write(member.cue.voice.pieces)
            hidden, place = self.model.decoder.prefill(member.cue.embeds, place)
        member.hidden, member.length = hidden[0], place.length
        self.members.append(member)

    def advance(self) -> list[Performance]:
        """Add a row to every member. Returns those that are over; they have left."""
        self._shared(self._hear_rows)
        logits = self._shared(lambda: self.model.read_logits(np.stack([member.hidden for member in self.members])))
        for member, its_logits in zip(self.members, logits, strict=True):
            member.add_row(its_logits)
        over = [member for member in self.members if member.take.finish_reason]
        for member in over:
            self._dismiss(member)
        return over

    def _shared(self, work: Callable):
        """Do what all members wait for; each is charged its whole time, as a listener would."""
        started, members = time.perf_counter(), list(self.members)
        result = work()
        for member in members:
            member.watch.add("rows", time.perf_counter() - started)
        return result

    def _hear_rows(self) -> None:
        """One step for the members whose last row has not been heard: all but those that have just joined behind them."""
        members = [member for member in self.members if member.hidden is None]
        if not members:
            return
        embeds = self.model.embed_rows(np.stack([member.take.next_input for member in members]))
        cache = Cache(self.store, tuple(member.length for member in members))
        hidden, cache = self.model.decoder.step(cache, embeds.reshape(len(members), 1, -1))
        for member, its_hidden, length in zip(members, hidden, cache.lengths, strict=True):
            member.hidden, member.length = its_hidden, length

    def _dismiss(self, member: Performance) -> None:
        """Free a row; the last member moves there, so that the rows in use stay together."""
        place, last = self.members.index(member), self.members[-1]
        if last is not member:
            self.store.move(len(self.members) - 1, place, last.length)
            self.members[place] = last
        self.members.pop()
