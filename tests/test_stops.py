"""Stopped at any moment, or with nobody left to read: whole files or none, one line, the exit code that shells expect."""

import importlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import ROOT, TINY

from voxport import errors
from voxport.errors import UserError, WorkError, run_script, say, stoppable
from voxport.files import atomic_path

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals and pipes of POSIX")
LONG = ["--max-frames", "2000", "--temperature", "0", "--threads", "1"]  # a stuck greedy voice: some seconds of work


def command(script: str, *arguments) -> list[str]:
    return [sys.executable, str(ROOT / script), *map(str, arguments)]


def speak(build, *arguments) -> list[str]:
    return command("inference.py", "--model-path", build, *arguments)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def stop_when(arguments: list[str], ready, number: signal.Signals) -> tuple[int, list[str]]:
    """Start a script, send it a signal as soon as `ready()`; its exit code and the lines that it said."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8", cwd=ROOT)
    end = time.monotonic() + 60
    while not ready() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.002)
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    return process.returncode, said.splitlines()


@pytest.mark.parametrize("number, code, says", [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "ended by SIGTERM")])
def test_a_stream_that_is_stopped_leaves_no_file(number, code, says, tiny_build, tmp_path):
    target = tmp_path / "x.wav"
    flowing = lambda: target.is_file() and target.stat().st_size > 1000
    ended, said = stop_when(speak(tiny_build, "--text", "Hi", *LONG, "--stream", target), flowing, number)
    assert ended == code and said[-1] == says and not any("Traceback" in line for line in said)
    assert files(tmp_path) == set()


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_lines_that_are_stopped_leave_whole_files_and_the_next_run_goes_on(number, code, tiny_build, tmp_path):
    (tmp_path / "l.txt").write_text("Hello there\n" * 14, encoding="utf-8")
    lines = ["--input", tmp_path / "l.txt", "--out-dir", tmp_path / "o", "--max-frames", "120", "--temperature", "0", "--seed", "1"]
    begun = lambda: (tmp_path / "o" / "0002.json").is_file()
    ended, said = stop_when(speak(tiny_build, *lines), begun, number)
    assert ended == code and not any("Traceback" in line for line in said)
    left = files(tmp_path / "o")
    assert left and all(name[:4].isdigit() and name[4:] in (".wav", ".json") for name in left)
    reports = [json.loads((tmp_path / "o" / name).read_text(encoding="utf-8")) for name in left if name.endswith(".json")]
    whole = [report for report in reports if report["sound"] is not None]
    done = subprocess.run(speak(tiny_build, *lines), capture_output=True, encoding="utf-8", cwd=ROOT)
    assert done.returncode == 0 and f"{len(whole)} there before, 0 failed" in done.stderr


def test_a_build_that_is_asked_to_end_does_so_in_one_line_and_leaves_no_scratch(tmp_path):
    out = tmp_path / "out"
    made = lambda: (out / ".build" / "scratch").is_dir() and any((out / ".build" / "scratch").iterdir())
    build = command("optimize.py", "--checkpoint", TINY, "--output", out, "--precision", "int4", "--components", "llm_decoder,text_embed")
    code, said = stop_when(build, made, signal.SIGTERM)
    assert code == 143 and said[-1] == "ended by SIGTERM" and not any("Traceback" in line for line in said)
    assert {path.name for path in out.glob(".build/*")} <= {"next"} and not (out / "manifest.json").exists()


def test_ctrl_c_while_modules_are_loaded_says_nothing_and_ends_by_the_signal(tmp_path):
    slow = tmp_path / "numpy.py"  # the first heavy module: here it only waits
    slow.write_text(f"import pathlib, time\npathlib.Path({str(tmp_path / 'here')!r}).touch()\ntime.sleep(60)", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen(command("inference.py", "--help"), stderr=subprocess.PIPE, env=environment)
    while not (tmp_path / "here").exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[1] == b"" and process.returncode == -signal.SIGINT


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_signal_that_asks_to_end_cleans_up_as_ctrl_c_does(number, tmp_path, capsys):
    before = signal.getsignal(number)

    def write(argv):
        with atomic_path(tmp_path / "x.json") as temporary:
            temporary.write_text("half", encoding="utf-8")
            signal.raise_signal(number)

    assert run_script(write, []) == 128 + number
    assert files(tmp_path) == set() and len(capsys.readouterr().err.splitlines()) == 1
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("turned_into", [ImportError("initialization failed"), UserError("no such thing"), OSError(39, "Directory not empty")])
def test_a_signal_that_a_library_turns_into_an_error_of_its_own_is_still_the_signal(turned_into, capsys):
    def work(argv):
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt as stop:  # as the start of a compiled module does
            raise turned_into from stop

    assert run_script(work, []) == 143
    assert capsys.readouterr().err == "ended by SIGTERM\n"


def test_an_error_of_this_program_is_no_stop(capsys):
    def work(argv):
        raise RuntimeError("a fault")

    with pytest.raises(RuntimeError, match="a fault"):
        run_script(work, [])
    assert capsys.readouterr().err == ""


def test_an_impatient_second_signal_does_not_cut_the_cleaning_short(monkeypatch):
    cleaned = []
    with pytest.raises(KeyboardInterrupt), stoppable():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGTERM)
            cleaned.append(1)
    assert cleaned
    monkeypatch.setattr(errors, "PATIENCE", 0.0)  # but one that comes later is heard, should the first have been swallowed
    with stoppable():
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)


def test_a_signal_that_was_to_be_ignored_still_is():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with stoppable():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_script_may_run_in_another_thread():
    codes = []
    thread = threading.Thread(target=lambda: codes.append(run_script(lambda argv: 0, [])))
    thread.start()
    thread.join()
    assert codes == [0]


# Nobody reads, or nothing can be written.


def shell(line: str) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", "-c", line], capture_output=True, encoding="utf-8", cwd=ROOT)


SAY = "{python} inference.py --model-path {build} --text Hello --max-frames 9 --threads 1 "
QUIET = [
    ("--out {out}/x.wav --json | head -c 0; echo ${{PIPESTATUS[0]}}", "0", {"x.wav"}),
    ("--stream - --raw | head -c 0; echo ${{PIPESTATUS[0]}}", "0", set()),
    ("--help | head -c 0; echo ${{PIPESTATUS[0]}}", "0", set()),
    ("--out {out}/x.wav 2>&1 | head -c 0; echo ${{PIPESTATUS[0]}}", "0", {"x.wav"}),  # what is said has nobody to read it
    ("--out {out}/x.wav 2>&-; echo $?", "0", {"x.wav"}),  # started without stderr
    ("--out {out}/x.wav --json >&-; echo $?", "0", {"x.wav"}),  # the report then goes to stderr
    ("--out {out}/x.wav --json >/dev/full; echo $?", "1", {"x.wav"}),
    ("--stream - >/dev/full; echo $?", "1", set()),
    ("--stream - >&-; echo $?", "2", set()),
]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments, code, left", QUIET, ids=range(len(QUIET)))
def test_a_reader_who_has_gone_ends_nothing_and_a_full_disk_is_one_line(arguments, code, left, tiny_build, tmp_path):
    done = shell((SAY + arguments).format(python=sys.executable, build=tiny_build, out=tmp_path))
    assert done.stdout.split()[-1] == code, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert sum(line.startswith("error: ") for line in done.stderr.splitlines()) == (code != "0" and 1)
    assert files(tmp_path) == left


class Gone(io.StringIO):
    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


class Full(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


def test_say_goes_on_without_a_reader_and_knows_a_full_disk(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Gone())
    say("hello", sys.stdout)
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(WorkError, match="stdout: No space left"):
        say("hello", sys.stdout)
    for stream in (Gone(), Full(), None):  # a log that cannot be written stops nobody
        monkeypatch.setattr(sys, "stderr", stream)
        say("hello")


@pytest.mark.parametrize(
    "raised, code, words",
    [
        (MemoryError("Unable to allocate 9 GiB"), 1, "memory ran out (Unable to allocate 9 GiB)"),
        (OSError(36, "File name too long", "aaa"), 1, "aaa: File name too long"),
        (WorkError("line one\nline two"), 1, "line one line two"),
        (WorkError("x" * 10**6), 1, "xxx"),
    ],
)
def test_whatever_a_user_can_meet_is_one_short_line(raised, code, words, capsys):
    def fail(argv):
        raise raised

    assert run_script(fail, []) == code
    said = capsys.readouterr().err
    assert said.startswith("error: ") and words in said and said.count("\n") == 1 and len(said) < 3000


def test_reports_of_paths_that_are_no_unicode_can_be_read_again(tiny_build, tmp_path):
    name = os.fsencode(tmp_path) + b"/\xff.wav"
    done = subprocess.run([*speak(tiny_build, "--text", "Hi", "--max-frames", 9, "--json", tmp_path / "x.json"), "--out", name], cwd=ROOT)
    if done.returncode != 0:
        pytest.skip("this file system wants Unicode")
    assert os.path.isfile(name) and os.fsencode(json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["out"]) == name


@pytest.mark.parametrize("script", ["optimize", "eval", "inference", "diagnose_cuda", "_build_text_embed"])
def test_help_tells_every_exit_code(script, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module(script).main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "2 wrong input" in said and "128 and the signal's number" in said and "143 SIGTERM" in said
