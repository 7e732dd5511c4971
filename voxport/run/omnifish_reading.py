"""Reading long text aloud with OmniFish: part by part, each between the sentences around it, joined with pauses."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np

from voxport.run.audio import Form, write_sound
from voxport.run.longtext import PART_TOKENS, Part, check_budget, quiet_between, split_text
from voxport.run.omnifish import Speaker
from voxport.run.omnifish_request import Voice, Wish, check_wish
from voxport.run.omnifish_speech import END, OmniSpeech
from voxport.run.stream import SpeechStream
from voxport.run.text import check_script


@dataclass(frozen=True)
class Reading:
    """A long text as it was spoken: its parts, one speech each, and samples [n] float32 of all of them joined."""

    text: str
    parts: list[Part]
    speeches: list[OmniSpeech]
    samples: np.ndarray
    sample_rate: int

    @property
    def seconds(self) -> float:
        """Length of the sound."""
        return len(self.samples) / self.sample_rate

    @property
    def finish_reason(self) -> str:
        """END if every part ended by itself, else why the first other one was cut."""
        return next((speech.finish_reason for speech in self.speeches if speech.finish_reason != END), END)

    def save(self, path: str | os.PathLike, form: Form = Form()) -> None:
        """Write a mono file of the kind that its ending names, whole or not at all."""
        write_sound(path, self.samples, self.sample_rate, form)

    def report(self) -> dict:
        """Everything but the arrays, ready for JSON."""
        return {
            "text": self.text,
            "seed": self.speeches[0].seed,
            "finish_reason": self.finish_reason,
            "seconds": self.seconds,
            "sample_rate": self.sample_rate,
            "parts": [{"pause": part.pause, **speech.report()} for part, speech in zip(self.parts, self.speeches)],
        }

    def health_line(self) -> str:
        """The run in one line."""
        frames = sum(speech.codes.shape[1] for speech in self.speeches)
        taken = sum(speech.health.total for speech in self.speeches)
        return (
            f"{self.seconds:.2f} s of speech in {len(self.parts)} parts, {frames} frames, RTF {taken / self.seconds:.2f}, "
            f"stopped by {self.finish_reason}, seed {self.speeches[0].seed}"
        )


def plan(speaker: Speaker, wish: Wish, budget: int = PART_TOKENS) -> list[Part]:
    """The parts in which a text would be read; a dialogue is one. UserError if it cannot be spoken."""
    check_budget(budget)
    if wish.text is None:
        return [Part("")]
    text = check_script(wish.text, "the text", speaker.manifest, wish.tags).text
    count = lambda piece: len(speaker.encode(piece))
    return [Part(text)] if count(text) <= budget else split_text(text, count, budget)


def read(speaker: Speaker, wish: Wish, parts: list[Part], size: int = 1) -> Reading:
    """Speak all parts one after the other whatever `size`, each decoded whole."""
    return _drain(_perform(speaker, wish, parts, whole=True))


def read_stream(speaker: Speaker, wish: Wish, parts: list[Part]) -> SpeechStream:
    """The same as an iterable of samples [n] float32, a block at a time; its `speech` is then the Reading."""
    return SpeechStream(_perform(speaker, wish, parts, whole=False), speaker.manifest.codec.sample_rate)


def _drain(chunks: Generator) -> Reading:
    while True:
        try:
            next(chunks)
        except StopIteration as stop:
            return stop.value


def _perform(speaker: Speaker, wish: Wish, parts: list[Part], whole: bool) -> Generator[np.ndarray, None, Reading]:
    """One seed and one voice for all parts: that of the wish, or else that of the first part."""
    rate, speeches, joined = speaker.manifest.codec.sample_rate, [], []
    wish = dataclasses.replace(wish, seed=check_wish(wish, speaker.manifest).settings.seed)
    voice = wish.voice if wish.ref_audio is None else speaker.hear(wish.ref_audio, wish.ref_text, wish.tags)
    for index, wanted in enumerate(part_wishes(wish, parts)):
        if voice is not None:
            wanted = dataclasses.replace(wanted, ref_audio=None, ref_text=None, voice=voice)
        stream = SpeechStream(_whole(speaker, wanted), rate) if whole else speaker.stream(wanted)
        for number, chunk in enumerate(stream):
            if index and number == 0:
                joined.append(quiet_between(speeches[-1].faded(), chunk, parts[index - 1].pause, rate))
                yield joined[-1]
            joined.append(chunk)
            yield chunk
        speeches.append(stream.speech)
        voice = voice or voice_of(speeches[0], wish)
    return Reading(wish.text, parts, speeches, np.concatenate(joined), rate)


def _whole(speaker: Speaker, wish: Wish) -> Generator[np.ndarray, None, OmniSpeech]:
    speech = speaker.grant(wish)
    yield speech.faded()
    return speech


def part_wishes(wish: Wish, parts: list[Part]) -> Iterator[Wish]:
    """One wish a part: the parts before and after it are its neighbours, at the ends those of the wish."""
    for i, part in enumerate(parts):
        before = (parts[i - 1].text,) if i else wish.before
        after = (parts[i + 1].text,) if i + 1 < len(parts) else wish.after
        yield dataclasses.replace(wish, text=part.spoken, before=before, after=after)


def voice_of(first: OmniSpeech, wish: Wish) -> Voice | None:
    """The voice of the rest: that of the first part; a named speaker needs none."""
    return None if wish.speaker is not None else Voice(first.codes, first.text)
