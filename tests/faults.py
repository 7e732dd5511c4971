"""Plant a fault in a copy of a build and repair its manifest, so that only the judge can see it."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import onnx
from onnx.external_data_helper import ExternalDataInfo

from voxport.manifest import Manifest, record_file


def copy_build(build: Path, folder: Path) -> Path:
    shutil.copytree(build, folder)
    return folder


def repair_manifest(folder: Path) -> None:
    """Record every file as it is now."""
    manifest = Manifest.read(folder)
    parts = {
        name: dataclasses.replace(part, files={file: record_file(folder / file) for file in part.files})
        for name, part in manifest.parts.items()
    }
    dataclasses.replace(manifest, parts=parts).write(folder)


class Graph:
    """One part of a build, opened for damage."""

    def __init__(self, folder: Path, part: str):
        self.path = folder / f"{part}.onnx"
        self.model = onnx.load(self.path, load_external_data=False)
        self.tensors = {t.name: t for t in self.model.graph.initializer}

    def array(self, name: str) -> np.memmap:
        """An initialiser's bytes in its data file, writable."""
        tensor = self.tensors[name]
        info = ExternalDataInfo(tensor)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        return np.memmap(self.path.with_name(info.location), dtype, "r+", offset=info.offset or 0, shape=tuple(tensor.dims))

    def nodes(self, op: str) -> list[onnx.NodeProto]:
        return [node for node in self.model.graph.node if node.op_type == op]

    def save(self) -> None:
        onnx.save(self.model, self.path)


def double_one_scale(folder: Path) -> None:
    """One block's scale of one MatMulNBits, times two."""
    graph = Graph(folder, "llm_decoder")
    scales = graph.array(graph.nodes("MatMulNBits")[3].input[2]).reshape(-1)
    scales[7] *= 2
    scales.flush()


def swap_codebooks(folder: Path) -> None:
    """Codebooks 2 and 5 of audio_embed change places."""
    graph = Graph(folder, "audio_embed")
    weight = graph.array(next(n for n, t in graph.tensors.items() if len(t.dims) == 2)).reshape(8, 1026, -1)
    weight[[2, 5]] = weight[[5, 2]]
    weight.flush()


def change_theta(folder: Path) -> None:
    """Rotary tables of theta 10,000."""
    graph = Graph(folder, "llm_decoder")
    for name, function in (("cos_cache", np.cos), ("sin_cache", np.sin)):
        table = graph.array(name)
        positions, half = table.shape
        table[:] = function(np.arange(positions)[:, None] / 10_000.0 ** (np.arange(half) / half))
        table.flush()


def see_the_future(folder: Path) -> None:
    """Attention without its causal mask."""
    graph = Graph(folder, "llm_decoder")
    for node in graph.nodes("GroupQueryAttention"):
        node.attribute.append(onnx.helper.make_attribute("causal", 0))
    graph.save()


def skip_one_query_norm(folder: Path) -> None:
    """The query norm of layer 1 passes its input on."""
    graph = Graph(folder, "llm_decoder")
    node = next(n for n in graph.nodes("SimplifiedLayerNormalization") if "layers.1/attn/q_norm" in n.name)
    node.op_type = "Identity"
    del node.input[1:], node.attribute[:]
    graph.save()


def zero_codebooks(folder: Path) -> None:
    """Every codebook entry of the codec's decoder is zero, as if buffers had not been loaded."""
    graph = Graph(folder, "audio_tokenizer")
    for name in (n for n in graph.tensors if n.endswith("codebook.embed")):
        entries = graph.array(name)
        entries[:] = 0
        entries.flush()
