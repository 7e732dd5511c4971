"""The Qwen3 body: a standalone Qwen3 checkpoint, tensor by tensor, then onnxruntime-genai's ModelBuilder.

ModelBuilder cannot read the speech checkpoint and would quantise it in memory. So each layer is written as one shard of a plain
Qwen3 checkpoint, already rounded when the target is int4, and only the rounded weights are ever held together.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx.external_data_helper import ExternalDataInfo
from safetensors import safe_open
from safetensors.torch import save_file

from _ref.higgs import FINAL_NORM, LAYER, QWEN3_PREFIXES, TEXT_EMBEDDING, HiggsConfig, body_shapes, rope_table
from voxport.build.checkpoint import Checkpoint
from voxport.build.quantise import BlockFormat, QuantisedMatrix, dequantise, quantise
from voxport.build.quiet import quiet
from voxport.errors import UserError, WorkError
from voxport.files import read_json, write_json
from voxport.progress import bar

DECODER = "llm_decoder"
STAMP = "extracted.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
ROPE_TOLERANCE = 2.0**-8  # one step of bf16 just below 1: rounding moves a table entry by half of it, another theta by ~1


def extract_qwen3(checkpoint: Checkpoint, folder: Path, form: BlockFormat | None) -> None:
    """Write a standalone Qwen3 checkpoint into `folder`; `form` rounds every projection of the layers, None keeps bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    groups = [f"layer {i}" for i in range(checkpoint.config.num_layers)]
    with bar(len(groups) + 1, "extract", "shard") as progress:
        for i, group in enumerate(groups):
            names = [n for n in body_shapes(checkpoint.config) if n.startswith(LAYER.format(i))]
            weight_map |= _write_shard(checkpoint, names, folder / f"layer-{i:03}.safetensors", form)
            progress.set_postfix_str(group)
            progress.update()
        ends = [FINAL_NORM] if form else [FINAL_NORM, TEXT_EMBEDDING]
        weight_map |= _write_shard(checkpoint, ends, folder / "ends.safetensors", None)
        progress.update()
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    write_json(folder / "config.json", qwen3_config(checkpoint, form))
    for name in TOKENIZER_FILES:
        shutil.copyfile(checkpoint.folder / name, folder / name)
    write_json(folder / STAMP, _stamp(checkpoint, form))


def _stamp(checkpoint: Checkpoint, form: BlockFormat | None) -> dict:
    return {"fingerprint": checkpoint.fingerprint(), "format": asdict(form) if form else None}


def check_extracted(checkpoint: Checkpoint, folder: Path, form: BlockFormat | None) -> None:
    """UserError unless `folder` holds a finished extraction of this checkpoint in this format."""
    if not (folder / STAMP).is_file():
        raise UserError(f"{folder} holds no finished extraction; run once with --keep-intermediate and without --skip-extract")
    if read_json(folder / STAMP, "extraction") != _stamp(checkpoint, form):
        raise UserError(f"{folder} was extracted from another checkpoint or recipe; run without --skip-extract")


def _write_shard(checkpoint: Checkpoint, names: list[str], path: Path, form: BlockFormat | None) -> dict[str, str]:
    tensors = {}
    for name in names:
        plain, weight = qwen3_name(name), checkpoint[name]
        if form is not None and plain.endswith("_proj.weight"):
            matrix = quantise(weight, form)
            tensors |= {plain.removesuffix("weight") + part: t for part, t in vars(matrix).items()}
        else:
            tensors[plain] = weight
    save_file(tensors, path, metadata={"format": "pt"})
    return dict.fromkeys(tensors, path.name)


def qwen3_name(name: str) -> str:
    """Checkpoint tensor name -> its name in a plain Qwen3 checkpoint."""
    for prefix, plain in QWEN3_PREFIXES.items():
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    raise KeyError(name)


def checkpoint_name(plain: str) -> str:
    """Inverse of `qwen3_name`."""
    for prefix, start in QWEN3_PREFIXES.items():
        if plain.startswith(start):
            return prefix + plain.removeprefix(start)
    raise KeyError(plain)


def qwen3_config(checkpoint: Checkpoint, form: BlockFormat | None) -> dict:
    """config.json of the standalone checkpoint: the text config with theta spelled both ways and, if rounded, how."""
    text = read_json(checkpoint.folder / "config.json", "checkpoint")["text_config"]
    theta = checkpoint.config.rope_theta
    config = text | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
    }
    if form is not None:
        config["quantization_config"] = {
            "quant_method": "olive",
            "bits": form.bits,
            "group_size": form.block_size,
            "symmetric": form.symmetric,
            "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
            "overrides": {},
        }
    return config


def build_decoder(standalone: Path, out: Path, config: HiggsConfig, device: str, precision: str,
                  form: BlockFormat | None, rope: str) -> Path:  # fmt: skip
    """Run ModelBuilder on `standalone`; writes `out`/llm_decoder.onnx with its data, and genai_config.json. Returns the graph.

    WorkError carries the last lines of ModelBuilder's log.
    """
    # Norms of queries and keys stay nodes of their own: fused into the attention they would run on CUDA only, and no build
    # could be compared with the CPU.
    options = ["exclude_embeds=true", "exclude_lm_head=true", f"filename={DECODER}.onnx", "fuse_qk_norm_gqa=false"]
    if form is not None:
        options += [f"accuracy_level={form.accuracy_level}", f"block_size={form.block_size}"]
        options += [f"is_symmetric={str(form.symmetric).lower()}"]
    # ONNX Runtime has no float32 GroupQueryAttention on CUDA, so that target gets the CPU's graph and attends on the CPU.
    provider = "cpu" if precision == "fp32" else device
    out.mkdir(parents=True, exist_ok=True)
    arguments = ("", str(standalone), str(out), precision, provider, str(out / "cache"))
    with quiet(f"{DECODER}: ModelBuilder"):
        from onnxruntime_genai.models.builder import create_model, parse_extra_options

        create_model(*arguments, **parse_extra_options(*arguments, options))
    graph = out / f"{DECODER}.onnx"
    set_rope_tables(graph, config, rope)
    return graph


def set_rope_tables(graph: Path, config: HiggsConfig, rope: str) -> None:
    """Round the graph's cos and sin tables to bf16 values in place (`rope` bf16), as the reference does, or keep them (exact).

    Either way they are compared with the closed form first, so that a wrong theta cannot pass. WorkError if they differ.
    """
    model = onnx.load(graph, load_external_data=False)
    positions = torch.arange(config.max_position_embeddings)
    wanted = dict(zip(("cos_cache", "sin_cache"), rope_table(config, positions, bf16=False)))
    tables = {t.name: t for t in model.graph.initializer if t.name in wanted}
    if tables.keys() != wanted.keys():
        raise WorkError(f"{DECODER}: rotary tables cos_cache and sin_cache not found; this ModelBuilder version is unknown")
    for name, tensor in tables.items():
        info = ExternalDataInfo(tensor)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        with open(graph.with_name(info.location), "r+b") as file:
            file.seek(info.offset)
            found = np.frombuffer(file.read(info.length), dtype).astype(np.float32).reshape(wanted[name].shape)
            if np.abs(found - wanted[name].numpy()).max() > ROPE_TOLERANCE:
                raise WorkError(f"{DECODER}: {name} does not belong to theta {config.rope_theta}")
            if rope == "bf16":
                file.seek(info.offset)
                file.write(wanted[name].bfloat16().float().numpy().astype(dtype).tobytes())


@dataclass(frozen=True)
class StandaloneWeights(Mapping):
    """The weights that a decoder built from this standalone checkpoint computes with, by checkpoint name, one at a time."""

    folder: Path
    form: BlockFormat | None

    def __getitem__(self, name: str) -> torch.Tensor:
        plain = qwen3_name(name)
        stem = plain.removesuffix("weight")
        if plain in self._files:
            return self._read(plain)
        return dequantise(QuantisedMatrix(*(self._read(stem + part) for part in ("qweight", "scales", "qzeros"))), self.form)

    def __contains__(self, name: object) -> bool:
        return name in set(self)

    def __iter__(self) -> Iterator[str]:
        plain = {f.removesuffix("qweight") + "weight" for f in self._files if f.endswith("weight")}
        return iter(sorted(checkpoint_name(p) for p in plain))

    def __len__(self) -> int:
        return sum(f.endswith("weight") for f in self._files)

    @functools.cached_property
    def _files(self) -> dict[str, str]:
        return read_json(self.folder / "model.safetensors.index.json", "standalone index")["weight_map"]

    def _read(self, plain: str) -> torch.Tensor:
        with safe_open(self.folder / self._files[plain], framework="pt") as file:
            return file.get_tensor(plain)
