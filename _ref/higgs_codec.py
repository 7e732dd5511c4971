"""The codec inside a Higgs Audio v3 checkpoint (Higgs Audio v2 tokenizer): waveform <-> codes, in plain PyTorch.

Module and buffer names are those of the checkpoint, so `state_dict()` is its key set. Two branches make the codes: DAC's
convolutions on the 24 kHz waveform (*acoustic*) and HuBERT's hidden states on the 16 kHz waveform (*semantic*). Their
concatenation is quantised by N residual codebooks; only the acoustic decoder turns it back into a waveform.

`encode` differs from the published model in one way: the half-frame padding that it decides by a Python branch is computed
here from the length, so that an exported graph takes the right branch at every length.

Shapes: B batch, S samples, T frames, N codebooks, C channels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

RESIDUAL_DILATIONS = (1, 3, 9)
RESIDUAL_KERNEL = 7
SNAKE_EPSILON = 1e-9
FILTER_WIDTH, ROLLOFF = 6, 0.99  # torchaudio.functional.resample's defaults
SEMANTIC_PADDING = 160  # samples of silence on both sides at 16 kHz, half of HuBERT's 320-sample step

# Saved by the published model although no module holds it (time masking is a training matter).
IGNORED_KEYS = frozenset({"semantic_model.masked_spec_embed"})


@dataclass(frozen=True)
class CodecConfig:
    """The fields of the codec's config.json that change the arithmetic. Rates in Hz, hop in samples a frame."""

    sample_rate: int
    semantic_sample_rate: int
    downsample_factor: int
    codebook_size: int
    codebook_dim: int
    kilobits: float
    kernel_size: int
    unit_kernel_size: int
    block_dilations: tuple[int, ...]
    block_strides: tuple[int, ...]
    channel_ratios: tuple[float, ...]
    encoder_width: int
    decoder_width: int
    acoustic_size: int
    down_strides: tuple[int, ...]
    up_strides: tuple[int, ...]
    semantic_size: int
    semantic_layers: int
    semantic_heads: int
    semantic_ffn: int
    conv_dims: tuple[int, ...]
    conv_kernels: tuple[int, ...]
    conv_strides: tuple[int, ...]
    pos_kernel: int
    pos_groups: int
    norm_eps: float

    @classmethod
    def from_dict(cls, config: Mapping) -> CodecConfig:
        """Read the published layout of config.json. KeyError names an absent key, ValueError an unsupported value."""
        dac, hubert = config["acoustic_model_config"], config["semantic_model_config"]
        fixed = {"feat_extract_norm": "group", "do_stable_layer_norm": False, "feat_proj_layer_norm": True, "conv_bias": False}
        for key, value in fixed.items():
            if hubert[key] != value:
                raise ValueError(f"semantic_model_config.{key} is {hubert[key]!r}; only {value!r} is supported")
        made = cls(
            sample_rate=config["sample_rate"],
            semantic_sample_rate=config["semantic_sample_rate"],
            downsample_factor=config["downsample_factor"],
            codebook_size=config["codebook_size"],
            codebook_dim=config["codebook_dim"],
            kilobits=config["target_bandwidths"][-1],
            kernel_size=config["kernel_size"],
            unit_kernel_size=config["unit_kernel_size"],
            block_dilations=tuple(config["block_dilations"]),
            block_strides=tuple(config["strides"]),
            channel_ratios=tuple(config["channel_ratios"]),
            encoder_width=dac["encoder_hidden_size"],
            decoder_width=dac["decoder_hidden_size"],
            acoustic_size=dac["hidden_size"],
            down_strides=tuple(dac["downsampling_ratios"]),
            up_strides=tuple(dac["upsampling_ratios"]),
            semantic_size=hubert["hidden_size"],
            semantic_layers=hubert["num_hidden_layers"],
            semantic_heads=hubert["num_attention_heads"],
            semantic_ffn=hubert["intermediate_size"],
            conv_dims=tuple(hubert["conv_dim"]),
            conv_kernels=tuple(hubert["conv_kernel"]),
            conv_strides=tuple(hubert["conv_stride"]),
            pos_kernel=hubert["num_conv_pos_embeddings"],
            pos_groups=hubert["num_conv_pos_embedding_groups"],
            norm_eps=hubert["layer_norm_eps"],
        )
        if math.prod(made.up_strides) != made.hop_length:
            raise ValueError(f"upsampling_ratios {made.up_strides} and downsampling_ratios {made.down_strides} disagree")
        return made

    @classmethod
    def from_file(cls, path: Path) -> CodecConfig:
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))

    @property
    def hop_length(self) -> int:
        return math.prod(self.down_strides)

    @property
    def num_codebooks(self) -> int:
        """Codebooks that the bandwidth pays for: bits a second / (frames a second * bits a code)."""
        frame_rate = math.ceil(self.sample_rate / self.hop_length)
        bits = math.ceil(math.log2(self.codebook_size))
        return int(1000 * self.kilobits // (frame_rate * bits))

    @property
    def hidden_size(self) -> int:
        return self.acoustic_size + self.semantic_size

    @property
    def semantic_step(self) -> int:
        """Every how-many-th HuBERT frame is kept: its 320-sample steps at 16 kHz against one frame at 24 kHz."""
        return int(self.hop_length / (self.sample_rate / self.semantic_sample_rate) / self.downsample_factor)


def resample_kernel(orig: int, new: int) -> tuple[Tensor, int]:
    """Windowed-sinc kernel [new, 1, taps] for `orig` -> `new` (coprime) and its half width in samples.

    Closed form of torchaudio.functional.resample with its defaults (sinc_interp_hann), computed in float64.
    """
    base = min(orig, new) * ROLLOFF
    width = math.ceil(FILTER_WIDTH * orig / base)
    taps = torch.arange(-width, width + orig, dtype=torch.float64) / orig
    phases = torch.arange(0, -new, -1, dtype=torch.float64) / new
    t = ((phases[:, None] + taps[None, :]) * base).clamp(-FILTER_WIDTH, FILTER_WIDTH)
    window = torch.cos(t * math.pi / FILTER_WIDTH / 2) ** 2
    return (torch.sinc(t) * window * (base / orig)).float()[:, None], width


def resample(x: Tensor, orig: int, new: int) -> Tensor:
    """Resample [B, S] float32 from `orig` to `new` Hz; the result has ceil(new * S / orig) samples."""
    common = math.gcd(orig, new)
    orig, new = orig // common, new // common
    if orig == new:
        return x
    kernel, width = resample_kernel(orig, new)
    length = x.shape[-1]
    phases = F.conv1d(F.pad(x, (width, width + orig))[:, None], kernel, stride=orig)  # [B, new, S']
    wanted = (new * length + orig - 1) // orig
    return phases.transpose(1, 2).reshape(x.shape[0], -1)[:, :wanted]


class Snake(nn.Module):
    """x + sin(alpha x)^2 / alpha, one alpha a channel (arXiv:2006.08195)."""

    def __init__(self, channels: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.alpha + SNAKE_EPSILON).reciprocal() * torch.sin(self.alpha * x).pow(2)


class ResidualUnit(nn.Module):
    """Two Snake + convolution pairs around a skip; the length [B, C, S] is kept."""

    def __init__(self, channels: int, dilation: int):
        super().__init__()
        padding = (RESIDUAL_KERNEL - 1) * dilation // 2
        self.snake1 = Snake(channels)
        self.conv1 = nn.Conv1d(channels, channels, RESIDUAL_KERNEL, dilation=dilation, padding=padding)
        self.snake2 = Snake(channels)
        self.conv2 = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.snake2(self.conv1(self.snake1(x))))


class EncoderBlock(nn.Module):
    """[B, C, S] -> [B, 2C, S / stride]."""

    def __init__(self, channels: int, stride: int):
        super().__init__()
        self.res_unit1, self.res_unit2, self.res_unit3 = (ResidualUnit(channels, d) for d in RESIDUAL_DILATIONS)
        self.snake1 = Snake(channels)
        self.conv1 = nn.Conv1d(channels, 2 * channels, 2 * stride, stride=stride, padding=math.ceil(stride / 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv1(self.snake1(self.res_unit3(self.res_unit2(self.res_unit1(x)))))


class DecoderBlock(nn.Module):
    """[B, C, S] -> [B, C / 2, S * stride]; output padding makes odd strides exact, which plain DAC does not have."""

    def __init__(self, channels: int, stride: int):
        super().__init__()
        half = channels // 2
        self.snake1 = Snake(channels)
        self.conv_t1 = nn.ConvTranspose1d(
            channels, half, 2 * stride, stride=stride, padding=math.ceil(stride / 2), output_padding=stride % 2
        )
        self.res_unit1, self.res_unit2, self.res_unit3 = (ResidualUnit(half, d) for d in RESIDUAL_DILATIONS)

    def forward(self, x: Tensor) -> Tensor:
        return self.res_unit3(self.res_unit2(self.res_unit1(self.conv_t1(self.snake1(x)))))


class AcousticEncoder(nn.Module):
    """DAC encoder: [B, 1, S] -> [B, acoustic_size, A(S)], see `acoustic_frames`."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        self.conv1 = nn.Conv1d(1, config.encoder_width, 7, padding=3)
        widths = [config.encoder_width << i for i in range(len(config.down_strides))]
        self.block = nn.ModuleList(EncoderBlock(c, s) for c, s in zip(widths, config.down_strides))
        self.snake1 = Snake(2 * widths[-1])
        self.conv2 = nn.Conv1d(2 * widths[-1], config.acoustic_size, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        for block in self.block:
            x = block(x)
        return self.conv2(self.snake1(x))


class AcousticDecoder(nn.Module):
    """DAC decoder without its final tanh: [B, acoustic_size, T] -> [B, 1, hop * T]."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        self.conv1 = nn.Conv1d(config.acoustic_size, config.decoder_width, 7, padding=3)
        widths = [config.decoder_width >> i for i in range(len(config.up_strides))]
        self.block = nn.ModuleList(DecoderBlock(c, s) for c, s in zip(widths, config.up_strides))
        self.snake1 = Snake(widths[-1] // 2)
        self.conv2 = nn.Conv1d(widths[-1] // 2, 1, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        for block in self.block:
            x = block(x)
        return self.conv2(self.snake1(x))


class WaveConv(nn.Module):
    """One convolution of HuBERT's waveform front end; only the first has a norm, over the whole clip per channel."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, normalised: bool):
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, stride=stride, bias=False)
        self.layer_norm = nn.GroupNorm(outputs, outputs) if normalised else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.layer_norm(self.conv(x)))


class WaveEncoder(nn.Module):
    """HuBERT's front end: [B, samples] at 16 kHz -> [B, conv_dim, frames of 320 samples]."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        inputs = (1, *config.conv_dims[:-1])
        sizes = zip(inputs, config.conv_dims, config.conv_kernels, config.conv_strides)
        self.conv_layers = nn.ModuleList(WaveConv(*size, normalised=i == 0) for i, size in enumerate(sizes))

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        for conv in self.conv_layers:
            x = conv(x)
        return x


class FeatureProjection(nn.Module):
    """LayerNorm, then conv_dim -> semantic_size."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        self.layer_norm = nn.LayerNorm(config.conv_dims[-1], eps=config.norm_eps)
        self.projection = nn.Linear(config.conv_dims[-1], config.semantic_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(self.layer_norm(x))


class PositionalConv(nn.Module):
    """Convolutional position embedding [B, T, C]; the even kernel yields one frame too many, the last is dropped."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        size, kernel = config.semantic_size, config.pos_kernel
        conv = nn.Conv1d(size, size, kernel, padding=kernel // 2, groups=config.pos_groups)
        self.conv = weight_norm(conv, dim=2)
        self.surplus = 1 - kernel % 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.transpose(1, 2))
        return F.gelu(y[..., : y.shape[-1] - self.surplus]).transpose(1, 2)


class Attention(nn.Module):
    """Full multi-head self-attention with biases, [B, T, C]."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        size = config.semantic_size
        self.heads = config.semantic_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(size, size) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: CodecConfig):
        super().__init__()
        self.intermediate_dense = nn.Linear(config.semantic_size, config.semantic_ffn)
        self.output_dense = nn.Linear(config.semantic_ffn, config.semantic_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.output_dense(F.gelu(self.intermediate_dense(x)))


class SemanticLayer(nn.Module):
    """One post-norm transformer layer of HuBERT."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        self.attention = Attention(config)
        self.layer_norm = nn.LayerNorm(config.semantic_size, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.final_layer_norm = nn.LayerNorm(config.semantic_size, eps=config.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer_norm(x + self.attention(x))
        return self.final_layer_norm(x + self.feed_forward(x))


class SemanticTransformer(nn.Module):
    def __init__(self, config: CodecConfig):
        super().__init__()
        self.pos_conv_embed = PositionalConv(config)
        self.layer_norm = nn.LayerNorm(config.semantic_size, eps=config.norm_eps)
        self.layers = nn.ModuleList(SemanticLayer(config) for _ in range(config.semantic_layers))

    def forward(self, x: Tensor) -> Tensor:
        """Mean over the input of the first layer and the output of every layer, [B, T, C]."""
        x = self.layer_norm(x + self.pos_conv_embed(x))
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return torch.stack(states, dim=1).mean(dim=1)


class SemanticModel(nn.Module):
    """HuBERT: [B, samples] at 16 kHz -> [B, T', semantic_size]."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        self.feature_extractor = WaveEncoder(config)
        self.feature_projection = FeatureProjection(config)
        self.encoder = SemanticTransformer(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(self.feature_projection(self.feature_extractor(x).transpose(1, 2)))


class SemanticUnit(nn.Module):
    def __init__(self, channels: int, config: CodecConfig, dilation: int):
        super().__init__()
        kernel = config.unit_kernel_size
        padding = (kernel - 1) // 2 * dilation
        self.conv1 = nn.Conv1d(channels, channels, kernel, padding=padding, dilation=dilation, bias=False)
        self.conv2 = nn.Conv1d(channels, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.elu(self.conv1(F.elu(x))))


class SemanticBlock(nn.Module):
    """Residual units and a convolution; encoders have the units first (`units_first`), decoders last."""

    def __init__(self, inputs: int, outputs: int, config: CodecConfig, units_first: bool):
        super().__init__()
        self.units_first = units_first
        width = inputs if units_first else outputs
        self.res_units = nn.ModuleList(SemanticUnit(width, config, d) for d in config.block_dilations)
        self.conv = nn.Conv1d(inputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.units_first else self.conv(x)
        for unit in self.res_units:
            x = unit(x)
        return self.conv(x) if self.units_first else x


def _semantic_widths(config: CodecConfig) -> list[int]:
    if set(config.block_strides) != {1}:
        raise ValueError(f"strides {config.block_strides}: only stride 1 is supported in the semantic encoder")
    return [int(config.semantic_size * ratio) for ratio in config.channel_ratios]


class SemanticEncoder(nn.Module):
    """Convolutions over HuBERT's states, [B, C, T] -> [B, C, T]."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        size, kernel, widths = config.semantic_size, config.kernel_size, _semantic_widths(config)
        self.conv = nn.Conv1d(size, size, kernel, padding=kernel // 2, bias=False)
        inputs = [size, *widths[:-1]]
        self.conv_blocks = nn.ModuleList(SemanticBlock(i, o, config, True) for i, o in zip(inputs, widths))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        for block in self.conv_blocks:
            x = block(x)
        return x


class SemanticDecoder(nn.Module):
    """A training head that the checkpoint carries; it is here so that the key set is exact, and never runs."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        size, kernel, widths = config.semantic_size, config.kernel_size, _semantic_widths(config)
        self.conv1 = nn.Conv1d(size, widths[0], kernel, padding=kernel // 2, bias=False)
        outputs = [*widths[1:], size]
        self.conv_blocks = nn.ModuleList(SemanticBlock(i, o, config, False) for i, o in zip(widths, outputs))
        self.conv2 = nn.Conv1d(size, size, kernel, padding=kernel // 2, bias=False)


class Codebook(nn.Module):
    """`codebook_size` entries; the other buffers are training leftovers of the checkpoint."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        self.register_buffer("inited", torch.zeros(1))
        self.register_buffer("cluster_size", torch.zeros(config.codebook_size))
        self.register_buffer("embed", torch.zeros(config.codebook_size, config.codebook_dim))
        self.register_buffer("embed_avg", torch.zeros(config.codebook_size, config.codebook_dim))

    def nearest(self, z: Tensor) -> Tensor:
        """Index of the nearest entry by squared distance, the first on ties: [B, T, dim] -> [B, T] int64."""
        entries = self.embed.t()
        distance = z.pow(2).sum(-1, keepdim=True) - 2 * z @ entries + entries.pow(2).sum(0, keepdim=True)
        return torch.argmax(-distance, dim=-1)


class VectorQuantizer(nn.Module):
    def __init__(self, config: CodecConfig):
        super().__init__()
        self.codebook = Codebook(config)
        self.project_in = nn.Linear(config.hidden_size, config.codebook_dim)
        self.project_out = nn.Linear(config.codebook_dim, config.hidden_size)

    def encode(self, x: Tensor) -> Tensor:
        return self.codebook.nearest(self.project_in(x))

    def decode(self, codes: Tensor) -> Tensor:
        return self.project_out(F.embedding(codes, self.codebook.embed))


class ResidualQuantizer(nn.Module):
    """N quantisers, each coding what the ones before left over (SoundStream, arXiv:2107.03312, algorithm 1)."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        self.quantizers = nn.ModuleList(VectorQuantizer(config) for _ in range(config.num_codebooks))

    def encode(self, x: Tensor) -> Tensor:
        """[B, T, hidden] -> codes [B, N, T] int64."""
        codes = []
        for quantizer in self.quantizers:
            codes.append(quantizer.encode(x))
            x = x - quantizer.decode(codes[-1])
        return torch.stack(codes, dim=1)

    def decode(self, codes: Tensor) -> Tensor:
        """codes [B, N, T] int64 -> [B, T, hidden]."""
        return sum(quantizer.decode(codes[:, i]) for i, quantizer in enumerate(self.quantizers))


class HiggsCodec(nn.Module):
    """Waveform <-> codes. Build with `load_codec`; always in eval mode and float32."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        self.config = config
        self.acoustic_encoder = AcousticEncoder(config)
        self.acoustic_decoder = AcousticDecoder(config)
        self.encoder_semantic = SemanticEncoder(config)
        self.decoder_semantic = SemanticDecoder(config)
        self.semantic_model = SemanticModel(config)
        self.fc = nn.Linear(config.hidden_size, config.hidden_size)
        self.fc1 = nn.Linear(config.hidden_size, config.semantic_size)  # feeds decoder_semantic: never runs
        self.fc2 = nn.Linear(config.hidden_size, config.acoustic_size)
        self.quantizer = ResidualQuantizer(config)

    def semantic_features(self, waveform: Tensor) -> Tensor:
        """waveform [B, 1, S] -> [B, semantic_size, T]."""
        config = self.config
        x = resample(waveform[:, 0], config.sample_rate, config.semantic_sample_rate)
        states = self.semantic_model(F.pad(x, (SEMANTIC_PADDING, SEMANTIC_PADDING)))
        return self.encoder_semantic(states[:, :: config.semantic_step].transpose(1, 2))

    def embed(self, waveform: Tensor) -> Tensor:
        """waveform [B, 1, S] -> what the codebooks quantise, [B, T, hidden]."""
        semantic = self.semantic_features(waveform)
        padding = acoustic_padding(self.config, waveform.shape[-1])
        acoustic = self.acoustic_encoder(F.pad(waveform, (padding, padding)))
        return self.fc(torch.cat([acoustic, semantic], dim=1).transpose(1, 2))

    def encode(self, waveform: Tensor) -> Tensor:
        """waveform [B, 1, S] float32 at `sample_rate`, S >= 119 -> codes [B, N, T] int64."""
        return self.quantizer.encode(self.embed(waveform))

    def decode(self, codes: Tensor) -> Tensor:
        """codes [B, N, T] int64 in [0, codebook_size) -> waveform [B, 1, hop * T] float32; peaks may exceed 1."""
        return self.acoustic_decoder(self.fc2(self.quantizer.decode(codes)).transpose(1, 2))


def acoustic_frames(config: CodecConfig, samples: int) -> int:
    """Frames that the acoustic encoder makes of `samples`: an even stride gives x // s, an odd one (x + 1) // s."""
    for stride in config.down_strides:
        samples = (samples + stride % 2) // stride
    return samples


def semantic_frames(config: CodecConfig, samples: int) -> int:
    """Frames that the semantic branch makes of `samples` at `sample_rate`."""
    common = math.gcd(config.sample_rate, config.semantic_sample_rate)
    orig, new = config.sample_rate // common, config.semantic_sample_rate // common
    frames = (new * samples + orig - 1) // orig + 2 * SEMANTIC_PADDING
    for kernel, stride in zip(config.conv_kernels, config.conv_strides):
        frames = (frames - kernel) // stride + 1
    return (frames + config.semantic_step - 1) // config.semantic_step


def acoustic_padding(config: CodecConfig, samples: int) -> int:
    """Zeros to add on both sides of the acoustic input: half a frame where its frames would be one too few, else 0.

    The published encode pads when the two counts differ; they differ by at most one. Plain integer arithmetic, so that
    `samples` may be a traced shape.
    """
    return config.hop_length // 2 * (semantic_frames(config, samples) - acoustic_frames(config, samples))


def missing_and_unexpected(config: CodecConfig, names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Codec tensors that `names` lacks, and names that are none (but for IGNORED_KEYS); both sorted."""
    with torch.device("meta"):
        expected = set(HiggsCodec(config).state_dict())
    found = set(names)
    return sorted(expected - found), sorted(found - expected - IGNORED_KEYS)


def load_codec(config: CodecConfig, tensors: Mapping[str, Tensor]) -> HiggsCodec:
    """Codec in float32 from tensors under their names without prefix. ValueError on any missing or unexpected name."""
    missing, unexpected = missing_and_unexpected(config, tensors)
    if missing or unexpected:
        raise ValueError(f"codec tensors: missing {missing[:3]}, unexpected {unexpected[:3]}")
    with torch.device("meta"):
        codec = HiggsCodec(config)
    state = {name: tensors[name].float() for name in codec.state_dict()}
    codec.load_state_dict(state, assign=True)
    return codec.eval().requires_grad_(False)


def encode_reference(codec: HiggsCodec, samples: Tensor, rate: int) -> Tensor:
    """Mono [S] float32 at `rate` Hz -> codes [T, N]: resampled, zero-padded to one second, encoded."""
    x = resample(samples[None].float(), rate, codec.config.sample_rate)
    x = F.pad(x, (0, max(0, codec.config.sample_rate - x.shape[-1])))
    return codec.encode(x[:, None])[0].t()
