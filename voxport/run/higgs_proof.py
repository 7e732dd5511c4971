"""The questions that the proof of a Higgs build answers, and what each of its parts is fed when a provider is diagnosed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from voxport.manifest import Manifest, Proof
from voxport.run.codec import DECODER, ENCODER
from voxport.run.delay import apply_delay
from voxport.run.proof import (
    BODY, CODEC_FRAMES, FULL, LONG_ROWS, NOISE_ROWS, QUICK, QUICK_FRAMES, Asking, Task, body_feeds, buzz, chunks, edge_clip, integers,
    noise, unit_vectors,
)  # fmt: skip
from voxport.run.text import build_prompt, load_tokenizer

VERSION = 2  # of the questions: a proof of another version cannot be replayed
TEXT_EMBED, AUDIO_EMBED, HEADS = "text_embed", "audio_embed", "audio_heads"
SENTENCE = "This build speaks."
REFERENCE_FRAMES = 2  # with the delay some nine rows: the prompt stays near 20 positions
TRIPS = 4  # waveforms of so many frames whose codes make one group
CODE_STRIDE = 101  # codebook k plays this many codes ahead of codebook k - 1, so that no frame holds one code eight times


def pose(folder: Path, manifest: Manifest) -> tuple[list[int], list[list[int]]]:
    """What a new build is asked with: ids [P] of a prompt with a reference, and its codes [R, N]."""
    audio = manifest.audio
    codes = integers("reference", audio.codebook_size, REFERENCE_FRAMES, audio.num_codebooks)
    rows = apply_delay(codes, audio)
    prompt = build_prompt(load_tokenizer(folder, manifest), manifest.tokens, SENTENCE, None, len(rows))
    return prompt.ids.tolist(), codes.tolist()


def entry_codes(num_codebooks: int, codebook_size: int) -> np.ndarray:
    """[codebook_size, N] codes in which every entry of every codebook is played once."""
    return (np.arange(codebook_size)[:, None] + CODE_STRIDE * np.arange(num_codebooks)) % codebook_size


class Replay(Asking):
    """Puts the proof's questions to the parts of a build. Each method yields the answer in groups of numbers."""

    manifest: Manifest

    def text_prompt(self) -> Iterator[np.ndarray]:
        yield self.embed_text(self._plain_ids)

    def text_table(self) -> Iterator[np.ndarray]:
        """Every row of the table."""
        for ids in chunks(np.arange(self.manifest.dims.text_vocab_size)):
            yield self.embed_text(ids)

    def audio_table(self) -> Iterator[np.ndarray]:
        """Every row of the table, twice: summed with rows of the same id, and with others, which round otherwise."""
        audio = self.manifest.audio
        same = np.repeat(np.arange(audio.vocab_size)[:, None], audio.num_codebooks, axis=1)
        for rows in (same, entry_codes(audio.num_codebooks, audio.vocab_size)):
            yield from map(self.embed_rows, chunks(rows))

    def prefill(self) -> Iterator[np.ndarray]:
        """Hidden states of the prompt, a group a position."""
        yield from self._prefilled[0][0]

    def step(self) -> Iterator[np.ndarray]:
        """One row after the cached prompt."""
        embeds = self.embed_rows(self.reference_rows[:1])[None]
        yield self.run_body(embeds, self._prefilled[1])[0]

    def long_pass(self) -> Iterator[np.ndarray]:
        """Hidden states of the prompt and rows after it, in one pass; a group is eight positions."""
        audio = self.manifest.audio
        rows = integers("long pass", audio.codebook_size, LONG_ROWS, audio.num_codebooks)
        embeds = np.concatenate([self.prompt_embeds[0], self.embed_rows(rows)])
        states = self.run_body(embeds[None])[0][0]
        yield from np.array_split(states, -(-len(states) // 8))

    def heads_noise(self) -> Iterator[np.ndarray]:
        """Logits of random hidden states: every weight counts in each."""
        hidden = noise("heads", 1, NOISE_ROWS, self.manifest.dims.hidden_size)
        yield from self.read_heads(hidden)

    def heads_weights(self) -> Iterator[np.ndarray]:
        """Logits of every unit vector: the weights themselves, none added to another."""
        yield from map(self.read_heads, unit_vectors(self.manifest.dims.hidden_size))

    def first_step(self) -> Iterator[np.ndarray]:
        """Logits of row 0 after the prompt, a group a codebook."""
        yield from self.read_heads(self._prefilled[0][:, -1:])[0]

    def sound(self) -> Iterator[np.ndarray]:
        """Waveform of a few random frames."""
        audio = self.manifest.audio
        yield self.decode(integers("sound", audio.codebook_size, QUICK_FRAMES, audio.num_codebooks))

    def sound_entries(self) -> Iterator[np.ndarray]:
        """Waveforms in which every codebook entry is played."""
        audio = self.manifest.audio
        yield from map(self.decode, chunks(entry_codes(audio.num_codebooks, audio.codebook_size), CODEC_FRAMES))

    def clip(self) -> Iterator[np.ndarray]:
        """Codes of a clip."""
        codec = self.manifest.codec
        yield self.encode(buzz("clip", codec.min_encode_samples, codec.sample_rate))

    def clip_edges(self) -> Iterator[np.ndarray]:
        """Codes of clips a hair apart between which a code changes: any shift of the encoder's decision moves one of them."""
        for pair, factors in enumerate(self.edges):
            for factor in factors:
                yield self.encode_mixed(pair, factor)

    def round_trip(self) -> Iterator[np.ndarray]:
        """Codes of the waveforms in which every codebook entry is played: they make the encoder choose many entries."""
        sounds = list(self.sound_entries())
        for i in range(0, len(sounds), TRIPS):
            yield np.concatenate([self.encode(sound) for sound in sounds[i : i + TRIPS]])

    def embed_text(self, ids: np.ndarray) -> np.ndarray:
        """[S] -> [S, D] as the table holds it."""
        return self.parts[TEXT_EMBED].run(input_ids=ids[None])[0]

    def embed_rows(self, rows: np.ndarray) -> np.ndarray:
        """[L, N] -> [L, D] float32."""
        return self.parts[AUDIO_EMBED].run(codes=rows[None])[0].astype(np.float32)

    def read_heads(self, hidden: np.ndarray) -> np.ndarray:
        """[1, L, D] -> [L, N, V]."""
        return self.parts[HEADS].run(hidden_states=hidden)[0]

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """[T, N] -> [samples]."""
        return self.parts[DECODER].run(codes=codes.T[None]).reshape(-1)

    def encode(self, samples: np.ndarray) -> np.ndarray:
        """[samples] -> [T, N]."""
        return self.parts[ENCODER].run(waveform=samples[None, None])[0].T

    def encode_mixed(self, pair: int, factor: float) -> np.ndarray:
        codec = self.manifest.codec
        return self.encode(edge_clip(pair, factor, codec.min_encode_samples, codec.sample_rate))

    @cached_property
    def reference_rows(self) -> np.ndarray:
        """[R + N - 1, N]."""
        return apply_delay(np.array(self.reference_codes, np.int64), self.manifest.audio)

    @cached_property
    def prompt_embeds(self) -> np.ndarray:
        """[1, P, D] float32."""
        embeds = self.embed_text(self._plain_ids).astype(np.float32)
        embeds[np.array(self.prompt_ids) == self.manifest.tokens.placeholder] = self.embed_rows(self.reference_rows)
        return embeds[None]

    @property
    def _plain_ids(self) -> np.ndarray:
        ids = np.array(self.prompt_ids, np.int64)
        return np.where(ids == self.manifest.tokens.placeholder, 0, ids)

    @cached_property
    def _prefilled(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """Hidden states and cache of the prompt."""
        return self.run_body(self.prompt_embeds)


EMBEDDINGS = (TEXT_EMBED, AUDIO_EMBED)
TASKS = (
    Task(TEXT_EMBED, "prompt", QUICK, Replay.text_prompt, exact=True),
    Task(TEXT_EMBED, "every row", FULL, Replay.text_table, exact=True),
    Task(AUDIO_EMBED, "every row", QUICK, Replay.audio_table),
    Task(BODY, "prompt", QUICK, Replay.prefill, EMBEDDINGS),
    Task(BODY, "cached step", QUICK, Replay.step, EMBEDDINGS),
    Task(BODY, "long pass", FULL, Replay.long_pass, EMBEDDINGS),
    Task(HEADS, "noise", QUICK, Replay.heads_noise),
    Task(HEADS, "first step", QUICK, Replay.first_step, (*EMBEDDINGS, BODY), tops=8),
    Task(HEADS, "every weight", FULL, Replay.heads_weights),
    Task(DECODER, "frames", QUICK, Replay.sound),
    Task(DECODER, "every entry", FULL, Replay.sound_entries),
    Task(ENCODER, "clip", QUICK, Replay.clip, codes=True),
    Task(ENCODER, "edges", FULL, Replay.clip_edges, codes=True),
    Task(ENCODER, "round trip", FULL, Replay.round_trip, (DECODER,), codes=True),
)

# Of the diagnosis: parts in the order in which one feeds the next; answers that must be equal; codes; many operators deep
ORDER = (TEXT_EMBED, AUDIO_EMBED, BODY, HEADS, DECODER, ENCODER)
EXACT, CODES, DEEP = (TEXT_EMBED,), (ENCODER,), (BODY, DECODER)


def make_feeds(part: str, manifest: Manifest, proof: Proof, answers: dict[str, dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Inputs of a part; embeddings and hidden states are what the CPU answered before."""
    audio, codec = manifest.audio, manifest.codec
    ids = np.array(proof.prompt_ids)
    is_reference = ids == manifest.tokens.placeholder
    if part == TEXT_EMBED:
        return {"input_ids": np.where(is_reference, 0, ids)[None]}
    if part == AUDIO_EMBED:
        return {"codes": apply_delay(np.array(proof.reference_codes), audio)[None]}
    if part == BODY:
        embeds = next(iter(answers[TEXT_EMBED].values())).astype(np.float32)
        embeds[0, is_reference] = next(iter(answers[AUDIO_EMBED].values()))[0]
        return body_feeds(embeds, manifest)
    if part == HEADS:
        return {"hidden_states": answers[BODY]["hidden_states"]}
    if part == DECODER:
        return {"codes": integers("sound", audio.codebook_size, QUICK_FRAMES, audio.num_codebooks).T[None]}
    return {"waveform": buzz("clip", codec.min_encode_samples, codec.sample_rate)[None, None]}
