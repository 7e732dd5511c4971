"""What building reads: the checkpoints of both families, their configs, indexes, weight files and tokenizers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from fuzz.mutate import mutate_bytes, mutate_json, mutate_safetensors
from voxport.build.checkpoint import Checkpoint, read_vocabulary
from voxport.build.download import Found
from voxport.build.omnifish import describe
from voxport.build.omnifish_checkpoint import OmniFishCheckpoint, read_recipe, read_side
from voxport.build.omnifish_workshop import OmniFishRecipe

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests/golden/higgs/ckpt_tiny"
AXIAL, CODEC = ROOT / "tests/golden_omnifish/axial_px", ROOT / "tests/golden_omnifish/codec"
KEPT = ".json", ".safetensors"


def lay_out(sources: Iterable[Path], folder: Path, changed: str, content: Callable[[Path], bytes]) -> None:
    """Link the files of a checkpoint into `folder`, all but the one that is `changed`."""
    folder.mkdir(exist_ok=True)
    for path in sources:
        if path.name == changed:
            (folder / changed).write_bytes(content(path))
        else:
            (folder / path.name).symlink_to(path)


def damage(rng: random.Random, path: Path) -> bytes:
    """The damaged content of one file of a checkpoint."""
    data = path.read_bytes()
    if rng.random() < 0.03:
        return data
    if path.suffix == ".json":
        return mutate_json(rng, json.loads(data)) if rng.random() < 0.9 else mutate_bytes(rng, data)
    return mutate_safetensors(rng, data)


class HiggsReader:
    """A Higgs checkpoint with damage in one file."""

    name, weight = "checkpoint of higgs_audio_v3", 1500

    def prepare(self) -> None:
        self.sources = [path for path in sorted(TINY.iterdir()) if path.suffix in KEPT and path.name != "expected.json"]
        self.whole = Checkpoint.open(TINY)

    def run(self, rng: random.Random, folder: Path) -> None:
        changed = rng.choice([path.name for path in self.sources if path.name != "tokenizer_config.json"])
        if changed == "tokenizer.json":  # one file less that links, since nothing else is read
            (folder / changed).write_bytes(damage(rng, TINY / changed))
            vocabulary = read_vocabulary(folder)
            assert all(type(i) is int and i >= 0 for i in (vocabulary.control_tags | vocabulary.structural).values())
            return
        lay_out(self.sources, folder, changed, lambda path: damage(rng, path))
        checkpoint = Checkpoint.open(folder)
        checkpoint.fingerprint()
        assert set(checkpoint) >= set(self.whole) - {name for name in self.whole if "masked_spec_embed" in name}
        assert all(path.parent == folder for path in checkpoint.files.values())
        for name in rng.sample(sorted(self.whole), 3):
            if name in checkpoint:
                assert checkpoint[name].shape == self.whole[name].shape


class OmniFishReader:
    """An OmniFish checkpoint with damage in one file, its settings and tokenizer included."""

    name, weight = "checkpoint of omnifish", 1500

    def prepare(self) -> None:
        self.sources = [path for path in sorted(AXIAL.iterdir()) if path.suffix in KEPT and path.name != "expected.json"]
        self.recipe = OmniFishRecipe("cpu", "fp32")
        describe(OmniFishCheckpoint.open(AXIAL, CODEC), read_side(AXIAL), Found("x", None, AXIAL), self.recipe)  # torch imports late

    def run(self, rng: random.Random, folder: Path) -> None:
        changed = rng.choice([path.name for path in self.sources if path.name != "tokenizer_config.json"])
        lay_out(self.sources, folder, changed, lambda path: damage(rng, path))
        checkpoint = OmniFishCheckpoint.open(folder, CODEC)
        side = read_side(folder)
        read_recipe(side, str(folder))
        manifest = describe(checkpoint, side, Found(str(folder), None, folder), self.recipe)
        manifest.write(folder)
        assert type(manifest).read(folder) == manifest


class FishCodecReader:
    """The codec of OmniFish with damage in its config or weights."""

    name, weight = "codec of omnifish", 500

    def prepare(self) -> None:
        self.sources = [CODEC / "codec.safetensors", CODEC / "codec_config.json"]
        OmniFishCheckpoint.open(AXIAL, CODEC).codec()

    def run(self, rng: random.Random, folder: Path) -> None:
        home = folder / "codec"
        lay_out(self.sources, home, rng.choice(self.sources).name, lambda path: damage(rng, path))
        checkpoint = OmniFishCheckpoint.open(AXIAL, home)
        checkpoint.codec_config()
        codec = checkpoint.codec()
        assert all(tensor.dtype == torch.float32 for tensor in codec.state_dict().values() if tensor.is_floating_point())


READERS = (HiggsReader(), OmniFishReader(), FishCodecReader())
