"""A build goes into a folder of its own, and what is asked of files is done or refused."""

import dataclasses
import json
import shlex
import shutil
from pathlib import Path

import pytest
from checkpoints import edit_json, link_checkpoint
from conftest import TINY, build
from omnifish_builds import LOCAL, built, checkpoint

import inference
import optimize
from voxport.build import check
from voxport.build.omnifish_checkpoint import OmniFishCheckpoint
from voxport.build.omnifish_parts import part_names
from voxport.build.place import check_place, check_source, describe_change
from voxport.build.recipes import DEFAULT_RECIPE
from voxport.errors import UserError, WorkError, run_script
from voxport.manifest import HIGGS, MANIFEST_NAME, Manifest
from voxport.manifest_omnifish import CHAIN, MTP_LAYERS
from voxport.run.audio import Form
from voxport.run.cli import find_build


@pytest.mark.parametrize("name", ["LICENSE", "tokenizer.json", "mine.onnx"])
def test_files_that_no_build_made_are_never_replaced(name, tmp_path, monkeypatch, capsys):
    (tmp_path / name).write_text("mine", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for output in (".", str(tmp_path)):
        assert run_script(optimize.main, ["--checkpoint", str(TINY), "--output", output]) == 2
        assert f"holds {name}, which a build would replace" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text(encoding="utf-8") == "mine"


def test_a_build_never_goes_into_its_own_checkpoint(tmp_path):
    folder = shutil.copytree(TINY, tmp_path / "checkpoint")
    with pytest.raises(UserError, match="is the folder of the checkpoint"):
        check_place(folder, folder)


def test_a_build_and_an_empty_folder_are_places(tmp_path):
    check_place(tmp_path, TINY)
    check_place(tmp_path / "new", TINY)
    (tmp_path / MANIFEST_NAME).write_text('{"schema_version": 0, "family": "an older one"}', encoding="utf-8")
    (tmp_path / "LICENSE").write_text("its own", encoding="utf-8")
    check_place(tmp_path, TINY)


@pytest.mark.parametrize("mine", [".build/debug/app", ".build", "manifest.json", ".out.aside/notes", ".out.aside"])
def test_names_that_a_build_uses_are_not_taken_from_the_user(mine, tmp_path, capsys):
    output = tmp_path / "out"
    path = tmp_path / mine if mine.startswith(".out") else output / mine
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"name": "web app"}', encoding="utf-8")
    for flags in ([], ["--plan"]):
        assert run_script(optimize.main, ["--checkpoint", str(TINY), "--output", str(output), "--components", "audio_embed", *flags]) == 2
        said = capsys.readouterr().err
        assert mine.split("/")[0] in said and "a folder" in said and said.count("\n") == 1
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path] and path.read_text(encoding="utf-8") == '{"name": "web app"}'


def test_the_users_own_scratch_in_a_build_and_folder_beside_it_are_not_taken(tiny_build, tmp_path):
    output = shutil.copytree(tiny_build, tmp_path / "out")
    (tmp_path / ".out.aside").mkdir()
    with pytest.raises(UserError, match=r"\.out\.aside is no build"):
        check_place(output, TINY)
    shutil.copy2(output / MANIFEST_NAME, tmp_path / ".out.aside")
    check_place(output, TINY)
    (output / ".build" / "checkouts").mkdir(parents=True)
    with pytest.raises(UserError, match=r"holds \.build, which"):
        check_place(output, TINY)


def test_a_manifest_that_was_cut_is_a_builds_only_beside_what_a_build_leaves(tmp_path):
    (tmp_path / MANIFEST_NAME).write_text('{"schema_version": 1, "fam', encoding="utf-8")
    with pytest.raises(UserError, match="holds manifest.json"):
        check_place(tmp_path, TINY)
    (tmp_path / ".build" / "next").mkdir(parents=True)
    check_place(tmp_path, TINY)
    shutil.rmtree(tmp_path / ".build")
    (tmp_path / "audio_embed.onnx").write_bytes(b"")
    check_place(tmp_path, TINY)


def test_only_a_build_whose_files_were_moving_in_may_lack_its_manifest(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    (tmp_path / ".build" / "next").mkdir(parents=True)
    with pytest.raises(UserError, match="holds tokenizer.json"):
        check_place(tmp_path, TINY)
    (tmp_path / ".build" / "next").rename(tmp_path / ".build" / "arriving")
    check_place(tmp_path, TINY)


@pytest.mark.parametrize("output, said", [("/", "is the top of a disk"), ("/tmp/..", "is the top of a disk"), ("", "the name is empty")])
def test_a_place_that_is_no_folder_of_its_own_is_refused_in_one_line(output, said, capsys):
    assert run_script(optimize.main, ["--checkpoint", str(TINY), "--output", output, "--components", "audio_embed"]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.mark.parametrize("flags", [["--sample-rate", "8000"], ["--encoding", "float"]])
def test_a_stream_refuses_what_it_would_ignore(flags, tiny_build, tmp_path, capsys):
    arguments = ["--model-path", str(tiny_build), "--text", "Hi", "--stream", str(tmp_path / "s.wav"), *flags]
    assert run_script(inference.main, arguments) == 2
    assert "are for --out" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_rate_of_zero_is_no_rate(tmp_path):
    with pytest.raises(UserError, match="cannot hold 0 Hz"):
        Form(rate=0).check(tmp_path / "x.wav", 24000)


@pytest.fixture
def other_build(tmp_path):
    """A build of the demo, in name: the manifest alone, with files that it does not list."""
    manifest = json.loads((build(TINY, tmp_path / "out", "--components", "audio_embed") / MANIFEST_NAME).read_text(encoding="utf-8"))
    manifest["source"] |= {"id": "demo", "fingerprint": "another"}
    (tmp_path / "out" / MANIFEST_NAME).write_text(json.dumps(manifest), encoding="utf-8")
    return tmp_path / "out"


def test_parts_of_another_family_are_refused_before_the_work(other_build, monkeypatch, capsys):
    monkeypatch.setattr(OmniFishCheckpoint, "check_finite", lambda self: pytest.fail("the weights were read"))
    flags = ["--checkpoint", str(LOCAL / "axial_px"), "--codec", str(LOCAL / "codec"), "--output", str(other_build)]
    before = sorted(path.name for path in other_build.rglob("*"))
    for plan in ([], ["--plan"]):
        assert run_script(optimize.main, [*flags, "--components", "audio_embed", *plan]) == 2
        said = capsys.readouterr().err
        assert f"holds a build of the higgs checkpoint demo; parts of {LOCAL / 'axial_px'} cannot be added" in said and said.count("\n") == 1
    assert run_script(optimize.main, [*flags, "--plan"]) == 0
    assert sorted(path.name for path in other_build.rglob("*")) == before


def test_a_checkpoint_that_has_changed_since_is_said_to_be_the_same_one(other_build):
    with pytest.raises(UserError, match="higgs checkpoint demo as its files were then; parts of demo cannot be added"):
        check_source(other_build, "demo", "now", whole=False)
    check_source(other_build, "demo", "now", whole=True)
    check_source(other_build, "demo", "another", whole=False)
    check_source(other_build.parent / "new", "demo", "now", whole=False)


def test_what_was_only_begun_of_another_checkpoint_gives_way(tmp_path, monkeypatch):
    other = link_checkpoint(tmp_path / "other")
    edit_json(other / "config.json", lambda c: c["text_config"].update(rms_norm_eps=1e-5))
    monkeypatch.setitem(check.CHECKS, "audio_heads", lambda *_: (_ for _ in ()).throw(WorkError("off")))
    flags = ["--output", str(tmp_path / "out"), "--components", "audio_embed,audio_heads"]
    assert run_script(optimize.main, ["--checkpoint", str(other), *flags]) == 1
    assert (tmp_path / "out" / ".build" / "next" / "audio_embed.onnx").exists()
    monkeypatch.undo()
    assert run_script(optimize.main, ["--checkpoint", str(TINY), *flags]) == 0
    assert Manifest.read(tmp_path / "out").source.id == str(TINY)


def test_the_same_checkpoint_is_built_another_way_and_what_changes_is_said(tmp_path, capsys):
    folder, said = tmp_path / "out", lambda: [line for line in capsys.readouterr().err.splitlines() if f"the build in {tmp_path}" in line]
    rest = "; parts that were not asked for stay as they are"
    build(TINY, folder, "--components", "audio_embed")
    assert said() == []
    build(TINY, folder, "--components", "audio_embed", "--recipe", "rtn-64", "--rope-table", "exact")
    change = f"recipe rtn-64 in place of {DEFAULT_RECIPE}, rope table exact in place of bf16"
    assert said() == [f"changes the build in {folder}: {change}{rest}"]
    build(TINY, folder, "--components", "audio_embed", "--precision", "fp32", "--device", "cuda", "--rope-table", "exact")
    assert said() == [f"changes the build in {folder}: device cuda in place of cpu, precision fp32 in place of int4{rest}"]
    (folder / MANIFEST_NAME).write_text("{", encoding="utf-8")
    build(TINY, folder, "--components", "audio_embed")
    assert said() == [f"replaces the build in {folder}, which cannot be read"]


def make_some(folder: Path, components: str, *flags: str) -> int:
    return run_script(optimize.main, ["--checkpoint", str(TINY), "--output", str(folder), "--components", components, *flags])


def test_parts_of_another_target_are_not_mixed_into_a_build(tiny_int4, tmp_path, capsys):
    folder = shutil.copytree(tiny_int4, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for flags, wanted, back in (
        (["--precision", "fp32"], "cpu_fp32", "--precision int4"),
        (["--device", "cuda"], "cuda_int4", "--device cpu"),
        (["--device", "cuda", "--precision", "fp16"], "cuda_fp16", "--device cpu --precision int4"),
    ):
        assert make_some(folder, "audio_heads", *flags) == 2
        said = capsys.readouterr().err
        assert f"holds a cpu_int4 build; parts of {wanted} cannot be mixed in" in said and f"or build with {back}" in said
        assert said.count("\n") == 1
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert make_some(folder, "audio_heads", "--precision", "int4") == 0


@pytest.mark.parametrize(
    "setting, governed, back",
    [
        (["--recipe", "rtn-64"], "llm_decoder", f"or build with --recipe {DEFAULT_RECIPE}"),
        (["--rope-table", "exact"], "llm_decoder", "or build with --rope-table bf16"),
        (["--heads-precision", "int8"], "audio_heads", "or build with no --heads-precision"),
    ],
)
def test_a_setting_is_changed_only_together_with_the_part_that_it_governs(setting, governed, back, tiny_int4, tmp_path, capsys):
    folder = shutil.copytree(tiny_int4, tmp_path / "out")
    assert make_some(folder, "audio_embed", *setting) == 2
    said = capsys.readouterr().err
    assert f"holds {governed} made another way" in said and f"add {governed} to --components" in said and said.endswith(f"{back}\n")
    assert make_some(folder, f"audio_embed,{governed}", *setting) == 0
    assert make_some(folder, "audio_embed") == 2
    assert f"or build with {' '.join(setting)}" in capsys.readouterr().err
    assert make_some(folder, "audio_embed", *setting) == 0


def test_what_was_begun_another_way_does_not_serve_on(tmp_path, monkeypatch):
    monkeypatch.setitem(check.CHECKS, "audio_heads", lambda *_: (_ for _ in ()).throw(WorkError("off")))
    assert make_some(tmp_path / "out", "audio_embed,audio_heads", "--device", "cuda", "--precision", "fp16") == 1
    assert (tmp_path / "out" / ".build" / "next" / "audio_embed.onnx").exists()
    assert make_some(tmp_path / "out", "text_embed", "--precision", "fp32") == 0
    assert set(Manifest.read(tmp_path / "out").parts) == {"text_embed"}


def test_a_whole_build_replaces_the_one_in_place(tiny_build):
    manifest = Manifest.read(tiny_build)
    same = lambda **changes: describe_change(tiny_build, str(TINY), manifest.source.fingerprint, manifest.recipe | changes)
    assert same() is None and same(heads="int8") == f"replaces the build in {tiny_build}: heads int8 in place of default"
    assert describe_change(tiny_build, "x", "other", manifest.recipe) == f"replaces the build in {tiny_build}: x in place of the higgs checkpoint {TINY}"
    then = f"{TINY} in place of the higgs checkpoint {TINY} as its files were then"
    assert describe_change(tiny_build, str(TINY), "other", manifest.recipe) == f"replaces the build in {tiny_build}: {then}"


def test_a_build_that_cannot_speak_is_not_chosen_for_it(tiny_build, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    manifest = json.loads((tiny_build / MANIFEST_NAME).read_text(encoding="utf-8"))

    def place(name, *without):
        (tmp_path / "onnx" / name).mkdir(parents=True)
        kept = {part: value for part, value in manifest["parts"].items() if part not in without}
        (tmp_path / "onnx" / name / MANIFEST_NAME).write_text(json.dumps(manifest | {"parts": kept}), encoding="utf-8")

    with pytest.raises(UserError, match="no build under .*onnx; make one with optimize.py"):
        find_build(None)
    place("partial", "llm_decoder", "audio_encoder")
    command = f"python optimize.py --checkpoint {TINY} --output onnx/partial .* --components llm_decoder"
    with pytest.raises(UserError, match=f"onnx/partial lacks llm_decoder; add what is missing with {command}, or"):
        find_build(None)
    place("whole", "audio_encoder")  # speaking does not take it
    assert find_build(None) == Path("onnx/whole") and find_build("onnx/partial") == Path("onnx/partial")
    place("other")
    with pytest.raises(UserError, match="several builds.*: onnx/other, onnx/whole$"):
        find_build(None)


def test_what_is_missing_is_added_by_the_command_as_it_is_printed(tmp_path, capsys):
    folder = tmp_path / "my builds"
    chosen = ["--recipe", "rtn-64", "--heads-precision", "int8", "--rope-table", "exact"]
    assert make_some(folder, "audio_embed", *chosen) == 0
    said = capsys.readouterr().err.splitlines()[-1]
    python, script, *arguments = shlex.split(said.partition("add what is missing with ")[2])
    assert (python, script) == ("python", "optimize.py") and run_script(optimize.main, arguments) == 0
    made = Manifest.read(folder)
    assert made.lacks() == []
    assert (made.recipe["rounding"], made.recipe["heads"], made.recipe["rope_table"]) == ("rtn-64", "int8", "exact")
    *_, command = capsys.readouterr().err.splitlines()[-1].partition("; to clone voices: ")
    assert shlex.split(command) == ["python", "optimize.py", *arguments[:-1], "audio_encoder"]


def test_the_command_for_a_part_asks_for_what_the_build_was_made_of():
    manifest = Manifest.read(built("axial_px"))
    asked = optimize.parser().parse_args(shlex.split(manifest.rebuild_command("out", ["semantic_head"]))[2:])
    made = manifest.generation
    assert (asked.checkpoint, asked.output, asked.components) == (manifest.source.id, Path("out"), ("semantic_head",))
    assert (asked.block_size, asked.context_mode, asked.steps) == (made.block_size, made.context_mode, made.steps)
    assert (str(asked.codec), asked.attention, asked.precision) == (manifest.codec_path, None, "fp32")
    explicit = dataclasses.replace(manifest, attention="explicit")
    assert "--attention explicit" in explicit.rebuild_command("out", ["llm_decoder"])


def test_speaking_takes_the_parts_of_the_residual_decoder_that_is_there():
    manifest = Manifest.read(built("axial_px"))
    assert manifest.lacks() == []
    without = dataclasses.replace(manifest, parts={})
    assert set(without.lacks()) == {*part_names(checkpoint("axial_px"))} - {"mtp_prime", "codec_encoder"}
    chain = dataclasses.replace(without, residual=dataclasses.replace(manifest.residual, kind=CHAIN))
    assert set(chain.lacks()) == set(without.lacks()) - {"mtp_step"} | set(MTP_LAYERS)
