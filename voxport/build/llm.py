"""The Qwen3 body: a standalone Qwen3 checkpoint, tensor by tensor, then onnxruntime-genai's ModelBuilder.

ModelBuilder cannot read the speech checkpoint and would quantise it in memory. So each layer is written as one shard of a plain
Qwen3 checkpoint, already rounded when the target is int4, and only the rounded weights are ever held together.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx.external_data_helper import ExternalDataInfo
from safetensors.torch import save_file
from tqdm import tqdm

from _ref.higgs import FINAL_NORM, LAYER, QWEN3_PREFIXES, TEXT_EMBEDDING
from _ref.qwen3 import Body, layer_shapes, rope_table
from voxport.build.checkpoint import Checkpoint
from voxport.build.mapped import mapped_builder, read_tensor
from voxport.build.quantise import BlockFormat, QuantisedMatrix, dequantise, quantise
from voxport.build.quiet import quiet
from voxport.errors import UserError, WorkError
from voxport.files import read_json, write_json
from voxport.progress import bar

DECODER = "llm_decoder"
STAMP = "extracted.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
ROPE_TOLERANCE = 2.0**-8  # one step of bf16 just below 1: rounding moves a table entry by half of it, another theta by ~1


@dataclass(frozen=True)
class BodyNames:
    """Where the checkpoints of a family keep their Qwen3 body: names of its tensors (`layer` over the layer number), what their
    prefixes are in a plain Qwen3 checkpoint, and the section of config.json."""

    layer: str
    final_norm: str
    text_embedding: str
    prefixes: Mapping[str, str]
    section: str

    def of_layer(self, config: Body, i: int) -> list[str]:
        """Names of the tensors of one layer."""
        return [self.layer.format(i) + name for name in layer_shapes(config)]


HIGGS_NAMES = BodyNames(LAYER, FINAL_NORM, TEXT_EMBEDDING, QWEN3_PREFIXES, "text_config")


def extract_qwen3(checkpoint: Checkpoint, folder: Path, form: BlockFormat | None, body: BodyNames = HIGGS_NAMES) -> None:
    """Write a standalone Qwen3 checkpoint into `folder`; `form` rounds every projection of the layers, None keeps bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    groups = [f"layer {i}" for i in range(checkpoint.config.num_layers)]
    with bar(len(groups) + 1, f"{DECODER}: round" if form else f"{DECODER}: extract", "shard") as progress:
        for i, group in enumerate(groups):
            names = body.of_layer(checkpoint.config, i)
            weight_map |= _write_shard(checkpoint, names, folder / f"layer-{i:03}.safetensors", form, body)
            progress.set_postfix_str(group)
            progress.update()
        ends = [body.final_norm] if form else [body.final_norm, body.text_embedding]
        weight_map |= _write_shard(checkpoint, ends, folder / "ends.safetensors", None, body)
        progress.update()
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    write_json(folder / "config.json", qwen3_config(checkpoint, form, body))
    for name in TOKENIZER_FILES:
        shutil.copyfile(checkpoint.folder / name, folder / name)
    write_json(folder / STAMP, _stamp(checkpoint, form))


def _stamp(checkpoint: Checkpoint, form: BlockFormat | None) -> dict:
    return {"fingerprint": checkpoint.fingerprint(), "format": form.record() if form else None}


def check_extracted(checkpoint: Checkpoint, folder: Path, form: BlockFormat | None) -> None:
    """UserError unless `folder` holds a finished extraction of this checkpoint in this format."""
    if not (folder / STAMP).is_file():
        raise UserError(f"{folder} holds no finished extraction; run once with --keep-intermediate and without --skip-extract")
    if read_json(folder / STAMP, "extraction") != _stamp(checkpoint, form):
        raise UserError(f"{folder} was extracted from another checkpoint or recipe; run without --skip-extract")


def _write_shard(checkpoint: Checkpoint, names: list[str], path: Path, form: BlockFormat | None,
                 body: BodyNames) -> dict[str, str]:  # fmt: skip
    tensors = {}
    for name in names:
        plain, weight = qwen3_name(name, body), checkpoint[name]
        if form is not None and plain.endswith("_proj.weight"):
            matrix = quantise(weight, form.of(plain))
            tensors |= {plain.removesuffix("weight") + part: t for part, t in vars(matrix).items()}
        else:
            tensors[plain] = weight
    save_file(tensors, path, metadata={"format": "pt"})
    return dict.fromkeys(tensors, path.name)


def qwen3_name(name: str, body: BodyNames = HIGGS_NAMES) -> str:
    """Checkpoint tensor name -> its name in a plain Qwen3 checkpoint."""
    for prefix, plain in body.prefixes.items():
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    raise KeyError(name)


def checkpoint_name(plain: str, body: BodyNames = HIGGS_NAMES) -> str:
    """Inverse of `qwen3_name`."""
    for prefix, start in body.prefixes.items():
        if plain.startswith(start):
            return prefix + plain.removeprefix(start)
    raise KeyError(plain)


def qwen3_config(checkpoint: Checkpoint, form: BlockFormat | None, body: BodyNames = HIGGS_NAMES) -> dict:
    """config.json of the standalone checkpoint: the text config with theta spelled both ways and, if rounded, how."""
    text = read_json(checkpoint.folder / "config.json", "checkpoint")[body.section]
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
            "overrides": wide_modules(checkpoint.config, form, body),
        }
    return config


def wide_modules(config: Body, form: BlockFormat, body: BodyNames = HIGGS_NAMES) -> dict[str, dict[str, int]]:
    """Modules whose bits differ from the recipe's, as Olive's config spells them."""
    names = [name for i in range(config.num_layers) for name in body.of_layer(config, i)]
    modules = [qwen3_name(name, body).removesuffix(".weight") for name in names if name.endswith("_proj.weight")]
    return {name: {"bits": form.of(name).bits} for name in modules if form.of(name).bits != form.bits}


def build_decoder(standalone: Path, out: Path, config: Body, device: str, precision: str,
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
    layers = bar(config.num_layers, f"{DECODER}: assemble", "layer")
    with layers as progress, quiet(f"{DECODER}: ModelBuilder", layer_watch(progress)):
        from onnxruntime_genai.models.builder import create_model, parse_extra_options

        with mapped_builder():
            create_model(*arguments, **parse_extra_options(*arguments, options))
    graph = out / f"{DECODER}.onnx"
    set_rope_tables(graph, config, rope)
    return graph


def layer_watch(progress: tqdm) -> Callable[[str], None]:
    """Move a bar by what ModelBuilder says."""

    def watch(text: str) -> None:
        if text.startswith("Reading layer "):
            progress.set_postfix_str(text.strip().removeprefix("Reading "))
            progress.update()
        elif text.startswith("Saving"):
            progress.set_postfix_str("saving")

    return watch


def set_rope_tables(graph: Path, config: Body, rope: str) -> None:
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
    body: BodyNames = HIGGS_NAMES

    def __getitem__(self, name: str) -> torch.Tensor:
        plain = qwen3_name(name, self.body)
        stem = plain.removesuffix("weight")
        if plain in self._files:
            return self._read(plain)
        matrix = QuantisedMatrix(*(self._read(stem + part) for part in ("qweight", "scales", "qzeros")))
        return dequantise(matrix, self.form.of(plain))

    def __contains__(self, name: object) -> bool:
        return name in set(self)

    def __iter__(self) -> Iterator[str]:
        plain = {f.removesuffix("qweight").removesuffix("weight") + "weight" for f in self._files if f.endswith("weight")}
        return iter(sorted(checkpoint_name(p, self.body) for p in plain))

    def __len__(self) -> int:
        return sum(f.endswith("weight") for f in self._files)

    @functools.cached_property
    def _files(self) -> dict[str, str]:
        return read_json(self.folder / "model.safetensors.index.json", "standalone index")["weight_map"]

    def _read(self, plain: str) -> torch.Tensor:
        return read_tensor(self.folder / self._files[plain], plain)
