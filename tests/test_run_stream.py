"""Sound while speech is being made: when it comes, what it is made of, and that it is what is saved at the end."""

import itertools

import numpy as np
import pytest
from run_fakes import HOP, N, V, codec_session, heads_session, make_manifest
from test_run_speak import VOICE, counting, ending, make_speaker, stuck

from voxport.errors import UserError, WorkError
from voxport.run.audio import fade_end
from voxport.run.higgs import Speaker
from voxport.run.stream import FIRST_FRAMES, LARGEST_FRAMES, schedule
from voxport.run.take import PLATEAU

CONTEXT = make_manifest().codec.context_frames


def blurred_codec():
    """A codec whose every frame depends on `CONTEXT` frames to each side, as the real one's does."""

    def compute(feeds):
        first = np.pad(feeds["codes"][0, 0].astype(np.float64), CONTEXT)
        blurred = np.convolve(first, np.arange(1, 2 * CONTEXT + 2), "valid") / V
        ripple = 1 + np.arange(HOP) % 2 / 100
        return {"waveform": (blurred[:, None] * ripple).astype(np.float32).reshape(1, 1, -1)}

    session = codec_session()
    session.compute = compute
    return session


def test_the_schedule_leaves_no_frame_out_and_grows_to_a_bound():
    pieces = list(itertools.islice(schedule(), 20))
    assert pieces[0] == (0, FIRST_FRAMES)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
    assert max(stop - start for start, stop in pieces) == LARGEST_FRAMES


@pytest.mark.parametrize("frames", [N, FIRST_FRAMES, FIRST_FRAMES + 1, 11, 12, 13, 28, 60, 80])
@pytest.mark.parametrize("heads", [ending, lambda frames: heads_session(counting)], ids=["eoc", "cut"])
def test_the_stream_joined_is_the_file_and_the_whole_decode(frames, heads):
    options = {"max_frames": frames, "seed": 3} if heads is not ending else {"seed": 3}
    speech = make_speaker(audio_heads=heads(frames), audio_tokenizer=blurred_codec()).speak("Hello there you", **options)
    streamer = make_speaker(audio_heads=heads(frames), audio_tokenizer=blurred_codec())
    stream = streamer.speak_stream("Hello there you", **options)
    chunks = list(stream)
    assert len(speech.codes) == frames
    assert np.array_equal(np.concatenate(chunks), speech.faded())
    assert np.array_equal(stream.speech.samples, speech.samples) and stream.speech.rows.tolist() == speech.rows.tolist()
    whole = streamer.codec.decode(speech.codes)
    np.testing.assert_allclose(speech.samples, whole, atol=1e-6)


def test_less_context_than_the_codec_needs_would_be_seen():
    speaker = make_speaker(audio_heads=ending(40), audio_tokenizer=blurred_codec())
    speech = speaker.speak("Hello there you")
    speaker.codec.figures = speaker.codec.figures.__class__(1000, HOP, 100, CONTEXT - 1)
    parts = [speaker.codec.decode_window(speech.codes, start, min(stop, 40)) for start, stop in [(0, 4), (4, 40)]]
    assert np.abs(np.concatenate(parts) - speech.samples).max() > 1e-3


def test_the_first_sound_comes_after_as_few_rows_as_the_codec_allows():
    speaker = make_speaker(audio_heads=heads_session(counting))
    stream = iter(speaker.speak_stream("Hello there you", max_frames=60))
    first = next(stream)
    assert len(first) == FIRST_FRAMES * HOP
    steps = len(speaker.parts["llm_decoder"].session.seen) - 1
    assert steps == FIRST_FRAMES + CONTEXT + N - 2
    assert len(speaker.parts["audio_tokenizer"].session.seen) == 1


def test_a_plateau_that_will_be_cut_is_never_streamed():
    stream = make_speaker(audio_heads=stuck(30)).speak_stream("Hello", max_frames=90)
    chunks = list(stream)
    assert stream.speech.finish_reason == PLATEAU and sum(map(len, chunks)) == 30 * HOP
    assert np.array_equal(np.concatenate(chunks), fade_end(stream.speech.samples, 1000))


def test_a_request_is_checked_when_the_stream_is_asked_for_not_when_it_is_read():
    speaker = make_speaker()
    with pytest.raises(UserError):
        speaker.speak_stream("...")
    assert speaker.parts.loaded == []


def test_a_stream_that_nobody_reads_on_ends_quietly():
    speaker = make_speaker(audio_heads=heads_session(counting))
    chunks = iter(speaker.speak_stream("Hello there you", max_frames=90))
    next(chunks)
    chunks.close()
    steps = len(speaker.parts["llm_decoder"].session.seen)
    assert steps < 30


def test_a_stream_clones_and_reports_when_sound_came():
    stream = make_speaker(audio_heads=ending(30)).speak_stream("Hello", ref_audio=VOICE)
    list(stream)
    timings = stream.speech.timings
    assert len(stream.speech.reference_codes) == len(VOICE[0]) // HOP
    assert 0 < timings.first_row <= timings.first_sound <= timings.total


def test_sound_that_is_flat_throughout_is_an_error_but_a_flat_stretch_is_not():
    def wave(sound, rows=iter(range(100))):
        return np.full_like(sound, 0.5) if next(rows) == 0 else sound

    quiet_start = make_speaker(audio_heads=ending(30), audio_tokenizer=codec_session(wave))
    assert np.ptp(quiet_start.speak("Hello").samples[:HOP]) == 0
    flat = make_speaker(audio_heads=ending(30), audio_tokenizer=codec_session(lambda sound: np.full_like(sound, 0.5)))
    with pytest.raises(WorkError, match="flat line"):
        flat.speak("Hello")


def test_real_speech_streamed_equals_whole_decode(tiny_build):
    speaker = Speaker.load(tiny_build, threads=1)
    stream = speaker.speak_stream("Hello there.", seed=1, max_frames=120)
    chunks = list(stream)
    speech = speaker.speak("Hello there.", seed=1, max_frames=120)
    assert len(chunks) > 3
    assert np.array_equal(np.concatenate(chunks), speech.faded())
    np.testing.assert_allclose(speech.samples, speaker.codec.decode(speech.codes), atol=1e-5)
