"""The build folder: what is in it, that its parts are the reference, and that only what must be made again is made again."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from checkpoints import (
    copy_configs,
    drop_token,
    edit_json,
    link_checkpoint,
    own_head,
    split,
    tiny_tensors,
    untie,
    use_variant,
    write_checkpoint,
    write_deep_checkpoint,
    write_shards,
)
from conftest import ROOT, TINY, build
from onnx.external_data_helper import ExternalDataInfo

import optimize
from _ref import higgs as ref
from _ref.higgs_codec import load_codec
from voxport.build import check
from voxport.build.check import PartSession, cosine, decoder_states
from voxport.build.checkpoint import Checkpoint
from voxport.build.higgs import COMPONENTS
from voxport.build.job import describe_result
from voxport.errors import WorkError, run_script
from voxport.manifest import MANIFEST_NAME, Manifest, verify_files

CASES = [case["name"] for case in json.loads((TINY / "expected.json").read_text(encoding="utf-8"))["cases"]]
VARIANTS = sorted(path.stem for path in (TINY / "config_variants").glob("*.json"))
LENGTHS = (1, 2, 17, 33, 129)
LIGHT = ("text_embed", "audio_embed", "audio_heads")
DECODER, NOT_CODEC = "llm_decoder", "llm_decoder,text_embed,audio_embed,audio_heads"
SHORTEST = 119


@pytest.fixture(scope="module")
def tiny() -> Checkpoint:
    return Checkpoint.open(TINY)


@pytest.fixture(scope="module")
def codec(tiny):
    return load_codec(tiny.codec_config, tiny.codec_tensors())


@pytest.fixture(scope="module")
def light_build(tmp_path_factory) -> Path:
    """The parts that are made in no time."""
    return build(TINY, tmp_path_factory.mktemp("light") / "out", "--precision", "fp32", "--components", ",".join(LIGHT))


@pytest.fixture
def scratch(light_build, tmp_path) -> Path:
    """A copy of the light build to do harm to."""
    return shutil.copytree(light_build, tmp_path / "scratch")


def part(folder: Path, name: str) -> PartSession:
    return PartSession(folder / f"{name}.onnx")


def graph_of(folder: Path, name: str) -> onnx.ModelProto:
    return onnx.load(folder / f"{name}.onnx", load_external_data=False)


# The parts are the reference.


class GreedyFolder:
    """The graphs of a build, driven greedily with `_ref`'s state machine: one row a step, through the cache."""

    def __init__(self, folder: Path):
        self.manifest = Manifest.read(folder)
        self.text, self.audio, self.heads, self.decoder, self.codec = (
            part(folder, name) for name in ("text_embed", "audio_embed", "audio_heads", DECODER, "audio_tokenizer")
        )

    def embed_rows(self, rows: np.ndarray) -> np.ndarray:
        """rows [L, N] -> [1, L, D]."""
        return self.audio.run(codes=rows[None])[0]

    def embed_prompt(self, ids: np.ndarray, ref_rows: np.ndarray) -> np.ndarray:
        """ids [P] with placeholders -> [1, P, D]."""
        embeds = self.text.run(input_ids=np.maximum(ids, 0)[None])[0].copy()
        if (ids < 0).any():
            embeds[:, ids < 0] = self.embed_rows(ref_rows)
        return embeds

    def speak(self, embeds: np.ndarray, max_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """rows [L, N], and the hidden states [L, D] that predicted them."""
        audio, state, rows, hidden = self.manifest.audio, ref.SamplerState(), [], []
        past, length = self.empty_cache(), 0
        while not state.done and len(rows) < max_rows:
            length += embeds.shape[1]
            state_in = {"inputs_embeds": embeds, "attention_mask": np.ones((1, length)), **past}
            made = dict(zip(self.outputs, self.decoder.run(**state_in)))
            past = {name: made[name.replace("past_key_values", "present")] for name in past}
            hidden.append(made["hidden_states"][0, -1])
            logits = self.heads.run(hidden_states=hidden[-1][None, None])[0][0, 0]
            rows.append(ref.step(state, logits.argmax(-1).tolist(), audio.boc_id, audio.eoc_id))
            embeds = self.embed_rows(np.array(rows[-1:]))
        return np.array(rows), np.array(hidden)

    @property
    def outputs(self) -> list[str]:
        return [output.name for output in self.decoder.session.get_outputs()]

    def empty_cache(self) -> dict[str, np.ndarray]:
        dims = self.manifest.dims
        empty = np.zeros((1, dims.num_kv_heads, 0, dims.head_dim))
        return {name: empty for name in self.decoder.dtypes if name.startswith("past_key_values")}


@pytest.fixture(scope="module")
def greedy_folders(tiny_build, tiny_build_exact) -> dict[str, GreedyFolder]:
    return {"bf16": GreedyFolder(tiny_build), "exact": GreedyFolder(tiny_build_exact)}


@pytest.mark.parametrize("rope", ["bf16", "exact"])
@pytest.mark.parametrize("case", CASES)
def test_the_graphs_speak_the_published_rows(case, rope, greedy_folders, golden):
    folder, expected = greedy_folders[rope], lambda kind: golden.of(kind, case, rope)
    embeds = folder.embed_prompt(golden.of("ids", case), golden.arrays["ref_rows"])
    np.testing.assert_allclose(embeds[0], golden.of("prompt_embeds", case), atol=1e-6, rtol=0)
    rows, hidden = folder.speak(embeds, max_rows=60)
    assert rows.tolist() == expected("rows").tolist()
    np.testing.assert_allclose(hidden, expected("hidden"), atol=2e-3, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_the_codec_graph_makes_the_published_waveforms(case, greedy_folders, golden):
    waveform = greedy_folders["bf16"].codec.run(codes=golden.of("codes", case, "bf16").T[None])[0]
    np.testing.assert_allclose(waveform[0, 0], golden.of("wav", case, "bf16"), atol=1e-4, rtol=0)


def test_the_encoder_graph_makes_the_published_reference_codes(tiny_build, golden):
    codes = part(tiny_build, "audio_encoder").run(waveform=golden.arrays["ref_sig"][None, None])[0]
    assert codes[0].T.tolist() == golden.arrays["ref_codes"].tolist()


def encoder_lengths() -> list[int]:
    """Forty random lengths from 119 to 200,000, most of them short, then both sides of every border between the branches."""
    rng = np.random.default_rng(960)
    lengths = np.exp(rng.uniform(np.log(SHORTEST), np.log(200_000), 40)).astype(int).tolist()
    borders = [960 * k + r for k in (0, 1, 7) for r in (0, 118, 119, 631, 632, 959)]
    return [*lengths, *(n for n in borders if n >= SHORTEST), 200_000]


def test_the_lengths_reach_every_class_of_residues():
    residues = [n % 960 for n in encoder_lengths()[:40]]
    assert min(residues) < 119
    assert any(119 <= r < 632 for r in residues)
    assert max(residues) >= 632


@pytest.fixture(scope="module")
def encoder(tiny_build) -> PartSession:
    return part(tiny_build, "audio_encoder")


def test_the_encoder_gives_pytorchs_codes_at_every_length(encoder, codec):
    different = {}
    for samples in encoder_lengths():
        rng = torch.Generator().manual_seed(samples)
        waveform = 0.2 * torch.randn(1, 1, samples, generator=rng)
        found, expected = encoder.run(waveform=waveform)[0], codec.encode(waveform).numpy()
        assert found.shape == (1, 8, (samples + 841) // 960)
        if not np.array_equal(found, expected):
            different[samples] = float((found != expected).mean())
    assert not different


@pytest.mark.parametrize("samples", [1, 8, 64, 118])
def test_the_encoder_refuses_a_clip_that_the_reference_cannot_encode(samples, encoder):
    with pytest.raises(Exception, match="(?i)shape|invalid|dimension|negative|size|concat"):
        encoder.run(waveform=np.zeros((1, 1, samples)))


# The files.


def test_every_file_is_in_the_manifest_and_verifies(tiny_build, tiny_int4):
    for folder in (tiny_build, tiny_int4):
        manifest = Manifest.read(folder)
        recorded = manifest.files | {name: r for p in manifest.parts.values() for name, r in p.files.items()}
        assert {path.name for path in folder.iterdir()} == {*recorded, MANIFEST_NAME}
        verify_files(folder, recorded)


def test_the_manifest_says_what_the_checkpoint_says(tiny_build, tiny):
    manifest, config = Manifest.read(tiny_build), tiny.config
    assert set(manifest.parts) == set(COMPONENTS)
    for name, value in dataclasses.asdict(manifest.dims).items():
        assert value == getattr(config, name), name
    assert dataclasses.astuple(manifest.audio) == (8, 1026, 1024, 1024, 1025)
    assert dataclasses.astuple(manifest.codec) == (24000, 960, 24000, 10)
    assert (manifest.sampling.temperature, manifest.sampling.top_p, manifest.sampling.top_k) == (0.8, 0.8, 30)
    assert (manifest.target.device, manifest.target.precision) == ("cpu", "fp32")
    assert (manifest.recipe["rope_table"], manifest.recipe["rope_theta"]) == ("bf16", 1e6)
    assert Path(manifest.source.path) == TINY
    assert manifest.source.fingerprint == tiny.fingerprint()
    assert {"torch", "onnx", "onnxruntime-genai", "olive-ai", "voxport"} <= set(manifest.tools)


def test_token_ids_are_those_of_the_checkpoints_tokenizer(tiny_build):
    manifest = Manifest.read(tiny_build)
    ids = {t["content"]: t["id"] for t in json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]}
    for name in ("tts", "text", "audio", "ref_audio", "ref_text"):
        assert getattr(manifest.tokens, name) == ids[f"<|{name}|>"]
    assert manifest.control_tags | manifest.structural_tokens == ids


def shape_of(manifest: Manifest, name: str, tensor: str) -> list:
    specs = manifest.parts[name].inputs + manifest.parts[name].outputs
    return next(spec.shape for spec in specs if spec.name == tensor)


def test_dims_of_the_manifest_are_those_of_the_graphs(tiny_build):
    manifest = Manifest.read(tiny_build)
    dims, audio = manifest.dims, manifest.audio
    assert dims.num_heads * dims.head_dim != dims.hidden_size
    assert shape_of(manifest, DECODER, "inputs_embeds")[2] == dims.hidden_size
    assert shape_of(manifest, "text_embed", "inputs_embeds")[2] == dims.hidden_size
    assert shape_of(manifest, "audio_embed", "codes")[2] == audio.num_codebooks
    assert shape_of(manifest, "audio_heads", "logits")[2:] == [audio.num_codebooks, audio.vocab_size]
    assert shape_of(manifest, "audio_tokenizer", "codes")[:2] == [1, audio.num_codebooks]


def test_the_cache_has_the_shape_and_type_of_the_manifest(tiny_build, greedy_folders):
    manifest, folder = Manifest.read(tiny_build), greedy_folders["bf16"]
    dims, kv = manifest.dims, manifest.kv_cache
    names = [template.format(i) for i in range(dims.num_layers) for template in (kv.present_key, kv.present_value)]
    feeds = {"inputs_embeds": np.zeros((1, 5, dims.hidden_size)), "attention_mask": np.ones((1, 5)), **folder.empty_cache()}
    made = dict(zip(folder.outputs, folder.decoder.run(**feeds)))
    assert sorted(made) == sorted(["hidden_states", *names])
    for name in names:
        assert made[name].shape == (1, dims.num_kv_heads, 5, dims.head_dim)
        assert made[name].dtype == kv.dtype


@pytest.mark.parametrize("name", COMPONENTS)
def test_weights_lie_in_one_file_beside_the_graph(name, tiny_build, tiny_int4):
    for folder in (tiny_build, tiny_int4):
        for tensor in graph_of(folder, name).graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                assert ExternalDataInfo(tensor).location == f"{name}.onnx.data"
            else:
                assert tensor.ByteSize() < 1024
        assert (folder / f"{name}.onnx").stat().st_size < 1 << 18


def test_no_file_names_a_folder_of_the_build_machine(tiny_build):
    """But the manifest, which records where the checkpoint lay."""
    for path in (*tiny_build.glob("*.onnx"), tiny_build / "genai_config.json"):
        content = path.read_bytes()
        for place in (str(ROOT), str(tiny_build), str(tiny_build.parent)):
            assert place.encode() not in content, path.name


def test_a_folder_that_moved_runs(tiny_build, tmp_path, golden, monkeypatch):
    copied = shutil.copytree(tiny_build, tmp_path / "copied")
    moved = shutil.move(copied, tmp_path / "somewhere else")
    monkeypatch.chdir(tmp_path)
    embeds = golden.of("prompt_embeds", "zero_tags")[None]
    rows, _ = GreedyFolder(moved).speak(embeds, max_rows=10)
    assert rows.tolist() == golden.of("rows", "zero_tags", "bf16")[:10].tolist()


def test_rounded_matrices_are_made_as_the_manifest_says(tiny_int4):
    block = Manifest.read(tiny_int4).parts[DECODER].recipe["block"]
    nodes = [node for node in graph_of(tiny_int4, DECODER).graph.node if node.op_type == "MatMulNBits"]
    assert len(nodes) == 3 * 5  # qkv, o, gate, up, down in each layer
    for node in nodes:
        found = {a.name: a.i for a in node.attribute}
        assert {key: found[key] for key in ("bits", "block_size", "accuracy_level")} == {
            key: block[key] for key in ("bits", "block_size", "accuracy_level")
        }


@pytest.mark.parametrize("accuracy_level, block_size", [(1, 64), (4, 16)])
def test_another_rounding_recipe_reaches_the_graph(accuracy_level, block_size, tiny, tmp_path):
    from voxport.build import llm
    from voxport.build.quantise import BlockFormat

    form = BlockFormat(block_size=block_size, symmetric=False, accuracy_level=accuracy_level)
    llm.extract_qwen3(tiny, tmp_path / "qwen3", form)
    graph = llm.build_decoder(tmp_path / "qwen3", tmp_path / "out", tiny.config, "cpu", "int4", form, "bf16")
    nodes = [n for n in onnx.load(graph, load_external_data=False).graph.node if n.op_type == "MatMulNBits"]
    found = {(a.name, a.i) for node in nodes for a in node.attribute}
    assert {("accuracy_level", accuracy_level), ("block_size", block_size), ("bits", 4)} <= found
    weights = llm.StandaloneWeights(tmp_path / "qwen3", form)
    model = ref.Higgs(tiny.config, {**{n: tiny[n] for n in ref.body_shapes(tiny.config)}, **{n: weights[n] for n in weights}})
    check.check_decoder(graph, "int4", model)


def test_a_deep_int4_decoder_passes_its_check(tmp_path):
    """Int8 activations cost more at every layer; the check must tell that from a wrong decoder."""
    checkpoint = write_deep_checkpoint(tmp_path / "deep", layers=12)
    folder = build(checkpoint, tmp_path / "out", "--precision", "int4", "--components", DECODER)
    assert Manifest.read(folder).dims.num_layers == 12
    assert {path.name for path in folder.glob("*.onnx")} == {"llm_decoder.onnx"}


def test_tables_are_never_rounded(tiny_build, tiny_int4):
    """GatherBlockQuantized is wrong on CUDA for some widths, and eight rows a frame save nothing."""
    for folder in (tiny_build, tiny_int4):
        for name in COMPONENTS:
            assert "GatherBlockQuantized" not in {node.op_type for node in graph_of(folder, name).graph.node}


# Every part runs at every length.


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("batch", [1, 2])
def test_parts_with_a_batch_run_at_any_size(batch, length, tiny_build):
    rng = np.random.default_rng(length)
    ids, rows = rng.integers(576, size=(batch, length)), rng.integers(1026, size=(batch, length, 8))
    assert part(tiny_build, "text_embed").run(input_ids=ids)[0].shape == (batch, length, 128)
    assert part(tiny_build, "audio_embed").run(codes=rows)[0].shape == (batch, length, 128)
    hidden = rng.standard_normal((batch, length, 128))
    assert part(tiny_build, "audio_heads").run(hidden_states=hidden)[0].shape == (batch, length, 8, 1026)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_codec_runs_at_any_length(length, tiny_build):
    codes = np.random.default_rng(length).integers(1024, size=(1, 8, length))
    waveform = part(tiny_build, "audio_tokenizer").run(codes=codes)[0]
    assert waveform.shape == (1, 1, 960 * length)
    assert part(tiny_build, "audio_encoder").run(waveform=waveform)[0].shape == (1, 8, length)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_decoder_runs_at_any_length_and_in_a_batch(length, greedy_folders):
    folder = greedy_folders["bf16"]
    embeds = 0.1 * np.random.default_rng(length).standard_normal((2, length, 128)).astype(np.float32)
    empty = {name: np.zeros((2, 2, 0, 32)) for name in folder.empty_cache()}
    both = folder.decoder.run(inputs_embeds=embeds, attention_mask=np.ones((2, length)), **empty)[0]
    for one, alone in zip(both, embeds):
        np.testing.assert_allclose(one, decoder_states(folder.decoder, Checkpoint.open(TINY).config, alone), atol=2e-3)


def test_free_dimensions_stay_symbolic_in_the_manifest(tiny_build):
    manifest = Manifest.read(tiny_build)
    batched = {"text_embed": "input_ids", "audio_embed": "codes", "audio_heads": "hidden_states", DECODER: "inputs_embeds"}
    for name, tensor in batched.items():
        assert all(isinstance(d, str) for d in shape_of(manifest, name, tensor)[:2]), name
    for name, tensor in (("audio_tokenizer", "codes"), ("audio_encoder", "waveform")):
        assert isinstance(shape_of(manifest, name, tensor)[2], str)


def test_later_positions_never_change_earlier_ones(greedy_folders, tiny, golden):
    embeds = golden.of("prompt_embeds", "zero_plain").copy()
    before = decoder_states(greedy_folders["bf16"].decoder, tiny.config, embeds)
    embeds[-1] += 1
    after = decoder_states(greedy_folders["bf16"].decoder, tiny.config, embeds)
    np.testing.assert_allclose(after[:-1], before[:-1], atol=1e-4)
    assert np.abs(after[-1] - before[-1]).max() > 0.1


# What is made again, and what is not.


def rebuild(folder: Path, capsys, *flags: str, components: tuple[str, ...] = LIGHT) -> set[str]:
    """Build again into `folder` and return the parts that were made."""
    capsys.readouterr()
    build(TINY, folder, "--precision", "fp32", "--components", ",".join(components), *flags)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.split()[0] in COMPONENTS]
    assert len(lines) == len(components)
    return {line.split()[0] for line in lines if "up to date" not in line}


def test_a_second_run_makes_nothing(tiny_build, capsys):
    before = {path.name: path.stat().st_mtime_ns for path in tiny_build.glob("*.onnx*")}
    proof = Manifest.read(tiny_build).proof
    assert rebuild(tiny_build, capsys, components=COMPONENTS) == set()
    assert {path.name: path.stat().st_mtime_ns for path in tiny_build.glob("*.onnx*")} == before
    assert Manifest.read(tiny_build).proof == proof


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, 100)


@pytest.mark.parametrize("harm", [flip_a_byte, Path.unlink, truncate], ids=["flip", "delete", "truncate"])
def test_only_the_part_that_was_harmed_is_made_again(harm, scratch, capsys):
    before = (scratch / "audio_embed.onnx.data").read_bytes()
    harm(scratch / "audio_embed.onnx.data")
    assert rebuild(scratch, capsys) == {"audio_embed"}
    assert (scratch / "audio_embed.onnx.data").read_bytes() == before


@pytest.mark.parametrize("harm", [Path.unlink, truncate], ids=["delete", "truncate"])
def test_a_part_that_was_harmed_is_not_lost_by_building_another(harm, scratch, capsys):
    harm(scratch / "audio_embed.onnx.data")
    before = {path.name: path.read_bytes() for path in scratch.iterdir()}
    flags = ["--checkpoint", str(TINY), "--output", str(scratch), "--precision", "fp32", "--components", "text_embed"]
    assert run_script(optimize.main, flags) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "audio_embed are missing or cut" in said
    assert f"optimize.py --checkpoint {TINY} --output {scratch} --device cpu --precision fp32 --components text_embed,audio_embed" in said
    assert {path.name: path.read_bytes() for path in scratch.iterdir()} == before
    assert rebuild(scratch, capsys) == {"audio_embed"}


def test_a_part_that_is_harmed_meanwhile_is_not_lost_and_what_was_made_is_kept(scratch, monkeypatch, capsys):
    flip_a_byte(scratch / "text_embed.onnx.data")
    real = check.CHECKS["text_embed"]
    monkeypatch.setitem(check.CHECKS, "text_embed", lambda *args: (real(*args), (scratch / "audio_embed.onnx").unlink()))
    manifest = (scratch / MANIFEST_NAME).read_bytes()
    flags = ["--checkpoint", str(TINY), "--output", str(scratch), "--precision", "fp32", "--components"]
    assert run_script(optimize.main, [*flags, "text_embed"]) == 2
    assert "--components text_embed,audio_embed" in capsys.readouterr().err
    assert (scratch / MANIFEST_NAME).read_bytes() == manifest
    monkeypatch.undo()
    assert rebuild(scratch, capsys, components=("text_embed", "audio_embed")) == {"audio_embed"}
    assert set(Manifest.read(scratch).parts) == set(LIGHT)


def test_what_was_begun_holds_no_parts_of_a_build_that_is_gone(scratch, monkeypatch):
    flip_a_byte(scratch / "text_embed.onnx.data")
    (scratch / "audio_heads.onnx").unlink()
    monkeypatch.setitem(check.CHECKS, "audio_heads", lambda *_: (_ for _ in ()).throw(WorkError("off")))
    flags = ["--checkpoint", str(TINY), "--output", str(scratch), "--precision", "fp32", "--components"]
    assert run_script(optimize.main, [*flags, "text_embed,audio_heads"]) == 1
    for path in [path for path in scratch.iterdir() if path.is_file()]:
        path.unlink()
    assert run_script(optimize.main, [*flags, "text_embed"]) == 0
    assert set(Manifest.read(scratch).parts) == {"text_embed"}


def test_a_file_of_no_part_that_is_gone_is_dropped_with_a_warning(scratch, capsys):
    edit_json(scratch / MANIFEST_NAME, lambda m: m["files"].update({"extra.json": {"bytes": 2, "sha256": "0" * 64}}))
    capsys.readouterr()
    build(TINY, scratch, "--precision", "fp32", "--components", "text_embed")
    assert "warning: extra.json is missing or cut" in capsys.readouterr().err and "extra.json" not in Manifest.read(scratch).files


def test_a_partial_build_says_what_is_missing_and_a_whole_one_how_to_speak(scratch, tiny_build, capsys):
    rebuild(scratch, capsys)
    capsys.readouterr()
    build(TINY, scratch, "--precision", "fp32", "--components", "text_embed")
    said = capsys.readouterr().err.splitlines()[-1]
    command = f"python optimize.py --checkpoint {TINY} --output {scratch} --device cpu --precision fp32"
    assert said.endswith(f"it cannot speak yet; add what is missing with {command} --components llm_decoder,audio_tokenizer")
    build(TINY, tiny_build, "--precision", "fp32")
    assert capsys.readouterr().err.splitlines()[-1].endswith('--text "..." --out x.wav')


def test_a_build_that_lacks_only_what_cloning_takes_says_so(tiny_build):
    manifest = Manifest.read(tiny_build)
    without = dataclasses.replace(manifest, parts={name: part for name, part in manifest.parts.items() if name != "audio_encoder"})
    assert without.lacks() == []
    said = describe_result(tiny_build, without, COMPONENTS)
    assert f"--out x.wav; to clone voices: python optimize.py --checkpoint {TINY} --output {tiny_build}" in said
    assert said.endswith("--components audio_encoder")


def test_another_rope_table_makes_only_the_decoder_again(tiny_build, tiny_build_exact):
    rounded, exact = Manifest.read(tiny_build), Manifest.read(tiny_build_exact)
    differ = {name for name in COMPONENTS if rounded.parts[name] != exact.parts[name]}
    assert differ == {DECODER}
    assert (rounded.recipe["rope_table"], exact.recipe["rope_table"]) == ("bf16", "exact")


def test_parts_of_another_checkpoint_never_mix_with_a_build(scratch, tmp_path, capsys):
    edit_json(link_checkpoint(tmp_path / "other") / "config.json", lambda c: c["text_config"].update(rms_norm_eps=1e-5))
    before = {path.name: path.read_bytes() for path in scratch.iterdir()}
    flags = ["--precision", "fp32", "--components", "audio_embed"]
    assert run_script(optimize.main, ["--checkpoint", str(tmp_path / "other"), "--output", str(scratch), *flags]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert f"holds a build of the higgs checkpoint {TINY}; parts of {tmp_path / 'other'} cannot be added to it" in said
    assert {path.name: path.read_bytes() for path in scratch.iterdir()} == before


def test_a_part_that_fails_its_check_is_not_installed(scratch, monkeypatch, capsys):
    def refuse(*_):
        raise WorkError("audio_embed: output is off")

    flip_a_byte(scratch / "audio_embed.onnx.data")
    monkeypatch.setitem(check.CHECKS, "audio_embed", refuse)
    before = (scratch / "audio_embed.onnx.data").read_bytes()
    flags = ["--output", str(scratch), "--precision", "fp32", "--components", ",".join(LIGHT)]
    assert run_script(optimize.main, ["--checkpoint", str(TINY), *flags]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: audio_embed: output is off"
    assert (scratch / "audio_embed.onnx.data").read_bytes() == before
    monkeypatch.undo()
    assert rebuild(scratch, capsys) == {"audio_embed"}
    assert not (scratch / ".build").exists()


def test_a_build_that_was_cut_off_goes_on_where_it_stopped(tmp_path, capsys):
    folder = build(TINY, tmp_path / "half", "--precision", "fp32", "--components", "audio_embed,audio_heads")
    (folder / ".build" / "scratch").mkdir(parents=True)
    (folder / ".build" / "scratch" / "text_embed.onnx").write_bytes(b"half a graph")
    build(TINY, folder, "--precision", "fp32", "--components", "audio_embed,audio_heads,text_embed")
    assert set(Manifest.read(folder).parts) == {"audio_embed", "audio_heads", "text_embed"}
    assert not (folder / ".build").exists()
    said = capsys.readouterr().err
    assert said.count("up to date") == 2


def test_every_spelling_of_theta_builds_the_same_decoder(tiny_build, tmp_path):
    expected = Manifest.read(tiny_build).parts[DECODER].files
    for variant in VARIANTS:
        checkpoint = use_variant(link_checkpoint(tmp_path / variant), variant)
        folder = build(checkpoint, tmp_path / f"{variant}_onnx", "--precision", "fp32", "--components", DECODER)
        assert Manifest.read(folder).parts[DECODER].files == expected, variant


def test_another_theta_cannot_pass(tiny, tmp_path):
    """ModelBuilder reads theta from a config of its own; the tables are compared with the closed form."""
    from voxport.build import llm

    llm.extract_qwen3(tiny, tmp_path / "qwen3", None)
    config = dataclasses.replace(tiny.config, rope_theta=10_000.0)
    with pytest.raises(WorkError, match="does not belong to theta"):
        llm.build_decoder(tmp_path / "qwen3", tmp_path / "out", config, "cpu", "fp32", None, "bf16")


# Targets and options.


def test_fp16_on_the_cpu_is_refused_with_the_reason(tmp_path, capsys):
    code = run_script(optimize.main, ["--checkpoint", str(TINY), "--output", str(tmp_path / "out"), "--precision", "fp16"])
    assert code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: cpu with fp16")
    assert "--precision int4 or fp32" in said
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def cuda_builds(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("cuda")
    components = {"int4": NOT_CODEC, "fp16": NOT_CODEC, "fp32": DECODER}
    return {
        precision: build(TINY, root / precision, "--device", "cuda", "--precision", precision, "--components", names)
        for precision, names in components.items()
    }


@pytest.mark.parametrize("precision, cache", [("int4", "float16"), ("fp16", "float16"), ("fp32", "float32")])
def test_cuda_targets_build_without_a_gpu(precision, cache, cuda_builds):
    manifest = Manifest.read(cuda_builds[precision])
    assert (manifest.target.device, manifest.target.precision) == ("cuda", precision)
    assert manifest.kv_cache.dtype == cache
    inputs = {spec.name: spec.dtype for spec in manifest.parts[DECODER].inputs}
    assert inputs["past_key_values.0.key"] == inputs["inputs_embeds"] == cache


def test_half_precision_parts_stay_close_to_the_reference(cuda_builds, tiny, golden):
    embeds = golden.of("prompt_embeds", "zero_plain")
    found = decoder_states(part(cuda_builds["fp16"], DECODER), tiny.config, embeds)
    expected = ref.Higgs(tiny.config, tiny).hidden_states(torch.from_numpy(embeds)).numpy()
    assert cosine(found, expected).min() > 0.9999
    for name in ("text_embed", "audio_embed", "audio_heads"):
        assert Manifest.read(cuda_builds["fp16"]).parts[name].precision == "fp16"


def test_only_the_parts_asked_for_are_built(tmp_path):
    folder = build(TINY, tmp_path / "some", "--components", " audio_embed, audio_heads")
    assert set(Manifest.read(folder).parts) == {"audio_embed", "audio_heads"}
    assert {path.name for path in folder.glob("*.onnx")} == {"audio_embed.onnx", "audio_heads.onnx"}


@pytest.mark.parametrize("components", ["vocoder", "", ",", "audio_heads,vocoder"])
def test_an_unknown_part_is_refused_with_the_choices(components, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        optimize.main(["--checkpoint", str(TINY), "--output", str(tmp_path / "out"), "--components", components])
    assert stopped.value.code == 2
    assert "audio_tokenizer" in capsys.readouterr().err


def test_an_output_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "out").write_text("mine")
    assert run_script(optimize.main, ["--checkpoint", str(TINY), "--output", str(tmp_path / "out")]) == 2
    assert (tmp_path / "out").read_text() == "mine"


def test_widths_that_cannot_be_rounded_are_refused_before_the_work(tmp_path, capsys):
    checkpoint = write_checkpoint(tmp_path / "narrow", narrow_feed_forward(tiny_tensors(), 248))
    edit_json(checkpoint / "config.json", lambda c: c["text_config"].update(intermediate_size=248))
    assert run_script(optimize.main, ["--checkpoint", str(checkpoint), "--output", str(tmp_path / "out")]) == 2
    assert "248 cannot be rounded in blocks of 32" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def narrow_feed_forward(tensors: dict, width: int) -> dict:
    cut = {"gate_proj": lambda t: t[:width], "up_proj": lambda t: t[:width], "down_proj": lambda t: t[:, :width]}
    kinds = {name: next((k for k in cut if f"mlp.{k}" in name), None) for name in tensors}
    return {name: cut[kinds[name]](t).contiguous() if kinds[name] else t for name, t in tensors.items()}


def with_licence(folder: Path, text: str) -> Path:
    (folder / "LICENSE").write_text(text, encoding="utf-8")
    return folder


def test_the_licence_travels_with_the_weights_and_is_named_once(tmp_path, capsys):
    text = "\n  Research licence of the Voice Company\n\nYou may not sell it – or “lend” it.\n"
    checkpoint = with_licence(link_checkpoint(tmp_path / "licensed"), text)
    folder = build(checkpoint, tmp_path / "out", "--components", "audio_embed")
    assert (folder / "LICENSE").read_text(encoding="utf-8") == text
    licence = Manifest.read(folder).licence
    assert (licence.name, licence.file) == ("Research licence of the Voice Company", "LICENSE")
    assert "LICENSE" in Manifest.read(folder).files
    assert capsys.readouterr().err.count(licence.name) == 1


def test_a_checkpoint_without_licence_is_built_with_a_warning(tmp_path, capsys):
    folder = build(TINY, tmp_path / "out", "--components", "audio_embed")
    assert "warning: the checkpoint has no LICENSE file" in capsys.readouterr().err
    assert Manifest.read(folder).licence.file is None


def head_agreement(folder: Path, tiny: Checkpoint, hidden: np.ndarray) -> float:
    """Share of the eight choices of each row that the folder's head makes as the reference does."""
    logits = part(folder, "audio_heads").run(hidden_states=hidden[None])[0][0]
    expected = ref.audio_head(tiny[ref.AUDIO_EMBEDDING].float(), torch.from_numpy(hidden), 8).numpy()
    return float((logits.argmax(-1) == expected.argmax(-1)).mean())


@pytest.fixture(scope="module")
def rows_of_states(golden) -> np.ndarray:
    return np.concatenate([golden.of("hidden", case, "bf16") for case in CASES])


@pytest.mark.parametrize("precision, least, most", [("int4", 0.5, 0.95), ("int8", 0.95, 0.9999)])
def test_rounded_heads_are_an_option_that_costs_agreement(precision, least, most, tiny, tmp_path, rows_of_states):
    """The gate of a default is 0.999: neither passes it on random weights, which is why neither is the default."""
    folder = build(TINY, tmp_path / "out", "--heads-precision", precision, "--components", "audio_heads")
    assert Manifest.read(folder).parts["audio_heads"].precision == precision
    agreement = head_agreement(folder, tiny, rows_of_states)
    assert least < agreement < most


def test_heads_stay_unrounded_by_default(tiny_int4, tiny, rows_of_states, cuda_builds):
    assert Manifest.read(tiny_int4).parts["audio_heads"].precision == "fp32"
    assert Manifest.read(cuda_builds["int4"]).parts["audio_heads"].precision == "fp16"
    assert head_agreement(tiny_int4, tiny, rows_of_states) == 1.0


def test_text_embed_is_fp16_where_the_body_is_int4(tiny_int4, tiny_build):
    assert Manifest.read(tiny_int4).parts["text_embed"].precision == "fp16"
    assert Manifest.read(tiny_build).parts["text_embed"].precision == "fp32"
    for folder in (tiny_int4, tiny_build):
        for name in ("audio_tokenizer", "audio_encoder"):
            assert Manifest.read(folder).parts[name].precision == "fp32"


def test_an_untied_head_is_built_from_its_own_weights(tmp_path, rows_of_states):
    head, checkpoint = own_head(), untie(copy_configs(tmp_path / "untied"))
    write_shards(checkpoint, split(tiny_tensors() | {ref.AUDIO_HEAD: head}, 2))
    folder = build(checkpoint, tmp_path / "out", "--precision", "fp32", "--components", "audio_heads,audio_embed")
    logits = part(folder, "audio_heads").run(hidden_states=rows_of_states[None, :5])[0]
    expected = ref.audio_head(head.float(), torch.from_numpy(rows_of_states[:5]), 8)
    np.testing.assert_allclose(logits[0], expected, atol=1e-3, rtol=1e-4)


def test_a_lent_codec_is_built_and_not_left_to_the_next_build(tiny_build, tmp_path):
    without = {n: t for n, t in tiny_tensors().items() if not n.startswith(ref.CODEC_PREFIX)}
    bare = write_checkpoint(tmp_path / "bare", without)
    folder = build(bare, tmp_path / "out", "--codec-from", str(TINY), "--components", "audio_tokenizer,audio_heads")
    expected, found = (Manifest.read(f).parts["audio_tokenizer"].files for f in (tiny_build, folder))
    assert found == expected
    flags = ["--output", str(tmp_path / "out"), "--components", "audio_tokenizer"]
    assert run_script(optimize.main, ["--checkpoint", str(bare), *flags]) == 2


def test_an_old_tokenizer_builds_for_cloning_by_sound_alone(tmp_path):
    checkpoint = link_checkpoint(tmp_path / "old")
    edit_json(checkpoint / "tokenizer.json", drop_token("<|ref_text|>"))
    folder = build(checkpoint, tmp_path / "out", "--components", "audio_embed")
    assert Manifest.read(folder).tokens.ref_text is None


def test_an_extraction_is_kept_and_used_again_only_if_it_fits(tmp_path, capsys):
    flags = ["--checkpoint", str(TINY), "--output", str(tmp_path / "out"), "--components", DECODER]
    assert run_script(optimize.main, [*flags, "--skip-extract"]) == 2
    assert "holds no finished extraction" in capsys.readouterr().err
    assert run_script(optimize.main, [*flags, "--keep-intermediate"]) == 0
    shutil.rmtree(tmp_path / "out" / ".build" / "staging", ignore_errors=True)
    (tmp_path / "out" / "llm_decoder.onnx").unlink()
    assert run_script(optimize.main, [*flags, "--skip-extract", "--keep-intermediate"]) == 0
    assert run_script(optimize.main, [*flags, "--skip-extract", "--precision", "fp32"]) == 2
    assert "another checkpoint or recipe" in capsys.readouterr().err


# The command line, and what it does behind one's back.

WATCHED = """
import socket, sys
attempts = []
def watch(name):
    real = getattr(socket.socket, name)
    def connect(self, address):
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            attempts.append(address)
            raise OSError("no network in this test")
        return real(self, address)
    setattr(socket.socket, name, connect)
watch("connect"), watch("connect_ex")
resolve = socket.getaddrinfo
socket.getaddrinfo = lambda host, *rest, **named: attempts.append(host) or resolve(host, *rest, **named)
import optimize
assert optimize.main(sys.argv[1:]) == 0
import time; time.sleep(0.5)
from olive.telemetry.telemetry import Telemetry
from opentelemetry._logs import _internal
import logging
reports = lambda logger: any("opentelemetry" in type(h).__module__ for h in getattr(logger, "handlers", []))
loggers = [name for name, logger in logging.Logger.manager.loggerDict.items() if reports(logger)]
print(attempts, _internal._LOGGER_PROVIDER, getattr(Telemetry._instance, "_logger", None), loggers)
"""


@pytest.fixture(scope="module")
def watched_run(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    """A build in a process of its own, in which every attempt to reach another machine is noted."""
    out = tmp_path_factory.mktemp("watched") / "out"
    env = {key: value for key, value in os.environ.items() if key not in ("CI", "GITHUB_ACTIONS", "TF_BUILD")}
    arguments = ["--checkpoint", str(TINY), "--output", str(out), "--components", "audio_heads", "--json"]
    done = subprocess.run([sys.executable, "-c", WATCHED, *arguments], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out, done


def test_nothing_is_reported_to_anyone(watched_run):
    assert watched_run[1].stdout.splitlines()[1:] == ["[] None None []"]


def test_one_object_goes_to_stdout_and_the_rest_to_stderr(watched_run):
    out, done = watched_run
    said = json.loads(done.stdout.splitlines()[0])
    assert said["output"] == str(out)
    assert said["bytes"] == {"audio_heads": sum((out / f"audio_heads.onnx{s}").stat().st_size for s in ("", ".data"))}
    assert said["seconds"]["audio_heads"] > 0
    assert "licence of the weights" in done.stderr
    assert "Traceback" not in done.stderr


def test_onnx_runtime_loads_every_part_without_complaint(tiny_build, tiny_int4):
    options = ort.SessionOptions()
    options.log_severity_level = 3
    for folder in (tiny_build, tiny_int4):
        for name in COMPONENTS:
            ort.InferenceSession(str(folder / f"{name}.onnx"), options, providers=["CPUExecutionProvider"])
