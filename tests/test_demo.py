"""The demo: a checkpoint in the published layout, small enough to commit, that speaks its vocabulary through the normal scripts."""

import json

import numpy as np
import pytest
import soundfile as sf
from conftest import DEMO, ROOT, TINY, run_cli

from voxport.build.checkpoint import Checkpoint
from voxport.judge.finding import PASS
from voxport.judge.levels import Bench, judge_all
from voxport.judge.reference import Original
from voxport.run.higgs import Speaker
from voxport.run.proof import verify_build

LARGEST = 24_000_000  # bytes that the demo may take in the repository
VOICES = sorted((ROOT / "demo" / "voices").glob("*.wav"))
WORDS = (ROOT / "demo" / "words.txt").read_text(encoding="utf-8").split()
TEXTS = (DEMO / "eval_texts.txt").read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def speaker(demo_build) -> Speaker:
    return Speaker.load(demo_build)


def sentence(seed: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, 5, replace=False))


def test_it_is_small_and_has_the_vocabulary_and_voices_it_promises():
    size = sum(path.stat().st_size for path in (ROOT / "demo").rglob("*") if path.is_file())
    assert size <= LARGEST
    assert len(set(WORDS)) >= 60 and len(VOICES) >= 2
    assert all(path.with_suffix(".txt").is_file() for path in VOICES)


def test_its_config_has_every_key_of_the_published_one():
    def keys(value, prefix=""):
        return {prefix + k for k in value} | {k2 for k, v in value.items() if isinstance(v, dict) for k2 in keys(v, f"{prefix}{k}.")}

    ours, published = (json.loads((folder / "config.json").read_text(encoding="utf-8")) for folder in (DEMO, TINY))
    assert keys(ours) == keys(published)
    assert (DEMO / "model.safetensors.index.json").is_file() and len(list(DEMO.glob("*.safetensors"))) >= 2


def test_the_int4_build_is_the_original_at_every_level(speaker):
    bench = Bench(speaker, Original(Checkpoint.open(DEMO), True))
    findings = judge_all(bench, [{"text": text} for text in TEXTS[:2]], 60).findings
    assert [f for f in findings if f.verdict != PASS] == []
    figures = {(f.level, f.part): f.figures for f in findings}
    assert figures["teacher-forced", "llm_decoder"]["cosine"] >= 0.99
    assert figures["teacher-forced", "llm_decoder + audio_heads"]["top1"] >= 0.97
    assert figures["parts", "audio_heads"]["top1"] >= 0.999


@pytest.mark.parametrize("seed", range(4))
def test_a_sentence_of_its_words_ends_by_itself_and_has_a_word_s_length_each(speaker, seed):
    speech = speaker.speak(sentence(seed), seed=seed)
    assert speech.finish_reason == "eoc"
    assert 5 * 0.3 < speech.seconds < 5 * 1.2
    assert np.abs(speech.samples).max() > 0.05


@pytest.mark.parametrize("voice", VOICES, ids=lambda path: path.stem)
def test_a_clone_speaks_the_codes_of_its_own_voice(speaker, voice):
    """The demo's words have fixed codes in each voice, so the words of the reference itself come back as they were recorded.

    Not all: the reference was rounded to 16 bits, which moves about a tenth of its codes to a neighbour.
    """
    text = voice.with_suffix(".txt").read_text(encoding="utf-8").strip()
    other = next(path for path in VOICES if path != voice)
    own, foreign = (speaker.speak(text, seed=0, ref_audio=path) for path in (voice, other))
    assert own.finish_reason == "eoc"
    assert code_share(own.codes, own.reference_codes) > 0.8
    assert code_share(foreign.codes, own.reference_codes) < 0.2


def code_share(a: np.ndarray, b: np.ndarray) -> float:
    """Share of equal codes of codebook 0 over the frames that both have, silence apart."""
    length = min(len(a), len(b))
    sounding = (a[:length, 0] != 0) | (b[:length, 0] != 0)
    return float((a[:length, 0] == b[:length, 0])[sounding].mean())


def test_the_build_proves_itself(demo_build, speaker):
    states = {verdict.state for verdict in verify_build(demo_build, speaker.manifest, None, None, False)}
    assert states == {"ok"}


def test_the_scripts_speak_and_clone_it(demo_build, tmp_path):
    voice = VOICES[0]
    flags = ("--model-path", demo_build, "--text", sentence(9), "--seed", 1)
    clone = ("--ref-audio", voice, "--ref-text", voice.with_suffix(".txt").read_text(encoding="utf-8").strip())
    for name, extra in (("plain.wav", ()), ("clone.wav", clone)):
        result = run_cli("inference.py", *flags, "--out", tmp_path / name, *extra)
        assert result.returncode == 0, result.stderr
        samples, rate = sf.read(tmp_path / name)
        assert rate == 24_000 and len(samples) > rate and np.abs(samples).max() > 0.05
