"""The scripts on an OmniFish build as a user types them: saved voices, many lines, streams, reports, and every command of the README."""

import dataclasses
import json
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
import soundfile
from conftest import ROOT
from faults import copy_build
from omnifish_builds import LOCAL, built, checkpoint

import inference
import optimize
from voxport.build import plan
from voxport.build.omnifish_parts import part_names
from voxport.build.omnifish_plan import needs
from voxport.build.omnifish_workshop import OmniFishRecipe
from voxport.errors import UserError, run_script
from voxport.run.omnifish import Speaker
from voxport.run.player import wav_header
from voxport.run.voices import Shelf

TEXT = "Zażółć gęślą jaźń, proszę."  # one that the tiny checkpoint speaks for a block and a half
HOP, RATE = 2048, 44100


def speak(*arguments, code=0):
    """In this process: exit code checked."""
    flags = ["--model-path", built("axial_px"), "--max-frames", 16, "--threads", 1, *arguments]
    assert inference.main([str(flag) for flag in flags]) == code


@pytest.fixture(scope="module")
def voice(tmp_path_factory):
    path = tmp_path_factory.mktemp("voice") / "voice.wav"
    time = np.arange(3 * HOP) / RATE
    soundfile.write(path, 0.3 * np.sin(2 * np.pi * 150 * time) + 0.1 * np.sin(2 * np.pi * 450 * time), RATE)
    return path


def test_a_voice_is_saved_listed_spoken_with_and_forgotten(voice, tmp_path, capsys):
    shelf, clone = ["--voices-dir", tmp_path / "voices"], ["--ref-audio", voice, "--ref-text", "Hm."]
    speak("--text", TEXT, "--seed", 3, "--out", tmp_path / "a.wav", "--save-codes", tmp_path / "a.npz", *clone)
    speak("--save-voice", "Anna", *shelf, *clone)
    speak("--text", TEXT, "--seed", 3, "--out", tmp_path / "b.wav", "--voice", "Anna", *shelf, "--json")
    assert (tmp_path / "a.wav").read_bytes() == (tmp_path / "b.wav").read_bytes()
    assert json.loads(capsys.readouterr().out)["voice"] == "Anna"
    assert inference.main(["--list-voices", "--json", *map(str, shelf)]) == 0
    assert json.loads(capsys.readouterr().out)["voices"]["Anna"]["transcript"] == "Hm."
    speak("--save-voice", "Bo", "--text", TEXT, "--seed", 3, "--out", tmp_path / "c.wav", *shelf, *clone)
    assert (tmp_path / "a.wav").read_bytes() == (tmp_path / "c.wav").read_bytes()
    with pytest.raises(UserError, match="brings a reference of its own"):
        speak("--text", TEXT, "--out", tmp_path / "d.wav", "--voice", "Anna", "--ref-audio", voice, *shelf)
    assert inference.main(["--delete-voice", "Anna", *map(str, shelf)]) == 0
    with pytest.raises(UserError, match="there are: Bo"):
        speak("--text", TEXT, "--out", tmp_path / "d.wav", "--voice", "Anna", *shelf)


def test_a_saved_voice_is_not_heard_again_and_a_broken_memory_of_it_is(voice, tmp_path):
    shelf, heard = Shelf(tmp_path / "voices"), []
    speaker = Speaker.load(built("axial_px"), threads=1)
    encode = speaker._encode
    speaker._encode = lambda *arguments: heard.append(1) or encode(*arguments)
    first = shelf.save("Anna", speaker, voice, "Hm.")
    assert np.array_equal(shelf.load("Anna", speaker).codes, first.codes) and len(heard) == 1
    (kept,) = (path for path in (tmp_path / "voices" / "Anna").iterdir() if path.name != "voice.npz")
    kept.write_bytes(kept.read_bytes()[:-30])
    assert np.array_equal(shelf.load("Anna", speaker).codes, first.codes) and len(heard) == 2


def test_a_voice_passes_from_one_family_to_the_other(tiny_build, tmp_path):
    """The shelf keeps the recording: another codec, with another rate, hears it anew."""
    from voxport.run.higgs import Speaker as HiggsSpeaker

    shelf, second = Shelf(tmp_path / "voices"), 24_000
    sound = (0.3 * np.sin(2 * np.pi * 200 * np.arange(2 * second) / second)).astype(np.float32)
    higgs, fish = HiggsSpeaker.load(tiny_build), Speaker.load(built("axial_px"), threads=1)
    shelf.save("Anna", higgs, (sound, second), "Hello")
    codes = shelf.load("Anna", fish).codes
    assert codes.shape == (10, -(-2 * RATE // HOP))
    assert np.array_equal(codes, fish.hear((sound, second), "Hello").codes)
    shelf.save("Bo", fish, (sound, second), "Hello")
    assert shelf.load("Bo", higgs).codes.shape == higgs.hear((sound, second), "Hello").codes.shape


def test_a_transcript_that_would_steer_this_model_is_refused(tiny_build, tmp_path):
    """It was harmless to the family that saved it."""
    from voxport.run.higgs import Speaker as HiggsSpeaker

    shelf = Shelf(tmp_path / "voices")
    sound = (0.3 * np.sin(np.arange(24_000) / 20)).astype(np.float32)
    shelf.save("Anna", HiggsSpeaker.load(tiny_build), (sound, 24_000), "Hello <|lang_end|> you", "keep")
    with pytest.raises(UserError, match="transcript of the voice 'Anna' holds '<.lang_end.>'"):
        shelf.load("Anna", Speaker.load(built("axial_px"), threads=1))


def test_lines_are_spoken_with_settings_of_their_own_and_not_twice(tmp_path, capsys):
    lines = [{"text": TEXT, "language": "pl", "seed": 1}, {"text": TEXT, "name": "named", "speaker": "pl_1", "quality": "q35"},
             {"text": TEXT, "language": "xx"}, {"text": TEXT, "steps": 2, "threshold": 0.5}, {"text": TEXT, "heads": 1}]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    flags = ["--input", tmp_path / "a.jsonl", "--out-dir", tmp_path / "out", "--seed", 5, "--json"]
    speak(*flags, code=1)
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert (report["spoken"], report["kept"], report["failed"]) == (3, 0, 2)
    assert "no language 'xx'" in printed.err and "unknown key 'heads'" in printed.err
    assert json.loads((tmp_path / "out/0004.json").read_text(encoding="utf-8"))["settings"]["steps"] == 2
    speak(*flags, code=1)
    assert json.loads(capsys.readouterr().out)["kept"] == 3
    speak("--text", TEXT, "--language", "pl", "--seed", 1, "--out", tmp_path / "alone.wav")
    assert (tmp_path / "alone.wav").read_bytes() == (tmp_path / "out/0001.wav").read_bytes()


def test_lines_and_a_dialogue_do_not_go_together(tmp_path):
    with pytest.raises(UserError, match="--dialogue does not go with --input"):
        speak("--input", "a.txt", "--out-dir", tmp_path, "--dialogue", "d.txt")


def test_stdout_carries_sound_and_stderr_the_report(tmp_path):
    speak("--text", TEXT, "--seed", 3, "--stream", tmp_path / "a.wav")
    command = [sys.executable, ROOT / "inference.py", "--model-path", built("axial_px"), "--text", TEXT, "--seed", "3", "--max-frames", "16"]
    done = subprocess.run([*command, "--threads", "1", "--stream", "-", "--json"], capture_output=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stderr.splitlines()[-1])
    samples = soundfile.read(tmp_path / "a.wav", dtype="int16")[0]
    assert done.stdout == wav_header(report["sample_rate"]) + samples.tobytes()


def test_a_report_beside_the_sound_is_enough_to_speak_it_again(tmp_path):
    speak("--text", TEXT, "--language", "pl", "--temperature", 0.7, "--out", tmp_path / "a.flac", "--encoding", "pcm24", "--json", tmp_path / "a.json")
    told = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert len(told["build"]["manifest_sha256"]) == 64
    again = ["--text", told["text"], "--language", "pl", "--seed", told["seed"], "--steps", told["settings"]["steps"]]
    again += ["--temperature", told["settings"]["semantic"]["temperature"], "--encoding", told["form"]["encoding"]]
    speak(*again, "--out", tmp_path / "b.flac")
    assert (tmp_path / "a.flac").read_bytes() == (tmp_path / "b.flac").read_bytes()
    for name in ("c.ogg", "c.opus", "c.mp3"):
        speak("--text", TEXT, "--seed", 1, "--out", tmp_path / name, "--sample-rate", 48_000)
        assert soundfile.info(tmp_path / name).samplerate == 48_000


def test_the_selftest_verifies_and_decodes(capsys):
    assert inference.main(["--model-path", str(built("axial_px")), "--selftest", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["selftest"]["frames"] == 3


# The plan


def test_the_plan_knows_every_part_and_forgets_those_that_are_there(tmp_path, capsys):
    flags = ["--checkpoint", str(LOCAL / "axial_px"), "--codec", str(LOCAL / "codec"), "--plan"]
    assert optimize.main([*flags, "--output", str(tmp_path / "new")]) == 0
    printed = capsys.readouterr().out
    assert all(part in printed for part in part_names(checkpoint("axial_px")))
    assert optimize.main([*flags, "--output", str(built("axial_px", "int4"))]) == 0
    assert "needed at once: 0 MB of memory" in capsys.readouterr().out
    assert not (tmp_path / "new").exists()


def test_too_little_memory_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plan, "available_memory", lambda: 1e8)
    flags = ["--checkpoint", str(LOCAL / "axial_px"), "--codec", str(LOCAL / "codec"), "--output", str(tmp_path / "new")]
    assert run_script(optimize.main, flags) == 2
    assert "of memory" in capsys.readouterr().err and not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["axial_px", "mtpdec"])
def test_the_published_size_stays_within_the_promised_memory(name):
    from benchmarks.omnifish_synthetic import published
    from voxport.build.omnifish_checkpoint import BUNDLED_CODEC_CONFIG

    config = published() if name == "axial_px" else dataclasses.replace(published(), residual=checkpoint(name).config.residual)
    import torch

    with torch.device("meta"):
        tensors = {name: torch.empty(shape) for name, shape in config.shapes().items()}
    large = dataclasses.replace(checkpoint(name), config=config, tensors=tensors, codec_folder=BUNDLED_CODEC_CONFIG.parent)
    found = needs(large, OmniFishRecipe("cpu", "int4"))
    assert set(found) == set(part_names(large))
    assert max(need.memory for need in found.values()) <= 3.5e9
    assert found["llm_decoder"].result == pytest.approx(440.4e6 * 0.64, rel=0.05)  # 20.5 bytes for 32 weights


# The benchmark of the published size


def test_the_benchmark_is_not_moved_by_one_slow_block_and_tells_broken_promises():
    from benchmarks.omnifish_full_size import block_times, judge

    steady = [1.0 + 0.01 * i for i in range(20)]
    hiccup = [*steady[:18], 9.0, steady[19]]
    assert block_times([steady, hiccup, steady])["growth"] == pytest.approx(1.18 / 1.02)
    kept = {"build": {"peak_private_mb": 2900.0}, "blocks": {"growth": 1.2}}
    assert all(promise["kept"] for promise in judge(kept).values())
    assert not judge(kept | {"blocks": {"growth": 1.31}})["block_growth"]["kept"]
    assert not judge({"build": {"peak_private_mb": 3001.0}})["build_private_mb"]["kept"]
    assert not judge({"build": {"peak_private_mb": 1.0}})["block_growth"]["kept"]  # too few blocks to tell


# The README


def test_every_command_of_the_readme_works_as_written(voice, tmp_path, monkeypatch, capsys):
    """On the tiny checkpoint, with a build that is there already; its random weights round badly: the judge may say FAIL,
    and rounded as by default they never begin to speak, so that the build is rounded another way."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## OmniFish")[1].split("\n## ")[0]
    commands = re.search(r"```\n(.*?)```", section, re.S)[1].strip().splitlines()
    for name, target in (("model/omnifish", LOCAL / "axial_px"), ("model/fish-codec", LOCAL / "codec")):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(target)
    (tmp_path / "onnx").mkdir()
    copy_build(built("axial_px", "int4"), tmp_path / "onnx/omnifish")
    (tmp_path / "voice.wav").symlink_to(voice)
    (tmp_path / "turns.txt").write_text("pl_1: Tak.\npl_2: Nie.\n", encoding="utf-8")
    (tmp_path / "lines.jsonl").write_text(json.dumps({"text": "Good morning.", "language": "en", "max_frames": 16}), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    import eval as judge_script

    scripts = {"optimize.py": optimize, "inference.py": inference, "eval.py": judge_script}
    for command in commands:
        _, script, *flags = shlex.split(command)
        flags += ["--recipe", "rtn-32"] if script == "optimize.py" else []
        for seed in range(8):
            code = run_script(scripts[script].main, [*flags, *(["--seed", str(seed)] if seed else [])])
            said = capsys.readouterr().err
            if "try another seed" not in said:
                break
        assert code == 0 or script == "eval.py" and code == 1, said
    made = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert made >= {"hello.wav", "named.wav", "named.npz", "dialogue.wav", "0001.wav", "report.html"}
