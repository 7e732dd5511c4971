"""Parts that give what they must not, and disks that do not take what they should: told as such, and nothing else is lost."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from run_fakes import FakeSession, N
from test_run_lines import recite, write
from test_run_speak import VOICE, make_speaker
from test_run_voices import kept_files, speaker

from fuzz.readers import omnifish_manifest
from voxport.errors import UserError, WorkError
from voxport.manifest import Manifest
from voxport.run import lines, voices
from voxport.run.omnifish_codec import CodecStream, decode, encode
from voxport.run.omnifish_request import Wish as OmniWish
from voxport.run.omnifish_request import check_wish
from voxport.run.session import Graph
from voxport.run.voices import SOURCE, Shelf, read_arrays, write_arrays


def full_disk(*arguments, **options):
    raise OSError(28, "No space left on device")


def encoder(codes):
    return FakeSession({"waveform": "float32"}, {"codes": "int64"}, lambda feeds: {"codes": codes})


@pytest.mark.parametrize("codes, message", [
    (np.zeros((1, N + 1, 4), np.int64), "codes of shape"), (np.zeros((1, N, 0), np.int64), "codes of shape"),
    (np.zeros((N, 4), np.int64), "codes of shape"), (np.full((1, N, 4), 99), "codes outside"), (np.full((1, N, 4), -1), "codes outside"),
])  # fmt: skip
def test_an_encoder_that_gives_no_codes_is_named(codes, message):
    with pytest.raises(WorkError, match=f"audio_encoder.*{message}"):
        make_speaker(audio_encoder=encoder(codes)).speak("Hello", ref_audio=VOICE)


def test_a_reference_that_leaves_no_room_for_a_text_is_refused_with_its_length():
    long = encoder(np.ones((1, N, 300), np.int64))
    with pytest.raises(UserError, match="the reference takes 30[0-9] of the 200 positions"):
        make_speaker(audio_encoder=long).hear(VOICE)


def test_a_line_that_cannot_be_written_is_told_and_the_next_is_spoken(tmp_path, monkeypatch):
    real = lines.write_json

    def write_json(path, value):
        if path.stem == "a":
            raise WorkError(f"cannot write {path}: No space left on device")
        real(path, value)

    monkeypatch.setattr(lines, "write_json", write_json)
    found = recite(tmp_path, write(tmp_path, "x.jsonl", {"text": "one", "name": "a"}, {"text": "two", "name": "b"}))
    assert found["a"].speech is None and found["a"].error.code == 1 and "No space left" in str(found["a"].error)
    assert found["b"].speech is not None and (tmp_path / "out/b.wav").is_file()


def test_many_voices_are_fetched_and_the_oldest_let_go(tmp_path):
    shelf, made = Shelf(tmp_path / "voices"), speaker()
    names = [f"voice{i}" for i in range(6)]
    for name in names:
        shelf.save(name, made, VOICE)
    asked = [{"text": "Hello", "voice": name, "name": name, "max_frames": 5} for name in (*names, "voice0")]
    asked[-1]["name"] = "again"
    found = recite(tmp_path, write(tmp_path, "x.jsonl", *asked), made=speaker())
    assert len(found) == 7 and all(outcome.speech is not None for outcome in found.values())


def test_a_full_disk_keeps_no_voice_from_speaking(tmp_path, monkeypatch):
    shelf = Shelf(tmp_path / "voices")
    shelf.save("Anna", speaker(), VOICE)
    for path in kept_files(shelf):
        path.unlink()
    monkeypatch.setattr(voices, "write_arrays", full_disk)
    assert speaker().speak("Hello", voice=shelf.load("Anna", speaker()), max_frames=5).samples.size
    assert kept_files(shelf) == []


def test_a_voice_that_cannot_be_deleted_is_told(tmp_path, monkeypatch):
    shelf = Shelf(tmp_path / "voices")
    shelf.save("Anna", speaker(), VOICE)
    monkeypatch.setattr(Path, "unlink", full_disk)
    with pytest.raises(WorkError, match="cannot delete the voice Anna"):
        shelf.delete("Anna")
    assert shelf.names() == ["Anna"]


@pytest.mark.parametrize("change", [
    lambda facts, arrays: arrays.update(samples=arrays["samples"][None]), lambda facts, arrays: arrays.pop("samples"),
    lambda facts, arrays: arrays.update(samples=np.full(9, np.nan, np.float32)), lambda facts, arrays: facts.update(seconds="1"),
    lambda facts, arrays: facts.update(ref_text=5),
])  # fmt: skip
def test_a_file_that_is_no_recording_is_told_with_the_remedy(change, tmp_path):
    shelf = Shelf(tmp_path / "voices")
    shelf.save("Anna", speaker(), VOICE)
    path = shelf.folder / "Anna" / SOURCE
    facts, arrays = read_arrays(path, "x")
    change(facts, arrays)
    write_arrays(path, facts, arrays)
    with pytest.raises(UserError, match="is not a saved voice; delete it with --delete-voice"):
        shelf.load("Anna", speaker())
    assert "is not a saved voice" in shelf.list()["Anna"]["error"]


# OmniFish


def omnifish(tmp_path, **changes):
    data = omnifish_manifest()
    spec = {"name": "codes", "dtype": "int64", "shape": [1, 3, "T"]}
    part = {"graph": "x.onnx", "precision": "fp32", "files": {"x.onnx": {"bytes": 1, "sha256": "0" * 64}}, "outputs": []}
    data["parts"] = {name: part | {"inputs": [spec, spec]} for name in ("codec_decoder", "codec_encoder")}
    (tmp_path / "manifest.json").write_text(json.dumps(data | changes), encoding="utf-8")
    return Manifest.read(tmp_path)


def codec_parts(wave=None, codes=None):
    decoder = FakeSession(
        {"codes": "int64", "position": "int64"}, {"waveform": "float32"}, lambda feeds: {"waveform": wave(feeds["codes"])}
    )
    return {"codec_decoder": Graph(decoder, "codec_decoder"), "codec_encoder": Graph(encoder(codes), "codec_encoder")}


def tone(codes):
    return np.sin(np.arange(codes.shape[2] * 7)).astype(np.float32)


@pytest.mark.parametrize("wave, message", [
    (lambda codes: tone(codes)[:-1], "gave 27 samples for 4 frames"), (lambda codes: tone(codes) * np.nan, "returned NaN or Inf as sound"),
    (lambda codes: tone(codes) / 0.0, "returned NaN or Inf as sound"), (lambda codes: tone(codes) * 0 + 0.5, "returned a flat line as sound"),
], ids=["short", "nan", "inf", "flat"])  # fmt: skip
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_fish_codec_that_makes_no_sound_is_named(wave, message, tmp_path):
    codes = np.ones((3, 4), np.int64)
    manifest = omnifish(tmp_path)
    assert len(decode(codec_parts(tone), manifest, codes)) == 28
    with pytest.raises(WorkError, match=f"codec_decoder.*{message}"):
        decode(codec_parts(wave), manifest, codes)


@pytest.mark.parametrize("codes", [np.ones((2, 4), np.int64), np.full((3, 4), -1), np.full((3, 4), 8), np.ones((3, 101), np.int64)],
                         ids=["books", "negative", "past a codebook", "too long"])  # fmt: skip
def test_codes_that_a_fish_codec_does_not_have_are_refused(codes, tmp_path):
    with pytest.raises(UserError, match="are not 3 rows of ids|101 frames are more than the 100"):
        CodecStream(codec_parts(tone), omnifish(tmp_path)).decode(codes)


@pytest.mark.parametrize(
    "codes", [np.ones((1, 3, 3), np.int64), np.full((1, 3, 4), 16), np.full((1, 3, 4), -1)], ids=["shape", "over", "under"]
)
def test_a_fish_encoder_that_gives_no_codes_is_named(codes, tmp_path):
    manifest, samples = omnifish(tmp_path), np.zeros(28, np.float32)
    assert encode(codec_parts(codes=np.ones((1, 3, 4), np.int64)), manifest, samples).shape == (3, 4)
    with pytest.raises(WorkError, match="codec_encoder.*(codes of shape|outside the codebooks)"):
        encode(codec_parts(codes=codes), manifest, samples)


def test_a_transcript_that_nobody_reads_is_a_warning(tmp_path):
    manifest = omnifish(tmp_path)
    assert "without reference audio" in check_wish(OmniWish("Hello", ref_text="Hi"), manifest).warnings[0]
    deaf = dataclasses.replace(manifest, prompt=dataclasses.replace(manifest.prompt, ref_text_prefix=False))
    request = check_wish(OmniWish("Hello", ref_audio=VOICE, ref_text="Hi"), deaf)
    assert request.ref_text is None and "reads no transcript" in request.warnings[0]
    assert check_wish(OmniWish("Hello", ref_audio=VOICE, ref_text="Hi"), manifest).ref_text == "Hi"
