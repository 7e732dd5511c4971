"""Sound while speech is still being made: which frames are decoded together, and when.

There is one schedule, whether anybody listens or not, so that speech saved at the end is the joined stream, bit for bit.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

import numpy as np

from voxport.manifest import Codec as CodecFigures
from voxport.run.codec import Codec
from voxport.run.take import Take

# First sound after FIRST_FRAMES + context + N - 1 rows, of which the prompt gives one: 20 steps with a context of 10 and N = 8
FIRST_FRAMES = 4
KEPT_SILENCE = 0.3  # seconds left at the end of speech that was cut: a breath
SILENT_SHARE = 10 ** (-45 / 20)  # of the loudest peak: room tone lies below it, the softest consonants above
LARGEST_FRAMES = 32  # 1.3 s of sound: bounds the codec's memory, and the context of 20 frames is decoded again no more often


def schedule() -> Iterator[tuple[int, int]]:
    """Frames [start, stop) that are decoded together: few at first, so that sound comes early, then twice as many each time."""
    start, size = 0, FIRST_FRAMES
    while True:
        yield start, start + size
        start, size = start + size, min(2 * size, LARGEST_FRAMES)


class Playback:
    """The sound of one take, decoded as its frames become final."""

    def __init__(self, take: Take, codec: Codec):
        self.take, self.codec = take, codec
        self.chunks: list[np.ndarray] = []
        self._schedule = schedule()
        self._next = next(self._schedule)

    def ready(self) -> Iterator[np.ndarray]:
        """Samples [n] float32 of every chunk that no later row can change; the last ones when the take is over."""
        while (stop := self._due()) is not None:
            self.chunks.append(self.codec.decode_window(self.take.codes(), self._next[0], stop))
            self._next = next(self._schedule)
            yield self.chunks[-1]

    def _due(self) -> int | None:
        """Where the next chunk ends if it can be decoded now."""
        start, stop = self._next
        if self.take.finish_reason:
            total = len(self.take.codes())
            return min(stop, total) if start < total else None
        return stop if stop + self.codec.figures.context_frames <= self.take.settled_frames else None

    @property
    def is_over(self) -> bool:
        """Whether the last chunk was decoded."""
        return self.take.finish_reason is not None and self._next[0] >= len(self.take.codes())

    @property
    def sample_rate(self) -> int:
        """Hz."""
        return self.codec.figures.sample_rate

    def samples(self) -> np.ndarray:
        """[T * hop] all of it, once the take is over. WorkError if it is flat."""
        samples = np.concatenate(self.chunks)[: len(self.take.codes()) * self.codec.figures.hop_length]
        self.codec.check_lively(np.ptp(samples))
        return samples


class Tail:
    """Holds back whole frames of silence until sound follows them: at the end of speech that was cut they are worth nothing.

    A frame is silent beside the loudest one so far, since nobody knows yet how loud the rest will be.
    """

    def __init__(self, figures: CodecFigures):
        self.hop = figures.hop_length
        self.kept_frames = round(KEPT_SILENCE * figures.sample_rate / self.hop)
        self.held = np.empty(0, np.float32)
        self._loudest = 0.0

    def join(self, chunk: np.ndarray) -> np.ndarray:
        """Samples of a chunk of whole frames [T * hop] that may be heard now, with the silence held back before them."""
        peaks = np.abs(chunk).reshape(-1, self.hop).max(axis=1)
        self._loudest = max(self._loudest, float(peaks.max()))
        loud = np.flatnonzero(peaks > self._loudest * SILENT_SHARE)
        joined = np.concatenate([self.held, chunk])
        end = len(self.held) + (loud[-1] + 1) * self.hop if len(loud) else 0
        self.held = joined[end:]
        return joined[:end]


class SpeechStream:
    """Iterates over chunks [n] float32 of speech, the last one faded if speech was cut. `speech` is there when it is over:
    a Speech, or whatever else the chunks' generator returns."""

    def __init__(self, chunks: Generator, sample_rate: int):
        self.sample_rate = sample_rate
        self.speech = None
        self._chunks = chunks

    def __iter__(self) -> Iterator[np.ndarray]:
        self.speech = yield from self._chunks
