"""The proof of OmniFish builds: a clean build gives it again, a damaged one is refused by name, and a provider can be diagnosed."""

import dataclasses
import json

import numpy as np
import omnifish_faults as plant
import pytest
from faults import copy_build, repair_manifest
from omnifish_builds import LOCAL, built, make_build, parts_of

import diagnose_cuda
import inference
from voxport.errors import UserError, run_script
from voxport.families import FAMILIES
from voxport.manifest import MANIFEST_NAME, Manifest
from voxport.manifest_omnifish import MTP_LAYERS, MTP_PRIME, MTP_STEP
from voxport.run import proof
from voxport.run.omnifish import Speaker
from voxport.run.omnifish_proof import ORDER, TASKS, Replay, entry_codes, make_feeds, random_codes
from voxport.run.proof import FAIL, FULL, OK, QUICK, replay, take_figure
from voxport.run.session import Engine, Parts

TEXT = "Zażółć gęślą jaźń, proszę."


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of this test's own."""
    monkeypatch.setenv("VOXPORT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def copy(tmp_path):
    return copy_build(built("axial_px", "int4"), tmp_path / "copy")


def open_parts(folder) -> Parts:
    manifest = Manifest.read(folder)
    return Parts(folder, manifest, Engine("CPUExecutionProvider", manifest.proof.threads))


def states(folder, depth=FULL, names=None) -> dict[tuple[str, str], str]:
    parts = open_parts(folder)
    return {(v.part, v.what): v.state for v in replay(parts, parts.manifest, depth, names)}


def verify(*arguments) -> int:
    return run_script(inference.main, ["--verify", *map(str, arguments)])


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_a_clean_build_verifies_to_the_bit_and_says_so_for_every_part(precision, capsys):
    folder = built("axial_px", precision)
    assert verify("--model-path", folder, "--json") == 0
    report = json.loads(capsys.readouterr().out)["verify"]
    assert {row["says"] for row in report} == {"the same to the bit"}
    assert {row["part"] for row in report} == Manifest.read(folder).parts.keys()


def test_the_manifest_carries_a_small_proof_with_quick_questions_for_every_part():
    manifest = Manifest.read(built("axial_px"))
    own = [task for task in TASKS if task.part in manifest.parts]
    assert {task.name for task in own} == manifest.proof.figures.keys()
    assert {task.part for task in own if task.depth == QUICK} == manifest.parts.keys()
    assert (built("axial_px") / MANIFEST_NAME).stat().st_size < 200_000
    assert len(manifest.proof.prompt_ids) < 120
    assert set(ORDER) == {task.part for task in TASKS}


def test_a_build_that_lacks_parts_has_no_proof_and_speaks_of_it(capsys):
    assert Manifest.read(built("mtpdec")).proof is None
    assert verify("--model-path", built("mtpdec")) == 2
    assert "carries no proof" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["llm_decoder", "semantic_head", "mtp_step", "codec_decoder", "codec_encoder"])
def test_a_changed_exponent_under_a_repaired_hash_is_refused_naming_the_part(part, copy, cache, capsys):
    plant.change_exponent(copy, part)
    repair_manifest(copy)
    assert verify("--model-path", copy) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith(f"error: {part} does not compute what this build proved") and "build it again" in last


def test_a_damaged_build_does_not_even_speak(copy, cache, capsys):
    plant.change_exponent(copy, "mtp_step")
    repair_manifest(copy)
    arguments = ["--model-path", copy, "--text", TEXT, "--out", copy / "x.wav", "--max-frames", "8"]
    assert run_script(inference.main, [str(a) for a in arguments]) == 1
    assert "error: mtp_step does not compute" in capsys.readouterr().err and not (copy / "x.wav").exists()
    assert Speaker.load(copy, verify=False, threads=1).speak(TEXT, max_frames=8, seed=1).codes.size


@pytest.mark.parametrize("fault, part", [
    (plant.swap_codebooks, "audio_embed"), (plant.swap_levels, "mtp_step"), (plant.shift_end, "semantic_head"),
    (plant.look_back_only_in_one_layer, "llm_decoder"),
])  # fmt: skip
def test_faults_as_a_builder_would_make_them_are_seen_quickly_and_elsewhere_too(fault, part, tmp_path, monkeypatch):
    folder = copy_build(built("axial_px"), tmp_path / "copy")
    fault(folder)
    repair_manifest(folder)
    assert FAIL in {state for (name, _), state in states(folder, QUICK, [part]).items() if name == part}
    monkeypatch.setattr(proof, "machine_name", lambda: "another")
    assert FAIL in {state for (name, _), state in states(folder, FULL, [part]).items() if name == part}


@pytest.mark.parametrize("k", [0, 4])
def test_links_of_the_chain_are_asked_for_every_code_and_every_key(k):
    """Builds of this kind have no codec here, so the questions are put without a manifest's proof."""
    parts, name = parts_of(built("mtpdec")), MTP_LAYERS[k]
    ask = Replay(parts, parts.manifest, [], [], [])
    asked = {task.what: take_figure(task, task.ask(ask)) for task in TASKS if task.part == name}
    assert asked["noise"].digest == take_figure(asked_task(name, "noise"), ask.link(k=k)).digest
    size, width = parts.manifest.codebooks.sizes[k], parts.manifest.residual.size
    assert sum(asked["every code"].sizes) == size * (width + parts.manifest.codebooks.sizes[k + 1])


def asked_task(part: str, what: str):
    return next(task for task in TASKS if (task.part, task.what) == (part, what))


def test_every_residual_entry_is_played_and_a_quarter_of_the_semantic_ones():
    codes = entry_codes([4096, *[1024] * 9])
    assert all(sorted(row) == list(range(1024)) for row in codes[1:])
    assert len(set(codes[0])) == 1024
    manifest = parts_of(built("axial_px")).manifest
    assert not np.array_equal(random_codes("x", manifest, 8)[1], random_codes("x", manifest, 8)[2])


def test_the_shared_tasks_are_judged_away_from_home_by_a_tolerance(monkeypatch):
    monkeypatch.setattr(proof, "machine_name", lambda: "another")
    assert set(states(built("axial_px"), QUICK).values()) == {OK}


def test_a_new_part_drops_the_proof_and_the_next_build_writes_it_again(copy):
    before = Manifest.read(copy).proof
    dataclasses.replace(Manifest.read(copy), proof=None).write(copy)
    make_build(LOCAL / "axial_px", copy, "int4")
    assert Manifest.read(copy).proof.figures == before.figures


def test_a_saved_answer_to_other_questions_is_not_replayed(copy, cache, capsys):
    manifest = Manifest.read(copy)
    dataclasses.replace(manifest, proof=dataclasses.replace(manifest.proof, version=99)).write(copy)
    assert verify("--model-path", copy) == 2
    assert "version 99" in capsys.readouterr().err


# Diagnosis


@pytest.mark.parametrize("target, part", [
    ("GroupQueryAttention", "llm_decoder"), ("Sin", MTP_PRIME), ("ConvTranspose", "codec_decoder"),
])  # fmt: skip
def test_a_stand_in_is_convicted_by_part_and_operator(target, part, tmp_path, capsys):
    flags = ["--model-path", str(built("axial_px", "int4")), "--save", str(tmp_path / "node.npz"), "--rehearse", target, "--json"]
    assert run_script(diagnose_cuda.main, flags) == 1
    found = json.loads(capsys.readouterr().out)["node"]
    assert (found["part"], found["op"]) == (part, target)
    assert (tmp_path / "node.npz").is_file()


def test_the_cpu_agrees_with_itself(tmp_path, capsys):
    flags = ["--model-path", str(built("axial_px")), "--provider", "cpu", "--save", str(tmp_path / "node.npz")]
    assert run_script(diagnose_cuda.main, flags) == 0
    printed = capsys.readouterr().out
    assert all(part in printed for part in Manifest.read(built("axial_px")).parts)


def test_every_part_of_every_kind_can_be_fed():
    for name in ("axial_px", "mtpdec"):
        parts = parts_of(built(name))
        for part in (part for part in ORDER if part in parts.manifest.parts and part in (MTP_PRIME, MTP_STEP, *MTP_LAYERS)):
            assert make_feeds(part, parts.manifest, None, {}).keys() == {spec.name for spec in parts.manifest.part(part).inputs}


# Families


def test_what_a_family_must_provide_is_there_for_each(tmp_path):
    """The doors through which the shared code enters a family; a third one needs no more."""
    doors = {
        "script": ("Speaker", "Wish", "OWN_FLAGS", "TEXT_FLAGS", "LINE_FIELDS", "add_flags", "read_wish", "check_wish", "plan", "read", "read_stream"),
        "proof": ("VERSION", "TASKS", "Replay", "ORDER", "EXACT", "CODES", "DEEP", "pose", "make_feeds"),
        "builder": ("OWN_FLAGS", "COMPONENTS", "add_flags", "recognises", "make_job"),
        "judge": ("open_bench", "judge_all", "speak_original"),
    }  # fmt: skip
    for family in FAMILIES.values():
        for door, names in doors.items():
            assert not [name for name in names if not hasattr(getattr(family, door), name)], (family.short, door)


def test_a_checkpoint_that_nobody_recognises_is_named_by_the_first_reader(tmp_path):
    import optimize

    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="config"):
        optimize.main(["--checkpoint", str(tmp_path / "ckpt"), "--output", str(tmp_path / "out")])
