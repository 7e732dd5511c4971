"""Higgs Audio v3 in plain PyTorch: prompt -> rows -> codes, one step at a time, in float32.

A Qwen3 body reads text embeddings and *fused* audio embeddings (the sum of eight lookups) and predicts one row of N codes at
a time. Codebook c is delayed by c rows; BOC (V-2) and EOC (V-1) fill the corners.

This is the oracle: the sampler is the scalar state machine, the body recomputes nothing cleverly, and weights are looked up by
their checkpoint names in any mapping, so that a model may be held in memory or read layer by layer.

Shapes: S sequence, P prompt, D hidden, N codebooks, V ids a codebook, T frames, L rows (L = T + N - 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from _ref.qwen3 import ROPE_THETA as ROPE_THETA  # re-exported
from _ref.qwen3 import feed_forward, layer_shapes, rms_norm, rope_table, rope_theta, rotate

TEXT_EMBEDDING = "tied.embedding.text_embedding.weight"
AUDIO_EMBEDDING = "tied.embedding.modality_embeddings.0.embedding.weight"
AUDIO_HEAD = "tied.head.modality_heads.0.weight"
TEXT_HEAD = "tied.head.text_head.weight"
CODEC_PREFIX = "tied.embedding.modality_embeddings.0.model."
FINAL_NORM = "body.norm.weight"
LAYER = "body.layers.{}."

# Checkpoint prefix -> prefix of a plain Qwen3 checkpoint.
QWEN3_PREFIXES = {
    "tied.embedding.text_embedding.": "model.embed_tokens.",
    "body.layers.": "model.layers.",
    "body.norm.": "model.norm.",
    "tied.head.text_head.": "lm_head.",
}

PLACEHOLDER = -100  # prompt positions that a reference row will fill
SPECIALS = ("<|tts|>", "<|text|>", "<|audio|>", "<|ref_audio|>", "<|ref_text|>")
STOP_CODE = -1
GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class HiggsConfig:
    """The fields of config.json that change the arithmetic."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    text_vocab_size: int
    max_position_embeddings: int
    num_codebooks: int
    audio_vocab_size: int
    tied_audio_head: bool

    @classmethod
    def from_dict(cls, config: Mapping) -> HiggsConfig:
        """Read config.json. KeyError names an absent key; ValueError and NotImplementedError an unsupported value."""
        text, audio = config["text_config"], config["audio_encoder_config"]
        if audio["encoder_type"] != "discrete":
            raise NotImplementedError(f"audio_encoder_config.encoder_type is {audio['encoder_type']!r}, not 'discrete'")
        if text["model_type"] != "qwen3":
            raise ValueError(f"text_config.model_type is {text['model_type']!r}, not 'qwen3'")
        if not audio.get("use_delay_pattern", True):
            raise ValueError("audio_encoder_config.use_delay_pattern is false: rows would not be delayed")
        if audio.get("out_dim", text["hidden_size"]) != text["hidden_size"]:
            raise ValueError(f"audio_encoder_config.out_dim is {audio['out_dim']}, hidden_size is {text['hidden_size']}")
        return cls(
            hidden_size=text["hidden_size"],
            intermediate_size=text["intermediate_size"],
            num_layers=text["num_hidden_layers"],
            num_heads=text["num_attention_heads"],
            num_kv_heads=text["num_key_value_heads"],
            head_dim=text["head_dim"],
            rms_norm_eps=text["rms_norm_eps"],
            rope_theta=rope_theta(text),
            text_vocab_size=text["vocab_size"],
            max_position_embeddings=text["max_position_embeddings"],
            num_codebooks=audio["num_codebooks"],
            audio_vocab_size=audio["vocab_size"],
            tied_audio_head=audio.get("tie_word_embeddings", True),
        )

    @property
    def boc_id(self) -> int:
        return self.audio_vocab_size - 2

    @property
    def eoc_id(self) -> int:
        return self.audio_vocab_size - 1

    @property
    def codebook_size(self) -> int:
        """Real codes of a codebook: all ids but BOC and EOC."""
        return self.audio_vocab_size - 2


def body_shapes(config: HiggsConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that speaking needs apart from the codec."""
    d = config.hidden_size
    audio = (config.num_codebooks * config.audio_vocab_size, d)
    shapes = {TEXT_EMBEDDING: (config.text_vocab_size, d), AUDIO_EMBEDDING: audio, FINAL_NORM: (d,)}
    for i in range(config.num_layers):
        shapes |= {LAYER.format(i) + name: shape for name, shape in layer_shapes(config).items()}
    return shapes if config.tied_audio_head else shapes | {AUDIO_HEAD: audio}


def apply_delay(codes: Tensor, boc: int, eoc: int) -> Tensor:
    """codes [T, N] -> rows [T + N - 1, N]: codebook c starts c rows late; BOC before it, EOC after."""
    frames, books = codes.shape
    if frames < 1:
        raise ValueError("no frames to delay")
    rows = torch.full((frames + books - 1, books), eoc, dtype=codes.dtype)
    for c in range(books):
        rows[:c, c] = boc
        rows[c : c + frames, c] = codes[:, c]
    return rows


def reverse_delay(rows: Tensor, allow_short: bool = False) -> Tensor:
    """rows [L, N] -> frames [L - N + 1, N]. Fewer than N rows hold no frame: ValueError, or [0, N] if `allow_short`."""
    length, books = rows.shape
    if length < books:
        if allow_short:
            return rows[:0]
        raise ValueError(f"{length} rows hold no complete frame; at least {books} are needed")
    frames = length - books + 1
    return torch.stack([rows[c : c + frames, c] for c in range(books)], dim=1)


def sanitise(frames: Tensor, codebook_size: int) -> Tensor:
    """BOC and EOC inside kept frames become code 0, never the last code."""
    return torch.where(frames >= codebook_size, torch.zeros_like(frames), frames)


@dataclass
class SamplerState:
    """`delay_count` rows of ramp-in so far, rows left after EOC (None before it), and the row to feed back."""

    delay_count: int = 0
    eoc_countdown: int | None = None
    done: bool = False
    last_codes: list[int] | None = None


def step(state: SamplerState, sampled: list[int], boc: int, eoc: int) -> list[int]:
    """Advance the state machine by one row of freely sampled ids; returns the row that is emitted.

    While codebooks still start (the first N rows) the late ones are BOC and EOC is not looked at. The first EOC on
    codebook 0 afterwards leaves N - 2 further rows, in which the later codebooks finish their frames.
    """
    books = len(sampled)
    if state.done:
        return [STOP_CODE] * books
    row = list(sampled)
    if state.delay_count < books:
        row[state.delay_count + 1 :] = [boc] * (books - state.delay_count - 1)
        state.delay_count += 1
    elif state.eoc_countdown is not None:
        state.eoc_countdown -= 1
        state.done = state.eoc_countdown <= 0
    elif row[0] == eoc:
        state.eoc_countdown = books - 2
        state.done = state.eoc_countdown <= 0
    if not state.done:
        state.last_codes = row
    return row


def filter_logits(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Logits [N, V] scaled by the temperature, -inf where an id is out of the top k or the nucleus.

    Ties with the k-th logit stay. In the nucleus an id is dropped if the ids before it already sum to more than p.
    """
    logits = logits / temperature
    if top_k is not None and top_k > 0:
        kth = torch.topk(logits, min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    if top_p is not None and top_p < 1:
        ordered, order = torch.sort(logits, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        dropped = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before > top_p)
        logits = logits.masked_fill(dropped, -math.inf)
    return logits


@dataclass(frozen=True)
class Prompt:
    """ids [P] with PLACEHOLDER where reference rows go; `ref_span` is their [start, end), None without a reference."""

    ids: list[int]
    ref_span: tuple[int, int] | None


def build_prompt(encode: Callable[[str], list[int]], special: Mapping[str, int | None], text: str,
                 ref_text: str | None = None, ref_rows: int = 0) -> Prompt:  # fmt: skip
    """[tts] ([ref_text] transcript) [ref_audio] rows [text] text [audio]; the bracketed reference only if there is one.

    `encode` turns text into ids without adding any; `special` maps the names in SPECIALS to ids.
    """
    ids = [special["<|tts|>"]]
    span = None
    if ref_rows > 0:
        if ref_text and special.get("<|ref_text|>") is not None:
            ids += [special["<|ref_text|>"], *encode(ref_text)]
        ids.append(special["<|ref_audio|>"])
        span = (len(ids), len(ids) + ref_rows)
        ids += [PLACEHOLDER] * ref_rows
    return Prompt([*ids, special["<|text|>"], *encode(text), special["<|audio|>"]], span)


@dataclass
class KVCache:
    """Keys and values of one layer so far, each [Hkv, S, head_dim]."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys is not None:
            keys, values = torch.cat([self.keys, keys], dim=1), torch.cat([self.values, values], dim=1)
        self.keys, self.values = keys, values
        return keys, values


def attend(config: HiggsConfig, x: Tensor, w: Mapping[str, Tensor], rope: tuple[Tensor, Tensor], cache: KVCache) -> Tensor:
    """Causal grouped-query attention with per-head norms on queries and keys, [S, D] -> [S, D]."""
    def heads(name: str, count: int) -> Tensor:
        return (x @ w[f"self_attn.{name}_proj.weight"].t()).view(-1, count, config.head_dim).transpose(0, 1)

    q = rms_norm(heads("q", config.num_heads), w["self_attn.q_norm.weight"], config.rms_norm_eps)
    k = rms_norm(heads("k", config.num_kv_heads), w["self_attn.k_norm.weight"], config.rms_norm_eps)
    k, v = cache.extend(rotate(k, *rope), heads("v", config.num_kv_heads))
    group = config.num_heads // config.num_kv_heads
    scores = rotate(q, *rope) @ k.repeat_interleave(group, dim=0).transpose(1, 2) / math.sqrt(config.head_dim)
    new, total = x.shape[0], k.shape[1]
    future = torch.ones(new, total, dtype=torch.bool).triu(total - new + 1)
    weights = scores.masked_fill(future, -math.inf).softmax(-1)
    mixed = weights @ v.repeat_interleave(group, dim=0)
    return mixed.transpose(0, 1).reshape(new, -1) @ w["self_attn.o_proj.weight"].t()


def qwen3_layer(config: HiggsConfig, x: Tensor, w: Mapping[str, Tensor], rope: tuple[Tensor, Tensor], cache: KVCache) -> Tensor:
    """One pre-norm layer, [S, D] -> [S, D]. `w` holds its weights under the names that follow `body.layers.{i}.`."""
    eps = config.rms_norm_eps
    x = x + attend(config, rms_norm(x, w["input_layernorm.weight"], eps), w, rope, cache)
    return x + feed_forward(rms_norm(x, w["post_attention_layernorm.weight"], eps), w)


def audio_embed(weight: Tensor, rows: Tensor, audio_vocab_size: int) -> Tensor:
    """Sum of one lookup a codebook: weight [N * V, D], rows [..., N] in [0, V) -> [..., D].

    An id of V or more would read the next codebook's block, so it is refused with ValueError.
    """
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < audio_vocab_size:
        raise ValueError(f"row ids must lie in 0..{audio_vocab_size - 1}, found {int(rows.min())}..{int(rows.max())}")
    offsets = torch.arange(rows.shape[-1]) * audio_vocab_size
    return F.embedding(rows + offsets, weight).sum(-2)


def audio_head(weight: Tensor, hidden: Tensor, num_codebooks: int) -> Tensor:
    """weight [N * V, D], hidden [..., D] after the final norm -> logits [..., N, V]."""
    return (hidden @ weight.t()).unflatten(-1, (num_codebooks, -1))


@dataclass
class Generation:
    """rows [L, N] as emitted, codes [T, N] sanitised, hidden [L, D] and logits [L, N, V] that predicted each row."""

    rows: Tensor
    codes: Tensor
    hidden: Tensor
    logits: Tensor
    finish_reason: str


@dataclass
class Higgs:
    """A checkpoint's language model. `tensors` maps checkpoint names to tensors of any dtype; compute is float32."""

    config: HiggsConfig
    tensors: Mapping[str, Tensor]
    bf16_rope: bool = True
    head: str = field(init=False)

    def __post_init__(self):
        self.head = AUDIO_EMBEDDING if self.config.tied_audio_head else AUDIO_HEAD

    def weight(self, name: str) -> Tensor:
        return self.tensors[name].float()

    def layer_weights(self, i: int) -> dict[str, Tensor]:
        prefix = LAYER.format(i)
        names = [n for n in body_shapes(self.config) if n.startswith(prefix)]
        return {n.removeprefix(prefix): self.weight(n) for n in names}

    def embed_rows(self, rows: Tensor) -> Tensor:
        """rows [L, N] -> [L, D]."""
        return audio_embed(self.weight(AUDIO_EMBEDDING), rows, self.config.audio_vocab_size)

    def embed_prompt(self, prompt: Prompt, ref_rows: Tensor | None = None) -> Tensor:
        """Text embeddings [P, D] with the reference rows [R, N] laid over the placeholders."""
        ids = torch.tensor(prompt.ids).clamp(min=0)
        embeds = self.tensors[TEXT_EMBEDDING][ids].float()
        if prompt.ref_span is not None:
            start, end = prompt.ref_span
            embeds[start:end] = self.embed_rows(ref_rows)
        return embeds

    def hidden_states(self, embeds: Tensor, caches: list[KVCache] | None = None) -> Tensor:
        """embeds [S, D] that follow what `caches` hold -> hidden states [S, D] after the final norm."""
        caches = [KVCache() for _ in range(self.config.num_layers)] if caches is None else caches
        start = 0 if caches[0].keys is None else caches[0].keys.shape[1]
        rope = rope_table(self.config, torch.arange(start, start + embeds.shape[0]), self.bf16_rope)
        x = embeds
        for i, cache in enumerate(caches):
            x = qwen3_layer(self.config, x, self.layer_weights(i), rope, cache)
        return rms_norm(x, self.weight(FINAL_NORM), self.config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] -> [..., N, V]."""
        return audio_head(self.weight(self.head), hidden, self.config.num_codebooks)

    def teacher_forced(self, prompt_embeds: Tensor, rows: Tensor) -> Tensor:
        """Hidden states [L, D] that predict each of `rows` [L, N] when those rows are fed, in one pass."""
        embeds = torch.cat([prompt_embeds, self.embed_rows(rows[:-1])])
        return self.hidden_states(embeds)[prompt_embeds.shape[0] - 1 :]

    @torch.no_grad()
    def generate(self, prompt_embeds: Tensor, max_rows: int, choose: Callable[[Tensor], Tensor] = lambda x: x.argmax(-1)) -> Generation:
        """Speak from prompt embeddings [P, D]; `choose` turns logits [N, V] into ids [N] (greedy by default)."""
        config, state = self.config, SamplerState()
        caches = [KVCache() for _ in range(config.num_layers)]
        rows, hidden, logits = [], [], []
        x = prompt_embeds
        while not state.done and len(rows) < max_rows:
            hidden.append(self.hidden_states(x, caches)[-1])
            logits.append(self.logits(hidden[-1]))
            rows.append(step(state, choose(logits[-1]).tolist(), config.boc_id, config.eoc_id))
            x = self.embed_rows(torch.tensor(rows[-1:]))
        rows = torch.tensor(rows)
        codes = sanitise(reverse_delay(rows, allow_short=True), config.codebook_size)
        return Generation(rows, codes, torch.stack(hidden), torch.stack(logits), "eoc" if state.done else "length")
