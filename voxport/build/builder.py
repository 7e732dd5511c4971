"""How the parts of a build are made, checked and installed, whatever the family, and what all manifests say alike."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from voxport import __version__
from voxport.build import llm
from voxport.build.child import run_in_child
from voxport.build.folder import BuildFolder
from voxport.build.workshop import disk_full_explained
from voxport.manifest import Dims, Part

TOOLS = ("torch", "transformers", "onnx", "onnxruntime", "onnxruntime-genai", "olive-ai", "safetensors", "numpy")


def describe_dims(config) -> Dims:
    """Sizes of a Qwen3 body, of whichever family's config."""
    return Dims(
        hidden_size=config.hidden_size,
        text_vocab_size=config.text_vocab_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position_embeddings,
    )


def tool_versions() -> dict[str, str]:
    return {"voxport": __version__} | {name: importlib.metadata.version(name) for name in TOOLS}


@dataclass
class Builder:
    """Makes the parts of one target from one checkpoint into one folder; `isolated` runs each step in a child process.

    `shop` has the checkpoint, the recipe and the steps. Each family says in `finish` what else its folder holds.
    """

    shop: Any
    folder: BuildFolder
    skip_extract: bool = False
    isolated: bool = False

    @property
    def licences(self) -> str:
        """The terms of what goes into the build, for the screen."""
        return f"licence of the weights: {self.folder.manifest.licence.name}"

    def build(self, name: str) -> bool:
        """Make, check and install one part; False if the folder already holds it."""
        recipe = self.shop.recipe.part_recipe(name, self.folder.manifest.source.fingerprint)
        if self.folder.is_current(name, recipe):
            return False
        self.folder.clear_scratch()
        with disk_full_explained(name, self.folder.folder):
            if name == llm.DECODER:
                self._provide_standalone()
            graph = self._run(name, self.shop.make, name)
            inputs, outputs = self._run(f"{name}: check", self.shop.check, name, graph)
            self.folder.install(name, graph, Part(graph.name, recipe["precision"], {}, inputs, outputs, recipe))
            self._bring_along(name, graph)
        return True

    def _bring_along(self, name: str, graph: Path) -> None:
        """Take in what was made with a part."""
        if name == llm.DECODER:
            self.folder.copy_in(graph.with_name("genai_config.json"), "genai_config.json")

    def _run(self, label: str, step: Callable, *arguments):
        return run_in_child(label, step, *arguments) if self.isolated else step(*arguments)

    def _provide_standalone(self) -> None:
        if self.skip_extract:
            llm.check_extracted(self.shop.checkpoint, self.shop.standalone, self.shop.recipe.body_block)
        else:
            self._run(f"{llm.DECODER}: extract", self.shop.extract)
