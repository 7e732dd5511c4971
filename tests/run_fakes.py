"""Stand-ins for a build: a manifest with odd sizes, sessions that compute what a test wants, a byte-level tokenizer.

The sizes are deliberately not the real model's, so that a number typed into voxport/run shows up as a failure.
"""

import dataclasses

import numpy as np
import onnxruntime as ort
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from voxport import manifest as m
from voxport.run.session import Engine, Graph

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
        self.seen.append(feeds)
        made = self.compute(feeds)
        return [made[name] for name in names or self.outputs]

    def io_binding(self):
        return FakeBinding()

    def run_with_iobinding(self, binding):
        binding.made = self.run(binding.names, binding.feeds)


class FakeBinding:
    """Collects what is bound; outputs come back as OrtValues in the order of binding."""

    def __init__(self):
        self.feeds, self.names, self.made = {}, [], []

    def bind_cpu_input(self, name, value):
        self.feeds[name] = value

    def bind_ortvalue_input(self, name, value):
        self.feeds[name] = value.numpy()

    def bind_output(self, name, device):
        self.names.append(name)

    def get_outputs(self):
        return [ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value)) for value in self.made]


def decoder_session(position_ids=False, hidden=None, provider="CPUExecutionProvider", dims=None):
    """A body whose hidden state is the running sum of all embeddings so far, kept in its cache: it must be carried on."""
    dims = dims or make_manifest().dims
    past = [f"past_key_values.{i}.{kind}" for i in range(dims.num_layers) for kind in ("key", "value")]
    present = [name.replace("past_key_values", "present") for name in past]
    shape = (dims.num_kv_heads, dims.head_dim)

    def compute(feeds):
        embeds, seen = feeds["inputs_embeds"], feeds[past[0]].shape[2]
        assert feeds["attention_mask"].shape == (1, seen + embeds.shape[1])
        if position_ids:
            assert feeds["position_ids"].tolist() == [list(range(seen, seen + embeds.shape[1]))]
        kept = embeds.reshape(1, -1, *shape).transpose(0, 2, 1, 3)
        made = {new: np.concatenate([feeds[old], kept], axis=2) for old, new in zip(past, present, strict=True)}
        total = made[present[0]].transpose(0, 2, 1, 3).reshape(1, -1, embeds.shape[2]).cumsum(axis=1)[:, seen:]
        return made | {"hidden_states": np.full_like(total, hidden) if hidden is not None else total}

    inputs = {"inputs_embeds": "float32", "attention_mask": "int64"} | ({"position_ids": "int64"} if position_ids else {})
    inputs |= {name: "float32" for name in past}
    outputs = {"hidden_states": "float32"} | {name: "float32" for name in present}
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
        logits = np.zeros((1, 1, N, V), np.float32)
        logits[0, 0, np.arange(N), choose(next(made))] = 20
        return {"logits": logits}

    return FakeSession({"hidden_states": "float32"}, {"logits": "float32"}, compute)


def codec_session(wave=None):
    """A codec that plays each frame as HOP samples of its first code, with a ripple so that no sound is flat."""

    def compute(feeds):
        sound = np.repeat(feeds["codes"][:, :1].astype(np.float32) / V, HOP, axis=2)
        sound += np.arange(sound.size) % 2 / 100
        return {"waveform": sound if wave is None else wave(sound)}

    return FakeSession({"codes": "int64"}, {"waveform": "float32"}, compute)


def encoder_session(code=1):
    """An encoder that gives one code a HOP of samples."""

    def compute(feeds):
        return {"codes": np.full((1, N, feeds["waveform"].shape[2] // HOP), code, np.int64)}

    return FakeSession({"waveform": "float32"}, {"codes": "int64"}, compute)


PARTS = ("text_embed", "audio_embed", "llm_decoder", "audio_heads", "audio_tokenizer", "audio_encoder")


class FakeParts:
    """Parts that need no file; `loaded` lists what was asked for, in order."""

    def __init__(self, **sessions):
        defaults = {
            "text_embed": embed_session("input_ids"),
            "audio_embed": embed_session("codes"),
            "llm_decoder": decoder_session(),
            "audio_heads": heads_session(lambda r: [r % (V - 2)] * N),
            "audio_tokenizer": codec_session(),
            "audio_encoder": encoder_session(),
        }
        self.graphs = {name: Graph(session, name) for name, session in (defaults | sessions).items()}
        self.loaded = []
        self.engine = Engine("CPUExecutionProvider", 1)

    def __getitem__(self, name):
        if name not in self.loaded:
            self.loaded.append(name)
        return self.graphs[name]

    def load(self, *names):
        for name in names:
            self[name]

    def providers(self):
        return {name: self.graphs[name].provider for name in self.loaded}
