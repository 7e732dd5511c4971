"""Every OmniFish part in PyTorch, as Olive loads it; the decoder only where ModelBuilder does not make it.

For each part P: `get_P_model(model_path)`, `get_P_io_config(model)` and `get_P_dummy_inputs(model)`, where `model_path` is a
checkpoint folder and `model` Olive's handler. The arithmetic is `_ref`'s; the classes here only name inputs and outputs, with
the batch axis of one that `_ref` lacks. VOXPORT_FISH_CODEC names the folder of the codec, if it is none of the usual ones.

Shapes: S sequence, D hidden, T frames, N codebooks, P positions kept of earlier frames, M width of the residual decoder, L its
layers, H key heads, d head size, j levels kept of a block, C prompt tokens.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from _ref import omnifish as ref
from _ref.fish_codec import Carry, FishCodec
from voxport.build.omnifish_checkpoint import DECODE_ONLY, ENCODE_ONLY, OmniFishCheckpoint

CODEC = "VOXPORT_FISH_CODEC"
DUMMY = 3  # frames of an example; shapes stay symbolic, and the checks run others
RESIDUALS = ref.NUM_CODEBOOKS - 1
TABLES = [f"{table}_{name}" for table in ref.ID_TABLES for name in ("embeddings.weight", "proj.weight", "proj.bias")]


class Weights(nn.Module):
    """Tensors under their checkpoint names, held as parameters so that the exporter writes them as initialisers."""

    def __init__(self, tensors: dict[str, Tensor]):
        super().__init__()
        self.names = list(tensors)
        for name, tensor in tensors.items():
            self.register_parameter(name.replace(".", "/"), nn.Parameter(tensor, requires_grad=False))

    def read(self) -> dict[str, Tensor]:
        return {name: self._parameters[name.replace(".", "/")] for name in self.names}


class TextEmbed(Weights):
    """input_ids [1, S] int64, names of speakers and recordings included -> inputs_embeds [1, S, D]."""

    def __init__(self, tensors: dict[str, Tensor], lang_start: int, languages: dict[int, int]):
        super().__init__(tensors)
        self.lang_start, self.languages = lang_start, languages

    def forward(self, input_ids: Tensor) -> Tensor:
        return ref.text_embed(self.read(), input_ids[0], self.lang_start, self.languages)[None]


class AudioEmbed(nn.Module):
    """codes [1, N, T] int64 in 0..V-1 -> inputs_embeds [1, T, D]."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, codes: Tensor) -> Tensor:
        return ref.audio_embed(self.weight, codes[0])[None]


class SemanticHead(nn.Module):
    """hidden_states [1, S, D] after the final norm -> logits [1, S, V]."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.transposed = nn.Parameter(weight.t().contiguous(), requires_grad=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states @ self.transposed


class ExplicitBody(Weights):
    """inputs_embeds [1, S, D] and keys and values [1, H, P, d] of every layer -> hidden_states [1, S, D] and all of those."""

    def __init__(self, tensors: dict[str, Tensor], config: ref.OmniFishConfig):
        super().__init__(tensors)
        self.config = config

    def forward(self, inputs_embeds: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        model = ref.OmniFish(self.config, self.read(), ref.NO_TEXT, {})
        hidden, kept = model.hidden_states(inputs_embeds[0], [(k[0], v[0]) for k, v in zip(past[::2], past[1::2])])
        return hidden[None], *(part[None] for pair in kept for part in pair)


class AxialPrime(Weights):
    """h [1, P, D], codes [1, N, P] -> frm_k, frm_v [L, 9, H, P, d] and, with prompt attention, px_k, px_v [L, H, N * P, d]."""

    def __init__(self, tensors: dict[str, Tensor], config: ref.AxialConfig):
        super().__init__(tensors)
        self.config = config

    def forward(self, h: Tensor, codes: Tensor) -> tuple[Tensor, ...]:
        past = ref.axial_prime(self.config, self.read(), h[0], codes[0])
        kept = [torch.stack([layer.frames[i][:RESIDUALS] for layer in past]) for i in range(2)]
        if self.config.prompt_cross:
            kept += [torch.stack([layer.prompt[i] for layer in past]) for i in range(2)]
        return tuple(kept)


class AxialStep(Weights):
    """One level of a block: h [1, S, D], code [1, S], level [], position [1, S], and what is kept: lvl_k, lvl_v [L, S, H, j, d]
    of the block's lower levels, frm_k, frm_v [L, H, P, d] of this level's earlier frames, px_k, px_v [L, H, C, d] of the prompt.

    -> logits [1, S, 9, ids] of all heads, the longer lvl_k, lvl_v, and frm_k, frm_v [L, H, S, d] of these frames alone.
    """

    def __init__(self, tensors: dict[str, Tensor], config: ref.AxialConfig):
        super().__init__({name: tensor for name, tensor in tensors.items() if not name.startswith("heads.")})
        self.config = config
        heads = torch.cat([tensors[f"heads.{j}.weight"] for j in range(RESIDUALS)])
        self.heads = nn.Parameter(heads.t().contiguous(), requires_grad=False)

    def forward(self, h: Tensor, code: Tensor, level: Tensor, position: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        lvl_k, lvl_v, frm_k, frm_v, *prompt = kept
        past = [
            ref.AxialPast((lvl_k[n], lvl_v[n]), (frm_k[n][None], frm_v[n][None]), tuple(part[n] for part in prompt) or None)
            for n in range(self.config.num_layers)
        ]
        grid, past = ref.axial_run(self.config, self.read(), h[0], code, level[None], position[0], past)
        levels = [torch.stack([layer.levels[i] for layer in past]) for i in range(2)]
        frames = [torch.stack([layer.frames[i][0, :, frm_k.shape[2] :] for layer in past]) for i in range(2)]
        logits = (grid.transpose(0, 1) @ self.heads).view(1, -1, RESIDUALS, self.heads.shape[1] // RESIDUALS)
        return logits, *levels, *frames


class ChainLink(Weights):
    """One link of the chain: h [1, S, D or M], code [1, S], revealed [1, S], position [1, S], past_k, past_v [L, H, P, d]
    -> state [1, S, M], logits [1, S, ids], and k, v [L, H, S, d] of these frames alone."""

    def __init__(self, tensors: dict[str, Tensor], config: ref.ChainConfig):
        super().__init__(tensors)
        self.config = config

    def forward(self, h: Tensor, code: Tensor, revealed: Tensor, position: Tensor, past_k: Tensor, past_v: Tensor):
        past = [(past_k[n], past_v[n]) for n in range(self.config.num_layers)]
        state, logits, kept = ref.chain_link(self.config, self.read(), h[0], code[0], revealed[0], position[0], past)
        new = [torch.stack([kv[i][:, past_k.shape[2] :] for kv in kept]) for i in range(2)]
        return state[None], logits[None], *new


class CodecDecoder(nn.Module):
    """codes [1, N, T], position [] (frames before them) and what each layer kept of those -> waveform [1, 1, hop * T], kept."""

    def __init__(self, codec: FishCodec):
        super().__init__()
        del codec.encoder, codec.quantizer.pre_module, codec.quantizer.downsample
        self.codec = codec

    def forward(self, codes: Tensor, position: Tensor, *tails: Tensor) -> tuple[Tensor, ...]:
        carry = Carry(tails, position)
        return self.codec.decode(codes, carry), *carry.kept


class CodecEncoder(nn.Module):
    """waveform [1, 1, n] float32 -> codes [1, N, ceil(n / hop)] int64."""

    def __init__(self, codec: FishCodec):
        super().__init__()
        del codec.decoder, codec.quantizer.post_module, codec.quantizer.upsample
        self.codec = codec

    def forward(self, waveform: Tensor) -> Tensor:
        return self.codec.encode(waveform)


def _open(model_path: str) -> OmniFishCheckpoint:
    codec = os.environ.get(CODEC)
    return OmniFishCheckpoint.open(Path(model_path), Path(codec) if codec else None)


def _config(model) -> ref.OmniFishConfig:
    return _open(model.model_path).config


def _residual(checkpoint: OmniFishCheckpoint, prefix: str = "") -> dict[str, Tensor]:
    scoped = ref.scoped(checkpoint, ref.RESIDUAL_PREFIX + prefix)
    return {name: tensor.float() for name, tensor in scoped.items()}


def _io(inputs: dict[str, dict[int, str]], outputs: dict[str, dict[int, str]]) -> dict:
    """Names and symbolic axes; an output named like an input gets a name of its own."""
    axes = inputs | outputs
    return {"input_names": list(inputs), "output_names": list(outputs), "dynamic_axes": {n: a for n, a in axes.items() if a}}


def _ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def get_text_embed_model(model_path: str) -> nn.Module:
    checkpoint = _open(model_path)
    tensors = {name: checkpoint[name].float() for name in (ref.TEXT_EMBEDDING, *TABLES)}
    return TextEmbed(tensors, checkpoint.lang_start, checkpoint.languages).eval()


def get_text_embed_io_config(model) -> dict:
    return _io({"input_ids": {1: "sequence"}}, {"inputs_embeds": {1: "sequence"}})


def get_text_embed_dummy_inputs(model) -> dict[str, Tensor]:
    return {"input_ids": _ids(1, DUMMY)}


def get_audio_embed_model(model_path: str) -> nn.Module:
    return AudioEmbed(_open(model_path)[ref.AUDIO_EMBEDDING].float()).eval()


def get_audio_embed_io_config(model) -> dict:
    return _io({"codes": {2: "frames"}}, {"inputs_embeds": {1: "frames"}})


def get_audio_embed_dummy_inputs(model) -> dict[str, Tensor]:
    return {"codes": _ids(1, ref.NUM_CODEBOOKS, DUMMY)}


def get_semantic_head_model(model_path: str) -> nn.Module:
    return SemanticHead(_open(model_path)[ref.SEMANTIC_HEAD].float()).eval()


def get_semantic_head_io_config(model) -> dict:
    return _io({"hidden_states": {1: "sequence"}}, {"logits": {1: "sequence"}})


def get_semantic_head_dummy_inputs(model) -> dict[str, Tensor]:
    return {"hidden_states": torch.zeros(1, DUMMY, _config(model).hidden_size)}


def get_llm_decoder_model(model_path: str) -> nn.Module:
    checkpoint = _open(model_path)
    names = [name for name in checkpoint.config.shapes() if name.startswith("llm.") and name != ref.TEXT_EMBEDDING]
    return ExplicitBody({name: checkpoint[name].float() for name in names}, checkpoint.config).eval()


def get_llm_decoder_io_config(model) -> dict:
    pairs = [f"{i}.{kind}" for i in range(_config(model).num_layers) for kind in ("key", "value")]
    inputs = {"inputs_embeds": {1: "sequence"}} | {f"past_key_values.{pair}": {2: "past"} for pair in pairs}
    return _io(inputs, {"hidden_states": {1: "sequence"}} | {f"present.{pair}": {2: "positions"} for pair in pairs})


def get_llm_decoder_dummy_inputs(model) -> tuple[Tensor, ...]:
    config = _config(model)
    past = torch.zeros(1, config.num_kv_heads, 2, config.head_dim)
    return torch.zeros(1, DUMMY, config.hidden_size), *[past] * (2 * config.num_layers)


def get_mtp_prime_model(model_path: str) -> nn.Module:
    checkpoint = _open(model_path)
    return AxialPrime(_residual(checkpoint), checkpoint.config.residual).eval()


def get_mtp_prime_io_config(model) -> dict:
    kept = {"frm_k": {3: "frames"}, "frm_v": {3: "frames"}}
    if _config(model).residual.prompt_cross:
        kept |= {"px_k": {2: "tokens"}, "px_v": {2: "tokens"}}
    return _io({"h": {1: "frames"}, "codes": {2: "frames"}}, kept)


def get_mtp_prime_dummy_inputs(model) -> dict[str, Tensor]:
    return {"h": torch.zeros(1, DUMMY, _config(model).hidden_size), "codes": _ids(1, ref.NUM_CODEBOOKS, DUMMY)}


def get_mtp_step_model(model_path: str) -> nn.Module:
    checkpoint = _open(model_path)
    return AxialStep(_residual(checkpoint), checkpoint.config.residual).eval()


def get_mtp_step_io_config(model) -> dict:
    new = {1: "sequence"}
    inputs = {"h": new, "code": new, "level": {}, "position": new}
    inputs |= {f"lvl_{x}": {1: "sequence", 3: "levels"} for x in "kv"} | {f"frm_{x}": {2: "past"} for x in "kv"}
    if _config(model).residual.prompt_cross:
        inputs |= {f"px_{x}": {2: "tokens"} for x in "kv"}
    outputs = {"logits": new} | {f"lvl_{x}_out": {1: "sequence", 3: "more_levels"} for x in "kv"}
    return _io(inputs, outputs | {f"frm_{x}_new": {2: "sequence"} for x in "kv"})


def get_mtp_step_dummy_inputs(model) -> tuple[Tensor, ...]:
    config = _config(model)
    r = config.residual
    inputs = {"h": torch.zeros(1, DUMMY, config.hidden_size), "code": _ids(1, DUMMY)}
    inputs |= {"level": torch.tensor(1), "position": _ids(1, DUMMY)}
    inputs |= {f"lvl_{x}": torch.zeros(r.num_layers, DUMMY, r.num_kv_heads, 1, r.head_dim) for x in "kv"}
    inputs |= {f"frm_{x}": torch.zeros(r.num_layers, r.num_kv_heads, 2, r.head_dim) for x in "kv"}
    if r.prompt_cross:
        inputs |= {f"px_{x}": torch.zeros(r.num_layers, r.num_kv_heads, 4, r.head_dim) for x in "kv"}
    return tuple(inputs.values())  # by place: how many there are depends on the checkpoint


def _link_model(model_path: str, k: int) -> nn.Module:
    checkpoint = _open(model_path)
    return ChainLink(_residual(checkpoint, f"layers.{k}."), checkpoint.config.residual).eval()


def _link_io_config() -> dict:
    new, kept = {1: "sequence"}, {2: "past"}
    inputs = {"h": new, "code": new, "revealed": new, "position": new, "past_k": kept, "past_v": kept}
    return _io(inputs, {"state": new, "logits": new, "k_new": {2: "sequence"}, "v_new": {2: "sequence"}})


def _link_dummy_inputs(config: ref.OmniFishConfig, k: int) -> dict[str, Tensor]:
    r = config.residual
    past = {f"past_{x}": torch.zeros(r.num_layers, r.num_kv_heads, 2, r.head_dim) for x in "kv"}
    ids = {name: _ids(1, DUMMY) for name in ("code", "revealed", "position")}
    return {"h": torch.zeros(1, DUMMY, r.size if k else config.hidden_size)} | ids | past


for _k in range(RESIDUALS):  # Olive looks its functions up by name
    globals()[f"get_mtp_layer_{_k}_model"] = lambda model_path, k=_k: _link_model(model_path, k)
    globals()[f"get_mtp_layer_{_k}_io_config"] = lambda model: _link_io_config()
    globals()[f"get_mtp_layer_{_k}_dummy_inputs"] = lambda model, k=_k: _link_dummy_inputs(_config(model), k)


def get_codec_decoder_model(model_path: str) -> nn.Module:
    return CodecDecoder(_open(model_path).codec(without=ENCODE_ONLY)).eval()


def get_codec_decoder_io_config(model) -> dict:
    kept = [{3: "past"} if tail.ndim == 5 else {} for tail in _tails(model)]
    inputs = {"codes": {2: "frames"}, "position": {}} | {f"tail_{i}": axes for i, axes in enumerate(kept)}
    longer = {f"tail_{i}_out": {3: "longer_past"} if axes else {} for i, axes in enumerate(kept)}
    return _io(inputs, {"waveform": {2: "samples"}} | longer)


def get_codec_decoder_dummy_inputs(model) -> tuple[Tensor, ...]:
    return _ids(1, ref.NUM_CODEBOOKS, DUMMY), torch.tensor(DUMMY), *_tails(model)


def _tails(model) -> Sequence[Tensor]:
    """What the codec's layers keep after DUMMY frames, as zeros of the right shapes."""
    with torch.device("meta"):
        codec = FishCodec(_open(model.model_path).codec_config(), max_frames=DUMMY + 1)
    carry = Carry()
    with torch.no_grad():
        codec.to("meta").decode(_ids(1, ref.NUM_CODEBOOKS, DUMMY).to("meta"), carry)
    return [torch.zeros(tail.shape) for tail in carry.kept]


def get_codec_encoder_model(model_path: str) -> nn.Module:
    return CodecEncoder(_open(model_path).codec(without=DECODE_ONLY)).eval()


def get_codec_encoder_io_config(model) -> dict:
    return _io({"waveform": {2: "samples"}}, {"codes": {2: "frames"}})


def get_codec_encoder_dummy_inputs(model) -> dict[str, Tensor]:
    return {"waveform": torch.zeros(1, 1, DUMMY * _open(model.model_path).codec_config().hop_length)}
