"""Saved voices: the second utterance reads its own text only and is the same; whatever is stale, foreign or broken is made anew."""

import dataclasses
import io
import json
import pickle
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_fakes import D, N, encoder_session, make_manifest
from test_run_batch import listening_heads
from test_run_speak import VOICE, make_speaker

from voxport.errors import UserError
from voxport.manifest import FileRecord
from voxport.run.voices import KEPT, SOURCE, Shelf, check_name, default_shelf, read_arrays, write_arrays

MANIFEST = make_manifest()


def speaker(manifest=MANIFEST, **sessions):
    sessions = {"audio_heads": listening_heads(), "audio_encoder": encoder_session(code=2)} | sessions
    return make_speaker(manifest, **sessions)


@pytest.fixture
def shelf(tmp_path):
    return Shelf(tmp_path / "voices")


def positions_read(speaker):
    """Positions that the body was given at once, without the single steps."""
    sizes = [feeds["inputs_embeds"].shape[1] for feeds in speaker.parts["llm_decoder"].session.seen]
    return [size for size in sizes if size > 1]


def kept_files(shelf, name="Anna"):
    return sorted(path for path in (shelf.folder / name).iterdir() if path.name != SOURCE)


def test_a_saved_voice_speaks_what_its_reference_would_and_reads_the_text_only(shelf):
    fresh = speaker().speak("Hello you", ref_audio=VOICE, ref_text="What it says", seed=3, max_frames=30)
    shelf.save("Anna", speaker(), VOICE, "What it says")
    later = speaker()
    voice = shelf.load("Anna", later)
    spoken = later.speak("Hello you", voice=voice, seed=3, max_frames=30)
    assert spoken.rows.tolist() == fresh.rows.tolist() and np.array_equal(spoken.samples, fresh.samples)
    assert spoken.prompt_ids.tolist() == fresh.prompt_ids.tolist()
    assert spoken.reference_codes.tolist() == fresh.reference_codes.tolist()
    assert positions_read(later) == [len("Hello you") + 2] and "audio_encoder" not in later.parts.loaded


def test_a_voice_heard_once_speaks_many_times(shelf):
    made = speaker()
    voice = made.hear(VOICE, "What it says")
    read = len(positions_read(made))
    first, second = (made.speak("Hello you", voice=voice, seed=3, max_frames=30) for _ in range(2))
    assert first.rows.tolist() == second.rows.tolist()
    assert positions_read(made)[read:] == [11, 11]


def test_a_voice_and_a_reference_together_are_refused():
    made = speaker()
    voice = made.hear(VOICE)
    for more in ({"ref_audio": VOICE}, {"ref_text": "hm"}):
        with pytest.raises(UserError, match="brings its own reference"):
            made.speak("Hello", voice=voice, **more)


CHANGES = {
    "another decoder": lambda m: dataclasses.replace(
        m, parts=m.parts | {"llm_decoder": dataclasses.replace(m.parts["llm_decoder"], files={"llm_decoder.onnx": record("1")})}
    ),
    "another encoder": lambda m: dataclasses.replace(
        m, parts=m.parts | {"audio_encoder": dataclasses.replace(m.parts["audio_encoder"], files={"a": record("2")})}
    ),
    "another tokenizer": lambda m: dataclasses.replace(m, files={"tokenizer.json": record("3")}),
    "other tokens": lambda m: dataclasses.replace(m, tokens=dataclasses.replace(m.tokens, ref_text=None)),
}


def record(digit):
    return FileRecord(10, digit * 64)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_voice_of_another_build_is_heard_again(change, shelf):
    shelf.save("Anna", speaker(), VOICE, "What it says")
    other = speaker(change(MANIFEST))
    shelf.load("Anna", other)
    assert len(other.parts["audio_encoder"].session.seen) == 1
    again = speaker(change(MANIFEST))
    shelf.load("Anna", again)
    assert "audio_encoder" not in again.parts.loaded  # and now it is kept for that build too
    assert len(kept_files(shelf)) == 2


def test_another_provider_hears_a_voice_again(shelf):
    shelf.save("Anna", speaker(), VOICE)
    other = speaker()
    other.running_provider = lambda: "CUDAExecutionProvider"
    shelf.load("Anna", other)
    assert len(other.parts["audio_encoder"].session.seen) == 1


def test_only_the_newest_builds_are_kept(shelf):
    shelf.save("Anna", speaker(), VOICE)
    for digit in "123456":
        shelf.load("Anna", speaker(dataclasses.replace(MANIFEST, files={"tokenizer.json": record(digit)})))
    assert len(kept_files(shelf)) == KEPT


def test_forgetting_a_voice_leaves_files_that_are_not_of_it(shelf):
    (shelf.folder / "Anna").mkdir(parents=True)
    (shelf.folder / "Anna" / "mine.npz").write_text("mine", encoding="utf-8")
    shelf.save("Anna", speaker(), VOICE, "Old")
    shelf.delete("Anna")
    assert [path.name for path in (shelf.folder / "Anna").iterdir()] == ["mine.npz"] and shelf.names() == []


def test_a_voice_is_not_replaced_by_another(shelf):
    shelf.save("Anna", speaker(), VOICE, "Old")
    for sound, text in ((VOICE, "New"), (VOICE, None), ((VOICE[0] * 0.5, VOICE[1]), "Old")):
        with pytest.raises(UserError, match="the voice 'Anna' is another recording.*--delete-voice 'Anna'"):
            shelf.save("Anna", speaker(), sound, text)
    assert shelf.load("Anna", speaker()).ref_text == "Old"
    before = shelf.fingerprint("Anna")
    shelf.save("Anna", speaker(), VOICE, "Old")
    assert shelf.fingerprint("Anna") == before
    (shelf.folder / "Anna" / "voice.npz").write_bytes(b"damaged")
    shelf.save("Anna", speaker(), VOICE, "New")
    assert shelf.load("Anna", speaker()).ref_text == "New"


def test_a_voice_saved_again_is_the_new_one(shelf):
    shelf.save("Anna", speaker(), VOICE, "Old")
    shelf.delete("Anna")
    shelf.save("Anna", speaker(audio_encoder=encoder_session(code=5)), (VOICE[0] * 0.5, VOICE[1]), "New")
    voice = shelf.load("Anna", speaker())
    assert voice.ref_text == "New" and voice.codes[0].tolist() == [5] * N and shelf.names() == ["Anna"]


DAMAGE = {
    "cut": lambda data: data[: len(data) // 2],
    "emptied": lambda data: b"",
    "foreign": lambda data: b"RIFF" + bytes(200),
    "one bit": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_memory_of_a_voice_is_made_anew(damage, shelf):
    shelf.save("Anna", speaker(), VOICE, "What it says")
    whole = shelf.load("Anna", speaker())
    (path,) = kept_files(shelf)
    path.write_bytes(damage(path.read_bytes()))
    again = speaker()
    voice = shelf.load("Anna", again)
    assert len(again.parts["audio_encoder"].session.seen) == 1
    assert all(np.array_equal(a, b) for a, b in zip(voice.pieces, whole.pieces, strict=True))
    later = speaker()
    shelf.load("Anna", later)
    assert "audio_encoder" not in later.parts.loaded


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_recording_is_an_error_with_its_name(damage, shelf):
    shelf.save("Anna", speaker(), VOICE)
    path = shelf.folder / "Anna" / SOURCE
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match="Anna"):
        shelf.load("Anna", speaker())
    assert "error" in shelf.list()["Anna"]


@pytest.mark.parametrize("field, value", [("codes", np.full((4, N), 99)), ("pieces", np.zeros((4, 1, 2, D), np.float32)), ("ids", None)])
def test_a_memory_that_does_not_fit_the_build_is_made_anew(field, value, shelf):
    shelf.save("Anna", speaker(), VOICE)
    (path,) = kept_files(shelf)
    facts, arrays = read_arrays(path, "x")
    arrays = {name: array for name, array in (arrays | {field: value}).items() if array is not None}
    write_arrays(path, facts, arrays)
    again = speaker()
    shelf.load("Anna", again)
    assert len(again.parts["audio_encoder"].session.seen) == 1


def test_no_pickle_is_ever_opened(shelf, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (tmp_path.joinpath("boom").write_text, ("x",))

    shelf.save("Anna", speaker(), VOICE)
    for path in (shelf.folder / "Anna" / SOURCE, *kept_files(shelf)):
        path.write_bytes(pickle.dumps(Bomb()))
    np.savez(kept_files(shelf)[0], facts=np.array([Bomb()], dtype=object))
    with pytest.raises(UserError):
        shelf.load("Anna", speaker())
    assert not (tmp_path / "boom").exists()


def bad_archive(shape, size=8, compress=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<f4", "fortran_order": False, "shape": shape})
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", compress) as archive:
        archive.writestr("facts.npy", npy(np.frombuffer(json.dumps({"version": 1}).encode(), np.uint8)))
        archive.writestr("samples.npy", buffer.getvalue() + bytes(size))
    return packed.getvalue()


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content", [bad_archive((10**15,)), bad_archive((3,)), bad_archive((2,), compress=zipfile.ZIP_DEFLATED)], ids=["vast", "short", "zip"]
)
def test_a_header_that_promises_more_than_there_is_takes_no_memory(content, tmp_path):
    path = tmp_path / "x.npz"
    path.write_bytes(content)
    with pytest.raises(UserError, match="cannot be read"):
        read_arrays(path, "a voice")


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=4))
def test_any_change_of_a_file_is_an_error_or_no_change(place, change):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.npz"
        write_arrays(path, {"version": 1, "a": "b"}, {"samples": np.arange(50, dtype=np.float32)})
        content = bytearray(path.read_bytes())
        place %= len(content)
        content[place : place + len(change)] = change
        path.write_bytes(content)
        try:
            facts, arrays = read_arrays(path, "a voice")
        except UserError:
            return
        assert facts == {"version": 1, "a": "b"} or "samples" in arrays


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "a\\b", "a:b", ".a", "a.", " a", "a ", "x" * 65, "con", "NUL.x", "a\0", "a\nb", "*"]
)
def test_names_that_are_no_folder_everywhere_are_refused(name, shelf):
    with pytest.raises(UserError, match="cannot be the name"):
        check_name(name)
    for use in (lambda: shelf.save(name, speaker(), VOICE), lambda: shelf.load(name, speaker()), lambda: shelf.delete(name)):
        with pytest.raises(UserError, match="cannot be the name"):
            use()


@pytest.mark.parametrize("name", ["Anna", "anna-2", "Łódź", "声音", "a.b c_d"])
def test_names_in_any_script_pass(name, shelf):
    shelf.save(name, speaker(), VOICE)
    assert shelf.names() == [name]


def test_voices_are_listed_and_forgotten(shelf):
    assert shelf.names() == [] and shelf.list() == {}
    shelf.save("B", speaker(), VOICE, "What it says")
    shelf.save("A", speaker(), VOICE)
    assert shelf.list() == {"A": {"seconds": 0.7, "transcript": None}, "B": {"seconds": 0.7, "transcript": "What it says"}}
    shelf.delete("A")
    assert shelf.names() == ["B"]
    with pytest.raises(UserError, match="no voice 'A'.*there are: B"):
        shelf.delete("A")
    shelf.delete("B")
    with pytest.raises(UserError, match="there is none"):
        shelf.load("B", speaker())


def test_a_reference_that_cannot_be_one_is_not_saved(shelf):
    with pytest.raises(UserError, match="silent"):
        shelf.save("Anna", speaker(), (np.zeros(500, np.float32), VOICE[1]))
    with pytest.raises(UserError, match="structur|steers"):
        shelf.save("Anna", speaker(), VOICE, "a <|text|> b")
    assert shelf.names() == []


def test_a_shelf_that_cannot_be_written_names_the_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--voices-dir"):
        Shelf(tmp_path / "file").save("Anna", speaker(), VOICE)


def test_the_shelf_lies_in_the_users_data_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_shelf() == tmp_path / "voxport" / "voices"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path / "home")
    assert tmp_path / "home" in default_shelf().parents
    monkeypatch.setattr("pathlib.Path.home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.raises(UserError, match="--voices-dir"):
        default_shelf()
    assert Shelf(tmp_path).folder == tmp_path


def test_what_was_spoken_can_be_the_voice_of_the_rest():
    made = speaker()
    first = made.speak("Hello you there", seed=1, max_frames=30)
    voice = made.remember(first)
    assert voice.codes.tolist() == first.codes.tolist() and voice.ref_text == "Hello you there"
    second = made.speak("And more", voice=voice, seed=1, max_frames=30)
    assert second.reference_codes.tolist() == first.codes.tolist()
