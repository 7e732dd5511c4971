"""_ref/fish_codec.py against golden data: what the original codec made of the same files, codes and waveforms."""

import functools
import json
import math

import numpy as np
import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from _ref import fish_codec as ref
from _ref.fish_codec import Carry, FishCodec, FishConfig

FOLDER = ROOT / "tests/golden_omnifish/codec"
TOLERANCE = 5e-4  # the golden data's own, for waveforms and latents
HOP = 2048


@functools.lru_cache
def load() -> FishCodec:
    return ref.load_codec(FishConfig.from_file(FOLDER / "codec_config.json"), load_file(FOLDER / "codec.safetensors"))


@functools.lru_cache
def load_double() -> FishCodec:
    """The codec in float64, where two ways to the same samples differ by less than a fault would."""
    return ref.load_codec(FishConfig.from_file(FOLDER / "codec_config.json"), load_file(FOLDER / "codec.safetensors")).double()


@functools.lru_cache
def arrays() -> dict[str, Tensor]:
    with np.load(FOLDER / "expected.npz") as expected:
        return {name: torch.from_numpy(expected[name]) for name in expected.files}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def worst(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).abs().max())


def cosine_margins(codec: FishCodec, latent: Tensor) -> Tensor:
    """Best minus second cosine behind every code, [N, T]."""
    margins = []
    for book in codec.quantizer.books:
        z = nn.functional.normalize(book.in_proj(latent).transpose(1, 2), dim=-1)
        best = (z @ nn.functional.normalize(book.codebook.weight, dim=-1).t()).topk(2).values
        margins.append(best[..., 0] - best[..., 1])
        latent = latent - book.decode(book.encode(latent))
    return torch.cat(margins)


@pytest.mark.parametrize("samples", [2048, 2049, 5000, 10240, 33333])
def test_waveforms_become_the_golden_codes(samples):
    codec, audio = load(), arrays()[f"encode.{samples}.audio"][None, None]
    latent = codec.embed(audio)
    assert worst(latent, arrays()[f"encode.{samples}.latent"]) <= TOLERANCE
    assert worst(cosine_margins(codec, latent), arrays()[f"encode.{samples}.margin"]) <= TOLERANCE
    assert torch.equal(codec.encode(audio), arrays()[f"encode.{samples}.codes"])


@pytest.mark.parametrize("frames", [1, 2, 7, 20])
def test_codes_become_the_golden_waveforms(frames):
    found = load().decode(arrays()[f"decode.{frames}.codes"])
    assert worst(found, arrays()[f"decode.{frames}.audio"]) <= TOLERANCE


def test_ids_past_a_codebook_mean_its_last_row_and_stay_as_they_are():
    codes = arrays()["decode_clamp.codes"]
    given = codes.clone()
    assert worst(load().decode(codes)[..., ::8], arrays()["decode_clamp.audio"]) <= TOLERANCE
    assert torch.equal(codes, given)
    assert int(codes.max()) > 4095


@pytest.mark.parametrize("chunk", [1, 3, 8, 19])
def test_joined_chunks_are_the_whole(chunk):
    codec, codes = load_double(), arrays()["decode.20.codes"].expand(2, -1, -1)
    joined = torch.cat(list(codec.decode_chunks(codes, chunk)), dim=-1)
    assert worst(joined, codec.decode(codes)) <= 1e-9


def test_a_chunk_without_its_past_is_not_the_whole():
    codec, codes = load_double(), arrays()["decode.20.codes"]
    alone = codec.decode(codes[..., 10:])
    assert worst(alone, codec.decode(codes)[..., 10 * HOP :]) > 1e-2


def test_a_carry_does_not_grow_without_end():
    codec, codes, shapes = load(), torch.zeros(1, 10, 2, dtype=torch.int64), []
    carry = codec.first_carry()
    for _ in range(8):
        codec.decode(codes, carry)
        shapes.append([tuple(tensor.shape) for tensor in carry.kept])
        carry = carry.after(2)
    assert shapes[-1] == shapes[-2] != shapes[0]
    assert max(shape[-2] for shape in shapes[-1] if len(shape) == 5) == codec.config.post_module.window - 1


def test_later_frames_change_no_earlier_sample():
    codec, codes = load_double(), arrays()["decode.20.codes"]
    whole = codec.decode(codes)
    for frames in (1, 2, 13):
        assert worst(codec.decode(codes[..., :frames]), whole[..., : frames * HOP]) <= 1e-9


@pytest.mark.parametrize("samples", [1, 2047, 4096, 4097])
def test_any_length_is_padded_with_zeros_to_whole_frames(samples):
    codec, audio = load(), arrays()["encode.33333.audio"][None, None, :samples]
    frames = math.ceil(samples / HOP)
    padded = nn.functional.pad(audio, (0, frames * HOP - samples))
    codes = codec.encode(audio)
    assert codes.shape == (1, 10, frames)
    assert torch.equal(codes, codec.encode(padded))


def test_batches_are_their_rows():
    codec, codes = load_double(), arrays()["decode.20.codes"]
    both = torch.cat([codes[..., :7], codes[..., 7:14]])
    found = codec.decode(both)
    assert worst(found[1:], codec.decode(both[1:])) <= 1e-9


def test_rotary_tables_hold_bf16_values_and_it_matters():
    codec = load()
    cos = codec.quantizer.post_module.cos
    assert torch.equal(cos, cos.bfloat16().float())
    exact = ref.load_codec(codec.config, load_file(FOLDER / "codec.safetensors"))
    config = codec.config.post_module
    exact.quantizer.post_module.cos, exact.quantizer.post_module.sin = ref.rope_table(config, torch.arange(64), bf16=False)
    assert worst(exact.decode(arrays()["decode.20.codes"]), arrays()["decode.20.audio"]) > 10 * TOLERANCE


def test_folding_gives_what_weight_norm_computes():
    for layer in (nn.Conv1d(3, 5, 7), nn.ConvTranspose1d(6, 4, 8)):
        wanted = weight_norm(layer)
        wanted.parametrizations.weight.original0.mul_(1.7)
        state = {f"x.conv.{name}": tensor for name, tensor in wanted.state_dict().items()}
        folded = ref.fold_weight_norm(state)
        assert set(folded) == {"x.conv.weight", "x.conv.bias"}
        assert worst(folded["x.conv.weight"], wanted.weight) <= 1e-6
        prefix = "x.conv.parametrizations.weight.original"
        old = {"y.weight_g": state[f"{prefix}0"], "y.weight_v": state[f"{prefix}1"]}
        assert worst(ref.fold_weight_norm(old)["y.weight"], wanted.weight) <= 1e-6


def test_released_names_are_unwrapped_and_old_buffers_ignored():
    tensors = load_file(FOLDER / "codec.safetensors")
    released = {"state_dict": {f"generator.{name}": tensor for name, tensor in tensors.items()}}
    plain = ref.plain_names(released)
    assert plain.keys() == tensors.keys()
    buffers = {"quantizer.pre_module.freqs_cis": torch.zeros(1), "encoder.block.4.block.5.causal_mask": torch.zeros(1)}
    ref.load_codec(load().config, plain | buffers)


def test_checkpoints_that_are_not_whole_are_refused():
    tensors, config = load_file(FOLDER / "codec.safetensors"), load().config
    name = "quantizer.post_module.norm.weight"
    for bad, message in (
        ({key: value for key, value in tensors.items() if key != name}, "missing.*post_module.norm"),
        (tensors | {"surplus": torch.zeros(1)}, "unexpected.*surplus"),
        (tensors | {name: torch.zeros(3)}, "post_module.norm.weight is"),
    ):
        with pytest.raises(ValueError, match=message):
            ref.load_codec(config, bad)


def test_more_frames_than_the_tables_have_are_refused():
    codec = ref.load_codec(load().config, load_file(FOLDER / "codec.safetensors"), max_frames=3)
    codes = arrays()["decode.7.codes"]
    assert worst(codec.decode(codes[..., :3]), load().decode(codes[..., :3])) <= 1e-9
    with pytest.raises(ValueError, match="at most 3"):
        codec.decode(codes[..., :4])
    with pytest.raises(ValueError, match="at most 3"):
        codec.encode(torch.zeros(1, 1, 3 * HOP + 1))
    with pytest.raises(ValueError, match="at most 3"):
        codec.decode(codes[..., :2], Carry(position=2))


def config_dict() -> dict:
    return json.loads((FOLDER / "codec_config.json").read_text(encoding="utf-8"))


def test_the_numbers_of_the_published_codec():
    config = load().config
    assert (config.sample_rate, config.hop_length) == (44100, HOP)
    assert config.codebook_sizes == (4096, *[1024] * 9)


@pytest.mark.parametrize(
    ("path", "value", "error"),
    [
        (("decoder_rates",), [8, 8, 4, 4], ValueError),
        (("quantizer", "input_dim"), 64, ValueError),
        (("quantizer", "post_module", "causal"), False, NotImplementedError),
        (("quantizer", "pre_module", "config", "n_local_heads"), 1, NotImplementedError),
        (("quantizer", "pre_module", "input_dim"), 64, NotImplementedError),
        (("transformer_general_config", "n_local_heads"), 1, NotImplementedError),
        (("encoder_transformer_layers",), [0, 2], ValueError),
    ],
)
def test_configs_that_are_not_supported_are_refused(path, value, error):
    config = config_dict()
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(error):
        FishConfig.from_dict(config)
    with pytest.raises(KeyError, match="sample_rate"):
        FishConfig.from_dict({key: item for key, item in config_dict().items() if key != "sample_rate"})
