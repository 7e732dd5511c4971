"""Listeners in place of people: does a speech recogniser hear the words, and does a speaker encoder hear the right voice?

A listener is judged before it judges: controls with known answers come first, and one that fails them convicts nobody.
The packages behind the two listeners are optional: requirements-listen.txt.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from voxport.errors import UserError
from voxport.judge.finding import NOT_JUDGED, Finding, judge
from voxport.judge.words import UNSPACED, judged_measure, normalise, score, the_rule
from voxport.run.audio import SILENCE_PEAK, resample

LISTENERS, HEARD, VOICES = "listeners", "words heard", "voices"
RATE = 16_000  # Hz, what both listeners were trained on: whatever the codec's rate, they hear the same band
WINDOW = 0.02  # seconds over which loudness is taken
TAIL_DB = 40.0  # below the loudest window: a tail this quiet is silence, in which a recogniser invents words
KEPT_SECONDS = 0.1  # kept around what is loud, so that a soft first or last consonant stays
MARGIN = 0.03  # a build may lose three words in a hundred more than the original does
MIN_UNITS = math.ceil(1 / MARGIN)  # with fewer words a single one would decide
FIT_ERROR = 0.5  # a recogniser that misses half of the original's words cannot tell a good build from a bad one
NEAREST = 0.9  # share of clones that must lie nearest to their own voice
SAME = 0.9999  # cosine of a clip with itself, float32 summation apart
WHISPER_SECONDS = 30  # what Whisper sees at once
REPEATING = 2.4  # Whisper's own limit on the compression ratio of a text that is no loop
INSTALL = "pip install -r requirements-listen.txt"


class Recogniser(Protocol):
    """Writes down what it hears: samples [n] float32 at `RATE`."""

    name: str
    language: str

    def transcribe(self, samples: np.ndarray) -> str: ...


class VoiceEncoder(Protocol):
    """Says who speaks: samples [n] float32 at `RATE` -> [E]; clips of one speaker have a high cosine."""

    name: str

    def embed(self, samples: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True)
class Spoken:
    """A text and its speech: samples [n] float at `rate` Hz."""

    text: str
    samples: np.ndarray
    rate: int


@dataclass(frozen=True)
class Cloned:
    """Speech in a cloned voice: the voice's name and samples [n] float at `rate` Hz."""

    voice: str
    samples: np.ndarray
    rate: int


@dataclass(frozen=True)
class Control:
    """A question with a known answer, put to the scorer or to a listener."""

    name: str
    passed: bool
    says: str


class Whisper:
    """faster-whisper, decoding the same clip the same way every time and saying nothing where it hears no speech."""

    def __init__(self, model: str | Path, language: str = "en", threads: int = 0):
        """`model` is a name that faster-whisper knows or a folder; `threads` 0 leaves the number to CTranslate2."""
        self.language = language
        self.name = "faster-whisper " + "/".join(Path(model).parts[-2:])
        self._model = _open_whisper(model, threads)
        if language != "en" and not self._model.model.is_multilingual:
            raise UserError(f"the recogniser {model} hears English only, not {language!r}; choose a multilingual one")

    def transcribe(self, samples: np.ndarray) -> str:
        """[n] float32 at 16 kHz -> words, with case and punctuation as the model chooses.

        Temperature 0 alone: no sampled second try, which is Whisper's cure for a segment that repeats itself; here such a
        segment is dropped. So is one of high no-speech probability, whatever its log-probability: "You" in digital silence has
        -0.97, just above the customary -1. Timestamps and earlier text are left out, since both make it repeat itself.
        """
        return " ".join(words for piece in pieces(samples) if (words := self._words(piece)))

    def _words(self, samples: np.ndarray) -> str:
        segments, _ = self._model.transcribe(
            samples, language=self.language, beam_size=5, temperature=0.0, condition_on_previous_text=False,
            without_timestamps=True, no_speech_threshold=0.6, log_prob_threshold=None, compression_ratio_threshold=None,
        )  # fmt: skip
        return " ".join(segment.text.strip() for segment in segments if segment.compression_ratio <= REPEATING)


def pieces(samples: np.ndarray) -> list[np.ndarray]:
    """Cut [n] at the quietest places into pieces that Whisper hears at once; without timestamps it would cut through words."""
    found, most = [], WHISPER_SECONDS * RATE
    while len(samples) > most:
        place = most // 2 + quietest(samples[most // 2 : most])
        found.append(samples[:place])
        samples = samples[place:]
    return [*found, samples]


def quietest(samples: np.ndarray) -> int:
    """Middle of the quietest tenth of a second of [n]: a pause, not a stop consonant."""
    loudness = window_power(samples)
    return round((int(np.convolve(loudness, np.ones(5), "valid").argmin()) + 2.5) * WINDOW * RATE)


def _open_whisper(model: str | Path, threads: int):
    try:
        from faster_whisper import WhisperModel
    except ImportError as error:
        raise UserError(f"to recognise speech, faster-whisper is needed ({error}): {INSTALL}") from error
    try:
        return WhisperModel(str(model), device="cpu", compute_type="float32", cpu_threads=threads)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"the recogniser {model} cannot be opened ({error}); give a folder or a name of faster-whisper"
        ) from error


class Resemblyzer:
    """The GE2E speaker encoder of Resemblyzer, whose weights come with the package."""

    name = "Resemblyzer"

    def __init__(self):
        try:
            from resemblyzer import VoiceEncoder as Encoder
            from resemblyzer.audio import normalize_volume
            from resemblyzer.hparams import audio_norm_target_dBFS
        except ImportError as error:
            raise UserError(f"to compare voices, Resemblyzer is needed ({error}): {INSTALL}") from error
        self._encoder = Encoder("cpu", verbose=False)
        self._level = functools.partial(normalize_volume, target_dBFS=audio_norm_target_dBFS, increase_only=True)

    def embed(self, samples: np.ndarray) -> np.ndarray:
        """[n] float32 at 16 kHz -> [256], of length 1. Its own voice detector is left out: both ends are trimmed already."""
        return self._encoder.embed_utterance(self._level(samples))


def hear(listener: Recogniser, samples: np.ndarray, rate: int) -> str:
    """The words in a clip [n] float at `rate` Hz; silence is not put to the listener."""
    sound = prepare(samples, rate)
    return listener.transcribe(sound) if len(sound) else ""


def embed(listener: VoiceEncoder, samples: np.ndarray, rate: int) -> np.ndarray | None:
    """The voice in a clip [n] float at `rate` Hz as [E] of length 1; None for silence."""
    sound = prepare(samples, rate)
    if not len(sound):
        return None
    vector = listener.embed(sound)
    return vector / np.linalg.norm(vector)


def prepare(samples: np.ndarray, rate: int) -> np.ndarray:
    """[n] float at any rate -> [m] float32 at `RATE` without silent ends; empty for silence, NaN and Inf."""
    samples = np.asarray(samples, np.float32)
    if not len(samples) or not np.isfinite(samples).all() or np.abs(samples).max() <= SILENCE_PEAK:
        return np.empty(0, np.float32)
    return trim(resample(samples, rate, RATE))


def trim(samples: np.ndarray) -> np.ndarray:
    """Cut both ends where they stay `TAIL_DB` below the loudest window; relative, so that gain changes nothing."""
    width, kept = round(WINDOW * RATE), round(KEPT_SECONDS * RATE)
    loudness = window_power(samples)
    loud = np.flatnonzero(loudness >= loudness.max() * 10 ** (-TAIL_DB / 10))
    return samples[max(0, loud[0] * width - kept) : (loud[-1] + 1) * width + kept]


def window_power(samples: np.ndarray) -> np.ndarray:
    """Mean square of each `WINDOW` of [n], zeros after the end."""
    width = round(WINDOW * RATE)
    padded = np.pad(samples, (0, -len(samples) % width)).astype(np.float64)
    return np.square(padded).reshape(-1, width).mean(1)


def scorer_controls() -> list[Control]:
    """Does the scorer count what a person counts?"""
    text = "the quick brown fox jumps over the lazy dog"
    turned = "dog lazy the over jumps fox brown quick the"
    known = [
        ("identical text", text, text, "wer", 0),
        ("nothing heard", text, "", "wer", 9),
        ("shuffled words", text, turned, "wer", 8),
        ("fifty is 50", "Fifty men.", "50 men", "wer", 0),
        ("fifty is not 50 as written", "Fifty men.", "50 men", "raw_wer", 2),
    ]
    return [_known_edits(*case) for case in known]


def _known_edits(name: str, text: str, heard: str, measure: str, edits: int) -> Control:
    errors = score([(text, heard)], "en")[measure]
    return Control(name, errors.edits == edits, f"{errors.edits} edits, {edits} expected")


def silence_controls(listener: Recogniser) -> list[Control]:
    """Does the listener keep quiet where nothing is said? Three seconds each of zeros, faint noise and hum.

    They go to the listener itself: `hear` would spare it the zeros, but speech has pauses too.
    """
    time = np.arange(3 * RATE) / RATE
    noise = 10 ** (-50 / 20) * np.random.default_rng(0).standard_normal(len(time))
    clips = {"zeros": np.zeros(len(time)), "noise at -50 dBFS": noise, "hum of 100 Hz": 0.05 * np.sin(200 * math.pi * time)}
    heard = {name: listener.transcribe(clip.astype(np.float32)) for name, clip in clips.items()}
    return [
        Control(name, not normalise(words, listener.language), f"heard {words!r}" if words else "heard nothing")
        for name, words in heard.items()
    ]


def reference_controls(pairs: list[tuple[str, str]], language: str) -> list[Control]:
    """Does the listener hear the original's words, and their order?"""
    measure = judged_measure(language)
    straight = score(pairs, language)[measure].rate
    texts, heard = zip(*pairs)
    turned = score(zip((turn(text, language) for text in reversed(texts)), heard), language)[measure].rate
    return [
        Control(
            "the original's speech", straight <= FIT_ERROR, f"{straight:.1%} wrong, at most {FIT_ERROR:.0%} for a fit listener"
        ),
        Control(
            "its texts in reverse order", turned > straight + MARGIN, f"{turned:.1%} wrong, more than {straight:.1%} expected"
        ),
    ]


def turn(text: str, language: str) -> str:
    """The words (characters where words are not spaced) of `text` from last to first."""
    plain = normalise(text, language)
    return plain[::-1] if language in UNSPACED else " ".join(plain.split()[::-1])


def voice_controls(listener: VoiceEncoder, voices: Mapping[str, tuple[np.ndarray, int]]) -> list[Control]:
    """Does the encoder know a clip again, and half of a voice by its other half among the others?"""
    controls = []
    halves = {
        name: [embed(listener, half, rate) for half in np.array_split(samples, 2)] for name, (samples, rate) in voices.items()
    }
    seconds = {name: second for name, (_, second) in halves.items()}
    for name, (samples, rate) in voices.items():
        same = cosine(embed(listener, samples, rate), embed(listener, samples, rate))
        controls.append(Control(f"{name}, twice", same >= SAME, f"cosine {same:.4f}, 1 expected"))
        near = nearest(halves[name][0], seconds)
        controls.append(Control(f"{name}, in halves", near == name, f"first half nearest to the second of {near or 'none'}"))
    return controls


def not_fit(part: str, listener: str, controls: Sequence[Control], **figures) -> Finding | None:
    """The finding when a control failed, which is no verdict on the build; None if all passed."""
    failed = [f"{control.name}: {control.says}" for control in controls if not control.passed]
    if not failed:
        return None
    return _unjudged(part, f"listener not fit ({listener}): {'; '.join(failed)}", listener=listener, controls=_tell(controls),
                     **figures)  # fmt: skip


def _unjudged(part: str, why: str, **figures) -> Finding:
    return Finding(LISTENERS, part, NOT_JUDGED, why, figures)


def _tell(controls: Sequence[Control]) -> list[dict]:
    return [asdict(control) for control in controls]


def score_speech(listener: Recogniser, spoken: Sequence[Spoken], reference: Sequence[Spoken] = ()) -> Finding:
    """The build's words against the texts; the mark is the original's own error on its speech, `reference`, and `MARGIN`."""
    controls = scorer_controls() + silence_controls(listener)
    if unfit := not_fit(HEARD, listener.name, controls):
        return unfit
    if reference:
        heard_reference = _hear_all(listener, reference)
        controls += reference_controls(heard_reference, listener.language)
        if unfit := not_fit(HEARD, listener.name, controls, heard=_transcripts(heard_reference)):
            return unfit
    pairs = _hear_all(listener, spoken)
    figures = {"listener": listener.name, "normaliser": the_rule(listener.language), "controls": _tell(controls),
               **_rates(pairs, listener), "heard": _transcripts(pairs)}  # fmt: skip
    if not reference:
        return _unjudged(HEARD, f"{_rates_line(figures)}; no speech of the original to hold it to", **figures)
    return _hold_to(figures, _rates(heard_reference, listener), judged_measure(listener.language))


def _hear_all(listener: Recogniser, spoken: Sequence[Spoken]) -> list[tuple[str, str]]:
    return [(s.text, hear(listener, s.samples, s.rate)) for s in spoken]


def _transcripts(pairs: list[tuple[str, str]]) -> list[dict]:
    return [{"text": text, "heard": heard} for text, heard in pairs]


def _rates(pairs: list[tuple[str, str]], listener: Recogniser) -> dict:
    errors = score(pairs, listener.language)
    rates = {name: e.rate for name, e in errors.items()}
    return {**rates, "errors": {name: asdict(e) for name, e in errors.items()}}


def _rates_line(figures: dict) -> str:
    words = figures["errors"]["wer"]["length"]
    return (f"WER {figures['wer']:.1%} (raw {figures['raw_wer']:.1%}), CER {figures['cer']:.1%} (raw {figures['raw_cer']:.1%}) "
            f"on {words} words by {figures['listener']}")  # fmt: skip


def _hold_to(figures: dict, reference: dict, measure: str) -> Finding:
    """Pass if the build's error is at most `MARGIN` above the original's; n/a if a single error would decide."""
    figures |= {"reference": reference, "margin": MARGIN}
    units = min(figures["errors"][measure]["length"], reference["errors"][measure]["length"])
    if units < MIN_UNITS:
        return _unjudged(HEARD, f"{_rates_line(figures)}; too few to judge, {MIN_UNITS} needed", **figures)
    allowed = reference[measure] + MARGIN
    mark = f"{allowed:.1%} allowed, {MARGIN:.0%} above the original's {reference[measure]:.1%}"
    says = f"{_rates_line(figures)}; {measure.upper()} {mark}"
    return judge(LISTENERS, HEARD, figures[measure] <= allowed, says, **figures)


def score_voices(listener: VoiceEncoder, clones: Sequence[Cloned], voices: Mapping[str, tuple[np.ndarray, int]]) -> Finding:
    """Is each clone nearest to the voice that it was made from? `voices` are the recordings: name -> (samples, rate).

    A build that ignores its reference speaks in one voice, which only clones of two voices can show.
    """
    if strangers := {clone.voice for clone in clones} - set(voices):
        raise ValueError(f"no recording of the voices {sorted(strangers)}")
    if len({clone.voice for clone in clones}) < 2:
        return _unjudged(VOICES, "clones of at least two voices are needed")
    controls = voice_controls(listener, voices)
    if unfit := not_fit(VOICES, listener.name, controls):
        return unfit
    known = {name: embed(listener, *sound) for name, sound in voices.items()}
    made = [embed(listener, clone.samples, clone.rate) for clone in clones]
    right = [nearest(vector, known) == clone.voice for clone, vector in zip(clones, made)]
    own, other = _similarities(clones, made, known)
    share = float(np.mean(right))
    says = (f"{sum(right)} of {len(clones)} clones nearest to their own of {len(voices)} voices, cosine {own:.3f} to it and "
            f"{other:.3f} to others by {listener.name} ({NEAREST:.0%} needed)")  # fmt: skip
    return judge(LISTENERS, VOICES, share >= NEAREST, says, listener=listener.name, nearest=share, own=own, other=other,
                 controls=_tell(controls))  # fmt: skip


def _similarities(clones: Sequence[Cloned], made: list, known: Mapping[str, np.ndarray]) -> tuple[float, float]:
    """Mean cosine of clones to their own voice and to the others."""
    own = [cosine(vector, known[clone.voice]) for clone, vector in zip(clones, made)]
    other = [cosine(vector, known[name]) for clone, vector in zip(clones, made) for name in known if name != clone.voice]
    return float(np.mean(own)), float(np.mean(other))


def nearest(vector: np.ndarray | None, known: Mapping[str, np.ndarray | None]) -> str | None:
    """Name of the most similar voice; None for silence."""
    return None if vector is None else max(known, key=lambda name: cosine(vector, known[name]))


def cosine(a: np.ndarray | None, b: np.ndarray | None) -> float:
    """Of vectors of length 1; 0 where one is of silence."""
    return 0.0 if a is None or b is None else float(a @ b)
