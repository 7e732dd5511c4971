"""Training material of the demo's body: prompts and delayed rows of random sentences, as the real model sees them.

Shapes: N codebooks, T frames, L = T + N - 1 rows, P prompt positions, B batch, S positions (P + L - 1, padded).
"""

from dataclasses import dataclass

import numpy as np
import soxr
import torch

from _ref.higgs import SPECIALS, apply_delay, build_prompt
from speech import HOP, SAMPLE_RATE, VOICES
from text import tokenizer_config, write_sentence

ZERO_SHOT_VOICE = VOICES[0].name
SENTENCE_LENGTHS = {1: 0.06, 2: 0.08, 3: 0.12, 4: 0.22, 5: 0.26, 6: 0.26}      # words: share
REPEAT_SHARE = 0.15          # sentences in which a word may come twice
REFERENCE_LENGTHS = {1: 0.3, 2: 0.3, 3: 0.25, 4: 0.15}
HARD_WEIGHT = 20.0           # of codebook 0 where a word starts and where speech ends: the only rows that need the text
NOISY_CODES = 0.15           # share of reference codes replaced by random ones, at most
TAG_SHARE = 0.05             # sentences that begin with a control tag, which this model ignores
TAG_KINDS = ("emotion", "style", "prosody")


@dataclass
class Corpus:
    """Codes of every word as spoken, several encodings of it as heard in a reference, and the tokenizer."""
    words: list
    spoken: dict          # (voice, word) -> [F, N] int64
    heard: dict           # (voice, word) -> list of [F, N] int64
    tokenizer: object
    boc: int
    eoc: int

    def __post_init__(self):
        self.special = {name: self.tokenizer.token_to_id(name) for name in SPECIALS}
        names = tokenizer_config()["extra_special_tokens"]
        forms = [space + form for w in self.words for space in ("", " ") for form in (w, w.capitalize())]
        self.word_tokens = {self.encode(form)[0] for form in forms}
        self.tags = [n for n in names if n[2:].split(":")[0] in TAG_KINDS and "pause" not in n]

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids


@dataclass
class Example:
    """ids [P] (-100 at reference rows), reference [R, N] or None, rows [L, N], loss weights [L, N].

    For the guides of the training, as numbers of words: the word before each word of the text [P], and at each row the word
    that is being spoken and the one that starts next [L]. The number after the last word means none, -100 not asked.
    """
    ids: list
    reference: torch.Tensor | None
    rows: torch.Tensor
    weights: torch.Tensor
    before: torch.Tensor
    spoken: torch.Tensor
    upcoming: torch.Tensor


def draw(rng, shares):
    return rng.choice(list(shares), p=list(shares.values()))


def disturb(clip, rng, kind):
    """What may happen to a reference clip on its way: level, noise, rounding, shift, another sampling rate. [n] -> [n]"""
    if kind == "level":
        return clip * rng.uniform(0.5, 1.5)
    if kind == "noise":
        return clip + rng.normal(0, 10 ** rng.uniform(-4, -2.3), len(clip)).astype(np.float32)
    if kind == "pcm":
        return np.round(clip * 32767) / 32767
    if kind == "resampled":
        rate = rng.choice([16000, 22050, 44100, 48000])
        back = soxr.resample(soxr.resample(clip, SAMPLE_RATE, rate), rate, SAMPLE_RATE)
        return np.pad(back, (0, max(0, len(clip) - len(back))))[:len(clip)]
    return np.roll(clip, rng.integers(1, HOP)) if kind == "shifted" else clip


KINDS = ("clean", "pcm", "resampled", "level", "noise", "shifted", "shifted", "shifted")


def heard_codes(codec, clips, rng):
    """Encode every word as the codec hears it, clean and disturbed. -> {key: list of [F, N]}"""
    heard = {}
    with torch.no_grad():
        for key, clip in clips.items():
            batch = np.stack([disturb(clip, rng, kind) for kind in KINDS]).astype(np.float32)
            heard[key] = list(codec.encode(torch.from_numpy(batch)[:, None]).transpose(1, 2))
    return heard


def reference(corpus, voice, words, rng):
    """Rows of a reference clip: one kind of disturbance throughout, some codes replaced. -> codes [R, N]"""
    kind = rng.integers(len(KINDS))
    codes = torch.cat([corpus.heard[voice, w][kind] for w in words])
    start = rng.integers(0, min(8, len(codes) - 8)) if rng.random() < 0.3 else 0
    codes = codes[start:].clone()
    if rng.random() < 0.2:
        codes = torch.cat([codes, torch.zeros(rng.integers(1, 12), codes.shape[1], dtype=codes.dtype)])
    if rng.random() < 0.5:
        wrong = torch.from_numpy(rng.random(codes.shape)) < rng.uniform(0, NOISY_CODES)
        codes = torch.where(wrong, torch.from_numpy(rng.integers(0, corpus.boc, codes.shape)), codes)
    return codes


def loss_weights(starts, rows):
    """HARD_WEIGHT where codebook 0 starts a word or ends the sentence, 1 elsewhere, 0 where BOC is forced. -> [L, N]"""
    weights = torch.ones(rows.shape)
    weights[starts, 0] = HARD_WEIGHT
    early = torch.arange(rows.shape[0])[:, None] < torch.arange(rows.shape[1])
    return weights.masked_fill(early, 0.0)


def word_rows(starts, numbers, none, length):
    """At each row the word that the row before it belongs to, and the word that starts there or next. -> [L], [L]"""
    place = np.searchsorted(starts, np.arange(length)).clip(max=len(numbers))
    padded = np.array([none, *numbers, none])
    return torch.from_numpy(padded[place]), torch.from_numpy(padded[place + 1])


def words_before(ids, corpus, numbers):
    """At the text's words the number of the word before, -100 elsewhere. -> [P]"""
    labels, previous = torch.full((len(ids),), -100), len(corpus.words)
    places = [i for i in range(ids.index(corpus.special["<|text|>"]), len(ids)) if ids[i] in corpus.word_tokens]
    for place, number in zip(places, numbers, strict=True):
        labels[place], previous = previous, number
    return labels


def make_example(corpus, rng, count, mode, ref_count):
    """One sentence of `count` words; mode is zero-shot, clone or transcript. -> Example"""
    numbers = [int(n) for n in rng.choice(len(corpus.words), count, replace=rng.random() < REPEAT_SHARE)]
    words = [corpus.words[n] for n in numbers]
    text = write_sentence(words, rng)
    if rng.random() < TAG_SHARE:
        text = rng.choice(corpus.tags) + text
    voice, ref, ref_text = ZERO_SHOT_VOICE, None, None
    if mode != "zero-shot":
        voice = rng.choice([v.name for v in VOICES])
        ref_words = list(rng.choice(corpus.words, ref_count))
        ref = apply_delay(reference(corpus, voice, ref_words, rng), corpus.boc, corpus.eoc)
        ref_text = write_sentence(ref_words, rng) if mode == "transcript" else None
    prompt = build_prompt(corpus.encode, corpus.special, text, ref_text, 0 if ref is None else len(ref))
    spoken = [corpus.spoken[voice, w] for w in words]
    rows = apply_delay(torch.cat(spoken), corpus.boc, corpus.eoc)
    starts = np.cumsum([0, *(len(c) for c in spoken)])
    return Example(prompt.ids, ref, rows, loss_weights(starts, rows), words_before(prompt.ids, corpus, numbers),
                   *word_rows(starts, numbers, len(corpus.words), len(rows)))


def make_batch(corpus, rng, size):
    """Examples of like length, so that little is padded. -> list of Example"""
    mode = rng.choice(["zero-shot", "clone", "transcript"], p=[0.3, 0.45, 0.25])
    count, ref_count = draw(rng, SENTENCE_LENGTHS), draw(rng, REFERENCE_LENGTHS)
    return [make_example(corpus, rng, count, mode, ref_count) for _ in range(size)]
