"""Builds of the golden OmniFish checkpoints, each made when a test first asks for it and kept for the run."""

import atexit
import dataclasses
import functools
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, shared_golden
from tokenizers import Tokenizer

from voxport.build import omnifish
from voxport.build.download import Found
from voxport.build.omnifish_checkpoint import OmniFishCheckpoint, read_side
from voxport.build.omnifish_parts import CODEC_PARTS
from voxport.manifest import Manifest, Sampling
from voxport.run.omnifish_blocks import Block, BlockWriter, Dice, Model
from voxport.run.omnifish_residual import make_residual
from voxport.run.omnifish_text import encode_prompt
from voxport.run.session import Engine, Parts
from voxport.run.speech import Stopwatch

LOCAL = ROOT / "tests/golden_omnifish"
FOLDERS = ("axial", "axial_px", "mtpdec")
CASES = ("mid_end", "boundary_end", "max_blocks", "ref_mid_end", "empty", "pad_first", "other_mode_ref", "other_mode_ids")
GREEDY = Sampling(0.0, 1.0, 0, 1e-5)


@functools.cache
def workspace() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="omnifish-builds-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def golden_folder(name: str) -> Path:
    for folder in (LOCAL / name, shared_golden() / "omnifish" / name):
        if (folder / "model.safetensors").is_file():
            return folder
    pytest.skip(f"golden omnifish/{name} is neither in the repository nor at {shared_golden()}; set VOXPORT_GOLDEN")


@functools.cache
def checkpoint(name: str) -> OmniFishCheckpoint:
    return OmniFishCheckpoint.open(golden_folder(name))


@functools.cache
def arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(golden_folder(name) / "expected.npz") as expected:
        return dict(expected)


@functools.cache
def facts(name: str) -> dict:
    return json.loads((golden_folder(name) / "expected.json").read_text(encoding="utf-8"))


def make_build(folder: Path, output: Path, precision: str, parts: tuple[str, ...] | None = None, attention: str = "gqa") -> Path:
    """Build a checkpoint in this process; all its parts unless some are named."""
    found, recipe = Found(str(folder), None, folder), omnifish.OmniFishRecipe("cpu", precision, attention=attention)
    opened = omnifish.open_checkpoint(found, recipe, LOCAL / "codec")
    builder = omnifish.open_build(opened, found, recipe, output, read_side(folder))
    with builder.folder:
        for name in builder.components if parts is None else parts:
            builder.build(name)
        builder.finish()
    return output


def built(name: str, precision: str = "fp32") -> Path:
    """A build; only those of the checkpoint in the repository have the codec's parts, which are the same for all, and a proof."""
    return _built(name, precision)


@functools.cache
def _built(name: str, precision: str) -> Path:
    folder, output = golden_folder(name), workspace() / f"{name}_{precision}"
    names = omnifish.part_names(checkpoint(name))
    if name == "axial_px" and precision != "fp32":
        shutil.copytree(built(name), output)  # the codec's parts serve on
    parts = None if name == "axial_px" else tuple(part for part in names if part not in CODEC_PARTS)
    return make_build(folder, output, precision, parts)


def explicit(name: str, precision: str = "fp32") -> Path:
    """The same build with its attention spelt out."""
    return _explicit(name, precision)


@functools.cache
def _explicit(name: str, precision: str) -> Path:
    output = workspace() / f"{name}_{precision}_explicit"
    shutil.copytree(built(name, precision), output)
    parts = tuple(part for part in omnifish.part_names(checkpoint(name)) if part not in CODEC_PARTS)
    return make_build(golden_folder(name), output, precision, parts, "explicit")


@functools.cache
def parts_of(folder: Path) -> Parts:
    return Parts(folder, Manifest.read(folder), Engine.choose("cpu", 1, False, "cpu"))


@functools.cache
def model_of(folder: Path) -> Model:
    parts = parts_of(folder)
    return Model(parts, parts.manifest)


def speak_case(name: str, case: dict, folder: Path | None = None) -> tuple[list[int], list[Block]]:
    """A golden case, greedily, on the graphs of a build (the float32 one): its prompt ids and blocks."""
    folder = built(name) if folder is None else folder
    model = model_of(folder)
    manifest = with_mode(model.manifest, case["context_mode"])
    model = dataclasses.replace(model, manifest=manifest)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    ids = encode_prompt(encode, case["prompt_text"], manifest.prompt.names, manifest.dims.text_vocab_size)
    codes = arrays(name)[f"e2e.{case['name']}.ref_codes"] if case["ref_frames"] else np.empty((10, 0), np.int64)
    hidden, cache = model.prefill(ids, codes)
    residual = make_residual(model.parts, manifest)
    residual.prime(hidden, codes)
    writer = BlockWriter(model, cache, residual, Dice(0, GREEDY, GREEDY), manifest.generation.steps, None, Stopwatch())
    blocks = [writer.write()]
    while blocks[-1].speech == manifest.generation.block_size and len(blocks) < case["max_blocks"]:
        blocks.append(writer.write())
    return ids, blocks


def with_mode(manifest, mode: str):
    return dataclasses.replace(manifest, generation=dataclasses.replace(manifest.generation, context_mode=mode))
