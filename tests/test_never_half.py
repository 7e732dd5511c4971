"""Never half a build: killed, full or interrupted, what lies in the folder is a whole build, and the next run goes on."""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import edit_json, link_checkpoint
from conftest import ROOT, TINY, build
from short_build import DEAD, NEVER, replace_text_embed

import optimize
from voxport.build import folder, higgs, swap, workshop
from voxport.build.child import run_in_child
from voxport.build.folder import BuildFolder
from voxport.errors import UserError, WorkError, run_script
from voxport.lock import Lock
from voxport.manifest import MANIFEST_NAME, Manifest, verify_files
from voxport.run.higgs import Speaker

KILLS = 6  # benchmarks/kill_test.py does 20
posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a process")


def listing(place: Path) -> dict[str, bytes]:
    """Name and bytes of every file directly in a folder."""
    return {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}


def verified(place: Path) -> Manifest:
    """The manifest of a folder whose every file is what it says."""
    manifest = Manifest.read(place)
    verify_files(place, manifest.files | {n: r for part in manifest.parts.values() for n, r in part.files.items()})
    return manifest


def timeless(manifest: Manifest) -> Manifest:
    return dataclasses.replace(manifest, created="")


def start_build(checkpoint: Path, output: Path, *flags: str) -> subprocess.Popen:
    """A build in an interpreter of its own: a fork of this one would inherit thread pools that have no threads."""
    command = [sys.executable, str(ROOT / "optimize.py"), "--checkpoint", str(checkpoint), "--output", str(output), *flags]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def short_build(place: Path, step: int, *how: str) -> subprocess.CompletedProcess:
    """`replace_text_embed` that ends at a step on the disk, in a process of its own."""
    command = [sys.executable, str(ROOT / "tests" / "short_build.py"), str(place), str(step), *how]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60)


@pytest.fixture(scope="module")
def other_checkpoint(tmp_path_factory) -> Path:
    """The tiny checkpoint with another epsilon: every part must be made again."""
    checkpoint = link_checkpoint(tmp_path_factory.mktemp("other") / "checkpoint")
    edit_json(checkpoint / "config.json", lambda c: c["text_config"].update(rms_norm_eps=1e-5))
    return checkpoint


@pytest.fixture
def mine(tiny_int4, tmp_path) -> Path:
    """A finished build to put at risk, with a file of the user's own in it."""
    place = shutil.copytree(tiny_int4, tmp_path / "mine")
    (place / "notes.txt").write_text("my own", encoding="utf-8")
    return place


# Kill at any moment.


@posix
@pytest.mark.timeout(600)
def test_a_build_killed_at_random_moments_leaves_a_build_that_speaks_and_ends_as_if_undisturbed(mine, other_checkpoint, tmp_path):
    flags = ["--precision", "int4"]
    start = time.perf_counter()
    assert start_build(other_checkpoint, tmp_path / "undisturbed", *flags).wait() == 0
    lasts = time.perf_counter() - start
    undisturbed = timeless(verified(tmp_path / "undisturbed"))
    before, rng = timeless(verified(mine)), random.Random(4)
    for _ in range(KILLS):
        process = start_build(other_checkpoint, mine, *flags)
        time.sleep(rng.uniform(lasts / 5, lasts * 3 / 4))  # the first fifth is spent on imports; finished parts are kept
        process.kill()
        process.wait()
        assert timeless(verified(mine)) in (before, undisturbed)
        assert len(Speaker.load(mine).speak("Hello", seed=1, max_frames=2).codes) == 2
    build(other_checkpoint, mine, *flags)
    assert timeless(verified(mine)) == undisturbed
    assert {**listing(tmp_path / "undisturbed"), MANIFEST_NAME: b"", "notes.txt": b"my own"} == {**listing(mine), MANIFEST_NAME: b""}
    assert {path.name for path in mine.iterdir() if path.is_dir()} == set()
    assert not swap.aside(mine).exists()


def moments(steps: int) -> list[int]:
    """Every step of the exchange, which is the last twenty or so, and some before."""
    return [*range(1, steps - 25, 6), *range(steps - 25, steps + 1)]


def finish(place: Path, wanted: Manifest) -> None:
    """The next run: recovers what it finds, and builds if it must."""
    with BuildFolder(place, Manifest.read(place)) as made:
        is_done = timeless(verified(place)) == wanted
        made.commit() if is_done else None
    if not is_done:
        replace_text_embed(place)


def count_steps(place: Path, *how: str) -> int:
    return int(short_build(place, NEVER, *how).stdout)


@posix
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux exchanges folders in one step")
def test_killed_before_any_single_step_on_the_disk_one_of_the_two_builds_is_whole(mine, tmp_path):
    old = timeless(verified(mine))
    trial = shutil.copytree(mine, tmp_path / "trial")
    steps = count_steps(trial)
    new = timeless(verified(trial))
    assert steps > 20
    for number in moments(steps):
        trial = shutil.copytree(mine, tmp_path / f"trial_{number}", copy_function=os.link)
        assert short_build(trial, number).returncode == DEAD
        assert timeless(verified(trial)) in (old, new), number
        finish(trial, new)
        assert timeless(verified(trial)) == new, number
        assert {path.name for path in trial.iterdir()} == {*folder.owned_files(trial), MANIFEST_NAME, "notes.txt"}, number
        assert not swap.aside(trial).exists()
        shutil.rmtree(trial)


@posix
def test_without_an_exchange_the_next_run_completes_what_was_cut_off(mine, tmp_path, monkeypatch):
    monkeypatch.setattr(swap, "exchange", lambda first, second: False)
    trial = shutil.copytree(mine, tmp_path / "trial")
    steps = count_steps(trial, "plain")
    new = timeless(verified(trial))
    assert (trial / "notes.txt").is_file()
    for number in moments(steps)[::2]:
        trial = shutil.copytree(mine, tmp_path / f"trial_{number}", copy_function=os.link)
        assert short_build(trial, number, "plain").returncode == DEAD
        finish(trial, new)
        assert timeless(verified(trial)) == new, number
        shutil.rmtree(trial)


# Interrupted and failing builds.


def test_an_interrupted_build_changes_nothing_and_the_next_run_keeps_what_was_finished(mine, monkeypatch, capsys):
    before = listing(mine)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(workshop, "check_decoder", interrupt)
    changed = ["--heads-precision", "int8", "--recipe", "rtn-64", "--components", "audio_heads,llm_decoder"]
    flags = ["--checkpoint", str(TINY), "--output", str(mine), *changed]
    assert run_script(optimize.main, flags) == 130
    assert listing(mine) == before
    assert {path.name for path in (mine / ".build").iterdir()} == {"next"}
    monkeypatch.undo()
    capsys.readouterr()
    assert run_script(optimize.main, flags) == 0
    assert [line.split()[0] for line in capsys.readouterr().err.splitlines() if "up to date" in line] == ["audio_heads"]
    assert verified(mine).parts["audio_heads"].precision == "int8"


def test_parts_that_serve_on_are_the_same_files_and_nothing_is_left_linked(mine):
    before = (mine / "llm_decoder.onnx.data").stat()
    replace_text_embed(mine)
    after = (mine / "llm_decoder.onnx.data").stat()
    assert (after.st_ino, after.st_nlink) == (before.st_ino, 1)


def test_files_are_copied_where_the_disk_has_no_links(mine, monkeypatch):
    def refuse(*_):
        raise OSError("no links here")

    monkeypatch.setattr(folder.os, "link", refuse)
    replace_text_embed(mine)
    assert verified(mine).created == "later"


def test_what_a_killed_run_left_in_scratch_is_gone_after_the_next(mine):
    for name in ("scratch/staging", "trash", "arriving_not", "next"):
        (mine / ".build" / name).mkdir(parents=True)
    (mine / ".build" / "lock").write_text("999999")
    with BuildFolder(mine, Manifest.read(mine)):
        assert {path.name for path in (mine / ".build").iterdir()} == {"lock", "next"}
    replace_text_embed(mine)
    assert not (mine / ".build").exists()


def test_an_extraction_that_is_kept_moves_on_with_the_build(mine):
    kept = mine / ".build" / "qwen3_standalone" / "config.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    with BuildFolder(mine, dataclasses.replace(Manifest.read(mine), created="later", tools={}), keep_intermediate=True) as made:
        made.commit()
    assert verified(mine).tools == {}
    assert [path.name for path in (mine / ".build").iterdir()] == ["qwen3_standalone"]
    assert kept.is_file()


# One build at a time.


def test_a_second_build_into_the_same_folder_is_refused_with_the_holder(mine):
    with BuildFolder(mine, Manifest.read(mine)):
        with pytest.raises(UserError, match=f"{mine} is being built by process {os.getpid()}"):
            BuildFolder(mine, Manifest.read(mine))
    replace_text_embed(mine)


def test_the_lock_of_a_dead_process_is_not_in_the_way(tmp_path):
    take = "import os, sys; from pathlib import Path; from voxport.lock import Lock; held = Lock(Path(sys.argv[1])); os._exit(3)"
    assert subprocess.run([sys.executable, "-c", take, str(tmp_path / "x" / "lock")], cwd=ROOT).returncode == 3
    assert (tmp_path / "x" / "lock").is_file()
    Lock(tmp_path / "x" / "lock").release()
    assert list((tmp_path / "x").iterdir()) == []


# A full disk.


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 24 MB in memory, and a way to let it grow."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = lambda *options: subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(place)], capture_output=True)
    if sys.platform != "linux" or os.geteuid() != 0 or mount("-o", "size=24m").returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield place, lambda size: mount("-o", f"remount,size={size}")
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.timeout(600)
def test_a_full_disk_leaves_the_old_build_and_room_lets_the_next_run_go_on(small_disk, tiny_int4, other_checkpoint, monkeypatch, capsys):
    from voxport.build import plan

    monkeypatch.setattr(plan, "free_disk", lambda path: 1 << 40)  # it looks large enough, and is not
    disk, grow = small_disk
    place = shutil.copytree(tiny_int4, disk / "build")
    before = listing(place)
    flags = ["--checkpoint", str(other_checkpoint), "--output", str(place), "--precision", "int4"]
    assert run_script(optimize.main, flags) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ") and "is full" in said and "run again" in said
    assert listing(place) == before
    grow("100m")
    assert run_script(optimize.main, flags) == 0
    assert verified(place).source.fingerprint != json.loads(before[MANIFEST_NAME])["source"]["fingerprint"]


# Steps in processes of their own.


def test_an_isolated_build_gives_the_same_files(tiny_int4, tmp_path, monkeypatch):
    monkeypatch.setattr(higgs, "ISOLATED_BYTES", 0)
    built = verified(build(TINY, tmp_path / "out", "--precision", "int4", "--components", "audio_embed"))
    assert built.parts["audio_embed"] == Manifest.read(tiny_int4).parts["audio_embed"]


def refuse(message: str) -> None:
    raise UserError(message)


def exhaust_memory() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (1 << 28, 1 << 28))
    bytearray(1 << 30)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_answer_and_a_users_mistake_come_back_from_a_child():
    assert run_in_child("adding", sum, [1, 2]) == 3
    with pytest.raises(UserError, match="^the file is wrong$") as caught:
        run_in_child("refusing", refuse, "the file is wrong")
    assert caught.value.code == 2


@posix
def test_a_child_that_is_killed_or_runs_out_of_memory_is_an_error_that_names_the_part():
    with pytest.raises(WorkError, match="^decoder: its process was killed, most likely because memory ran out"):
        run_in_child("decoder", kill_self)
    with pytest.raises(WorkError, match="^decoder: MemoryError"):
        run_in_child("decoder", exhaust_memory)


SLEEPER = """
import os, sys, time
from voxport.build.child import run_in_child
def sleep(path):
    open(path, "w").write(str(os.getpid()))
    time.sleep(60)
"""
START = "import sys, sleeper; sleeper.run_in_child('sleeping', sleeper.sleep, sys.argv[1])"


@posix
def test_a_child_does_not_outlive_a_killed_build(tmp_path):
    (tmp_path / "sleeper.py").write_text(SLEEPER, encoding="utf-8")
    note = tmp_path / "pid"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    parent = subprocess.Popen([sys.executable, "-c", START, str(note)], env=env)
    child = int(wait_until(lambda: note.is_file() and note.read_text()))
    assert child and is_alive(child)
    parent.kill()
    parent.wait()
    assert wait_until(lambda: not is_alive(child), 10)


def wait_until(condition, seconds: float = 60):
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False
