"""What speaking from an OmniFish build gives back: the sound, the codes behind it, and how the run went."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

import numpy as np

from voxport.manifest import Sampling
from voxport.progress import plural
from voxport.run.audio import FADE_SECONDS
from voxport.run.omnifish_blocks import Dice
from voxport.run.speech import Faded, Stopwatch, peak_rss_mb, save_arrays

END, MAX_FRAMES = "end", "max_frames"  # why speech was over
LAPS = ("load", "encode", "prefill", "body", "residual", "codec")


@dataclass(frozen=True)
class Settings:
    """How one utterance is drawn: seed, filters of semantic and residual codes, rounds of a block, and see `reveal`."""

    seed: int
    semantic: Sampling
    residual: Sampling
    steps: int
    threshold: float | None

    def dice(self) -> Dice:
        return Dice(self.seed, self.semantic, self.residual)


@dataclass(frozen=True)
class Health:
    """Seconds in each step and to the first block and sound, without `load`; `real_time_factor` of each step and of all; peak
    memory. Below 1 is faster than speech."""

    seconds: dict[str, float]
    first_block: float
    first_sound: float
    total: float
    seconds_per_block: float
    frames_per_second: float
    real_time_factor: dict[str, float]
    peak_rss_mb: float | None


def measure(watch: Stopwatch, blocks: int, frames: int, seconds: float) -> Health:
    """Figures of one utterance of `seconds` that is done."""
    laps = {name: watch.laps.get(name, 0.0) for name in LAPS}
    made = laps["body"] + laps["residual"]
    busy = sum(laps.values()) - laps["load"]
    factors = {name: laps[name] / seconds for name in ("prefill", "body", "residual", "codec")}
    return Health(
        seconds=laps,
        first_block=watch.marks["first_block"] - laps["load"],
        first_sound=watch.marks["first_sound"] - laps["load"],
        total=watch.total - laps["load"],
        seconds_per_block=made / blocks,
        frames_per_second=frames / max(made, 1e-9),  # a clock may not tick within a tiny run
        real_time_factor=factors | {"all": busy / seconds},
        peak_rss_mb=peak_rss_mb(),
    )


@dataclass(frozen=True)
class OmniSpeech(Faded):
    """One utterance. samples [T * hop] float32 as the codec gave them, unfaded; codes [N, T]; prompt_ids [S]; reference [N, P]
    codes of the voice, None without one."""

    text: str
    samples: np.ndarray
    sample_rate: int
    codes: np.ndarray
    frames_per_block: list[int]
    prompt_ids: np.ndarray
    reference: np.ndarray | None
    finish_reason: str
    settings: Settings
    max_frames: int
    providers: dict[str, str]
    warnings: tuple[str, ...]
    health: Health

    @property
    def seconds(self) -> float:
        """Length of the sound."""
        return len(self.samples) / self.sample_rate

    @property
    def seed(self) -> int:
        return self.settings.seed

    @property
    def semantic(self) -> np.ndarray:
        """[T] codes of the first codebook."""
        return self.codes[0]

    @property
    def fade_seconds(self) -> float:
        """Length of the fade at the end of what is saved: only speech that did not end by itself is faded."""
        return 0.0 if self.finish_reason == END else FADE_SECONDS

    def save_codes(self, path: str | os.PathLike) -> None:
        """Write prompt_ids [S], semantic [T], codes [N, T] and, for a clone, reference_codes [N, P] (all int64) as .npz."""
        arrays = {"prompt_ids": self.prompt_ids, "semantic": self.semantic, "codes": self.codes}
        if self.reference is not None:
            arrays["reference_codes"] = self.reference
        save_arrays(path, arrays)

    def report(self) -> dict:
        """Everything but the arrays, ready for JSON."""
        return {
            "text": self.text,
            "seed": self.seed,
            "settings": dataclasses.asdict(self.settings),
            "max_frames": self.max_frames,
            "finish_reason": self.finish_reason,
            "frames": self.codes.shape[1],
            "frames_per_block": self.frames_per_block,
            "prompt_positions": len(self.prompt_ids),
            "reference_frames": 0 if self.reference is None else self.reference.shape[1],
            "seconds": self.seconds,
            "sample_rate": self.sample_rate,
            "fade_seconds": self.fade_seconds,
            "providers": self.providers,
            "warnings": list(self.warnings),
            "health": dataclasses.asdict(self.health),
        }

    def health_line(self) -> str:
        """The run in one line."""
        health, rss = self.health, self.health.peak_rss_mb
        split = ", ".join(f"{name} {value:.2f}" for name, value in health.real_time_factor.items() if name != "all")
        return (
            f"{self.seconds:.2f} s of speech, {self.codes.shape[1]} frames in {plural(len(self.frames_per_block), 'block')} at "
            f"{health.frames_per_second:.1f} frames/s, RTF {health.real_time_factor['all']:.2f} ({split}), first sound after "
            f"{health.first_sound:.2f} s, peak RSS {'unknown' if rss is None else f'{rss:.0f} MB'}, "
            f"stopped by {self.finish_reason}, seed {self.seed}"
        )
