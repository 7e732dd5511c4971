"""The keys of config files that building reads, and what each must hold: checked before anything is computed from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from voxport.errors import UserError


@dataclass(frozen=True)
class Kind:
    """What a key must hold, in words and as a test. An optional key may be absent."""

    words: str
    fits: Callable[[Any], bool]
    optional: bool = False


def _is_whole(value: Any, largest: int) -> bool:
    return type(value) is int and 0 < value <= largest


def _is_real(value: Any, low: float = 0, high: float = 1e9) -> bool:
    return type(value) in (int, float) and low < value <= high


def _are(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and 0 < len(value) <= 64 and all(map(fits, value))


def optional(kind: Kind) -> Kind:
    return Kind(kind.words, kind.fits, True)


LARGEST_SIZE, LARGEST_VOCABULARY = 1 << 17, 1 << 24  # far beyond any checkpoint, far below what would fill a memory
SIZE = Kind(f"a whole number from 1 to {LARGEST_SIZE}", lambda v: _is_whole(v, LARGEST_SIZE))
COUNT = Kind(f"a whole number from 1 to {LARGEST_VOCABULARY}", lambda v: _is_whole(v, LARGEST_VOCABULARY))
LAYERS = Kind("a whole number from 1 to 1024", lambda v: _is_whole(v, 1024))
EPSILON = Kind("a number above 0 and below 1", lambda v: _is_real(v, 0, 1) and v < 1)
BASE = Kind("a number above 1", lambda v: _is_real(v, 1, 1e12))  # of rotary angles
FLAG = Kind("true or false", lambda v: isinstance(v, bool))
TEXT = Kind("text", lambda v: isinstance(v, str))
SIZES = Kind("a list of positive whole numbers", lambda v: _are(v, SIZE.fits))
FACTORS = Kind("a list of positive numbers", lambda v: _are(v, _is_real))
LAYER_LIST = Kind("a list of whole numbers", lambda v: _are(v, lambda n: type(n) is int and 0 <= n <= 1024))
ANY = Kind("anything", lambda v: True)
THETA = Kind("a number above 1, null or absent", lambda v: v is None or BASE.fits(v), optional=True)
NESTED_THETA = Kind("an object with rope_theta, null or absent", lambda v: v is None or isinstance(v, dict) and THETA.fits(v.get("rope_theta")),
                    optional=True)  # fmt: skip

BODY = {"hidden_size": SIZE, "intermediate_size": SIZE, "num_hidden_layers": LAYERS, "num_attention_heads": SIZE,
        "num_key_value_heads": SIZE, "head_dim": SIZE, "rms_norm_eps": EPSILON, "max_position_embeddings": COUNT,
        "rope_theta": THETA, "rope_parameters": NESTED_THETA}  # fmt: skip
HIGGS = {
    "text_config": BODY | {"model_type": TEXT, "vocab_size": COUNT},
    "audio_encoder_config": {"encoder_type": TEXT, "num_codebooks": LAYERS, "vocab_size": COUNT, "out_dim": optional(SIZE),
                             "tie_word_embeddings": optional(FLAG), "use_delay_pattern": optional(FLAG)},
}  # fmt: skip
HIGGS_CODEC = {
    "sample_rate": COUNT, "semantic_sample_rate": COUNT, "downsample_factor": SIZE, "codebook_size": SIZE, "codebook_dim": SIZE,
    "target_bandwidths": FACTORS, "kernel_size": SIZE, "unit_kernel_size": SIZE, "block_dilations": SIZES, "strides": SIZES,
    "channel_ratios": FACTORS,
    "acoustic_model_config": {"encoder_hidden_size": SIZE, "decoder_hidden_size": SIZE, "hidden_size": SIZE,
                              "downsampling_ratios": SIZES, "upsampling_ratios": SIZES},
    "semantic_model_config": {"hidden_size": SIZE, "num_hidden_layers": LAYERS, "num_attention_heads": SIZE, "intermediate_size": SIZE,
                              "conv_dim": SIZES, "conv_kernel": SIZES, "conv_stride": SIZES, "num_conv_pos_embeddings": SIZE,
                              "num_conv_pos_embedding_groups": SIZE, "layer_norm_eps": EPSILON, "feat_extract_norm": TEXT,
                              "do_stable_layer_norm": FLAG, "feat_proj_layer_norm": FLAG, "conv_bias": FLAG},
}  # fmt: skip
OMNIFISH = {"llm_config": BODY}
FISH_TRANSFORMER = {
    "causal": FLAG, "window_size": SIZE, "input_dim": SIZE,
    "config": {"n_layer": LAYERS, "n_head": SIZE, "dim": SIZE, "intermediate_size": SIZE, "n_local_heads": ANY, "head_dim": SIZE,
               "rope_base": BASE, "norm_eps": EPSILON},
}  # fmt: skip
FISH_CODEC = {
    "sample_rate": COUNT, "encoder_dim": SIZE, "encoder_rates": SIZES, "decoder_dim": SIZE, "decoder_rates": SIZES,
    "encoder_transformer_layers": LAYER_LIST,
    "transformer_general_config": {"n_local_heads": ANY, "head_dim": SIZE, "rope_base": BASE, "norm_eps": EPSILON},
    "quantizer": {"input_dim": SIZE, "n_codebooks": LAYERS, "codebook_size": SIZE, "codebook_dim": SIZE, "downsample_factor": SIZES,
                  "semantic_codebook_size": SIZE, "pre_module": FISH_TRANSFORMER, "post_module": FISH_TRANSFORMER},
}  # fmt: skip
OMNIFISH_SIDE = {
    "block_size": optional(LAYERS), "context_mode": optional(TEXT), "steps": optional(LAYERS),
    "generation": {
        "steps": optional(LAYERS), "mtp_rounds": optional(LAYERS),
        "threshold": Kind("a probability or null", lambda v: v is None or type(v) in (int, float) and 0 <= v <= 1, True),
        **dict.fromkeys(("temperature", "mtp_temperature"), Kind("a number from 0 to 100", lambda v: type(v) in (int, float) and 0 <= v <= 100, True)),
        **dict.fromkeys(("top_k", "mtp_top_k"), Kind("a whole number from 0 on", lambda v: v == 0 and type(v) is int or COUNT.fits(v), True)),
    },
    "prompt": {"ref_text_prefix": optional(FLAG), "denoise_token": optional(FLAG), "instruct_template": optional(TEXT)},
}  # fmt: skip
OPTIONAL_SECTIONS = ("generation", "prompt")


def check_keys(data: Mapping, keys: Mapping[str, Kind | Mapping], path: Path, within: str = "") -> None:
    """UserError naming the file and the first key that is missing or holds something else. Other keys are not looked at."""
    for key, kind in keys.items():
        name, absent = within + key, key not in data
        if isinstance(kind, Kind):
            if absent and not kind.optional:
                raise UserError(f"{path}: key {key!r} is missing{f' from {within[:-1]}' if within else ''}")
            if not absent and not kind.fits(data[key]):
                raise UserError(f"{path}: {name} is {data[key]!r:.60}, not {kind.words}")
        elif absent and key not in OPTIONAL_SECTIONS:
            raise UserError(f"{path}: key {key!r} is missing{f' from {within[:-1]}' if within else ''}")
        elif not absent:
            if not isinstance(data[key], dict):
                raise UserError(f"{path}: {name} is {data[key]!r:.60}, not an object")
            check_keys(data[key], kind, path, name + ".")
