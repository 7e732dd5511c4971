"""What the manifest of an OmniFish build says beyond the sections that every family has."""

from __future__ import annotations

import typing
from dataclasses import dataclass

from voxport.manifest import BuildManifest, Dims, FileRecord, KVCache, Licence, Part, Proof, Sampling, Source, Target

AXIAL, CHAIN = "axial", "chain"  # kinds of residual decoders
FULL, SEMANTIC = "full", "semantic"  # what later blocks see of a finished one: all codes, or the semantic ids only
GQA, EXPLICIT = "gqa", "explicit"  # how the body attends
BODY, TEXT_EMBED, AUDIO_EMBED, SEMANTIC_HEAD = "llm_decoder", "text_embed", "audio_embed", "semantic_head"
MTP_PRIME, MTP_STEP, MTP_LAYERS = "mtp_prime", "mtp_step", tuple(f"mtp_layer_{k}" for k in range(9))
CODEC_DECODER, CODEC_ENCODER = "codec_decoder", "codec_encoder"
LICENCE_FILE, CODEC_LICENCE_FILE = "LICENSE", "LICENSE.codec"


@dataclass(frozen=True)
class Codebooks:
    """Semantic codebook first, `sizes` real codes each. Every input table has `vocab_size` (V) rows: codes, then `mask_id` for
    an unknown code, `end_id` for the frame after the speech, and `pad_ids`, which follow it in a cycle to the block's end."""

    sizes: list[int]
    vocab_size: int
    mask_id: int
    end_id: int
    pad_ids: list[int]


@dataclass(frozen=True)
class FishCodec:
    """Waveform side: Hz, samples a frame, the most frames of one utterance, the shortest input of the encoder."""

    sample_rate: int
    hop_length: int
    max_frames: int
    min_encode_samples: int


@dataclass(frozen=True)
class Residual:
    """The decoder of the other nine codebooks: `kind` axial or chain, M wide, `num_layers` in it (chain: in each link)."""

    kind: str
    size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    prompt_cross: bool


@dataclass(frozen=True)
class Prompt:
    """How text becomes ids. `names` have the ids from the text vocabulary's end on, the first `num_speakers` of them speakers;
    `languages` are names that are one token. `instruct_template` has the fields {spk} and {q}."""

    names: list[str]
    num_speakers: int
    languages: list[str]
    ref_text_prefix: bool
    denoise_token: bool
    instruct_template: str


@dataclass(frozen=True)
class Generation:
    """How blocks are filled: B frames each, `steps` rounds (`residual_rounds` a link of the chain), more than planned where the
    confidence is above `threshold`. No weight tells any of it."""

    block_size: int
    context_mode: str
    steps: int
    threshold: float | None
    residual_rounds: int


@dataclass(frozen=True)
class Limits:
    """`max_frames` when the user gives none follow from the text: `cap_base_frames`, and so many more a character."""

    context_rows: int
    warn_reference_seconds: float
    max_reference_seconds: float
    cap_base_frames: int
    cap_frames_per_char: int
    cap_frames_per_wide_char: int
    cap_frames_per_tag: int
    max_rows: int


@dataclass(frozen=True)
class OmniFishManifest(BuildManifest):
    """Everything that running an OmniFish build needs. `attention` says how the body sees both ways: with the attribute
    `causal` of GroupQueryAttention ("gqa") or spelt out ("explicit"); `codec_path` is where the codec lay, as `source` says of the
    checkpoint."""

    schema_version: int
    family: str
    created: str
    target: Target
    source: Source
    licence: Licence
    codec_licence: Licence
    tools: dict[str, str]
    recipe: dict[str, typing.Any]
    dims: Dims
    codebooks: Codebooks
    codec: FishCodec
    residual: Residual
    prompt: Prompt
    control_tags: dict[str, int]
    structural_tokens: dict[str, int]
    generation: Generation
    sampling: Sampling
    residual_sampling: Sampling
    limits: Limits
    kv_cache: KVCache
    attention: str
    parts: dict[str, Part]
    files: dict[str, FileRecord]
    codec_path: str = ""
    proof: Proof | None = None

    def speaking_parts(self) -> tuple[str, ...]:
        """Those that every utterance takes."""
        residual = (MTP_STEP,) if self.residual.kind == AXIAL else MTP_LAYERS
        return (BODY, TEXT_EMBED, AUDIO_EMBED, SEMANTIC_HEAD, *residual, CODEC_DECODER)

    def own_flags(self) -> dict[str, typing.Any]:
        """Of optimize.py, with what was chosen by them; None where that is the default."""
        made = self.generation
        return {"--codec": self.codec_path or None, "--block-size": made.block_size, "--context-mode": made.context_mode,
                "--steps": made.steps, "--attention": None if self.attention == GQA else self.attention}  # fmt: skip
