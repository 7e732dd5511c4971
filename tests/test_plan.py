"""The plan: what a build needs is known before it starts, and one that cannot fit is refused with the way out."""

import os
from pathlib import Path

import pytest
from checkpoints import edit_json, link_checkpoint
from conftest import TINY, build, run_cli

import optimize
from voxport.build import plan
from voxport.build.checkpoint import Checkpoint
from voxport.build.higgs import COMPONENTS
from voxport.build.plan import PROOF, Machine, Need, Plan, make_plan, needs, proof_need
from voxport.build.recipes import DEFAULT_RECIPE, RECIPES, Recipe
from voxport.errors import UserError, run_script
from voxport.manifest import Manifest

GB = 1e9


@pytest.fixture(scope="module")
def tiny() -> Checkpoint:
    return Checkpoint.open(TINY)


@pytest.fixture(scope="module")
def published(tmp_path_factory, tiny) -> Checkpoint:
    """A checkpoint of the published dims, of which only the header is there."""
    import dataclasses

    sizes = {"hidden_size": 2560, "intermediate_size": 9728, "num_layers": 36, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128,
             "text_vocab_size": 151936}  # fmt: skip
    from _ref.higgs_codec import CodecConfig
    from voxport.build.checkpoint import BUNDLED_CODEC_CONFIG

    codec = CodecConfig.from_file(BUNDLED_CODEC_CONFIG)
    return dataclasses.replace(tiny, config=dataclasses.replace(tiny.config, **sizes), codec_config=codec)


def test_the_published_size_stays_within_the_promised_memory(published):
    found = needs(published, Recipe("cpu", "int4"))
    assert set(found) == set(COMPONENTS)
    assert all(found[name].memory <= 3 * GB for name in ("llm_decoder", "text_embed"))
    assert all(found[name].memory <= 5 * GB for name in ("audio_tokenizer", "audio_encoder"))
    assert needs(published, Recipe("cuda", "fp16"))["llm_decoder"].memory <= 5 * GB
    for recipe in (Recipe("cpu", "int4"), Recipe("cuda", "fp16")):
        assert 2.5 * GB <= proof_need(needs(published, recipe)["llm_decoder"], recipe).memory <= 4 * GB


def test_the_size_of_results_is_foretold_to_a_few_per_cent(published):
    found = needs(published, Recipe("cpu", "int4"))
    assert found["llm_decoder"].result == pytest.approx(2.33 * GB, rel=0.03)  # 3.63 G weights in 20.5 bytes for 32 of them
    assert found["text_embed"].result == pytest.approx(2 * 151936 * 2560, rel=0.01)
    assert needs(published, Recipe("cuda", "fp16"))["llm_decoder"].result == pytest.approx(7.27 * GB, rel=0.01)
    assert needs(published, Recipe("cpu", "int4", rounding="rtn-128"))["llm_decoder"].result < 0.9 * found["llm_decoder"].result
    assert needs(published, Recipe("cpu", "int4", rounding="rtn8-32"))["llm_decoder"].result > 1.6 * found["llm_decoder"].result


@pytest.fixture
def little(monkeypatch):
    """Let the machine have as little memory or disk as asked."""

    def have(memory: float = 64 * GB, disk: float = 1000 * GB) -> None:
        monkeypatch.setattr(plan, "available_memory", lambda: memory)
        monkeypatch.setattr(plan, "free_disk", lambda path: disk)

    return have


def refusal(capsys, *flags: str) -> str:
    assert run_script(optimize.main, ["--checkpoint", str(TINY), *flags]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said


def test_too_little_memory_is_refused_before_anything_is_written(little, tmp_path, capsys):
    little(memory=0.1 * GB)
    said = refusal(capsys, "--output", str(tmp_path / "out"))
    assert "of memory" in said
    assert "100 MB is available" in said
    assert "copy the folder" in said
    assert not (tmp_path / "out").exists()


def test_too_little_disk_is_refused_with_the_flag_that_helps(little, tmp_path, capsys):
    little(disk=1_000_000)
    said = refusal(capsys, "--output", str(tmp_path / "out"))
    assert "of disk" in said
    assert "--output" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "need, has, said",
    [
        (104e6, 98e6, "104 MB of memory, 98 MB is available"), (1e9, 999_999_999, "1.0 GB of memory, 999 MB is available"),
        (9.32e9, 9.31e9, "9.4 GB of memory, 9.3 GB is available"), (5_000_001, 5e6, "6 MB of memory, 5 MB is available"),
    ],
)  # fmt: skip
def test_what_is_needed_and_what_is_there_are_seen_to_differ(need, has, said):
    with pytest.raises(UserError, match=f"needs {said}"):
        Plan({"a": Need(need, 0, 0)}, Machine(has, 1e12), {}, Path("out")).require()
    with pytest.raises(UserError, match=f"needs {said.replace('memory', 'disk').replace('available', 'free')}"):
        Plan({"a": Need(0, need, 0)}, Machine(None, has), {}, Path("out")).require()


def test_the_parts_that_would_fit_are_named():
    made = Plan({"llm_decoder": Need(3e9, 0, 0), "audio_heads": Need(1e9, 0, 0)}, Machine(2e9, 1e12), {}, Path("out"))
    with pytest.raises(UserError, match="llm_decoder needs 3.0 GB of memory, 2.0 GB is available.*--components audio_heads"):
        made.require()
    Plan(made.needs, Machine(None, 1e12), {}, Path("out")).require()  # nothing is known: nothing is refused


def test_one_part_at_a_time_is_counted():
    made = Plan({"a": Need(3, 10, 100), "b": Need(5, 20, 50)}, Machine(None, 0), {}, Path("out"))
    assert (made.memory, made.disk) == (5, 130)


def test_parts_that_are_there_need_nothing(tiny_int4, tiny):
    assert make_plan(tiny, Recipe("cpu", "int4"), COMPONENTS, tiny_int4).needs == {}
    assert set(make_plan(tiny, Recipe("cpu", "int4", rounding="rtn-64"), COMPONENTS, tiny_int4).needs) == {"llm_decoder", PROOF}
    assert set(make_plan(tiny, Recipe("cpu", "int4"), COMPONENTS, tiny_int4.parent / "new").needs) == {*COMPONENTS, PROOF}
    some = ("audio_embed", "audio_heads")  # no whole build: nothing is proved
    assert set(make_plan(tiny, Recipe("cpu", "int4"), some, tiny_int4.parent / "new").needs) == set(some)


def test_the_plan_is_printed_and_nothing_is_built(tmp_path, capsys):
    flags = ["--checkpoint", str(TINY), "--output", str(tmp_path / "out"), "--plan"]
    assert run_script(optimize.main, flags) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[1:-1]] == [*COMPONENTS, PROOF]
    assert "free" in said[-1]
    assert not (tmp_path / "out").exists()


def test_the_plan_of_a_build_that_cannot_fit_is_printed_and_fails(little, tmp_path, capsys):
    little(memory=0.1 * GB)
    assert run_script(optimize.main, ["--checkpoint", str(TINY), "--output", str(tmp_path / "out"), "--plan"]) == 2
    assert "llm_decoder" in capsys.readouterr().out


def test_what_a_part_took_is_known_next_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("VOXPORT_CACHE", str(tmp_path / "cache"))
    checkpoint = link_checkpoint(tmp_path / "checkpoint")
    build(checkpoint, tmp_path / "out", "--components", "audio_heads")
    edit_json(checkpoint / "config.json", lambda c: c["text_config"].update(rms_norm_eps=1e-5))
    planned = make_plan(Checkpoint.open(checkpoint), Recipe("cpu", "int4"), COMPONENTS, tmp_path / "out")
    assert set(planned.seconds) == {"audio_heads"}
    assert planned.seconds["audio_heads"] > 0
    (tmp_path / "cache" / plan.HISTORY).write_text("not json", encoding="utf-8")
    assert make_plan(Checkpoint.open(checkpoint), Recipe("cpu", "int4"), COMPONENTS, tmp_path / "out").seconds == {}


def test_time_left_is_last_times_or_goes_by_size():
    made = Plan({"a": Need(0, 10, 0), "b": Need(0, 20, 0), "c": Need(0, 40, 0)}, Machine(None, 0), {"c": 7.0}, Path("out"))
    assert made.seconds_left(("b", "c"), {"a": 2.0}) == pytest.approx(4.0 + 7.0)
    assert made.seconds_left(("b", "c"), {"a": 0.0}) is None
    assert made.seconds_left((), {"a": 2.0}) == 0


def test_free_disk_is_asked_where_the_folder_will_lie(tmp_path):
    assert plan.free_disk(tmp_path / "not" / "yet") == pytest.approx(plan.free_disk(tmp_path), rel=0.5)


# Recipes on the command line.


def test_every_recipe_is_listed_by_help():
    said = " ".join(run_cli("optimize.py", "--help").stdout.split())
    for name in RECIPES:
        assert f"{name}: " in said


def test_a_recipe_is_recorded_and_makes_only_the_decoder_again(tiny_int4, tmp_path, capsys):
    import shutil

    folder = shutil.copytree(tiny_int4, tmp_path / "out", copy_function=os.link)
    capsys.readouterr()
    build(TINY, folder, "--recipe", "mixed-32")
    manifest, before = Manifest.read(folder), Manifest.read(tiny_int4)
    assert manifest.recipe["rounding"] == "mixed-32"
    assert before.recipe["rounding"] == DEFAULT_RECIPE
    assert {n for n in COMPONENTS if manifest.parts[n] != before.parts[n]} == {"llm_decoder"}
    assert capsys.readouterr().err.count("up to date") == len(COMPONENTS) - 1


def test_a_recipe_of_int4_has_no_use_in_floats(capsys, tmp_path):
    said = refusal(capsys, "--precision", "fp32", "--recipe", "fit-32", "--output", str(tmp_path / "out"))
    assert "--recipe fit-32" in said
