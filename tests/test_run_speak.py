"""Speaker on stand-in parts: how speech ends, what is refused and when, what a clone hears, what comes back."""

import dataclasses
import hashlib
import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import soundfile
from run_fakes import (
    HOP,
    PARTS,
    RATE,
    FakeParts,
    N,
    V,
    codec_session,
    decoder_session,
    encoder_session,
    heads_session,
    make_manifest,
    make_tokenizer,
)

from voxport import run
from voxport.errors import UserError, WorkError
from voxport.manifest import Sampling
from voxport.run.audio import to_pcm16
from voxport.run.codec import silence_remedy
from voxport.run.higgs import Speaker
from voxport.run.request import Wish
from voxport.run.session import Engine

MANIFEST = make_manifest()
VOICE = (np.sin(np.arange(700) / 5).astype(np.float32) * 0.5, RATE)


def make_speaker(manifest=MANIFEST, engine=None, **sessions):
    speaker = Speaker(
        "nowhere", manifest, FakeParts(manifest, engine, **sessions), warn=lambda message: heard.append(message)
    )
    heard = speaker.heard = []
    speaker.tokenizer = make_tokenizer()
    return speaker


def counting(r):
    return [r % 5] * N


def ending(at):
    """Speech that changes from row to row, with EOC in codebook 0 at row `at`."""
    return heads_session(lambda r: [V - 1, 1, 1] if r == at else counting(r))


def stuck(after):
    """Speech for `after` rows, then the same row for ever."""
    return heads_session(lambda r: counting(r) if r < after else [6] * N)


def test_speech_that_ends_by_itself_has_every_frame_and_no_fade():
    speech = make_speaker(audio_heads=ending(20)).speak("Hello there")
    assert (speech.finish_reason, speech.fade_seconds) == ("eoc", 0.0)
    assert speech.codes.shape == (20, N) and speech.rows.shape == (20 + N - 1, N)
    assert len(speech.samples) == 20 * HOP and speech.sample_rate == RATE
    assert speech.faded() is speech.samples
    assert speech.reference_codes is None


def test_speech_that_never_ends_stops_at_the_cap_that_follows_from_the_text():
    speech = make_speaker(audio_heads=heads_session(counting)).speak("Hi 5")
    limits = MANIFEST.limits
    cap = limits.cap_base_frames + 3 * limits.cap_frames_per_char + limits.cap_frames_per_wide_char
    assert (speech.finish_reason, len(speech.codes), speech.max_frames) == ("length", cap, cap)


@pytest.mark.parametrize("max_frames", [1, 2, 30])
def test_max_frames_counts_frames_and_rows_are_n_minus_one_more(max_frames):
    speech = make_speaker(audio_heads=heads_session(counting)).speak("Hello", max_frames=max_frames)
    assert (len(speech.codes), len(speech.rows)) == (max_frames, max_frames + N - 1)
    assert speech.finish_reason == "length"


@pytest.mark.parametrize("max_frames", [0, -1, MANIFEST.limits.max_rows - N + 2])
def test_max_frames_outside_the_limits_are_refused(max_frames):
    with pytest.raises(UserError, match="--max-frames must be a whole number in 1..98"):
        make_speaker().speak("Hello", max_frames=max_frames)


NOT_MEANT = [
    {"temperature": "hot"}, {"top_k": "x"}, {"top_p": None, "seed": 1.5}, {"max_frames": 2.5}, {"tags": 3}, {"ref_audio": 7},
    {"ref_audio": (VOICE[0], "x")}, {"ref_audio": (VOICE[0], float("nan"))}, {"ref_audio": (VOICE[0],)}, {"voice": "Anna"},
    {"ref_audio": VOICE, "ref_text": 7}, {"ref_text": 7},
]  # fmt: skip


@pytest.mark.parametrize("options", NOT_MEANT, ids=str)
def test_values_of_the_wrong_type_are_user_errors(options):
    made = make_speaker()
    with pytest.raises(UserError):
        made.speak("Hello", **options)
    assert made.parts.loaded == []


@pytest.mark.parametrize("path", [None, 5, b"x.wav"])
def test_speech_is_saved_under_a_path(path):
    speech = make_speaker().speak("Hello", max_frames=9)
    with pytest.raises(UserError, match="a file to write is named by its path"):
        speech.save(path)
    with pytest.raises(UserError, match="a file to write is named by its path"):
        speech.save_codes(path)


@pytest.mark.parametrize("options", [{"folder": None}, {"folder": 7}, {"provider": 7}, {"threads": "2"}, {"threads": 1.5}], ids=str)
def test_a_build_is_opened_with_what_can_be_meant(options, tiny_build):
    with pytest.raises(UserError):
        Speaker.load(**({"folder": tiny_build} | options))


def test_endless_sameness_is_cut_and_the_speech_before_it_kept():
    speech = make_speaker(audio_heads=stuck(30)).speak("Hello", max_frames=90)
    assert (speech.finish_reason, len(speech.codes)) == ("plateau", 30)
    assert speech.codes[N:, 0].tolist() == [r % 5 for r in range(N, 30)]


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 1}])
def test_greedy_speech_warns_and_keeps_the_guard_against_sameness(options):
    speech = make_speaker(audio_heads=stuck(30)).speak("Hello", max_frames=90, **options)
    assert (speech.finish_reason, len(speech.codes)) == ("plateau", 30)
    assert any("tends to get stuck" in warning for warning in speech.warnings)


def fading_codec(limit):
    """A codec that is loud where the second codebook is below `limit`, and gives room tone elsewhere."""

    def wave(feeds):
        codes = np.repeat(feeds["codes"][0, 1], HOP)
        return {"waveform": (np.where(codes < limit, 0.5, 0.001) * (1 - np.arange(len(codes)) % 2 * 2))[None, None]}

    session = codec_session()
    session.compute = wave
    return session


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("reason", ["length", "eoc"])
def test_speech_that_runs_into_silence_until_the_cap_loses_it_and_speech_that_ends_keeps_it(reason, streamed):
    end = 60 if reason == "eoc" else 10**6
    heads = heads_session(lambda r: [V - 1, 1, 1] if r == end else [r % 3, 0 if r < 21 else 7, r % 5])  # frame 20 is the last loud one
    manifest = dataclasses.replace(MANIFEST, codec=dataclasses.replace(MANIFEST.codec, sample_rate=10 * HOP))
    made = make_speaker(manifest, audio_heads=heads, audio_tokenizer=fading_codec(5))
    stream = made.stream(Wish("Hello", max_frames=90, seed=1), progress=False)
    joined = np.concatenate(list(stream))
    speech = stream.speech
    frames = 60 if reason == "eoc" else 20 + 3  # 0.3 s at 10 frames a second
    assert (speech.finish_reason, len(speech.codes), len(speech.rows)) == (reason, frames, frames + N - 1)
    assert len(speech.samples) == frames * HOP
    assert np.array_equal(joined if streamed else speech.faded(), speech.faded())
    assert np.abs(speech.samples[: 20 * HOP]).min() == 0.5


def test_a_pause_shorter_than_the_guard_survives():
    pause = MANIFEST.limits.plateau_frames - 1
    heads = heads_session(lambda r: [V - 1, 1, 1] if r == 60 else [6] * N if 20 <= r < 20 + pause else counting(r))
    speech = make_speaker(audio_heads=heads).speak("Hello", max_frames=90)
    assert (speech.finish_reason, len(speech.codes)) == ("eoc", 60)


def test_only_cut_speech_is_faded_in_the_file_and_its_samples_stay_as_decoded(tmp_path):
    codec = codec_session(lambda sound: np.full_like(sound, 0.5) + np.arange(sound.size) % 2 / 100)
    cut = make_speaker(audio_heads=heads_session(counting), audio_tokenizer=codec).speak("Hello", max_frames=30)
    assert cut.samples[-1] == pytest.approx(0.51)
    cut.save(tmp_path / "cut.wav")
    written, rate = soundfile.read(tmp_path / "cut.wav", dtype="int16")
    fade = round(cut.fade_seconds * RATE)
    assert rate == RATE and written[-1] == 0 and cut.fade_seconds == 0.005
    assert written[:-fade].tolist() == to_pcm16(cut.samples)[:-fade].tolist()
    assert cut.report()["fade_seconds"] == 0.005


def sampled(speaker, **options):
    return speaker.speak("Hello there you", max_frames=60, **options)


def flat_heads():
    """Heads whose ids are all about as likely, so that the seed decides."""
    session = heads_session(counting)
    noise = np.random.default_rng(0).normal(size=(200, 1, 1, N, V)).astype(np.float32)
    rows = iter(noise)
    session.compute = lambda feeds: {"logits": next(rows)}
    return session


def test_a_seed_gives_the_same_file_and_another_seed_another(tmp_path):
    digests = []
    for seed in (1, 1, 2):
        sampled(make_speaker(audio_heads=flat_heads()), seed=seed).save(tmp_path / "a.wav")
        digests.append(hashlib.sha256((tmp_path / "a.wav").read_bytes()).hexdigest())
    assert digests[0] == digests[1] != digests[2]


def test_a_seed_is_drawn_when_none_is_given_and_gives_the_take_again():
    speech = sampled(make_speaker(audio_heads=flat_heads()))
    again = sampled(make_speaker(audio_heads=flat_heads()), seed=speech.seed)
    assert again.rows.tolist() == speech.rows.tolist()
    assert sampled(make_speaker(audio_heads=flat_heads())).seed != speech.seed
    assert f"seed {speech.seed}" in speech.health_line()


def test_sampling_values_replace_the_builds_one_by_one():
    speech = sampled(make_speaker(), top_k=3)
    assert speech.sampling == Sampling(0.8, 0.8, 3, 1e-5)
    with pytest.raises(UserError, match="--top-p"):
        sampled(make_speaker(), top_p=2.0)


def test_a_clone_hears_its_reference_rows_where_the_prompt_has_placeholders():
    speaker = make_speaker(audio_heads=ending(20), audio_encoder=encoder_session(code=2))
    speech = speaker.speak("Hello", ref_audio=VOICE, ref_text="What it says")
    frames = len(VOICE[0]) // HOP
    assert speech.reference_codes.tolist() == [[2] * N] * frames
    span = np.flatnonzero(speech.prompt_ids == MANIFEST.tokens.placeholder)
    assert len(span) == frames + N - 1 and speech.prompt_ids[span[0] - 1] == MANIFEST.tokens.ref_audio
    heard = speaker.parts["llm_decoder"].session.seen  # first the voice, then the text
    prompt_embeds = np.concatenate([feeds["inputs_embeds"][0, :, 0] for feeds in heard[:2]])
    assert len(heard[0]["inputs_embeds"][0]) == span[-1] + 1
    boc, eoc = MANIFEST.audio.boc_id, MANIFEST.audio.eoc_id
    sums = [2 + 2 * boc, 4 + boc, *[6] * (frames - N + 1), 4 + eoc, 2 + 2 * eoc]
    assert prompt_embeds[span].tolist() == sums
    rest = np.delete(np.arange(len(speech.prompt_ids)), span)
    assert prompt_embeds[rest].tolist() == speech.prompt_ids[rest].tolist()
    assert (speaker.parts["text_embed"].session.seen[0]["input_ids"] >= 0).all()


def test_each_row_is_heard_in_the_next_step_with_boc_in_the_ramp():
    speaker = make_speaker(audio_heads=ending(20))
    speech = speaker.speak("Hello")
    steps = speaker.parts["llm_decoder"].session.seen[1:]
    assert [step["inputs_embeds"][0, 0, 0] for step in steps] == speech.rows[:-1].sum(axis=1).tolist()
    assert speech.rows[0, 1:].tolist() == [MANIFEST.audio.boc_id] * (N - 1)


def test_the_encoder_is_loaded_for_cloning_only():
    speaker = make_speaker(audio_heads=ending(20))
    speaker.speak("Hello")
    assert set(speaker.parts.loaded) == set(PARTS) - {"audio_encoder"}
    clone = make_speaker(audio_heads=ending(20))
    clone.speak("Hello", ref_audio=VOICE)
    assert set(clone.parts.loaded) == set(PARTS)


@pytest.mark.parametrize(
    "request_",
    [
        {"text": "..."},
        {"text": "<|audio|> x"},
        {"text": "<|calm|> x"},
        {"ref_audio": "no.wav"},
        {"ref_audio": VOICE[0]},
        {"ref_audio": VOICE, "ref_text": "!"},
        {"ref_audio": VOICE, "ref_text": "<|text|> a"},
        {"max_frames": 0},
        {"temperature": -1},
        {"seed": -1},
        {"tags": "x", "text": "<|calm|> x"},
    ],
)
def test_a_request_that_cannot_be_met_is_refused_before_any_part_is_loaded(request_):
    speaker = make_speaker()
    with pytest.raises(UserError) as error:
        speaker.speak(**({"text": "Hello"} | request_))
    assert error.value.code == 2
    assert speaker.parts.loaded == []


def test_a_prompt_that_leaves_no_room_is_refused_with_numbers_before_the_model_is_loaded():
    speaker = make_speaker()
    with pytest.raises(UserError, match="takes 111 positions.*90 frames take 92.*the 200 of this build"):
        speaker.speak("x" * 108, max_frames=90)
    assert speaker.parts.loaded == []
    assert make_speaker(audio_heads=ending(20)).speak("x" * 105, max_frames=90).finish_reason == "eoc"


def test_a_reference_counts_toward_the_context():
    with pytest.raises(UserError, match="of them the reference"):
        make_speaker().speak("x" * 30, max_frames=90, ref_audio=VOICE)


def test_a_transcript_without_a_reference_is_ignored_with_a_warning():
    speaker = make_speaker(audio_heads=ending(20))
    speech = speaker.speak("Hello", ref_text="<|audio|> whatever")
    assert "without reference audio" in speaker.heard[0]
    assert speech.prompt_ids.tolist() == make_speaker(audio_heads=ending(20)).speak("Hello").prompt_ids.tolist()


def test_a_transcript_that_the_tokenizer_cannot_mark_is_ignored_with_a_warning():
    old = make_manifest(tokens=dataclasses.replace(MANIFEST.tokens, ref_text=None))
    speaker = make_speaker(old, audio_heads=ending(20))
    speech = speaker.speak("Hello", ref_audio=VOICE, ref_text="What it says")
    assert "no token for a reference text" in speaker.heard[0]
    bare = make_speaker(old, audio_heads=ending(20)).speak("Hello", ref_audio=VOICE)
    assert speech.prompt_ids.tolist() == bare.prompt_ids.tolist()


def test_every_warning_is_heard_at_once_and_stands_in_the_report():
    speaker = make_speaker(audio_heads=ending(20))
    speech = speaker.speak("Hello <|calm|>", tags="keep", ref_audio=(VOICE[0] / 1000, RATE))
    assert speech.report()["warnings"] == list(speech.warnings) == speaker.heard
    assert len(speaker.heard) == 4  # unknown tag, longer than half a second, very quiet, ends in sound


def test_a_fallback_that_was_allowed_is_heard_once_and_always_recorded():
    engine = Engine("CUDAExecutionProvider", 1, allow_fallback=True)
    speaker = make_speaker(engine=engine, audio_heads=ending(20))
    speeches = [speaker.speak("Hello"), speaker.speak("Hello", ref_audio=VOICE)]
    warning = "CPUExecutionProvider computes this build because CUDAExecutionProvider could not be had"
    assert speaker.heard.count(warning) == 1 and not any("could not be had" in said for said in speaker.heard if said != warning)
    assert all(warning in speech.warnings for speech in speeches)


def test_a_fallback_of_some_parts_names_them():
    speaker = make_speaker(engine=Engine("CUDAExecutionProvider", 1, allow_fallback=True), audio_heads=ending(20))
    speaker.parts.load(*PARTS)
    speaker.parts["llm_decoder"].provider = "CUDAExecutionProvider"
    (said,) = speaker.parts.new_fallbacks()
    assert "audio_heads" in said and "llm_decoder" not in said and speaker.parts.new_fallbacks() == ()


def test_warnings_are_python_warnings_unless_told_otherwise():
    speaker = make_speaker(audio_heads=ending(20))
    quiet = Speaker("nowhere", MANIFEST, speaker.parts)
    quiet.tokenizer = speaker.tokenizer
    with pytest.warns(UserWarning, match="has no effect"):
        quiet.speak("Hello", ref_text="text")


CODEC_FAULTS = {
    "NaN": lambda sound: np.full_like(sound, np.nan),
    "one Inf": lambda sound: np.where(np.arange(sound.size) == 3, np.inf, sound),
    "zeros": np.zeros_like,
    "a constant": lambda sound: np.full_like(sound, 0.2),
    "a sample short": lambda sound: sound[..., :-1],
    "nothing": lambda sound: sound[..., :0],
}


@pytest.mark.parametrize("wave", CODEC_FAULTS.values(), ids=CODEC_FAULTS)
def test_a_codec_that_fails_is_an_error_and_not_a_file(wave):
    with pytest.raises(WorkError, match="audio_tokenizer") as error:
        make_speaker(audio_heads=ending(20), audio_tokenizer=codec_session(wave)).speak("Hello")
    assert error.value.code == 1


@pytest.mark.parametrize("provider, remedy", [("CPUExecutionProvider", "another seed.*--verify"), ("CUDAExecutionProvider", "--provider cpu")])
def test_what_to_do_about_silence_depends_on_where_it_was_made(provider, remedy):
    assert re.search(remedy, silence_remedy(provider)) and ("--provider" in silence_remedy(provider)) == (remedy == "--provider cpu")


@pytest.mark.parametrize("code", [-1, V - 2])
def test_an_encoder_that_gives_no_codes_is_an_error(code):
    with pytest.raises(WorkError, match="audio_encoder"):
        make_speaker(audio_encoder=encoder_session(code)).speak("Hello", ref_audio=VOICE)


@pytest.mark.parametrize("fault", [np.nan, 0.0])
def test_dead_logits_stop_the_take_with_the_name_of_the_part(fault):
    heads = heads_session(counting)
    heads.compute = lambda feeds: {"logits": np.full((1, 1, N, V), fault, np.float32)}
    with pytest.raises(WorkError, match="audio_heads on CPUExecutionProvider"):
        make_speaker(audio_heads=heads).speak("Hello")


def test_logits_of_another_shape_than_the_manifest_says_are_refused():
    heads = heads_session(counting)
    heads.compute = lambda feeds: {"logits": np.ones((1, 1, N + 1, V), np.float32)}
    with pytest.raises(UserError, match="audio_heads gives .4, 10. logits a row, the manifest says .3, 10."):
        make_speaker(audio_heads=heads).speak("Hello")


def test_a_file_of_another_kind_is_not_written_under_its_name(tmp_path):
    speech = make_speaker(audio_heads=ending(20)).speak("Hello")
    for save, name in ((speech.save, "x.doc"), (speech.save_codes, "x.wav")):
        with pytest.raises(UserError, match="must end in"):
            save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_dead_decoder_stops_before_the_first_row():
    with pytest.raises(WorkError, match="llm_decoder on CPUExecutionProvider returned only zeros.*--provider cpu"):
        make_speaker(llm_decoder=decoder_session(hidden=0.0)).speak("Hello")


def test_half_precision_parts_are_fed_in_half_precision():
    body, heads = decoder_session(), ending(20)
    for session in (body, heads):
        session.inputs = {k: "float16" if v == "float32" and "past" not in k else v for k, v in session.inputs.items()}
        whole = session.compute
        session.compute = lambda feeds, whole=whole: whole(
            {k: v.astype(np.float32) if v.dtype == np.float16 else v for k, v in feeds.items()}
        )
    assert make_speaker(llm_decoder=body, audio_heads=heads).speak("Hello").finish_reason == "eoc"


def test_saved_codes_are_what_was_used_and_made(tmp_path):
    speech = make_speaker(audio_heads=ending(20)).speak("Hello", ref_audio=VOICE)
    speech.save_codes(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as saved:
        assert set(saved) == {"prompt_ids", "rows", "codes", "reference_codes"}
        assert all(saved[name].dtype == np.int64 for name in saved)
        assert all((saved[name] == getattr(speech, name)).all() for name in saved)
    make_speaker(audio_heads=ending(20)).speak("Hello").save_codes(tmp_path / "b.npz")
    with np.load(tmp_path / "b.npz") as saved:
        assert set(saved) == {"prompt_ids", "rows", "codes"}
    assert len(list(tmp_path.iterdir())) == 2


def test_a_report_is_json_and_says_how_to_do_it_again():
    report = json.loads(json.dumps(make_speaker(audio_heads=ending(20)).speak("Hello", seed=5).report()))
    assert (report["text"], report["seed"], report["finish_reason"], report["frames"], report["rows"]) == (
        "Hello",
        5,
        "eoc",
        20,
        22,
    )
    assert report["sampling"]["top_k"] == MANIFEST.sampling.top_k
    assert report["health"]["frames_per_second"] > 0 and report["health"]["peak_rss_mb"] > 10
    timings = report["timings"]
    assert 0 <= timings["prefill"] <= timings["first_row"] <= timings["total"]


def test_threads_may_share_one_speaker():
    def heads_of_step():
        session = heads_session(counting)
        session.compute = lambda feeds: {"logits": noise[int(np.abs(feeds["hidden_states"].sum())) % 50][None, None]}
        return session

    noise = np.random.default_rng(1).normal(size=(50, N, V)).astype(np.float32)
    speaker = make_speaker(audio_heads=heads_of_step())
    alone = {seed: speaker.speak("Hello", seed=seed, max_frames=40).rows.tolist() for seed in range(6)}
    together = {}
    threads = [
        threading.Thread(
            target=lambda s=s: together.update({s: speaker.speak("Hello", seed=s, max_frames=40).rows.tolist()})
        )
        for s in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_loading_opens_no_part_and_refuses_another_family(tmp_path):
    MANIFEST.write(tmp_path)
    assert Speaker.load(tmp_path, provider="cuda").parts.engine.provider == "CUDAExecutionProvider"
    dataclasses.replace(MANIFEST, family="another").write(tmp_path)
    with pytest.raises(UserError, match="family is 'another'"):
        Speaker.load(tmp_path)


def test_no_number_of_the_real_model_stands_in_the_run_side():
    numbers = re.compile(r"\b(?:1025|1026|960|24_?000|2560|8208|1516\d\d|4096|2048|0\.8)\b")
    for path in Path(run.__file__).parent.glob("*.py"):
        found = {line for line in path.read_text(encoding="utf-8").splitlines() if numbers.search(line)}
        assert not {line for line in found if "0.8 of the band" not in line}, path
