"""Levels of evidence, one function each: a build's graphs, as the run side loads them, against `_ref`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from _ref.higgs import AUDIO_EMBEDDING, TEXT_EMBEDDING, audio_embed
from voxport.build.check import PartSession, cosine, decoder_states, relative_error, unexplained_flips, with_accuracy_level
from voxport.errors import UserError
from voxport.judge.finding import Finding, judge, not_judged
from voxport.judge.marks import MARKS, Marks
from voxport.judge.probes import judge_causality, judge_diversity, judge_sensitivity
from voxport.judge.reference import Original
from voxport.judge.rounding import WEIGHTS, LayerError, judge_weights, layer_errors
from voxport.judge.spectra import log_mel_distance, spectral_match
from voxport.judge.weights import GraphWeights, decoder_weights
from voxport.run.delay import apply_delay, reverse_delay, sanitise
from voxport.run.higgs import BODY, HEADS, Speaker
from voxport.run.request import GREEDY_WARNING
from voxport.run.speech import Speech
from voxport.run.text import Prompt

PARTS, ROUNDED, FORCED, GREEDY, WAVEFORM = "parts", "decoder alone", "teacher-forced", "greedy rows", "waveform"
SEED = 0
ROUNDED_ACTIVATIONS = ("int4",)
# Logits, in units of their spread, that a dtype cannot tell apart: rounding of summation order at float32, 2**-11 of inputs, weights
# and outputs at float16. Rounded heads get no such excuse: their error is what is asked about.
TIES = {"fp32": 1e-5, "fp16": 2.0**-8, "int8": 0.0, "int4": 0.0}


@dataclass(frozen=True)
class Case:
    """One utterance that the build spoke greedily: its prompt embeddings [P, D] and rows [L, N], and its name."""

    name: str
    embeds: np.ndarray
    rows: np.ndarray


@dataclass(frozen=True)
class View:
    """A case as the build and as the original see it, teacher-forced: hidden states [L, D] and logits [L, N, V] of each row."""

    case: Case
    states: np.ndarray
    logits: np.ndarray
    expected: np.ndarray
    expected_logits: np.ndarray


@dataclass(frozen=True)
class Evidence:
    """All findings, and what the report draws: errors of the decoder's tensors and the views of each case."""

    findings: list[Finding]
    layer_errors: list[LayerError]
    views: list[View]


@dataclass(frozen=True)
class Bench:
    """What is judged and against what."""

    speaker: Speaker
    original: Original

    @cached_property
    def weights(self) -> GraphWeights:
        """What the decoder's graph holds."""
        return decoder_weights(self.speaker.folder / self.speaker.manifest.part(BODY).graph)

    @property
    def rate(self) -> int:
        return self.speaker.manifest.codec.sample_rate

    def sound(self, rows: np.ndarray) -> np.ndarray | None:
        """rows [L, N] through the build's codec, None if they hold no frame."""
        audio = self.speaker.manifest.audio
        codes = sanitise(reverse_delay(rows, audio, allow_short=True), audio)
        return self.speaker.codec.decode(codes) if len(codes) else None

    @property
    def marks(self) -> Marks:
        return MARKS[self.speaker.manifest.target.precision]

    def states(self, case: Case) -> np.ndarray:
        """The build's hidden states [L, D] that predict each row of `case`, in one pass over prompt and rows."""
        states = self.speaker.decoder.states(self.fed(case)[None])[0]
        return states[len(case.embeds) - 1 :].astype(np.float32)

    def fed(self, case: Case) -> np.ndarray:
        """What the build's decoder reads for `case`: prompt and all rows but the last, [P + L - 1, D]."""
        if len(case.rows) < 2:
            return case.embeds
        return np.concatenate([case.embeds, self.speaker.embed_rows(case.rows[:-1])[0]])

    def logits(self, states: np.ndarray) -> np.ndarray:
        """The build's heads on states [L, D] -> [L, N, V]."""
        return self.speaker.parts[HEADS].run(hidden_states=states[None])[0].astype(np.float32)

    def reference_embeds(self, case: Case) -> Tensor:
        """What the original is fed for `case`: the build's prompt embeddings, the original's rows."""
        rows = self.original.model.embed_rows(torch.from_numpy(case.rows[:-1]))
        return torch.cat([torch.from_numpy(case.embeds), rows])


def speak_cases(speaker: Speaker, requests: list[dict], max_frames: int) -> list[Case]:
    """Speak each request greedily for at most `max_frames` frames and keep prompt and rows."""
    with greedy_on_purpose(speaker):
        return [_case(speaker, speaker.speak(temperature=0.0, max_frames=max_frames, **request)) for request in requests]


@contextmanager
def greedy_on_purpose(speaker: Speaker) -> Iterator[None]:
    """Inside, a speaker does not warn of what its judge asks for."""
    warn = speaker.warn
    speaker.warn = lambda message: None if message == GREEDY_WARNING else warn(message)
    try:
        yield
    finally:
        speaker.warn = warn


def _case(speaker: Speaker, speech: Speech) -> Case:
    return Case(speech.text, prompt_embeds(speaker, speech), speech.rows)


def prompt_embeds(speaker: Speaker, speech: Speech) -> np.ndarray:
    """The embeddings [P, D] of the prompt that a speech was made from."""
    if speech.reference_codes is None:
        return speaker.embed_prompt(Prompt(speech.prompt_ids, None), None)[0]
    places = np.flatnonzero(speech.prompt_ids == speaker.manifest.tokens.placeholder)
    rows = apply_delay(speech.reference_codes, speaker.manifest.audio)
    return speaker.embed_prompt(Prompt(speech.prompt_ids, (int(places[0]), int(places[-1]) + 1)), rows)[0]


def judge_text_embed(bench: Bench) -> Finding:
    """A sample of rows of the table."""
    table = bench.original.checkpoint[TEXT_EMBEDDING]
    ids = np.random.default_rng(SEED).integers(0, len(table), (1, 256))
    found = bench.speaker.parts["text_embed"].run(input_ids=ids)[0]
    return _compare("text_embed", found, table[ids[0]].float().numpy(), bench.marks)


def judge_audio_embed(bench: Bench) -> Finding:
    """Random rows, and each codebook's special ids."""
    audio = bench.speaker.manifest.audio
    rows = np.random.default_rng(SEED).integers(0, audio.vocab_size, (128, audio.num_codebooks))
    rows[:2] = [[audio.boc_id], [audio.eoc_id]]
    weight = bench.original.model.weight(AUDIO_EMBEDDING)
    expected = audio_embed(weight, torch.from_numpy(rows), audio.vocab_size)
    return _compare("audio_embed", bench.speaker.embed_rows(rows)[0], expected.numpy(), bench.marks)


def judge_audio_heads(bench: Bench, states: list[np.ndarray]) -> Finding:
    """Argmax of every codebook for the same hidden states; a flip between logits that the heads' own dtype cannot tell apart is none."""
    hidden = np.concatenate(states)
    found = bench.logits(hidden)
    expected = bench.original.model.logits(torch.from_numpy(hidden)).numpy()
    chosen = np.take_along_axis(expected, found.argmax(-1)[..., None], -1)[..., 0]
    tie = TIES[bench.speaker.manifest.part(HEADS).precision] * float(expected.std())
    agreement = float((expected.max(-1) - chosen <= tie).mean())
    error = relative_error(found, expected)
    return judge(
        PARTS, HEADS, agreement >= bench.marks.heads_top1, f"argmax {agreement:.4f}, error {error:.1e}",
        top1=agreement, error=error, max_abs=float(np.abs(found - expected).max()), tie=tie,
    )  # fmt: skip


def judge_audio_tokenizer(bench: Bench) -> Finding:
    """Waveforms of random codes at several lengths."""
    codec, audio = bench.original.codec(), bench.speaker.manifest.audio
    errors, largest = [], 0.0
    for frames in (1, 2, 25):
        codes = np.random.default_rng(frames).integers(0, audio.codebook_size, (frames, audio.num_codebooks))
        found = bench.speaker.parts["audio_tokenizer"].run(codes=codes.T[None])
        expected = codec.decode(torch.from_numpy(codes.T[None])).numpy()
        if found.shape != expected.shape:
            return judge(PARTS, "audio_tokenizer", False, f"{found.shape[-1]} samples for {frames} frames")
        errors.append(relative_error(found, expected))
        largest = max(largest, float(np.abs(found - expected).max()))
    mark = MARKS["fp32"].part_error
    return judge(PARTS, "audio_tokenizer", max(errors) <= mark, f"error {max(errors):.1e}, max abs {largest:.1e}",
                 error=max(errors), max_abs=largest)  # fmt: skip


def judge_audio_encoder(bench: Bench) -> Finding:
    """Codes of clips of every alignment of samples with frames: whole frames, and remainders in each branch."""
    codec, figures = bench.original.codec(), bench.speaker.manifest.codec
    second, hop = figures.sample_rate, figures.hop_length
    lengths = [second + r for r in (0, hop // 8 - 1, hop // 8, hop // 2, hop - 1)]
    wrong = frames = 0
    for samples in lengths:
        waveform = 0.1 * torch.randn(1, 1, samples, generator=torch.Generator().manual_seed(samples))
        found = bench.speaker.parts["audio_encoder"].run(waveform=waveform.numpy())
        wrong += unexplained_flips(codec, waveform, torch.from_numpy(found))
        frames += found.shape[-1]
    return judge(PARTS, "audio_encoder", wrong == 0, f"{wrong} of {frames} frames get other codes", wrong=wrong, frames=frames)


def judge_rounded(bench: Bench, views: list[View]) -> Finding:
    """The decoder against `_ref` on the very weights that the graph holds: is the graph the model?

    A kernel that rounds activations to int8 loses a little at each layer whatever the graph, so an int4 graph is held to the mark
    without that rounding, and what the rounding costs is reported beside.
    """
    model = bench.original.with_weights(bench.weights)
    expected = _forced(bench, model, [view.case for view in views])
    built = float(np.mean([cosine(v.states, e).mean() for v, e in zip(views, expected)]))
    exact = built if bench.speaker.manifest.target.precision not in ROUNDED_ACTIVATIONS else _unrounded_cosine(bench, views, expected)
    mark = bench.marks.rounded_cosine
    return judge(ROUNDED, BODY, exact >= mark, f"cosine {exact:.6f} with its own weights ({mark} needed), {built:.6f} as it runs",
                 cosine=exact, as_built=built)  # fmt: skip


def _unrounded_cosine(bench: Bench, views: list[View], expected: list[np.ndarray]) -> float:
    """The same figure for a copy of the graph whose kernels do not round activations, run on the CPU."""
    graph = bench.speaker.folder / bench.speaker.manifest.part(BODY).graph
    session = PartSession(graph, with_accuracy_level(graph, 0))
    found = [decoder_states(session, bench.original.model.config, bench.fed(v.case))[len(v.case.embeds) - 1 :] for v in views]
    return float(np.mean([cosine(f, e).mean() for f, e in zip(found, expected)]))


def judge_forced(bench: Bench, views: list[View]) -> list[Finding]:
    """Hidden states, argmaxes and distributions against the original, both fed the same rows."""
    marks = bench.marks
    similarity = float(np.mean([cosine(v.states, v.expected).mean() for v in views]))
    ours, theirs = (np.concatenate([getattr(v, name) for v in views]) for name in ("logits", "expected_logits"))
    per_codebook = (ours.argmax(-1) == theirs.argmax(-1)).mean(0)
    top1, kl = float(per_codebook.mean()), kl_divergence(theirs, ours)
    ranks = [rank for view in views if (rank := eoc_rank(bench, view)) is not None]
    end = f", EOC ranks {ranks} at the end" if ranks else ""
    return [
        judge(FORCED, BODY, similarity >= marks.hidden_cosine, f"hidden-state cosine {similarity:.5f} ({marks.hidden_cosine} needed)",
              cosine=similarity),
        judge(FORCED, f"{BODY} + {HEADS}", top1 >= marks.top1, f"top-1 agreement {top1:.4f} ({marks.top1} needed), KL {kl:.4f}{end}",
              top1=top1, per_codebook=[float(x) for x in per_codebook], kl=kl, eoc_ranks=ranks),
    ]  # fmt: skip


def kl_divergence(expected: np.ndarray, found: np.ndarray) -> float:
    """Mean Kullback-Leibler divergence in nats of softmax(expected) from softmax(found), logits [..., V]."""
    p, q = (torch.from_numpy(x).double().log_softmax(-1) for x in (expected, found))
    return float((p.exp() * (p - q)).sum(-1).mean())


def eoc_rank(bench: Bench, view: View) -> int | None:
    """How many codes of codebook 0 the build likes better than EOC at the row where speech ended; None if it did not end."""
    audio = bench.speaker.manifest.audio
    ends = [r for r in range(audio.num_codebooks, len(view.case.rows)) if view.case.rows[r, 0] == audio.eoc_id]
    if not ends:
        return None
    logits = view.logits[ends[0], 0]
    return int((logits > logits[audio.eoc_id]).sum())


def judge_greedy(bench: Bench, views: list[View]) -> Finding:
    """The rows that the build chose against the original's argmax after the same rows: where do they first part, and how nearly?

    Rows forced to BOC are no choice and do not count.
    """
    audio = bench.speaker.manifest.audio
    parted = []
    for view in views:
        rows, logits = view.case.rows, view.expected_logits
        free = np.arange(audio.num_codebooks)[None] <= np.arange(len(rows))[:, None]
        chosen = np.take_along_axis(logits, rows[..., None], -1)[..., 0]
        margin = np.where(free, logits.max(-1) - chosen, 0.0)
        if margin.any():
            row = int(np.flatnonzero(margin.any(1))[0])
            parted.append({"text": view.case.name, "row": row, "margin": float(margin[row].max())})
    worst = max((p["margin"] for p in parted), default=0.0)
    says = "every row as the original" if not parted else (
        f"{len(parted)} of {len(views)} part, the first at row {min(p['row'] for p in parted)}, margin at most {worst:.3g}"
    )  # fmt: skip
    return judge(GREEDY, "whole loop", worst <= bench.marks.greedy_margin, says, parted=parted, cases=len(views))


def judge_waveform(bench: Bench, view: View) -> Finding:
    """What the ear gets: the build's codes through the build's codec, against the original's choices through the original's.

    The original chooses after the same rows, so a flipped code changes its own frame and no other.
    """
    theirs = view.expected_logits.argmax(-1)
    ramp = np.arange(theirs.shape[1])[None] > np.arange(len(theirs))[:, None]
    theirs = np.where(ramp, bench.speaker.manifest.audio.boc_id, theirs)
    sounds = [bench.sound(rows) for rows in (view.case.rows, theirs)]
    if sounds[0] is None:
        return not_judged(WAVEFORM, "codec", "too few rows for a sound")
    distance, match = log_mel_distance(*sounds, bench.rate), spectral_match(*sounds)
    mark = bench.marks.log_mel
    return judge(WAVEFORM, "whole loop", distance <= mark, f"log-mel distance {distance:.2f} dB ({mark} allowed), spectral match"
                 f" {match:.4f}", log_mel=distance, spectral_match=match)  # fmt: skip


def _forced(bench: Bench, original: Original, cases: list[Case]) -> list[np.ndarray]:
    states = original.hidden_states([bench.reference_embeds(case) for case in cases])
    return [s[len(case.embeds) - 1 :].numpy() for s, case in zip(states, cases)]


def take_views(bench: Bench, cases: list[Case]) -> list[View]:
    """Run build and original over every case, teacher-forced; one pass through the original's layers serves all."""
    expected = _forced(bench, bench.original, cases)
    head = bench.original.model.logits
    views = []
    for case, theirs in zip(cases, expected):
        ours = bench.states(case)
        views.append(View(case, ours, bench.logits(ours), theirs, head(torch.from_numpy(theirs)).numpy()))
    return views


def _compare(part: str, found: np.ndarray, expected: np.ndarray, marks: Marks) -> Finding:
    error, largest = relative_error(found, expected), float(np.abs(found - expected).max())
    similarity = float(cosine(found, expected).min())
    return judge(PARTS, part, error <= marks.part_error, f"error {error:.1e}, max abs {largest:.1e}, cosine {similarity:.6f}",
                 error=error, max_abs=largest, cosine=similarity)  # fmt: skip


def judge_all(bench: Bench, requests: list[dict], max_frames: int) -> Evidence:
    """Every level, cheapest first. A part that cannot run at all fails its own level; levels that need it are not judged."""
    findings = [
        *guarded(PARTS, "text_embed", lambda: judge_text_embed(bench)),
        *guarded(PARTS, "audio_embed", lambda: judge_audio_embed(bench)),
        *guarded(PARTS, "audio_tokenizer", lambda: judge_audio_tokenizer(bench)),
        *guarded(PARTS, "audio_encoder", lambda: judge_audio_encoder(bench)),
    ]
    errors: list[LayerError] = []
    searched = lambda: bool((bench.speaker.manifest.part(BODY).recipe.get("block") or {}).get("search"))
    look = lambda: judge_weights(errors.__iadd__(layer_errors(bench.weights, bench.original.checkpoint)), searched())
    findings += guarded(WEIGHTS, BODY, look)
    views: list[View] = []
    findings += guarded(FORCED, BODY, lambda: views.extend(take_views(bench, speak_cases(bench.speaker, requests, max_frames))))
    if not views:
        return Evidence(findings, errors, views)
    prompts = [view.case.embeds for view in views]
    findings += [
        judge_audio_heads(bench, [view.states for view in views]),
        judge_rounded(bench, views),
        *judge_forced(bench, views),
        judge_greedy(bench, views),
        judge_causality(bench.speaker, prompts[0]),
        judge_sensitivity(bench.speaker, prompts),
        judge_diversity(bench.speaker, [view.case.rows for view in views]),
        judge_waveform(bench, views[0]),
    ]
    return Evidence(findings, errors, views)


def guarded(level: str, part: str, look: Callable[[], Finding | None]) -> list[Finding]:
    """The finding of `look`, or a failure that carries its message."""
    try:
        finding = look()
    except UserError as error:
        return [judge(level, part, False, str(error))]
    return [finding] if finding is not None else []
