"""Faults planted in copies of OmniFish builds, under hashes that are repaired: only proof and judge can see them."""

from pathlib import Path

import numpy as np
import onnx
from faults import Graph

BOOKS, IDS = 10, 4105


def look_back_only(folder: Path) -> None:
    """The classic one: attention that is causal where the model is not."""
    set_causal(folder, slice(None))


def look_back_only_in_one_layer(folder: Path) -> None:
    set_causal(folder, slice(1, 2))


def set_causal(folder: Path, layers: slice) -> None:
    graph = Graph(folder, "llm_decoder")
    for node in graph.nodes("GroupQueryAttention")[layers]:
        next(a for a in node.attribute if a.name == "causal").i = 1
    graph.save()


def swap_codebooks(folder: Path) -> None:
    """The input tables of codebooks 2 and 5 change places."""
    graph = Graph(folder, "audio_embed")
    table = graph.array(next(n for n, t in graph.tensors.items() if t.dims and t.dims[0] == BOOKS * IDS)).reshape(BOOKS, IDS, -1)
    table[[2, 5]] = table[[5, 2]]
    table.flush()


def swap_levels(folder: Path) -> None:
    """The embeddings of levels 1 and 4 of the residual decoder change places."""
    graph = Graph(folder, "mtp_step")
    table = graph.array("level_emb/weight")
    table[[1, 4]] = table[[4, 1]]
    table.flush()


def swap_heads(folder: Path) -> None:
    """The heads of two residual levels change places."""
    graph = Graph(folder, "mtp_step")
    heads = graph.array("heads")
    first, second = heads[:, 1024:2048].copy(), heads[:, 4096:5120].copy()
    heads[:, 1024:2048], heads[:, 4096:5120] = second, first
    heads.flush()


def double_one_scale(folder: Path, part: str = "llm_decoder") -> None:
    """One block's scale of one MatMulNBits, times two."""
    graph = Graph(folder, part)
    scales = graph.array(graph.nodes("MatMulNBits")[3].input[2]).reshape(-1)
    scales[7] *= 2
    scales.flush()


def double_one_residual_scale(folder: Path) -> None:
    double_one_scale(folder, "mtp_step")


def shift_end(folder: Path) -> None:
    """The rows of END and of the first PAD in the semantic head change places: speech ends elsewhere."""
    graph = Graph(folder, "semantic_head")
    name = next(n for n, t in graph.tensors.items() if IDS in t.dims)
    weight = graph.array(name)
    weight = weight if weight.shape[-1] == IDS else weight.T
    weight[:, [4097, 4098]] = weight[:, [4098, 4097]]
    (weight if weight.base is None else weight.base).flush()


def mute_codec_layer(folder: Path) -> None:
    """One convolution of the codec's decoder gives its bias only."""
    graph = Graph(folder, "codec_decoder")
    name = max((n for n, t in graph.tensors.items() if len(t.dims) == 3), key=lambda n: np.prod(graph.tensors[n].dims))
    weight = graph.array(name)
    weight[:] = 0
    weight.flush()


def change_exponent(folder: Path, part: str) -> None:
    """A bit of the exponent of one number: a scale, a head's weight, a weight of the codec."""
    graph = Graph(folder, part)
    numbers = graph.array(number_of(graph, part)).reshape(-1).view(np.uint8).reshape(-1, 4)
    numbers[1000 % len(numbers), 3] ^= 0x04
    numbers.flush()


def number_of(graph: Graph, part: str) -> str:
    if graph.nodes("MatMulNBits"):
        return graph.nodes("MatMulNBits")[4].input[2]
    floats = {n: t for n, t in graph.tensors.items() if t.data_type == onnx.TensorProto.FLOAT and len(t.dims) > 1}
    return max(floats, key=lambda n: np.prod(floats[n].dims))
