"""inference.py: what the command line refuses, how, and that it does so before the model is touched."""

import json

import pytest
from run_fakes import make_manifest

import inference
from voxport.errors import run_script
from voxport.manifest import Manifest
from voxport.run.cli import make_parser
from voxport.run.verbs import Build


@pytest.fixture
def build(tmp_path):
    """A folder with a manifest and nothing else: whatever gets as far as loading a part fails in another way."""
    folder = tmp_path / "build"
    folder.mkdir()
    make_manifest().write(folder)
    return folder


def run(*arguments):
    return run_script(inference.main, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\n",
        "\u200b",
        "...",
        "🙂",
        "\ufeff",
        "\0",
        "<|emotion:anger|>",
        "a <|audio|>",
        "a <|calm|>",
        "a <tool_call>",
    ],
)
def test_text_that_cannot_be_spoken_ends_with_two_and_one_line(text, build, tmp_path, capsys):
    assert run("--text", text, "--out", tmp_path / "x.wav", "--model-path", build) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert [item.name for item in tmp_path.iterdir()] == ["build"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--text", "Hi"], "nothing says where the speech is to go"),
        (["--out", "x.wav"], "--text is needed"),
        (["--text", "Hi", "--out", "x.doc"], "must end in .wav or .flac"),
        (["--text", "Hi", "--out", "no/folder/x.wav"], "no/folder/x.wav"),
        (["--text", "Hi", "--out", "x.wav", "--save-codes", "x.txt"], "must end in .npz"),
        (["--text", "Hi", "--out", "x.wav", "--ref-audio", "no.wav"], "no.wav does not exist"),
        (["--text", "Hi", "--out", "x.wav", "--max-frames", "0"], "--max-frames"),
        (["--text", "Hi", "--out", "x.wav", "--provider", "gpu"], "unknown provider 'gpu'"),
        (["--text", "Hi", "--out", "x.wav", "--threads", "0"], "--threads"),
        (["--text", "Hi", "--out", "x.wav", "--temperature", "nan"], "--temperature"),
        (["--text", "Hi", "--out", "x.wav", "--seed", "-4"], "--seed"),
        (["--text", "Hi", "--out", "x.wav"], "lists no tokenizer.json"),
        (["--selftest"], "is missing"),
        (["--text", "Hi", "--out", "x.wav", "--voice", "../x"], "cannot be the name of a voice"),
        (["--text", "Hi", "--out", "x.wav", "--voice", "Anna", "--voices-dir", "."], "no voice 'Anna' in .; there is none"),
        (["--text", "Hi", "--out", "x.wav", "--voice", "Anna", "--ref-audio", "a.wav"], "--ref-audio does not go with --voice"),
        (["--save-voice", "Anna"], "--save-voice needs the recording"),
        (["--save-voice", "Anna", "--ref-audio", "a.wav", "--out", "x.wav"], "--out does not go without --text"),
        (["--save-voice", "Anna", "--ref-audio", "a.wav", "--text", "Hi"], "nothing says where the speech is to go"),
        (["--save-voice", "Anna", "--voice", "Eve", "--text", "Hi"], "--save-voice does not go with --voice"),
        (["--list-voices", "--delete-voice", "Anna", "--voices-dir", "v"], "--delete-voice does not go with --list-voices"),
        (["--delete-voice", "Anna", "--voices-dir", "."], "no voice 'Anna'"),
        (["--list-voices", "--voices-dir", "v"], "--voices-dir v is no folder"),
        (["--verify", "--selftest"], "--verify does not go with --selftest"),
        (["--verify", "--text", "Hi"], "--text does not go with --verify"),
        (["--selftest", "--out", "x.wav"], "--out does not go with --selftest"),
        (["--list-voices", "--dialogue", "d.txt"], "--dialogue does not go with --list-voices"),
        (["--list-voices", "--input", "l.txt", "--out-dir", "o"], "--input does not go with --list-voices"),
        (["--text", "Hi", "--out", "x.wav", "--stream", "./x.wav"], "name the same file"),
        (["--input", "a.txt", "--out-dir", "o", "--raw"], "--raw does not go with --input"),
        (["--input", "a.txt"], "--input needs --out-dir"),
        (["--input", "no.txt", "--out-dir", "o"], "--input no.txt does not exist"),
        (["--input", "a.txt", "--out-dir", "o", "--text", "Hi"], "--text does not go with --input"),
        (["--text", "Hi", "--out-dir", "o"], "--out-dir goes with --input"),
        (["--text", "Hi", "--stream", "x.mp3"], "must end in .wav"),
        (["--text", "Hi", "--stream", "x.wav", "--raw"], "must end in .raw"),
        (["--text", "Hi", "--out", "x.wav", "--raw"], "--raw goes with --stream"),
        (["--text", "Hi", "--out", "x.wav", "--json", "x.txt"], "must end in .json"),
        (["--text", "Hi", "--out", "x.wav", "--batch", "0"], "--batch"),
        (["--text", "Hi", "--out", "x.opus", "--sample-rate", "44100"], ".opus cannot hold 44100 Hz"),
        (["--text", "Hi", "--out", "x.flac", "--encoding", "float"], "cannot write .flac as float"),
    ],
)
def test_wrong_input_ends_with_two_and_names_the_remedy(arguments, message, build, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments, "--model-path", build) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--ref-audio", "a.wav", "--ref-audio", "b.wav"],
        ["--ref-audio", "a.wav", "b.wav"],
        ["--ref-text", "a", "--ref-text", "b"],
        ["--tags", "drop"],
        ["--temp", "1"],
    ],
)
def test_a_second_reference_and_unknown_flags_are_errors_of_the_parser(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        run("--text", "Hi", "--out", "x.wav", *arguments)
    assert stop.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_a_folder_without_a_manifest_is_no_build(tmp_path, capsys):
    assert run("--text", "Hi", "--out", tmp_path / "x.wav", "--model-path", tmp_path) == 2
    assert "optimize.py" in capsys.readouterr().err


def test_every_flag_says_its_default_and_its_effect():
    for action in make_parser()._actions:
        assert action.help and len(action.help) > 20, action.dest
        assert action.help.isascii()


def test_a_report_names_the_build(build):
    report = Build(build, Manifest.read(build), None).report()
    assert json.loads(json.dumps(report))["target"] == "cpu_fp32"
