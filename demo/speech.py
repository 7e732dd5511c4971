"""Words spoken by espeak-ng, cut to whole codec frames, with the pitch locked to the frame grid.

Both voices have a flat pitch whose period divides a frame (960 samples at 24 kHz): 240 samples (100 Hz) and 160 samples
(150 Hz). espeak-ng adds up harmonics of fixed phase, so once the phase of the fundamental is the same at every frame
border, all voiced frames lie in a space of few dimensions. That is what lets a small linear codec carry them.
"""

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile as sf
import soxr

SAMPLE_RATE = 24_000
HOP = 960                    # samples a frame: 25 frames a second
SPEED = 150                  # words a minute, espeak-ng's -s
GAP_FRAMES = 2               # silent frames after each word
LEAD = 96                    # samples of silence kept before a word's onset (4 ms)
SILENCE = 0.003              # amplitude below which the ends of a clip are cut
SINC_TAPS = 32


@dataclass(frozen=True)
class Voice:
    """An espeak-ng variant: pitch in espeak units, measured period in samples at 22050 Hz, period wanted at 24 kHz."""
    name: str
    pitch: int
    espeak_period: float
    period: int
    lines: tuple = ()

    def variant(self):
        head = ["language variant", f"name {self.name}", f"pitch {self.pitch} {self.pitch}", "flutter 0"]
        return "\n".join(head + list(self.lines)) + "\n"


# Formants and consonants of "female" are those of espeak-ng's variant f2, without its echo, roughness and breath.
VOICES = (
    Voice("male", 109, 220.5055, 240),
    Voice("female", 159, 147.0208, 160,
          ("gender female", "formant 0 105 80 150", "formant 1 110 80 160", "formant 2 110 70 150",
           "formant 3 110 70 150", "formant 4 115 80 150", "formant 5 115 80 150", "consonants 125 125")),
)


def data_directory():
    """Where the installed espeak-ng keeps its data, as it says itself."""
    line = subprocess.run(["espeak-ng", "--version"], capture_output=True, text=True, check=True).stdout
    return Path(line.split("Data at:")[1].strip())


class Espeak:
    """espeak-ng with the two variants of this file added to its data (links in a temporary directory)."""

    def __init__(self):
        self.home = tempfile.TemporaryDirectory()
        data, source = Path(self.home.name) / "espeak-ng-data", data_directory()
        data.mkdir()
        for entry in source.iterdir():
            if entry.name != "voices":
                os.symlink(entry, data / entry.name)
        (data / "voices" / "!v").mkdir(parents=True)
        for voice in VOICES:
            (data / "voices" / "!v" / voice.name).write_text(voice.variant(), encoding="utf-8")

    def say(self, text, voice, speed=SPEED):
        """-> [n] float64 at 24 kHz; the rate is bent by a part in 40,000 so that the period is exact."""
        with tempfile.TemporaryDirectory() as folder:
            wav = os.path.join(folder, "word.wav")
            subprocess.run(["espeak-ng", f"--path={self.home.name}", "-v", f"en-us+{voice.name}", "-s", str(speed),
                            "-w", wav, text], check=True)
            samples, _ = sf.read(wav)
        return soxr.resample(samples, voice.espeak_period, voice.period, quality="VHQ")


def trim(samples):
    """Cut silence at both ends. [n] -> [m]"""
    loud = np.flatnonzero(np.abs(samples) > SILENCE)
    return samples[loud[0]:loud[-1] + 1]


def fundamental(samples, period):
    """Complex amplitude of the fundamental around every sample, window of two periods. [n] -> [n] complex"""
    window = np.hanning(2 * period + 1)
    carrier = np.exp(-2j * np.pi * np.arange(len(samples)) / period)
    return np.convolve(samples * carrier, window / window.sum(), "same")


def voiced_runs(samples, period):
    """Stretches of at least two periods that repeat after one period. -> list of (start, end)"""
    padded = np.pad(samples, (period, period))
    box = np.ones(2 * period)
    later, here, before = padded[2 * period:], padded[period:-period], padded[:-2 * period]

    def similarity(other):
        energy = np.convolve(here ** 2, box, "same") * np.convolve(other ** 2, box, "same")
        return np.convolve(here * other, box, "same") / np.sqrt(energy + 1e-12)

    loud = np.abs(fundamental(samples, period)) > 0.01
    marks = (np.maximum(similarity(later), similarity(before)) > 0.8) & loud
    edges = np.flatnonzero(np.diff(np.concatenate([[0], marks.astype(int), [0]])))
    return [(a, b) for a, b in zip(edges[::2], edges[1::2]) if b - a >= 2 * period]


def phase_shift(samples, run, period):
    """How many samples later the run must start for its fundamental to have phase 0 on the grid. -> float in a period"""
    phase = np.angle(fundamental(samples, period)[run[0]:run[1]].sum())
    return phase / (2 * np.pi) * period


def shift_curve(samples, period):
    """Delay of every sample: constant in voiced runs, a straight line between them. [n] -> [n], starts near LEAD."""
    runs, places, delays, last = voiced_runs(samples, period), [], [], LEAD + period / 2
    for run in runs:
        wanted = phase_shift(samples, run, period)
        last = wanted + period * round((last - wanted) / period)
        places += [run[0], run[1] - 1]
        delays += [last, last]
    if not runs:
        return np.full(len(samples), float(LEAD))
    return np.interp(np.arange(len(samples)), places, delays)


def interpolate(samples, positions):
    """Windowed-sinc reading of samples at fractional positions. [n], [m] -> [m]"""
    base = np.floor(positions).astype(int)
    taps = np.arange(-SINC_TAPS // 2 + 1, SINC_TAPS // 2 + 1)
    offset = (positions - base)[:, None] - taps
    weights = np.sinc(offset) * np.cos(np.pi * offset / (SINC_TAPS + 2)) ** 2
    index = base[:, None] + taps
    inside = (index >= 0) & (index < len(samples))
    return (samples[index.clip(0, len(samples) - 1)] * inside * weights).sum(1)


def lock_phase(samples, period):
    """Delay the parts of a word so that every voiced run has the same phase on the frame grid. [n] -> [F*960]"""
    arrival = np.arange(len(samples)) + shift_curve(samples, period)
    frames = int(np.ceil((arrival[-1] + 1) / HOP)) + GAP_FRAMES
    positions = np.interp(np.arange(frames * HOP), arrival, np.arange(len(samples)), left=-SINC_TAPS, right=-SINC_TAPS)
    early = np.arange(frames * HOP) < arrival[0]
    late = np.arange(frames * HOP) > arrival[-1]
    return np.where(early | late, 0.0, interpolate(samples, positions))


def silence_quiet_frames(samples):
    """Frames that never rise above SILENCE become exactly zero. [F*960] -> [F*960]"""
    frames = samples.reshape(-1, HOP)
    return (frames * (np.abs(frames).max(1, keepdims=True) > SILENCE)).reshape(-1)


def word_clip(espeak, word, voice, speed=SPEED):
    """One word in one voice, ending in GAP_FRAMES of exact silence. -> [F*960] float32"""
    locked = lock_phase(trim(espeak.say(word, voice, speed)), voice.period)
    return silence_quiet_frames(locked).astype(np.float32)


def word_clips(words, speed=SPEED):
    """-> {(voice name, word): [F*960] float32}"""
    espeak = Espeak()
    return {(v.name, w): word_clip(espeak, w, v, speed) for v in VOICES for w in words}


def sentence_clip(clips, voice_name, words):
    """The source clip of a sentence: its words' clips, joined. -> [T*960] float32"""
    return np.concatenate([clips[voice_name, w] for w in words])
