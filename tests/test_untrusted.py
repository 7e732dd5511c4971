"""A build folder from a stranger: nothing outside of it is read, no number in it takes the memory, no name leads anywhere."""

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from faults import Graph, copy_build, repair_manifest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from run_fakes import make_manifest

from voxport import files as voxport_files
from voxport.errors import UserError, WorkError
from voxport.files import check_plain_name, read_json, write_json
from voxport.manifest import MANIFEST_NAME, Manifest, record_file
from voxport.run.external import check_external, external_files
from voxport.run.higgs import Speaker
from voxport.run.text import load_tokenizer
from voxport.run.voices import read_arrays, write_arrays


@pytest.fixture
def mine(tiny_build, tmp_path) -> Path:
    return copy_build(tiny_build, tmp_path / "mine")


def speak(folder: Path):
    return Speaker.load(folder, threads=1).speak("Hi", seed=1, max_frames=2)


def edit_manifest(folder: Path, *keys, value) -> None:
    """Set one key of a manifest, however deep."""
    data = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    write_json(folder / MANIFEST_NAME, data)


# Files beside a graph.


def point_elsewhere(folder: Path, location: str) -> None:
    """Let the text embedding read its weights elsewhere, under a repaired hash."""
    graph = Graph(folder, "text_embed")
    for tensor in graph.tensors.values():
        for entry in tensor.external_data:
            entry.value = location if entry.key == "location" else entry.value
    graph.save()
    repair_manifest(folder)


LOCATIONS = ["../outside.data", "{folder}/../outside.data", "sub/../../outside.data", "sub/inside.data", "unlisted.data", "C:\\outside.data",
             "..\\outside.data", "audio_heads.onnx.data", "./text_embed.onnx.data", "http://x/y", "", "/dev/zero"]  # fmt: skip


@pytest.mark.parametrize("location", LOCATIONS)
def test_a_graph_reads_no_file_but_its_own_even_under_a_repaired_hash(location, mine):
    (mine / "sub").mkdir()
    for copy in ("../outside.data", "sub/inside.data", "unlisted.data"):
        shutil.copy(mine / "text_embed.onnx.data", mine / copy)
    point_elsewhere(mine, location.format(folder=mine))
    with pytest.raises(UserError, match="text_embed.onnx reads .*, which the manifest does not list for it"):
        speak(mine)


@pytest.mark.skipif(os.name == "nt", reason="links")
@pytest.mark.parametrize("name", ["text_embed.onnx.data", "text_embed.onnx", "tokenizer.json"])
def test_a_link_out_of_the_folder_is_refused_and_the_folder_itself_may_be_one(name, mine, tmp_path):
    (tmp_path / "link").symlink_to(mine)
    assert len(speak(tmp_path / "link").codes) == 2
    os.replace(mine / name, tmp_path / "outside")
    (mine / name).symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match=f"{name} is a link to a file outside of the folder.*cp -rL"):
        speak(mine)
    (mine / name).unlink()
    (mine / name).symlink_to("/dev/zero")
    with pytest.raises(UserError, match=f"{name} is missing"):
        speak(mine)


def external(name: str, location: str) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    return tensor


def test_every_place_that_may_hold_a_tensor_is_looked_at(tmp_path):
    inner = helper.make_graph([], "inner", [], [], [external("e", "in_subgraph")])
    sparse = onnx.SparseTensorProto(values=external("f", "in_sparse"), indices=external("g", "in_indices"), dims=[3])
    nodes = [
        helper.make_node("Constant", [], ["a"], value=external("a", "in_attribute")),
        helper.make_node("X", [], ["b"], tensors=[external("b", "in_list"), external("c", "in_list_too")]),
        helper.make_node("If", ["a"], ["d"], then_branch=inner),
        helper.make_node("Y", [], ["z"], graphs=[helper.make_graph([], "other", [], [], [external("y", "in_graphs")])]),
    ]
    graph = helper.make_graph(nodes, "location", [], [], [external("w", "in_initialiser")])
    graph.sparse_initializer.append(sparse)
    function = helper.make_function("d", "f", [], ["o"], [helper.make_node("Constant", [], ["o"], value=external("h", "in_function"))], [])
    model = helper.make_model(graph, functions=[function], doc_string="location")
    path = tmp_path / "x.onnx"
    path.write_bytes(model.SerializeToString())
    assert external_files(path) == {"in_attribute", "in_list", "in_list_too", "in_subgraph", "in_sparse", "in_indices", "in_graphs",
                                    "in_initialiser", "in_function"}  # fmt: skip
    with pytest.raises(UserError, match="'in_attribute'"):
        check_external(path, {"in_initialiser"})


def test_the_files_of_a_build_are_read_as_the_onnx_package_reads_them(tiny_int4):
    for part in Manifest.read(tiny_int4).parts.values():
        model = onnx.load(tiny_int4 / part.graph, load_external_data=False)
        named = {e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"}
        assert external_files(tiny_int4 / part.graph) == named <= set(part.files)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=60), st.integers(0, 10**6), st.integers(0, 255))
def test_bytes_that_are_no_graph_are_refused_and_nothing_else_happens(tiny_build, tmp_path_factory, noise, place, value):
    path = tmp_path_factory.mktemp("noise") / "x.onnx"
    whole = bytearray((tiny_build / "audio_heads.onnx").read_bytes())
    whole[place % len(whole)] = value
    for content in (noise, bytes(whole)):
        path.write_bytes(content)
        try:
            check_external(path, {"audio_heads.onnx.data"})
        except UserError as error:
            assert str(path) in str(error)


def field(tag: int, content: bytes) -> bytes:
    """A field of bytes in protocol buffers' wire format."""
    size, length = len(content), b""
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([tag]) + length + bytes([size]) + content


def test_endless_nesting_is_refused(tmp_path):
    content = b""
    for _ in range(3000):  # a graph in an attribute of a node of a graph ...
        content = field(0x0A, field(0x2A, field(0x32, content)))
    (tmp_path / "x.onnx").write_bytes(field(0x3A, content))
    with pytest.raises(WorkError, match="it is no ONNX graph"):
        check_external(tmp_path / "x.onnx", set())


def test_sizes_that_a_graph_only_claims_are_an_error_and_take_no_memory(mine):
    graph = Graph(mine, "audio_heads")
    for tensor in graph.tensors.values():
        if tensor.external_data:
            tensor.dims[:] = [1 << 40, 1 << 10]
    graph.save()
    repair_manifest(mine)
    with pytest.raises(WorkError, match="audio_heads.onnx cannot be loaded"):
        speak(mine)


# Names and numbers of a manifest.

NAMES = ["/etc/passwd", "../x", "..", ".", "", "a/b", "a\\b", "C:\\x", "C:x", "a\0b", "\ud800", "\\\\host\\x"]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_lead_out_of_the_folder_are_refused_wherever_they_stand(name, tmp_path):
    with pytest.raises(UserError, match="not a plain file name"):
        check_plain_name(name, "here")
    make_manifest().write(tmp_path)
    record = {"bytes": 1, "sha256": "0" * 64}
    part = {"graph": name, "precision": "fp32", "files": {name: record}, "inputs": [], "outputs": []}
    for keys, value in ((("files",), {name: record}), (("parts",), {"text_embed": part})):
        make_manifest().write(tmp_path)
        edit_manifest(tmp_path, *keys, value=value)
        with pytest.raises(UserError, match="not a plain file name|half of a surrogate pair"):
            Manifest.read(tmp_path)


NUMBERS = [
    (("dims", "num_layers"), 10**9), (("dims", "num_layers"), 5000), (("dims", "num_layers"), 0), (("dims", "hidden_size"), -1),
    (("dims", "head_dim"), 1 << 40), (("audio", "num_codebooks"), 0), (("audio", "vocab_size"), 10**12), (("audio", "eoc_id"), -5),
    (("codec", "hop_length"), 0), (("codec", "sample_rate"), 0), (("codec", "min_encode_samples"), 1 << 60),
    (("limits", "max_rows"), 10**15), (("limits", "cap_base_frames"), 1 << 50), (("limits", "plateau_frames"), -1),
    (("limits", "max_reference_seconds"), float("inf")), (("sampling", "temperature"), float("nan")),
]  # fmt: skip


@pytest.mark.parametrize("keys, value", NUMBERS, ids=lambda given: str(given))
def test_numbers_that_no_model_has_are_refused_before_anything_is_made_of_them(keys, value, tmp_path):
    make_manifest().write(tmp_path)
    edit_manifest(tmp_path, *keys, value=value)
    started = time.monotonic()
    with pytest.raises(UserError, match=f"{keys[0]}: {keys[1]}(: | is ).*(not from|not a finite number)"):
        Manifest.read(tmp_path)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("template", ["{:>1000000000}", "{0.__class__}", "{}{}", "past", "{", "{0}", "{{}}{}"])
def test_templates_of_cache_names_hold_a_number_and_nothing_else(template, tmp_path):
    make_manifest().write(tmp_path)
    edit_manifest(tmp_path, "kv_cache", "past_key", value=template)
    with pytest.raises(UserError, match="kv_cache: past_key must hold {} once"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("family", [[], {}, 1, None, "other"])
def test_a_family_that_is_none_is_refused(family, tmp_path):
    make_manifest().write(tmp_path)
    edit_manifest(tmp_path, "family", value=family)
    with pytest.raises(UserError, match="family is"):
        Manifest.read(tmp_path)


def test_a_manifest_larger_than_any_is_not_read(tmp_path, monkeypatch):
    make_manifest().write(tmp_path)
    monkeypatch.setattr(voxport_files, "LARGEST_JSON", 100)
    with pytest.raises(UserError, match="more than any such file needs"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("content", ["[" * 100_000, "1" * 10_000, '{"a": 1e999999}', '{"a": "\\ud800"}', "\ufeff{}", "nul", "{}x"])
def test_json_of_any_kind_is_an_object_or_a_users_error(content, tmp_path):
    (tmp_path / "x.json").write_text(content, encoding="utf-8")
    try:
        assert isinstance(read_json(tmp_path / "x.json", "it"), dict)
    except UserError as error:
        assert "x.json" in str(error)


# The tokenizer.


def with_tokenizer(folder: Path, change) -> Manifest:
    """A manifest that records a changed tokenizer."""
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    change(data)
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    manifest = Manifest.read(folder)
    manifest.files["tokenizer.json"] = record_file(folder / "tokenizer.json")
    return manifest


def test_a_normaliser_that_swells_text_is_refused(mine):
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    swell = {"type": "Sequence", "normalizers": [double] * 40}  # one letter would become 10^12
    with pytest.raises(UserError, match="its normaliser Sequence is none of NFC"):
        load_tokenizer(mine, with_tokenizer(mine, lambda data: data.update(normalizer=swell)))
    assert load_tokenizer(mine, with_tokenizer(mine, lambda data: data.update(normalizer=None)))


# Saved voices.


class Evil:
    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return os.system, (f"touch '{self.trace}'",)


def test_arrays_of_objects_are_never_unpickled(tmp_path):
    np.savez(tmp_path / "x.npz", facts=np.array([Evil(tmp_path / "was_here")], dtype=object))
    with pytest.raises(UserError, match="cannot be read"):
        read_arrays(tmp_path / "x.npz", "the voice")
    assert not (tmp_path / "was_here").exists()


def test_members_with_foreign_names_are_only_names(tmp_path):
    write_arrays(tmp_path / "x.npz", {"version": 1}, {"../../evil": np.zeros(3), "/abs": np.zeros(1)})
    facts, arrays = read_arrays(tmp_path / "x.npz", "the voice")
    assert set(arrays) == {"../../evil", "/abs"} and {path.name for path in tmp_path.iterdir()} == {"x.npz"}


def test_no_code_of_the_run_side_opens_pickles():
    root = Path(__file__).parents[1]
    for path in (*(root / "voxport" / "run").glob("*.py"), root / "inference.py"):
        text = path.read_text(encoding="utf-8")
        assert not any(word in text for word in ("np.load(", "import pickle", " eval(", " exec(")), path
