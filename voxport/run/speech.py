"""What speaking gives back: the sound, the codes behind it, and how the run went."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from voxport.files import atomic_path
from voxport.manifest import Sampling
from voxport.run.audio import FADE_SECONDS, Form, check_output, fade_end, write_sound
from voxport.run.take import EOC, Take


class Stopwatch:
    """Seconds spent in each named step; a step that comes again adds up."""

    def __init__(self):
        self.started = time.perf_counter()
        self.laps: dict[str, float] = {}
        self.marks: dict[str, float] = {}

    @property
    def total(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to the step `name`."""
        self.laps[name] = self.laps.get(name, 0.0) + seconds

    def mark(self, name: str) -> None:
        """Note the time of the first call under this name."""
        self.marks.setdefault(name, self.total)

    @contextmanager
    def lap(self, name: str) -> Iterator[None]:
        """Add the time inside to `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)


@dataclass(frozen=True)
class Timings:
    """Seconds. From the request to the first row, the first sound and the end, each without `load`, run `first_row`,
    `first_sound` and `total`; who listens to a stream may hold it up, which counts there and in no other figure."""

    load: float
    encode: float
    prefill: float
    first_row: float
    first_sound: float
    rows: float
    decode: float
    total: float

    @property
    def busy(self) -> float:
        """Seconds of work."""
        return self.encode + self.prefill + self.rows + self.decode


@dataclass(frozen=True)
class Health:
    """Speed and size of one run: real-time factor below 1 is faster than speech; GB/s are weights read per row."""

    frames_per_second: float
    gb_per_second: float
    real_time_factor: float
    peak_rss_mb: float | None


class Faded:
    """What every family's speech does with its sound: `samples` [T * hop] at `sample_rate`, faded where `fade_seconds` says so."""

    def faded(self) -> np.ndarray:
        """[T * hop] the samples that a file gets."""
        return fade_end(self.samples, self.sample_rate) if self.fade_seconds else self.samples

    def save(self, path: str | os.PathLike, form: Form = Form()) -> None:
        """Write a mono file of the kind that its ending names (16-bit unless `form` differs), whole or not at all."""
        write_sound(path, self.faded(), self.sample_rate, form)


def save_arrays(path: str | os.PathLike, arrays: dict[str, np.ndarray]) -> None:
    """Write arrays as int64 into an .npz, whole or not at all."""
    with atomic_path(check_output(path, ".npz")) as temporary, open(temporary, "wb") as file:
        np.savez(file, **{name: array.astype(np.int64) for name, array in arrays.items()})


@dataclass(frozen=True)
class Speech(Faded):
    """One utterance. T frames, L = T + N - 1 rows, P prompt positions, R reference frames.

    samples [T * hop] float32 as the codec gave them, unfaded; codes [T, N]; rows [L, N] as sampled (cut at a plateau);
    prompt_ids [P] with the placeholder at reference rows; reference_codes [R, N], None without a reference.
    """

    text: str
    samples: np.ndarray
    sample_rate: int
    codes: np.ndarray
    rows: np.ndarray
    prompt_ids: np.ndarray
    reference_codes: np.ndarray | None
    finish_reason: str
    seed: int
    sampling: Sampling
    max_frames: int
    providers: dict[str, str]
    warnings: tuple[str, ...]
    timings: Timings
    health: Health

    @property
    def seconds(self) -> float:
        """Length of the sound."""
        return len(self.samples) / self.sample_rate

    @property
    def fade_seconds(self) -> float:
        """Length of the fade at the end of what is saved: only speech that did not end by itself is faded."""
        return 0.0 if self.finish_reason == EOC else FADE_SECONDS

    def save_codes(self, path: str | os.PathLike) -> None:
        """Write prompt_ids, rows, codes and, for a clone, reference_codes (all int64) as .npz."""
        arrays = {"prompt_ids": self.prompt_ids, "rows": self.rows, "codes": self.codes}
        if self.reference_codes is not None:
            arrays["reference_codes"] = self.reference_codes
        save_arrays(path, arrays)

    def report(self) -> dict:
        """Everything but the arrays, ready for JSON."""
        return {
            "text": self.text,
            "seed": self.seed,
            "sampling": dataclasses.asdict(self.sampling),
            "max_frames": self.max_frames,
            "finish_reason": self.finish_reason,
            "frames": len(self.codes),
            "rows": len(self.rows),
            "prompt_positions": len(self.prompt_ids),
            "reference_frames": 0 if self.reference_codes is None else len(self.reference_codes),
            "seconds": self.seconds,
            "sample_rate": self.sample_rate,
            "fade_seconds": self.fade_seconds,
            "providers": self.providers,
            "warnings": list(self.warnings),
            "timings": dataclasses.asdict(self.timings),
            "health": dataclasses.asdict(self.health),
        }

    def health_line(self) -> str:
        """The run in one line."""
        health, rss = self.health, self.health.peak_rss_mb
        return (
            f"{self.seconds:.2f} s of speech, {len(self.codes)} frames at {health.frames_per_second:.1f} frames/s "
            f"({health.gb_per_second:.2f} GB/s), RTF {health.real_time_factor:.2f}, first sound after "
            f"{self.timings.first_sound:.2f} s, peak RSS {'unknown' if rss is None else f'{rss:.0f} MB'}, "
            f"stopped by {self.finish_reason}, seed {self.seed}"
        )


def read_timings(watch: Stopwatch) -> Timings:
    """The figures of one utterance that is done."""
    laps = {name: watch.laps.get(name, 0.0) for name in ("load", "encode", "prefill", "rows", "decode")}
    since = {name: watch.marks[name] - laps["load"] for name in ("first_row", "first_sound")}
    return Timings(**laps, **since, total=watch.total - laps["load"])


def measure_health(timings: Timings, take: Take, seconds: float, weight_bytes: int) -> Health:
    """Figures of one utterance of `seconds`; `weight_bytes` are read once for each row."""
    rows_seconds = max(timings.rows, 1e-9)  # a clock may not tick within a tiny run
    return Health(
        frames_per_second=take.settled_frames / rows_seconds,
        gb_per_second=weight_bytes * take.num_steps / rows_seconds / 1e9,
        real_time_factor=timings.busy / seconds,
        peak_rss_mb=peak_rss_mb(),
    )


def peak_rss_mb() -> float | None:
    """Largest resident memory of this process so far in MB; None where the system does not tell (Windows)."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
