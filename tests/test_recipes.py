"""Rounding recipes: a search never loses, wide projections get 8 bits, and every recipe is the model that it says."""

import dataclasses

import numpy as np
import onnx
import pytest
import torch
from conftest import TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from _ref.higgs import Higgs
from voxport.build import llm
from voxport.build.check import check_decoder
from voxport.build.checkpoint import Checkpoint
from voxport.build.quantise import BlockFormat, dequantise, quantise, share_out
from voxport.build.recipes import DEFAULT_RECIPE, RECIPES, WIDE, Recipe
from voxport.build.workshop import Overlay
from voxport.errors import UserError
from voxport.judge.finding import FAIL, PASS
from voxport.judge.rounding import judge_weights, layer_errors
from voxport.judge.weights import attributes, decoder_weights

FITTED = [form for form in RECIPES.values() if form.search and not form.wide]
WIDE_ENOUGH = [name for name, form in RECIPES.items() if form.block_size <= 64]  # the tiny checkpoint is 128 or 256 wide


def loss(weight: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """Squared error of each block, [O, blocks], in float64."""
    error = dequantise(quantise(weight, form), form).double() - weight.double()
    return error.square().unflatten(-1, (-1, form.block_size)).sum(-1)


@pytest.mark.parametrize("form", FITTED, ids=str)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_no_block_loses_by_the_search(form, data):
    values = st.floats(-10, 10, width=32).map(lambda x: x if abs(x) > 1e-6 else 0.0)
    weight = torch.from_numpy(data.draw(arrays(np.float32, (1, form.block_size), elements=values)))
    plain = loss(weight, dataclasses.replace(form, search=False))
    assert (loss(weight, form) <= plain * (1 + 1e-4) + 1e-9).all()


@pytest.mark.parametrize("form, gain", [(RECIPES["fit-32"], 0.95), (RECIPES["fit-32-asym"], 0.95), (RECIPES["fit-128"], 0.9)])
def test_the_search_pays_on_normal_weights(form, gain):
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    assert loss(weight, form).sum() < gain * loss(weight, dataclasses.replace(form, search=False)).sum()


def test_a_large_matrix_in_chunks_is_the_matrix():
    weight = torch.randn(700, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = quantise(weight, BlockFormat())
    rows = [quantise(weight[i : i + 1], BlockFormat()) for i in (0, 511, 512, 699)]
    for i, row in zip((0, 511, 512, 699), rows):
        for name, tensor in vars(row).items():
            assert torch.equal(getattr(whole, name)[i : i + 1], tensor)


def test_rounding_leaves_its_input_and_the_thread_count_alone():
    weight, threads = torch.randn(8, 64), torch.get_num_threads()
    kept = weight.clone()
    quantise(weight, BlockFormat(search=True))
    assert torch.equal(weight, kept)
    with pytest.raises(ZeroDivisionError):
        share_out(lambda i: 1 // i, [1, 0])
    assert torch.get_num_threads() == threads


def test_the_default_rounds_as_the_stock_builder_does():
    assert RECIPES[DEFAULT_RECIPE] == BlockFormat(bits=4, block_size=32, symmetric=False, accuracy_level=4, search=False, wide=())


def test_a_record_is_what_json_gives_back():
    import json

    for form in RECIPES.values():
        assert json.loads(json.dumps(form.record())) == form.record()


@pytest.mark.parametrize("name", ["model.layers.3.mlp.down_proj.weight", "model.layers.3.mlp.down_proj", "mlp.down_proj."])
def test_wide_projections_are_known_by_any_spelling_of_their_name(name):
    form = RECIPES["mixed-32"]
    assert (form.of(name).bits, form.of(name.replace("down", "up")).bits) == (8, 4)


@pytest.mark.parametrize("name", WIDE_ENOUGH)
def test_every_recipe_builds_the_model_that_it_says(name, tmp_path):
    tiny, form = Checkpoint.open(TINY), RECIPES[name]
    llm.extract_qwen3(tiny, tmp_path / "qwen3", form)
    graph = llm.build_decoder(tmp_path / "qwen3", tmp_path / "out", tiny.config, "cpu", "int4", form, "bf16")
    for node in onnx.load(graph, load_external_data=False).graph.node:
        if node.op_type == "MatMulNBits":
            found = attributes(node)
            assert found["bits"] == (8 if any(wide in node.name for wide in WIDE) and form.wide else form.bits), node.name
            assert (found["block_size"], found["accuracy_level"]) == (form.block_size, form.accuracy_level)
    weights = decoder_weights(graph)
    some = "body.layers.1.mlp.down_proj.weight"
    expected = dequantise(quantise(tiny[some], form.of(some)), form.of(some))
    torch.testing.assert_close(weights[some], expected, rtol=1e-6, atol=1e-7)
    check_decoder(graph, "int4", Higgs(tiny.config, Overlay(weights, tiny)))


def test_recipes_are_for_int4():
    with pytest.raises(UserError, match="has no use with fp32"):
        Recipe("cpu", "fp32", rounding="fit-32")
    assert Recipe("cpu", "fp32").record()["rounding"] is None


@pytest.mark.parametrize("name", ["fit-32", "fit-32-asym", "mixed-32"])
def test_the_judge_allows_what_a_search_may_clip_and_no_more(name, tmp_path):
    tiny = Checkpoint.open(TINY)
    llm.extract_qwen3(tiny, tmp_path / "qwen3", RECIPES[name])
    graph = llm.build_decoder(tmp_path / "qwen3", tmp_path / "out", tiny.config, "cpu", "int4", RECIPES[name], "bf16")
    errors = layer_errors(decoder_weights(graph), tiny)
    assert judge_weights(errors, searched=True).verdict == PASS
    wrong = [dataclasses.replace(errors[0], steps=4.0), *errors[1:]]
    assert judge_weights(wrong, searched=True).verdict == FAIL
