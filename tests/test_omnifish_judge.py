"""The judge of OmniFish builds: a clean one passes every level, and each planted fault fails where it should."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import omnifish_faults as plant
import pytest
import soundfile
from conftest import run_cli
from faults import change_theta, copy_build, repair_manifest
from omnifish_builds import LOCAL, arrays, built, explicit, facts, golden_folder

import eval as judge_script
from voxport.errors import run_script
from voxport.judge.finding import FAIL, NOT_JUDGED, PASS, Finding
from voxport.judge.omnifish_judge import Chooser, judge_all, open_bench, original_choices, speak_original
from voxport.judge.omnifish_walk import speak_cases, take_view
from voxport.manifest import Manifest
from voxport.run.omnifish import Speaker

TEXTS = ("Zażółć gęślą jaźń, proszę.", "Dzień dobry. Co teraz zrobimy?")
REQUESTS = [{"text": text} for text in TEXTS]
FRAMES = 24
LEVELS = {"parts", "weights", "decoder alone", "teacher-forced", "greedy rows", "probes", "waveform"}


def quiet(folder: Path) -> Speaker:
    """A speaker that warns of nothing, and that does without the codec where the build has none."""
    speaker = Speaker.load(folder, threads=1, verify=False, warn=lambda message: None)
    if "codec_decoder" not in speaker.manifest.parts:
        speaker._load = lambda *names: None
    return speaker


def judge_folder(folder: Path, name: str = "axial_px") -> list[Finding]:
    return judge_all(open_bench(quiet(folder), golden_folder(name)), REQUESTS, FRAMES).findings


def failures(findings: list[Finding]) -> set[tuple[str, str]]:
    return {(f.level, f.part) for f in findings if f.verdict == FAIL}


@pytest.mark.parametrize("name", ["axial_px", "axial", "mtpdec"])
def test_a_clean_build_passes_every_level(name):
    findings = judge_folder(built(name), name)
    assert failures(findings) == set()
    passed = {f.level for f in findings if f.verdict == PASS}
    assert passed >= LEVELS - (set() if name == "axial_px" else {"waveform"})  # the others have no codec's parts
    judged = {f.part for f in findings if f.level == "parts"}
    assert judged == Manifest.read(built(name)).parts.keys() - {"llm_decoder"}


def test_loss_by_rounding_is_blamed_on_rounding_and_on_no_part():
    """Random weights round badly: what is lost against the original is told, and the parts are what they should be."""
    assert failures(judge_folder(built("axial_px", "int4"))) <= {
        ("teacher-forced", "llm_decoder"), ("teacher-forced", "llm_decoder + semantic_head"), ("teacher-forced", "residual decoder"),
        ("greedy rows", "whole loop"), ("waveform", "whole loop"),
    }  # fmt: skip


def test_an_attention_spelt_out_is_judged_by_what_it_computes():
    findings = {(f.level, f.part): f.verdict for f in judge_folder(explicit("axial_px"))}
    assert findings["weights", "llm_decoder"] == findings["decoder alone", "llm_decoder"] == NOT_JUDGED
    assert findings["teacher-forced", "llm_decoder"] == findings["probes", "llm_decoder"] == PASS
    assert FAIL not in findings.values()


@pytest.mark.parametrize("fault, precision, seen", [
    (plant.look_back_only_in_one_layer, "fp32", ("decoder alone", "llm_decoder")),
    (plant.look_back_only_in_one_layer, "fp32", ("teacher-forced", "llm_decoder")),
    (change_theta, "fp32", ("decoder alone", "llm_decoder")),
    (plant.double_one_scale, "int4", ("weights", "llm_decoder")),
    (plant.swap_codebooks, "fp32", ("parts", "audio_embed")),
    (plant.shift_end, "fp32", ("parts", "semantic_head")),
    (plant.swap_levels, "fp32", ("parts", "mtp_step")),
    (plant.swap_levels, "fp32", ("teacher-forced", "residual decoder")),
    (plant.swap_heads, "fp32", ("weights", "mtp_step")),
    (plant.swap_heads, "fp32", ("greedy rows", "whole loop")),
    (plant.double_one_residual_scale, "int4", ("weights", "mtp_step")),
    (plant.mute_codec_layer, "fp32", ("parts", "codec_decoder")),
    (plant.mute_codec_layer, "fp32", ("waveform", "whole loop")),
])  # fmt: skip
def test_a_planted_fault_fails_at_its_level_and_leaves_other_parts_alone(fault, precision, seen, planted):
    findings = planted(fault, precision)
    assert seen in failures(findings)
    parts = {part for level, part in failures(findings) if level in ("parts", "weights", "decoder alone")}
    assert len(parts) == 1


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Findings of a build with a fault, judged once for all levels that should see it."""
    known = {}

    def judge(fault, precision: str) -> list[Finding]:
        if (fault, precision) not in known:
            folder = copy_build(built("axial_px", precision), tmp_path_factory.mktemp("faulty") / "build")
            fault(folder)
            repair_manifest(folder)
            known[fault, precision] = judge_folder(folder)
        return known[fault, precision]

    return judge


def test_a_causal_body_fails_even_where_nothing_would_load_it(tmp_path, monkeypatch):
    """The speaker refuses such a build, so the probe is asked with that refusal out of the way."""
    folder = copy_build(built("axial_px"), tmp_path / "causal")
    plant.look_back_only(folder)
    repair_manifest(folder)
    refused = judge_folder(folder)
    assert any("attends to the past only" in f.says for f in refused if (f.level, f.part) == ("teacher-forced", "llm_decoder"))
    monkeypatch.setattr("voxport.run.omnifish_blocks.check_sees_ahead", lambda decoder: None)
    assert failures(judge_folder(folder)) >= {("probes", "llm_decoder"), ("decoder alone", "llm_decoder")}


def test_a_part_that_cannot_run_fails_its_level_instead_of_ending_the_judgement(tmp_path):
    folder = copy_build(built("axial_px"), tmp_path / "broken")
    (folder / "codec_decoder.onnx").write_bytes(b"not a graph")
    repair_manifest(folder)
    findings = judge_folder(folder)
    assert ("parts", "codec_decoder") in failures(findings)
    assert any(f.part == "codec_encoder" and f.verdict == PASS for f in findings)


@pytest.mark.parametrize("name", ["axial_px", "mtpdec"])
def test_what_both_sides_see_is_the_golden_utterance(name):
    """Along a golden case the original chooses the golden codes, and its states are the golden ones."""
    bench = open_bench(quiet(built(name)), golden_folder(name))
    case = next(c for c in facts(name)["e2e"] if c["name"] == "mid_end")
    request = {"text": case["text"], "turns": tuple(map(tuple, case["turns"] or ()))} | {
        field: case[field] for field in ("language", "instruct", "before", "after")
    }
    (spoken,) = speak_cases(bench.speaker, [request], 24)
    view = take_view(bench, spoken)
    codes = arrays(name)["e2e.mid_end.codes"]
    assert np.array_equal(spoken.codes, codes) and np.array_equal(original_choices(view, bench), codes)
    finished = [view.expected[i] for i, step in enumerate(view.steps, 1) if not step.ids and not step.keeps or step.keeps and name == "axial_px"]
    golden = arrays(name)["e2e.mid_end.h_finish"]
    assert any(np.abs(states - golden[0]).max() < 5e-4 for states in finished)


@pytest.mark.parametrize("name", ["axial_px", "mtpdec"])
def test_the_original_speaks_the_same_draws(name, monkeypatch):
    """Drawn and not greedy: seed, block, level and round are counted as the run side counts them."""
    monkeypatch.setattr("voxport.run.omnifish.decode", lambda parts, manifest, codes: np.ones(codes.shape[1] * 2048, np.float32))
    speaker = quiet(built(name))
    bench = open_bench(speaker, golden_folder(name))
    speech = speaker.speak(TEXTS[0], seed=5, temperature=0.9, residual_temperature=0.7, max_frames=20)
    heard = []
    monkeypatch.setattr("voxport.judge.omnifish_judge._speak", lambda bench, codec, speech: heard.append(generate(bench, speech)))
    speak_original(bench, [speech])
    assert np.array_equal(heard[0][:, :20], speech.codes)


def generate(bench, speech) -> np.ndarray:
    from _ref.omnifish import Recipe

    made = bench.manifest.generation
    recipe = Recipe(made.block_size, made.context_mode, speech.settings.steps, None, made.residual_rounds)
    chooser = Chooser(speech, 1 if bench.checkpoint.is_axial else made.residual_rounds)
    blocks = -(-speech.max_frames // made.block_size)
    return bench.original.generate(speech.prompt_ids.tolist(), recipe, blocks, None, chooser.semantic, chooser.codes).codes.numpy()


def test_the_script_judges_and_writes_table_json_and_page(tmp_path, capsys):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    flags = ["--model-path", built("axial_px"), "--texts", tmp_path / "texts.txt", "--frames", FRAMES, "--threads", 1]
    soundfile.write(tmp_path / "voice.wav", 0.3 * np.sin(np.arange(6000) / 30), 44100)
    flags += ["--output", tmp_path / "r.json", "--html", tmp_path / "r.html", "--ref-audio", tmp_path / "voice.wav", "--ref-text", "Hm."]
    assert run_script(judge_script.main, [str(flag) for flag in flags]) == 0
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith("verdict: PASS") and "residual decoder" in printed
    report = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert next(f for f in report["findings"] if f["level"] == "greedy rows")["figures"]["cases"] == 3
    assert report["verdict"] == PASS and all(f["figures"] or f["verdict"] == NOT_JUDGED for f in report["findings"])
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "codec_decoder" in page and "Agreement by codebook" in page and page.count("<audio") >= 2  # the build and the original


def test_the_script_says_when_the_original_is_not_there(tmp_path):
    folder = copy_build(built("axial_px"), tmp_path / "moved")
    manifest = Manifest.read(folder)
    gone = dataclasses.replace(manifest.source, path=str(tmp_path / "gone"))
    dataclasses.replace(manifest, source=gone).write(folder)
    done = run_cli("eval.py", "--model-path", folder)
    assert done.returncode == 2 and "not compared with the original" in done.stderr


def test_the_codec_is_looked_for_where_the_build_had_it_from(tmp_path):
    assert Path(Manifest.read(built("axial_px")).codec_path) == (LOCAL / "codec").resolve()
    folder = copy_build(built("axial_px"), tmp_path / "moved")
    dataclasses.replace(Manifest.read(folder), codec_path=str(tmp_path / "gone")).write(folder)
    assert open_bench(quiet(folder), LOCAL / "axial_px").checkpoint.codec_folder == LOCAL / "codec"
