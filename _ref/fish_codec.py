"""The Fish S2 codec: 44.1 kHz waveform <-> codes, in plain PyTorch.

Everything is causal. A DAC encoder makes one state every 512 samples; two strided convolutions and a windowed transformer
(`pre_module`) turn four of them into one frame. Ten codebooks quantise it: the *semantic* one first, then nine on what it
left over. `post_module`, two upsamplings and a DAC decoder turn frames back into samples.

Module names are those of the checkpoint, with weight norm folded (`fold_weight_norm`), so `state_dict()` is its key set. No
branch depends on a length, so any length gives the right result, in a traced graph too. As everything is causal, `decode` can
also go chunk by chunk with a `Carry`: the joined chunks are the whole.

Shapes: B batch, S samples, T frames, N codebooks, C channels, H heads, P frames carried over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _ref.higgs_codec import Snake
from _ref.qwen3 import rms_norm, rope_table

RESIDUAL_DILATIONS = (1, 3, 9)
RESIDUAL_KERNEL = 7
CONVNEXT_KERNEL, CONVNEXT_GROWTH, CONVNEXT_EPSILON = 7, 4, 1e-6
ENCODER_WINDOW = 512  # states that the encoder's transformer sees; no field of the config
ENCODER_GROWTH = 3  # its feed-forward width over its width; no field either
MAX_FRAMES = 8192  # rows of the rotary tables: 6 minutes of audio

# The two ways in which a weight-normed kernel is saved: magnitude, direction.
WEIGHT_NORM_NAMES = (("parametrizations.weight.original0", "parametrizations.weight.original1"), ("weight_g", "weight_v"))

# Buffers that some releases saved; they are recomputed here.
IGNORED_SUFFIXES = ("freqs_cis", "causal_mask")


@dataclass(frozen=True)
class TransformerConfig:
    """A causal transformer in which a position sees itself and the `window` - 1 before it."""

    num_layers: int
    num_heads: int
    head_dim: int
    size: int
    ffn: int
    window: int
    rope_theta: float
    norm_eps: float

    @classmethod
    def from_dict(cls, module: Mapping) -> TransformerConfig:
        """Read `pre_module` or `post_module`."""
        config = module["config"]
        _demand(module, "causal", True)
        _demand(config, "n_local_heads", -1)  # -1: as many key heads as query heads
        if module["input_dim"] != config["dim"]:
            raise NotImplementedError(f"input_dim {module['input_dim']} and dim {config['dim']} differ")
        return cls(
            num_layers=config["n_layer"],
            num_heads=config["n_head"],
            head_dim=config["head_dim"],
            size=config["dim"],
            ffn=config["intermediate_size"],
            window=module["window_size"],
            rope_theta=config["rope_base"],
            norm_eps=config["norm_eps"],
        )

    @classmethod
    def of_encoder(cls, general: Mapping, size: int, num_layers: int) -> TransformerConfig:
        """The transformer that ends an encoder block of `size` channels."""
        _demand(general, "n_local_heads", -1)
        return cls(
            num_layers=num_layers,
            num_heads=size // general["head_dim"],
            head_dim=general["head_dim"],
            size=size,
            ffn=ENCODER_GROWTH * size,
            window=ENCODER_WINDOW,
            rope_theta=general["rope_base"],
            norm_eps=general["norm_eps"],
        )


def _demand(config: Mapping, key: str, value) -> None:
    if config[key] != value:
        raise NotImplementedError(f"{key} is {config[key]!r}; only {value!r} is supported")


@dataclass(frozen=True)
class FishConfig:
    """The fields of the codec's config that change the arithmetic. Rate in Hz, hop in samples a frame."""

    sample_rate: int
    encoder_width: int
    encoder_rates: tuple[int, ...]
    encoder_transformers: tuple[TransformerConfig | None, ...]
    decoder_width: int
    decoder_rates: tuple[int, ...]
    downsample_factors: tuple[int, ...]
    latent_size: int
    codebook_dim: int
    semantic_codebook_size: int
    residual_codebook_size: int
    num_residuals: int
    pre_module: TransformerConfig
    post_module: TransformerConfig

    @classmethod
    def from_dict(cls, config: Mapping) -> FishConfig:
        """Read the published fields. KeyError names an absent one; ValueError and NotImplementedError a wrong value.

        `decoder_transformer_layers` is not read: the published decoder declares transformers and never runs them.
        """
        quantizer, general = config["quantizer"], config["transformer_general_config"]
        rates = tuple(config["encoder_rates"])
        widths = [config["encoder_dim"] << (i + 1) for i in range(len(rates))]
        layers = config["encoder_transformer_layers"]
        if len(layers) != len(rates):
            raise ValueError(f"encoder_transformer_layers has {len(layers)} entries, encoder_rates {len(rates)}")
        made = cls(
            sample_rate=config["sample_rate"],
            encoder_width=config["encoder_dim"],
            encoder_rates=rates,
            encoder_transformers=tuple(
                TransformerConfig.of_encoder(general, width, n) if n else None for width, n in zip(widths, layers, strict=True)
            ),
            decoder_width=config["decoder_dim"],
            decoder_rates=tuple(config["decoder_rates"]),
            downsample_factors=tuple(quantizer["downsample_factor"]),
            latent_size=quantizer["input_dim"],
            codebook_dim=quantizer["codebook_dim"],
            semantic_codebook_size=quantizer["semantic_codebook_size"],
            residual_codebook_size=quantizer["codebook_size"],
            num_residuals=quantizer["n_codebooks"],
            pre_module=TransformerConfig.from_dict(quantizer["pre_module"]),
            post_module=TransformerConfig.from_dict(quantizer["post_module"]),
        )
        made.check()
        return made

    @classmethod
    def from_file(cls, path: Path) -> FishConfig:
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))

    def check(self) -> None:
        if math.prod(self.decoder_rates) != math.prod(self.encoder_rates):
            raise ValueError(f"decoder_rates {self.decoder_rates} and encoder_rates {self.encoder_rates} disagree")
        if not self.encoder_out == self.latent_size == self.pre_module.size == self.post_module.size:
            raise ValueError(f"the encoder makes {self.encoder_out} channels, the quantizer reads {self.latent_size}")

    @property
    def encoder_out(self) -> int:
        return self.encoder_width << len(self.encoder_rates)

    @property
    def hop_length(self) -> int:
        return math.prod(self.encoder_rates) * math.prod(self.downsample_factors)

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        """[N] ids a codebook, semantic first."""
        return (self.semantic_codebook_size, *[self.residual_codebook_size] * self.num_residuals)


class Carry:
    """What causal layers must still know of earlier chunks: one tensor a layer, in the order in which the layers run.

    Without tensors it is frame 0, where convolutions see zeros and attention nothing. Layers take from `tensors` and put what
    the next chunk needs into `kept`.
    """

    def __init__(self, tensors: Sequence[Tensor] | None = None, position: int | Tensor = 0):
        self.tensors, self.position = tensors, position
        self.kept: list[Tensor] = []

    def after(self, frames: int) -> Carry:
        """The carry of the chunk that follows one of `frames`."""
        return Carry(self.kept, self.position + frames)

    def join(self, new: Tensor, dim: int) -> Tensor:
        """What the layer that runs now kept, and `new` behind it."""
        return torch.cat([self.tensors[len(self.kept)], new], dim=dim)

    def extend(self, x: Tensor, history: int) -> Tensor:
        """x [B, C, S] behind the `history` positions before it (zeros at the start): [B, C, history + S]."""
        if not history:
            return x
        x = F.pad(x, (history, 0)) if self.tensors is None else self.join(x, -1)
        self.kept.append(x[..., -history:])
        return x

    def extend_keys(self, kv: Tensor, history: int) -> Tensor:
        """kv [2, B, H, T, head_dim] behind at most `history` rows before it: [2, B, H, P + T, head_dim]."""
        kv = kv if self.tensors is None else self.join(kv, -2)
        self.kept.append(kv[..., -history:, :] if history else kv[..., :0, :])
        return kv


class CausalConv(nn.Module):
    """Convolution that sees only the past: [B, C, S] -> [B, C', S / stride], for S a multiple of the stride."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, dilation: int = 1, groups: int = 1):
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, stride=stride, dilation=dilation, groups=groups)
        self.history = (kernel - 1) * dilation + 1 - stride

    def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
        return self.conv(F.pad(x, (self.history, 0)) if carry is None else carry.extend(x, self.history))


class CausalTransposedConv(nn.Module):
    """[B, C, S] -> [B, C', S * stride]: what reaches past the last input's own samples is cut off (or is for the next chunk)."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int):
        super().__init__()
        self.conv = nn.ConvTranspose1d(inputs, outputs, kernel, stride=stride)
        self.stride = stride
        self.history = math.ceil(kernel / stride) - 1

    def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
        length, skip = x.shape[-1] * self.stride, 0
        if carry is not None:
            x, skip = carry.extend(x, self.history), self.history * self.stride
        return self.conv(x)[..., skip : skip + length]


class Stack(nn.Sequential):
    """Layers one after the other; those that remember are given the carry."""

    def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
        for layer in self:
            x = layer(x) if isinstance(layer, Snake | nn.Tanh) else layer(x, carry)
        return x


class ResidualUnit(nn.Module):
    """Two Snake + convolution pairs around a skip; the length [B, C, S] is kept."""

    def __init__(self, channels: int, dilation: int):
        super().__init__()
        self.block = Stack(
            Snake(channels), CausalConv(channels, channels, RESIDUAL_KERNEL, dilation=dilation),
            Snake(channels), CausalConv(channels, channels, 1),
        )  # fmt: skip

    def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
        return x + self.block(x, carry)


class EncoderBlock(nn.Module):
    """[B, C, S] -> [B, 2C, S / stride]."""

    def __init__(self, channels: int, stride: int, transformer: TransformerConfig | None, rows: int):
        super().__init__()
        self.block = Stack(
            *(ResidualUnit(channels, dilation) for dilation in RESIDUAL_DILATIONS),
            Snake(channels),
            CausalConv(channels, 2 * channels, 2 * stride, stride=stride),
            *([Transformer(transformer, rows)] if transformer else []),
        )

    def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
        return self.block(x, carry)


class DecoderBlock(nn.Module):
    """[B, C, S] -> [B, C / 2, S * stride]."""

    def __init__(self, channels: int, stride: int):
        super().__init__()
        self.block = Stack(
            Snake(channels),
            CausalTransposedConv(channels, channels // 2, 2 * stride, stride),
            *(ResidualUnit(channels // 2, dilation) for dilation in RESIDUAL_DILATIONS),
        )

    def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
        return self.block(x, carry)


class Encoder(nn.Module):
    """DAC encoder: [B, 1, S] -> [B, latent_size, S / prod(encoder_rates)]."""

    def __init__(self, config: FishConfig, rows: int):
        super().__init__()
        widths = [config.encoder_width << i for i in range(len(config.encoder_rates))]
        blocks = zip(widths, config.encoder_rates, config.encoder_transformers)
        self.block = Stack(
            CausalConv(1, config.encoder_width, 7),
            *(EncoderBlock(*block, rows) for block in blocks),
            Snake(config.encoder_out),
            CausalConv(config.encoder_out, config.latent_size, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class Decoder(nn.Module):
    """DAC decoder: [B, latent_size, S] -> [B, 1, S * prod(decoder_rates)] in [-1, 1]."""

    def __init__(self, config: FishConfig):
        super().__init__()
        widths = [config.decoder_width >> i for i in range(len(config.decoder_rates))]
        last = widths[-1] // 2
        self.model = Stack(
            CausalConv(config.latent_size, config.decoder_width, 7),
            *(DecoderBlock(width, stride) for width, stride in zip(widths, config.decoder_rates)),
            Snake(last),
            CausalConv(last, 1, 7),
            nn.Tanh(),
        )

    def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
        return self.model(x, carry)


class ConvNeXt(nn.Module):
    """Depthwise convolution and a two-layer network a position, around a skip (arXiv:2201.03545): [B, C, T] -> same."""

    def __init__(self, channels: int):
        super().__init__()
        self.dwconv = CausalConv(channels, channels, CONVNEXT_KERNEL, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=CONVNEXT_EPSILON)
        self.pwconv1 = nn.Linear(channels, CONVNEXT_GROWTH * channels)
        self.pwconv2 = nn.Linear(CONVNEXT_GROWTH * channels, channels)
        self.gamma = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
        y = self.norm(self.dwconv(x, carry).transpose(1, 2))
        y = self.gamma * self.pwconv2(F.gelu(self.pwconv1(y)))
        return x + y.transpose(1, 2)


class Norm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Scale(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [..., T, head_dim] with neighbours paired; cos and sin [T, head_dim / 2]."""
    a, b = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)


def window_mask(new: int, total: int, window: int, device: torch.device) -> Tensor:
    """[new, total] true where one of the last `new` positions sees one of `total`: itself and the `window` - 1 before it."""
    distance = torch.arange(total - new, total, device=device)[:, None] - torch.arange(total, device=device)
    return (distance >= 0) & (distance < window)


class Attention(nn.Module):
    """Windowed causal attention, [B, T, C] -> same."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        inner = config.num_heads * config.head_dim
        self.wqkv = nn.Linear(config.size, 3 * inner, bias=False)
        self.wo = nn.Linear(inner, config.size, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], carry: Carry | None) -> Tensor:
        config = self.config
        qkv = self.wqkv(x).view(*x.shape[:-1], 3, config.num_heads, config.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q, kv = rotate_pairs(q, *rope), torch.stack([rotate_pairs(k, *rope), v])
        k, v = (kv if carry is None else carry.extend_keys(kv, config.window - 1)).unbind(0)
        visible = window_mask(x.shape[1], k.shape[-2], config.window, x.device)
        scores = q @ k.transpose(-1, -2) / math.sqrt(config.head_dim)
        mixed = scores.masked_fill(~visible, -math.inf).softmax(-1) @ v
        return self.wo(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.w1 = nn.Linear(config.size, config.ffn, bias=False)
        self.w2 = nn.Linear(config.ffn, config.size, bias=False)
        self.w3 = nn.Linear(config.size, config.ffn, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerLayer(nn.Module):
    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.attention_norm, self.ffn_norm = (Norm(config.size, config.norm_eps) for _ in range(2))
        self.attention_layer_scale, self.ffn_layer_scale = Scale(config.size), Scale(config.size)
        self.attention, self.feed_forward = Attention(config), FeedForward(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], carry: Carry | None) -> Tensor:
        x = x + self.attention_layer_scale(self.attention(self.attention_norm(x), rope, carry))
        return x + self.ffn_layer_scale(self.feed_forward(self.ffn_norm(x)))


class Transformer(nn.Module):
    """[B, C, T] -> same. Rotary tables of `rows` positions, rounded to bf16 values as in the published codec."""

    def __init__(self, config: TransformerConfig, rows: int):
        super().__init__()
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.num_layers))
        self.norm = Norm(config.size, config.norm_eps)
        with torch.device("cpu"):  # real numbers even where the module is built without storage
            cos, sin = rope_table(config, torch.arange(rows), bf16=True)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
        positions = torch.arange(x.shape[-1], device=x.device) + (0 if carry is None else carry.position)
        rope = self.cos[positions], self.sin[positions]
        x = x.transpose(1, 2)
        for layer in self.layers:
            x = layer(x, rope, carry)
        return self.norm(x).transpose(1, 2)


class VectorQuantizer(nn.Module):
    """One codebook [size, dim]: nearest by cosine, looked up as it is."""

    def __init__(self, config: FishConfig, size: int):
        super().__init__()
        self.in_proj = nn.Conv1d(config.latent_size, config.codebook_dim, 1)
        self.out_proj = nn.Conv1d(config.codebook_dim, config.latent_size, 1)
        self.codebook = nn.Embedding(size, config.codebook_dim)

    def encode(self, x: Tensor) -> Tensor:
        """[B, latent, T] -> codes [B, T] int64, the first on ties."""
        z = F.normalize(self.in_proj(x).transpose(1, 2), dim=-1)
        return (z @ F.normalize(self.codebook.weight, dim=-1).t()).argmax(-1)

    def decode(self, codes: Tensor) -> Tensor:
        """codes [B, T] int64 -> [B, latent, T]. Ids past the codebook mean its last row."""
        rows = self.codebook(codes.clamp(0, self.codebook.num_embeddings - 1))
        return self.out_proj(rows.transpose(1, 2))


class Quantizers(nn.Module):
    """A list of quantizers under the checkpoint's name for it."""

    def __init__(self, config: FishConfig, size: int, count: int):
        super().__init__()
        self.quantizers = nn.ModuleList(VectorQuantizer(config, size) for _ in range(count))


class ResidualQuantizer(nn.Module):
    """Encoder states <-> codes: four times fewer frames, a transformer on either side of ten codebooks."""

    def __init__(self, config: FishConfig, rows: int):
        super().__init__()
        size, factors = config.latent_size, config.downsample_factors
        self.semantic_quantizer = Quantizers(config, config.semantic_codebook_size, 1)
        self.quantizer = Quantizers(config, config.residual_codebook_size, config.num_residuals)
        self.downsample = Stack(*(Stack(CausalConv(size, size, f, stride=f), ConvNeXt(size)) for f in factors))
        self.upsample = Stack(*(Stack(CausalTransposedConv(size, size, f, f), ConvNeXt(size)) for f in reversed(factors)))
        self.pre_module = Transformer(config.pre_module, rows)
        self.post_module = Transformer(config.post_module, rows)

    @property
    def books(self) -> list[VectorQuantizer]:
        return [*self.semantic_quantizer.quantizers, *self.quantizer.quantizers]

    def quantise(self, latent: Tensor) -> Tensor:
        """[B, latent, T] -> codes [B, N, T]: each codebook codes what the ones before left over."""
        codes = []
        for book in self.books:
            codes.append(book.encode(latent))
            latent = latent - book.decode(codes[-1])
        return torch.stack(codes, dim=1)

    def decode(self, codes: Tensor, carry: Carry | None = None) -> Tensor:
        """codes [B, N, T] -> [B, latent, T * prod(downsample_factors)]."""
        latent = sum(book.decode(codes[:, i]) for i, book in enumerate(self.books))
        return self.upsample(self.post_module(latent, carry), carry)


class FishCodec(nn.Module):
    """Waveform <-> codes. Build with `load_codec`; always in eval mode and float32."""

    def __init__(self, config: FishConfig, max_frames: int = MAX_FRAMES):
        super().__init__()
        self.config, self.max_frames = config, max_frames
        self.encoder = Encoder(config, max_frames * math.prod(config.downsample_factors))
        self.quantizer = ResidualQuantizer(config, max_frames)
        self.decoder = Decoder(config)

    def embed(self, waveform: Tensor) -> Tensor:
        """waveform [B, 1, S], zero-padded to whole frames -> what the codebooks quantise, [B, latent, T]."""
        hop = self.config.hop_length
        padding = (hop - waveform.shape[-1] % hop) % hop
        self.check_length((waveform.shape[-1] + padding) // hop)
        states = self.encoder(F.pad(waveform, (0, padding)))
        return self.quantizer.pre_module(self.quantizer.downsample(states))

    def encode(self, waveform: Tensor) -> Tensor:
        """waveform [B, 1, S] float32 at `sample_rate` -> codes [B, N, ceil(S / hop)] int64."""
        return self.quantizer.quantise(self.embed(waveform))

    def decode(self, codes: Tensor, carry: Carry | None = None) -> Tensor:
        """codes [B, N, T] int64 -> waveform [B, 1, hop * T] float32 in [-1, 1].

        With a carry these are the frames that follow it; `carry.after(T)` is then the next one.
        """
        self.check_length(codes.shape[-1] + (0 if carry is None else carry.position))
        return self.decoder(self.quantizer.decode(codes, carry), carry)

    def check_length(self, frames: int) -> None:
        if frames > self.max_frames:
            raise ValueError(f"{frames} frames; this codec was loaded for at most {self.max_frames} (`max_frames`)")

    def first_carry(self, batch: int = 1) -> Carry:
        """The carry of frame 0 with its tensors spelt out: zeros for convolutions, no rows for attention."""
        carry = Carry()
        self.decode(torch.zeros(batch, len(self.config.codebook_sizes), 1, dtype=torch.int64), carry)
        return Carry([tensor[..., :0, :] if tensor.ndim == 5 else torch.zeros_like(tensor) for tensor in carry.kept])

    def decode_chunks(self, codes: Tensor, chunk: int) -> Iterator[Tensor]:
        """Waveforms [B, 1, hop * chunk] of codes [B, N, T]; joined they equal `decode(codes)`."""
        carry = self.first_carry(len(codes))
        for part in codes.split(chunk, dim=-1):
            yield self.decode(part, carry)
            carry = carry.after(part.shape[-1])


def plain_names(state: Mapping) -> Mapping[str, Tensor]:
    """A released file's tensors under their own names: out of `state_dict`, without the prefix `generator.`."""
    state = state.get("state_dict", state)
    return {name.removeprefix("generator."): tensor for name, tensor in state.items()}


def fold_weight_norm(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace each pair (g, v) by weight = g v / |v| in float32, the norm over all axes but the first."""
    folded = dict(tensors)
    for g_name, v_name in WEIGHT_NORM_NAMES:
        for name in [name for name in tensors if name.endswith("." + v_name)]:
            base = name.removesuffix(v_name)
            g, v = folded.pop(base + g_name).float(), folded.pop(name).float()
            folded[base + "weight"] = v * (g / torch.linalg.vector_norm(v, dim=(1, 2), keepdim=True))
    return folded


def missing_and_unexpected(config: FishConfig, names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Tensors that `names` (weight norm folded) lacks, and names that are none but for old buffers; both sorted."""
    with torch.device("meta"):
        expected = set(FishCodec(config, max_frames=1).state_dict())
    found = {name for name in names if not name.endswith(IGNORED_SUFFIXES)}
    return sorted(expected - found), sorted(found - expected)


def load_codec(config: FishConfig, tensors: Mapping[str, Tensor], max_frames: int = MAX_FRAMES) -> FishCodec:
    """Codec in float32 from a checkpoint's tensors. ValueError on a missing or unexpected name, or a wrong shape."""
    tensors = fold_weight_norm(tensors)
    missing, unexpected = missing_and_unexpected(config, tensors)
    if missing or unexpected:
        raise ValueError(f"codec tensors: missing {missing[:3]}, unexpected {unexpected[:3]}")
    with torch.device("meta"):
        codec = FishCodec(config, max_frames)
    state = {name: tensors[name].float() for name in codec.state_dict()}
    for name, expected in codec.state_dict().items():
        if state[name].shape != expected.shape:
            raise ValueError(f"codec tensor {name} is {list(state[name].shape)}, not {list(expected.shape)}")
    codec.load_state_dict(state, assign=True)
    return codec.eval().requires_grad_(False)
