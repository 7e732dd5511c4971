"""Odd machines: little memory, full or read-only disks, no home, old locales, names with spaces and without Unicode."""

import errno
import importlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
from conftest import ROOT
from test_never_half import small_disk  # noqa: F401
from test_run_golden import run_script

import inference
from voxport import errors, memory
from voxport.errors import UserError, WorkError
from voxport.files import atomic_path, check_folder, check_target, is_file, write_json
from voxport.memory import available_memory, group_room, require_memory
from voxport.run.audio import Form, write_sound
from voxport.run.cache import GROWTH, Store
from voxport.run.cli import as_typed, refuse_loss
from voxport.run.higgs import Speaker

posix = pytest.mark.skipif(os.name == "nt", reason="POSIX files")
NOISE = np.random.default_rng(0).uniform(-0.5, 0.5, 48000).astype(np.float32)
SHORT = ["--max-frames", "9", "--threads", "1", "--seed", "1"]


def run(*arguments) -> int:
    return errors.run_script(inference.main, [str(argument) for argument in arguments])


# Memory.


@pytest.mark.parametrize(
    "files, room",
    [
        ({"memory.max": "3000", "memory.current": "1000"}, 2000),
        ({"memory.max": "max", "memory.current": "1000"}, None),
        ({"memory.max": "3000", "memory.current": "2900", "memory.stat": "anon 100\ninactive_file 1500\nactive_file 700\n"}, 2300),
        ({"memory/memory.limit_in_bytes": "5000", "memory/memory.usage_in_bytes": "1000"}, 4000),
        ({"a/b/memory.max": "500", "a/b/memory.current": "100", "a/memory.max": "450", "a/memory.current": "100"}, 350),
        ({"memory.max": "nonsense", "memory.current": "1"}, None),
        ({}, None),
    ],
    ids=["v2", "v2_unlimited", "v2_cached_files_are_given_back", "v1", "nested", "broken", "none"],
)
def test_the_limit_of_a_container_counts(files, room, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n", encoding="ascii")
    own = tmp_path / "own"
    own.write_text("4:memory:/x\n0::/a/b\n", encoding="ascii")
    assert group_room(tmp_path, own) == room


def test_a_limit_of_this_process_counts_by_what_is_left_of_it(monkeypatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (12345, 12345) if kind == resource.RLIMIT_DATA else (-1, -1))
    monkeypatch.setattr(memory, "_taken", lambda: (10**9, 345.0))
    assert available_memory() == 12000


def test_too_little_memory_is_told_before_anything_is_loaded(tiny_build, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(memory, "available_memory", lambda: 5e6)
    monkeypatch.setattr(memory, "_meminfo", lambda key: 0.0)
    assert run("--model-path", tiny_build, "--text", "Hi", "--out", tmp_path / "x.wav") == 2
    said = capsys.readouterr().err
    assert "takes 0.1 GB of memory and 0.0 GB is available" in said and said.count("\n") == 1 and not list(tmp_path.iterdir())


def test_swap_counts_and_nothing_known_refuses_nothing(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 2e9)
    monkeypatch.setattr(memory, "_meminfo", lambda key: 2e9)
    require_memory(3.5e9, "it")
    with pytest.raises(UserError, match=r"it takes 4.5 GB of memory and 2.0 GB is available; .*int4"):
        require_memory(4.5e9, "it")
    monkeypatch.setattr(memory, "available_memory", lambda: None)
    require_memory(1e15, "it")


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs prlimit")
def test_a_process_with_a_limit_fails_in_one_line(tiny_build, tmp_path):
    limited = ["prlimit", "--as=240000000", sys.executable, str(ROOT / "inference.py")]
    done = subprocess.run(
        [*limited, "--model-path", tiny_build, "--text", "Hi", *SHORT, "--out", tmp_path / "x.wav"],
        capture_output=True, encoding="utf-8", cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    said = done.stderr.splitlines()
    assert done.returncode == 2 and len(said) == 1 and "GB of memory" in said[0] and "raise the limit of this process" in said[0]
    assert not list(tmp_path.iterdir())


def test_a_cache_that_finds_no_room_is_as_it_was(monkeypatch):
    store = Store(3, (2, 1, 4), np.float32, "cpu")
    pieces = [np.full((1, 5, 4), value, np.float32) for value in (1, 2, 3)]
    store.write(1, pieces)
    places, zeros, calls = [tensor.ctypes.data for tensor in store._tensors], np.zeros, iter(range(9))

    def short(shape, kind):
        if next(calls) == 2:
            raise MemoryError
        return zeros(shape, kind)

    monkeypatch.setattr(np, "zeros", short)
    with pytest.raises(WorkError, match="no memory for 2 texts of 512 positions .* lower --batch"):
        store.reserve(GROWTH + 1)
    assert store.capacity == GROWTH and [tensor.ctypes.data for tensor in store._tensors] == places
    assert all((a == b).all() for a, b in zip(store.read(1, 5), pieces, strict=True))
    with pytest.raises(WorkError, match="no memory"):
        Store(2, (1 << 40, 8, 128), np.float32, "cpu").reserve(1)


def test_more_at_once_than_the_memory_holds_fails_line_by_line(tiny_build, tmp_path, capsys):
    (tmp_path / "l.txt").write_text("Hello\nHello\n", encoding="utf-8")
    code = run("--model-path", tiny_build, "--input", tmp_path / "l.txt", "--out-dir", tmp_path / "o", "--batch", 1 << 22, *SHORT)
    assert code == 0 or capsys.readouterr().err.count("lower --batch") == 2  # some systems lend whatever is asked for


@pytest.mark.parametrize("threads", [0, -1, 100_000])
def test_threads_that_no_machine_has_are_refused(threads, tiny_build):
    with pytest.raises(UserError, match="--threads must be a whole number from 1 to"):
        Speaker.load(tiny_build, threads=threads)


@pytest.mark.skipif(shutil.which("taskset") is None, reason="needs taskset")
def test_one_usable_core_is_enough(tiny_build, tmp_path):
    script = [str(ROOT / "inference.py"), "--model-path", str(tiny_build), "--text", "Hi", "--max-frames", "9"]
    done = subprocess.run(["taskset", "-c", "0", sys.executable, *script, "--out", tmp_path / "x.wav"], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr


# Disks.


@pytest.mark.parametrize("name", ["x.wav", "x.flac", "x.ogg", "x.opus", "x.mp3", "x.npz", "x.json", "stream.wav", "voice", "lines"])
def test_a_full_disk_is_one_line_and_leaves_no_half_file(name, small_disk, tiny_build, tmp_path, monkeypatch):  # noqa: F811
    disk, resize = small_disk
    (disk / "fill").write_bytes(bytes(shutil.disk_usage(disk).free - (1 << 13)))  # 8 kB are left
    (tmp_path / "l.txt").write_text("Hello\n", encoding="utf-8")
    voice = ["--save-voice", "A", "--voices-dir", disk / "v", "--ref-audio", ROOT / "demo/voices/female.wav"]
    out = ["--text", "Hello", "--max-frames", "400", "--temperature", "0", "--out", tmp_path / "ok.wav"]
    if name == "x.json":
        (disk / "more").write_bytes(bytes(1 << 13))
    flags = {"x.npz": [*out, "--save-codes", disk / name], "x.json": [*out, "--json", disk / name], "voice": voice,
             "stream.wav": [*out, "--stream", disk / name],
             "lines": ["--input", tmp_path / "l.txt", "--out-dir", disk, "--max-frames", "400", "--temperature", "0"]}  # fmt: skip
    done = run_script("--model-path", tiny_build, *flags.get(name, ["--text", "Hello", *out[2:6], "--out", disk / name]))
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert {path.name for path in disk.rglob("*")} - {"fill", "more", "v"} == set()


def test_a_file_that_lost_its_end_in_silence_is_noticed(tmp_path, monkeypatch):
    whole = soundfile.SoundFile.write
    monkeypatch.setattr(soundfile.SoundFile, "write", lambda file, samples: whole(file, samples[: len(samples) // 2]))
    for name in ("x.wav", "x.ogg", "x.mp3"):
        with pytest.raises(WorkError, match=r"only \d+ of 48000 samples were kept"):
            write_sound(tmp_path / name, NOISE, 24000, Form())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number, says", [(errno.ENOSPC, "free some space"), (errno.EIO, "cannot write"), (errno.EDQUOT, "free some space")])
def test_a_disk_that_fails_while_json_is_written_is_a_work_error(number, says, tmp_path, monkeypatch):
    (tmp_path / "x.json").write_text("old", encoding="utf-8")

    def fail(*arguments, **named):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(WorkError, match=says):
        write_json(tmp_path / "x.json", {})
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


@posix
def test_links_lead_to_what_is_written_and_stay(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "x.wav").write_bytes(b"old")
    for link, target in (("x.wav", "real/x.wav"), ("new.wav", "real/new.wav")):
        (tmp_path / link).symlink_to(target)
        write_sound(tmp_path / link, NOISE, 24000)
        assert (tmp_path / link).is_symlink() and soundfile.info(tmp_path / target).frames == len(NOISE)
    assert {path.name for path in tmp_path.iterdir()} == {"real", "x.wav", "new.wav"}


@posix
def test_only_files_are_written_over(tmp_path):
    os.mkfifo(tmp_path / "pipe.wav")
    (tmp_path / "null.wav").symlink_to("/dev/null")
    (tmp_path / "lost.wav").symlink_to("no/where.wav")
    (tmp_path / "folder.wav").mkdir()
    for name in ("pipe.wav", "null.wav", "lost.wav", "folder.wav", "a" * 300 + ".wav", "no/x.wav", "null.wav/x.wav", "a\0b.wav"):
        with pytest.raises(UserError, match="cannot write"):
            check_target(tmp_path / name)
        with pytest.raises(UserError, match="cannot write"), atomic_path(tmp_path / name):
            raise AssertionError
    assert check_target(tmp_path / "pipe.wav", pipe=True) and stat.S_ISCHR(os.stat("/dev/null").st_mode)
    longest = tmp_path / ("é" * 125 + ".wav")  # 254 bytes
    write_sound(longest, NOISE, 24000)
    assert longest.is_file()


@posix
def test_a_named_pipe_is_streamed_into_and_stays(tiny_build, tmp_path):
    os.mkfifo(tmp_path / "x.wav")
    reader = subprocess.Popen(["cat", tmp_path / "x.wav"], stdout=subprocess.PIPE)
    assert run("--model-path", tiny_build, "--text", "Hi", *SHORT, "--stream", tmp_path / "x.wav") == 0
    assert reader.communicate(timeout=30)[0][:4] == b"RIFF" and stat.S_ISFIFO(os.stat(tmp_path / "x.wav").st_mode)


@pytest.mark.parametrize("flags", [["--out", "v.wav"], ["--stream", "v.wav"], ["--out", "./x/../v.wav"]])
def test_the_recording_of_a_voice_is_never_written_over(flags, tiny_build, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    before = shutil.copy(ROOT / "demo/voices/female.wav", tmp_path / "v.wav").read_bytes()
    assert run("--model-path", tiny_build, "--text", "Hi", *SHORT, "--ref-audio", "v.wav", *flags) == 2
    assert "it would be lost" in capsys.readouterr().err and (tmp_path / "v.wav").read_bytes() == before
    (tmp_path / "l.jsonl").write_text('{"text": "Hi", "ref_audio": "v.wav", "name": "v"}\n', encoding="utf-8")
    assert run("--model-path", tiny_build, "--input", "l.jsonl", "--out-dir", ".", *SHORT) == 1
    assert "it would be lost" in capsys.readouterr().err and (tmp_path / "v.wav").read_bytes() == before
    refuse_loss("v.wav", out="other.wav", stream=None)


def test_no_file_of_a_build_or_of_a_voice_is_written_over(tiny_build, tmp_path, capsys):
    place = shutil.copytree(tiny_build, tmp_path / "build")
    voices = ["--voices-dir", tmp_path / "v"]
    recording = ["--ref-audio", ROOT / "demo/voices/female.wav"]
    assert run("--model-path", place, "--save-voice", "Anna", *recording, *voices) == 0
    kept = tmp_path / "v" / "Anna" / "voice.npz"
    before = {path: path.read_bytes() for path in (*place.iterdir(), kept)}
    say = ["--model-path", place, "--text", "Hi", *SHORT, "--out", tmp_path / "x.wav"]
    for target in ("manifest.json", "tokenizer.json"):
        assert run(*say, "--json", place / target) == 2
        assert f"{target} is a file of the build in {place}, which would be lost" in capsys.readouterr().err
        judge = importlib.import_module("eval")
        assert errors.run_script(judge.main, ["--model-path", str(place), "--output", str(place / target)]) == 2
        assert "which would be lost" in capsys.readouterr().err
    assert run(*say, "--voice", "Anna", *voices, "--save-codes", kept) == 2
    assert "is in the folder of a saved voice" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in (*place.iterdir(), kept)}
    assert run(*say, "--json", place / "mine.json") == 0  # beside them


@pytest.mark.parametrize("flag, name", [("--output", "x.md"), ("--html", "x.json")])
def test_a_report_ends_as_what_it_is(flag, name, tiny_build, tmp_path, capsys):
    judge = importlib.import_module("eval")
    assert errors.run_script(judge.main, ["--model-path", str(tiny_build), flag, str(tmp_path / name)]) == 2
    assert f"{name} must end in ." in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_known_before_the_work(tiny_build, tmp_path, capsys):
    (tmp_path / "l.txt").write_text("Hello\n", encoding="utf-8")
    lines = ["--input", tmp_path / "l.txt", "--out-dir", tmp_path / "o"]
    assert run("--model-path", tiny_build, *lines, "--json", tmp_path / "no" / "x.json") == 2
    assert not (tmp_path / "o").exists()
    judge = importlib.import_module("eval")
    for flag, name in (("--output", "x.json"), ("--html", "x.html")):
        assert errors.run_script(judge.main, ["--model-path", str(tiny_build), flag, str(tmp_path / "no" / name)]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and "cannot write" in printed.err.splitlines()[-1]


@pytest.mark.parametrize("name", ["a" * 300, "file", "file/x", "a\0b", "a\ud800b"])
def test_an_output_folder_that_can_be_none_is_refused(name, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--output .* (cannot be a folder|is a file)"):
        check_folder(tmp_path / name, "--output")
    check_folder(tmp_path / "new" / "one", "--output")


# Names and texts.


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--text", "Hi", "--out", "a" * 300 + ".wav"], "cannot write"),
        (["--text", "Hi", "--out", "x.wav", "--ref-audio", "a" * 300], "does not exist"),
        (["--text", "Hi", "--out", "x.wav", "--model-path", "a" * 300], "holds no manifest.json"),
        (["--text", "Hi", "--out", "x.wav", "--model-path", "file/x"], "holds no manifest.json"),
        (["--input", "a" * 300 + ".txt", "--out-dir", "o"], "cannot be read"),
        (["--list-voices", "--voices-dir", "a" * 300], "is no folder"),
        (["--text", "Hi", "--out", "x.wav", "--voice", "Anna", "--voices-dir", "file"], "is no folder"),
    ],
)
def test_names_that_no_system_takes_are_one_line(arguments, message, tiny_build, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    code = run("--model-path", tiny_build, *arguments)
    assert code == 2 and message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"file"}
    assert not is_file("a\0b") and not is_file("a" * 5000)


def test_lines_with_names_that_cannot_be_written_fail_alone(tiny_build, tmp_path, capsys):
    lines = [{"text": "Hi", "name": "\ud800"}, {"text": "Hi", "name": "a" * 300}, {"text": "Hi", "ref_audio": "\ud800"},
             {"text": "Hi", "voice": "\ud800"}, {"text": "\ud800"}, {"text": "Hi", "ref_audio": "a\0b"}, {"text": "Hi"}]  # fmt: skip
    (tmp_path / "l.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    flags = ["--input", tmp_path / "l.jsonl", "--out-dir", tmp_path / "o", "--voices-dir", tmp_path / "v"]
    assert run("--model-path", tiny_build, *flags, *SHORT) == 1
    assert "1 spoken, 0 there before, 6 failed" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "o").iterdir()} == {"0007.wav", "0007.json"}


ODD = [
    {"HOME": "/nonexistent"}, {"HOME": ""}, {"VOXPORT_CACHE": "/dev/null"}, {"VOXPORT_CACHE": "/proc/x", "XDG_DATA_HOME": "/proc/y"},
    {"LC_ALL": "C"}, {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0"}, {"LC_ALL": "C", "PYTHONUTF8": "0"},
    {"PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"},
]  # fmt: skip


@posix
@pytest.mark.parametrize("environment", ODD, ids=lambda chosen: " ".join(f"{k}={v}" for k, v in chosen.items()))
def test_it_speaks_without_home_cache_or_a_modern_locale(environment, tiny_build, tmp_path):
    text, place = "你好 🙂 Łódź", tmp_path / "an other place ü 好"
    place.mkdir()
    build = place / "build ö"
    build.symlink_to(tiny_build)
    if environment.get("PYTHONUTF8") == "0" and "LC_ALL" in environment:  # libraries cannot open such a folder there
        refused = run_script("--model-path", build, "--selftest", **environment)
        assert refused.returncode == 2 and "set PYTHONUTF8=1" in refused.stderr and refused.stderr.count("\n") == 1
        build = tiny_build
    voice = shutil.copy(ROOT / "demo/voices/female.wav", place / "voice é.wav")
    clone = ["--ref-audio", voice, "--ref-text", text, "--save-voice", "Zoe", "--voices-dir", place / "voices ñ"]
    speak = ["--model-path", build, "--text", text, *SHORT, "--out", place / "x ß.wav", "--json"]
    command = [sys.executable, ROOT / "inference.py", *speak, *clone]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **environment}, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["text"] == text and soundfile.info(place / "x ß.wav").frames == 9 * 960
    assert (place / "voices ñ" / "Zoe" / "voice.npz").is_file() and not list(place.rglob("*.tmp*"))


def test_text_of_an_old_locale_is_read_as_the_utf8_that_it_is():
    typed = "你好 🙂".encode().decode("ascii", "surrogateescape")
    assert as_typed(os.fsdecode("你好 🙂".encode())) == "你好 🙂" and as_typed(None) is None and as_typed("a\nb é") == "a\nb é"
    if sys.getfilesystemencoding() == "utf-8":
        assert as_typed(typed) == "你好 🙂"
        assert as_typed("a\udcff") == "a\udcff" and as_typed("a\ud800\udc80") == "a\ud800\udc80"  # no UTF-8: refused later


@pytest.fixture
def other_user():
    """Act for another user than the one who owns everything; files of the tests that may be read, a folder that may be written."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("becomes another user")
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chmod(place, 0o755)
        (Path(place) / "out").mkdir()
        (Path(place) / "out").chmod(0o777)

        def act(*arguments):
            os.seteuid(65534)
            try:
                return run(*arguments)
            finally:
                os.seteuid(0)

        yield Path(place), act


def test_a_user_who_may_write_nothing_but_the_output_can_speak(other_user, tiny_build, monkeypatch, capsys):
    place, act = other_user
    build, out = shutil.copytree(tiny_build, place / "build"), place / "out"
    before = {path: path.stat().st_mtime_ns for path in build.iterdir()}
    monkeypatch.setenv("VOXPORT_CACHE", str(build))  # neither cache nor home may be written
    monkeypatch.setenv("HOME", str(build))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    speak = ["--model-path", build, "--text", "Hi", *SHORT]
    assert act(*speak, "--out", out / "x.wav") == 0
    capsys.readouterr()
    voice = ["--save-voice", "A", "--ref-audio", shutil.copy(ROOT / "demo/voices/female.wav", place / "v.wav")]
    for target in (["--out", build / "x.wav"], ["--stream", build / "x.wav"], ["--out", out / "y.wav", "--json", build / "x.json"],
                   ["--out", out / "y.wav", "--save-codes", build / "x.npz"], ["--out", out / "y.wav", *voice]):  # fmt: skip
        assert act(*speak, *target) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1 and ("writable" in said or "--voices-dir" in said)
    assert [path.name for path in out.iterdir()] == ["x.wav"]
    assert {path: path.stat().st_mtime_ns for path in build.iterdir()} == before


def test_files_that_may_not_be_read_are_named(other_user, tiny_build, capsys):
    place, act = other_user
    build = shutil.copytree(tiny_build, place / "build")
    (build / "llm_decoder.onnx.data").chmod(0)
    (place / "shut").mkdir(mode=0o700)
    speak = ["--model-path", build, "--text", "Hi", *SHORT, "--out", place / "out" / "x.wav"]
    for flags in ([], ["--ref-audio", place / "shut" / "v.wav"], ["--model-path", place / "shut" / "build"]):
        assert act(*speak, *flags) in (1, 2)
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1 and (str(flags[-1]) if flags else "llm_decoder.onnx.data") in said
    assert not list((place / "out").iterdir())
