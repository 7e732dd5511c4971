"""Is a finished OmniFish graph the part that it claims to be? Run at several lengths, none of them that of its export, and
compared with `_ref`. Empty pasts are among the cases: every utterance without a reference begins with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor

from _ref import omnifish as ref
from _ref.fish_codec import FishCodec
from _ref.omnifish import NUM_CODEBOOKS, OmniFish
from voxport.build.check import (
    DECODER_COSINE,
    ROUNDED,
    TOLERANCE,
    PartSession,
    cosine,
    decoder_states,
    relative_error,
    with_accuracy_level,
)
from voxport.build.omnifish_checkpoint import DECODE_ONLY, ENCODE_ONLY, OmniFishCheckpoint
from voxport.build.omnifish_parts import with_rounded_weights
from voxport.build.quantise import BlockFormat
from voxport.errors import WorkError
from voxport.manifest_omnifish import (
    AUDIO_EMBED,
    CODEC_DECODER,
    CODEC_ENCODER,
    MTP_LAYERS,
    MTP_PRIME,
    MTP_STEP,
    SEMANTIC_HEAD,
    TEXT_EMBED,
)
from voxport.run.omnifish_blocks import LEAST_REACH

RESIDUALS = NUM_CODEBOOKS - 1
SEED = 0
LENGTHS = (1, 7)
# As built an int4 decoder rounds its activations too, which sharp random weights amplify without limit: it must only not be
# noise. A copy of it without that rounding is held to fp16's bound.
AS_BUILT_COSINE = 0.5

Feeds, Answers = dict[str, Tensor], list[Tensor]
Case = tuple[Feeds, Answers]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def states(*shape: int) -> Tensor:
    return torch.randn(shape, generator=seeded())


def random_codes(frames: int) -> Tensor:
    """codes [N, frames] of real speech frames, those of each codebook drawn apart: tables that changed places must show."""
    generator = seeded()
    return torch.stack([torch.randint(size, (frames,), generator=generator) for size in ref.CODEBOOK_SIZES])


def text_cases(checkpoint: OmniFishCheckpoint) -> Iterator[Case]:
    """Every branch: text, a language, another id where a language stands, and each end of both tables of names."""
    rows, first = checkpoint.config.text_vocab_size, checkpoint.lang_start
    ends = (0, checkpoint.config.num_speakers - 1, len(checkpoint.names) - 1)
    names = [rows + i for i in ends if 0 <= i < len(checkpoint.names)]
    for ids in ([0], [5, first, next(iter(checkpoint.languages), 0), 6, first, rows - 1, *names, 7]):
        ids = torch.tensor(ids)
        model = OmniFish(checkpoint.config, checkpoint, first, checkpoint.languages)
        yield {"input_ids": ids[None]}, [model.embed_text(ids)[None]]


def audio_cases(checkpoint: OmniFishCheckpoint) -> Iterator[Case]:
    for frames in LENGTHS:
        for codes in (random_codes(frames), ref.semantic_only(torch.arange(ref.VOCAB - frames, ref.VOCAB))):
            yield {"codes": codes[None]}, [ref.audio_embed(checkpoint[ref.AUDIO_EMBEDDING], codes)[None]]


def head_cases(checkpoint: OmniFishCheckpoint) -> Iterator[Case]:
    for length in LENGTHS:
        hidden = states(1, length, checkpoint.config.hidden_size)
        yield {"hidden_states": hidden}, [hidden @ checkpoint[ref.SEMANTIC_HEAD].float().t()]


def residual_weights(checkpoint: OmniFishCheckpoint) -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in ref.scoped(checkpoint, ref.RESIDUAL_PREFIX).items()}


def prime_cases(checkpoint: OmniFishCheckpoint) -> Iterator[Case]:
    config, w = checkpoint.config.residual, residual_weights(checkpoint)
    for frames in LENGTHS:
        h, codes = states(frames, checkpoint.config.hidden_size), random_codes(frames)
        past = ref.axial_prime(config, w, h, codes)
        kept = [torch.stack([layer.frames[i][:RESIDUALS] for layer in past]) for i in range(2)]
        if config.prompt_cross:
            kept += [torch.stack([layer.prompt[i] for layer in past]) for i in range(2)]
        yield {"h": h[None], "codes": codes[None]}, kept


def step_cases(checkpoint: OmniFishCheckpoint) -> Iterator[Case]:
    """Every level: the first in a block without frames or a prompt before it, the others behind some of both."""
    config, w = checkpoint.config.residual, residual_weights(checkpoint)
    layers, heads, d = config.num_layers, config.num_kv_heads, config.head_dim
    for length, level, before, prompt in ((7, 0, 0, 0), *((1 + level % 4, level, 5, 3 * (level % 2)) for level in range(1, RESIDUALS))):
        h, code = states(length, checkpoint.config.hidden_size), random_codes(length)[level]
        positions = torch.arange(before, before + length)
        kept = {f"lvl_{x}": states(layers, length, heads, level, d) for x in "kv"}
        kept |= {f"frm_{x}": states(layers, heads, before, d) for x in "kv"}
        if config.prompt_cross:
            kept |= {f"px_{x}": states(layers, heads, NUM_CODEBOOKS * prompt, d) for x in "kv"}
        lvl, frm, px = ((kept.get(f"{name}_k"), kept.get(f"{name}_v")) for name in ("lvl", "frm", "px"))
        prompts = [(px[0][n], px[1][n]) if config.prompt_cross else None for n in range(layers)]
        pairs = [((lvl[0][n], lvl[1][n]), (frm[0][n][None], frm[1][n][None])) for n in range(layers)]
        past = [ref.AxialPast(*pair, prompt) for pair, prompt in zip(pairs, prompts)]
        grid, past = ref.axial_run(config, w, h, code[None], torch.tensor([level]), positions, past)
        logits = torch.stack([grid[:, 0] @ w[f"heads.{j}.weight"].t() for j in range(RESIDUALS)], dim=1)
        levels = [torch.stack([layer.levels[i] for layer in past]) for i in range(2)]
        frames = [torch.stack([layer.frames[i][0, :, before:] for layer in past]) for i in range(2)]
        feeds = {"h": h[None], "code": code[None], "level": torch.tensor(level), "position": positions[None]}
        yield feeds | kept, [logits[None], *levels, *frames]


def link_cases(checkpoint: OmniFishCheckpoint, k: int) -> Iterator[Case]:
    config, w = checkpoint.config.residual, ref.scoped(residual_weights(checkpoint), f"layers.{k}.")
    shape = (config.num_layers, config.num_kv_heads)
    for length, before in ((7, 0), (1, 5)):
        h, codes = states(length, config.size if k else checkpoint.config.hidden_size), random_codes(length)
        revealed = codes[k + 1].clone()
        revealed[::2] = ref.CODEBOOK_SIZES[k + 1]
        positions, past = torch.arange(before, before + length), [states(*shape, before, config.head_dim) for _ in "kv"]
        pairs = [(past[0][n], past[1][n]) for n in range(config.num_layers)]
        state, logits, kept = ref.chain_link(config, w, h, codes[k], revealed, positions, pairs)
        new = [torch.stack([kv[i][:, before:] for kv in kept]) for i in range(2)]
        feeds = {"h": h[None], "code": codes[k][None], "revealed": revealed[None], "position": positions[None]}
        yield feeds | {"past_k": past[0], "past_v": past[1]}, [state[None], logits[None], *new]


def decode_cases(checkpoint: OmniFishCheckpoint) -> Iterator[Case]:
    """Whole utterances of several lengths, and one in two chunks."""
    codec = checkpoint.codec(without=ENCODE_ONLY)
    for chunks in ((1,), (2,), (12,), (5, 7)):
        codes, carry = random_codes(sum(chunks))[None], codec.first_carry()
        for part in codes.split(chunks, dim=-1):
            feeds = {"codes": part, "position": torch.tensor(carry.position)}
            feeds |= {f"tail_{i}": tail for i, tail in enumerate(carry.tensors)}
            waveform = codec.decode(part, carry)
            yield feeds, [waveform, *carry.kept]
            carry = carry.after(part.shape[-1])


def part_cases(name: str, checkpoint: OmniFishCheckpoint) -> Iterator[Case]:
    """Feeds of a part and what it must answer, in graph order."""
    if name in MTP_LAYERS:
        return link_cases(checkpoint, MTP_LAYERS.index(name))
    return CASES[name](checkpoint)


CASES: dict[str, Callable[[OmniFishCheckpoint], Iterator[Case]]] = {
    TEXT_EMBED: text_cases,
    AUDIO_EMBED: audio_cases,
    SEMANTIC_HEAD: head_cases,
    MTP_PRIME: prime_cases,
    MTP_STEP: step_cases,
    CODEC_DECODER: decode_cases,
}


@torch.no_grad()
def check_part(name: str, graph: Path, checkpoint: OmniFishCheckpoint, precision: str = "fp32") -> PartSession:
    """Compare a part with `_ref`. Returns its session; WorkError if it computes something else."""
    session = PartSession(graph)
    if name == CODEC_ENCODER:
        check_encoder(session, checkpoint.codec(without=DECODE_ONLY))
        return session
    for feeds, expected in part_cases(name, checkpoint):
        for output, found, wanted in zip(session.session.get_outputs(), session.run(**feeds), expected, strict=True):
            compare(f"{name}: {output.name}", found, wanted.numpy(), TOLERANCE[precision])
    return session


@torch.no_grad()
def check_rounded(name: str, graph: Path, plain: Path, form: BlockFormat, checkpoint: OmniFishCheckpoint) -> PartSession:
    """Compare an int4 part, its activations unrounded, with its float32 form `plain` on the weights that it holds."""
    exact = PartSession(graph, with_accuracy_level(graph, 0))
    wide = PartSession(plain, with_rounded_weights(plain, form))
    for feeds, _ in part_cases(name, checkpoint):
        for output, found, wanted in zip(wide.session.get_outputs(), exact.run(**feeds), wide.run(**feeds), strict=True):
            compare(f"{name}: {output.name}", found, wanted, TOLERANCE["fp16"])
    return PartSession(graph)


def compare(what: str, found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    """WorkError unless shape and values are as expected, relative to their size."""
    if found.shape != expected.shape:
        raise WorkError(f"{what} has shape {found.shape}, {expected.shape} was expected")
    if not np.isfinite(found).all():
        raise WorkError(f"{what} has values that are not finite")
    if found.size and relative_error(found, expected) > tolerance:
        raise WorkError(f"{what} is off by {relative_error(found, expected):.2e} of its size, {tolerance:.0e} is allowed")


def check_encoder(session: PartSession, codec: FishCodec) -> None:
    """Whole frames, one sample more, and half a frame."""
    hop = codec.config.hop_length
    for samples in (2 * hop, 4 * hop + 1, hop // 2):
        waveform = 0.1 * torch.randn(1, 1, samples, generator=seeded())
        flips = unexplained_flips(codec, waveform, torch.from_numpy(session.run(waveform=waveform)[0]))
        if flips:
            raise WorkError(f"{CODEC_ENCODER}: {flips} frames of a {samples}-sample clip get other codes")


def unexplained_flips(codec: FishCodec, waveform: Tensor, found: Tensor, gap: float = 1e-4) -> int:
    """Frames whose codes [1, N, T] differ although the reference's choice, by cosine, was no near tie at the first difference."""
    latent, frames = codec.embed(waveform), math.ceil(waveform.shape[-1] / codec.config.hop_length)
    excused = torch.zeros(frames, dtype=torch.bool)
    if found.shape != (1, NUM_CODEBOOKS, len(excused)):
        return max(found.shape[-1], len(excused))
    wrong = torch.zeros_like(excused)
    for i, book in enumerate(codec.quantizer.books):
        expected = book.encode(latent)
        z = torch.nn.functional.normalize(book.in_proj(latent).transpose(1, 2), dim=-1)
        near = lambda codes, z=z, book=book: (z * torch.nn.functional.normalize(book.codebook(codes), dim=-1)).sum(-1)[0]
        differs = (found[:, i] != expected)[0] & ~excused
        excused |= differs & ((near(expected) - near(found[:, i])).abs() <= gap)
        wrong |= differs & ~excused
        latent = latent - book.decode(expected)
    return int(wrong.sum())


@torch.no_grad()
def check_body(graph: Path, precision: str, model: OmniFish) -> PartSession:
    """Compare the decoder with `model`, which holds the rounded weights at int4. Returns the session of the graph as built."""
    if precision in ROUNDED:
        compare_body(PartSession(graph, with_accuracy_level(graph, 0)), DECODER_COSINE["fp16"], model)
    session = PartSession(graph)
    check_sees_ahead(session, model)
    compare_body(session, AS_BUILT_COSINE if precision in ROUNDED else DECODER_COSINE[precision], model)
    return session


def body_embeds(model: OmniFish, length: int = 8) -> Tensor:
    return states(length, model.config.hidden_size) * model.tensors[ref.AUDIO_EMBEDDING].float().std()


def compare_body(session: PartSession, bound: float, model: OmniFish) -> None:
    """Eight positions in one pass, and five and three that follow them; each pass sees all of itself."""
    embeds, split = body_embeds(model), 5
    whole, _ = model.hidden_states(embeds)
    first, past = model.hidden_states(embeds[:split])
    second, _ = model.hidden_states(embeds[split:], past)
    for what, cut, expected in (("one pass", None, whole), ("with a cache", split, torch.cat([first, second]))):
        found = decoder_states(session, model.config, embeds.numpy(), split=cut)
        if not np.isfinite(found).all() or not found.any():
            raise WorkError(f"llm_decoder: hidden states ({what}) are zero or not finite")
        worst = float(cosine(found, expected.numpy()).min())
        if worst < bound:
            raise WorkError(f"llm_decoder: hidden states ({what}) have cosine {worst:.5f} with the reference, {bound} is needed")


def check_sees_ahead(session: PartSession, model: OmniFish) -> None:
    """WorkError if the last position does not reach the first state: a causal decoder makes noise of this model."""
    embeds = body_embeds(model).numpy()
    changed = np.concatenate([embeds[:-1], -embeds[-1:]])
    first, other = (decoder_states(session, model.config, x)[0] for x in (embeds, changed))
    if np.abs(first - other).max() <= LEAST_REACH * np.abs(first).max():
        raise WorkError("llm_decoder: the attention is causal and this model's is not; is ONNX Runtime 1.30 or newer installed?")


def set_bidirectional(graph: Path) -> None:
    """Let every GroupQueryAttention see both ways. WorkError if there is none."""
    model = onnx.load(graph, load_external_data=False)
    nodes = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]
    if not nodes:
        raise WorkError("llm_decoder: no GroupQueryAttention in the graph; this ModelBuilder version is unknown")
    for node in nodes:
        kept = [attribute for attribute in node.attribute if attribute.name != "causal"]
        del node.attribute[:]
        node.attribute.extend([*kept, onnx.helper.make_attribute("causal", 0)])
    onnx.save(model, graph)
