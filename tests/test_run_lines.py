"""Many lines into a folder: names, settings of their own, bad lines, interruption."""

import dataclasses
import json
import os

import numpy as np
import pytest
import soundfile
from run_fakes import encoder_session, make_manifest
from test_run_batch import listening_heads
from test_run_speak import VOICE, make_speaker

from voxport.errors import UserError, WorkError
from voxport.run import reading
from voxport.run.audio import Form, write_sound
from voxport.run.lines import Recital, read_lines
from voxport.run.request import Wish
from voxport.run.voices import Shelf

BUILD = {"target": "cpu_fp32"}
COMMON = Wish("", max_frames=25, seed=7)


def speaker():
    return make_speaker(audio_heads=listening_heads(), audio_encoder=encoder_session(code=2))


def write(tmp_path, name, *lines):
    path = tmp_path / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n", encoding="utf-8")
    return read_lines(path)


def recite(tmp_path, lines, common=COMMON, made=None, build=BUILD, form=Form()):
    recital = Recital(made or speaker(), tmp_path / "out", common, Shelf(tmp_path / "voices"), build, form)
    return {outcome.line.name: outcome for outcome in recital.speak(lines, 2)}


def test_every_line_of_a_text_file_gets_a_file_named_by_its_number(tmp_path):
    lines = write(tmp_path, "a.txt", "Hello there", "", "  ", "And you", "No")
    assert [line.name for line in lines] == ["0001", "0004", "0005"]
    outcomes = recite(tmp_path, lines)
    assert all(outcome.speech is not None for outcome in outcomes.values())
    for name in ("0001", "0004", "0005"):
        sound, rate = soundfile.read(tmp_path / "out" / f"{name}.wav")
        told = json.loads((tmp_path / "out" / f"{name}.json").read_text(encoding="utf-8"))
        assert len(sound) == len(outcomes[name].speech.samples) and rate == 1000
        assert told["text"] == outcomes[name].speech.text and told["build"] == BUILD and told["seed"] == 7


def test_an_object_brings_name_seed_and_voice_of_its_own(tmp_path):
    shelf = Shelf(tmp_path / "voices")
    shelf.save("Anna", speaker(), VOICE, "What it says")
    write_sound(tmp_path / "b.wav", VOICE[0], VOICE[1])
    lines = write(
        tmp_path,
        "a.jsonl",
        {"text": "Hello you", "name": "first", "seed": 1},
        {"text": "Hello you", "voice": "Anna"},
        {"text": "Hello you", "name": "ref", "ref_audio": str(tmp_path / "b.wav"), "max_frames": 9, "temperature": 0},
    )
    made = recite(tmp_path, lines)
    assert set(made) == {"first", "0002", "ref"}
    assert made["first"].speech.seed == 1 and made["0002"].speech.seed == 7
    assert made["first"].speech.reference_codes is None and len(made["0002"].speech.reference_codes) == 100
    assert made["ref"].speech.max_frames == 9 and made["ref"].speech.sampling.temperature == 0
    alone = speaker().speak("Hello you", voice=shelf.load("Anna", speaker()), seed=7, max_frames=25)
    assert made["0002"].speech.rows.tolist() == alone.rows.tolist()


def test_a_bad_line_is_told_and_the_others_are_spoken(tmp_path):
    lines = write(
        tmp_path,
        "a.jsonl",
        {"text": "Hello"},
        "{not json",
        {"text": "Hi", "speed": 2},
        {"name": "x"},
        {"text": "..."},
        {"text": "Hi", "voice": "Nobody"},
        {"text": "Hi", "name": "../x"},
        {"text": "Hi", "seed": "1"},
        {"text": "Hi", "seed": True},
        "[1]",
        "[" * 100_000,
        {"text": "Bye", "name": "last"},
    )
    outcomes = recite(tmp_path, lines)
    assert {name for name, outcome in outcomes.items() if outcome.speech} == {"0001", "last"}
    messages = {name: str(outcome.error) for name, outcome in outcomes.items() if outcome.error}
    assert "unknown key 'speed'" in messages["0003"] and "voices is no folder" in messages["0006"]
    assert "plain file name" in messages["0007"] and "seed must be a whole number, not '1'" in messages["0008"]
    assert len(messages) == 10
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0001.json", "0001.wav", "last.json", "last.wav"]


def test_two_lines_of_one_name_do_not_overwrite_each_other(tmp_path):
    lines = write(tmp_path, "a.jsonl", {"text": "Hello", "name": "A"}, {"text": "Bye", "name": "a"})
    outcomes = recite(tmp_path, lines)
    assert outcomes["A"].speech.text == "Hello" and "called 'a' too" in str(outcomes["a"].error)


def test_what_was_spoken_before_an_interruption_is_not_spoken_again(tmp_path):
    lines = write(tmp_path, "a.txt", "Hello there", "And you", "No")

    class Stop(Exception):
        pass

    made = speaker()
    recital = Recital(made, tmp_path / "out", COMMON, Shelf(tmp_path / "voices"), BUILD, Form())
    with pytest.raises(Stop):
        for _ in recital.speak(lines, 1):
            raise Stop
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0001.json", "0001.wav"]
    before = (tmp_path / "out" / "0001.wav").read_bytes()
    outcomes = recite(tmp_path, lines)
    assert outcomes["0001"].speech is None and outcomes["0001"].error is None
    assert outcomes["0002"].speech and outcomes["0003"].speech
    assert (tmp_path / "out" / "0001.wav").read_bytes() == before
    idle = speaker()
    recite(tmp_path, lines, made=idle)
    assert idle.parts.loaded == []


VOICE_BY_CODE = {code: make_speaker(audio_encoder=encoder_session(code=code)).hear(VOICE) for code in (1, 2)}
CHANGED = {
    "voice": dict(common=Wish("", max_frames=25, seed=7, voice=VOICE_BY_CODE[1])),
    "text": dict(line={"text": "Bye", "name": "a"}),
    "seed": dict(line={"text": "Hello", "name": "a", "seed": 2}),
    "settings": dict(common=Wish("", max_frames=26, seed=7)),
    "build": dict(build={"target": "cpu_int4"}),
    "form": dict(form=Form("pcm24")),
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_a_line_that_asks_for_something_else_is_spoken_again(change, tmp_path):
    recite(tmp_path, write(tmp_path, "a.jsonl", {"text": "Hello", "name": "a"}))
    change = dict(change)
    line = change.pop("line", {"text": "Hello", "name": "a"})
    assert recite(tmp_path, write(tmp_path, "a.jsonl", line), **change)["a"].speech is not None


def spoil(path, how):
    content = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": content[:-100], "overwritten": bytes(len(content))}[how])


@pytest.mark.parametrize("how", ["gone", "empty", "cut", "overwritten"])
def test_a_line_whose_sound_is_gone_or_damaged_is_spoken_again(how, tmp_path):
    lines, sound = write(tmp_path, "a.jsonl", {"text": "Hello", "name": "a"}), tmp_path / "out" / "a.wav"
    recite(tmp_path, lines)
    whole = sound.read_bytes()
    sound.unlink() if how == "gone" else spoil(sound, how)
    again = recite(tmp_path, lines)["a"]
    assert again.speech is not None and again.replaced == (how != "gone") and sound.read_bytes() == whole


def test_a_take_that_was_edited_is_not_replaced(tmp_path):
    lines, sound = write(tmp_path, "a.jsonl", {"text": "Hello", "name": "a"}), tmp_path / "out" / "a.wav"
    recite(tmp_path, lines)
    write_sound(sound, VOICE[0], VOICE[1])
    edited = sound.read_bytes()
    for again in (lines, write(tmp_path, "a.jsonl", {"text": "Bye", "name": "a"})):
        assert "is not what was made: if it was edited it would be lost; delete it" in str(recite(tmp_path, again)["a"].error)
        assert sound.read_bytes() == edited
    sound.unlink()
    assert recite(tmp_path, lines)["a"].speech


def test_a_long_line_is_read_in_parts_as_a_long_text_is(tmp_path):
    text = "Hello you. " * 30
    lines = write(tmp_path, "a.jsonl", {"text": "Hello"}, {"text": text}, {"text": "Bye"}, {"text": "Hello. " * 99 + "<|no:tag|>"})
    shelf = Shelf(tmp_path / "voices")
    recital = Recital(speaker(), tmp_path / "out", COMMON, shelf, BUILD, Form(), part_tokens=40)
    outcomes = {outcome.line.name: outcome for outcome in recital.speak(lines, 2)}
    assert set(outcomes) == {"0001", "0002", "0003", "0004"} and "unknown tag" in str(outcomes["0004"].error)
    told = json.loads((tmp_path / "out" / "0002.json").read_text(encoding="utf-8"))
    assert len(told["parts"]) > 1 and " ".join(part["text"] for part in told["parts"]) == text.strip()
    alone = reading.read(made := speaker(), wish := dataclasses.replace(COMMON, text=text), reading.plan(made, wish, 40), 2)
    assert np.array_equal(outcomes["0002"].speech.samples, alone.samples)
    assert outcomes["0001"].speech.text == "Hello" and outcomes["0003"].speech.text == "Bye"
    with pytest.raises(UserError, match="--part-tokens"):
        Recital(speaker(), tmp_path / "out", COMMON, shelf, BUILD, Form(), part_tokens=1)


@pytest.mark.parametrize("place, works", [("voxport.run.asks._hash", True), ("voxport.run.lines.record_file", False)])
def test_a_file_that_cannot_be_read_holds_up_no_other_line(place, works, tmp_path, monkeypatch):
    def refuse(path, *facts):
        raise PermissionError(13, "Permission denied", str(path))

    write_sound(tmp_path / "b.wav", VOICE[0], VOICE[1])
    lines = write(tmp_path, "a.jsonl", {"text": "Hello", "ref_audio": str(tmp_path / "b.wav")}, {"text": "Hello"})
    recite(tmp_path, lines)
    monkeypatch.setattr(place, refuse)
    outcomes = recite(tmp_path, lines)
    assert len(outcomes) == 2 and all((outcome.error is None) == works for outcome in outcomes.values())


@pytest.mark.parametrize("mine", ["a.wav", "a.json"])
def test_a_file_that_no_line_made_is_not_replaced(mine, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / mine).write_text("{}", encoding="utf-8")
    lines = write(tmp_path, "a.jsonl", {"text": "Hello", "name": "a"}, {"text": "Bye", "name": "b"})
    outcomes = recite(tmp_path, lines)
    assert "choose another name or --out-dir" in str(outcomes["a"].error) and outcomes["b"].speech
    assert (tmp_path / "out" / mine).read_text(encoding="utf-8") == "{}"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted([mine, "b.json", "b.wav"])


def test_a_run_that_ends_between_sound_and_report_goes_on_with_its_own_files(tmp_path, monkeypatch):
    lines = write(tmp_path, "a.jsonl", {"text": "Hello", "name": "a"})
    monkeypatch.setattr("voxport.run.lines.record_file", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        recite(tmp_path, lines)
    monkeypatch.undo()
    assert (tmp_path / "out" / "a.wav").is_file()
    again = recite(tmp_path, lines)["a"]
    assert again.speech is not None and again.replaced


def test_a_line_that_cannot_be_written_leaves_no_report(tmp_path, monkeypatch):
    def fail(*arguments):
        raise WorkError("the disk is full")

    monkeypatch.setattr("voxport.run.speech.write_sound", fail)
    outcomes = recite(tmp_path, write(tmp_path, "a.txt", "Hello"))
    assert "disk is full" in str(outcomes["0001"].error) and not list((tmp_path / "out").iterdir())


def test_another_recording_under_the_same_name_is_another_voice(tmp_path):
    file, shelf = tmp_path / "b.wav", Shelf(tmp_path / "voices")
    write_sound(file, VOICE[0], VOICE[1])
    shelf.save("Anna", speaker(), VOICE, "What it says")
    lines = write(tmp_path, "a.jsonl", {"text": "Hello", "ref_audio": str(file)}, {"text": "Hello", "voice": "Anna"}, {"text": "Hello"})
    common = Wish("", max_frames=25, seed=7, ref_audio=str(file))
    assert all(outcome.speech for outcome in recite(tmp_path, lines, common).values())
    assert not any(outcome.speech for outcome in recite(tmp_path, lines, common).values())
    write_sound(file, VOICE[0][: len(VOICE[0]) // 2], VOICE[1])
    shelf.delete("Anna")
    shelf.save("Anna", speaker(), VOICE, "What else it says")
    assert all(outcome.speech and outcome.replaced for outcome in recite(tmp_path, lines, common).values())


def test_two_runs_do_not_speak_into_one_folder(tmp_path):
    lines = write(tmp_path, "a.txt", "Hello")
    recital = lambda: Recital(speaker(), tmp_path / "out", COMMON, Shelf(tmp_path / "voices"), BUILD, Form())
    with recital().lock():
        with pytest.raises(UserError, match=f"process {os.getpid()} is speaking lines into this folder"):
            recital().lock()
    with recital().lock():
        assert [outcome.error for outcome in recital().speak(lines, 1)] == [None]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0001.json", "0001.wav"]


@pytest.mark.parametrize("name, file", [("x.wav", "x.wav"), ("x.y", "x.y.wav")])
def test_a_name_may_bring_the_ending_that_it_gets(name, file, tmp_path):
    recite(tmp_path, write(tmp_path, "a.jsonl", {"text": "Hello", "name": name}))
    assert (tmp_path / "out" / file).is_file()


@pytest.mark.parametrize("line, says", [
    ('{"text": "a", "text": "b"}', "text is given twice"),
    ("{not json", "it is not JSON from character 2 on"),
    ("[" * 100_000, "nested without end"),
    ({"text": 5}, "text must be text, not 5"),
    ({"text": "Hi", "temperature": "hot"}, "temperature must be a number, not 'hot'"),
    ({"text": "Hi", "name": "CON"}, "cannot be the name of a file"),
    ({"text": "Hi", "name": "nul.wav"}, "cannot be the name of a file"),
    ({"text": "Hi", "name": ".wav"}, "cannot be the name of a file"),
    ({"text": "Hi", "name": "x" * 251}, "cannot be the name of a file"),
])  # fmt: skip
def test_what_a_line_cannot_mean_is_told(line, says, tmp_path):
    (outcome,) = recite(tmp_path, write(tmp_path, "a.jsonl", line)).values()
    assert says in str(outcome.error)


def test_another_voice_for_all_is_spoken_again_and_the_same_one_is_not(tmp_path):
    lines = write(tmp_path, "a.jsonl", {"text": "Hello", "name": "a"})
    spoken = []
    for code in (1, 1, 2):
        common = Wish("", max_frames=20, seed=1, voice=VOICE_BY_CODE[code])
        spoken.append(recite(tmp_path, lines, common)["a"].speech is not None)
    assert spoken == [True, False, True]


def test_lines_that_share_the_voice_of_the_command_line(tmp_path):
    made = speaker()
    voice = made.hear(VOICE)
    outcomes = recite(tmp_path, write(tmp_path, "a.txt", "Hello", "Bye"), Wish("", seed=1, max_frames=20, voice=voice), made)
    assert all(np.array_equal(outcome.speech.reference_codes, voice.codes) for outcome in outcomes.values())


def test_the_voice_of_a_line_replaces_that_of_the_command_line(tmp_path):
    write_sound(tmp_path / "b.wav", VOICE[0][:300], VOICE[1])
    made = speaker()
    common = Wish("", seed=1, max_frames=20, ref_audio=VOICE, ref_text="What it says")
    lines = write(tmp_path, "a.jsonl", {"text": "Hi", "ref_audio": str(tmp_path / "b.wav")}, {"text": "Hi"})
    outcomes = recite(tmp_path, lines, common, made)
    assert [len(outcomes[name].speech.reference_codes) for name in ("0001", "0002")] == [300 // 7, 100]


@pytest.mark.parametrize("name, content", [("a.csv", "x"), ("a.txt", "\n \n"), ("a.txt", b"\xff\xfe\x00"), ("no.txt", None)])
def test_a_file_that_holds_no_lines_is_refused(name, content, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match="--input"):
        read_lines(tmp_path / name)


def test_a_byte_order_mark_and_windows_line_ends_are_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfHello\r\nYou\r\n")
    assert [line.asks["text"] for line in read_lines(tmp_path / "a.txt")] == ["Hello", "You"]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--out-dir"):
        Recital(speaker(), tmp_path / "file", COMMON, Shelf(tmp_path), BUILD, Form())
    assert make_manifest().codec.sample_rate == 1000
