"""A checkpoint in the exact published layout with random weights: for sizes, memory and speed, never for sound.

The language model has the published dims unless told otherwise, the codec always has. Tensors are made and written one at a time, seeded by
their names, so that two runs give the same bytes. As in the published file, two tied duplicates are stored that the index does not list.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from _ref.higgs import AUDIO_EMBEDDING, AUDIO_HEAD, CODEC_PREFIX, TEXT_EMBEDDING, TEXT_HEAD, HiggsConfig
from _ref.higgs_codec import CodecConfig
from voxport.build.checkpoint import BUNDLED_CODEC_CONFIG, INDEX, SINGLE, expected_shapes

TINY = Path(__file__).parents[1] / "tests" / "golden" / "higgs" / "ckpt_tiny"
DUPLICATES = {TEXT_HEAD: TEXT_EMBEDDING, AUDIO_HEAD: AUDIO_EMBEDDING}
MASKED = CODEC_PREFIX + "semantic_model.masked_spec_embed"
PUBLISHED_TEXT = {
    "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_window_layers": 36,
}  # fmt: skip


def published_config(layers: int | None = None, **changes: int) -> dict:
    """config.json with the published dims, or with some of them changed."""
    config = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    text = config["text_config"] | PUBLISHED_TEXT | changes
    text["num_hidden_layers"] = layers or text["num_hidden_layers"]
    text["layer_types"] = ["full_attention"] * text["num_hidden_layers"]
    config["text_config"] = text
    config["audio_encoder_config"]["out_dim"] = text["hidden_size"]
    return config | {"_hidden_size": text["hidden_size"], "_vocab_size": text["vocab_size"]}


def write_checkpoint(folder: Path, config: Mapping, seed: int = 0) -> Path:
    """Write config, tokenizer, one safetensors file and its index. The tokenizer is the tiny one: its ids fit any vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TINY / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    shapes = expected_shapes(HiggsConfig.from_dict(config), CodecConfig.from_file(BUNDLED_CODEC_CONFIG))
    shapes[MASKED] = (CodecConfig.from_file(BUNDLED_CODEC_CONFIG).semantic_size,)
    listed = sorted(shapes)
    shapes |= {copy: shapes[original] for copy, original in DUPLICATES.items()}
    write_safetensors(folder / SINGLE, shapes, lambda name, shape: random_tensor(DUPLICATES.get(name, name), shape, seed))
    index = {"metadata": {"total_size": sum(2 * math.prod(shapes[n]) for n in listed)}, "weight_map": dict.fromkeys(listed, SINGLE)}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return folder


def write_safetensors(path: Path, shapes: Mapping[str, tuple[int, ...]], make: Callable[[str, tuple[int, ...]], Tensor]) -> None:
    """Write bf16 tensors one at a time: 8 bytes of header length, a JSON header, then the data in header order."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            file.write(make(name, shape).bfloat16().contiguous().view(torch.uint8).numpy().data)


def random_tensor(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Weights that keep activations near one: fan-in scaled matrices, norms of one, small biases, Snake alphas around one."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    noise = torch.randn(shape, generator=generator, dtype=torch.float32)
    if name.endswith(("norm.weight", "inited", "cluster_size")):
        return torch.ones(shape)
    if name.endswith("alpha"):
        return 1.0 + 0.2 * noise
    if name.endswith("bias"):
        return 0.01 * noise
    if "embedding" in name or len(shape) == 1:
        return 0.02 * noise
    fan_in = shape[0] * shape[2] / 2 if "conv_t1" in name else math.prod(shape[1:])
    return noise / math.sqrt(fan_in) if "embed" not in name else noise
