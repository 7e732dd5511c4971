"""Files that were hashed once are not read again, and a file that was written to is, whatever was written."""

import os
import time

import pytest

from voxport import manifest as m
from voxport.errors import UserError
from voxport.files import sha256_file
from voxport.run import stamps as run_stamps
from voxport.run.stamps import Stamps


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VOXPORT_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "build"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / name).write_bytes(name.encode() * 100)
        age(folder / name)
    monkeypatch.setattr(run_stamps, "SETTLED_SECONDS", -1)  # a change of the inode's own time cannot be made older
    return folder


def age(path):
    before = time.time() - 100
    os.utime(path, (before, before))


@pytest.fixture
def hashed(monkeypatch):
    """Names of the files that were read."""
    names = []
    monkeypatch.setattr(m, "sha256_file", lambda path: names.append(path.name) or sha256_file(path))
    return names


def records(folder):
    return {name: m.FileRecord((folder / name).stat().st_size, sha256_file(folder / name)) for name in ("a", "b")}


def test_a_file_is_hashed_once(folder, hashed):
    files = records(folder)
    Stamps(folder).verify(files)
    assert hashed == ["a", "b"]
    Stamps(folder).verify(files)
    assert hashed == ["a", "b"]


@pytest.mark.parametrize("keep_time", [False, True])
def test_one_changed_byte_is_refused_even_with_its_old_time(keep_time, folder):
    files = records(folder)
    Stamps(folder).verify(files)
    facts = (folder / "b").stat()
    (folder / "b").write_bytes(b"b" * 99 + b"c")
    if keep_time:
        os.utime(folder / "b", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    with pytest.raises(UserError, match="b was changed"):
        Stamps(folder).verify(files)


def test_another_file_in_its_place_is_read(folder, hashed):
    files = records(folder)
    Stamps(folder).verify(files)
    facts = (folder / "b").stat()
    (folder / "new").write_bytes(b"c" * 100)
    os.utime(folder / "new", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    os.replace(folder / "new", folder / "b")
    with pytest.raises(UserError, match="b was changed"):
        Stamps(folder).verify(files)
    assert hashed == ["a", "b", "b"]


def test_another_manifest_asks_again(folder, hashed):
    files = records(folder)
    Stamps(folder).verify(files)
    with pytest.raises(UserError, match="b was changed"):
        Stamps(folder).verify(files | {"b": m.FileRecord(100, "0" * 64)})


def test_a_file_that_is_missing_or_cut_is_refused(folder):
    files = records(folder)
    Stamps(folder).verify(files)
    (folder / "b").write_bytes(b"b")
    with pytest.raises(UserError, match="has 1 bytes"):
        Stamps(folder).verify(files)
    (folder / "b").unlink()
    with pytest.raises(UserError, match="is missing"):
        Stamps(folder).verify(files)


def test_a_file_that_was_written_just_now_gets_no_stamp(folder, hashed, monkeypatch):
    monkeypatch.setattr(run_stamps, "SETTLED_SECONDS", 60)
    files = records(folder)
    for _ in range(2):
        Stamps(folder).verify(files)
    assert hashed == ["a", "b"] * 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1, "b": null}', '{"a": [1, 2, 3, 4, "x"]}'])
def test_stamps_that_cannot_be_read_count_for_nothing(content, folder, hashed):
    files = records(folder)
    Stamps(folder).verify(files)
    Stamps(folder).path.write_text(content)
    Stamps(folder).verify(files)
    assert hashed == ["a", "b"] * 2


def test_without_a_place_for_stamps_files_are_hashed_each_time(folder, hashed, monkeypatch):
    files = records(folder)
    monkeypatch.setattr(run_stamps, "cache_folder", lambda: None)
    for _ in range(2):
        Stamps(folder).verify(files)
    monkeypatch.setattr(run_stamps, "cache_folder", lambda: folder / "a")
    Stamps(folder).verify(files)
    assert hashed == ["a", "b"] * 3


def test_a_copied_folder_is_hashed_anew(folder, hashed, tmp_path):
    files = records(folder)
    Stamps(folder).verify(files)
    folder.rename(tmp_path / "other")
    Stamps(tmp_path / "other").verify(files)
    assert hashed == ["a", "b"] * 2
