"""One build on trial: what it speaks, every level of evidence, and what the report draws of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from voxport.errors import WorkError, say
from voxport.families import FAMILIES
from voxport.judge import report
from voxport.judge.finding import Finding, not_judged
from voxport.judge.listeners import HEARD, LISTENERS, VOICES, Cloned, Recogniser, Spoken, VoiceEncoder, score_speech, score_voices
from voxport.judge.page import Extras, Utterance

SHOWN = 3  # utterances on the page: about 64 kB of page a second of sound


@dataclass(frozen=True)
class Questions:
    """What a build is asked: texts (and a reference to clone with the first), frames of the greedy run; the texts that a
    listener hears; and voices to clone, each a sound file with its transcript beside it, for an encoder of speakers."""

    requests: Sequence[dict]
    frames: int
    listener: Recogniser | None = None
    heard: Sequence[str] = ()
    encoder: VoiceEncoder | None = None
    voices: Sequence[Path] = ()


@dataclass(frozen=True)
class Trial:
    """Result as the report's JSON, and what the page shows beside it."""

    result: dict
    extras: Extras
    findings: list[Finding]


def try_build(speaker: Any, folder: Path, reference: str, questions: Questions) -> Trial:
    """Judge one build, of any family, against the checkpoint in `folder`; `reference` is what it is called."""
    manifest = speaker.manifest
    judge = FAMILIES[manifest.family].judge
    bench = judge.open_bench(speaker, folder)
    evidence = judge.judge_all(bench, questions.requests, questions.frames)
    speeches = speak_all(speaker, questions.heard)
    originals = judge.speak_original(bench, speeches)
    findings = [*evidence.findings, listen(questions.listener, speeches, originals), compare_voices(speaker, questions)]
    sizes = {name: sum(r.bytes for r in part.files.values()) for name, part in manifest.parts.items()}
    speech = [Utterance(s.text, sounds(s, o)) for s, o in list(zip(speeches, originals or [None] * len(speeches)))[:SHOWN]]
    extras = Extras(layers=evidence.layer_errors, part_bytes=sizes, speech=speech)
    return Trial(report.as_json(findings, manifest, reference), extras, findings)


def speak_all(speaker: Any, texts: Sequence[str]) -> list:
    """Speech of each text; one that the build cannot speak is told and left out."""
    speeches = []
    for seed, text in enumerate(texts):
        try:
            speeches.append(speaker.speak(text, seed=seed))
        except WorkError as error:
            say(f"warning: {text[:40]!r} is not heard: {error}")
    return speeches


def sounds(speech: Any, original: Spoken | None) -> dict[str, tuple[np.ndarray, int]]:
    """The waveforms that the page puts side by side."""
    made = {"ONNX": (speech.samples, speech.sample_rate)}
    return made if original is None else {"original": (original.samples, original.rate), **made}


def listen(listener: Recogniser | None, speeches: Sequence, originals: Sequence[Spoken]) -> Finding:
    """Level 7 for speech; n/a without a listener."""
    if listener is None:
        return not_judged(LISTENERS, HEARD, "no listener was given (--asr)")
    spoken = [Spoken(s.text, s.samples, s.sample_rate) for s in speeches]
    return score_speech(listener, spoken, originals)


def compare_voices(speaker: Any, questions: Questions) -> Finding:
    """Level 7 for clones: every text in every voice, each clone to be nearest to its own; n/a without an encoder."""
    if questions.encoder is None:
        return not_judged(LISTENERS, VOICES, "no speaker encoder was asked (--voices)")
    known, clones = {}, []
    for path in questions.voices:
        known[path.stem] = read_sound(path)
        transcript = path.with_suffix(".txt")
        ref_text = transcript.read_text(encoding="utf-8").strip() if transcript.is_file() else None
        for seed, text in enumerate(questions.heard):
            speech = speaker.speak(text, seed=seed, ref_audio=path, ref_text=ref_text)
            clones.append(Cloned(path.stem, speech.samples, speech.sample_rate))
    return score_voices(questions.encoder, clones, known)


def read_sound(path: Path) -> tuple[np.ndarray, int]:
    """Mono samples [n] float32 and rate of a sound file."""
    samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    return samples.mean(axis=1), rate


def beside(trials: Sequence[Trial]) -> Extras:
    """What the page shows of the first trial, with the second beside it if there is one."""
    first = trials[0].extras
    return first if len(trials) == 1 else replace(first, other=(trials[1].result, trials[1].extras))
