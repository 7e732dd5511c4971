"""The recipe of an OmniFish build, and the steps that make and check its parts, each fit to run in a process of its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from _ref import omnifish as ref
from _ref.omnifish import OmniFish
from voxport.build import llm
from voxport.build.omnifish_check import check_body, check_part, check_rounded, set_bidirectional
from voxport.build.omnifish_checkpoint import OmniFishCheckpoint
from voxport.build.omnifish_parts import export_part, part_precision, round_part
from voxport.build.parts import temporary_files_in
from voxport.build.quantise import BlockFormat, dequantise, quantise
from voxport.build.recipes import RECIPES, Recipe
from voxport.build.workshop import Overlay
from voxport.errors import UserError
from voxport.manifest import TensorSpec
from voxport.manifest_omnifish import EXPLICIT, GQA

BODY = llm.BodyNames(ref.LAYER, ref.FINAL_NORM, ref.TEXT_EMBEDDING, ref.QWEN3_PREFIXES, "llm_config")


@dataclass(frozen=True)
class OmniFishRecipe(Recipe):
    """What a target is made of; of the Higgs recipe the heads have no use, and the rotary tables are exact."""

    rope_table: str = "exact"
    attention: str = GQA

    def __post_init__(self):
        super().__post_init__()
        if self.attention == EXPLICIT and self.precision == "fp16":
            raise UserError("--attention explicit is built in fp32 or int4; choose one of them with --precision")

    def part_recipe(self, name: str, fingerprint: str) -> dict:
        """What decides a part's bytes."""
        recipe = {"source": fingerprint, "precision": part_precision(name, self.precision)}
        if recipe["precision"] == "int4":
            recipe["block"] = self.body_block.record()
        return recipe | ({"device": self.device, "attention": self.attention} if name == llm.DECODER else {})


@dataclass(frozen=True)
class Workshop:
    """The steps that make and check the parts, each fit to run in a process of its own."""

    checkpoint: OmniFishCheckpoint
    recipe: OmniFishRecipe
    standalone: Path
    scratch: Path

    @property
    def staging(self) -> Path:
        """Where a part lies before it is installed."""
        return self.scratch / "staging"

    @property
    def plain(self) -> Path:
        """Where a part lies before it is rounded."""
        return self.scratch / "plain"

    def extract(self) -> None:
        """Write the rounded body as a checkpoint of its own."""
        shutil.rmtree(self.standalone, ignore_errors=True)
        llm.extract_qwen3(self.checkpoint, self.standalone, self.recipe.body_block, BODY)

    def make(self, name: str) -> Path:
        """Write one part into `staging`. Returns the graph."""
        if name == llm.DECODER and self.recipe.attention == GQA:
            return self._make_body()
        with temporary_files_in(self.scratch):
            plain = export_part(name, self.checkpoint, self.scratch, self.plain)
        return round_part(plain, self.staging, part_precision(name, self.recipe.precision), RECIPES[self.recipe.rounding])

    def _make_body(self) -> Path:
        recipe = self.recipe
        graph = llm.build_decoder(self.standalone, self.staging, self.checkpoint.config, recipe.device, recipe.precision,
                                  recipe.body_block, recipe.rope_table)  # fmt: skip
        set_bidirectional(graph)
        return graph

    def check(self, name: str, graph: Path) -> tuple[list[TensorSpec], list[TensorSpec]]:
        """Compare a part in `staging` with `_ref`; what it takes and gives."""
        precision = part_precision(name, self.recipe.precision)
        if name == llm.DECODER:
            return check_body(graph, precision, self.rounded_model()).specs()
        if precision != "int4":
            return check_part(name, graph, self.checkpoint, precision).specs()
        plain = self.plain / graph.name
        check_part(name, plain, self.checkpoint)
        return check_rounded(name, graph, plain, self.recipe.body_block, self.checkpoint).specs()

    def rounded_model(self) -> OmniFish:
        """`_ref` on the weights that the decoder computes with, read layer by layer."""
        checkpoint, form = self.checkpoint, self.recipe.body_block
        is_gqa = self.recipe.attention == GQA
        own = llm.StandaloneWeights(self.standalone, form, BODY) if is_gqa else RoundedBody(checkpoint, form)
        weights = Overlay(own, checkpoint)
        return OmniFish(checkpoint.config, weights, checkpoint.lang_start, checkpoint.languages)


@dataclass(frozen=True)
class RoundedBody(Mapping):
    """The weights that an explicit body computes with, by checkpoint name, rounded one at a time."""

    checkpoint: OmniFishCheckpoint
    form: BlockFormat | None

    def __getitem__(self, name: str) -> Tensor:
        weight = self.checkpoint[name]
        rounded = self.form is not None and name.endswith("_proj.weight")
        return dequantise(quantise(weight, self.form), self.form) if rounded else weight

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.checkpoint if name.startswith("llm.layers."))

    def __len__(self) -> int:
        return sum(1 for _ in self)
