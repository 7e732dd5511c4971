"""One utterance in the making: the rows so far, whether it is over and why, and which frames are settled."""

from __future__ import annotations

import numpy as np

from voxport.errors import WorkError
from voxport.manifest import Audio
from voxport.run.delay import reverse_delay, sanitise
from voxport.run.sampler import DelayMachine

EOC, LENGTH, PLATEAU = "eoc", "length", "plateau"


class Take:
    """Rows of one utterance until it ends by EOC, by `max_rows`, or by a plateau.

    A plateau is `plateau_frames` equal rows in a row (0: no guard): the model is stuck. The rows are then cut where the
    sameness began, so that the speech before it stays whole. `num_steps` counts the rows made, `len` those kept.
    """

    def __init__(self, audio: Audio, max_rows: int, plateau_frames: int = 0):
        self.audio = audio
        self.max_rows = max_rows
        self.plateau_frames = plateau_frames
        self.machine = DelayMachine(audio)
        self.finish_reason: str | None = None
        self.num_steps = 0
        self._rows = np.empty((max_rows, audio.num_codebooks), np.int64)
        self._length = 0
        self._run_start = 0  # first of the equal rows at the end

    def __len__(self) -> int:
        return self._length

    @property
    def rows(self) -> np.ndarray:
        """[L, N] int64 as sampled."""
        return self._rows[: self._length]

    @property
    def next_input(self) -> np.ndarray:
        """[N] the row that the model hears next."""
        return self.machine.last_codes

    def add(self, codes: np.ndarray) -> None:
        """Take the [N] ids sampled for the next row."""
        self._rows[self._length] = self.machine.advance(codes)
        if self._length and (self._rows[self._length] != self._rows[self._length - 1]).any():
            self._run_start = self._length
        self._length += 1
        self.num_steps += 1
        self._judge()

    def _judge(self) -> None:
        if self.machine.done:
            self.finish_reason = EOC
        elif self.plateau_frames and self._length - self._run_start >= self.plateau_frames:
            self.finish_reason = PLATEAU
            self._length = min(self._length, self._run_start + self.audio.num_codebooks - 1)
        elif self._length == self.max_rows:
            self.finish_reason = LENGTH

    def drop(self, frames: int) -> None:
        """Leave out the last frames of a take that was cut."""
        self._length -= frames

    @property
    def settled_frames(self) -> int:
        """Frames that no later row can change or cut: those that are complete and not part of a possible plateau."""
        complete = max(0, self._length - self.audio.num_codebooks + 1)
        if self.finish_reason or not self.plateau_frames:
            return complete
        return min(complete, self._run_start)

    def codes(self) -> np.ndarray:
        """[T, N] int64: the finished frames, special ids already 0. WorkError if there is none."""
        frames = reverse_delay(self.rows, self.audio, allow_short=True)
        if len(frames) == 0:
            raise WorkError(f"the model made no sound ({len(self)} rows, ended by {self.finish_reason}); try another seed")
        return sanitise(frames, self.audio)
