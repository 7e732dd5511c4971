"""What optimize.py needs to know of an OmniFish checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from voxport.build import omnifish
from voxport.build.download import Found
from voxport.build.job import Job
from voxport.build.omnifish_checkpoint import SIDE_FILE, read_side
from voxport.build.omnifish_checkpoint import is_omnifish as recognises
from voxport.build.omnifish_parts import COMPONENTS
from voxport.build.omnifish_plan import needs
from voxport.manifest_omnifish import EXPLICIT, FULL, GQA, SEMANTIC

__all__ = ["COMPONENTS", "OWN_FLAGS", "add_flags", "make_job", "outline", "recognises"]
OWN_FLAGS = ("block_size", "context_mode", "steps", "codec", "attention")  # of optimize.py, that only this family knows


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that only OmniFish checkpoints need."""
    add = parser.add_argument_group("OmniFish checkpoints").add_argument
    where = f"demanded unless {SIDE_FILE} beside the checkpoint says it"
    add("--block-size", type=int, metavar="B", help=f"frames of a block as in training; {where}")
    add("--context-mode", choices=(FULL, SEMANTIC), help=f"what later blocks see of a finished one, as in training; {where}")
    add("--steps", type=int, help=f"rounds in which a block is revealed; {where}")
    add("--attention", choices=(GQA, EXPLICIT), help="of the language model: ONNX Runtime's own, or spelt out for providers that"
        f" attend to the past only, which is slower (default: {GQA})")  # fmt: skip
    add("--codec", type=Path, metavar="DIR", help="folder of the Fish codec (default: the checkpoint, or codec in or beside it)")


def make_job(args: argparse.Namespace, found: Found) -> Job:
    """Check that the flags fit the checkpoint."""
    recipe = omnifish.OmniFishRecipe(args.device, args.precision, rounding=args.recipe, attention=args.attention or GQA)
    checkpoint = omnifish.open_checkpoint(found, recipe, args.codec)
    side = read_side(found.folder, block_size=args.block_size, context_mode=args.context_mode, steps=args.steps)
    omnifish.describe_generation(side, str(found.folder))
    open_build = lambda output: omnifish.open_build(
        checkpoint, found, recipe, output, side, args.skip_extract, args.keep_intermediate
    )
    return Job(found.id, checkpoint, recipe, omnifish.part_names(checkpoint), needs, open_build)


def outline(args: argparse.Namespace, found: Found) -> None:
    """None: sizes of the residual decoder stand in the weight files alone."""
