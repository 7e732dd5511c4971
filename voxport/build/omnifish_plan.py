"""What an OmniFish build will need in memory and on disk, from the dims alone; see `plan.py`."""

from __future__ import annotations

import math

from voxport.build.llm import DECODER
from voxport.build.omnifish_checkpoint import OmniFishCheckpoint
from voxport.build.omnifish_parts import HOLLOW_WEIGHTS, RESIDUAL_PARTS, TABLES, count_weights, part_names, part_precision
from voxport.build.omnifish_workshop import OmniFishRecipe
from voxport.build.plan import BYTES, OLIVE_COPIES, PYTHON, Need, body_need
from voxport.manifest_omnifish import EXPLICIT

# Copies of a part's float32 weights at the peak of its making: estimates above what the published build took as a whole
# (benchmarks/omnifish_full_size.json). Of a part that is
# exported without its weights: `_ref`'s and ONNX Runtime's in the check, and packed ones beside them. Rounded parts are checked
# against a float32 graph that is held as well.
HOLLOW_COPIES = {"fp32": 3.0, "fp16": 2.0, "int4": 4.0}


def needs(checkpoint: OmniFishCheckpoint, recipe: OmniFishRecipe) -> dict[str, Need]:
    """Part -> what it takes."""
    names = part_names(checkpoint)
    return {name: decoder_need(checkpoint, recipe) if name == DECODER else part_need(name, checkpoint, recipe) for name in names}


def decoder_need(checkpoint: OmniFishCheckpoint, recipe: OmniFishRecipe) -> Need:
    if recipe.attention == EXPLICIT:
        return part_need(DECODER, checkpoint, recipe)
    config = checkpoint.config
    layers = {n: math.prod(shape) for n, shape in config.shapes().items() if n.startswith("llm.layers.")}
    return body_need(layers, config.text_vocab_size * config.hidden_size, recipe)


def part_need(name: str, checkpoint: OmniFishCheckpoint, recipe: OmniFishRecipe) -> Need:
    """All parts are exported in float32 and then rounded: both lie on the disk for a while."""
    weights, precision = count_weights(name, checkpoint), part_precision(name, recipe.precision)
    result = weights * BYTES[precision]
    if weights < HOLLOW_WEIGHTS:
        return Need(PYTHON + OLIVE_COPIES * 4 * weights, result, 2 * 4 * weights)
    copies = HOLLOW_COPIES["int4" if name in RESIDUAL_PARTS and precision == "int4" else "fp16" if name in TABLES else "fp32"]
    return Need(PYTHON + copies * 4 * weights, result, 4 * weights + result)
