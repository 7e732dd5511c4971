"""A build goes into a folder of its own, and what is asked of files is done or refused."""

import shutil

import pytest
from conftest import TINY

import inference
import optimize
from voxport.build.place import check_place
from voxport.errors import UserError, run_script
from voxport.manifest import MANIFEST_NAME
from voxport.run.audio import Form


@pytest.mark.parametrize("name", ["LICENSE", "tokenizer.json", "mine.onnx"])
def test_files_that_no_build_made_are_never_replaced(name, tmp_path, monkeypatch, capsys):
    (tmp_path / name).write_text("mine", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for output in ("", ".", str(tmp_path)):
        assert run_script(optimize.main, ["--checkpoint", str(TINY), "--output", output]) == 2
        assert f"holds {name}, which a build would replace" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text(encoding="utf-8") == "mine"


def test_a_build_never_goes_into_its_own_checkpoint(tmp_path):
    folder = shutil.copytree(TINY, tmp_path / "checkpoint")
    with pytest.raises(UserError, match="is the folder of the checkpoint"):
        check_place(folder, folder)


def test_a_build_and_an_empty_folder_are_places(tmp_path):
    check_place(tmp_path, TINY)
    check_place(tmp_path / "new", TINY)
    for name in ("LICENSE", MANIFEST_NAME):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    check_place(tmp_path, TINY)


@pytest.mark.parametrize("flags", [["--sample-rate", "8000"], ["--encoding", "float"]])
def test_a_stream_refuses_what_it_would_ignore(flags, tiny_build, tmp_path, capsys):
    arguments = ["--model-path", str(tiny_build), "--text", "Hi", "--stream", str(tmp_path / "s.wav"), *flags]
    assert run_script(inference.main, arguments) == 2
    assert "are for --out" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_rate_of_zero_is_no_rate(tmp_path):
    with pytest.raises(UserError, match="cannot hold 0 Hz"):
        Form(rate=0).check(tmp_path / "x.wav", 24000)
