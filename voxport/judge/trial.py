"""One build on trial: what it speaks, every level of evidence, and what the report draws of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import soundfile
import torch

from voxport.build.checkpoint import Checkpoint
from voxport.judge import report
from voxport.judge.finding import Finding, not_judged
from voxport.judge.levels import Bench, judge_all, prompt_embeds
from voxport.judge.listeners import HEARD, LISTENERS, VOICES, Cloned, Recogniser, Spoken, VoiceEncoder, score_speech, score_voices
from voxport.judge.page import Extras, Utterance
from voxport.judge.reference import Original
from voxport.run.higgs import Speaker
from voxport.run.sampler import Dice
from voxport.run.speech import Speech

SHOWN = 3  # utterances on the page: about 64 kB of page a second of sound
LARGEST_SPOKEN = 1 << 30  # bytes of language model up to which the original speaks too: it reads every weight for every row


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


def try_build(speaker: Speaker, checkpoint: Checkpoint, reference: str, questions: Questions) -> Trial:
    """Judge one build against one checkpoint."""
    manifest = speaker.manifest
    bench = Bench(speaker, Original(checkpoint, manifest.recipe["rope_table"] == "bf16"))
    evidence = judge_all(bench, questions.requests, questions.frames)
    speeches = [speaker.speak(text, seed=seed) for seed, text in enumerate(questions.heard)]
    originals = speak_original(bench, speeches)
    findings = [*evidence.findings, listen(questions.listener, speeches, originals), compare_voices(speaker, questions)]
    sizes = {name: sum(r.bytes for r in part.files.values()) for name, part in manifest.parts.items()}
    speech = [Utterance(s.text, sounds(s, o)) for s, o in list(zip(speeches, originals or [None] * len(speeches)))[:SHOWN]]
    extras = Extras(layers=evidence.layer_errors, part_bytes=sizes, speech=speech)
    return Trial(report.as_json(findings, manifest, reference), extras, findings)


def sounds(speech: Speech, original: Spoken | None) -> dict[str, tuple[np.ndarray, int]]:
    """The waveforms that the page puts side by side."""
    made = {"ONNX": (speech.samples, speech.sample_rate)}
    return made if original is None else {"original": (original.samples, original.rate), **made}


def listen(listener: Recogniser | None, speeches: Sequence[Speech], originals: Sequence[Spoken]) -> Finding:
    """Level 7 for speech; n/a without a listener."""
    if listener is None:
        return not_judged(LISTENERS, HEARD, "no listener was given (--asr)")
    spoken = [Spoken(s.text, s.samples, s.sample_rate) for s in speeches]
    return score_speech(listener, spoken, originals)


def compare_voices(speaker: Speaker, questions: Questions) -> Finding:
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


def speak_original(bench: Bench, speeches: Sequence[Speech]) -> list[Spoken]:
    """The original's own speech for the same prompts and seeds; none if it is too large to be spoken here."""
    checkpoint = bench.original.checkpoint
    if sum(path.stat().st_size for path in set(checkpoint.files.values())) > LARGEST_SPOKEN:
        return []
    model, codec = bench.original.in_memory(), bench.original.codec()
    return [_speak(model, codec, bench, speech) for speech in speeches]


def _speak(model, codec, bench: Bench, speech: Speech) -> Spoken:
    dice, step = Dice(speech.sampling, speech.seed), iter(range(10**9))
    choose = lambda logits: torch.from_numpy(dice.roll(logits.numpy(), next(step)))
    embeds = torch.from_numpy(prompt_embeds(bench.speaker, speech))
    rows = speech.max_frames + bench.speaker.manifest.audio.num_codebooks - 1
    codes = model.generate(embeds, rows, choose).codes
    return Spoken(speech.text, codec.decode(codes.t()[None])[0, 0].numpy(), bench.rate)


def beside(trials: Sequence[Trial]) -> Extras:
    """What the page shows of the first trial, with the second beside it if there is one."""
    first = trials[0].extras
    return first if len(trials) == 1 else replace(first, other=(trials[1].result, trials[1].extras))
