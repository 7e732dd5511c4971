"""The plan of a checkpoint that is still on the hub, from its few config files: no weight is fetched for it."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path

from voxport.build.download import Found, fetch_configs, require_disk
from voxport.build.job import choose_family
from voxport.build.plan import Plan
from voxport.build.sizes import at_least, at_most
from voxport.errors import say
from voxport.families import FAMILIES
from voxport.files import free_disk, share_disk


def plan_ahead(args: argparse.Namespace, found: Found, output: Path) -> None:
    """Print what download and build will need. UserError if either cannot fit."""
    free = at_most(free_disk(found.folder))
    say(f"download: {at_least(found.coming)} of {found.id} to come into {found.folder} ({free} free)", sys.stdout)
    plan = outline(args, found, output)
    if plan is None:
        say("what the build will need is told by the weights themselves: ask again once they are downloaded", sys.stdout)
    else:
        plan.tell()
    require_disk(found.coming, found.id, found.folder)
    if plan is not None:
        plan.beside(found.coming if share_disk(found.folder, output) else 0).require()


def outline(args: argparse.Namespace, found: Found, output: Path) -> Plan | None:
    """The plan by the config files, which are thrown away again; None if they do not tell the sizes of this family."""
    with tempfile.TemporaryDirectory() as configs:
        fetch_configs(found, Path(configs))
        here = dataclasses.replace(found, folder=Path(configs))
        job = FAMILIES[choose_family(args, here.folder)].builder.outline(args, here)
        return None if job is None else job.plan(job.choose(args.components), output)
