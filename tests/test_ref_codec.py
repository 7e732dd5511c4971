"""The codec reference against the published one: keys, resampler, codes at every length, waveforms, chunks."""

import copy
import json

import numpy as np
import pytest
import torch
from checkpoints import golden_copies, tiny_tensors
from conftest import GOLDEN, TINY

from _ref import higgs_codec
from _ref.higgs import CODEC_PREFIX
from _ref.higgs_codec import CodecConfig, HiggsCodec, acoustic_frames, acoustic_padding, semantic_frames
from voxport.build.checkpoint import BUNDLED_CODEC_CONFIG

FACTS = json.loads((GOLDEN / "codec_tiny" / "expected.json").read_text(encoding="utf-8"))
LENGTHS = [clip["length"] for clip in FACTS["encode"]]
RESAMPLED = json.loads((GOLDEN / "resample.json").read_text(encoding="utf-8"))["cases"]
ODD_RATIOS = (44100, 22050)  # torchaudio builds these kernels in float32
STRIDES = (8, 5, 4, 2, 3)
SHORTEST = 119


def norm(name: str, size: int) -> dict:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def biased(name: str, *shape: int, outputs: int | None = None) -> dict:
    return {f"{name}.weight": shape, f"{name}.bias": (outputs or shape[0],)}


def under(prefix: str, shapes: dict) -> dict:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def residual_units(c: int) -> dict:
    unit = {"snake1.alpha": (1, c, 1), "snake2.alpha": (1, c, 1)} | biased("conv1", c, c, 7) | biased("conv2", c, c, 1)
    return {k: v for i in (1, 2, 3) for k, v in under(f"res_unit{i}", unit).items()}


def acoustic_encoder() -> dict:
    shapes = biased("conv1", 64, 1, 7) | {"snake1.alpha": (1, 2048, 1)} | biased("conv2", 256, 2048, 3)
    for b, stride in enumerate(STRIDES):
        c = 64 << b
        block = residual_units(c) | {"snake1.alpha": (1, c, 1)} | biased("conv1", 2 * c, c, 2 * stride)
        shapes |= under(f"block.{b}", block)
    return shapes


def acoustic_decoder() -> dict:
    shapes = biased("conv1", 1024, 256, 7) | {"snake1.alpha": (1, 32, 1)} | biased("conv2", 1, 32, 7)
    for b, stride in enumerate(STRIDES):
        c = 1024 >> b
        block = {"snake1.alpha": (1, c, 1)} | biased("conv_t1", c, c // 2, 2 * stride, outputs=c // 2) | residual_units(c // 2)
        shapes |= under(f"block.{b}", block)
    return shapes


def semantic_model() -> dict:
    shapes = {"masked_spec_embed": (768,)} | norm("feature_extractor.conv_layers.0.layer_norm", 512)
    for i, kernel in enumerate((10, 3, 3, 3, 3, 2, 2)):
        shapes[f"feature_extractor.conv_layers.{i}.conv.weight"] = (512, 512 if i else 1, kernel)
    shapes |= norm("feature_projection.layer_norm", 512) | biased("feature_projection.projection", 768, 512)
    conv = "encoder.pos_conv_embed.conv"
    shapes |= {f"{conv}.bias": (768,), f"{conv}.parametrizations.weight.original0": (1, 1, 128)}
    shapes |= {f"{conv}.parametrizations.weight.original1": (768, 48, 128)} | norm("encoder.layer_norm", 768)
    layer = norm("layer_norm", 768) | norm("final_layer_norm", 768)
    for name in "qkv":
        layer |= biased(f"attention.{name}_proj", 768, 768)
    layer |= biased("attention.out_proj", 768, 768)
    layer |= biased("feed_forward.intermediate_dense", 3072, 768) | biased("feed_forward.output_dense", 768, 3072)
    return shapes | {k: v for i in range(12) for k, v in under(f"encoder.layers.{i}", layer).items()}


def semantic_blocks() -> dict:
    unit = {"conv1.weight": (768, 768, 3), "conv2.weight": (768, 768, 1)}
    block = biased("conv", 768, 768, 3) | under("res_units.0", unit) | under("res_units.1", unit)
    return under("conv_blocks.0", block) | under("conv_blocks.1", block)


def quantizer() -> dict:
    stage = {"codebook.inited": (1,), "codebook.cluster_size": (1024,)}
    stage |= {"codebook.embed": (1024, 64), "codebook.embed_avg": (1024, 64)}
    stage |= biased("project_in", 64, 1024) | biased("project_out", 1024, 64)
    return {k: v for i in range(8) for k, v in under(f"quantizers.{i}", stage).items()}


def published_shapes() -> dict[str, tuple[int, ...]]:
    """Name and shape of the 528 codec tensors in the published checkpoint, by the rules of its key listing."""
    square = (768, 768, 3)
    return (
        under("acoustic_encoder", acoustic_encoder())
        | under("acoustic_decoder", acoustic_decoder())
        | under("semantic_model", semantic_model())
        | under("encoder_semantic", semantic_blocks() | {"conv.weight": square})
        | under("decoder_semantic", semantic_blocks() | {"conv1.weight": square, "conv2.weight": square})
        | under("quantizer", quantizer())
        | biased("fc", 1024, 1024)
        | biased("fc1", 768, 1024)
        | biased("fc2", 256, 1024)
    )


@pytest.fixture(scope="module")
def published_config() -> CodecConfig:
    return CodecConfig.from_file(BUNDLED_CODEC_CONFIG)


def test_published_listing_adds_up():
    shapes = published_shapes()
    assert len(shapes) == 528
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 201_401_321


def test_bundled_config_asks_for_exactly_the_published_tensors(published_config):
    with torch.device("meta"):
        found = {name: tuple(t.shape) for name, t in HiggsCodec(published_config).state_dict().items()}
    expected = published_shapes()
    del expected["semantic_model.masked_spec_embed"]
    assert found == expected
    assert higgs_codec.missing_and_unexpected(published_config, published_shapes()) == ([], [])


def test_every_missing_and_every_surplus_tensor_is_named(published_config):
    names = list(published_shapes())
    lost, surplus = "quantizer.quantizers.3.codebook.embed", "acoustic_encoder.conv1.weight_g"
    missing, unexpected = higgs_codec.missing_and_unexpected(published_config, [n for n in names if n != lost] + [surplus])
    assert (missing, unexpected) == ([lost], [surplus])
    without_mask = [n for n in names if n != "semantic_model.masked_spec_embed"]
    assert higgs_codec.missing_and_unexpected(published_config, without_mask) == ([], [])


def test_bundled_config_has_the_published_figures(published_config):
    c = published_config
    assert (c.sample_rate, c.hop_length, c.num_codebooks, c.hidden_size, c.semantic_step) == (24000, 960, 8, 1024, 2)


def resampled(path) -> list:
    with np.load(path) as arrays:
        return [(case, arrays[f"in_{case['key']}"], arrays[f"out_{case['key']}"]) for case in RESAMPLED]


@pytest.mark.parametrize("path", golden_copies("resample.npz"), ids=["here", "full"][: len(golden_copies("resample.npz"))])
def test_resampler_is_torchaudios(path):
    for case, x, expected in resampled(path):
        found = higgs_codec.resample(torch.from_numpy(x)[None], case["orig"], case["new"])[0]
        tolerance = 3e-5 if case["orig"] in ODD_RATIOS else 2e-6
        np.testing.assert_allclose(found, expected, atol=tolerance, rtol=0, err_msg=case["key"])


@pytest.fixture(scope="module")
def codec() -> HiggsCodec:
    tensors = {n.removeprefix(CODEC_PREFIX): t for n, t in tiny_tensors().items() if n.startswith(CODEC_PREFIX)}
    return higgs_codec.load_codec(CodecConfig.from_file(TINY / "codec_config.json"), tensors)


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "codec_tiny" / "expected.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize("length", LENGTHS)
def test_codes_and_features_are_the_published_ones(length, codec, expected):
    waveform = torch.from_numpy(expected[f"sig_{length}"].astype(np.float32))[None, None]
    np.testing.assert_allclose(codec.embed(waveform)[0], expected[f"fc_out_{length}"], atol=2e-4, rtol=0)
    assert codec.encode(waveform)[0].tolist() == expected[f"codes_{length}"].tolist()


@pytest.mark.parametrize("clip", ["24000_1", "24000_5000", "24000_23999", "44100_30000", "16000_40000"])
def test_references_of_any_rate_and_length_give_the_published_codes(clip, codec, expected):
    samples = torch.from_numpy(expected[f"ref_sig_{clip}"].astype(np.float32))
    codes = higgs_codec.encode_reference(codec, samples, int(clip.split("_")[0]))
    assert codes.tolist() == expected[f"ref_codes_{clip}"].tolist()


def test_every_published_reference_clip_is_tested(expected):
    keys = {n.removeprefix("ref_sig_") for n in expected if n.startswith("ref_sig_")}
    assert keys == {"24000_1", "24000_5000", "24000_23999", "44100_30000", "16000_40000"}


@pytest.mark.parametrize("frames", [1, 2, 3, 7, 25, 60])
def test_decoded_waveforms_are_the_published_ones(frames, codec, expected):
    waveform = codec.decode(torch.from_numpy(expected[f"dec_codes_{frames}"])[None])[0, 0]
    np.testing.assert_allclose(waveform, expected[f"dec_wav_{frames}"], atol=1e-4, rtol=0)


def decode_in_chunks(codec: HiggsCodec, codes: torch.Tensor, size: int, left: int, right: int) -> torch.Tensor:
    """codes [1, N, T] decoded `size` frames at a time with context on both sides, trimmed and joined."""
    hop, total, pieces = codec.config.hop_length, codes.shape[-1], []
    for start in range(0, total, size):
        first, end = max(0, start - left), min(total, start + size)
        piece = codec.decode(codes[..., first : min(total, end + right)])[0, 0]
        pieces.append(piece[(start - first) * hop : (end - first) * hop])
    return torch.cat(pieces)


def test_ten_frames_of_context_make_chunks_seamless(codec, expected):
    """In float64, so that only missing context can make a difference: float32 sums a longer clip in another order."""
    codes, double = torch.from_numpy(expected["dec_codes_60"])[None], copy.deepcopy(codec).double()
    whole = double.decode(codes)[0, 0]
    assert (decode_in_chunks(double, codes, 10, left=10, right=10) - whole).abs().max() <= 1e-9
    for left, right in ((9, 10), (10, 9), (8, 4)):
        assert (decode_in_chunks(double, codes, 10, left, right) - whole).abs().max() > 0.01


def test_float32_chunks_are_seamless_too(codec, expected):
    codes = torch.from_numpy(expected["dec_codes_60"])[None]
    chunks = decode_in_chunks(codec, codes, 10, left=10, right=10)
    assert (chunks - codec.decode(codes)[0, 0]).abs().max() <= 3e-5  # measured 1.2e-5


def test_frame_counts_follow_the_closed_form_at_every_length(published_config):
    for samples in (*range(SHORTEST, 5 * 960), 719_999):
        frames = (samples + 841) // 960
        padding = 480 * (frames - (samples + 328) // 960)
        assert semantic_frames(published_config, samples) == frames
        assert acoustic_padding(published_config, samples) == padding
        assert acoustic_frames(published_config, samples + 2 * padding) == frames


@pytest.mark.parametrize("samples", [1, 8, 118])
def test_too_short_a_clip_is_refused_not_encoded(samples, codec):
    with pytest.raises(RuntimeError):
        codec.encode(torch.zeros(1, 1, samples))


def test_the_shortest_clip_has_one_frame(codec):
    assert codec.encode(torch.zeros(1, 1, SHORTEST)).shape == (1, 8, 1)


def test_padding_to_whole_frames_would_give_other_codes(codec, expected):
    waveform = torch.from_numpy(expected["sig_24480"].astype(np.float32))[None, None]
    padded = torch.nn.functional.pad(waveform, (0, -24480 % 960))
    assert (codec.encode(padded)[0].numpy() == expected["codes_24480"]).mean() < 0.5


@pytest.mark.parametrize("section, key", [
    ("", "sample_rate"), ("", "target_bandwidths"), ("acoustic_model_config", "upsampling_ratios"),
    ("semantic_model_config", "conv_kernel"),
])  # fmt: skip
def test_codec_config_names_an_absent_key(section, key):
    config = json.loads(BUNDLED_CODEC_CONFIG.read_text(encoding="utf-8"))
    del (config[section] if section else config)[key]
    with pytest.raises(KeyError, match=key):
        CodecConfig.from_dict(config)


def test_reversed_upsampling_with_other_product_is_refused():
    config = json.loads(BUNDLED_CODEC_CONFIG.read_text(encoding="utf-8"))
    config["acoustic_model_config"]["upsampling_ratios"] = [8, 8, 4, 2]
    with pytest.raises(ValueError, match="disagree"):
        CodecConfig.from_dict(config)
