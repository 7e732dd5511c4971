"""The questions that the proof of an OmniFish build answers, and what each of its parts is fed when a provider is diagnosed.

No answer is fed to a choice of codes: rounding that flips one would change all that follow. Each part is given random input, or
what the part before it computed.

Shapes: S positions, P reference frames, D hidden, N codebooks, L layers, H key heads, d head size, j level.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from voxport.manifest import Proof
from voxport.manifest_omnifish import (
    AUDIO_EMBED,
    BODY,
    CODEC_DECODER,
    CODEC_ENCODER,
    MTP_LAYERS,
    MTP_PRIME,
    MTP_STEP,
    SEMANTIC_HEAD,
    TEXT_EMBED,
    OmniFishManifest,
)
from voxport.run.omnifish_residual import run_all
from voxport.run.omnifish_text import context_text, encode_prompt, style_text
from voxport.run.proof import (
    FULL, LONG_ROWS, NOISE_ROWS, QUICK, QUICK_FRAMES, Asking, Task, body_feeds, buzz, chunks, edge_clip, integers,
    noise, unit_vectors,
)  # fmt: skip
from voxport.run.text import encode, load_tokenizer

VERSION = 2  # of the questions: a proof of another version cannot be replayed
SENTENCE = "This build speaks."
REFERENCE_FRAMES = 4
LANG_START = "<|lang_start|>"
QUICK_NAMES = 16  # speakers and recordings that the quick task names; there may be thousands
PAST_FRAMES, PROMPT_TOKENS = 5, 30  # kept before what the residual decoder is asked
CLIP_FRAMES = 2  # of clips that are encoded: the search for edges encodes a hundred
ENTRY_FRAMES = 1024  # played by the full task: every residual entry, one semantic entry in four. All of them are 190 s of sound
ENTRY_STRIDE = 101  # codebook k plays this many codes ahead of codebook k - 1
LONG_CLIP_FRAMES = 48
CODEC_FRAMES = 16  # that the full task decodes at once: at full size 14 MB of memory each

Feeds = dict[str, np.ndarray]


def pose(folder: Path, manifest: OmniFishManifest) -> tuple[list[int], list[list[int]]]:
    """What a new build is asked with: ids [S] of a text in each language, and codes [P, N] of a reference."""
    tokenizer = load_tokenizer(folder, manifest)
    text = "".join(style_text(language, None) for language in (None, *manifest.prompt.languages)) + context_text(SENTENCE)
    ids = encode_prompt(lambda piece: encode(tokenizer, piece), text, manifest.prompt.names, manifest.dims.text_vocab_size)
    return ids, random_codes("reference", manifest, REFERENCE_FRAMES).T.tolist()


def random_codes(name: str, manifest: OmniFishManifest, frames: int) -> np.ndarray:
    """codes [N, frames] of real speech frames."""
    return np.stack([integers(f"{name} {i}", size, frames) for i, size in enumerate(manifest.codebooks.sizes)])


def entry_codes(sizes: list[int]) -> np.ndarray:
    """codes [N, ENTRY_FRAMES] in which every entry of the residual codebooks is played, and a share of the semantic ones."""
    frames = np.arange(ENTRY_FRAMES)
    return np.stack([(frames * max(1, size // ENTRY_FRAMES) + ENTRY_STRIDE * i) % size for i, size in enumerate(sizes)])


class Replay(Asking):
    """Puts the proof's questions to the parts of a build. Each method yields the answer in groups of numbers."""

    manifest: OmniFishManifest

    def text_prompt(self) -> Iterator[np.ndarray]:
        """Text in which every language is named."""
        yield self.embed_text(np.array(self.prompt_ids))

    def text_names(self) -> Iterator[np.ndarray]:
        """The first names and the last one."""
        names = np.arange(len(self.manifest.prompt.names))
        if len(names):
            yield self.embed_text(self.manifest.dims.text_vocab_size + np.unique([*names[:QUICK_NAMES], names[-1]]))

    def text_table(self) -> Iterator[np.ndarray]:
        """Every row of the table. The id behind `LANG_START` would be read as a language, so that one comes last."""
        ids, first = np.arange(self.manifest.dims.text_vocab_size), self.manifest.structural_tokens[LANG_START]
        yield from map(self.embed_text, chunks(np.concatenate([ids[ids != first], [first]])))

    def all_names(self) -> Iterator[np.ndarray]:
        """Every row of the tables of names."""
        yield from map(self.embed_text, chunks(self.manifest.dims.text_vocab_size + np.arange(len(self.manifest.prompt.names))))

    def audio_table(self) -> Iterator[np.ndarray]:
        """Every row of the table, twice: summed with rows of the same id, and with others, which round otherwise."""
        books = self.manifest.codebooks
        ids, strides = np.arange(books.vocab_size)[:, None], ENTRY_STRIDE * np.arange(len(books.sizes))
        for rows in (ids + 0 * strides, (ids + strides) % books.vocab_size):
            for part in chunks(rows):
                yield self.embed_audio(part.T)

    def prefill(self) -> Iterator[np.ndarray]:
        """States of text and reference, a group a position."""
        yield from self._prefilled[0][0]

    def block(self) -> Iterator[np.ndarray]:
        """States of a block of unknown frames behind the cached prompt."""
        yield from self._block[0]

    def long_pass(self) -> Iterator[np.ndarray]:
        """States of the prompt and of frames behind it, in one pass; a group is eight positions."""
        codes = random_codes("long pass", self.manifest, LONG_ROWS)
        states = self.run_body(np.concatenate([self.prompt_embeds, self.embed_audio(codes)[None]], axis=1))[0][0]
        yield from np.array_split(states, -(-len(states) // 8))

    def head_noise(self) -> Iterator[np.ndarray]:
        """Logits of random states: every weight counts in each."""
        yield from self.read_head(noise("heads", 1, NOISE_ROWS, self.manifest.dims.hidden_size))

    def head_weights(self) -> Iterator[np.ndarray]:
        """Logits of every unit vector: the weights themselves."""
        yield from map(self.read_head, unit_vectors(self.manifest.dims.hidden_size))

    def first_round(self) -> Iterator[np.ndarray]:
        """Logits of the unknown block, a group a frame."""
        yield from self.read_head(self._block)

    def prime(self) -> Iterator[np.ndarray]:
        """All that the residual decoder keeps of a reference."""
        yield from self.ask(MTP_PRIME, prime_feeds(self.manifest))

    def levels(self) -> Iterator[np.ndarray]:
        """Logits of all heads, keys and values of a few frames at every level."""
        for level in range(len(self.manifest.codebooks.sizes) - 1):
            yield from self.ask(MTP_STEP, step_feeds(self.manifest, level, self._codes(level, QUICK_FRAMES)))

    def level_codes(self) -> Iterator[np.ndarray]:
        """Logits of the next level after every code of every level."""
        for level, size in enumerate(self.manifest.codebooks.sizes[:-1]):
            for codes in chunks(np.arange(size)):
                yield self.ask(MTP_STEP, step_feeds(self.manifest, level, codes))[0][:, :, level]

    def link(self, k: int) -> Iterator[np.ndarray]:
        """State, logits, keys and values of a few frames, some of whose codes are known."""
        yield from self.ask(MTP_LAYERS[k], link_feeds(self.manifest, k, self._codes(k, QUICK_FRAMES)))

    def link_codes(self, k: int) -> Iterator[np.ndarray]:
        """States and logits after every code."""
        for codes in chunks(np.arange(self.manifest.codebooks.sizes[k])):
            yield from self.ask(MTP_LAYERS[k], link_feeds(self.manifest, k, codes))[:2]

    def sound(self) -> Iterator[np.ndarray]:
        """Waveforms of random frames, the second of them after the first: what is carried over counts."""
        feeds = decoder_feeds(self.manifest)
        for _ in range(2):
            waveform, *kept = self.ask(CODEC_DECODER, feeds)
            yield waveform
            feeds |= {"position": feeds["position"] + QUICK_FRAMES} | dict(zip([name for name in feeds if name.startswith("tail")], kept))

    def sound_entries(self) -> Iterator[np.ndarray]:
        """Waveforms in which codebook entries are played, see `ENTRY_FRAMES`."""
        for codes in chunks(entry_codes(self.manifest.codebooks.sizes).T, CODEC_FRAMES):
            yield self.ask(CODEC_DECODER, decoder_feeds(self.manifest, codes.T))[0]

    def clip(self) -> Iterator[np.ndarray]:
        """Codes of a clip."""
        yield self.encode(buzz("clip", self._clip_samples, self.manifest.codec.sample_rate))

    def clip_edges(self) -> Iterator[np.ndarray]:
        """Codes of clips a hair apart between which a code changes: any shift of the encoder's decision moves one of them."""
        for pair, factors in enumerate(self.edges):
            for factor in factors:
                yield self.encode_mixed(pair, factor)

    def long_clip(self) -> Iterator[np.ndarray]:
        """Codes of a longer clip that grows and dies away: it makes the encoder choose many entries."""
        samples = LONG_CLIP_FRAMES * self.manifest.codec.hop_length
        swell = 1 - np.abs(np.linspace(-1, 1, samples, dtype=np.float32))
        yield self.encode(swell * buzz("long clip", samples, self.manifest.codec.sample_rate))

    def embed_text(self, ids: np.ndarray) -> np.ndarray:
        """[S] -> [S, D]."""
        return self.parts[TEXT_EMBED].run(input_ids=ids[None])[0]

    def embed_audio(self, codes: np.ndarray) -> np.ndarray:
        """[N, T] -> [T, D] float32."""
        return self.parts[AUDIO_EMBED].run(codes=codes[None])[0].astype(np.float32)

    def read_head(self, hidden: np.ndarray) -> np.ndarray:
        """[1, S, D] -> [S, V]."""
        return self.parts[SEMANTIC_HEAD].run(hidden_states=hidden)[0]

    def ask(self, part: str, feeds: Feeds) -> list[np.ndarray]:
        """All outputs of a part."""
        return run_all(self.parts[part], **feeds)

    def encode(self, samples: np.ndarray) -> np.ndarray:
        """[samples] -> [T, N]."""
        return self.parts[CODEC_ENCODER].run(waveform=samples[None, None])[0].T

    def encode_mixed(self, pair: int, factor: float) -> np.ndarray:
        return self.encode(edge_clip(pair, factor, self._clip_samples, self.manifest.codec.sample_rate))

    def _codes(self, level: int, frames: int) -> np.ndarray:
        return integers(f"residual {level}", self.manifest.codebooks.sizes[level], frames)

    @property
    def _clip_samples(self) -> int:
        return CLIP_FRAMES * self.manifest.codec.hop_length

    @cached_property
    def prompt_embeds(self) -> np.ndarray:
        """[1, S + P, D] float32."""
        codes = np.array(self.reference_codes, np.int64).T
        return np.concatenate([next(self.text_prompt()).astype(np.float32), self.embed_audio(codes)])[None]

    @cached_property
    def _prefilled(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """States and cache of the prompt."""
        return self.run_body(self.prompt_embeds)

    @cached_property
    def _block(self) -> np.ndarray:
        """States [1, B, D] of a block of unknown frames."""
        books, size = self.manifest.codebooks, self.manifest.generation.block_size
        unknown = np.full((len(books.sizes), size), books.mask_id, np.int64)
        return self.run_body(self.embed_audio(unknown)[None], self._prefilled[1])[0]


def prime_feeds(manifest: OmniFishManifest) -> Feeds:
    """A random reference."""
    return {"h": noise("prime", 1, QUICK_FRAMES, manifest.dims.hidden_size), "codes": random_codes("prime", manifest, QUICK_FRAMES)[None]}


def step_feeds(manifest: OmniFishManifest, level: int, codes: np.ndarray) -> Feeds:
    """Frames [S] of one level behind random keys and values."""
    config, frames = manifest.residual, len(codes)
    layers, heads, d = config.num_layers, config.num_kv_heads, config.head_dim
    feeds = {"h": noise("step", 1, frames, manifest.dims.hidden_size), "code": codes[None], "level": np.array(level)}
    feeds |= {"position": np.arange(PAST_FRAMES, PAST_FRAMES + frames)[None]}
    feeds |= {f"lvl_{x}": noise(f"lvl {x} {level}", layers, frames, heads, level, d) for x in "kv"}
    feeds |= {f"frm_{x}": noise(f"frm {x} {level}", layers, heads, PAST_FRAMES, d) for x in "kv"}
    if config.prompt_cross:
        feeds |= {f"px_{x}": noise(f"px {x}", layers, heads, PROMPT_TOKENS, d) for x in "kv"}
    return feeds


def link_feeds(manifest: OmniFishManifest, k: int, codes: np.ndarray) -> Feeds:
    """Frames [S] of one link behind random keys and values; every other one shows the code that is asked for."""
    config, frames, wanted = manifest.residual, len(codes), manifest.codebooks.sizes[k + 1]
    shape = (config.num_layers, config.num_kv_heads, PAST_FRAMES, config.head_dim)
    revealed = np.where(np.arange(frames) % 2, (codes + ENTRY_STRIDE) % wanted, wanted)
    feeds = {"h": noise(f"link {k}", 1, frames, config.size if k else manifest.dims.hidden_size), "code": codes[None]}
    feeds |= {"revealed": revealed[None], "position": np.arange(PAST_FRAMES, PAST_FRAMES + frames)[None]}
    return feeds | {f"past_{x}": noise(f"link {k} {x}", *shape) for x in "kv"}


def decoder_feeds(manifest: OmniFishManifest, codes: np.ndarray | None = None) -> Feeds:
    """Frames [N, T], random unless given, with nothing before them."""
    codes = random_codes("sound", manifest, QUICK_FRAMES) if codes is None else codes
    lengths = lambda shape: [size if isinstance(size, int) else 0 for size in shape]
    tails = {spec.name: np.zeros(lengths(spec.shape), spec.dtype) for spec in manifest.part(CODEC_DECODER).inputs[2:]}
    return {"codes": codes[None], "position": np.array(0)} | tails


EMBEDDINGS = (TEXT_EMBED, AUDIO_EMBED)
TASKS = (
    Task(TEXT_EMBED, "prompt", QUICK, Replay.text_prompt),
    Task(TEXT_EMBED, "names", QUICK, Replay.text_names),
    Task(TEXT_EMBED, "every row", FULL, Replay.text_table, exact=True),
    Task(TEXT_EMBED, "every name", FULL, Replay.all_names),
    Task(AUDIO_EMBED, "every row", QUICK, Replay.audio_table),
    Task(BODY, "prompt", QUICK, Replay.prefill, EMBEDDINGS),
    Task(BODY, "cached block", QUICK, Replay.block, EMBEDDINGS),
    Task(BODY, "long pass", FULL, Replay.long_pass, EMBEDDINGS),
    Task(SEMANTIC_HEAD, "noise", QUICK, Replay.head_noise),
    Task(SEMANTIC_HEAD, "first round", QUICK, Replay.first_round, (*EMBEDDINGS, BODY), tops=8),
    Task(SEMANTIC_HEAD, "every weight", FULL, Replay.head_weights),
    Task(MTP_PRIME, "noise", QUICK, Replay.prime),
    Task(MTP_STEP, "levels", QUICK, Replay.levels),
    Task(MTP_STEP, "every code", FULL, Replay.level_codes),
    *(Task(name, "noise", QUICK, partial(Replay.link, k=k)) for k, name in enumerate(MTP_LAYERS)),
    *(Task(name, "every code", FULL, partial(Replay.link_codes, k=k)) for k, name in enumerate(MTP_LAYERS)),
    Task(CODEC_DECODER, "frames", QUICK, Replay.sound),
    Task(CODEC_DECODER, "entries", FULL, Replay.sound_entries),
    Task(CODEC_ENCODER, "clip", QUICK, Replay.clip, codes=True),
    Task(CODEC_ENCODER, "edges", FULL, Replay.clip_edges, codes=True),
    Task(CODEC_ENCODER, "long clip", FULL, Replay.long_clip, codes=True),
)

# Of the diagnosis: parts in the order in which one feeds the next; answers that must be equal; codes; many operators deep
ORDER = (*EMBEDDINGS, BODY, SEMANTIC_HEAD, MTP_PRIME, MTP_STEP, *MTP_LAYERS, CODEC_DECODER, CODEC_ENCODER)
EXACT, CODES, DEEP = (), (CODEC_ENCODER,), (BODY, MTP_PRIME, MTP_STEP, *MTP_LAYERS, CODEC_DECODER)


def make_feeds(part: str, manifest: OmniFishManifest, proof: Proof, answers: dict[str, Feeds]) -> Feeds:
    """Inputs of a part; embeddings and hidden states are what the CPU answered before."""
    first = lambda name: next(iter(answers[name].values())).astype(np.float32)
    codes = lambda level: integers(f"residual {level}", manifest.codebooks.sizes[level], QUICK_FRAMES)
    if part == TEXT_EMBED:
        return {"input_ids": np.array(proof.prompt_ids)[None]}
    if part == AUDIO_EMBED:
        return {"codes": np.array(proof.reference_codes, np.int64).T[None]}
    if part == BODY:
        return body_feeds(np.concatenate([first(TEXT_EMBED), first(AUDIO_EMBED)], axis=1), manifest)
    if part == SEMANTIC_HEAD:
        return {"hidden_states": answers[BODY]["hidden_states"]}
    if part == MTP_PRIME:
        return prime_feeds(manifest)
    if part == MTP_STEP:
        return step_feeds(manifest, 1, codes(1))
    if part in MTP_LAYERS:
        return link_feeds(manifest, MTP_LAYERS.index(part), codes(MTP_LAYERS.index(part)))
    if part == CODEC_DECODER:
        return decoder_feeds(manifest)
    return {"waveform": buzz("clip", CLIP_FRAMES * manifest.codec.hop_length, manifest.codec.sample_rate)[None, None]}
