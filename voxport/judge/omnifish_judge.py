"""What eval.py needs to know of an OmniFish build: its bench, its levels of evidence, and the original's own speech."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from _ref.omnifish import CODEBOOK_SIZES, Recipe
from voxport.build.check import ROUNDED as ROUNDED_PRECISIONS
from voxport.build.check import TOLERANCE, cosine, decoder_states, relative_error, with_accuracy_level
from voxport.build.omnifish_check import part_cases, unexplained_flips
from voxport.build.omnifish_checkpoint import DECODE_ONLY, ENCODE_ONLY, OmniFishCheckpoint
from voxport.build.omnifish_parts import RESIDUAL_PARTS
from voxport.judge.finding import Finding, judge, not_judged
from voxport.judge.levels import (
    FORCED,
    GREEDY,
    PARTS,
    ROUNDED,
    WAVEFORM,
    Evidence,
    guarded,
    kl_divergence,
)  # fmt: skip
from voxport.judge.listeners import Spoken
from voxport.judge.omnifish_walk import Bench, Case, View, speak_cases, take_view
from voxport.judge.probes import FEWEST_CODES, FEWEST_ROWS, PROBES, SAME_LOGITS
from voxport.judge.reference import is_small
from voxport.judge.rounding import WEIGHTS, LayerError, judge_weights, layer_errors
from voxport.judge.spectra import log_mel_distance, spectral_match
from voxport.manifest_omnifish import BODY, CODEC_DECODER, CODEC_ENCODER, SEMANTIC_HEAD
from voxport.run.omnifish import Speaker
from voxport.run.omnifish_blocks import LEAST_REACH
from voxport.run.omnifish_codec import decode
from voxport.run.omnifish_residual import run_all
from voxport.run.omnifish_speech import OmniSpeech

__all__ = ["judge_all", "open_bench", "speak_original"]
RESIDUAL = "residual decoder"
NEW_FRAMES = 8  # unknown frames behind the prompt that the body is judged with on its own weights


def open_bench(speaker: Speaker, folder: Path) -> Bench:
    """A build beside its original in `folder`; the codec is looked for where the build had it from."""
    codec = Path(speaker.manifest.codec_path)
    known = speaker.manifest.codec_path and codec.is_dir()
    return Bench(speaker, OmniFishCheckpoint.open(folder, codec if known else None))


@torch.no_grad()
def judge_part(bench: Bench, part: str) -> Finding:
    """A part on random input. A rounded one is held, its activations unrounded, to the weights that it holds."""
    precision, checkpoint, edited = bench.manifest.part(part).precision, bench.checkpoint, None
    graph = bench.speaker.parts[part]
    run = lambda feeds: run_all(graph, **feeds)
    if precision in ROUNDED_PRECISIONS:
        checkpoint = bench.overlaid(bench.matched(part))
        edited = bench.session(part, with_accuracy_level(bench.speaker.folder / bench.manifest.part(part).graph, 0))
    errors, built = [], []
    for feeds, expected in part_cases(part, checkpoint):
        feeds = {name: value.numpy() for name, value in feeds.items()}
        built += differences(run(feeds), expected)
        errors += differences(edited.run(**feeds), expected) if edited else built[-len(expected) :]
    allowed = TOLERANCE["fp16" if edited else precision]
    as_built = f", {max(built):.1e} as it runs" if edited else ""
    return judge(PARTS, part, max(errors) <= allowed, f"error {max(errors):.1e}{as_built}", error=max(errors), as_built=max(built))


def differences(found: Sequence[np.ndarray], expected: Sequence[torch.Tensor]) -> list[float]:
    """Relative error of each output; infinite where its shape differs."""
    pairs = [(ours, theirs.numpy()) for ours, theirs in zip(found, expected, strict=True)]
    return [float("inf") if a.shape != b.shape else relative_error(a, b) if a.size else 0.0 for a, b in pairs]


@torch.no_grad()
def judge_encoder(bench: Bench) -> Finding:
    """Codes of clips: whole frames, remainders, and less than a frame."""
    codec, hop = bench.checkpoint.codec(without=DECODE_ONLY), bench.manifest.codec.hop_length
    wrong = frames = 0
    for samples in (4 * hop, 4 * hop + 1, 5 * hop - 1, hop // 2):
        waveform = 0.1 * torch.randn(1, 1, samples, generator=torch.Generator().manual_seed(samples))
        found = bench.speaker.parts[CODEC_ENCODER].run(waveform=waveform.numpy())
        wrong += unexplained_flips(codec, waveform, torch.from_numpy(found))
        frames += found.shape[-1]
    return judge(PARTS, CODEC_ENCODER, wrong == 0, f"{wrong} of {frames} frames get other codes", wrong=wrong, frames=frames)


def judge_body_weights(bench: Bench, errors: list[LayerError]) -> Finding:
    """The body's weights against the checkpoint; `errors` are handed on to the page."""
    if bench.weights is None:
        return not_judged(WEIGHTS, BODY, "its attention is spelt out, so that its matrices have no names")
    errors += layer_errors(bench.weights, bench.checkpoint)
    searched = bool((bench.manifest.part(BODY).recipe.get("block") or {}).get("search"))
    return judge_weights(errors, searched)


def judge_residual_weights(bench: Bench, part: str) -> Finding:
    """The matrices of a residual part against the checkpoint."""
    weights = bench.matched(part)
    strangers = [name for name in weights if name not in weights.sources]
    if strangers:
        return judge(WEIGHTS, part, False, strangers[0])
    searched = bool((bench.manifest.part(part).recipe.get("block") or {}).get("search"))
    return judge_weights(layer_errors(weights, weights.sources), searched, part)


@torch.no_grad()
def judge_rounded(bench: Bench, case: Case) -> Finding:
    """The body against `_ref` on the very weights that the graph holds, in one pass over prompt and unknown frames and in two."""
    if bench.weights is None:
        return not_judged(ROUNDED, BODY, "its attention is spelt out, so that its matrices have no names")
    model, rounded = bench.with_weights(bench.weights), bench.manifest.target.precision in ROUNDED_PRECISIONS
    unknown = bench.speaker.model.semantic_only(np.full(NEW_FRAMES, bench.manifest.codebooks.mask_id))
    embeds = np.concatenate([case.text, bench.speaker.model.embed_audio(unknown)[0]])
    whole, _ = model.hidden_states(torch.from_numpy(embeds))
    first, past = model.hidden_states(torch.from_numpy(case.text))
    second, _ = model.hidden_states(torch.from_numpy(embeds[len(case.text) :]), past)
    expected = np.concatenate([whole.numpy(), first.numpy(), second.numpy()])
    exact, built = (body_cosine(bench, embeds, len(case.text), expected, level) for level in (0 if rounded else None, None))
    mark = bench.marks.rounded_cosine
    return judge(ROUNDED, BODY, exact >= mark, f"cosine {exact:.6f} with its own weights ({mark} needed), {built:.6f} as it runs",
                 cosine=exact, as_built=built)  # fmt: skip


def body_cosine(bench: Bench, embeds: np.ndarray, split: int, expected: np.ndarray, level: int | None) -> float:
    """Mean cosine of the graph's states, its kernels computing at accuracy `level` if that is given."""
    session = bench.session(BODY, None if level is None else with_accuracy_level(bench.graph, level))
    found = [decoder_states(session, bench.checkpoint.config, embeds, cut) for cut in (None, split)]
    return float(cosine(np.concatenate(found), expected).mean())


def judge_forced(bench: Bench, views: list[View]) -> list[Finding]:
    """Hidden states of every pass, semantic choices of frames still unknown, residual choices of every level."""
    marks = bench.marks
    similarity = float(np.mean([cosine(a, b).mean() for v in views for a, b in zip(v.states, v.expected)]))
    open_frames = [(ours[is_open], theirs[is_open]) for v in views for step, ours, theirs in v.rounds
                   for is_open in [step.ids[0] == bench.manifest.codebooks.mask_id]]  # fmt: skip
    ours, theirs = (drop_mask(np.concatenate(side), bench) for side in zip(*open_frames))
    semantic, kl = float((ours.argmax(-1) == theirs.argmax(-1)).mean()), kl_divergence(theirs, ours)
    per_codebook = [semantic, *residual_agreement(views)]
    residual = float(np.mean(per_codebook[1:])) if len(per_codebook) > 1 else None
    findings = [
        judge(FORCED, BODY, similarity >= marks.hidden_cosine, f"hidden-state cosine {similarity:.5f} ({marks.hidden_cosine} needed)",
              cosine=similarity),
        judge(FORCED, f"{BODY} + {SEMANTIC_HEAD}", semantic >= marks.top1, f"top-1 agreement {semantic:.4f} ({marks.top1} needed), KL {kl:.4f}",
              top1=semantic, per_codebook=per_codebook, kl=kl),
    ]  # fmt: skip
    if residual is None:
        return [*findings, not_judged(FORCED, RESIDUAL, "the build spoke no frame")]
    return [*findings, judge(FORCED, RESIDUAL, residual >= marks.top1, f"top-1 agreement {residual:.4f} ({marks.top1} needed)", top1=residual)]


def drop_mask(logits: np.ndarray, bench: Bench) -> np.ndarray:
    """Without the id that is no answer: its logit is minus infinity."""
    return np.delete(logits, bench.manifest.codebooks.mask_id, axis=-1)


def residual_agreement(views: list[View]) -> list[float]:
    """Share of equal first choices of each residual codebook; nothing if there was no speech."""
    pairs = [(ours, theirs) for view in views for _, _, ours, theirs in view.spoken]
    same = lambda level: np.concatenate([a[level][0].argmax(-1) == b[level][0].argmax(-1) for a, b in pairs])
    return [float(same(level).mean()) for level in range(len(pairs[0][0]))] if pairs else []


def judge_greedy(bench: Bench, views: list[View]) -> Finding:
    """What the build chose against the original's choices in the same place: where do they first part, and how nearly?"""
    parted = []
    for view in views:
        margins = sorted([*semantic_margins(view, bench.manifest.codebooks.mask_id), *residual_margins(view)])
        if margins:
            frame = margins[0][0]
            parted.append({"text": view.case.name, "row": frame, "margin": max(m for at, m in margins if at == frame)})
    worst = max((p["margin"] for p in parted), default=0.0)
    says = "every choice as the original" if not parted else (
        f"{len(parted)} of {len(views)} part, the first at frame {min(p['row'] for p in parted)}, margin at most {worst:.3g}"
    )  # fmt: skip
    return judge(GREEDY, "whole loop", worst <= bench.marks.greedy_margin, says, parted=parted, cases=len(views))


def semantic_margins(view: View, mask_id: int) -> list[tuple[int, float]]:
    """(frame, margin) of every semantic id that the original would not have chosen, and of every frame that it would have left
    unknown for longer, by how much surer it was of another."""
    found = []
    for step, _, logits in view.rounds:
        before, after = step.ids
        shown, hidden = (before == mask_id) & (after != mask_id), after == mask_id
        best = logits.max(-1)
        wrong = best - np.take_along_axis(logits, np.where(shown, after, 0)[:, None], -1)[:, 0]
        found += [(step.start + int(i), float(wrong[i])) for i in np.flatnonzero(shown) if wrong[i] > 0]
        sure = best - np.log(np.exp(logits - best[:, None]).sum(-1)) - best  # log of the likeliest id's probability
        if hidden.any() and shown.any() and (gap := float(sure[hidden].max() - sure[shown].min())) > 0:
            found.append((step.start + int(np.flatnonzero(shown)[0]), gap))
    return found


def residual_margins(view: View) -> list[tuple[int, float]]:
    """(frame, margin) of every residual code that the original chose in no round: the least margin of all rounds."""
    found = []
    for start, block, _, levels in view.spoken:
        for level, rounds in enumerate(levels, 1):
            margins = [r.max(-1) - np.take_along_axis(r, block.codes[level][:, None], -1)[:, 0] for r in rounds]
            least = np.min(margins, axis=0)
            found += [(start + int(i), float(least[i])) for i in np.flatnonzero(least > 0)]
    return found


def judge_both_ways(speaker: Speaker, embeds: np.ndarray) -> Finding:
    """Change the last position [S, D]: most earlier states must move, or the body attends to the past only."""
    changed = embeds.copy()
    changed[-1] = embeds[0] - embeds[-1]
    before, after = (speaker.model.decoder.states(x[None])[0].astype(np.float64) for x in (embeds, changed))
    moved = np.linalg.norm(after - before, axis=-1) / np.maximum(np.linalg.norm(before, axis=-1), 1e-30)
    earlier = float(np.median(moved[:-1]))
    return judge(PROBES, BODY, earlier > LEAST_REACH, f"the last position moves earlier states by {earlier:.1e}, its own by {moved[-1]:.1e}",
                 earlier=earlier, own=float(moved[-1]))  # fmt: skip


def judge_sensitivity(views: list[View], bench: Bench) -> Finding:
    """First logits of two texts: if they are the same, the text is not heard."""
    if len(views) < 2:
        return not_judged(PROBES, "text", "one text alone cannot show that text is heard")
    similarity = float(cosine(*(drop_mask(view.logits[0], bench).reshape(-1) for view in views[:2])))
    return judge(PROBES, "text", similarity < SAME_LOGITS, f"first logits of two texts have cosine {similarity:.4f}", cosine=similarity)


def judge_diversity(cases: list[Case]) -> Finding:
    """Distinct codes a codebook over all frames: a dead head collapses to one."""
    spoken = np.concatenate([case.codes for case in cases], axis=1)
    if spoken.shape[1] < FEWEST_ROWS:
        return not_judged(PROBES, "codes", f"{spoken.shape[1]} frames are too few to count codes")
    counts = [len(np.unique(codes)) for codes in spoken]
    return judge(PROBES, "codes", min(counts) >= FEWEST_CODES, f"{min(counts)} to {max(counts)} distinct codes a codebook"
                 f" in {spoken.shape[1]} frames", distinct=counts)  # fmt: skip


@torch.no_grad()
def judge_waveform(bench: Bench, view: View) -> Finding:
    """The build's codes through the build's codec against the original's choices through the original's."""
    codes = view.case.codes
    if not codes.shape[1] or CODEC_DECODER not in bench.manifest.parts:
        return not_judged(WAVEFORM, "whole loop", "the build spoke no frame" if not codes.shape[1] else f"it has no {CODEC_DECODER}")
    rate = bench.manifest.codec.sample_rate
    codec = bench.checkpoint.codec(without=ENCODE_ONLY)
    sounds = decode(bench.speaker.parts, bench.manifest, codes), codec.decode(torch.from_numpy(original_choices(view, bench))[None])[0, 0].numpy()
    distance, match, mark = log_mel_distance(*sounds, rate), spectral_match(*sounds), bench.marks.log_mel
    return judge(WAVEFORM, "whole loop", distance <= mark, f"log-mel distance {distance:.2f} dB ({mark} allowed), spectral match"
                 f" {match:.4f}", log_mel=distance, spectral_match=match)  # fmt: skip


def original_choices(view: View, bench: Bench) -> np.ndarray:
    """codes [N, T] as the original would have chosen each in its place; where it would have ended, the build's."""
    codes = view.case.codes.copy()
    for step, _, logits in view.rounds:
        before, after = step.ids
        for i in np.flatnonzero((before != after) & (step.start + np.arange(len(after)) < codes.shape[1])):
            choice = int(logits[i].argmax())
            codes[0, step.start + i] = choice if choice < CODEBOOK_SIZES[0] else codes[0, step.start + i]
    for start, block, _, levels in view.spoken:
        for level, rounds in enumerate(levels, 1):
            chosen = np.stack([r.argmax(-1) for r in rounds])
            agreed = (chosen == block.codes[level]).any(0)
            codes[level, start : start + block.speech] = np.where(agreed, block.codes[level], chosen[-1])
    return codes


def judge_all(bench: Bench, requests: list[dict], max_frames: int) -> Evidence:
    """Every level, cheapest first. A part that cannot run at all fails its own level; levels that need it are not judged."""
    findings, errors, views = [], [], []
    for part in bench.manifest.parts:
        if part == CODEC_ENCODER:
            findings += guarded(PARTS, part, lambda: judge_encoder(bench))
        elif part != BODY:
            findings += guarded(PARTS, part, lambda part=part: judge_part(bench, part))
    findings += guarded(WEIGHTS, BODY, lambda: judge_body_weights(bench, errors))
    for part in (part for part in bench.manifest.parts if part in RESIDUAL_PARTS):
        findings += guarded(WEIGHTS, part, lambda part=part: judge_residual_weights(bench, part))
    look = lambda: views.extend(take_view(bench, case) for case in speak_cases(bench.speaker, requests, max_frames))
    findings += guarded(FORCED, BODY, look)
    if not views:
        return Evidence(findings, errors, views)
    looks: list[tuple[str, str, Callable]] = [
        (ROUNDED, BODY, lambda: judge_rounded(bench, views[0].case)),
        (GREEDY, "whole loop", lambda: judge_greedy(bench, views)),
        (PROBES, BODY, lambda: judge_both_ways(bench.speaker, views[0].case.text)),
        (PROBES, "text", lambda: judge_sensitivity(views, bench)),
        (PROBES, "codes", lambda: judge_diversity([view.case for view in views])),
        (WAVEFORM, "whole loop", lambda: judge_waveform(bench, views[0])),
    ]
    findings += judge_forced(bench, views)
    for level, part, look in looks:
        findings += guarded(level, part, look)
    return Evidence(findings, errors, views)


class Chooser:
    """Draws for `_ref` as the run side draws: it counts blocks, levels and rounds, which the reference does not tell."""

    def __init__(self, speech: OmniSpeech, rounds: int):
        self.dice, self.rounds = speech.settings.dice(), rounds
        self.block, self.step, self.residual = 0, 0, 0

    def semantic(self, logits: torch.Tensor) -> torch.Tensor:
        """ids [S] of the next round of a block; residual choices before it closed the one before."""
        if self.residual:
            self.block, self.step, self.residual = self.block + 1, 0, 0
        self.step += 1
        return torch.from_numpy(self.dice.choose(logits.numpy(), self.block, 0, self.step - 1))

    def codes(self, logits: torch.Tensor) -> torch.Tensor:
        """ids [S] of the next round of the next level."""
        level, step = divmod(self.residual, self.rounds)
        self.residual += 1
        return torch.from_numpy(self.dice.choose(logits.numpy(), self.block, level + 1, step))


def speak_original(bench: Bench, speeches: Sequence[OmniSpeech]) -> list[Spoken]:
    """The original's own speech for the same prompts and seeds; none if it is too large to be spoken here."""
    if not is_small(bench.checkpoint.weight_files()):
        return []
    codec = bench.checkpoint.codec(without=ENCODE_ONLY)
    return [_speak(bench, codec, speech) for speech in speeches]


@torch.no_grad()
def _speak(bench: Bench, codec, speech: OmniSpeech) -> Spoken:
    generation, settings = bench.manifest.generation, speech.settings
    recipe = Recipe(generation.block_size, generation.context_mode, settings.steps, settings.threshold, generation.residual_rounds)
    is_chain = not bench.checkpoint.is_axial
    chooser = Chooser(speech, generation.residual_rounds if is_chain else 1)
    reference = None if speech.reference is None else torch.from_numpy(speech.reference)
    blocks = -(-speech.max_frames // generation.block_size)
    made = bench.original.generate(speech.prompt_ids.tolist(), recipe, blocks, reference, chooser.semantic, chooser.codes)
    codes = made.codes[:, : speech.max_frames]
    samples = codec.decode(codes[None])[0, 0].numpy() if codes.shape[1] else np.zeros(0, np.float32)
    return Spoken(speech.text, samples, bench.manifest.codec.sample_rate)
