"""What optimize.py does with an OmniFish checkpoint: its own flags, and the build."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from voxport.build import omnifish
from voxport.build.download import Found
from voxport.build.omnifish_checkpoint import SIDE_FILE, is_omnifish, read_side
from voxport.errors import DONE, UserError, say
from voxport.families import HIGGS, OMNIFISH
from voxport.manifest_omnifish import EXPLICIT, FULL, GQA, SEMANTIC

OWN_FLAGS = ("block_size", "context_mode", "steps", "codec", "attention")
FAMILIES = {"higgs": HIGGS, "omnifish": OMNIFISH}  # as --family spells them


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The family, and flags that only OmniFish checkpoints need."""
    parser.add_argument("--family", choices=tuple(FAMILIES), help="of the checkpoint (default: told by its config.json)")
    add = parser.add_argument_group("OmniFish checkpoints").add_argument
    where = f"demanded unless {SIDE_FILE} beside the checkpoint says it"
    add("--block-size", type=int, metavar="B", help=f"frames of a block as in training; {where}")
    add("--context-mode", choices=(FULL, SEMANTIC), help=f"what later blocks see of a finished one, as in training; {where}")
    add("--steps", type=int, help=f"rounds in which a block is revealed; {where}")
    add("--attention", choices=(GQA, EXPLICIT), help="of the language model: ONNX Runtime's own, or spelt out for providers that"
        f" attend to the past only, which is slower (default: {GQA})")  # fmt: skip
    add("--codec", type=Path, metavar="DIR", help="folder of the Fish codec (default: the checkpoint, or codec in or beside it)")


def choose_family(args: argparse.Namespace, folder: Path) -> str:
    """The family of a checkpoint; UserError for a flag that has no use with it."""
    family = FAMILIES[args.family] if args.family else OMNIFISH if is_omnifish(folder) else HIGGS
    for flag in OWN_FLAGS if family == HIGGS else ("codec_from", "heads_precision"):
        if getattr(args, flag) is not None:
            raise UserError(f"--{flag.replace('_', '-')} has no use with a checkpoint of the family {family}")
    return family


def build(args: argparse.Namespace, found: Found, output: Path) -> int:
    """Build an OmniFish checkpoint as the flags of optimize.py say."""
    if args.plan:
        raise UserError("--plan knows the needs of Higgs builds only")
    recipe = omnifish.OmniFishRecipe(args.device, args.precision, rounding=args.recipe, attention=args.attention or GQA)
    checkpoint = omnifish.open_checkpoint(found, recipe, args.codec)
    side = read_side(found.folder, block_size=args.block_size, context_mode=args.context_mode, steps=args.steps)
    components = args.components or omnifish.part_names(checkpoint)
    foreign = [name for name in components if name not in omnifish.part_names(checkpoint)]
    if foreign:
        raise UserError(f"this checkpoint has no part {foreign[0]}; choose from {', '.join(omnifish.part_names(checkpoint))}")
    builder = omnifish.open_build(checkpoint, found, recipe, output, side, args.skip_extract, args.keep_intermediate)
    with builder.folder:
        manifest = builder.folder.manifest
        say(f"licence of the weights: {manifest.licence.name}; of the codec: {manifest.codec_licence.name}")
        seconds = {name: make(builder, name) for name in components}
        builder.finish()
    say(f'built {output}: python inference.py --model-path {output} --text "..." --out x.wav')
    if args.json:
        sizes = {name: sum(r.bytes for r in part.files.values()) for name, part in builder.folder.manifest.parts.items()}
        say(json.dumps({"output": str(output), "seconds": seconds, "bytes": sizes}), sys.stdout)
    return DONE


def make(builder: omnifish.Builder, name: str) -> float:
    """Make one part and say so. Returns seconds, 0 for one that was up to date."""
    start = time.perf_counter()
    made = builder.build(name)
    seconds = round(time.perf_counter() - start, 2) if made else 0.0
    size = sum(record.bytes for record in builder.folder.manifest.parts[name].files.values())
    say(f"{name:16} {size / 1e6:9.1f} MB  {f'{seconds:.1f} s' if seconds else 'up to date'}")
    return seconds
