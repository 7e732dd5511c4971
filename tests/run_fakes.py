"""Stand-ins for a build: a manifest with odd sizes, sessions that compute what a test wants, a byte-level tokenizer.

The sizes are deliberately not the real model's, so that a number typed into voxport/run shows up as a failure.
"""

import ctypes
import dataclasses
import math

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from voxport import manifest as m
from voxport.run.session import Engine, Graph, Parts

N, V, HOP, D, RATE = 3, 10, 7, 4, 1000  # codebooks, ids, samples a frame, hidden size, Hz
CONTROL = ("<|emotion:elation|>", "<|emotion:anger|>", "<|prosody:pause|>", "<|prosody:long_pause|>", "<|sfx:laughter|>")
STRUCTURE = ("<|tts|>", "<|text|>", "<|audio|>", "<|ref_audio|>", "<|ref_text|>", "<|im_end|>", "<tool_call>")
ONNX_TYPES = {"float32": "tensor(float)", "float16": "tensor(float16)", "int64": "tensor(int64)"}
REAL_AUDIO = m.Audio(num_codebooks=8, vocab_size=1026, codebook_size=1024, boc_id=1024, eoc_id=1025)


def make_tokenizer() -> Tokenizer:
    """One id a byte, then the control and structural tokens, as in the real tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in (*CONTROL, *STRUCTURE)])
    return tokenizer


def make_manifest(**changes) -> m.Manifest:
    """A manifest of the stand-in; `changes` replace whole sections."""
    ids = {token: 256 + i for i, token in enumerate((*CONTROL, *STRUCTURE))}
    whole = m.Manifest(
        schema_version=m.SCHEMA_VERSION,
        family=m.HIGGS,
        created="2026-01-01T00:00:00Z",
        target=m.Target("cpu", "fp32"),
        source=m.Source("stand-in", None, "/nowhere", "0" * 64),
        licence=m.Licence("none", None),
        tools={},
        recipe={},
        dims=m.Dims(D, 300, 2, 2, 1, D, 8, 512),
        audio=m.Audio(N, V, V - 2, V - 2, V - 1),
        codec=m.Codec(RATE, HOP, 100, 2),
        tokens=m.Tokens(
            *(ids[token] for token in ("<|tts|>", "<|text|>", "<|audio|>", "<|ref_audio|>", "<|ref_text|>")), -100
        ),
        control_tags={token: ids[token] for token in CONTROL},
        structural_tokens={token: ids[token] for token in STRUCTURE},
        sampling=m.Sampling(0.8, 0.8, 4, 1e-5),
        limits=m.Limits(200, 100, 0.5, 2.0, 12, 20, 4, 10, 15),
        kv_cache=m.KVCache(
            "float32", "past_key_values.{}.key", "past_key_values.{}.value", "present.{}.key", "present.{}.value"
        ),
        parts={
            name: m.Part(f"{name}.onnx", "fp32", {f"{name}.onnx": m.FileRecord(1000, "0" * 64)}, [], []) for name in PARTS
        },
        files={},
    )
    return dataclasses.replace(whole, **changes)


class Value:
    """What a session says of one input or output."""

    def __init__(self, name, dtype):
        self.name, self.type = name, ONNX_TYPES[dtype]


class FakeSession:
    """A session that calls `compute(feeds) -> {output: array}`; records the feeds."""

    def __init__(self, inputs, outputs, compute, provider="CPUExecutionProvider"):
        self.inputs, self.outputs, self.compute, self.provider, self.seen = inputs, outputs, compute, provider, []

    def get_inputs(self):
        return [Value(*item) for item in self.inputs.items()]

    def get_outputs(self):
        return [Value(*item) for item in self.outputs.items()]

    def get_providers(self):
        return [self.provider, "CPUExecutionProvider"]

    def run(self, names, feeds):
        for name, value in feeds.items():
            assert str(value.dtype) == self.inputs[name], f"{name} was fed as {value.dtype}"
        self.seen.append(dict(feeds))
        made = self.compute(feeds)
        return [made[name] for name in names or self.outputs]

    def io_binding(self):
        return FakeBinding()

    def run_with_iobinding(self, binding):
        made = dict(zip(binding.targets, self.run(list(binding.targets), binding.feeds), strict=True))
        for name, target in binding.targets.items():
            assert target.shape == made[name].shape, f"{name}: {made[name].shape} does not fit {target.shape}"
            target[...] = made[name]


class FakeBinding:
    """Inputs and outputs by their memory, as ONNX Runtime sees them: an output may lie where an input lies."""

    def __init__(self):
        self.feeds, self.targets = {}, {}

    def bind_cpu_input(self, name, value):
        self.feeds[name] = value

    def bind_input(self, name, device, device_id, dtype, shape, pointer):
        self.feeds[name] = at(pointer, shape, dtype)

    def bind_output(self, name, device, device_id, dtype, shape, pointer):
        self.targets[name] = at(pointer, shape, dtype)


def at(pointer, shape, dtype):
    """The array that lies at an address."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(pointer), dtype).reshape(shape)


def decoder_session(position_ids=False, hidden=None, provider="CPUExecutionProvider", dims=None):
    """A body whose hidden state is the running sum of all embeddings so far, kept in its cache: it must be carried on.

    Like GroupQueryAttention it counts each row's positions in the mask and writes behind them, into the memory it is given.
    """
    dims = dims or make_manifest().dims
    past = [f"past_key_values.{i}.{kind}" for i in range(dims.num_layers) for kind in ("key", "value")]
    present = [name.replace("past_key_values", "present") for name in past]
    shape = (dims.num_kv_heads, dims.head_dim)

    def compute(feeds):
        embeds, mask = feeds["inputs_embeds"], feeds["attention_mask"]
        batch, new, width = embeds.shape
        starts = mask.sum(axis=1) - new
        assert (mask == (np.arange(mask.shape[1]) < starts[:, None] + new)).all()
        assert new == 1 or batch == 1 or not starts.any()
        if position_ids:
            assert (feeds["position_ids"] == starts[:, None] + np.arange(new)).all()
        made = {name: feeds[old].copy() for old, name in zip(past, present, strict=True)}
        total = np.empty(embeds.shape, np.float32)
        for b, start in enumerate(starts):
            for name in present:
                made[name][b, :, start : start + new] = embeds[b].reshape(new, *shape).transpose(1, 0, 2)
            kept = made[present[0]][b, :, : start + new].transpose(1, 0, 2).reshape(-1, width)
            total[b] = kept.cumsum(axis=0)[start:]
        return made | {"hidden_states": np.full_like(total, hidden) if hidden is not None else total}

    inputs = {"inputs_embeds": "float32", "attention_mask": "int64"} | ({"position_ids": "int64"} if position_ids else {})
    inputs |= dict.fromkeys(past, "float32")
    outputs = dict.fromkeys(["hidden_states", *present], "float32")
    return FakeSession(inputs, outputs, compute, provider)


def embed_session(name, width=D):
    """Embeds an id or a row as ones scaled by the sum of its ids."""

    def compute(feeds):
        ids = feeds[name]
        total = ids if ids.ndim == 2 else ids.sum(-1)
        return {"inputs_embeds": np.repeat(total[..., None], width, -1).astype(np.float32)}

    return FakeSession({name: "int64"}, {"inputs_embeds": "float32"}, compute)


def heads_session(choose):
    """Row r wants the ids `choose(r)` [N]; everything else is 20 below."""
    made = iter(range(10**9))

    def compute(feeds):
        logits = np.zeros((len(feeds["hidden_states"]), 1, N, V), np.float32)
        for row in logits:
            row[0, np.arange(N), choose(next(made))] = 20
        return {"logits": logits}

    return FakeSession({"hidden_states": "float32"}, {"logits": "float32"}, compute)


def codec_session(wave=None):
    """A codec that plays each frame as HOP samples of its first code, with a ripple so that no sound is flat."""

    def compute(feeds):
        sound = np.repeat(feeds["codes"][:, :1].astype(np.float32) / V, HOP, axis=2)
        sound += np.arange(sound.size) % HOP % 2 / 100  # the same in every frame, wherever a window begins
        return {"waveform": sound if wave is None else wave(sound)}

    return FakeSession({"codes": "int64"}, {"waveform": "float32"}, compute)


def encoder_session(code=1):
    """An encoder that gives one code a HOP of samples."""

    def compute(feeds):
        return {"codes": np.full((1, N, feeds["waveform"].shape[2] // HOP), code, np.int64)}

    return FakeSession({"waveform": "float32"}, {"codes": "int64"}, compute)


PARTS = ("text_embed", "audio_embed", "llm_decoder", "audio_heads", "audio_tokenizer", "audio_encoder")


class FakeParts(Parts):
    """Parts that need no file; `loaded` lists what was asked for, in order."""

    def __init__(self, manifest, engine=None, **sessions):
        super().__init__("nowhere", manifest, engine or Engine("CPUExecutionProvider", 1))
        self.sessions = {
            "text_embed": embed_session("input_ids"),
            "audio_embed": embed_session("codes"),
            "llm_decoder": decoder_session(),
            "audio_heads": heads_session(lambda r: [r % (V - 2)] * N),
            "audio_tokenizer": codec_session(),
            "audio_encoder": encoder_session(),
        } | sessions

    @property
    def loaded(self):
        return list(self.providers())

    def _load(self, name):
        return Graph(self.sessions[name], name)
