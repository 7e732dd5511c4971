"""What the trained body says: sampled sentences through the real state machine, as stored and with int4 weights."""

import numpy as np
import torch

from _ref.higgs import Higgs, Prompt, apply_delay, build_prompt, filter_logits
from body import round_int4
from corpus import ZERO_SHOT_VOICE, make_example
from speech import VOICES
from text import write_sentence

TEMPERATURE, TOP_K, TOP_P = 0.8, 30, 0.8
MAX_ROWS = 300
SENTENCES = 30               # a third each: zero-shot, clone, clone with transcript
TEACHER_FORCED = 18


def stored(tensors):
    """As the checkpoint holds them: rounded to bf16, read as float32."""
    return {n: t.to(torch.bfloat16).float() for n, t in tensors.items()}


def int4(tensors):
    """The layers' matrices rounded to int4; embeddings and norms untouched."""
    return {n: round_int4(t) if n.startswith("body.layers") and t.dim() == 2 else t for n, t in tensors.items()}


def sampler(seed):
    generator = torch.Generator().manual_seed(seed)

    def choose(logits):
        kept = filter_logits(logits, TEMPERATURE, TOP_K, TOP_P).softmax(-1)
        return torch.multinomial(kept, 1, generator=generator)[:, 0]
    return choose


def sentence_prompt(corpus, rng, number):
    """-> Prompt, reference rows or None, codes that should be spoken [T, N]"""
    words = list(rng.choice(corpus.words, rng.integers(4, 7)))
    voice, rows, transcript = ZERO_SHOT_VOICE, None, None
    if number % 3:
        voice = VOICES[number // 3 % len(VOICES)].name
        ref_words = list(rng.choice(corpus.words, 3))
        codes = torch.cat([corpus.heard[voice, w][0] for w in ref_words])
        rows = apply_delay(codes, corpus.boc, corpus.eoc)
        transcript = write_sentence(ref_words, rng) if number % 3 == 2 else None
    prompt = build_prompt(corpus.encode, corpus.special, write_sentence(words, rng), transcript, 0 if rows is None else len(rows))
    return prompt, rows, torch.cat([corpus.spoken[voice, w] for w in words])


def sampled_speech(model, corpus, seed):
    """Shares of sentences that end by EOC and that say exactly the right codes."""
    rng, ended, exact = np.random.default_rng(seed + 1000), [], []
    for number in range(SENTENCES):
        prompt, rows, wanted = sentence_prompt(corpus, rng, number)
        said = model.generate(model.embed_prompt(prompt, rows), MAX_ROWS, sampler(number))
        ended.append(said.finish_reason == "eoc")
        exact.append(said.codes.shape == wanted.shape and bool((said.codes == wanted).float().mean() > 0.99))
    return {"ended_by_eoc": float(np.mean(ended)), "sentences_right": float(np.mean(exact)), "sentences": SENTENCES}


@torch.no_grad()
def agreement(model, rounded, corpus, seed):
    """Teacher-forced: cosine of hidden states and share of equal argmaxes, int4 against stored."""
    rng, cosines, equal = np.random.default_rng(seed + 2000), [], []
    for number in range(TEACHER_FORCED):
        example = make_example(corpus, rng, 5, ("zero-shot", "clone", "transcript")[number % 3], 3)
        start = example.ids.index(-100) if example.reference is not None else 0
        span = (start, start + len(example.reference)) if example.reference is not None else None
        prompt = Prompt(example.ids, span)
        a, b = (m.teacher_forced(m.embed_prompt(prompt, example.reference), example.rows) for m in (model, rounded))
        cosines.append(torch.cosine_similarity(a, b, dim=-1))
        equal.append((model.logits(a).argmax(-1) == rounded.logits(b).argmax(-1)).float().flatten())
    return {"cosine_mean": float(torch.cat(cosines).mean()), "cosine_min": float(torch.cat(cosines).min()),
            "top1_agreement": float(torch.cat(equal).mean())}


def check_speech(config, tensors, corpus, seed):
    """-> {"stored": ..., "int4": ..., "int4_against_stored": ...}"""
    model, rounded = Higgs(config, stored(tensors)), Higgs(config, int4(stored(tensors)))
    figures = {"stored": sampled_speech(model, corpus, seed), "int4": sampled_speech(rounded, corpus, seed),
               "int4_against_stored": agreement(model, rounded, corpus, seed)}
    for name, values in figures.items():
        print(f"{name}: " + ", ".join(f"{k} {v:.4g}" for k, v in values.items()))
    return figures
