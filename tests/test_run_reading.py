"""Long text read aloud: every part once, in order, in one voice; streamed it is the same sound."""

import json

import numpy as np
import pytest
import soundfile
from run_fakes import CONTROL, HOP, RATE, encoder_session, heads_session
from test_run_batch import listening_heads
from test_run_speak import VOICE, make_speaker

from voxport.errors import UserError
from voxport.run.reading import plan, read, read_stream
from voxport.run.request import Wish

TEXT = "One is here now. Two is here now.\n\nThree is here now. Four, it is said, is here now."


def speaker(**sessions):
    return make_speaker(**({"audio_heads": listening_heads(), "audio_encoder": encoder_session(code=2)} | sessions))


def perform(wish, budget=20, size=3, made=None):
    made = made or speaker()
    return read(made, wish, plan(made, wish, budget), size)


def test_text_within_the_budget_is_one_part_to_the_letter():
    assert [part.text for part in plan(speaker(), Wish("  Hello  you "))] == ["  Hello  you "]
    assert [part.spoken for part in plan(speaker(), Wish(TEXT), 200)] == [TEXT]


def test_every_part_is_spoken_once_with_one_seed():
    reading = perform(Wish(TEXT, seed=4, max_frames=20))
    assert "".join(part.text for part in reading.parts).replace(" ", "") == "".join(TEXT.split())
    assert [speech.text for speech in reading.speeches] == [part.spoken for part in reading.parts]
    assert len(reading.parts) > 4 and {speech.seed for speech in reading.speeches} == {4}


def test_the_first_part_is_the_voice_of_the_rest():
    reading = perform(Wish(TEXT, seed=4, max_frames=20))
    first, *others = reading.speeches
    assert first.reference_codes is None
    assert all(np.array_equal(speech.reference_codes, first.codes) for speech in others)


def test_a_reference_is_heard_once_and_is_the_voice_of_all():
    made = speaker()
    reading = perform(Wish(TEXT, seed=4, max_frames=20, ref_audio=VOICE, ref_text="What it says"), made=made)
    assert len(made.parts["audio_encoder"].session.seen) == 1
    assert all(len(speech.reference_codes) == len(VOICE[0]) // HOP for speech in reading.speeches)


@pytest.mark.parametrize("options", [{}, {"ref_audio": VOICE}], ids=["zero-shot", "clone"])
def test_streamed_it_is_the_same_sound(options):
    wish = Wish(TEXT, seed=4, max_frames=20, **options)
    reading = perform(wish)
    made = speaker()
    stream = read_stream(made, wish, plan(made, wish, 20))
    assert np.array_equal(np.concatenate(list(stream)), reading.samples)
    assert [s.rows.tolist() for s in stream.speech.speeches] == [s.rows.tolist() for s in reading.speeches]


@pytest.mark.parametrize("size", [1, 2, 8])
def test_the_size_of_the_batch_changes_nothing(size):
    wish = Wish(TEXT, seed=4, max_frames=20)
    assert np.array_equal(perform(wish, size=size).samples, perform(wish).samples)


def test_tags_of_a_sentence_reach_its_later_parts():
    made = speaker()
    reading = perform(Wish(f"{CONTROL[0]}First comes this, then comes that, then the end.", seed=1, max_frames=20), made=made)
    assert len(reading.speeches) > 1 and all(speech.text.startswith(CONTROL[0]) for speech in reading.speeches)


def test_a_part_that_fails_names_itself():
    made = speaker()
    wish = Wish(TEXT, seed=4, max_frames=20, ref_audio=VOICE)
    parts = plan(made, wish, 20)
    heads = heads_session(lambda row: None)
    heads.compute = lambda feeds: {"logits": np.full((len(feeds["hidden_states"]), 1, 3, 11), 1.0, np.float32)}
    broken = speaker(audio_heads=heads)
    with pytest.raises(UserError, match="audio_heads gives"):
        read(broken, wish, parts)
    faulty = [*parts[:2], parts[2].__class__("...")]
    with pytest.raises(UserError, match="part 3 of 3: .*no letter or digit"):
        read(speaker(), wish, faulty)


def test_text_that_cannot_be_spoken_is_refused_before_it_is_split():
    with pytest.raises(UserError, match="no letter or digit"):
        plan(speaker(), Wish("..."))
    for budget in (0, 7, 2.5, "9"):
        with pytest.raises(UserError, match="--part-tokens must be a whole number of at least 8"):
            plan(speaker(), Wish(TEXT), budget)


def test_a_reading_is_saved_and_reported(tmp_path):
    reading = perform(Wish(TEXT, seed=4, max_frames=20))
    reading.save(tmp_path / "a.wav")
    sound, rate = soundfile.read(tmp_path / "a.wav")
    assert len(sound) == len(reading.samples) and rate == RATE
    report = json.loads(json.dumps(reading.report()))
    assert report["text"] == TEXT and len(report["parts"]) == len(reading.parts) and report["seed"] == 4
    assert f"in {len(reading.parts)} parts" in reading.health_line() and reading.seconds == len(sound) / RATE
    assert report["finish_reason"] == reading.finish_reason
