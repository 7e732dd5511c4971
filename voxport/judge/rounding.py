"""Level 1: the decoder's weights as its graph holds them, against the source tensors, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from voxport.judge.finding import Finding, judge
from voxport.judge.weights import GraphWeights
from voxport.run.proof import BODY

WEIGHTS = "weights"
# Rounding to nearest moves a weight by half a step; the one code that a symmetric block lacks (its own extreme with the other sign)
# by a whole one. Anything beyond a step is not rounding.
LARGEST_STEP = 1.01
# A recipe that searches its scales clips the largest weights of a block where the rest gains: a range cut to 0.8 puts them 10 steps
# from zero, and codes end at 7.
LARGEST_SEARCHED_STEP = 3.2
LARGEST_FLOAT_ERROR = 2.0**-10  # float16 keeps 11 bits; float32 holds bf16 exactly


@dataclass(frozen=True)
class LayerError:
    """One tensor of the graph: bits a weight, bytes with scales, relative error (RMS), largest error in steps of its block."""

    name: str
    bits: int
    bytes: int
    error: float
    steps: float


def layer_error(weights: GraphWeights, name: str, source: Tensor) -> LayerError:
    """Compare one tensor with its source; both are taken in float32."""
    found, source = weights[name], source.float()
    form = weights.form(name)
    difference = found - source
    error = float(difference.norm() / source.norm().clamp(min=1e-30))
    if not torch.isfinite(found).all():
        return LayerError(name, form.bits, weights.bytes_of(name), float("inf"), float("inf"))
    if form.scales is None:
        steps = float(difference.abs().max() / source.abs().max().clamp(min=1e-30))
    else:
        blocks = difference.abs().unflatten(-1, (form.scales.shape[-1], -1)).amax(-1)
        steps = float((blocks / form.scales.abs().clamp(min=1e-30)).max())
    return LayerError(name, form.bits, weights.bytes_of(name), error, steps)


def layer_errors(weights: GraphWeights, checkpoint) -> list[LayerError]:
    """Every tensor of the decoder, in the graph's order. One tensor in memory at a time."""
    return [layer_error(weights, name, checkpoint[name]) for name in weights]


def judge_weights(errors: list[LayerError], searched: bool = False, part: str = BODY) -> Finding:
    """Every weight within one step of its source, or as far as a `searched` scale may clip; the three tensors that lose most are named."""
    largest = LARGEST_SEARCHED_STEP if searched else LARGEST_STEP
    beyond = [e for e in errors if e.steps > (largest if e.bits < 16 else LARGEST_FLOAT_ERROR)]
    worst = sorted(errors, key=lambda e: -e.error)[:3]
    total = sum(e.bytes for e in errors)
    rounded = [e for e in errors if e.bits < 16]
    mean = sum(e.error * e.bytes for e in rounded) / sum(e.bytes for e in rounded) if rounded else 0.0
    says = f"{len(beyond)} of {len(errors)} tensors are not their source rounded, the first is {beyond[0].name}" if beyond else (
        f"{len(errors)} tensors, {total / 1e6:.1f} MB, mean error of the rounded {mean:.4f}"
    )  # fmt: skip
    return judge(WEIGHTS, part, not beyond, says, beyond=[e.name for e in beyond], worst=[vars(e) for e in worst],
                 mean_error=mean, bytes=total)  # fmt: skip
