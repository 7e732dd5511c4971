"""_build_text_embed.py: the same part as Olive's, without Olive, put in place whole."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import edit_json, link_checkpoint, tiny_tensors, write_checkpoint
from conftest import TINY, build, run_cli

import _build_text_embed as script
from _ref.higgs import CODEC_PREFIX, TEXT_EMBEDDING
from voxport.build.check import PartSession
from voxport.build.checkpoint import Checkpoint
from voxport.build.lookup import table_rows, write_lookup
from voxport.errors import WorkError, run_script
from voxport.manifest import MANIFEST_NAME, Manifest, verify_files

IDS = np.arange(576).reshape(2, 288)


def embeddings(folder: Path) -> np.ndarray:
    return PartSession(folder / "text_embed.onnx").run(input_ids=IDS)[0]


@pytest.fixture(scope="module")
def light_build(tmp_path_factory) -> Path:
    """A build of two small parts."""
    return build(TINY, tmp_path_factory.mktemp("light") / "out", "--precision", "fp32", "--components", "text_embed,audio_embed")


@pytest.fixture
def scratch(light_build, tmp_path) -> Path:
    return shutil.copytree(light_build, tmp_path / "scratch")


@pytest.mark.parametrize("whole_build", ["tiny_build", "tiny_int4"])
def test_the_rebuilt_part_is_olives_and_the_manifest_stays_true(whole_build, request, tmp_path):
    scratch = shutil.copytree(request.getfixturevalue(whole_build), tmp_path / "scratch")
    before, manifest = embeddings(scratch), Manifest.read(scratch)
    (scratch / "text_embed.onnx.data").write_bytes(b"broken")
    assert script.main([str(scratch)]) == 0
    after = Manifest.read(scratch)
    np.testing.assert_array_equal(embeddings(scratch), before)
    verify_files(scratch, after.parts["text_embed"].files)
    for field in ("graph", "precision", "inputs", "outputs", "recipe"):
        assert getattr(after.parts["text_embed"], field) == getattr(manifest.parts["text_embed"], field), field
    for name in set(manifest.parts) - {"text_embed"}:
        assert after.parts[name] == manifest.parts[name]
    assert after.proof == manifest.proof
    assert not (scratch / ".build").exists()


def test_optimize_takes_the_rebuilt_part_for_current(scratch, capsys):
    script.main([str(scratch)])
    capsys.readouterr()
    build(TINY, scratch, "--precision", "fp32", "--components", "text_embed,audio_embed")
    assert capsys.readouterr().err.count("up to date") == 2


def test_a_part_that_was_never_built_is_added_in_the_targets_precision(tmp_path):
    folder = build(TINY, tmp_path / "out", "--precision", "int4", "--components", "audio_embed")
    assert script.main([str(folder)]) == 0
    assert Manifest.read(folder).parts["text_embed"].precision == "fp16"


def test_olive_is_not_imported(scratch, tmp_path):
    (tmp_path / "block").mkdir()
    for name in ("olive", "onnxruntime_genai", "transformers"):
        (tmp_path / "block" / f"{name}.py").write_text("raise ImportError('blocked by the test')")
    done = run_cli("_build_text_embed.py", scratch, env={"PYTHONPATH": str(tmp_path / "block")})
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("text_embed")


def refusal(capsys, *arguments) -> str:
    assert run_script(script.main, [str(a) for a in arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said


def test_a_folder_without_manifest_is_refused(tmp_path, capsys):
    assert "holds no manifest.json" in refusal(capsys, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_is_gone_is_asked_for(scratch, tmp_path, capsys):
    edit_json(scratch / MANIFEST_NAME, lambda m: m["source"].update(path=str(tmp_path / "gone")))
    assert "--checkpoint" in refusal(capsys, scratch)
    assert script.main([str(scratch), "--checkpoint", str(TINY)]) == 0


def test_another_checkpoint_is_refused(scratch, tmp_path, capsys):
    other = link_checkpoint(tmp_path / "other")
    edit_json(other / "config.json", lambda c: c["text_config"].update(rms_norm_eps=1e-5))
    before = (scratch / "text_embed.onnx.data").read_bytes()
    assert "is not the checkpoint" in refusal(capsys, scratch, "--checkpoint", other)
    assert (scratch / "text_embed.onnx.data").read_bytes() == before


def test_another_family_is_refused(scratch, capsys):
    edit_json(scratch / MANIFEST_NAME, lambda m: m.update(family="another_family"))
    assert "another_family" in refusal(capsys, scratch)


def test_a_checkpoint_with_a_lent_codec_is_read_the_same_way(tmp_path, capsys):
    without = {n: t for n, t in tiny_tensors().items() if not n.startswith(CODEC_PREFIX)}
    bare = write_checkpoint(tmp_path / "bare", without)
    folder = build(bare, tmp_path / "out", "--codec-from", str(TINY), "--components", "audio_embed")
    capsys.readouterr()
    assert "--codec-from" in refusal(capsys, folder)
    assert script.main([str(folder), "--codec-from", str(TINY)]) == 0


def test_a_part_that_fails_its_check_leaves_the_old_one(scratch, monkeypatch, capsys):
    def refuse(*_):
        raise WorkError("text_embed: output is off")

    monkeypatch.setitem(script.CHECKS, "text_embed", refuse)
    before = {path.name: path.read_bytes() for path in scratch.iterdir()}
    assert run_script(script.main, [str(scratch)]) == 1
    assert {path.name: path.read_bytes() for path in scratch.iterdir()} == before


@pytest.mark.parametrize(
    "name, remedy", [("audio_embed.onnx.data", "--components text_embed,audio_embed"), ("tokenizer.json", "build it again")]
)
def test_a_file_that_is_gone_beside_it_is_not_dropped_from_the_manifest(name, remedy, scratch, capsys):
    (scratch / name).unlink()
    before = {path.name: path.read_bytes() for path in scratch.iterdir()}
    said = refusal(capsys, scratch)
    assert name.removesuffix(".onnx.data") in said and remedy in said
    assert {path.name: path.read_bytes() for path in scratch.iterdir()} == before


def test_the_users_own_scratch_folder_is_not_taken(scratch, capsys):
    mine = scratch / ".build" / "debug" / "app"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine", encoding="utf-8")
    assert f"{scratch} holds .build, which a build would replace" in refusal(capsys, scratch)
    assert mine.read_text(encoding="utf-8") == "mine"
    shutil.rmtree(scratch / ".build")


def test_an_extraction_that_is_kept_there_stays(scratch):
    kept = scratch / ".build" / "qwen3_standalone" / "config.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    script.main([str(scratch)])
    assert kept.is_file()


@pytest.mark.parametrize("chunk_rows", [1, 100, 576, 4096])
def test_a_table_in_chunks_is_the_table(chunk_rows, tmp_path):
    checkpoint = Checkpoint.open(TINY)
    path, table = checkpoint.files[TEXT_EMBEDDING], checkpoint[TEXT_EMBEDDING]
    chunks = list(table_rows(path, TEXT_EMBEDDING, chunk_rows))
    assert max(len(chunk) for chunk in chunks) <= chunk_rows
    assert torch.equal(torch.cat(chunks), table)
    graph = write_lookup(tmp_path / "t.onnx", tuple(table.shape), iter(chunks), "fp32")
    np.testing.assert_array_equal(PartSession(graph).run(input_ids=IDS)[0], table.float()[IDS])
