"""Checkpoints of both families with one thing wrong: each key, each kind of tensor, each way in which a weight file can lie.

Which keys matter is not listed here: the readers are watched while they read. Whatever is wrong is told by its name and its file
before anything is made; what no reader asks for is never looked at.
"""

import functools
import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoints import INDEX, SINGLE
from conftest import ROOT, TINY

from _ref.fish_codec import FishConfig
from _ref.higgs import HiggsConfig
from _ref.higgs_codec import CodecConfig
from _ref.omnifish import OmniFishConfig, Recipe
from voxport.build.checkpoint import Checkpoint
from voxport.build.download import Found
from voxport.build.folder import BuildFolder
from voxport.build.higgs import Recipe as HiggsRecipe
from voxport.build.higgs import open_build
from voxport.build.omnifish import open_build as open_omnifish_build
from voxport.build.omnifish_checkpoint import OmniFishCheckpoint, read_recipe, read_side
from voxport.build.omnifish_workshop import OmniFishRecipe
from voxport.errors import UserError

AXIAL, FISH = ROOT / "tests/golden_omnifish/axial_px", ROOT / "tests/golden_omnifish/codec"


def link(source: Path, folder: Path) -> Path:
    """A checkpoint of links, whose files can be replaced one by one."""
    folder.mkdir(exist_ok=True)
    for path in source.iterdir():
        if path.suffix in (".json", ".safetensors") and path.name != "expected.json":
            (folder / path.name).symlink_to(path)
    return folder


def replace(path: Path, content: bytes | str) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def refusal(work: Callable) -> str:
    with pytest.raises(UserError) as caught:
        work()
    assert caught.value.code == 2 and "\n" not in str(caught.value)
    return str(caught.value)


# Keys


class Watched(dict):
    """A JSON object that notes which keys were asked for, and whether they may be absent."""

    def __init__(self, value: dict, asked: dict, path: tuple = ()):
        super().__init__({k: Watched(v, asked, (*path, k)) if isinstance(v, dict) else v for k, v in value.items()})
        self.asked, self.path = asked, path

    def __getitem__(self, key):
        self.asked[(*self.path, key)] = True
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.asked.setdefault((*self.path, key), False)
        return super().get(key, default)


@functools.cache
def axial_shapes() -> dict:
    return {name: tuple(tensor.shape) for name, tensor in OmniFishCheckpoint.open(AXIAL).tensors.items()}


def open_higgs(folder: Path):
    return Checkpoint.open(folder).config


def open_codec(folder: Path):
    return Checkpoint.open(folder).codec_config


def open_omnifish(folder: Path):
    return OmniFishCheckpoint.open(folder).config


def open_fish(folder: Path):
    return OmniFishCheckpoint.open(AXIAL, folder).codec_config()


def open_side(folder: Path):
    return read_recipe(read_side(folder), str(folder))


READERS = {  # checkpoint, its file, who reads it, how it is opened
    "higgs": (TINY, "config.json", HiggsConfig.from_dict, open_higgs),
    "higgs codec": (TINY, "codec_config.json", CodecConfig.from_dict, open_codec),
    "omnifish": (AXIAL, "config.json", lambda data: OmniFishConfig.from_dict(data, axial_shapes()), open_omnifish),
    "fish codec": (FISH, "codec_config.json", FishConfig.from_dict, open_fish),
    "omnifish settings": (AXIAL, "omnifish.json", Recipe.from_dict, open_side),
}
NEVER = (None, "word", "7", [], [[]], {"a": 1}, -1, 0, 0.5, 10**30, 1e999, float("nan"), True, [1, "x"], [0], [-4], [1e999])
# Values of NEVER that a key may nevertheless have
ALLOWED = {
    "rope_theta": (None,), "rope_parameters": (None, {"a": 1}), "norm_eps": (0.5,), "layer_norm_eps": (0.5,), "rms_norm_eps": (0.5,),
    "tie_word_embeddings": (True,), "use_delay_pattern": (True,), "causal": (True,), "threshold": (None, 0, 0.5),
    "temperature": (0, 0.5), "mtp_temperature": (0, 0.5), "top_k": (0,), "mtp_top_k": (0,), "ctx_frames": (None,), "guidance_scale": (None, 0, []),
    "feat_proj_layer_norm": (True,), "generation": ({"a": 1},), "attention_bias": (None, 0, []),
    "use_sliding_window": (None, 0, []), "rope_scaling": (None, 0, []),
}  # fmt: skip


def keys_of(name: str) -> dict[tuple[str, ...], bool]:
    """Path of each key that is read -> whether it is needed."""
    source, file, read, _ = READERS[name]
    asked: dict = {}
    read(Watched(json.loads((source / file).read_text(encoding="utf-8")), asked))
    return asked


KEYS = [(name, path, needed) for name in READERS for path, needed in keys_of(name).items()]
KEY_IDS = [f"{name}: {'.'.join(path)}" for name, path, _ in KEYS]


def edited(name: str, tmp_path: Path, path: tuple[str, ...], change: Callable[[dict, str], None]) -> Path:
    """The checkpoint with one change to the object that holds the key."""
    source, file, _, _ = READERS[name]
    folder = link(source, tmp_path / "ckpt")
    holder = data = json.loads((source / file).read_text(encoding="utf-8"))
    for key in path[:-1]:
        holder = holder[key]
    change(holder, path[-1])
    replace(folder / file, json.dumps(data))
    return folder


def test_the_readers_were_watched():
    assert {name: len(keys_of(name)) for name in READERS} == {
        "higgs": 22, "higgs codec": 32, "omnifish": 18, "fish codec": 44, "omnifish settings": 10}  # fmt: skip


@pytest.mark.parametrize("name, path", [(name, path) for name, path, needed in KEYS if needed and path != ("steps",)],
                         ids=[key for key, (_, path, needed) in zip(KEY_IDS, KEYS) if needed and path != ("steps",)])  # fmt: skip
@pytest.mark.parametrize("new_name", [None, "{}_", "{}s"], ids=["removed", "renamed", "plural"])
def test_a_key_that_is_missing_is_named_with_its_file(name, path, new_name, tmp_path):
    def change(holder, key):
        held = holder.pop(key)
        if new_name:
            holder[new_name.format(key)] = held

    folder = edited(name, tmp_path, path, change)
    message = refusal(lambda: READERS[name][3](folder))
    assert path[-1] in message
    assert str(folder) in message and (READERS[name][1] in message or "model_type" in message)


@pytest.mark.parametrize("name, path, needed", KEYS, ids=KEY_IDS)
def test_a_key_of_another_type_or_range_is_named_with_its_file(name, path, needed, tmp_path):
    source, file, _, read = READERS[name]
    folder = edited(name, tmp_path, path, lambda holder, key: None)
    data = json.loads((source / file).read_text(encoding="utf-8"))
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    held = holder.get(path[-1])
    for value in NEVER:
        is_allowed = any(value is allowed or value == allowed and type(value) is type(allowed) for allowed in ALLOWED.get(path[-1], ()))
        if is_allowed or type(value) is type(held) and value == held:
            continue
        holder[path[-1]] = value
        replace(folder / file, json.dumps(data))
        message = refusal(lambda: read(folder))
        assert path[-1] in message, (value, message)
        assert file in message or str(folder) in message, (value, message)


@pytest.mark.parametrize("name", READERS)
def test_keys_that_nobody_reads_are_ignored(name, tmp_path):
    source, file, _, read = READERS[name]
    folder = link(source, tmp_path / "ckpt")
    data = json.loads((source / file).read_text(encoding="utf-8"))
    todo = [data]
    while todo:
        section = todo.pop()
        todo += [held for held in section.values() if isinstance(held, dict)]
        section |= {"a_later_invention": {"of": ["any", "kind", None]}, "": 10**30}
    replace(folder / file, json.dumps(data))
    assert read(folder) == read(link(source, tmp_path / "same"))


# Tensors


class Weights:
    """A safetensors file in the hand: its header as JSON, and its data."""

    def __init__(self, path: Path):
        content = path.read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        self.header, self.data = json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])

    def write(self, path: Path, header: dict | None = None) -> None:
        packed = json.dumps(self.header if header is None else header).encode()
        replace(path, struct.pack("<Q", len(packed)) + packed + bytes(self.data))

    def names(self) -> list[str]:
        return [name for name in self.header if name != "__metadata__"]

    def changed(self, name: str, **entry) -> dict:
        """The header with other values for one tensor."""
        return self.header | {name: self.header[name] | entry}


def kinds(names: list[str]) -> list[str]:
    """One tensor of each kind: layers and other numbered siblings are alike."""
    return list({re.sub(r"\.\d+\.", ".*.", name): name for name in sorted(names)}.values())


SHARDS = sorted(TINY.glob("*.safetensors"))
FAMILIES = {"higgs": (TINY, open_higgs), "omnifish": (AXIAL, open_omnifish), "fish codec": (FISH, lambda folder: load_fish(folder))}


def load_fish(folder: Path):
    return OmniFishCheckpoint.open(AXIAL, folder).codec()


@functools.cache
def weights_of(family: str) -> tuple[tuple[str, Weights], ...]:
    return tuple((path.name, Weights(path)) for path in sorted(FAMILIES[family][0].glob("*.safetensors")))


def every_kind(family: str) -> list[tuple[str, Weights, str]]:
    """File, its weights, and a tensor of each kind in it."""
    return [(file, weights, name) for file, weights in weights_of(family) for name in kinds(weights.names())]


NAN = b"\xc1\x7f"  # in bfloat16
OPTIONAL_TENSOR = "masked_spec_embed"  # a training matter, which no module holds


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tensor_of_each_kind_that_is_missing_or_of_another_shape_is_named_with_its_file(family, tmp_path):
    source, read = FAMILIES[family]
    folder, seen = link(source, tmp_path / "ckpt"), 0
    for file, weights, name in every_kind(family)[:: 3 if family == "fish codec" else 1]:  # whose codec is made whole each time
        if OPTIONAL_TENSOR in name:
            continue
        shape = weights.header[name]["shape"]
        stem = re.sub(r"(\.parametrizations\.weight)?\.\w+$", "", name)  # two tensors may make one kernel
        weights.write(folder / file, weights.changed(name, shape=[1, *shape] if seen % 2 else [int(np.prod(shape))]))
        if seen % 2 or len(shape) > 1:
            message = refusal(lambda: read(folder))
            assert stem in message and file in message, (name, message)
        weights.write(folder / file, {n + "_" * (n == name): entry for n, entry in weights.header.items()})
        message = refusal(lambda: read(folder))
        assert stem in message and str(folder) in message, (name, message)
        weights.write(folder / file)
        seen += 1
    read(folder)
    assert seen > 20


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("family", ["higgs", "omnifish", "fish codec"])
def test_a_weight_of_each_kind_that_is_no_number_is_named_with_its_file(family, value, tmp_path):
    source, _ = FAMILIES[family]
    folder = link(source, tmp_path / "ckpt")
    opened = {
        "higgs": lambda: Checkpoint.open(folder),
        "omnifish": lambda: OmniFishCheckpoint.open(folder, FISH),
        "fish codec": lambda: OmniFishCheckpoint.open(AXIAL, folder),
    }[family]
    rng = np.random.default_rng(1)
    for file, weights in weights_of(family):
        weights.write(folder / file)
    opened().check_finite()
    checkpoint, bits = opened(), {"BF16": {"nan": 0x7FC1, "inf": 0xFF80}, "F32": {"nan": 0x7FC00001, "inf": 0xFF800000}}
    for file, weights, name in every_kind(family):
        if OPTIONAL_TENSOR in name:
            continue
        entry = weights.header[name]
        kind = np.dtype({"BF16": "<u2", "F32": "<u4"}[entry["dtype"]])
        begin, end = entry["data_offsets"]
        place = begin + kind.itemsize * int(rng.integers((end - begin) // kind.itemsize))
        start = (folder / file).stat().st_size - len(weights.data)
        with open(folder / file, "r+b") as held:  # the checkpoint has the file mapped: what is written shows through
            held.seek(start + place)
            before = held.read(kind.itemsize)
            held.seek(start + place)
            held.write(kind.type(bits[entry["dtype"]][value]).tobytes())
            held.flush()
            message = refusal(checkpoint.check_finite)
            held.seek(start + place)
            held.write(before)
        assert name.removeprefix("generator.") in message and str(folder / file) in message
    checkpoint.check_finite()


def test_no_build_begins_with_a_weight_that_is_no_number(tmp_path):
    folder = link(TINY, tmp_path / "ckpt")
    weights = Weights(SHARDS[0])
    name = next(name for name in weights.names() if weights.header[name]["dtype"] == "BF16")
    begin = weights.header[name]["data_offsets"][0]
    weights.data[begin : begin + 2] = NAN
    weights.write(folder / SHARDS[0].name)
    checkpoint = Checkpoint.open(folder)
    message = refusal(lambda: open_build(checkpoint, Found("x", None, folder), HiggsRecipe("cpu", "fp32"), tmp_path / "out"))
    assert name in message and SHARDS[0].name in message and not (tmp_path / "out").exists()


def test_an_omnifish_build_does_not_begin_with_one_either(tmp_path):
    folder = link(FISH, tmp_path / "codec")
    weights = Weights(FISH / "codec.safetensors")
    name = next(name for name in weights.names() if weights.header[name]["dtype"] == "BF16")
    begin = weights.header[name]["data_offsets"][0]
    weights.data[begin : begin + 2] = NAN
    weights.write(folder / "codec.safetensors")
    checkpoint = OmniFishCheckpoint.open(AXIAL, folder)
    work = lambda: open_omnifish_build(
        checkpoint, Found("x", None, AXIAL), OmniFishRecipe("cpu", "fp32"), tmp_path / "out", read_side(AXIAL)
    )
    message = refusal(work)
    assert name.removeprefix("generator.") in message and "codec.safetensors" in message and not (tmp_path / "out").exists()


def test_a_build_that_has_begun_does_not_read_all_weights_again(tiny_build, tmp_path, monkeypatch):
    folder = shutil.copytree(tiny_build, tmp_path / "out")
    monkeypatch.setattr(Checkpoint, "check_finite", lambda self: pytest.fail("weights were read again"))
    builder = open_build(Checkpoint.open(TINY), Found("x", None, TINY), HiggsRecipe("cpu", "fp32"), folder)
    assert isinstance(builder.folder, BuildFolder)
    builder.folder.__exit__(None, None, None)


# Weight files


def overlapping(weights: Weights, name: str) -> dict:
    begin, end = weights.header[name]["data_offsets"]
    return weights.changed(name, data_offsets=[begin - 16, end - 16])


def outside(weights: Weights, name: str) -> dict:
    begin, end = weights.header[name]["data_offsets"]
    return weights.changed(name, data_offsets=[begin + len(weights.data), end + len(weights.data)])


LIES = {
    "offsets that overlap": overlapping,
    "offsets outside of the file": outside,
    "offsets that are negative": lambda w, n: w.changed(n, data_offsets=[-8, w.header[n]["data_offsets"][1]]),
    "offsets in the wrong order": lambda w, n: w.changed(n, data_offsets=w.header[n]["data_offsets"][::-1]),
    "an unknown type": lambda w, n: w.changed(n, dtype="BF17"),
    "integers": lambda w, n: w.changed(n, dtype="I16" if w.header[n]["dtype"] == "BF16" else "I32"),
    "a shape that is none": lambda w, n: w.changed(n, shape=[-1, 4]),
    "a shape that is vast": lambda w, n: w.changed(n, shape=[2**40, 2**40]),
    "no type": lambda w, n: w.header | {n: {k: v for k, v in w.header[n].items() if k != "dtype"}},
    "a header that is a list": lambda w, n: [w.header],
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_header_that_lies_is_refused_with_its_file(family, lie, tmp_path):
    source, read = FAMILIES[family]
    folder = link(source, tmp_path / "ckpt")
    file, weights = weights_of(family)[-1]
    name = next(n for n in weights.names() if weights.header[n]["data_offsets"][0] >= 64 and len(weights.header[n]["shape"]) == 2)
    weights.write(folder / file, lie(weights, name))
    assert file in refusal(lambda: read(folder))


@pytest.mark.parametrize("kept", [0, 4, 8, 100, 0.5, -1], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_that_was_cut_off_is_refused_with_its_name(family, kept, tmp_path):
    source, read = FAMILIES[family]
    folder = link(source, tmp_path / "ckpt")
    file, _ = weights_of(family)[-1]
    content = (source / file).read_bytes()
    replace(folder / file, content[: int(len(content) * kept) if isinstance(kept, float) else kept])
    assert file in refusal(lambda: read(folder))


INDEXES = {
    "a file that is not there": lambda names: dict.fromkeys(names, "nowhere.safetensors"),
    "a tensor that is not there": lambda names: dict.fromkeys([*names, "body.layers.0.extra.weight"], SINGLE),
    "another folder": lambda names: dict.fromkeys(names, "../model.safetensors"),
    "an absolute path": lambda names: dict.fromkeys(names, "/etc/passwd"),
    "a number": lambda names: dict.fromkeys(names, 7),
    "a list": lambda names: list(names),
    "nothing": lambda names: {},
}


@pytest.mark.parametrize("index", INDEXES.values(), ids=INDEXES)
@pytest.mark.parametrize("family", ["higgs", "omnifish"])
def test_an_index_that_lies_is_refused(family, index, tmp_path):
    source, read = FAMILIES[family]
    folder = link(source, tmp_path / "ckpt")
    names = [name for _, weights in weights_of(family) for name in weights.names()]
    if family == "higgs":
        single = (
            index(names) if isinstance(index(names), list) else {n: SHARDS[0].name if f == SINGLE else f for n, f in index(names).items()}
        )
    else:
        single = index(names)
    replace(folder / INDEX, json.dumps({"weight_map": single}))
    message = refusal(lambda: read(folder))
    assert str(folder) in message
    said = {"a file that is not there": "nowhere.safetensors", "another folder": "'../model.safetensors'", "an absolute path": "'/etc/passwd'",
            "a number": "7", "a list": "weight_map"}  # fmt: skip
    wanted = said.get(next(name for name, made in INDEXES.items() if made is index))
    assert wanted is None or wanted in message
