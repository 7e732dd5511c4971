"""References in every form a user may have, and files that are right or absent."""

import dataclasses
import json
import os
import struct
import wave
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from run_fakes import make_manifest

from voxport.errors import UserError, WorkError
from voxport.manifest import Codec
from voxport.run import audio as run_audio
from voxport.run.audio import Form, check_output, fade_end, load_reference, resample, to_pcm16, write_sound

FOLDER = Path(__file__).parent / "golden/higgs"
CASES = json.loads((FOLDER / "resample.json").read_text(encoding="utf-8"))["cases"]
CODEC = Codec(24000, 960, 24000, 10)
LIMITS = dataclasses.replace(make_manifest().limits, warn_reference_seconds=30.0, max_reference_seconds=100.0)


def load(source):
    return load_reference(source, CODEC, LIMITS)


def chirp(seconds=1.5, rate=24000, peak=0.5):
    t = np.arange(round(seconds * rate)) / rate
    return (peak * np.sin(2 * np.pi * (200 * t + 800 * t**2))).astype(np.float32)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["key"])
def test_resampling_equals_the_golden_output(case):
    with np.load(FOLDER / "resample.npz") as golden:
        source, expected = golden[f"in_{case['key']}"], golden[f"out_{case['key']}"]
    made = resample(source, case["orig"], case["new"])
    assert made.dtype == np.float32 and made.shape == expected.shape
    error = np.linalg.norm(made - expected) / np.linalg.norm(expected)
    assert 20 * np.log10(max(error, 1e-12)) <= -60
    # tighter than asked: the tolerances that the golden README gives for a float32 kernel
    assert np.abs(made - expected).max() <= (3e-5 if 147 in (case["orig"] // 300, case["orig"] // 150) else 2e-6)


@settings(deadline=None)
@given(st.integers(1000, 200_000), st.integers(1, 500))
def test_any_rate_gives_the_length_of_its_duration(rate, length):
    assert len(resample(np.ones(length, np.float32), rate, 24000)) == -(-length * 24000 // rate)


def pcm(samples, bits):
    return np.rint(samples * (2 ** (bits - 1) - 1)).astype(np.int32)


FORMATS = {
    "24k mono PCM16": dict(rate=24000, subtype="PCM_16"),
    "44.1k stereo PCM16": dict(rate=44100, channels=2, subtype="PCM_16"),
    "48k float32": dict(rate=48000, subtype="FLOAT"),
    "96k float64": dict(rate=96000, subtype="DOUBLE"),
    "22.05k 24-bit": dict(rate=22050, subtype="PCM_24"),
    "44.1k six channels": dict(rate=44100, channels=6, subtype="PCM_16"),
    "extensible": dict(rate=24000, format="WAVEX", subtype="PCM_16"),
    "44101 Hz": dict(rate=44101, subtype="PCM_16"),
    "FLAC": dict(rate=48000, format="FLAC", subtype="PCM_24", suffix=".flac"),
    "AIFF": dict(rate=44100, format="AIFF", subtype="PCM_16", suffix=".aiff"),
    "FLAC named wav": dict(rate=44100, format="FLAC", subtype="PCM_16"),
}


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_every_form_of_one_sound_is_read_as_the_same_voice(form, tmp_path):
    path = tmp_path / f"a voice{form.get('suffix', '.wav')}"
    channels = form.get("channels", 1)
    scale = np.linspace(0.5, 1.5, channels) if channels > 1 else np.ones(1)
    sound = chirp(rate=form["rate"])[:, None] * scale
    soundfile.write(path, sound, form["rate"], subtype=form["subtype"], format=form.get("format"))
    made, expected = load(path).samples, chirp()
    assert abs(len(made) - len(expected)) <= 1
    made, expected = made[100:-100], expected[100 : len(made) - 100]
    assert np.linalg.norm(made - expected) / np.linalg.norm(expected) < 0.01  # -40 dB


def riff(body, data_size=None, before=b""):
    """A 24 kHz mono PCM16 file built by hand."""
    fmt = struct.pack("<HHIIHH", 1, 1, 24000, 48000, 2, 16)
    chunks = (
        b"fmt "
        + struct.pack("<I", len(fmt))
        + fmt
        + before
        + b"data"
        + struct.pack("<I", len(body) if data_size is None else data_size)
        + body
    )
    return b"RIFF" + struct.pack("<I", (4 + len(chunks)) & 0xFFFFFFFF) + b"WAVE" + chunks


@pytest.mark.parametrize("kind", ["LIST before data", "size 0xFFFFFFFF", "ten minutes promised", "odd length"])
def test_headers_that_lie_or_wander_are_read_by_what_is_there(kind, tmp_path):
    body = to_pcm16(chirp()).tobytes()
    made = {
        "LIST before data": riff(
            body, before=b"LIST" + struct.pack("<I", 26) + b"INFOISFT" + struct.pack("<I", 14) + b"some software\0"
        ),
        "size 0xFFFFFFFF": riff(body, 0xFFFFFFFF),
        "ten minutes promised": riff(body, 600 * 48000),
        "odd length": riff(body + b"\x01"),
    }[kind]
    path = tmp_path / "voice.wav"
    path.write_bytes(made)
    np.testing.assert_allclose(load(path).samples[: len(chirp())], chirp(), atol=1e-4)


def test_eight_bit_and_a_law_files_are_voices_too(tmp_path):
    for subtype in ("PCM_U8", "ALAW", "ULAW"):
        soundfile.write(tmp_path / "v.wav", chirp(rate=16000), 16000, subtype=subtype)
        made = load(tmp_path / "v.wav").samples[100:-100]
        assert np.linalg.norm(made - chirp()[100:-100]) / np.linalg.norm(made) < 0.05


@pytest.mark.parametrize("length", [1, 959, 960, 961, 4800, 23_976, 23_999, 24_000, 24_001])
def test_less_than_a_second_is_padded_with_zeros_to_one(length):
    sound = chirp(2)[1 : length + 1]
    reference = load((sound, 24000))
    assert len(reference.samples) == max(24000, length)
    assert reference.samples[:length].tolist() == sound.tolist()
    assert not reference.samples[length:].any()
    assert reference.seconds == pytest.approx(length / 24000)


def test_more_than_thirty_seconds_warn_and_more_than_a_hundred_are_refused():
    assert not any("s long" in warning for warning in load((chirp(30), 24000)).warnings)
    assert "31.0 s long" in load((chirp(31, 8000), 8000)).warnings[0]
    load((chirp(100, 8000), 8000))
    with pytest.raises(UserError, match="100.1 s long, at most 100 s"):
        load((chirp(100.1, 8000), 8000))


def test_a_long_file_is_refused_from_its_header(tmp_path, monkeypatch):
    soundfile.write(tmp_path / "long.wav", np.zeros(101 * 8000), 8000)
    monkeypatch.setattr(soundfile.SoundFile, "read", lambda *a, **k: pytest.fail("the samples were read"))
    with pytest.raises(UserError, match="at most 100 s"):
        load(tmp_path / "long.wav")


def test_a_stream_longer_than_its_header_says_is_stopped(monkeypatch, tmp_path):
    soundfile.write(tmp_path / "v.wav", chirp(), 24000)
    block = np.full((run_audio.READ_BLOCK, 1), 0.1, np.float32)
    reads = []
    monkeypatch.setattr(
        soundfile.SoundFile, "read", lambda *a, **k: reads.append(1) or block[: len(block) * (len(reads) < 60)]
    )
    with pytest.raises(UserError, match="at most 100 s"):
        load(tmp_path / "v.wav")
    assert len(reads) < 40


BAD_ARRAYS = {
    "no sample": (np.zeros(0, np.float32), "no samples"),
    "no sample, two channels": (np.zeros((0, 2), np.float32), "no samples"),
    "zeros": (np.zeros(48000, np.float32), "silent"),
    "a constant": (np.full(48000, 0.3, np.float32), "silent"),
    "one NaN": (np.where(np.arange(48000) == 7, np.nan, chirp(2)).astype(np.float32), "NaN or infinite"),
    "one Inf": (np.where(np.arange(48000) == 7, np.inf, chirp(2)).astype(np.float32), "NaN or infinite"),
    "integers as float": (chirp() * 32767, "full scale is 1"),
    "integers": (pcm(chirp(), 16), "must be float"),
    "transposed": (np.stack([chirp(), chirp()]), "samples.T"),
    "three axes": (np.zeros((1, 1, 48000), np.float32), "must be float"),
}


@pytest.mark.parametrize("samples, message", BAD_ARRAYS.values(), ids=BAD_ARRAYS)
def test_samples_without_a_voice_are_refused_by_reason(samples, message):
    with pytest.raises(UserError, match=message):
        load((samples, 24000))


@pytest.mark.parametrize("rate", [0, -24000, 999, 10**9, 24000.5])
def test_rates_that_are_no_rates_are_refused(rate):
    with pytest.raises(UserError, match="rate"):
        load((chirp(), rate))


def test_a_tuple_of_another_length_is_refused():
    with pytest.raises(UserError, match="samples, rate"):
        load((chirp(),))


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"RIFF\x00\x00\x00\x00WAVE", b"ID3\x03" + bytes(100), b'{"error": "not found"}']
)
def test_files_that_are_not_sound_are_refused_by_name(content, tmp_path):
    path = tmp_path / "voice.wav"
    path.write_bytes(content)
    with pytest.raises(UserError, match="voice.wav"):
        load(path)


def test_a_missing_file_or_a_folder_is_refused_by_name(tmp_path):
    for path in (tmp_path, tmp_path / "no.wav"):
        with pytest.raises(UserError, match="does not exist or is not a file"):
            load(path)


@pytest.mark.parametrize("dbfs, warned", [(-60, True), (-46, True), (-44, False), (-20, False), (-4, False)])
def test_quiet_references_are_used_with_a_warning(dbfs, warned):
    sound = chirp(peak=2**0.5 * 10 ** (dbfs / 20))
    reference = load((sound, 24000))
    assert any("quiet" in warning for warning in reference.warnings) == warned
    assert np.abs(reference.samples).max() == pytest.approx(np.abs(sound).max())


@pytest.mark.parametrize("end, warned", [(1.0, True), (0.5, True), (0.2, False), (0.0, False)])
def test_a_reference_that_breaks_off_in_sound_is_used_with_a_warning(end, warned):
    sound = chirp()
    sound[-600:] *= end  # 25 ms
    assert any("breaks off" in warning for warning in load((sound, 24000)).warnings) == warned


def test_clipping_is_reported_from_a_thousandth_of_the_samples_on():
    sound = chirp(2)
    sound[:40] = 1.0
    assert not any("clipped" in warning for warning in load((sound, 24000)).warnings)
    sound[:60] = -1.0
    assert "clipped" in load((sound, 24000)).warnings[0]
    stereo = np.stack([chirp(2), np.clip(chirp(2) * 4, -1, 1)], axis=1)
    assert "clipped" in load((stereo, 24000)).warnings[0]  # the average alone would hide it


def test_loud_samples_are_clipped_before_rounding_and_never_wrap():
    sound = 1.2 * np.sin(np.linspace(0, 50, 5000))
    made = to_pcm16(sound)
    assert made.max() == 32767 and made.min() == -32767
    assert (np.sign(made) == np.sign(np.rint(np.clip(sound, -1, 1) * 32767))).all()
    assert to_pcm16(np.array([0.5 / 32767, 0.51 / 32767, -1.5 / 32767])).tolist() == [0, 1, -2]


def test_a_written_file_has_exact_sizes_and_reads_back(tmp_path):
    path = tmp_path / "out.wav"
    write_sound(path, chirp(), 24000)
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate(), file.getnframes()) == (
            1,
            2,
            24000,
            len(chirp()),
        )
        assert file.readframes(10**6) == to_pcm16(chirp()).tobytes()
    assert path.stat().st_size == 44 + 2 * len(chirp())
    assert [item.name for item in tmp_path.iterdir()] == ["out.wav"]


@pytest.mark.parametrize("fault", [np.nan, np.inf])
def test_nothing_is_written_when_the_speech_is_not_finite(fault, tmp_path):
    with pytest.raises(WorkError, match="NaN or Inf"):
        write_sound(tmp_path / "out.wav", np.array([0, fault]), 24000)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_write_leaves_the_old_file_and_no_other(stop, tmp_path, monkeypatch):
    path = tmp_path / "out.wav"
    path.write_bytes(b"old")

    def fail(file, samples):
        os.write(file.name, b"half")
        raise stop

    monkeypatch.setattr(soundfile.SoundFile, "write", fail)
    with pytest.raises((KeyboardInterrupt, WorkError)):
        write_sound(path, chirp(), 24000)
    assert [item.name for item in tmp_path.iterdir()] == ["out.wav"] and path.read_bytes() == b"old"


@pytest.mark.parametrize("name", ["no/such/folder/out.wav", "out.mp3", "folder.wav"])
def test_an_output_that_cannot_be_written_is_refused_early(name, tmp_path):
    (tmp_path / "folder.wav").mkdir()
    with pytest.raises(UserError, match="must"):
        check_output(tmp_path / name, ".wav")
    assert check_output(tmp_path / "out.WAV", ".wav") == tmp_path / "out.WAV"


def test_the_fade_touches_only_the_last_five_milliseconds_and_ends_in_zero():
    sound = np.ones(1000, np.float32)
    faded = fade_end(sound, 24000)
    assert (faded[:880] == 1).all() and faded[-1] == 0
    assert (np.diff(faded[880:]) <= 0).all() and np.abs(np.diff(faded)).max() < 0.01
    assert (sound == 1).all()
    assert fade_end(np.ones(3, np.float32), 24000)[-1] == 0


KINDS = [("a.wav", "pcm16", 1e-4), ("a.wav", "pcm24", 1e-6), ("a.wav", "float", 0), ("a.flac", "pcm16", 1e-4),
         ("a.flac", "pcm24", 1e-6), ("a.ogg", "pcm16", 0.1), ("a.opus", "pcm16", 0.2), ("a.mp3", "pcm16", 0.1)]  # fmt: skip


@pytest.mark.parametrize("name, encoding, allowed", KINDS)
def test_every_kind_of_file_is_read_back_as_what_was_written(name, encoding, allowed, tmp_path):
    rate = 24000
    samples = (0.5 * np.sin(2 * np.pi * 440 * np.arange(rate) / rate)).astype(np.float32)
    write_sound(tmp_path / name, samples, rate, Form(encoding))
    read, read_rate = soundfile.read(tmp_path / name, dtype="float32")
    assert read_rate == rate and abs(len(read) - len(samples)) < 3000 and len(list(tmp_path.iterdir())) == 1
    if allowed < 0.05:
        assert np.abs(read - samples).max() <= allowed
    else:
        level = lambda sound: np.sqrt(np.mean(sound[4000:20000] ** 2))
        assert level(read) == pytest.approx(level(samples), rel=allowed)


@pytest.mark.parametrize("name, encoding", [("a.wav", "pcm16"), ("a.wav", "pcm24"), ("a.flac", "pcm24"), ("a.ogg", "pcm16")])
def test_samples_beyond_full_scale_never_wrap_around(name, encoding, tmp_path):
    samples = 1.2 * np.sin(2 * np.pi * 100 * np.arange(24000) / 24000)
    write_sound(tmp_path / name, samples.astype(np.float32), 24000, Form(encoding))
    read, _ = soundfile.read(tmp_path / name)
    loud = np.abs(samples) > 0.3
    assert (np.sign(read[loud]) == np.sign(samples[loud])).all()


def test_floats_are_kept_as_they_are(tmp_path):
    samples = np.array([1.5, -2.25, 0.1], np.float32)
    write_sound(tmp_path / "a.wav", samples, 24000, Form("float"))
    assert soundfile.read(tmp_path / "a.wav", dtype="float32")[0].tolist() == samples.tolist()


def test_another_rate_is_resampled(tmp_path):
    write_sound(tmp_path / "a.wav", chirp(), 24000, Form(rate=48000))
    read, rate = soundfile.read(tmp_path / "a.wav")
    assert rate == 48000 and len(read) == 2 * len(chirp())


@pytest.mark.parametrize(
    "name, form, message",
    [
        ("a.xyz", Form(), "must end in .wav or .flac"),
        ("a.opus", Form(rate=44100), ".opus cannot hold 44100 Hz; choose --sample-rate among 8000, 12000, 16000"),
        ("a.mp3", Form(rate=96000), ".mp3 cannot hold 96000 Hz"),
        ("a.wav", Form(rate=10), ".wav cannot hold 10 Hz"),
        ("a.mp3", Form("pcm24"), "leave out --encoding"),
        ("a.flac", Form("float"), "cannot write .flac as float"),
        ("a.wav", Form("pcm8"), "--encoding must be one of"),
    ],
)
def test_what_does_not_go_together_is_refused_before_any_work(name, form, message, tmp_path):
    with pytest.raises(UserError, match=message):
        form.check(tmp_path / name, 24000)
