"""Is a finished graph the part that it claims to be? Loaded, run at several shapes, and compared with `_ref`.

Tolerances are relative to the size of the expected output. float32: summation order, 1e-4 leaves two digits of room; float16:
its 2**-11 rounding, a few operations deep; rounded weights: the rounding step itself, 1/(2 * 2**(bits-1)) of the largest
weight of a block, which random signs average down.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch
from torch import Tensor

from _ref.higgs import AUDIO_EMBEDDING, AUDIO_HEAD, TEXT_EMBEDDING, Higgs, audio_embed, audio_head
from _ref.higgs_codec import HiggsCodec, load_codec
from voxport.build.checkpoint import Checkpoint
from voxport.build.parts import AUDIO_EMBED, AUDIO_ENCODER, AUDIO_HEADS, AUDIO_TOKENIZER, TEXT_EMBED
from voxport.errors import WorkError
from voxport.manifest import TensorSpec
from voxport.run.session import keep_unpacked

TOLERANCE = {"fp32": 1e-4, "fp16": 4e-3, "int8": 2e-2, "int4": 0.2}
# Against `_ref` on the weights that the graph holds. An int4 kernel that rounds activations to int8 too loses 0.001 in 3 layers
# of random weights and 0.006 in 36, one that saturates on old CPUs nearly all: as built it must only not be broken, and a copy
# without that rounding is held to fp16's bound.
DECODER_COSINE = {"fp32": 0.99999, "fp16": 0.999, "int4": 0.9}
ROUNDED = ("int4",)  # precisions of the decoder whose kernels may round activations
LAYER_NODE = re.compile(r"/model/layers\.(\d+)/")
PACKED_BYTES = 1 << 30  # of weights that the check may pack for the kernels
SEED = 0
NUMPY_NAMES = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(int64)": "int64", "tensor(int32)": "int32"}


class PartSession:
    """A graph on the CPU provider whose feeds are cast to the dtypes that it declares."""

    def __init__(self, graph: Path, edited: bytes | None = None, packed: bool = True):
        """`edited` is the graph to run in place of what the file holds; its data stay where the file's are.

        Unless `packed`, kernels compute from the mapped file and keep no second copy of the weights: slow, but without memory.
        """
        options = ort.SessionOptions()
        options.enable_cpu_mem_arena = False  # it grows by doubling: on large weights up to twice what is needed
        if not packed:
            keep_unpacked(options)
        if edited is not None:
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(graph.parent.resolve()))
        try:
            self.session = ort.InferenceSession(edited or str(graph), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise WorkError(f"{graph.name} does not load in ONNX Runtime: {str(error).splitlines()[0]}") from error
        self.dtypes = {i.name: NUMPY_NAMES[i.type] for i in self.session.get_inputs()}

    def run(self, **feeds) -> list[np.ndarray]:
        """Outputs in graph order; every feed may be a tensor or an array of any dtype."""
        return self.session.run(None, {n: np.asarray(v).astype(self.dtypes[n]) for n, v in feeds.items()})

    def specs(self) -> tuple[list[TensorSpec], list[TensorSpec]]:
        """Inputs and outputs as the manifest records them."""
        spec = lambda x: TensorSpec(x.name, NUMPY_NAMES[x.type], [d if d is not None else "?" for d in x.shape])
        return [spec(i) for i in self.session.get_inputs()], [spec(o) for o in self.session.get_outputs()]


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square of the difference over that of what was expected."""
    difference = found.astype(np.float64) - expected.astype(np.float64)
    return float(np.sqrt(np.mean(difference**2) / max(np.mean(expected.astype(np.float64) ** 2), 1e-30)))


def cosine(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Cosine over the last axis."""
    a, b = found.astype(np.float64), expected.astype(np.float64)
    return (a * b).sum(-1) / np.maximum(np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1), 1e-30)


def _close(name: str, precision: str, found: np.ndarray, expected: Tensor) -> None:
    expected = expected.numpy()
    if found.shape != expected.shape:
        raise WorkError(f"{name}: output has shape {found.shape}, {expected.shape} was expected")
    if not np.isfinite(found).all():
        raise WorkError(f"{name}: output has values that are not finite")
    error = relative_error(found, expected)
    if error > TOLERANCE[precision]:
        raise WorkError(f"{name}: output is off by {error:.2e} of its size, {TOLERANCE[precision]:.0e} is allowed at {precision}")


def check_text_embed(session: PartSession, precision: str, checkpoint: Checkpoint) -> None:
    table = checkpoint[TEXT_EMBEDDING]
    for batch, length in ((1, 1), (2, 17)):
        ids = torch.randint(table.shape[0], (batch, length), generator=_seeded())
        _close(TEXT_EMBED, precision, session.run(input_ids=ids)[0], table[ids].float())


def check_audio_embed(session: PartSession, precision: str, checkpoint: Checkpoint) -> None:
    config, weight = checkpoint.config, checkpoint[AUDIO_EMBEDDING].float()
    for batch, length in ((1, 1), (2, 33)):
        codes = torch.randint(config.audio_vocab_size, (batch, length, config.num_codebooks), generator=_seeded())
        _close(AUDIO_EMBED, precision, session.run(codes=codes)[0], audio_embed(weight, codes, config.audio_vocab_size))


def check_audio_heads(session: PartSession, precision: str, checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    weight = checkpoint[AUDIO_EMBEDDING if config.tied_audio_head else AUDIO_HEAD].float()
    for batch, length in ((1, 1), (2, 17)):
        hidden = torch.randn(batch, length, config.hidden_size, generator=_seeded())
        _close(AUDIO_HEADS, precision, session.run(hidden_states=hidden)[0], audio_head(weight, hidden, config.num_codebooks))


def check_audio_tokenizer(session: PartSession, precision: str, checkpoint: Checkpoint) -> None:
    codec = load_codec(checkpoint.codec_config, checkpoint.codec_tensors())
    for frames in (1, 2, 12):
        codes = random_codes(codec, frames)
        _close(AUDIO_TOKENIZER, precision, session.run(codes=codes)[0], codec.decode(codes))


def check_audio_encoder(session: PartSession, precision: str, checkpoint: Checkpoint) -> None:
    """Three lengths: a whole number of frames, one that pads the acoustic branch, one just past it."""
    codec = load_codec(checkpoint.codec_config, checkpoint.codec_tensors())
    second, hop = codec.config.sample_rate, codec.config.hop_length
    for samples in (second, second + hop // 2, second + hop - 1):
        waveform = 0.1 * torch.randn(1, 1, samples, generator=_seeded())
        found = session.run(waveform=waveform)[0]
        flips = unexplained_flips(codec, waveform, torch.from_numpy(found))
        if flips:
            raise WorkError(f"{AUDIO_ENCODER}: {flips} of {found.shape[-1]} frames of a {samples}-sample clip get other codes")


def unexplained_flips(codec: HiggsCodec, waveform: Tensor, found: Tensor, gap: float = 1e-4) -> int:
    """Frames whose codes [1, N, T] differ although the reference's choice was not a near tie.

    A frame is excused if at its first differing codebook both entries are equally near to within `gap` of the distance.
    """
    expected = codec.encode(waveform)
    if found.shape != expected.shape:
        return max(found.shape[-1], expected.shape[-1])
    residual, excused = codec.embed(waveform), torch.zeros(expected.shape[-1], dtype=torch.bool)
    wrong = torch.zeros_like(excused)
    for i, quantizer in enumerate(codec.quantizer.quantizers):
        z = quantizer.project_in(residual)[0]
        distance = lambda codes: (z - quantizer.codebook.embed[codes]).pow(2).sum(-1)
        ours, theirs = distance(expected[0, i]), distance(found[0, i])
        differs = (expected[0, i] != found[0, i]) & ~excused
        excused |= differs & ((theirs - ours).abs() <= gap * (1 + ours))
        wrong |= differs & ~excused
        residual = residual - quantizer.decode(expected[:, i])
    return int(wrong.sum())


def random_codes(codec: HiggsCodec, frames: int) -> Tensor:
    """codes [1, N, frames] int64."""
    return torch.randint(codec.config.codebook_size, (1, codec.config.num_codebooks, frames), generator=_seeded())


def check_decoder(graph: Path, precision: str, model: Higgs) -> PartSession:
    """Compare with `model`, which holds the rounded weights at int4. Returns a session of the graph.

    All weights are compared without rounded activations, and of a large graph unpacked. Then the kernels, as built: they are
    the same in every layer, so of a large graph the first layers do, for packing takes more memory than the weights themselves.
    """
    share = PACKED_BYTES / graph.with_name(graph.name + ".data").stat().st_size
    whole = share >= 1
    if precision in ROUNDED:
        compare_decoder(PartSession(graph, with_accuracy_level(graph, 0), packed=whole), "fp16", model)
        if not whole:
            shallow = replace(model, config=replace(model.config, num_layers=max(1, int(share * model.config.num_layers))))
            compare_decoder(PartSession(graph, first_layers(graph, shallow.config.num_layers)), precision, shallow)
    session = PartSession(graph, packed=whole)  # one session at a time: each maps all weights
    if whole or precision not in ROUNDED:
        compare_decoder(session, precision, model)
    return session


def first_layers(graph: Path, count: int) -> bytes:
    """The graph, without its data, with its first `count` layers only: the final norm reads what layer `count` would."""
    model = onnx.load(graph, load_external_data=False)
    nodes = list(model.graph.node)
    norm = next(node for node in nodes if "final_norm" in node.name)
    cut = next(node for node in nodes if node.name.startswith(f"/model/layers.{count}/input_layernorm/"))
    norm.input[0], norm.input[1] = cut.input[0], cut.input[1]
    layer = lambda node: int(match[1]) if (match := LAYER_NODE.match(node.name)) else -1
    kept = [node for node in nodes if layer(node) < count or node is norm]
    made, used = ({name for node in kept for name in names(node)} for names in (lambda n: n.output, lambda n: n.input))
    for field, names in ((model.graph.output, made), (model.graph.input, used), (model.graph.initializer, used)):
        _keep(field, [value for value in field if value.name in names])
    _keep(model.graph.node, kept)
    return model.SerializeToString()


def _keep(field, values: list) -> None:
    copies = [type(value).FromString(value.SerializeToString()) for value in values]
    del field[:]
    field.extend(copies)


def with_accuracy_level(graph: Path, level: int) -> bytes:
    """The graph, without its data, with MatMulNBits kernels that compute at `level`; 0 rounds no activations."""
    model = onnx.load(graph, load_external_data=False)
    for node in model.graph.node:
        for attribute in (a for a in node.attribute if a.name == "accuracy_level"):
            attribute.i = level
    return model.SerializeToString()


def compare_decoder(session: PartSession, precision: str, model: Higgs) -> None:
    """Eight positions in one pass and as seven plus one, against `model`."""
    config, length = model.config, 8
    embeds = torch.randn(length, config.hidden_size, generator=_seeded()) * model.tensors[AUDIO_EMBEDDING].float().std()
    expected = model.hidden_states(embeds).numpy()
    whole = decoder_states(session, config, embeds.numpy())
    stepped = decoder_states(session, config, embeds.numpy(), split=length - 1)
    for what, found in (("one pass", whole), ("with a cache", stepped)):
        if not np.isfinite(found).all() or not found.any():
            raise WorkError(f"llm_decoder: hidden states ({what}) are zero or not finite")
        worst = float(cosine(found, expected).min())
        if worst < DECODER_COSINE[precision]:
            raise WorkError(f"llm_decoder: hidden states ({what}) have cosine {worst:.5f} with the reference,"
                            f" {DECODER_COSINE[precision]} is needed at {precision}")  # fmt: skip


def decoder_states(session: PartSession, config, embeds: np.ndarray, split: int | None = None) -> np.ndarray:
    """Hidden states [S, D] of embeds [S, D], in one pass or in two that share the cache."""
    empty = np.zeros((1, config.num_kv_heads, 0, config.head_dim))
    past = {n: empty for n in session.dtypes if n.startswith("past_key_values.")}
    names = [o.name for o in session.session.get_outputs()]
    states = []
    for start, end in ((0, split or len(embeds)), (split or len(embeds), len(embeds))):
        if start == end:
            continue
        feeds = {"inputs_embeds": embeds[None, start:end], "attention_mask": np.ones((1, end)), **past}
        if "position_ids" in session.dtypes:
            feeds["position_ids"] = np.arange(start, end)[None]
        made = dict(zip(names, session.run(**{n: v for n, v in feeds.items() if n in session.dtypes})))
        past = {n: made[n.replace("past_key_values", "present")] for n in past}
        states.append(made["hidden_states"][0])
    return np.concatenate(states)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


CHECKS: dict[str, Callable[[PartSession, str, Checkpoint], None]] = {
    TEXT_EMBED: check_text_embed,
    AUDIO_EMBED: check_audio_embed,
    AUDIO_HEADS: check_audio_heads,
    AUDIO_TOKENIZER: check_audio_tokenizer,
    AUDIO_ENCODER: check_audio_encoder,
}
