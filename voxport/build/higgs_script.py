"""What optimize.py needs to know of a Higgs checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from voxport.build import higgs
from voxport.build.download import Found
from voxport.build.higgs import COMPONENTS
from voxport.build.job import Job
from voxport.build.plan import needs
from voxport.files import read_json

__all__ = ["COMPONENTS", "OWN_FLAGS", "add_flags", "make_job", "outline", "recognises"]
OWN_FLAGS = ("codec_from", "heads_precision", "rope_table")  # of optimize.py, that only this family knows


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that only Higgs checkpoints need."""
    add = parser.add_argument_group("Higgs checkpoints").add_argument
    add("--codec-from", type=Path, metavar="DIR", help="checkpoint folder that lends its codec to one without")
    add("--rope-table", choices=("bf16", "exact"),
        help="round the rotary cos and sin tables to bf16 values as the published engine does, or not (default: bf16)")  # fmt: skip
    add("--heads-precision", choices=("fp32", "fp16", "int8", "int4"),
        help="of the audio heads; below fp16 they choose other codes now and then (default: fp32, cuda fp16)")  # fmt: skip


def recognises(folder: Path) -> bool:
    """Whether a folder's config.json is that of a Higgs checkpoint."""
    path = Path(folder) / "config.json"
    return path.is_file() and read_json(path, "checkpoint").keys() >= {"text_config", "audio_encoder_config"}


def make_job(args: argparse.Namespace, found: Found) -> Job:
    """Check that the flags fit the checkpoint."""
    recipe = read_recipe(args)
    checkpoint = higgs.open_checkpoint(found, recipe, args.codec_from)
    open_build = lambda output: higgs.open_build(
        checkpoint, found, recipe, output, args.codec_from, args.skip_extract, args.keep_intermediate
    )
    return Job(found.id, checkpoint, recipe, COMPONENTS, needs, open_build)


def outline(args: argparse.Namespace, found: Found) -> Job:
    """The job of a checkpoint of which only the config files are in the folder: to be planned, not opened."""
    recipe = read_recipe(args)
    return Job(found.id, higgs.outline(found.folder, recipe, args.codec_from), recipe, COMPONENTS, needs)


def read_recipe(args: argparse.Namespace) -> higgs.Recipe:
    return higgs.Recipe(args.device, args.precision, args.heads_precision, args.rope_table or "bf16", args.recipe)
