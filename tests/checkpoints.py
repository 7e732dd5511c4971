"""Checkpoints to build from: the golden tiny one, copied and bent into every layout that a reader may meet."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from conftest import GOLDEN, TINY, shared_golden
from safetensors.torch import load_file, save_file

from _ref.higgs import AUDIO_EMBEDDING, AUDIO_HEAD, CODEC_PREFIX, TEXT_EMBEDDING, TEXT_HEAD

CONFIG_FILES = ("config.json", "codec_config.json", "tokenizer.json", "tokenizer_config.json")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MASK_EMBED = CODEC_PREFIX + "semantic_model.masked_spec_embed"


def golden_copies(name: str) -> list[Path]:
    """The file `name` of the golden set: the copy in this repository, and the full set's where it is there."""
    return [path for path in (GOLDEN / name, shared_golden() / "higgs" / name) if path.is_file()]


def tiny_tensors() -> dict[str, torch.Tensor]:
    """Every tensor of the golden tiny checkpoint."""
    tensors = {}
    for path in sorted(TINY.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def split(tensors: Mapping[str, torch.Tensor], shards: int) -> dict[str, dict[str, torch.Tensor]]:
    """File name -> its tensors, dealt out in turn so that every kind of tensor is spread over the files."""
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    return {file: {n: tensors[n] for n in list(tensors)[i::shards]} for i, file in enumerate(names)}


def write_shards(folder: Path, files: Mapping[str, Mapping[str, torch.Tensor]], unlisted: tuple[str, ...] = ()) -> None:
    """Write each file and an index of all tensors but the `unlisted`."""
    for file, tensors in files.items():
        save_file(dict(tensors), folder / file)
    weight_map = {n: file for file, tensors in files.items() for n in tensors if n not in unlisted}
    write_index(folder, weight_map)


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict(weight_map)}), encoding="utf-8")


def copy_configs(folder: Path) -> Path:
    """Everything of the tiny checkpoint but its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in CONFIG_FILES:
        shutil.copyfile(TINY / name, folder / name)
    return folder


def write_checkpoint(folder: Path, tensors: Mapping[str, torch.Tensor] | None = None) -> Path:
    """The tiny checkpoint as a single file without an index, with `tensors` in place of its own."""
    copy_configs(folder)
    save_file(dict(tiny_tensors() if tensors is None else tensors), folder / SINGLE)
    return folder


def link_checkpoint(folder: Path) -> Path:
    """The tiny checkpoint with its weight files linked: for changing config files only."""
    copy_configs(folder)
    for path in (*TINY.glob("*.safetensors"), TINY / INDEX):
        (folder / path.name).symlink_to(path)
    return folder


def write_deep_checkpoint(folder: Path, layers: int) -> Path:
    """The tiny checkpoint with more layers, each of random weights as large as those of its first."""
    rng, tensors = torch.Generator().manual_seed(layers), {}
    for name, tensor in tiny_tensors().items():
        if not name.startswith("body.layers."):
            tensors[name] = tensor
        elif name.startswith("body.layers.0."):
            for i in range(layers):
                fresh = torch.randn(tensor.shape, generator=rng) * tensor.float().std() if "_proj" in name else tensor.clone()
                tensors[name.replace("layers.0.", f"layers.{i}.")] = fresh.to(tensor.dtype)
    write_checkpoint(folder, tensors)
    sizes = {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers, "max_window_layers": layers}
    edit_json(folder / "config.json", lambda config: config["text_config"].update(sizes))
    return folder


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    """Apply `change` to the JSON object in `path`."""
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    path.write_text(json.dumps(value), encoding="utf-8")


def use_variant(folder: Path, variant: str) -> Path:
    """Give a checkpoint another spelling of its config."""
    shutil.copyfile(TINY / "config_variants" / f"{variant}.json", folder / "config.json")
    return folder


def with_duplicates(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tied heads stored a second time, as in the published file."""
    return tensors | {TEXT_HEAD: tensors[TEXT_EMBEDDING].clone(), AUDIO_HEAD: tensors[AUDIO_EMBEDDING].clone()}


def untie(folder: Path) -> Path:
    """Say in the config that the audio head has weights of its own."""
    edit_json(folder / "config.json", lambda c: c["audio_encoder_config"].update(tie_word_embeddings=False))
    return folder


def own_head() -> torch.Tensor:
    """An audio head that is not the embedding."""
    embedding = tiny_tensors()[AUDIO_EMBEDDING]
    return torch.randn(embedding.shape, generator=torch.Generator().manual_seed(7)).to(embedding.dtype)


def drop_token(name: str) -> Callable[[dict], None]:
    """A change to tokenizer.json: an added token that is not there."""
    return lambda tokenizer: tokenizer.update(added_tokens=[t for t in tokenizer["added_tokens"] if t["content"] != name])
