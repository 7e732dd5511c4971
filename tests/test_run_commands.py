"""inference.py on a real build: streams, pipes, voices, lines and long text, as a user types them."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import soundfile
from test_run_golden import FOLDER, ROOT, run_script, write_voice

import inference
from voxport.files import sha256_file
from voxport.lock import Lock
from voxport.run.player import wav_header
from voxport.run.voices import Shelf

TEXT = "Hello there. How are you?"


@pytest.fixture(scope="module")
def voice(tmp_path_factory):
    with np.load(FOLDER / "expected.npz") as arrays:
        return write_voice(tmp_path_factory.mktemp("voice"), dict(arrays))


def speak(build, *arguments, code=0):
    """In this process: exit code checked."""
    assert inference.main([str(a) for a in ("--model-path", build, "--max-frames", 30, *arguments)]) == code


def read(path):
    return soundfile.read(path, dtype="int16")[0]


def test_a_streamed_file_is_the_file_that_is_saved(tiny_build, tmp_path):
    speak(tiny_build, "--text", TEXT, "--seed", 3, "--out", tmp_path / "a.wav")
    speak(tiny_build, "--text", TEXT, "--seed", 3, "--stream", tmp_path / "b.wav", "--out", tmp_path / "c.wav")
    assert (tmp_path / "b.wav").read_bytes() == (tmp_path / "a.wav").read_bytes() == (tmp_path / "c.wav").read_bytes()


def test_a_report_tells_whose_voice_it_was_and_how_to_ask_again(tiny_build, voice, tmp_path, capsys):
    shelf, report = ["--voices-dir", tmp_path / "v"], tmp_path / "a.json"
    common = ["--text", TEXT, "--max-frames", 9, "--out", tmp_path / "a.wav", "--json", report, "--tags", "keep"]
    asks = lambda: json.loads(report.read_text(encoding="utf-8"))["asks"]
    speak(tiny_build, *common, "--ref-audio", voice, "--ref-text", "Hello")
    cloned = asks()
    assert cloned["ref_audio"] == str(voice) and cloned["ref_audio_sha256"] == sha256_file(voice)
    assert cloned["ref_text"] == "Hello" and cloned["tags"] == "keep" and cloned["voice_sha256"] is None
    speak(tiny_build, *common, "--ref-audio", voice, "--ref-text", "Hello", "--save-voice", "Anna", *shelf)
    assert asks() == cloned and "the voice Anna is kept in" in capsys.readouterr().err
    speak(tiny_build, *common, "--voice", "Anna", *shelf)
    assert asks()["voice_sha256"] == Shelf(tmp_path / "v").fingerprint("Anna") and asks()["ref_audio"] is None


def test_lines_of_two_runs_do_not_mix(tiny_build, tmp_path, capsys):
    (tmp_path / "l.txt").write_text("Hello\n", encoding="utf-8")
    lines = ["--input", tmp_path / "l.txt", "--out-dir", tmp_path / "o", "--max-frames", "9"]
    speak(tiny_build, *lines, "--seed", 1)
    capsys.readouterr()
    speak(tiny_build, *lines, "--seed", 2)
    assert "another take was there and is replaced" in capsys.readouterr().err
    with Lock(tmp_path / "o" / ".speaking", "x"):
        command = [sys.executable, "inference.py", "--model-path", tiny_build, *lines]
        done = subprocess.run(list(map(str, command)), capture_output=True, encoding="utf-8", cwd=ROOT)
    assert done.returncode == 2 and f"process {os.getpid()} is speaking lines into this folder" in done.stderr


@pytest.mark.parametrize("raw", [False, True])
def test_stdout_carries_sound_and_stderr_the_report(raw, tiny_build, tmp_path):
    speak(tiny_build, "--text", TEXT, "--seed", 3, "--out", tmp_path / "a.wav")
    command = [sys.executable, ROOT / "inference.py", "--model-path", tiny_build, "--text", TEXT, "--seed", "3", "--max-frames", "30"]
    done = subprocess.run([*command, "--stream", "-", "--json", *(["--raw"] if raw else [])], capture_output=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stderr.splitlines()[-1])
    header = b"" if raw else wav_header(report["sample_rate"])
    assert done.stdout == header + read(tmp_path / "a.wav").tobytes()
    assert report["seed"] == 3 and report["stream"] == "-"


def test_a_listener_who_leaves_ends_it_quietly(tiny_build):
    command = f"'{sys.executable}' '{ROOT}/inference.py' --model-path '{tiny_build}' --text '{TEXT}' --max-frames 400 --temperature 0"
    done = subprocess.run(
        ["bash", "-c", f"{command} --stream - | head -c 100 | wc -c; echo ${{PIPESTATUS[0]}}"],
        capture_output=True, cwd=ROOT, timeout=120, encoding="utf-8",
    )  # fmt: skip
    assert done.stdout.split() == ["100", "0"] and "Error" not in done.stderr and "Traceback" not in done.stderr


def test_a_voice_is_saved_listed_spoken_with_and_forgotten(tiny_build, voice, tmp_path, capsys):
    shelf = ["--voices-dir", tmp_path / "voices"]
    clone = ["--ref-audio", voice, "--ref-text", "Hello"]
    speak(tiny_build, "--text", TEXT, "--seed", 3, "--out", tmp_path / "a.wav", *clone)
    speak(tiny_build, "--save-voice", "Anna", *shelf, *clone)
    speak(tiny_build, "--text", TEXT, "--seed", 3, "--out", tmp_path / "b.wav", "--voice", "Anna", *shelf, "--json")
    assert (tmp_path / "a.wav").read_bytes() == (tmp_path / "b.wav").read_bytes()
    assert json.loads(capsys.readouterr().out)["voice"] == "Anna"
    assert inference.main(["--list-voices", "--json", *map(str, shelf)]) == 0
    assert json.loads(capsys.readouterr().out)["voices"]["Anna"]["transcript"] == "Hello"
    speak(tiny_build, "--save-voice", "Bo", "--text", TEXT, "--seed", 3, "--out", tmp_path / "c.wav", *shelf, *clone)
    assert (tmp_path / "a.wav").read_bytes() == (tmp_path / "c.wav").read_bytes()
    assert inference.main(["--delete-voice", "Anna", *map(str, shelf)]) == 0
    done = run_script("--model-path", tiny_build, "--text", TEXT, "--out", tmp_path / "d.wav", "--voice", "Anna", *shelf)
    assert done.returncode == 2 and "there are: Bo" in done.stderr and done.stderr.count("\n") == 1


def test_lines_are_spoken_and_the_bad_ones_counted(tiny_build, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "Hello", "seed": 1}\n{"text": "..."}\n{"text": "Bye", "name": "bye"}\n')
    lines = ["--input", tmp_path / "a.jsonl", "--out-dir", tmp_path / "out", "--json"]
    speak(tiny_build, *lines, code=1)
    report = json.loads(capsys.readouterr().out)
    assert (report["spoken"], report["kept"], report["failed"]) == (2, 0, 1)
    speak(tiny_build, *lines, code=1)
    assert json.loads(capsys.readouterr().out)["kept"] == 2
    speak(tiny_build, "--text", "Hello", "--seed", 1, "--out", tmp_path / "alone.wav")
    assert read(tmp_path / "alone.wav").tolist() == read(tmp_path / "out" / "0001.wav").tolist()


def test_long_text_is_read_in_parts_streamed_or_not(tiny_build, tmp_path, capsys):
    text = "Hello there you. " * 6
    common = ["--text", text, "--seed", 3, "--part-tokens", 12]
    speak(tiny_build, *common, "--out", tmp_path / "a.wav", "--json", tmp_path / "a.json")
    report = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert len(report["parts"]) > 1 and " ".join(part["text"] for part in report["parts"]) == text.strip()
    speak(tiny_build, *common, "--stream", tmp_path / "b.wav")
    assert read(tmp_path / "a.wav").tolist() == read(tmp_path / "b.wav").tolist()
    speak(tiny_build, *common, "--part-tokens", 1000, "--out", tmp_path / "c.wav", "--json")
    assert "parts" not in json.loads(capsys.readouterr().out)


def test_a_report_beside_the_sound_is_enough_to_speak_it_again(tiny_build, tmp_path):
    speak(tiny_build, "--text", TEXT, "--out", tmp_path / "a.flac", "--encoding", "pcm24", "--json", tmp_path / "a.json")
    told = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert len(told["build"]["manifest_sha256"]) == 64
    speak(
        tiny_build, "--text", told["text"], "--seed", told["seed"], "--temperature", told["sampling"]["temperature"],
        "--top-k", told["sampling"]["top_k"], "--top-p", told["sampling"]["top_p"], "--encoding", told["form"]["encoding"],
        "--out", tmp_path / "b.flac",
    )  # fmt: skip
    assert (tmp_path / "a.flac").read_bytes() == (tmp_path / "b.flac").read_bytes()
