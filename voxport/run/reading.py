"""Reading long text aloud: part by part in one voice, several parts at once, joined with pauses."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from voxport.errors import UserError
from voxport.run.audio import Form, write_sound
from voxport.run.batch import BATCH
from voxport.run.higgs import Speaker
from voxport.run.longtext import PART_TOKENS, Part, check_budget, quiet_between, split_text
from voxport.run.request import Wish, choose_dice
from voxport.run.speech import Speech
from voxport.run.stream import FIRST_FRAMES, SpeechStream
from voxport.run.take import EOC
from voxport.run.text import check_script, encode

VOICE_TOKENS = 40  # some 10 s of speech: enough to be the voice of the rest, and quickly read again


@dataclass(frozen=True)
class Reading:
    """A long text as it was spoken: its parts, one speech each, and samples [n] float32 of all of them joined."""

    text: str
    parts: list[Part]
    speeches: list[Speech]
    samples: np.ndarray
    sample_rate: int
    seconds_taken: float

    @property
    def seconds(self) -> float:
        """Length of the sound."""
        return len(self.samples) / self.sample_rate

    @property
    def finish_reason(self) -> str:
        """EOC if every part ended by itself, else why the first other one was cut."""
        return next((speech.finish_reason for speech in self.speeches if speech.finish_reason != EOC), EOC)

    def save(self, path: str | os.PathLike, form: Form = Form()) -> None:
        """Write a mono file of the kind that its ending names, whole or not at all."""
        write_sound(path, self.samples, self.sample_rate, form)

    def report(self) -> dict:
        """Everything but the arrays, ready for JSON."""
        parts = [
            {"carried": part.carried, "pause": part.pause, **speech.report()}
            for part, speech in zip(self.parts, self.speeches, strict=True)
        ]
        return {
            "text": self.text,
            "seed": self.speeches[0].seed,
            "finish_reason": self.finish_reason,
            "frames": sum(len(speech.codes) for speech in self.speeches),
            "seconds": self.seconds,
            "sample_rate": self.sample_rate,
            "total": self.seconds_taken,
            "parts": parts,
        }

    def health_line(self) -> str:
        """The run in one line."""
        frames = sum(len(speech.codes) for speech in self.speeches)
        return (
            f"{self.seconds:.2f} s of speech in {len(self.parts)} parts, {frames} frames, "
            f"RTF {self.seconds_taken / self.seconds:.2f}, stopped by {self.finish_reason}, seed {self.speeches[0].seed}"
        )


def plan(speaker: Speaker, wish: Wish, budget: int = PART_TOKENS) -> list[Part]:
    """The parts in which a text would be read. UserError if it cannot be spoken."""
    check_budget(budget)
    text = check_script(wish.text, "the text", speaker.manifest, wish.tags).text
    is_zero_shot = wish.voice is None and wish.ref_audio is None
    count = lambda piece: len(encode(speaker.tokenizer, piece))
    if count(text) <= budget:
        return [Part(text)]  # to the letter: spaces at its ends are the user's
    return split_text(text, count, budget, VOICE_TOKENS if is_zero_shot else None)


def read(speaker: Speaker, wish: Wish, parts: list[Part], size: int = BATCH) -> Reading:
    """Speak all parts with one seed and one voice: that of the wish, or else that of the first part."""
    started = time.perf_counter()
    wishes = _wishes(speaker, wish, parts)
    speeches: dict[int, Speech] = {}
    if wishes[0].voice is None:
        speeches[0] = speaker.grant(wishes[0])
        wishes = _follow(speaker, wishes, speeches[0])
    offset = len(speeches)
    for index, speech in speaker.speak_many(wishes[offset:], size):
        if isinstance(speech, UserError):
            raise type(speech)(f"part {offset + index + 1} of {len(parts)}: {speech}")
        speeches[offset + index] = speech
    return _join(speaker, wish, parts, [speeches[i] for i in range(len(parts))], started)


def read_stream(speaker: Speaker, wish: Wish, parts: list[Part]) -> SpeechStream:
    """The same one part after the other, as an iterable of samples [n] float32; its `speech` is then the Reading."""
    return SpeechStream(_perform(speaker, wish, parts), speaker.manifest.codec.sample_rate)


def _perform(speaker: Speaker, wish: Wish, parts: list[Part]) -> Generator[np.ndarray, None, Reading]:
    started, rate = time.perf_counter(), speaker.manifest.codec.sample_rate
    wishes, speeches = _wishes(speaker, wish, parts), []
    for i in range(len(parts)):
        stream = speaker.stream(wishes[i], progress=False)
        for number, chunk in enumerate(stream):
            if i and number == 0:
                yield quiet_between(speeches[-1].faded(), chunk, parts[i - 1].pause, rate)
            yield chunk
        speeches.append(stream.speech)
        if i == 0:
            wishes = _follow(speaker, wishes, speeches[0])
    return _join(speaker, wish, parts, speeches, started)


def _wishes(speaker: Speaker, wish: Wish, parts: list[Part]) -> list[Wish]:
    """One wish a part, all with the same seed and, if there is a reference, with that voice."""
    if wish.ref_audio is not None:
        wish = dataclasses.replace(wish, voice=speaker.hear(wish.ref_audio, wish.ref_text, wish.tags))
    seed = choose_dice(wish, speaker.manifest).seed
    return [dataclasses.replace(wish, text=part.spoken, seed=seed, ref_audio=None, ref_text=None) for part in parts]


def _follow(speaker: Speaker, wishes: list[Wish], first: Speech) -> list[Wish]:
    """The wishes, in the voice of the first part if they have none of their own."""
    if wishes[0].voice is not None or len(wishes) == 1:
        return wishes
    voice = speaker.remember(first)
    return [dataclasses.replace(wish, voice=voice) for wish in wishes]


def _join(speaker: Speaker, wish: Wish, parts: list[Part], speeches: list[Speech], started: float) -> Reading:
    """The parts with quiet between them, which looks no further into a part than its first chunk, as a stream must."""
    codec = speaker.manifest.codec
    joined = [speeches[0].faded()]
    for before, after, part in zip(speeches, speeches[1:], parts, strict=False):
        head = after.faded()[: FIRST_FRAMES * codec.hop_length]
        joined += [quiet_between(before.faded(), head, part.pause, codec.sample_rate), after.faded()]
    samples = np.concatenate(joined)
    return Reading(wish.text, parts, speeches, samples, codec.sample_rate, time.perf_counter() - started)
