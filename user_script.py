"""Every part but the decoder in PyTorch, as Olive loads it.

For each part P: `get_P_model(model_path)`, `get_P_io_config(model)` and `get_P_dummy_inputs(model)`, where `model_path` is a
checkpoint folder and `model` Olive's handler. The arithmetic is `_ref`'s; the classes here only name inputs and outputs.

If the environment variable VOXPORT_CODEC_FROM names a checkpoint folder, it lends its codec to one that bundles none.
"""

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import remove_parametrizations

from _ref.higgs import AUDIO_EMBEDDING, AUDIO_HEAD, TEXT_EMBEDDING
from _ref.higgs_codec import HiggsCodec, load_codec
from voxport.build.checkpoint import Checkpoint

CODEC_FROM = "VOXPORT_CODEC_FROM"
DUMMY_FRAMES = 30  # any length serves: shapes stay symbolic, and tests run others


class TextEmbed(nn.Module):
    """input_ids [B, S] int64 -> inputs_embeds [B, S, D]."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.weight)


class AudioEmbed(nn.Module):
    """codes [B, L, N] int64, BOC and EOC included -> inputs_embeds [B, L, D]: the sum of N lookups, added in float32."""

    def __init__(self, weight: Tensor, num_codebooks: int):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("offsets", torch.arange(num_codebooks) * (weight.shape[0] // num_codebooks))

    def forward(self, codes: Tensor) -> Tensor:
        return F.embedding(codes + self.offsets, self.weight).float().sum(-2).to(self.weight.dtype)


class AudioHeads(nn.Module):
    """hidden_states [B, L, D] after the final norm -> logits [B, L, N, V]."""

    def __init__(self, weight: Tensor, num_codebooks: int):
        super().__init__()
        self.transposed = nn.Parameter(weight.t().contiguous(), requires_grad=False)
        self.sizes = (num_codebooks, weight.shape[0] // num_codebooks)

    def forward(self, hidden_states: Tensor) -> Tensor:
        batch, rows, _ = hidden_states.shape
        return (hidden_states @ self.transposed).view(batch, rows, *self.sizes)


class AudioTokenizer(nn.Module):
    """codes [1, N, T] int64 in [0, codebook_size) -> waveform [1, 1, hop * T] float32."""

    def __init__(self, codec: HiggsCodec):
        super().__init__()
        self.codec = codec

    def forward(self, codes: Tensor) -> Tensor:
        return self.codec.decode(codes)


class AudioEncoder(nn.Module):
    """waveform [1, 1, S] float32, S >= 119 -> codes [1, N, T] int64."""

    def __init__(self, codec: HiggsCodec):
        super().__init__()
        self.codec = codec

    def forward(self, waveform: Tensor) -> Tensor:
        return self.codec.encode(waveform).view(1, self.codec.config.num_codebooks, -1)


def _open(model_path: str) -> Checkpoint:
    codec_from = os.environ.get(CODEC_FROM)
    return Checkpoint.open(Path(model_path), Path(codec_from) if codec_from else None)


def _codec(model_path: str) -> HiggsCodec:
    checkpoint = _open(model_path)
    codec = load_codec(checkpoint.codec_config, checkpoint.codec_tensors())
    remove_parametrizations(codec.semantic_model.encoder.pos_conv_embed.conv, "weight")
    return codec


def _io(inputs: dict[str, dict[int, str]], outputs: dict[str, dict[int, str]]) -> dict:
    return {"input_names": list(inputs), "output_names": list(outputs), "dynamic_axes": inputs | outputs}


def get_text_embed_model(model_path: str) -> nn.Module:
    return TextEmbed(_open(model_path)[TEXT_EMBEDDING]).eval()


def get_text_embed_io_config(model) -> dict:
    axes = {0: "batch", 1: "sequence"}
    return _io({"input_ids": axes}, {"inputs_embeds": axes})


def get_text_embed_dummy_inputs(model) -> dict[str, Tensor]:
    return {"input_ids": torch.zeros(1, 4, dtype=torch.int64)}


def get_audio_embed_model(model_path: str) -> nn.Module:
    checkpoint = _open(model_path)
    return AudioEmbed(checkpoint[AUDIO_EMBEDDING], checkpoint.config.num_codebooks).eval()


def get_audio_embed_io_config(model) -> dict:
    axes = {0: "batch", 1: "rows"}
    return _io({"codes": axes}, {"inputs_embeds": axes})


def get_audio_embed_dummy_inputs(model) -> dict[str, Tensor]:
    return {"codes": torch.zeros(1, 4, _open(model.model_path).config.num_codebooks, dtype=torch.int64)}


def get_audio_heads_model(model_path: str) -> nn.Module:
    checkpoint = _open(model_path)
    name = AUDIO_EMBEDDING if checkpoint.config.tied_audio_head else AUDIO_HEAD
    return AudioHeads(checkpoint[name], checkpoint.config.num_codebooks).eval()


def get_audio_heads_io_config(model) -> dict:
    axes = {0: "batch", 1: "rows"}
    return _io({"hidden_states": axes}, {"logits": axes})


def get_audio_heads_dummy_inputs(model) -> dict[str, Tensor]:
    return {"hidden_states": torch.zeros(1, 4, _open(model.model_path).config.hidden_size)}


def get_audio_tokenizer_model(model_path: str) -> nn.Module:
    return AudioTokenizer(_codec(model_path)).eval()


def get_audio_tokenizer_io_config(model) -> dict:
    return _io({"codes": {2: "frames"}}, {"waveform": {2: "samples"}})


def get_audio_tokenizer_dummy_inputs(model) -> dict[str, Tensor]:
    return {"codes": torch.zeros(1, _open(model.model_path).config.num_codebooks, DUMMY_FRAMES, dtype=torch.int64)}


def get_audio_encoder_model(model_path: str) -> nn.Module:
    return AudioEncoder(_codec(model_path)).eval()


def get_audio_encoder_io_config(model) -> dict:
    return _io({"waveform": {2: "samples"}}, {"codes": {2: "frames"}})


def get_audio_encoder_dummy_inputs(model) -> dict[str, Tensor]:
    return {"waveform": torch.zeros(1, 1, DUMMY_FRAMES * _open(model.model_path).codec_config.hop_length)}
