"""OmniFish in plain PyTorch: text -> semantic ids, block by block -> codes, in float32.

A Qwen3 body *without* causal mask reads the context (text, then reference frames) and fills blocks of B frames from left to
right. Inside a block it reveals the semantic ids in a few rounds, most confident first (masked diffusion). A residual decoder,
one of two kinds, then fills the other nine codebooks from the body's states, and the next block begins.

What each pass sees is the same: everything kept so far and the whole of itself. So a pass is `hidden_states(embeds, past)`, and
it keeps its keys and values or drops them. `block_mask` is the same rule for one pass over a whole training sequence; the
tests hold one against the other.

Weights are looked up by their checkpoint names in any mapping, so that the body may be held in memory or read layer by layer.
There is no batch axis.

Shapes: S positions of a pass, P positions before it, D hidden, H heads, N codebooks (10), V ids of an input table (4105),
T frames, B frames of a block, M width of the residual decoder, J levels (a *level* is a codebook as the residual decoder
counts them).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from _ref.qwen3 import feed_forward, layer_shapes, rms_norm, rope_table, rope_theta, rotate

CODEBOOK_SIZES = (4096, *[1024] * 9)  # semantic, then nine residual
NUM_CODEBOOKS = len(CODEBOOK_SIZES)
MASK_ID = CODEBOOK_SIZES[0]  # stands for an unknown code in every codebook
END_ID = MASK_ID + 1  # semantic id of the frame after the speech
PAD_IDS = tuple(range(END_ID + 1, END_ID + 8))  # the frames after END up to the block's end, in a cycle
VOCAB = PAD_IDS[-1] + 1  # V: rows of each codebook's input table, and of the semantic head
OLD_VOCAB = MASK_ID + 1  # V of checkpoints that know no END and cannot stop
NO_TEXT = -1  # id of a position that holds no text
LANGUAGES = ("None", "en", "pl", "de", "fr", "es", "it", "pt", "ru")  # rows of the language table

RESIDUAL_HEADS = 8  # of either residual decoder; no shape tells it
RESIDUAL_ROPE_THETA = 10_000.0
RESIDUAL_EPSILON = 1e-6
# Score of one key more than the prompt has, whose value is 0. Alone its weight is 1, so that the attention adds nothing; beside
# a real key its weight underflows to 0. No branch depends on the prompt's length, and no attention is over nothing (which is
# NaN, or refused, in some kernels). fp16 holds the number.
NO_PROMPT_SCORE = -30_000.0

TEXT_EMBEDDING = "llm.embed_tokens.weight"
AUDIO_EMBEDDING = "audio_embeddings.weight"
SEMANTIC_HEAD = "semantic_head.weight"
FINAL_NORM = "llm.norm.weight"
LAYER = "llm.layers.{}."
RESIDUAL_PREFIX = "mtp."
ID_TABLES = ("spk", "q", "lang")  # {}_embeddings.weight, then {}_proj.weight and .bias

# Checkpoint prefix -> prefix of a plain Qwen3 checkpoint.
QWEN3_PREFIXES = {"llm.": "model."}

WRAPPERS = ("model", "state_dict", "ema")
WRAPPER_PREFIXES = ("module.", "_orig_mod.")

KV = tuple[Tensor, Tensor]  # keys and values [H, P, head_dim]


def plain_names(state: Mapping) -> dict[str, Tensor]:
    """The tensors of a saved state dict under their own names: unnested, without what training wrappers put in front."""
    for key in WRAPPERS:
        if isinstance(state.get(key), Mapping):
            return plain_names(state[key])
    plain = {}
    for name, tensor in state.items():
        while name.startswith(WRAPPER_PREFIXES):
            name = name.split(".", 1)[1]
        plain[name] = tensor
    return plain


def scoped(w: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The entries whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): w[name] for name in w if name.startswith(prefix)}


@dataclass(frozen=True)
class ResidualConfig:
    """Sizes of a residual decoder; `size` is M. Query heads and rotary base are the same for both kinds."""

    size: int
    num_layers: int
    ffn: int
    num_kv_heads: int

    num_heads = RESIDUAL_HEADS
    rope_theta = RESIDUAL_ROPE_THETA

    @property
    def head_dim(self) -> int:
        return self.size // self.num_heads

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def block_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of the tensors of one attention and its gated network."""
        m, ffn = self.size, self.ffn
        return {
            "attn_norm": (m,), "ffn_norm": (m,), "wq": (m, m), "wkv": (2 * self.kv_size, m), "wo": (m, m),
            "w1": (ffn, m), "w3": (ffn, m), "w2": (m, ffn),
        }  # fmt: skip


@dataclass(frozen=True)
class AxialConfig(ResidualConfig):
    """The residual decoder that attends over a grid of frames and levels."""

    prompt_cross: bool

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]]) -> AxialConfig:
        size = shapes["mtp.level_emb.weight"][1]
        return cls(
            size=size,
            num_layers=count_layers(shapes, "mtp.lvl."),
            ffn=shapes["mtp.lvl.0.w1.weight"][0],
            num_kv_heads=kv_heads(shapes["mtp.lvl.0.wkv.weight"][0], size),
            prompt_cross=any(name.startswith("mtp.px.") for name in shapes),
        )

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor after `mtp.`."""
        m = self.size
        named = {"code_emb": (level_offsets()[-1] + CODEBOOK_SIZES[-1], m), "level_emb": (NUM_CODEBOOKS, m)}
        named |= {"in_norm": (hidden_size,), "in_proj": (m, hidden_size), "out_norm": (m,)}
        named |= {f"heads.{j}": (ids, m) for j, ids in enumerate(CODEBOOK_SIZES[1:])}
        for n in range(self.num_layers):
            for axis in ("lvl", "frm"):
                named |= {f"{axis}.{n}.{name}": shape for name, shape in self.block_shapes().items()}
            if self.prompt_cross:
                cross = {"qnorm": (m,), "knorm": (m,), "wq": (m, m), "wkv": (2 * self.kv_size, m), "wo": (m, m)}
                named |= {f"px.{n}.{name}": shape for name, shape in cross.items()}
        return {f"{name}.weight": shape for name, shape in named.items()}


@dataclass(frozen=True)
class ChainConfig(ResidualConfig):
    """The residual decoder that is a chain of nine small transformers over frames (MTPDecoder); `num_layers` of each."""

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]]) -> ChainConfig:
        size = shapes["mtp.layers.0.embedding.weight"][1]
        return cls(
            size=size,
            num_layers=count_layers(shapes, "mtp.layers.0.blocks."),
            ffn=shapes["mtp.layers.0.blocks.0.w1.weight"][0],
            num_kv_heads=kv_heads(shapes["mtp.layers.0.blocks.0.wkv.weight"][0], size),
        )

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor after `mtp.`."""
        m, named = self.size, {}
        for k, (known, wanted) in enumerate(zip(CODEBOOK_SIZES, CODEBOOK_SIZES[1:])):
            state = hidden_size if k == 0 else m
            link = {"embedding": (known, m), "revealed": (wanted + 1, m), "enorm": (m,), "hnorm": (state,)}
            link |= {"eh_proj": (m, m + state), "out_norm": (m,), "head": (wanted, m)}
            for n in range(self.num_layers):
                link |= {f"blocks.{n}.{name}": shape for name, shape in self.block_shapes().items()}
            named |= {f"layers.{k}.{name}.weight": shape for name, shape in link.items()}
        return named


def count_layers(names: Iterable[str], prefix: str) -> int:
    """Distinct numbers that follow `prefix`."""
    return len({name.removeprefix(prefix).split(".", 1)[0] for name in names if name.startswith(prefix)})


def kv_heads(wkv_rows: int, size: int) -> int:
    """Key heads, from the rows of a weight that makes keys and values."""
    heads, rest = divmod(wkv_rows, 2 * (size // RESIDUAL_HEADS))
    if rest or not heads or RESIDUAL_HEADS % heads:
        raise ValueError(f"mtp: {wkv_rows} key and value rows at width {size} are not whole heads for {RESIDUAL_HEADS} queries")
    return heads


def level_offsets() -> list[int]:
    """First row of each level in the axial decoder's code table: V rows for level 0 and the plain codes of the others."""
    sizes = (VOCAB, *CODEBOOK_SIZES[1:])
    return [sum(sizes[:j]) for j in range(NUM_CODEBOOKS)]


@dataclass(frozen=True)
class OmniFishConfig:
    """What changes the arithmetic: the body's fields from `llm_config`, all else from the shapes of the tensors."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    text_vocab_size: int
    num_speakers: int
    num_recordings: int
    table_sizes: tuple[int, int, int]
    residual: AxialConfig | ChainConfig

    @classmethod
    def from_dict(cls, config: Mapping, shapes: Mapping[str, tuple[int, ...]]) -> OmniFishConfig:
        """Read config.json and the shapes of the checkpoint's tensors.

        KeyError names what is absent; ValueError and NotImplementedError what is wrong or unsupported.
        """
        body = config["llm_config"]
        if body.get("model_type", "qwen3") != "qwen3":
            raise ValueError(f"llm_config.model_type is {body['model_type']!r}, not 'qwen3'")
        for key in ("attention_bias", "use_sliding_window", "rope_scaling"):
            if body.get(key):
                raise NotImplementedError(f"llm_config.{key} is {body[key]!r}")
        if body.get("hidden_act", "silu") != "silu":
            raise NotImplementedError(f"llm_config.hidden_act is {body['hidden_act']!r}, not 'silu'")
        if shapes[AUDIO_EMBEDDING][0] == NUM_CODEBOOKS * OLD_VOCAB:
            raise ValueError(f"{AUDIO_EMBEDDING} has {OLD_VOCAB} ids a codebook: no END id, so this checkpoint cannot stop")
        kind = AxialConfig if any(name.startswith(("mtp.code_emb.", "mtp.lvl.")) for name in shapes) else ChainConfig
        made = cls(
            hidden_size=body["hidden_size"],
            intermediate_size=body["intermediate_size"],
            num_layers=body["num_hidden_layers"],
            num_heads=body["num_attention_heads"],
            num_kv_heads=body["num_key_value_heads"],
            head_dim=body["head_dim"],
            rms_norm_eps=body["rms_norm_eps"],
            rope_theta=rope_theta(body),
            max_position_embeddings=body["max_position_embeddings"],
            text_vocab_size=shapes[TEXT_EMBEDDING][0],
            num_speakers=shapes["spk_embeddings.weight"][0],
            num_recordings=shapes["q_embeddings.weight"][0],
            table_sizes=tuple(shapes[f"{table}_embeddings.weight"][1] for table in ID_TABLES),
            residual=kind.from_shapes(shapes),
        )
        made.check(shapes)
        return made

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of the checkpoint."""
        d = self.hidden_size
        named = {TEXT_EMBEDDING: (self.text_vocab_size, d), FINAL_NORM: (d,)}
        named |= {AUDIO_EMBEDDING: (NUM_CODEBOOKS * VOCAB, d), SEMANTIC_HEAD: (VOCAB, d)}
        for table, rows, size in zip(ID_TABLES, (self.num_speakers, self.num_recordings, len(LANGUAGES)), self.table_sizes):
            named |= {f"{table}_embeddings.weight": (rows, size), f"{table}_proj.weight": (d, size), f"{table}_proj.bias": (d,)}
        for i in range(self.num_layers):
            named |= {LAYER.format(i) + name: shape for name, shape in layer_shapes(self).items()}
        return named | {RESIDUAL_PREFIX + name: shape for name, shape in self.residual.shapes(d).items()}

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """ValueError unless `shapes` holds exactly the tensors of this model."""
        expected = self.shapes()
        missing, unexpected = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
        if missing or unexpected:
            raise ValueError(f"tensors: missing {missing[:3]}, unexpected {unexpected[:3]}")
        for name, shape in expected.items():
            if tuple(shapes[name]) != shape:
                raise ValueError(f"{name} is {list(shapes[name])}, not {list(shape)}")


@dataclass(frozen=True)
class Recipe:
    """How to generate: what no weight tells, so there are no defaults for the first three. `threshold`: see `reveal`."""

    block_size: int
    context_mode: str
    steps: int
    threshold: float | None = None
    residual_rounds: int = 4

    @classmethod
    def from_dict(cls, side: Mapping) -> Recipe:
        """Read the checkpoint's side file. KeyError names a field that must be known and is not."""
        generation = side.get("generation", {})
        if side.get("ctx_frames") is not None:
            raise NotImplementedError(f"ctx_frames is {side['ctx_frames']}: a shortened history would need recomputation")
        if generation.get("schedule", "cosine") != "cosine":
            raise NotImplementedError(f"generation.schedule is {generation['schedule']!r}, not 'cosine'")
        if generation.get("guidance_scale"):
            raise NotImplementedError(f"generation.guidance_scale is {generation['guidance_scale']}, not 0")
        if generation.get("steps", side["steps"]) != side["steps"]:
            raise ValueError(f"steps is {side['steps']}, generation.steps is {generation['steps']}")
        rounds = generation.get("mtp_rounds", cls.residual_rounds)
        return cls(side["block_size"], side["context_mode"], side["steps"], generation.get("threshold"), rounds)

    def __post_init__(self):
        if self.context_mode not in ("full", "semantic"):
            raise ValueError(f"context_mode is {self.context_mode!r}, not 'full' or 'semantic'")
        for name in ("block_size", "steps", "residual_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


# --- text -------------------------------------------------------------------------------------------------------------

SPEAKER_NAME, RECORDING_NAME = r"(?:[A-Za-z]{2}|spk)_\w+", r"q\d+"
NAME_IN_TEXT = re.compile(
    rf"(?<=speaker:){SPEAKER_NAME}|(?<=quality:){RECORDING_NAME}|(?<=<\|quad_start\|>){SPEAKER_NAME}(?=<\|quad_end\|>)"
)


def check_names(names: Sequence[str], config: OmniFishConfig) -> None:
    """ValueError unless the names fit the rows of the two tables: speakers, then recordings, each name once."""
    recording = [bool(re.fullmatch(RECORDING_NAME, name)) for name in names]
    if recording != sorted(recording):
        raise ValueError(f"id names: the recording {names[recording.index(True)]!r} stands before a speaker")
    if len(set(names)) != len(names):
        raise ValueError("id names: a name occurs twice")
    found, rows = (recording.count(False), recording.count(True)), (config.num_speakers, config.num_recordings)
    if found != rows:
        raise ValueError(f"id names: {found[0]} speakers and {found[1]} recordings; the tables have {rows[0]} and {rows[1]} rows")


def encode_text(encode: Callable[[str], list[int]], text: str, names: Sequence[str], text_vocab_size: int) -> list[int]:
    """Ids of `text`: a known name where a name may stand is one id, the text between them is encoded piece by piece.

    `encode` turns text into ids without adding any. An unknown name stays part of the text around it.
    """
    rows = {name: row for row, name in enumerate(names)}
    ids, done = [], 0
    for match in NAME_IN_TEXT.finditer(text):
        if match[0] in rows:
            ids += [*encode(text[done : match.start()]), text_vocab_size + rows[match[0]]]
            done = match.end()
    return ids + encode(text[done:])


def language_tokens(encode: Callable[[str], list[int]]) -> dict[int, int]:
    """Token id -> row of the language table, for each language whose name is one token."""
    tokens = {}
    for row, name in enumerate(LANGUAGES):
        ids = encode(name)
        if len(ids) == 1:
            tokens[ids[0]] = row
    return tokens


def style_text(language: str | None = None, instruct: str | None = None) -> str:
    return f"<|lang_start|>{language or 'None'}<|lang_end|><|instruct_start|>{instruct or 'None'}<|instruct_end|>"


def context_text(text: str, before: Sequence[str] = (), after: Sequence[str] = ()) -> str:
    """The text to speak between the sentences around it, which are not spoken."""
    earlier = f"<|object_ref_start|>{' '.join(before)}<|object_ref_end|>" if before else ""
    later = f"<|box_start|>{' '.join(after)}<|box_end|>" if after else ""
    return f"{earlier}<|text_start|>{text}<|text_end|>{later}"


def dialogue_text(turns: Sequence[tuple[str | None, str]]) -> str:
    """Lines joined by blanks, each preceded by its speaker where the speaker changes; None is nobody, as at the start."""
    lines, speaking = [], None
    for speaker, line in turns:
        lines.append(line if speaker == speaking else f"<|quad_start|>{speaker}<|quad_end|>{line}")
        speaking = speaker
    return " ".join(lines)


def prompt_text(text: str, language: str | None = None, instruct: str | None = None, ref_text: str | None = None,
                before: Sequence[str] = (), after: Sequence[str] = ()) -> str:  # fmt: skip
    """All text of a context; the transcript of the reference frames that follow it, if any, is read as part of `text`."""
    spoken = f"{ref_text} {text}" if ref_text else text
    return style_text(language, instruct) + context_text(spoken, before, after)


def table_row(w: Mapping[str, Tensor], table: str, rows: Tensor) -> Tensor:
    """Rows [S] of a small table ("spk", "q" or "lang") in the body's width, [S, D]."""
    vectors = F.embedding(rows, w[f"{table}_embeddings.weight"])
    return vectors @ w[f"{table}_proj.weight"].t() + w[f"{table}_proj.bias"]


def language_rows(ids: Tensor, tokens: Mapping[int, int]) -> Tensor:
    """Row of the language table for each id [S]; 0 ("None") for an id that is no language."""
    rows = torch.zeros_like(ids)
    for token, row in tokens.items():
        rows = torch.where(ids == token, row, rows)
    return rows


def text_embed(w: Mapping[str, Tensor], ids: Tensor, lang_start: int, languages: Mapping[int, int]) -> Tensor:
    """ids [S] (NO_TEXT where there is none) -> [S, D]. Of the rules that fit an id the last one counts.

    A text id is a row of the text table; an id past its end a speaker or a recording (past theirs: the last of them); the id
    right after `lang_start` a language, whatever it is.
    """
    text_rows, speakers, recordings = (len(w[n]) for n in (TEXT_EMBEDDING, "spk_embeddings.weight", "q_embeddings.weight"))
    name = (ids - text_rows).clamp(0, max(speakers + recordings - 1, 0))
    embeds = F.embedding(ids.clamp(0, text_rows - 1), w[TEXT_EMBEDDING]).float()
    for table, rows, first in (("spk", speakers, 0), ("q", recordings, speakers)):
        if rows:
            own = (ids >= text_rows) & (name >= first) & (name < first + rows)
            embeds = torch.where(own[:, None], table_row(w, table, (name - first).clamp(0, rows - 1)), embeds)
    if languages:
        after_start = F.pad(ids[:-1], (1, 0), value=NO_TEXT) == lang_start
        embeds = torch.where(after_start[:, None], table_row(w, "lang", language_rows(ids, languages)), embeds)
    return embeds


def audio_embed(weight: Tensor, codes: Tensor) -> Tensor:
    """Sum of one lookup a codebook: weight [N * V, D], codes [N, T] in 0..V-1 (MASK included) -> [T, D]."""
    return F.embedding(codes + torch.arange(NUM_CODEBOOKS)[:, None] * VOCAB, weight).float().sum(0)


def semantic_only(semantic: Tensor) -> Tensor:
    """Semantic ids [T] as codes [N, T] with every residual code masked."""
    return torch.cat([semantic[None], torch.full((NUM_CODEBOOKS - 1, len(semantic)), MASK_ID)])


CONTEXT, SEMANTIC, NOISY, FULL, PADDING = 0, 1, 2, 3, -1  # kinds of positions in a training sequence


def block_mask(kind: Tensor, block: Tensor) -> Tensor:
    """kind [S], block [S] -> [S, S], true where the row's position sees the column's.

    Everything sees the context. A frame sees its own block in its own copy, and the blocks before it in the copy that stands
    for what was decided: the full one, or the semantic one in sequences that have no full copy. Padding sees all but padding.
    """
    decided = FULL if (kind == FULL).any() else SEMANTIC
    query, key = kind[:, None], kind[None, :]
    earlier, same = block[None, :] < block[:, None], block[None, :] == block[:, None]
    frame = (query > CONTEXT) & ((key == decided) & earlier | (key == query) & same)
    return (query >= CONTEXT) & (key == CONTEXT) | frame | (query == PADDING) & (key >= CONTEXT)


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """q [..., H, S, d], k and v [..., Hkv, P, d] -> [..., S, H * d]; each key head serves H / Hkv neighbouring query heads.

    `visible` [..., S, P] says who sees whom; without it all see all. `bias` [P] is added to the scores.
    """
    q = q.reshape(*q.shape[:-3], k.shape[-3], q.shape[-3] // k.shape[-3], *q.shape[-2:])  # [..., Hkv, H / Hkv, S, d]
    k, v = k.unsqueeze(-3), v.unsqueeze(-3)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if visible is not None:
        scores = scores.masked_fill(~visible[..., None, None, :, :], -math.inf)
    if bias is not None:
        scores = scores + bias
    return (scores.softmax(-1) @ v).flatten(-4, -3).transpose(-3, -2).flatten(-2)


def split_heads(x: Tensor, heads: int, head_dim: int) -> Tensor:
    """[..., S, heads * d] -> [..., heads, S, d]."""
    return x.reshape(*x.shape[:-1], heads, head_dim).transpose(-3, -2)


def append(past: KV | None, keys: Tensor, values: Tensor) -> KV:
    if past is None:
        return keys, values
    return torch.cat([past[0], keys], dim=-2), torch.cat([past[1], values], dim=-2)


def attend(config: OmniFishConfig, x: Tensor, w: Mapping[str, Tensor], rope: tuple[Tensor, Tensor],
           past: KV | None, visible: Tensor | None) -> tuple[Tensor, KV]:  # fmt: skip
    """Attention in both directions with per-head norms on queries and keys: [S, D] -> [S, D], and all keys and values."""
    q, k, v = (
        split_heads(x @ w[f"self_attn.{name}_proj.weight"].t(), heads, config.head_dim)
        for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads))
    )
    q = rotate(rms_norm(q, w["self_attn.q_norm.weight"], config.rms_norm_eps), *rope)
    k = rotate(rms_norm(k, w["self_attn.k_norm.weight"], config.rms_norm_eps), *rope)
    kv = append(past, k, v)
    return grouped_attention(q, *kv, visible) @ w["self_attn.o_proj.weight"].t(), kv


def body_layer(config: OmniFishConfig, x: Tensor, w: Mapping[str, Tensor], rope: tuple[Tensor, Tensor],
               past: KV | None, visible: Tensor | None) -> tuple[Tensor, KV]:  # fmt: skip
    """One pre-norm layer, [S, D] -> [S, D]. `w` holds its weights under the names that follow `llm.layers.{i}.`."""
    eps = config.rms_norm_eps
    mixed, kv = attend(config, rms_norm(x, w["input_layernorm.weight"], eps), w, rope, past, visible)
    x = x + mixed
    return x + feed_forward(rms_norm(x, w["post_attention_layernorm.weight"], eps), w), kv


def keys_and_values(config: ResidualConfig, x: Tensor, wkv: Tensor) -> tuple[Tensor, Tensor]:
    """[..., S, M] -> two [..., Hkv, S, d]; the weight's rows make all key heads, then all value heads."""
    return tuple(split_heads(part, config.num_kv_heads, config.head_dim) for part in (x @ wkv.t()).chunk(2, dim=-1))


def residual_block(config: ResidualConfig, w: Mapping[str, Tensor], x: Tensor, positions: Tensor, past: KV | None = None,
                   visible: Tensor | None = None) -> tuple[Tensor, KV]:  # fmt: skip
    """Pre-norm attention along S, then a gated network: [..., S, M] -> same, and all keys and values [..., Hkv, P + S, d]."""
    rope = rope_table(config, positions, bf16=False)
    normed = rms_norm(x, w["attn_norm.weight"], RESIDUAL_EPSILON)
    q = rotate(split_heads(normed @ w["wq.weight"].t(), config.num_heads, config.head_dim), *rope)
    k, v = keys_and_values(config, normed, w["wkv.weight"])
    kv = append(past, rotate(k, *rope), v)
    x = x + grouped_attention(q, *kv, visible) @ w["wo.weight"].t()
    normed = rms_norm(x, w["ffn_norm.weight"], RESIDUAL_EPSILON)
    return x + (F.silu(normed @ w["w1.weight"].t()) * (normed @ w["w3.weight"].t())) @ w["w2.weight"].t(), kv


def prompt_keys(config: AxialConfig, w: Mapping[str, Tensor], grid: Tensor) -> KV:
    """Prompt tokens [T, J, M] -> keys and values [Hkv, T * J, d]; no rotary."""
    return keys_and_values(config, rms_norm(grid.flatten(0, 1), w["knorm.weight"], RESIDUAL_EPSILON), w["wkv.weight"])


def prompt_attention(config: AxialConfig, w: Mapping[str, Tensor], grid: Tensor, prompt: KV) -> Tensor:
    """Every token of the grid [T, J, M] reads every token of the prompt [Hkv, P, d]; with P = 0 it stays as it is."""
    normed = rms_norm(grid.flatten(0, 1), w["qnorm.weight"], RESIDUAL_EPSILON)
    q = split_heads(normed @ w["wq.weight"].t(), config.num_heads, config.head_dim)
    k, v = (F.pad(part, (0, 0, 0, 1)) for part in prompt)
    nobody = F.pad(torch.zeros_like(prompt[0][0, :, 0]), (0, 1), value=NO_PROMPT_SCORE)
    return grid + (grouped_attention(q, k, v, bias=nobody) @ w["wo.weight"].t()).view_as(grid)


def axial_tokens(w: Mapping[str, Tensor], h: Tensor, codes: Tensor, levels: Tensor) -> Tensor:
    """h [T, D], codes [J, T] of `levels` [J] -> tokens [T, J, M]: code, level and state of the frame, added."""
    rows = codes.t() + torch.tensor(level_offsets())[levels]
    frame = rms_norm(h, w["in_norm.weight"], RESIDUAL_EPSILON) @ w["in_proj.weight"].t()
    return F.embedding(rows, w["code_emb.weight"]) + F.embedding(levels, w["level_emb.weight"]) + frame[:, None]


@dataclass
class AxialPast:
    """What one layer keeps of the tokens before: keys and values of the level attention [T, Hkv, J, d], of the frame
    attention [J, Hkv, P, d], and of the prompt's tokens [Hkv, P * N, d]. None is nothing."""

    levels: KV | None = None
    frames: KV | None = None
    prompt: KV | None = None


def axial_layer(config: AxialConfig, w: Mapping[str, Tensor], n: int, grid: Tensor, levels: Tensor, positions: Tensor,
                past: AxialPast, level_mask: Tensor | None = None, frame_mask: Tensor | None = None,
                prompt_frames: int = 0) -> tuple[Tensor, AxialPast]:  # fmt: skip
    """One layer over the grid [T, J, M]: along the levels of each frame, along the frames of each level, then the prompt.

    The prompt is `past.prompt`, or the first `prompt_frames` frames of this grid. Returns what the tokens after may need.
    """
    grid, level_kv = residual_block(config, scoped(w, f"lvl.{n}."), grid, levels, past.levels, level_mask)
    across, frame_kv = residual_block(config, scoped(w, f"frm.{n}."), grid.transpose(0, 1), positions, past.frames, frame_mask)
    grid, prompt = across.transpose(0, 1), past.prompt
    if config.prompt_cross:
        cross = scoped(w, f"px.{n}.")
        if prompt is None:
            prompt = prompt_keys(config, cross, grid[:prompt_frames])
        grid = prompt_attention(config, cross, grid, prompt)
    return grid, AxialPast(level_kv, frame_kv, prompt)


def axial_run(config: AxialConfig, w: Mapping[str, Tensor], h: Tensor, codes: Tensor, levels: Tensor, positions: Tensor,
              past: list[AxialPast], **masks) -> tuple[Tensor, list[AxialPast]]:  # fmt: skip
    """h [T, D] and codes [J, T] of `levels` [J] through every layer: grid [T, J, M], and what each layer keeps."""
    grid, kept = axial_tokens(w, h, codes, levels), []
    for n, layer_past in enumerate(past):
        grid, layer_past = axial_layer(config, w, n, grid, levels, positions, layer_past, **masks)
        kept.append(layer_past)
    return rms_norm(grid, w["out_norm.weight"], RESIDUAL_EPSILON), kept


def axial_grid(config: AxialConfig, w: Mapping[str, Tensor], h: Tensor, codes: Tensor, block: Tensor) -> Tensor:
    """Teacher forcing: h [T, D], codes [N, T], block [T] (-1: prompt, which comes first) -> logits [9, T, ids].

    The one-shot form of the decoder. A target token sees its frame's levels up to its own, and a prompt token all of its
    frame's; both see the frames of their own block and of those before.
    """
    levels, positions = torch.arange(NUM_CODEBOOKS), torch.arange(len(block))
    level_mask = (levels[None, :] <= levels[:, None]) | (block < 0)[:, None, None]
    frame_mask = block[None, :] <= block[:, None]
    grid, _ = axial_run(
        config, w, h, codes, levels, positions, [AxialPast()] * config.num_layers,
        level_mask=level_mask, frame_mask=frame_mask, prompt_frames=int((block < 0).sum()),
    )  # fmt: skip
    return torch.stack([grid[:, j] @ w[f"heads.{j}.weight"].t() for j in range(NUM_CODEBOOKS - 1)])


def axial_prime(config: AxialConfig, w: Mapping[str, Tensor], h: Tensor, codes: Tensor) -> list[AxialPast]:
    """Prompt h [P, D] with codes [N, P], all of it visible to all of it -> what each layer keeps. P may be 0."""
    levels, positions = torch.arange(NUM_CODEBOOKS), torch.arange(h.shape[0])
    past = [AxialPast()] * config.num_layers
    return axial_run(config, w, h, codes, levels, positions, past, prompt_frames=h.shape[0])[1]


def axial_step(config: AxialConfig, w: Mapping[str, Tensor], h: Tensor, code: Tensor, level: int, positions: Tensor,
               past: list[AxialPast]) -> tuple[Tensor, list[AxialPast]]:  # fmt: skip
    """One level of one block: h [S, D], code [S] of `level` -> logits [S, ids] of the next, and what each layer keeps.

    `past` holds per layer the block's own lower levels [S, Hkv, level, d], the earlier frames of this level [1, Hkv, P, d],
    and the prompt.
    """
    grid, kept = axial_run(config, w, h, code[None], torch.tensor([level]), positions, past)
    return grid[:, 0] @ w[f"heads.{level}.weight"].t(), kept


def greedy(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


@dataclass
class AxialDecoder:
    """Fills the residual codes of one block after the other; `w` holds the weights under the names that follow `mtp.`.

    `frames[j][n]` are the keys and values [1, Hkv, P, d] of every frame so far in level j, layer n; `prompt[n]` those of the
    prompt. Frames are counted from the prompt's first.
    """

    config: AxialConfig
    w: Mapping[str, Tensor]
    frames: list[list[KV]] = field(default_factory=list)
    prompt: list[KV | None] = field(default_factory=list)
    count: int = 0

    def prime(self, h: Tensor, codes: Tensor) -> None:
        """Begin with a prompt of P frames, h [P, D] and codes [N, P]; P may be 0."""
        kept = axial_prime(self.config, self.w, h, codes)
        self.prompt = [past.prompt for past in kept]
        self.frames = [[tuple(part[j : j + 1] for part in past.frames) for past in kept] for j in range(NUM_CODEBOOKS - 1)]
        self.count = len(h)

    def decode(self, h: Tensor, semantic: Tensor, choose: Callable[[Tensor], Tensor] = greedy) -> Tensor:
        """The next block's states h [S, D] and semantic codes [S] -> all its codes [N, S]."""
        positions, codes = torch.arange(self.count, self.count + len(h)), [semantic]
        levels: list[KV | None] = [None] * self.config.num_layers
        for j in range(NUM_CODEBOOKS - 1):
            past = [AxialPast(*parts) for parts in zip(levels, self.frames[j], self.prompt)]
            logits, kept = axial_step(self.config, self.w, h, codes[j], j, positions, past)
            codes.append(choose(logits))
            levels, self.frames[j] = [past.levels for past in kept], [past.frames for past in kept]
        self.count += len(h)
        return torch.stack(codes)


def still_masked(size: int, step: int, steps: int) -> int:
    """Frames of `size` that stay masked after round `step` of `steps` (from 0), rounded down: a cosine from all to none."""
    return max(0, math.floor(size * math.cos(math.pi / 2 * (step + 1) / steps)))  # a rounded cos(pi / 2) may be below 0


def confidence_of(logits: Tensor, chosen: Tensor) -> Tensor:
    """Probability [S] of the chosen id [S] under logits [S, ids], at temperature 1 whatever chose it."""
    return logits.softmax(-1).gather(-1, chosen[:, None])[:, 0]


def reveal(ids: Tensor, mask_id: int, chosen: Tensor, confidence: Tensor, keep: int, threshold: float | None = None) -> Tensor:
    """ids [S] with the most confident masked frames (the earlier ones on ties) set to `chosen` until `keep` stay masked.

    With a threshold, every masked frame whose confidence is above it is revealed as well.
    """
    masked = ids == mask_id
    order = torch.where(masked, confidence, -1.0).argsort(descending=True, stable=True)
    shown = torch.zeros_like(masked)
    shown[order[: max(0, int(masked.sum()) - keep)]] = True
    if threshold is not None:
        shown |= confidence > threshold
    return torch.where(masked & shown, chosen, ids)


def chain_link(config: ChainConfig, w: Mapping[str, Tensor], h: Tensor, code: Tensor, revealed: Tensor, positions: Tensor,
               past: Sequence[KV | None], visible: Tensor | None = None) -> tuple[Tensor, Tensor, list[KV]]:  # fmt: skip
    """One of the nine links: h [S, D or M], code k [S], code k + 1 where known [S] -> state [S, M], logits [S, ids], kept.

    `w` holds its weights under the names that follow `mtp.layers.{k}.`; an unknown code k + 1 is the last row's id.
    """
    codes = F.embedding(code, w["embedding.weight"]) + F.embedding(revealed, w["revealed.weight"])
    parts = (rms_norm(codes, w["enorm.weight"], RESIDUAL_EPSILON), rms_norm(h, w["hnorm.weight"], RESIDUAL_EPSILON))
    x, kept = torch.cat(parts, dim=-1) @ w["eh_proj.weight"].t(), []
    for n, block_past in enumerate(past):
        x, kv = residual_block(config, scoped(w, f"blocks.{n}."), x, positions, block_past, visible)
        kept.append(kv)
    x = rms_norm(x, w["out_norm.weight"], RESIDUAL_EPSILON)
    return x, x @ w["head.weight"].t(), kept


def chain_grid(config: ChainConfig, w: Mapping[str, Tensor], h: Tensor, codes: Tensor, visible: Tensor | None = None,
               clean: bool = False) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Teacher forcing: h [T, D], codes [N, T] -> states [9, T, M], logits [9, T, ids]. The one-shot form of the decoder.

    Each link is shown the code that it predicts in every frame (`clean`) or in none. `visible` [T, T]: who sees whom.
    """
    states, logits = [], []
    for k in range(NUM_CODEBOOKS - 1):
        revealed = codes[k + 1] if clean else torch.full_like(codes[k], CODEBOOK_SIZES[k + 1])
        link, past = scoped(w, f"layers.{k}."), [None] * config.num_layers
        h, link_logits, _ = chain_link(config, link, h, codes[k], revealed, torch.arange(len(h)), past, visible)
        states.append(h)
        logits.append(link_logits)
    return torch.stack(states), torch.stack(logits)


@dataclass
class ChainDecoder:
    """Fills the residual codes of one block after the other; `w` holds the weights under the names that follow `mtp.`.

    Codebook by codebook: a few rounds reveal the block's codes, then a *clean* pass, which is shown all of them, makes the
    state for the next link. `past[k][n]` are the clean keys and values [Hkv, P, d] of every frame so far.
    """

    config: ChainConfig
    w: Mapping[str, Tensor]
    rounds: int
    past: list[list[KV | None]] = field(default_factory=list)
    count: int = 0

    def clean(self, k: int, h: Tensor, codes: Tensor, positions: Tensor) -> Tensor:
        """Keep link k's keys and values of frames whose codes [N, S] are known; returns their states [S, M]."""
        link = scoped(self.w, f"layers.{k}.")
        state, _, self.past[k] = chain_link(self.config, link, h, codes[k], codes[k + 1], positions, self.past[k])
        return state

    def prime(self, h: Tensor, codes: Tensor) -> None:
        """Begin with a prompt of P frames, h [P, D] and codes [N, P]; P may be 0."""
        self.past = [[None] * self.config.num_layers for _ in range(NUM_CODEBOOKS - 1)]
        self.count = len(h)
        for k in range(NUM_CODEBOOKS - 1):
            h = self.clean(k, h, codes, torch.arange(self.count))

    def unmask(self, k: int, h: Tensor, code: Tensor, positions: Tensor, choose: Callable[[Tensor], Tensor]) -> Tensor:
        """Code k + 1 [S] of the block's frames."""
        mask_id, link = CODEBOOK_SIZES[k + 1], scoped(self.w, f"layers.{k}.")
        ids = torch.full_like(code, mask_id)
        for step in range(self.rounds):
            _, logits, _ = chain_link(self.config, link, h, code, ids, positions, self.past[k])
            chosen = choose(logits)
            ids = reveal(ids, mask_id, chosen, confidence_of(logits, chosen), still_masked(len(ids), step, self.rounds))
        return ids

    def decode(self, h: Tensor, semantic: Tensor, choose: Callable[[Tensor], Tensor] = greedy) -> Tensor:
        """The next block's states h [S, D] and semantic codes [S] -> all its codes [N, S]."""
        positions, codes = torch.arange(self.count, self.count + len(h)), semantic[None]
        for k in range(NUM_CODEBOOKS - 1):
            codes = torch.cat([codes, self.unmask(k, h, codes[k], positions, choose)[None]])
            h = self.clean(k, h, codes, positions)
        self.count += len(h)
        return codes


def close_block(ids: Tensor) -> tuple[Tensor, int]:
    """ids [B] -> what training showed of them, and how many frames are speech.

    The first END or PAD ends the speech: it becomes END, and the PAD cycle follows it, whatever stood there.
    """
    special = (ids >= END_ID).nonzero()
    if not len(special):
        return ids, len(ids)
    speech = int(special[0])
    pads = [PAD_IDS[i % len(PAD_IDS)] for i in range(len(ids) - speech - 1)]
    return torch.cat([ids[:speech], torch.tensor([END_ID, *pads])]), speech


@dataclass
class Block:
    """How a block came about, for R rounds: `rounds` ids after each [R, B], `chosen` and `confidence` in each [R, B]; `raw`
    ids at the end and `semantic` ids as closed [B], `hidden` [B, D] of the finish pass, `codes` [N, speech frames]."""

    rounds: Tensor
    chosen: Tensor
    confidence: Tensor
    raw: Tensor
    semantic: Tensor
    speech: int
    hidden: Tensor | None = None
    codes: Tensor | None = None


@dataclass
class Speech:
    """codes [N, T], the blocks they came from, the reference's states [P, D], and "end" or "max_blocks"."""

    codes: Tensor
    blocks: list[Block]
    prompt_hidden: Tensor
    finish_reason: str


@dataclass
class OmniFish:
    """A checkpoint's model. `tensors` maps checkpoint names to tensors of any dtype; compute is float32.

    `lang_start` is the id of <|lang_start|>, `languages` what `language_tokens` makes of the tokenizer.
    """

    config: OmniFishConfig
    tensors: Mapping[str, Tensor]
    lang_start: int
    languages: Mapping[int, int]
    residual_weights: dict[str, Tensor] = field(init=False, repr=False)

    def __post_init__(self):
        self.residual_weights = {name: tensor.float() for name, tensor in scoped(self.tensors, RESIDUAL_PREFIX).items()}

    def weight(self, name: str) -> Tensor:
        return self.tensors[name].float()

    def layer_weights(self, i: int) -> dict[str, Tensor]:
        return {name: self.weight(LAYER.format(i) + name) for name in layer_shapes(self.config)}

    def embed_text(self, ids: Tensor) -> Tensor:
        """ids [S] of text, speakers and recordings -> [S, D]."""
        tables = [f"{table}_{name}" for table in ID_TABLES for name in ("embeddings.weight", "proj.weight", "proj.bias")]
        w = {name: self.weight(name) for name in tables} | {TEXT_EMBEDDING: self.tensors[TEXT_EMBEDDING]}
        return text_embed(w, ids, self.lang_start, self.languages)

    def embed_audio(self, codes: Tensor) -> Tensor:
        """codes [N, T] -> [T, D]. An id of V or more would read the next codebook's rows, so it is refused with ValueError."""
        if len(codes) != NUM_CODEBOOKS:
            raise ValueError(f"codes have {len(codes)} rows, not one for each of {NUM_CODEBOOKS} codebooks")
        if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < VOCAB:
            raise ValueError(f"audio ids must lie in 0..{VOCAB - 1}, found {int(codes.min())}..{int(codes.max())}")
        return audio_embed(self.tensors[AUDIO_EMBEDDING], codes)

    def embed(self, input_ids: Tensor, is_audio: Tensor) -> Tensor:
        """A mixed sequence, [N, S] with text ids in the first row, and where it is audio [S] -> [S, D]."""
        text = self.embed_text(torch.where(is_audio, NO_TEXT, input_ids[0]))
        return torch.where(is_audio[:, None], self.embed_audio(torch.where(is_audio, input_ids, 0)), text)

    def hidden_states(self, embeds: Tensor, past: list[KV] | None = None, positions: Tensor | None = None,
                      visible: Tensor | None = None) -> tuple[Tensor, list[KV]]:  # fmt: skip
        """embeds [S, D] that follow what `past` holds -> states [S, D] after the final norm, and past and new together.

        Without `positions` [S] and `visible` [S, P + S] they count on from the past and everything sees everything.
        """
        past = [None] * self.config.num_layers if past is None else past
        start = 0 if past[0] is None else past[0][0].shape[1]
        positions = torch.arange(start, start + embeds.shape[0]) if positions is None else positions
        x, rope, kept = embeds, rope_table(self.config, positions, bf16=False), []
        for i, layer_past in enumerate(past):
            x, kv = body_layer(self.config, x, self.layer_weights(i), rope, layer_past, visible)
            kept.append(kv)
        return rms_norm(x, self.weight(FINAL_NORM), self.config.rms_norm_eps), kept

    def semantic_logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] -> [..., V]."""
        return hidden @ self.weight(SEMANTIC_HEAD).t()

    def residual_decoder(self, rounds: int) -> AxialDecoder | ChainDecoder:
        """A fresh residual decoder; `rounds` matters to the chain only."""
        config = self.config.residual
        if isinstance(config, AxialConfig):
            return AxialDecoder(config, self.residual_weights)
        return ChainDecoder(config, self.residual_weights, rounds)

    def denoise(self, past: list[KV], recipe: Recipe, choose: Callable[[Tensor], Tensor]) -> Block:
        """Fill the semantic ids of the block after `past`, which stays as it is."""
        ids, rounds = torch.full((recipe.block_size,), MASK_ID), []
        for step in range(recipe.steps):
            hidden, _ = self.hidden_states(self.embed_audio(semantic_only(ids)), past)
            logits = self.semantic_logits(hidden).index_fill(-1, torch.tensor([MASK_ID]), -math.inf)
            chosen = choose(logits)
            confidence = confidence_of(logits, chosen)
            keep = still_masked(recipe.block_size, step, recipe.steps)
            ids = reveal(ids, MASK_ID, chosen, confidence, keep, recipe.threshold)
            rounds.append((ids, chosen, confidence))
            if not (ids == MASK_ID).any():
                break
        return Block(*map(torch.stack, zip(*rounds)), ids, *close_block(ids))

    def finish(self, block: Block, past: list[KV], residual: AxialDecoder | ChainDecoder, recipe: Recipe,
               choose: Callable[[Tensor], Tensor]) -> list[KV]:  # fmt: skip
        """Fill the residual codes of a block; returns the past of the next one.

        The whole block, END and PAD included, makes the states; only the speech is decoded. Later blocks see all codes of
        this one, or (`context_mode` "semantic") what this pass saw.
        """
        block.hidden, seen = self.hidden_states(self.embed_audio(semantic_only(block.semantic)), past)
        block.codes = torch.empty(NUM_CODEBOOKS, 0, dtype=torch.int64)
        if block.speech:
            block.codes = residual.decode(block.hidden[: block.speech], block.semantic[: block.speech], choose)
        if recipe.context_mode == "full" and block.speech == recipe.block_size:
            _, seen = self.hidden_states(self.embed_audio(block.codes), past)
        return seen

    @torch.no_grad()
    def generate(self, ids: list[int], recipe: Recipe, max_blocks: int, ref_codes: Tensor | None = None,
                 choose: Callable[[Tensor], Tensor] = greedy,
                 choose_residual: Callable[[Tensor], Tensor] = greedy) -> Speech:  # fmt: skip
        """Speak after the text `ids` and the reference frames [N, P]; `choose` turns logits [S, ids] into ids [S]."""
        if max_blocks < 1:
            raise ValueError(f"max_blocks is {max_blocks}; it must be at least 1")
        ref_codes = torch.empty(NUM_CODEBOOKS, 0, dtype=torch.int64) if ref_codes is None else ref_codes
        self.check_length(len(ids) + ref_codes.shape[1] + max_blocks * recipe.block_size)
        hidden, past = self.hidden_states(torch.cat([self.embed_text(torch.tensor(ids)), self.embed_audio(ref_codes)]))
        residual, prompt_hidden = self.residual_decoder(recipe.residual_rounds), hidden[len(ids) :]
        residual.prime(prompt_hidden, ref_codes)
        blocks, ended = [], False
        while not ended and len(blocks) < max_blocks:
            blocks.append(self.denoise(past, recipe, choose))
            past = self.finish(blocks[-1], past, residual, recipe, choose_residual)
            ended = blocks[-1].speech < recipe.block_size
        codes = torch.cat([block.codes for block in blocks], dim=1)
        return Speech(codes, blocks, prompt_hidden, "end" if ended else "max_blocks")

    def check_length(self, positions: int) -> None:
        limit = self.config.max_position_embeddings
        if positions > limit:
            raise ValueError(f"context and blocks take up to {positions} positions; the model has {limit}")
