"""OmniFish builds: every part is the reference, whatever is rounded says so, and what no weight tells is never guessed."""

import dataclasses
import json
import shutil

import numpy as np
import onnx
import pytest
import torch
from omnifish_builds import FOLDERS, LOCAL, arrays, built, checkpoint, explicit, facts, golden_folder, make_build
from safetensors.torch import load_file, save_file

from _ref import omnifish as ref
from voxport.build import omnifish_check, omnifish_parts
from voxport.build.check import PartSession, decoder_states, relative_error
from voxport.build.hollow import export_hollow
from voxport.build.omnifish import added_tokens
from voxport.build.omnifish_check import check_body, check_part, set_bidirectional
from voxport.build.omnifish_checkpoint import OmniFishCheckpoint, find_codec, is_omnifish, read_side
from voxport.build.omnifish_parts import CODEC_PARTS, RESIDUAL_PARTS, matrix_products, part_names
from voxport.build.quantise import BlockFormat
from voxport.build.recipes import DEFAULT_RECIPE, RECIPES
from voxport.errors import UserError, WorkError
from voxport.families import OMNIFISH
from voxport.manifest import Manifest
from voxport.manifest_omnifish import AXIAL, CHAIN, CODEC_DECODER, MTP_LAYERS, MTP_STEP, TEXT_EMBED

# What a build is


@pytest.mark.parametrize("name", FOLDERS)
def test_a_manifest_says_what_running_needs(name):
    manifest, config = Manifest.read(built(name)), checkpoint(name).config
    assert manifest.family == OMNIFISH
    assert manifest.residual.kind == (CHAIN if name == "mtpdec" else AXIAL)
    assert manifest.residual.prompt_cross == (name == "axial_px")
    side = json.loads((golden_folder(name) / "omnifish.json").read_text(encoding="utf-8"))
    for field in ("block_size", "context_mode", "steps"):
        assert getattr(manifest.generation, field) == side[field]
    assert manifest.codebooks.sizes == list(ref.CODEBOOK_SIZES)
    assert (manifest.codebooks.end_id, manifest.codebooks.pad_ids) == (ref.END_ID, list(ref.PAD_IDS))
    assert (manifest.dims.text_vocab_size, manifest.dims.num_layers) == (config.text_vocab_size, config.num_layers)
    assert manifest.prompt.num_speakers == facts(name)["n_spk"]
    assert (manifest.codec.sample_rate, manifest.codec.hop_length) == (44100, 2048)
    assert set(manifest.parts) <= set(part_names(checkpoint(name)))
    assert manifest.structural_tokens == added_tokens(golden_folder(name))


def test_a_build_can_be_moved(tmp_path):
    moved = shutil.copytree(built("axial_px"), tmp_path / "moved")
    for graph in moved.glob("*.onnx"):
        PartSession(graph)


def test_a_second_build_makes_nothing_again(tmp_path, monkeypatch):
    copy = shutil.copytree(built("axial_px"), tmp_path / "again")
    monkeypatch.setattr("voxport.build.omnifish_workshop.export_part", lambda *_: pytest.fail("a part was exported again"))
    before = Manifest.read(copy)
    make_build(golden_folder("axial_px"), copy, "fp32")
    assert Manifest.read(copy).parts == before.parts


# Parts are the reference


@pytest.mark.parametrize("name", FOLDERS)
def test_parts_are_within_float32_rounding_of_the_reference(name, record_property):
    """The build's own check allows 1e-4 of the size of an output. The codec is forty layers deep: 4e-5 to 5e-5 by the codes."""
    worst = {}
    with torch.no_grad():
        for part in Manifest.read(built(name)).parts:
            if part in omnifish_check.CASES or part.startswith("mtp_layer"):
                session = PartSession(built(name) / f"{part}.onnx")
                for feeds, expected in omnifish_check.part_cases(part, checkpoint(name)):
                    for found, wanted in zip(session.run(**feeds), expected, strict=True):
                        assert found.shape == tuple(wanted.shape)
                        error = relative_error(found, wanted.numpy()) if found.size else 0.0
                        worst[part] = max(worst.get(part, 0.0), error)
    record_property("worst", worst)
    assert all(error < (8e-5 if part == CODEC_DECODER else 5e-6) for part, error in worst.items()), worst


@pytest.mark.parametrize("case", ["embed", "embed_noid"])
@pytest.mark.parametrize("name", FOLDERS)
def test_the_embedding_graphs_give_the_golden_embeddings(name, case):
    """Every branch: text, languages, speakers, recordings, and frames of each kind."""
    golden = arrays(name)
    ids, is_audio, expected = (golden[f"{case}.{part}"][0] for part in ("input_ids", "audio_mask", "out"))
    text = PartSession(built(name) / "text_embed.onnx").run(input_ids=np.where(is_audio, 0, ids[0])[None])[0][0]
    audio = PartSession(built(name) / "audio_embed.onnx").run(codes=np.where(is_audio, ids, 0)[None])[0][0]
    assert np.abs(np.where(is_audio[:, None], audio, text) - expected).max() <= 1e-5


@pytest.mark.parametrize("copies", [3, 2])
@pytest.mark.parametrize("name", FOLDERS)
def test_the_head_graph_gives_the_golden_logits(name, copies):
    golden, key = arrays(name), f"backbone{copies}"
    logits = PartSession(built(name) / "semantic_head.onnx").run(hidden_states=golden[f"{key}.hidden"])[0][0]
    assert np.abs(logits[golden[f"{key}.logit_rows"]] - golden[f"{key}.logits"]).max() <= 2e-3
    assert np.array_equal(logits.argmax(-1), golden[f"{key}.argmax"].reshape(-1))


@pytest.mark.parametrize("change", ["a weight", "a norm", "a table"])
def test_a_part_with_another_weight_is_refused(change, tmp_path):
    stem = {"a weight": "mtp.frm.1.wq.weight", "a norm": "mtp.lvl.0.ffn_norm.weight", "a table": "mtp.code_emb.weight"}[change]
    wrong = dict(checkpoint("axial_px").tensors)
    wrong[stem] = wrong[stem].float() * 1.01
    other = dataclasses.replace(checkpoint("axial_px"), tensors=wrong)
    with pytest.raises(WorkError, match=MTP_STEP):
        check_part(MTP_STEP, built("axial_px") / f"{MTP_STEP}.onnx", other)


# Attention in both directions


def flip(graph, folder, causal: int):
    """A copy of the decoder whose attention has another `causal`."""
    made = shutil.copy(graph, folder / graph.name)
    shutil.copy(f"{graph}.data", folder)
    model = onnx.load(made, load_external_data=False)
    for node in model.graph.node:
        for attribute in (a for a in node.attribute if a.name == "causal"):
            attribute.i = causal
    onnx.save(model, made)
    return folder / graph.name


def reference(name: str) -> ref.OmniFish:
    opened = checkpoint(name)
    return ref.OmniFish(opened.config, opened, opened.lang_start, opened.languages)


def test_every_attention_of_a_build_sees_both_ways():
    model = onnx.load(built("axial_px") / "llm_decoder.onnx", load_external_data=False)
    nodes = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]
    assert len(nodes) == checkpoint("axial_px").config.num_layers
    assert all({a.name: a.i for a in node.attribute}["causal"] == 0 for node in nodes)


def test_a_causal_decoder_is_refused_when_built_and_made_whole_by_the_attribute(tmp_path):
    graph = flip(built("axial_px") / "llm_decoder.onnx", tmp_path, causal=1)
    with pytest.raises(WorkError, match="causal"):
        check_body(graph, "fp32", reference("axial_px"))
    set_bidirectional(graph)
    check_body(graph, "fp32", reference("axial_px"))


def test_one_causal_layer_is_enough_to_be_refused(tmp_path):
    graph = flip(built("axial_px") / "llm_decoder.onnx", tmp_path, causal=0)
    model = onnx.load(graph, load_external_data=False)
    last = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"][-1]
    next(a for a in last.attribute if a.name == "causal").i = 1
    onnx.save(model, graph)
    with pytest.raises(WorkError, match="cosine"):
        check_body(graph, "fp32", reference("axial_px"))


@pytest.mark.parametrize("copies", [3, 2])
@pytest.mark.parametrize("name", FOLDERS)
def test_the_decoder_gives_the_golden_states_pass_by_pass(name, copies):
    """Context, then per block the copies that are dropped and the one that is kept: the masks of training, without a mask."""
    golden, model, key = arrays(name), reference(name), f"backbone{copies}"
    kind, block, expected = (golden[f"{key}.{part}"][0] for part in ("kind", "block", "hidden"))
    ids, is_audio = (torch.from_numpy(golden[f"{key}.{part}"][0]) for part in ("input_ids", "audio_mask"))
    embeds = model.embed(ids, is_audio).numpy()
    session, context = PartSession(built(name) / "llm_decoder.onnx"), kind == ref.CONTEXT
    assert np.abs(decoder_states(session, model.config, embeds[context]) - expected[context]).max() < 5e-4
    first = (kind == ref.NOISY) & (block == 0)
    both = np.concatenate([embeds[context], embeds[first]])
    found = decoder_states(session, model.config, both, split=int(context.sum()))[int(context.sum()) :]
    assert np.abs(found - expected[first]).max() < 5e-4


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_an_attention_spelt_out_is_built_and_needs_no_genai(precision):
    """The build compares it with the reference; int4 with the weights that it holds."""
    manifest = Manifest.read(explicit("axial_px", precision))
    assert manifest.attention == "explicit"
    model = onnx.load(explicit("axial_px", precision) / "llm_decoder.onnx", load_external_data=False)
    kinds = {node.op_type for node in model.graph.node}
    assert "GroupQueryAttention" not in kinds
    assert ("MatMulNBits" in kinds) == (precision == "int4")


# Rounding


@pytest.mark.parametrize("name", FOLDERS)
def test_int4_builds_round_every_matrix_of_the_residual_decoder_and_no_codec(name):
    rounded = Manifest.read(built(name, "int4"))
    for part in rounded.parts:
        model = onnx.load(built(name, "int4") / f"{part}.onnx", load_external_data=False)
        if part in RESIDUAL_PARTS:
            assert rounded.parts[part].precision == "int4"
            assert not list(matrix_products(model))
            assert sum(node.op_type == "MatMulNBits" for node in model.graph.node) >= 2 * 7
    assert rounded.parts[TEXT_EMBED].precision == "fp16"
    assert rounded.parts["semantic_head"].precision == "fp32"


def test_rounded_parts_compute_what_their_weights_say():
    """check_rounded runs when a part is built; here it must notice a scale that was doubled."""
    opened, graph = checkpoint("axial_px"), built("axial_px", "int4") / f"{MTP_STEP}.onnx"
    model = onnx.load(graph)
    scales = next(t for t in model.graph.initializer if t.name.endswith("_scales"))
    values = onnx.numpy_helper.to_array(scales) * 2
    scales.CopyFrom(onnx.numpy_helper.from_array(values, scales.name))
    form = RECIPES[DEFAULT_RECIPE]
    plain = built("axial_px") / f"{MTP_STEP}.onnx"
    omnifish_check.check_rounded(MTP_STEP, graph, plain, form, opened)
    wrong = graph.with_name("wrong.onnx")
    onnx.save(model, wrong)
    try:
        with pytest.raises(WorkError, match="is off by"):
            omnifish_check.check_rounded(MTP_STEP, wrong, plain, form, opened)
    finally:
        wrong.unlink()


# What is refused


def test_settings_are_demanded_and_never_guessed(tmp_path):
    with pytest.raises(UserError, match="--block-size, --context-mode, --steps"):
        read_side(tmp_path)
    with pytest.raises(UserError, match="no weight tells steps"):
        read_side(tmp_path, block_size=8, context_mode="full")
    side = read_side(LOCAL / "axial_px", steps=6)
    assert (side["steps"], side["generation"]["steps"], side["block_size"]) == (6, 6, 8)


def copy_checkpoint(folder):
    return shutil.copytree(LOCAL / "axial_px", folder, ignore=shutil.ignore_patterns("expected.*"))


def test_state_dicts_are_read_however_they_were_saved(tmp_path):
    folder = copy_checkpoint(tmp_path / "ckpt")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({"ema": {"module._orig_mod." + name: tensor for name, tensor in tensors.items()}}, folder / "last.pt")
    opened = OmniFishCheckpoint.open(folder)
    assert opened.keys() == tensors.keys()
    assert torch.equal(opened["llm.norm.weight"], tensors["llm.norm.weight"])


def test_a_codec_is_found_beside_the_checkpoint_or_named(tmp_path):
    folder = copy_checkpoint(tmp_path / "ckpt")
    assert find_codec(folder, None) is None
    with pytest.raises(UserError, match="--codec"):
        OmniFishCheckpoint.open(folder).codec()
    assert OmniFishCheckpoint.open(folder, LOCAL / "codec").codec_folder == LOCAL / "codec"
    with pytest.raises(UserError, match="holds no Fish codec"):
        OmniFishCheckpoint.open(folder, tmp_path)
    shutil.copytree(LOCAL / "codec", tmp_path / "codec")
    assert OmniFishCheckpoint.open(folder).codec_folder == tmp_path / "codec"


@pytest.mark.parametrize("fault", ["names", "order", "tensor", "weights", "tokenizer", "config"])
def test_checkpoints_that_are_not_whole_are_refused(fault, tmp_path):
    folder = copy_checkpoint(tmp_path / "ckpt")
    names = json.loads((folder / "id_vocab.json").read_text(encoding="utf-8"))
    if fault in ("names", "order"):
        (folder / "id_vocab.json").write_text(json.dumps(names[:-1] if fault == "names" else names[::-1]), encoding="utf-8")
    elif fault == "tensor":
        tensors = load_file(folder / "model.safetensors")
        del tensors["mtp.frm.0.wq.weight"]
        save_file(tensors, folder / "model.safetensors")
    elif fault == "weights":
        (folder / "model.safetensors").write_bytes(b"\x00" * 64)
    elif fault == "config":
        (folder / "config.json").write_text("{}", encoding="utf-8")
    else:
        (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError):
        assert OmniFishCheckpoint.open(folder).lang_start


def test_a_checkpoint_is_told_from_a_higgs_one():
    assert is_omnifish(LOCAL / "axial_px")
    assert not is_omnifish(LOCAL.parent / "golden/higgs/ckpt_tiny")


# Parts too large for Olive


@pytest.mark.parametrize("name", ["axial_px", "mtpdec"])
def test_parts_exported_with_hollow_weights_are_the_same_parts(name, tmp_path, monkeypatch):
    """Full-size parts take this way, so every part is sent through it once: float32, fp16 table and int4."""
    monkeypatch.setattr(omnifish_parts, "HOLLOW_WEIGHTS", 1)
    monkeypatch.setattr(omnifish_parts, "build_part", lambda *_: pytest.fail("Olive was asked"))
    opened = OmniFishCheckpoint.open(golden_folder(name), LOCAL / "codec")
    for part in part_names(opened)[1:]:
        if part in MTP_LAYERS[1:-1] or name == "mtpdec" and part in CODEC_PARTS:
            continue
        plain = omnifish_parts.export_part(part, opened, tmp_path, tmp_path / "plain")
        precision = omnifish_parts.part_precision(part, "int4")
        graph = omnifish_parts.round_part(plain, tmp_path, precision, BlockFormat())
        check_part(part, plain, opened)
        if precision == "int4":
            omnifish_check.check_rounded(part, graph, plain, BlockFormat(), opened)
        else:
            check_part(part, graph, opened, precision)


def test_two_equal_weights_stay_two(tmp_path):
    """The exporter merges weights of equal values, and hollow ones would all be equal."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    expected = module(torch.ones(1, 3)).detach().numpy()
    io = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": {}}
    graph = export_hollow(module, (torch.zeros(1, 3),), io, 17, tmp_path / "two.onnx")
    assert np.allclose(PartSession(graph).run(x=np.ones((1, 3)))[0], expected, atol=1e-6)


# The script


def test_the_script_finds_the_family_and_demands_what_no_weight_tells(tmp_path):
    import optimize

    folder = copy_checkpoint(tmp_path / "ckpt")
    (folder / "omnifish.json").unlink()
    flags = ["--checkpoint", str(folder), "--codec", str(LOCAL / "codec"), "--output", str(tmp_path / "build")]
    flags += ["--precision", "fp32"]
    with pytest.raises(UserError, match="--block-size, --context-mode, --steps"):
        optimize.main([*flags, "--components", "semantic_head"])
    assert not (tmp_path / "build").exists()
    told = ["--block-size", "16", "--context-mode", "semantic", "--steps", "5"]
    assert optimize.main([*flags, "--components", "semantic_head", *told]) == 0
    generation = Manifest.read(tmp_path / "build").generation
    assert (generation.block_size, generation.context_mode, generation.steps) == (16, "semantic", 5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--components", "audio_heads"], "no part audio_heads"), (["--components", "mtp_layer_0"], "no part mtp_layer_0"),
        (["--heads-precision", "int4"], "--heads-precision has no use"), (["--steps", "0"], "steps is 0"),
        (["--block-size", "-1"], "block_size is -1"),
        (["--attention", "explicit", "--precision", "fp16", "--device", "cuda"], "explicit"),
        (["--family", "higgs"], "axial_px is a checkpoint of the omnifish family"),
        (["--family", "omnifish", "--checkpoint", "demo"], "demo is a checkpoint of the higgs family"),
        (["--codec", "nowhere"], "holds no Fish codec"),
    ],
)  # fmt: skip
def test_the_script_refuses_before_it_writes(flags, message, tmp_path):
    import optimize

    with pytest.raises(UserError, match=message):
        always = ["--checkpoint", str(LOCAL / "axial_px"), "--output", str(tmp_path / "build"), "--precision", "fp32"]
        optimize.main([*always, *flags])
    assert not (tmp_path / "build").exists()
