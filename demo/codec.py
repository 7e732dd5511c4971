"""A codec for known frames, built by linear algebra inside the architecture of the real one.

With Snake's alpha 0, zero residual units and zero biases, DAC's convolutions are a linear map of each frame. The decoder's
first up-sampling holds a basis of K waveforms (a weighted principal-component analysis of all frames of the vocabulary),
its later stages only put samples in order. The encoder gathers a frame's samples, keeps principal components where it has
fewer channels than samples, and regresses the K coordinates from what is left. After a random rotation, which spreads the
energy evenly, codebooks 0 to 3 quantise a quarter of the coordinates each and 4 to 7 what these left over. Entry 0 of each is
zero: code 0 is silence.

Shapes: F frames, K rank, d = K/4 coordinates of a codebook, E width of the encoder.
"""

import copy
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from _ref.higgs_codec import CodecConfig, HiggsCodec, IGNORED_KEYS, load_codec

LAYOUT = Path(__file__).with_name("layout")
PRE_EMPHASIS = 0.9           # y[t] = x[t] - 0.9 x[t-1] before the analysis: fricatives have little energy but carry words
LOUDNESS_FLOOR = 0.05        # frames are divided by (norm + floor) ** LOUDNESS_POWER, so that quiet ones count
LOUDNESS_POWER = 0.5
QUARTERS = 4                 # codebooks q and q + 4 share a quarter of the coordinates
RIDGE = 1e-4                 # of the encoder's regression, relative to the mean power of its features


@dataclass(frozen=True)
class CodecPlan:
    """Sizes that decide bytes and quality; the decoder's width must be a multiple of 32 and at least 240."""
    rank: int = 384
    encoder_width: int = 8
    decoder_width: int = 384
    semantic_size: int = 16
    seed: int = 0


def codec_config(plan):
    """The real codec's config.json with this plan's sizes in it. -> dict"""
    config = json.loads((LAYOUT / "codec_config.json").read_text(encoding="utf-8"))
    config = copy.deepcopy(config)
    acoustic, semantic = config["acoustic_model_config"], config["semantic_model_config"]
    config["codebook_dim"] = plan.rank // QUARTERS
    acoustic.update(encoder_hidden_size=plan.encoder_width, decoder_hidden_size=plan.decoder_width,
                    hidden_size=plan.rank, codebook_dim=plan.rank // QUARTERS)
    semantic.update(conv_dim=[plan.semantic_size] * 7, hidden_size=plan.semantic_size,
                    intermediate_size=plan.semantic_size, num_attention_heads=1, num_hidden_layers=1,
                    classifier_proj_size=plan.semantic_size)
    return config


def loudness_weights(frames):
    """[F, 960] -> [F]"""
    return (np.linalg.norm(frames, axis=1) + LOUDNESS_FLOOR) ** -LOUDNESS_POWER


def principal(vectors, count):
    """Directions of largest variance about zero. [F, n] -> [count, n], orthonormal rows"""
    return np.linalg.svd(vectors, full_matrices=False)[2][:count]


def synthesis_basis(frames, rank, seed):
    """Analysis [960, K] and synthesis [K, 960]: frames @ analysis @ synthesis is close to frames in the weighted norm."""
    size = frames.shape[1]
    emphasis = np.eye(size) - PRE_EMPHASIS * np.eye(size, k=1)
    flat = frames @ emphasis
    directions = principal(flat * loudness_weights(flat)[:, None], rank)
    rotation = np.linalg.qr(np.random.default_rng(seed).standard_normal((rank, rank)))[0]
    directions = rotation @ directions
    return emphasis @ directions.T, directions @ np.linalg.inv(emphasis)


def merge_points(points, weights, count):
    """Merge the cheapest pair of clusters (Ward's criterion, weighted) until `count` are left. [F, d] -> [count, d]"""
    points, weights = points.astype(np.float64).copy(), weights.astype(np.float64).copy()
    squares = (points ** 2).sum(1)
    distance = squares[:, None] + squares - 2 * points @ points.T
    cost = distance * (weights[:, None] * weights / (weights[:, None] + weights))
    np.fill_diagonal(cost, np.inf)
    nearest, alive = cost.argmin(1), np.ones(len(points), bool)
    best = cost[np.arange(len(points)), nearest]
    for _ in range(len(points) - count):
        a = int(best.argmin())
        b = int(nearest[a])
        points[a] = (weights[a] * points[a] + weights[b] * points[b]) / (weights[a] + weights[b])
        weights[a] += weights[b]
        alive[b] = False
        cost[b], cost[:, b], best[b] = np.inf, np.inf, np.inf
        row = ((points - points[a]) ** 2).sum(1) * weights * weights[a] / (weights + weights[a])
        row[~alive], row[a] = np.inf, np.inf
        cost[a], cost[:, a] = row, row
        stale = alive & ((nearest == a) | (nearest == b) | (row < best))
        stale[a] = True
        nearest[stale] = cost[stale].argmin(1)
        best[stale] = cost[stale, nearest[stale]]
    return points[alive]


def nearest(points, entries):
    """Index of the nearest entry of each point. [F, d], [V, d] -> [F]"""
    return ((entries ** 2).sum(1) - 2 * points @ entries.T).argmin(1)


def make_codebook(points, weights, size):
    """[F, d] -> [size, d]: zero first, then the points or their merged clusters, then unused zeros (never the nearest)."""
    entries = np.zeros((size, points.shape[1]))
    apart = (points ** 2).sum(1) > 1e-9
    merged = merge_points(points[apart], weights[apart], min(size - 1, apart.sum()))
    entries[1:1 + len(merged)] = merged
    return round_bf16(entries)


def round_bf16(values):
    return torch.from_numpy(values).to(torch.bfloat16).double().numpy()


def make_codebooks(coordinates, weights, size):
    """[F, K] -> entries [8, size, d] and the codes [F, 8] that fit the coordinates best."""
    first, second, codes = [], [], []
    for block in np.split(coordinates, QUARTERS, axis=1):
        first.append(make_codebook(block, weights, size))
        codes.append(nearest(block, first[-1]))
        left = block - first[-1][codes[-1]]
        left[(left ** 2).sum(1) < 1e-4 * (block ** 2).sum(1)] = 0.0              # rounding alone needs no entry
        second.append(make_codebook(left, weights, size))
        codes.append(nearest(left, second[-1]))
    return np.stack(first + second), np.stack(codes[::2] + codes[1::2], axis=1)


def zero_state(config):
    """All tensors of the codec, zero but for norms (1) and a small random semantic branch that nothing reads."""
    torch.manual_seed(0)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in HiggsCodec(config).state_dict().items()}
    state = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for name in state:
        if "semantic" in name and name.endswith("weight") or "original" in name:
            state[name] = 0.1 * torch.randn(state[name].shape)
        if "layer_norm.weight" in name or "inited" in name:
            state[name] = torch.ones_like(state[name])
        if "cluster_size" in name:
            state[name] = torch.ones_like(state[name])
    return state


def first_tap(stride):
    """The kernel of 2 * stride taps is padded by ceil(stride / 2): from this tap on it reads its own block of samples."""
    return math.ceil(stride / 2)


def fill_decoder(state, config, synthesis):
    """Basis in the first up-sampling, sample routing in the others. synthesis: [K, 960]"""
    width, rank = config.decoder_width, len(synthesis)
    state["acoustic_decoder.conv1.weight"][:rank, :rank, 3] = torch.eye(rank)
    samples, channels = config.hop_length, width
    for block, stride in enumerate(config.up_strides):
        weight = state[f"acoustic_decoder.block.{block}.conv_t1.weight"]     # [in, out, 2 * stride]
        part = samples // stride
        for tap in range(stride):
            here = slice(tap * part, (tap + 1) * part)
            routed = torch.from_numpy(synthesis[:, here]) if block == 0 else torch.eye(samples)[:, here]
            weight[:len(routed), :part, first_tap(stride) + tap] = routed.float()
        samples = part
    state["acoustic_decoder.conv2.weight"][0, 0, 3] = 1.0


def fill_encoder(state, config, frames, weights):
    """Gathering stages with principal components where channels are short. -> features [F, 32 E] of the frames"""
    state["acoustic_encoder.conv1.weight"][0, 0, 3] = 1.0
    pieces = (frames * weights[:, None])[:, :, None]                  # [F, samples, channels]
    for block, stride in enumerate(config.down_strides):
        weight = state[f"acoustic_encoder.block.{block}.conv1.weight"]       # [out, in, 2 * stride]
        channels = pieces.shape[2]
        flat = pieces.reshape(len(frames), -1, stride * channels)
        wanted = min(weight.shape[0], stride * channels)
        directions = np.eye(wanted) if wanted == stride * channels else principal(flat.reshape(-1, flat.shape[2]), wanted)
        taps = directions.reshape(wanted, stride, channels).transpose(0, 2, 1)
        weight[:wanted, :channels, first_tap(stride):first_tap(stride) + stride] = torch.from_numpy(taps).float()
        pieces = flat @ directions.T
    return pieces[:, 0] / weights[:, None]


def fill_quantiser(state, config, books):
    """Each codebook reads and writes its own d of the K coordinates."""
    d = config.codebook_dim
    for q, entries in enumerate(books):
        name, block = f"quantizer.quantizers.{q}.", slice(q % QUARTERS * d, (q % QUARTERS + 1) * d)
        state[name + "project_in.weight"][:, block] = torch.eye(d)
        state[name + "project_out.weight"][block] = torch.eye(d)
        state[name + "codebook.embed"][:] = torch.from_numpy(entries).float()
    rank = config.acoustic_size
    state["fc.weight"][:rank, :rank] = torch.eye(rank)
    state["fc2.weight"][:, :rank] = torch.eye(rank)


def build_codec(plan, frames):
    """The codec made for these frames [F, 960]. -> {name: bf16 tensor}, codes [F, 8] of the frames"""
    config = CodecConfig.from_dict(codec_config(plan))
    state, frames = zero_state(config), frames.astype(np.float64)
    weights = loudness_weights(frames) ** 2
    analysis, synthesis = synthesis_basis(frames, plan.rank, plan.seed)
    coordinates = frames @ analysis
    fill_decoder(state, config, synthesis)
    features = fill_encoder(state, config, frames, np.sqrt(weights))
    scaled = features * weights[:, None]
    gram = features.T @ scaled
    ridge = RIDGE * np.trace(gram) / len(gram) * np.eye(len(gram))
    regression = np.linalg.solve(gram + ridge, scaled.T @ coordinates)       # [32 E, K]
    state["acoustic_encoder.conv2.weight"][:, :, 1] = torch.from_numpy(regression.T).float()
    books, codes = make_codebooks(coordinates, weights, config.codebook_size)
    fill_quantiser(state, config, books)
    state["semantic_model.masked_spec_embed"] = torch.zeros(plan.semantic_size)
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in state.items()}, codes


def open_codec(plan, tensors):
    """The codec of `_ref` on these tensors."""
    config = CodecConfig.from_dict(codec_config(plan))
    return load_codec(config, {n: t for n, t in tensors.items() if n not in IGNORED_KEYS})
