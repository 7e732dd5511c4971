"""Finding a checkpoint: on the hub (a stand-in on this machine), in model/, in a folder; and staying off the network."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import CONFIG_FILES, tiny_tensors, with_duplicates, write_checkpoint
from conftest import DEMO, ROOT, TINY, build, run_cli
from hub import NEW_ID, OLD_ID, REVISION, serve

from voxport.build import download as download_module
from voxport.build.download import DEFAULT_ID, look_up
from voxport.build.fetch import partial_path
from voxport.errors import UserError
from voxport.files import sha256_file
from voxport.lock import Lock
from voxport.manifest import Manifest

FIND = """
import sys
from pathlib import Path
from voxport.build.download import download, look_up
from voxport.errors import run_script
def main(argv):
    found = download(look_up(argv[0], Path("model"), "--skip-download" in argv))
    print(found.id, found.revision, found.folder.as_posix())
    return 0
sys.exit(run_script(main))
"""
WANTED = {*CONFIG_FILES, "model.safetensors", "LICENSE"}


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """The tiny checkpoint with a licence, as a hub repository that also holds what nobody needs.

    In float32 and with the tied heads stored twice, 16 MB: the hub's client resumes in steps of 10 MB.
    """
    tensors = {name: tensor.float() for name, tensor in with_duplicates(tiny_tensors()).items()}
    folder = write_checkpoint(tmp_path_factory.mktemp("hub") / "repository", tensors)
    (folder / "LICENSE").write_text("Licence of the stand-in\n", encoding="utf-8")
    for name in ("big.bin", "README.md", "chat_template.jinja", "model.gguf"):
        (folder / name).write_bytes(b"x" * 1000)
    return folder


@pytest.fixture
def hub(repository):
    with serve(repository) as served:
        yield served


def environment(hub, tmp_path, **more) -> dict[str, str]:
    """huggingface_hub reads its variables when it is imported, so that every test asks from a process of its own."""
    quiet = dict.fromkeys(("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_PROGRESS_BARS"), "1")
    here = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1", "PYTHONPATH": str(ROOT)}
    return {**quiet, **here, **more}


def find(hub, tmp_path, *arguments, **more) -> subprocess.CompletedProcess:
    env = {**os.environ, **environment(hub, tmp_path, **more)}
    command = [sys.executable, "-c", FIND, *arguments]
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)


def one_line(done: subprocess.CompletedProcess, code: int) -> str:
    """The error of a run that failed as a user may see it."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", [NEW_ID, OLD_ID], ids=["new_id", "old_id"])
def test_only_needed_files_are_downloaded_under_either_id(name, hub, tmp_path, repository):
    done = find(hub, tmp_path, name)
    assert done.returncode == 0, done.stderr
    folder = "model/" + name.split("/")[1]
    assert done.stdout.split() == [name, REVISION, folder]
    assert hub.fetched() == WANTED
    for file in WANTED:
        assert (tmp_path / folder / file).read_bytes() == (repository / file).read_bytes()


def test_a_finished_download_is_not_repeated(hub, tmp_path):
    assert find(hub, tmp_path, NEW_ID).returncode == 0
    hub.requests.clear()
    assert find(hub, tmp_path, NEW_ID).returncode == 0
    assert hub.fetched() == set()


def test_a_connection_that_breaks_is_resumed_where_it_broke(hub, tmp_path, repository):
    hub.cut.add("model.safetensors")
    assert find(hub, tmp_path, NEW_ID).returncode == 0
    first, second = hub.ranges("model.safetensors")
    assert first == "bytes=0-"
    assert int(second.removeprefix("bytes=").removesuffix("-")) >= 10_000_000
    assert (tmp_path / "model/higgs-tts-3-4b/model.safetensors").read_bytes() == (repository / "model.safetensors").read_bytes()


def test_a_download_that_failed_keeps_the_files_that_are_whole(hub, tmp_path):
    hub.gone.add("model.safetensors")
    message = one_line(find(hub, tmp_path, NEW_ID), code=1)
    assert NEW_ID in message
    assert "run again" in message
    hub.gone.clear()
    had = {path.name for path in (tmp_path / "model/higgs-tts-3-4b").iterdir() if path.is_file()}
    hub.requests.clear()
    assert find(hub, tmp_path, NEW_ID).returncode == 0
    assert hub.fetched() == WANTED - had


def test_an_unknown_repository_is_the_users_mistake(hub, tmp_path):
    message = one_line(find(hub, tmp_path, "somebody/else"), code=2)
    assert "somebody/else" in message


def test_a_download_that_all_but_fits_tells_two_sizes(monkeypatch, tmp_path):
    monkeypatch.setattr(download_module, "free_disk", lambda path: 98e6)
    with pytest.raises(UserError, match="needs 104 MB more, 98 MB is free"):
        download_module.require_disk(104_000_000, NEW_ID, tmp_path)


def test_an_unreachable_hub_is_one_line(hub, tmp_path):
    message = one_line(find(hub, tmp_path, NEW_ID, HF_ENDPOINT="http://127.0.0.1:9"), code=1)
    assert NEW_ID in message
    assert "--checkpoint" in message


def test_a_disk_that_is_too_small_is_seen_before_the_first_byte(hub, tmp_path):
    small = "import shutil\nshutil.disk_usage = lambda path: shutil._ntuple_diskusage(1 << 20, 0, 1 << 20)\n"
    (tmp_path / "sitecustomize.py").write_text(small)
    message = one_line(find(hub, tmp_path, NEW_ID, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}"), code=2)
    assert "1 MB is free" in message
    assert "--checkpoint" in message
    assert hub.fetched() == set()


def test_files_that_are_there_already_need_no_disk(hub, tmp_path):
    assert find(hub, tmp_path, NEW_ID).returncode == 0
    full = "import shutil\nshutil.disk_usage = lambda path: shutil._ntuple_diskusage(1, 1, 0)\n"
    (tmp_path / "sitecustomize.py").write_text(full)
    assert find(hub, tmp_path, NEW_ID, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}").returncode == 0


def partial(tmp_path, repository, size: int):
    """The first bytes of the weights, as a run that was killed leaves them."""
    target = tmp_path / "model" / "higgs-tts-3-4b" / "model.safetensors"
    left = partial_path(target, sha256_file(repository / target.name))
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_bytes((repository / target.name).read_bytes()[:size])
    return target, left


def test_a_download_killed_in_the_middle_is_not_taken_as_complete_and_goes_on(hub, tmp_path, repository):
    target, left = partial(tmp_path, repository, 1000)
    one_line(find(hub, tmp_path, NEW_ID, "--skip-download"), code=2)
    assert find(hub, tmp_path, NEW_ID).returncode == 0
    assert target.read_bytes() == (repository / "model.safetensors").read_bytes()
    assert hub.ranges("model.safetensors") == ["bytes=1000-"] and not left.exists()


def test_two_downloads_of_one_file_do_not_mix(hub, tmp_path, repository):
    target, left = partial(tmp_path, repository, 1000)
    held = Lock(left.with_suffix(".lock"))
    message = one_line(find(hub, tmp_path, NEW_ID), code=2)
    assert f"is being downloaded by process {os.getpid()}" in message and left.stat().st_size == 1000
    held.release()
    assert find(hub, tmp_path, NEW_ID).returncode == 0 and target.exists()


def test_a_server_that_sends_the_whole_file_again_is_taken_at_its_word(hub, tmp_path, repository):
    target, _ = partial(tmp_path, repository, 1000)
    hub.deaf = True
    assert find(hub, tmp_path, NEW_ID).returncode == 0
    assert target.read_bytes() == (repository / "model.safetensors").read_bytes()


def test_a_file_that_arrives_damaged_is_thrown_away(hub, tmp_path, repository):
    target, left = partial(tmp_path, repository, 1000)
    hub.spoilt.add("model.safetensors")
    message = one_line(find(hub, tmp_path, NEW_ID), code=1)
    assert "model.safetensors arrived damaged" in message and not target.exists() and not left.exists()
    hub.spoilt.clear()
    assert find(hub, tmp_path, NEW_ID).returncode == 0


OFFLINE = pytest.mark.parametrize(
    "arguments, env", [((), {"HF_HUB_OFFLINE": "1"}), (("--skip-download",), {})], ids=["variable", "flag"]
)


@OFFLINE
def test_without_network_and_copy_the_remedy_is_named(arguments, env, hub, tmp_path):
    message = one_line(find(hub, tmp_path, NEW_ID, *arguments, **env), code=2)
    assert "higgs-tts-3-4b" in message
    assert "downloading is switched off" in message
    assert hub.requests == []


@OFFLINE
def test_without_network_an_earlier_download_serves_with_its_revision(arguments, env, hub, tmp_path):
    assert find(hub, tmp_path, NEW_ID).returncode == 0
    hub.requests.clear()
    done = find(hub, tmp_path, NEW_ID, *arguments, **env)
    assert done.stdout.split()[1] == REVISION, done.stderr
    assert hub.requests == []


def test_files_copied_in_by_hand_serve_without_a_revision(hub, tmp_path, repository):
    shutil.copytree(repository, tmp_path / "model" / "higgs-tts-3-4b")
    done = find(hub, tmp_path, NEW_ID, "--skip-download")
    assert done.stdout.split()[1] == "None", done.stderr


def test_a_build_from_the_hub_records_id_and_revision(hub, tmp_path):
    arguments = ["--checkpoint", OLD_ID, "--components", "audio_embed"]
    done = run_cli("optimize.py", *arguments, env=environment(hub, tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    manifest = Manifest.read(tmp_path / "onnx" / "cpu_int4")
    assert (manifest.source.id, manifest.source.revision) == (OLD_ID, REVISION)
    assert manifest.licence.name == "Licence of the stand-in"
    assert Path(manifest.source.path) == tmp_path / "model" / "higgs-audio-v3-tts-4b"


def plan(hub, tmp_path, *arguments, **more) -> subprocess.CompletedProcess:
    return run_cli("optimize.py", "--checkpoint", NEW_ID, "--plan", *arguments, env=environment(hub, tmp_path, **more), cwd=tmp_path)


def test_a_plan_fetches_no_weights_and_leaves_nothing(hub, tmp_path):
    """And says of the build what it would say with the weights here, but for what they took last time."""
    done = plan(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    assert hub.fetched() == {"config.json", "codec_config.json"}
    assert {path.name for path in tmp_path.iterdir()} <= {"hf"}
    first, *table = done.stdout.splitlines()
    assert re.match(rf"download: \d+ MB of {NEW_ID} to come into model/higgs-tts-3-4b \(", first)
    here = run_cli("optimize.py", "--checkpoint", TINY, "--plan", "--output", tmp_path / "new").stdout.splitlines()
    assert [line.split()[:7] for line in table[:-1]] == [line.split()[:7] for line in here[:-1]] and len(table) > 6
    part = plan(hub, tmp_path, "--components", "audio_embed").stdout.splitlines()
    assert [line.split()[0] for line in part] == ["download:", "part", "audio_embed", "needed"]


def test_a_plan_of_a_checkpoint_that_is_here_is_made_from_it(hub, tmp_path):
    assert find(hub, tmp_path, NEW_ID).returncode == 0
    hub.requests.clear()
    done = plan(hub, tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("part ") and hub.fetched() == set()


def test_a_plan_that_cannot_fit_beside_the_download_is_refused(hub, tmp_path):
    room = "import shutil\nshutil.disk_usage = lambda path: shutil._ntuple_diskusage(1, 1, {})\n"
    small = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    size = (hub.folder / "model.safetensors").stat().st_size
    for free, message in ((size // 2, f"downloading {NEW_ID} needs"), (size + 10_000_000, "the build needs")):
        (tmp_path / "sitecustomize.py").write_text(room.format(free))
        done = plan(hub, tmp_path, **small)
        assert message in one_line(done, code=2) and "part " in done.stdout
    (tmp_path / "sitecustomize.py").write_text(room.format(size + 100_000_000))
    assert plan(hub, tmp_path, **small).returncode == 0


def test_a_family_whose_sizes_stand_in_its_weights_is_planned_as_far_as_it_goes(hub, tmp_path, repository):
    shutil.copytree(repository, tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text('{"llm_config": {}}', encoding="utf-8")
    hub.folder = tmp_path / "other"
    done = plan(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["download:", "what"]
    assert hub.fetched() <= {"config.json", "codec_config.json"}


@pytest.mark.parametrize("flags", [(), ("--plan",)])
def test_nothing_is_downloaded_for_parts_that_cannot_go_into_the_build_in_place(flags, hub, tmp_path):
    build(TINY, tmp_path / "out", "--components", "audio_embed")
    arguments = ["--checkpoint", NEW_ID, "--output", tmp_path / "out", "--components", "text_embed", *flags]
    message = one_line(run_cli("optimize.py", *arguments, env=environment(hub, tmp_path), cwd=tmp_path), code=2)
    assert f"holds a build of the higgs checkpoint {TINY}; parts of {NEW_ID} cannot be added to it" in message
    assert hub.fetched() == set()


def test_the_demo_and_a_folder_need_no_network(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert look_up("demo", tmp_path, False).folder == DEMO
    found = look_up(str(TINY), tmp_path, False)
    assert (found.id, found.revision, found.folder) == (str(TINY), None, TINY)


@pytest.mark.parametrize(
    "name", ["nothing", "./nothing", "/nothing/here", "~/nothing", "a/b/c", "", "../x", "a/", "a/..", "a--b/c", "ä/b", "a b/c"]
)
def test_a_name_that_is_neither_folder_nor_id_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="neither 'demo', nor an existing folder, nor a hub id"):
        look_up(name, tmp_path, False)


def test_the_default_is_the_published_checkpoint():
    assert DEFAULT_ID == OLD_ID
