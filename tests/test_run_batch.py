"""Several utterances at once: each comes out as it would alone, one that fails holds up no other, rows are used again."""

import numpy as np
import pytest
from run_fakes import V, decoder_session, encoder_session, heads_session, make_manifest
from test_run_golden import CASES, compare, golden  # noqa: F401
from test_run_speak import VOICE, make_speaker

from voxport.errors import UserError, WorkError
from voxport.run.higgs import Speaker
from voxport.run.request import Wish
from voxport.run.sampler import distance, uniforms
from voxport.run.speech import Speech

MANIFEST = make_manifest()
TEXTS = ["Hello there", "Hi you", "One more of these", "No", "And a longer one at the end"]


def listening_heads(ends_from=9, **faults):
    """Heads that answer to what the body says, so that each row of a batch gets its own speech, with an end of its own."""
    session = heads_session(lambda r: None)

    def compute(feeds):
        hidden = feeds["hidden_states"][:, 0, 0].astype(np.int64)
        logits = np.zeros((len(hidden), 1, MANIFEST.audio.num_codebooks, V), np.float32)
        for row, total in zip(logits, hidden, strict=True):
            row[0, :, :] = np.sin(np.arange(MANIFEST.audio.num_codebooks * V).reshape(-1, V) * (total % 97 + 1)) * 3
            row[0, 0, V - 1] = 9 if total % 13 == 0 else -9
        return {"logits": logits}

    session.compute = compute
    return session


def speaker():
    return make_speaker(audio_heads=listening_heads(), audio_encoder=encoder_session(code=2))


def wishes(**options):
    return [Wish(text, seed=i, max_frames=20 + 11 * i, **options) for i, text in enumerate(TEXTS)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_text_is_spoken_as_it_would_be_alone(size):
    alone = [speaker().grant(wish) for wish in wishes()]
    together = dict(speaker().speak_many(wishes(), size))
    assert sorted(together) == list(range(len(TEXTS)))
    for i, speech in together.items():
        assert speech.rows.tolist() == alone[i].rows.tolist() and speech.finish_reason == alone[i].finish_reason
        assert np.array_equal(speech.samples, alone[i].samples) and speech.seed == i
    assert len({len(speech.rows) for speech in alone}) > 2  # they end at different times, so rows are freed and moved


def test_a_free_row_is_used_again_and_rows_in_use_stay_together():
    made = speaker()
    list(made.speak_many(wishes(), 2))
    steps = [feeds for feeds in made.parts["llm_decoder"].session.seen if feeds["inputs_embeds"].shape[1] == 1]
    sizes = [len(step["inputs_embeds"]) for step in steps]
    assert max(sizes) == 2 and sizes.count(2) > len(sizes) / 2


def test_results_come_when_they_are_over():
    first, _ = next(iter(speaker().speak_many(wishes(), 4)))
    lengths = {i: len(speaker().grant(wish).rows) for i, wish in enumerate(wishes()[:4])}
    assert lengths[first] == min(lengths.values())


def test_a_bad_text_fails_alone():
    mixed = wishes()
    mixed[1] = Wish("...")
    mixed[3] = Wish("Hello", ref_audio="no.wav")
    made = dict(speaker().speak_many(mixed, 2))
    assert [type(made[i]) for i in range(5)] == [Speech, UserError, Speech, UserError, Speech]
    assert "no letter or digit" in str(made[1]) and "no.wav" in str(made[3])


def test_a_text_whose_sound_fails_fails_alone():
    faulty = speaker()
    codec, whole = faulty.parts["audio_tokenizer"].session, faulty.parts["audio_tokenizer"].session.compute
    calls = iter(range(1000))
    codec.compute = lambda feeds: {"waveform": whole(feeds)["waveform"] * (np.nan if next(calls) == 0 else 1)}
    made = dict(faulty.speak_many(wishes(), 3))
    assert sorted(type(value).__name__ for value in made.values()) == ["Speech"] * 4 + ["WorkError"]


def test_a_body_that_is_dead_fails_every_text():
    dead = make_speaker(llm_decoder=decoder_session(hidden=0.0))
    assert all(isinstance(value, WorkError) for value in dict(dead.speak_many(wishes(), 2)).values())


def test_texts_with_one_reference_hear_it_once_and_others_hear_theirs():
    made = speaker()
    other = (VOICE[0][::-1].copy(), VOICE[1])
    lines = [Wish("Hello", ref_audio=voice, max_frames=20, seed=1) for voice in (VOICE, VOICE, other, VOICE)]
    spoken = dict(made.speak_many(lines, 2))
    assert len(made.parts["audio_encoder"].session.seen) == 2
    assert spoken[0].rows.tolist() == speaker().grant(lines[0]).rows.tolist()


@pytest.mark.parametrize("size", [0, -1, 1.5, "a", None])
def test_a_batch_without_a_place_is_refused(size):
    for asked in (wishes(), []):
        with pytest.raises(UserError, match="a batch holds one text or more"):
            list(speaker().speak_many(asked, size))


def test_what_is_no_wish_is_told_in_its_place():
    made = dict(speaker().speak_many([None, "Hello", Wish("Hello", max_frames=3)], 2))
    assert "is a Wish, not NoneType" in str(made[0]) and "is a Wish, not str" in str(made[1]) and len(made[2].codes) == 3


def test_nothing_to_say_is_nothing():
    assert list(speaker().speak_many([])) == []


@pytest.fixture(scope="module")
def real(tiny_build):
    return Speaker.load(tiny_build, threads=1)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_golden_rows_are_spoken_in_a_batch(size, real, golden):  # noqa: F811
    voice = (golden["ref_sig"].astype(np.float32), 24000)
    lines = [Wish(c["text"], voice if c["clone"] else None, c["ref_text"], temperature=0, max_frames=53) for c in CASES]
    made = dict(real.speak_many(lines, size))
    for i, case in enumerate(CASES):
        compare(made[i], case, golden, "bf16")


def first_difference(one, other):
    length = min(len(one), len(other))
    differs = (one[:length] != other[:length]).any(axis=1)
    return int(differs.argmax()) if differs.any() else None


def test_sampled_speech_differs_from_speech_alone_only_where_a_hair_decides(real):
    lines = [Wish(text, seed=seed, max_frames=40) for seed, text in enumerate(TEXTS)]
    diverged = 0
    for i, speech in real.speak_many(lines, 4):
        alone = real.grant(lines[i])
        row = first_difference(alone.rows, speech.rows)
        if row is not None:
            diverged += 1
            heard = real.embed_rows(alone.rows[:row])
            hidden, _ = real.decoder.prefill(np.concatenate([real.embed_prompt(alone_prompt(alone), None), heard], axis=1))
            logits = real.read_logits(hidden)[0]
            assert distance(logits, alone.sampling, uniforms(alone.seed, row, len(logits))).min() < 1e-4
    assert diverged <= 1


def alone_prompt(speech):
    from voxport.run.text import Prompt

    return Prompt(speech.prompt_ids, None)
