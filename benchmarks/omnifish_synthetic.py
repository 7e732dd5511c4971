"""OmniFish checkpoints and Fish codecs in the published layout, their weights random: for sizes, memory and speed, not for sound."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import torch
from torch import Tensor

from _ref.fish_codec import FishCodec, FishConfig
from _ref.omnifish import MASK_ID, SEMANTIC_HEAD, AxialConfig, OmniFishConfig
from benchmarks.synthetic import random_tensor, write_safetensors
from voxport.build.omnifish_checkpoint import BUNDLED_CODEC_CONFIG

TINY = Path(__file__).parents[1] / "tests" / "golden_omnifish" / "axial_px"
NAMES = [f"pl_{i}" for i in range(64)] + [f"q{i}" for i in range(64)]
SIDE = {"block_size": 32, "context_mode": "full", "steps": 8, "ctx_frames": None}  # its own choice: no weight and nobody tells


def published(**changes) -> OmniFishConfig:
    """The published dims with the residual decoder that attends over frames and levels; fields given replace them."""
    return dataclasses.replace(
        OmniFishConfig(
            hidden_size=1024,
            intermediate_size=3072,
            num_layers=28,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            rms_norm_eps=1e-6,
            rope_theta=1e6,
            max_position_embeddings=40960,
            text_vocab_size=151676,
            num_speakers=64,
            num_recordings=64,
            table_sizes=(256, 64, 64),
            residual=AxialConfig(size=768, num_layers=6, ffn=2688, num_kv_heads=2, prompt_cross=False),
        ),
        **changes,
    )


def middle_size() -> OmniFishConfig:
    """An eighth of the published weights, a build of a minute."""
    residual = AxialConfig(size=384, num_layers=4, ffn=1344, num_kv_heads=2, prompt_cross=False)
    return published(hidden_size=512, intermediate_size=1536, num_layers=12, num_heads=8, num_kv_heads=4, head_dim=64,
                     text_vocab_size=1024, residual=residual)  # fmt: skip


def write_checkpoint(folder: Path, config: OmniFishConfig, **side) -> Path:
    """Write config, side file, names, tokenizer (the tiny one: its ids fit any vocabulary) and weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TINY / name, folder / name)
    for name, value in (("config", config_json(config)), ("omnifish", SIDE | side), ("id_vocab", NAMES)):
        (folder / f"{name}.json").write_text(json.dumps(value, indent=1), encoding="utf-8")
    write_safetensors(folder / "model.safetensors", config.shapes(), never_ending)
    return folder


def config_json(config: OmniFishConfig) -> dict:
    """config.json as an OmniVoice folder has it."""
    published = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    names = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads",
             "vocab_size": "text_vocab_size"}  # fmt: skip
    same = ("hidden_size", "intermediate_size", "head_dim", "rms_norm_eps", "max_position_embeddings")
    body = published["llm_config"] | {name: getattr(config, field) for name, field in names.items()}
    body |= {name: getattr(config, name) for name in same}
    return published | {"llm_config": body | {"rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"}}}


def never_ending(name: str, shape: tuple[int, ...]) -> Tensor:
    """Random weights; END and PAD are never the likeliest, so that speech goes on as long as a benchmark asks."""
    made = random_tensor(name, shape, seed=0)
    if name == SEMANTIC_HEAD:
        made[MASK_ID:] = 0
    return made


def write_codec(folder: Path, config_file: Path = BUNDLED_CODEC_CONFIG) -> Path:
    """Write a codec with its weight norm folded, and its config."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(config_file, folder / "codec_config.json")
    with torch.device("meta"):
        state = FishCodec(FishConfig.from_file(config_file), max_frames=1).state_dict()
    write_safetensors(folder / "codec.safetensors", {name: tuple(t.shape) for name, t in state.items()}, codec_tensor)
    return folder


def codec_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """Random weights; scales of layers around one, so that no part of the sound vanishes."""
    if name.endswith("gamma"):
        return torch.full(shape, 0.3)
    if len(shape) == 1 and name.endswith("norm.weight"):
        return torch.ones(shape)
    return random_tensor(name, shape, seed=0)
