"""What a target is made of, and the named ways to round its body. benchmarks/recipes.json says what each costs and keeps."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from voxport.build.llm import DECODER
from voxport.build.parts import PartPlan, plan_parts
from voxport.build.quantise import BlockFormat
from voxport.errors import UserError
from voxport.manifest import DEFAULT_RECIPE

# DEFAULT_RECIPE is argued in README.md from benchmarks/recipes.json: what a frame reads, its speed and the time to round are those of
# rtn-32, the weights are nearer. Both round as ModelBuilder's own int4 path does, the second but for a few exact ties
# (tests/test_quantise.py).
# 8 bits for the values and for the last matrix of the feed-forward, whose outputs are added to the residual stream unnormed
WIDE = ("v_proj", "down_proj")
RECIPES = {
    "rtn-32": BlockFormat(),
    "rtn-64": BlockFormat(block_size=64),
    "rtn-128": BlockFormat(block_size=128),
    "rtn-32-asym": BlockFormat(symmetric=False),
    "rtn-32-exact": BlockFormat(accuracy_level=1),
    "fit-32": BlockFormat(search=True),
    "fit-64": BlockFormat(block_size=64, search=True),
    "fit-128": BlockFormat(block_size=128, search=True),
    "fit-32-asym": BlockFormat(symmetric=False, search=True),
    "mixed-32": BlockFormat(search=True, wide=WIDE),
    "rtn8-32": BlockFormat(bits=8),
}


def describe_recipes() -> str:
    """The recipes in one sentence each, for --help."""
    return "; ".join(f"{name}: {describe(form)}" for name, form in RECIPES.items())


def describe(form: BlockFormat) -> str:
    """What a format does, in words."""
    words = [f"{form.bits} bits", "scale of least squared error" if form.search else "to nearest", f"blocks of {form.block_size}"]
    words += [] if form.symmetric else ["own zero a block"]
    words += [f"8 bits for {' and '.join(form.wide)}"] if form.wide else []
    words += [] if form.accuracy_level == 4 else ["activations not rounded"]
    return ", ".join(words)


@dataclass(frozen=True)
class Recipe:
    """What a target is made of. `heads` is the precision of audio_heads (None: the target's default), `rounding` a recipe's name."""

    device: str
    precision: str
    heads: str | None = None
    rope_table: str = "bf16"
    rounding: str = DEFAULT_RECIPE

    def __post_init__(self):
        if self.precision != "int4" and self.rounding != DEFAULT_RECIPE:
            raise UserError(f"--recipe {self.rounding} says how int4 weights are rounded; it has no use with {self.precision}")
        if self.device == "cpu" and self.precision == "fp16":
            raise UserError(
                "cpu with fp16 is not built: ONNX Runtime's CPU kernels compute in fp32, so it would be slower than int4"
                " and no better than fp32; take --precision int4 or fp32"
            )

    @property
    def body_block(self) -> BlockFormat | None:
        """How the body's projections are rounded, None if they are not."""
        return RECIPES[self.rounding] if self.precision == "int4" else None

    def record(self) -> dict:
        """As the manifest keeps it."""
        names = {"rounding": self.rounding if self.body_block else None}
        return asdict(self) | names | {"block": self.body_block.record() if self.body_block else None}

    def part_recipe(self, name: str, fingerprint: str) -> dict:
        """What decides a part's bytes: compared with the manifest to see whether it must be made again."""
        if name == DECODER:
            block = self.body_block.record() if self.body_block else None
            return {"source": fingerprint, "device": self.device, "precision": self.precision,
                    "block": block, "rope_table": self.rope_table}  # fmt: skip
        return {"source": fingerprint, "precision": self.plans[name].precision}

    @property
    def plans(self) -> dict[str, PartPlan]:
        return plan_parts(self.device, self.precision, self.heads)
