"""The judge convicts: planted faults fail at the level that should see them, and a clean build passes."""

import dataclasses
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, build, run_cli
from faults import (
    change_theta, copy_build, double_one_scale, repair_manifest, see_the_future, skip_one_query_norm, swap_codebooks, zero_codebooks,
)  # fmt: skip
from omnifish_builds import LOCAL, built
from safetensors.torch import load_file, save_file

import eval as judge_script
import inference
from voxport.build.check import CHECKS
from voxport.build.checkpoint import Checkpoint
from voxport.errors import UserError, run_script
from voxport.judge.finding import FAIL, NOT_JUDGED, PASS, Finding, verdict
from voxport.judge.levels import Bench, judge_all, kl_divergence, speak_cases
from voxport.judge.reference import Original, check_alike
from voxport.judge.spectra import log_mel_distance
from voxport.manifest import Manifest
from voxport.run.higgs import Speaker

REQUESTS = [{"text": "Hello there, and welcome aboard the morning train."}, {"text": "What shall we do now?"}]
FRAMES = 16


def judge_folder(folder: Path, checkpoint: Path = TINY) -> list[Finding]:
    speaker = Speaker.load(folder, verify=False)
    return judge_all(Bench(speaker, Original(Checkpoint.open(checkpoint), True)), REQUESTS, FRAMES).findings


def failures(findings: list[Finding]) -> set[tuple[str, str]]:
    return {(f.level, f.part) for f in findings if f.verdict == FAIL}


def planted(clean: Path, tmp_path: Path, plant) -> list[Finding]:
    folder = copy_build(clean, tmp_path / "faulty")
    plant(folder)
    repair_manifest(folder)
    return judge_folder(folder)


def test_clean_fp32_build_passes_every_level(tiny_build):
    findings = judge_folder(tiny_build)
    assert failures(findings) == set()
    assert {f.level for f in findings if f.verdict == PASS} >= {
        "parts", "weights", "decoder alone", "teacher-forced", "greedy rows", "probes", "waveform"
    }  # fmt: skip


def test_int4_loss_on_random_weights_is_blamed_on_rounding_and_on_no_part(tiny_int4):
    """Random weights round badly: the loss against the original is reported, the parts themselves are as they should be."""
    failed = failures(judge_folder(tiny_int4))
    assert failed <= {
        ("teacher-forced", "llm_decoder"), ("teacher-forced", "llm_decoder + audio_heads"), ("greedy rows", "whole loop"),
        ("waveform", "whole loop"),
    }  # fmt: skip


@pytest.mark.parametrize("plant, seen", [
    (swap_codebooks, ("parts", "audio_embed")),
    (change_theta, ("decoder alone", "llm_decoder")),
    (see_the_future, ("probes", "llm_decoder")),
    (see_the_future, ("decoder alone", "llm_decoder")),
    (skip_one_query_norm, ("decoder alone", "llm_decoder")),
    (zero_codebooks, ("parts", "audio_tokenizer")),
])  # fmt: skip
def test_planted_fault_fails_at_its_level(tiny_build, tmp_path, plant, seen):
    assert seen in failures(planted(tiny_build, tmp_path, plant))


def test_one_wrong_scale_of_one_block_is_seen_in_the_weights(tiny_int4, tmp_path):
    found = failures(planted(tiny_int4, tmp_path, double_one_scale))
    assert ("weights", "llm_decoder") in found


def test_encoder_with_its_alignment_branch_frozen_fails(tiny_build, tmp_path, monkeypatch):
    from _ref import higgs_codec

    folder = copy_build(tiny_build, tmp_path / "frozen")
    (folder / "audio_encoder.onnx").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(higgs_codec, "acoustic_padding", lambda config, samples: 0)
        patch.setitem(CHECKS, "audio_encoder", lambda *args: None)
        build(TINY, folder, "--precision", "fp32", "--components", "audio_encoder")
    assert ("parts", "audio_encoder") in failures(judge_folder(folder))


def test_int4_heads_fail(tiny_build, tmp_path):
    folder = copy_build(tiny_build, tmp_path / "heads")
    build(TINY, folder, "--precision", "fp32", "--components", "audio_heads", "--heads-precision", "int4")
    assert ("parts", "audio_heads") in failures(judge_folder(folder))


def test_decoder_of_another_checkpoint_with_equal_shapes_fails(tiny_build, tmp_path):
    other = tmp_path / "other"
    copy_build(TINY, other)
    shard = next(other.glob("model-00001*"))
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(shard)
    jitter = lambda t: (t.float() + 0.3 * t.float().std() * torch.randn(t.shape, generator=generator)).to(t.dtype)
    shard.chmod(0o644)
    save_file({n: jitter(t) if "_proj" in n and n.startswith("body.") else t for n, t in tensors.items()}, shard)
    folder = copy_build(tiny_build, tmp_path / "swapped")
    build(other, tmp_path / "other_build", "--precision", "fp32", "--components", "llm_decoder")
    for name in ("llm_decoder.onnx", "llm_decoder.onnx.data"):
        (folder / name).write_bytes((tmp_path / "other_build" / name).read_bytes())
    repair_manifest(folder)
    assert ("weights", "llm_decoder") in failures(judge_folder(folder))


def test_a_part_that_cannot_run_fails_its_level_instead_of_ending_the_judgement(tiny_build, tmp_path):
    folder = copy_build(tiny_build, tmp_path / "broken")
    (folder / "audio_tokenizer.onnx").write_bytes(b"not a graph")
    repair_manifest(folder)
    findings = judge_folder(folder)
    assert ("parts", "audio_tokenizer") in failures(findings)
    assert any(f.part == "audio_encoder" and f.verdict == PASS for f in findings)


def test_eval_script_says_when_it_cannot_compare(tiny_build, tmp_path):
    folder = copy_build(tiny_build, tmp_path / "moved")
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    manifest["source"]["path"] = str(tmp_path / "gone")
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    result = run_cli("eval.py", "--model-path", folder)
    assert result.returncode == 2
    assert "not compared with the original" in result.stderr


def test_eval_script_passes_a_clean_build_and_writes_its_report(tiny_build, tmp_path):
    result = run_cli("eval.py", "--model-path", tiny_build, "--reference", TINY, "--frames", 12, "--output", tmp_path / "r.json")
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert report["verdict"] == PASS and all(f["figures"] or f["verdict"] == NOT_JUDGED for f in report["findings"])


def refusal(capsys, *arguments) -> str:
    """What eval.py says in one line, having judged nothing."""
    capsys.readouterr()
    assert run_script(judge_script.main, [str(argument) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1
    return printed.err


def rewrite_source(folder: Path, **changes) -> Path:
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    manifest["source"] |= changes
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return folder


def test_a_second_build_that_cannot_be_compared_is_refused_before_the_first_is_judged(tiny_build, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(judge_script, "try_build", lambda *_: pytest.fail("judged"))
    flags = ["--model-path", tiny_build, "--reference", TINY, "--compare"]
    assert "holds no manifest.json" in refusal(capsys, *flags, tmp_path / "gone")
    other = rewrite_source(copy_build(tiny_build, tmp_path / "other"), id="another", fingerprint="another")
    assert f"--compare {other} was built from the higgs checkpoint another" in refusal(capsys, *flags, other)
    fish = built("axial_px")
    assert f"--compare {fish} was built from the omnifish checkpoint" in refusal(capsys, *flags, fish)


def test_builds_of_one_commit_are_compared_wherever_its_files_lay(tiny_build, tmp_path):
    first, second = (Manifest.read(rewrite_source(copy_build(tiny_build, tmp_path / name), id="a/b", revision="c", fingerprint=name))
                     for name in ("one", "two"))  # fmt: skip
    check_alike(first, second, "--compare two")
    without = [dataclasses.replace(m, source=dataclasses.replace(m.source, revision=None)) for m in (first, second)]
    with pytest.raises(UserError, match="checkpoint a/b as its files were at another time"):
        check_alike(*without, "--compare two")


def test_a_transcript_without_recording_and_a_recording_that_is_none_are_refused(tiny_build, tmp_path, capsys):
    flags = ["--model-path", tiny_build, "--reference", TINY]
    assert "--ref-audio" in refusal(capsys, *flags, "--ref-text", "Hello")
    assert "gone.wav" in refusal(capsys, *flags, "--ref-audio", tmp_path / "gone.wav")


@pytest.mark.parametrize("name", ["audio_embed.onnx.data", "audio_embed.onnx", "tokenizer.json"])
def test_a_file_that_is_gone_is_named_as_it_is_by_speaking(name, tiny_build, tmp_path, capsys):
    folder = copy_build(tiny_build, tmp_path / "broken")
    (folder / name).unlink()
    said = refusal(capsys, "--model-path", folder, "--reference", TINY)
    assert f"{folder / name} is missing; build it again or copy the whole folder" in said
    command = f"python optimize.py --checkpoint {TINY} --output {folder} --device cpu --precision fp32 --components audio_embed"
    assert (f"(audio_embed alone: {command})" in said) == name.startswith("audio_embed")
    assert run_script(inference.main, ["--model-path", str(folder), "--text", "Hi", "--out", str(tmp_path / "x.wav")]) == 2
    assert capsys.readouterr().err == said


def test_a_checkpoint_of_another_family_is_no_reference(tiny_build, capsys):
    said = refusal(capsys, "--model-path", built("axial_px"), "--reference", "demo")
    assert "demo is a checkpoint of the higgs family, the build is of omnifish" in said
    assert "omnifish family" in refusal(capsys, "--model-path", tiny_build, "--reference", LOCAL / "axial_px")


def test_a_judge_does_not_warn_of_the_greed_that_it_asks_for(tiny_build):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        speaker = Speaker.load(tiny_build, verify=False)
        speak_cases(speaker, REQUESTS, 2)
    with pytest.warns(UserWarning, match="without sampling"):
        speaker.speak("Hello", temperature=0.0, max_frames=2)


def test_a_verdict_without_evidence_is_never_a_pass():
    nothing = Finding("listeners", "speech", NOT_JUDGED, "no listener")
    assert verdict([nothing]) == NOT_JUDGED
    assert verdict([nothing, dataclasses.replace(nothing, verdict=FAIL)]) == FAIL


def test_divergence_of_equal_logits_is_zero_and_of_shifted_ones_is_not():
    logits = np.random.default_rng(0).standard_normal((5, 8, 32))
    assert kl_divergence(logits, logits + 3.0) == pytest.approx(0, abs=1e-12)
    assert kl_divergence(logits, -logits) > 0.5


def test_log_mel_distance_tells_a_tone_from_another_and_from_itself():
    time = np.arange(24_000) / 24_000
    low, high = np.sin(2 * np.pi * 220 * time), np.sin(2 * np.pi * 440 * time)
    assert log_mel_distance(low, low, 24_000) == 0
    assert log_mel_distance(low, high, 24_000) > 3
    noise = np.random.default_rng(0).standard_normal(24_000)
    assert log_mel_distance(noise, 0.5 * noise, 24_000) == pytest.approx(20 * np.log10(2), abs=0.1)
