"""One build as optimize.py runs it, whatever the family: chosen by the checkpoint, checked, planned, and made part by part."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from voxport.build.place import check_source, check_way, describe_change
from voxport.build.plan import PROOF, Need, Plan, make_plan, remember_seconds
from voxport.errors import UserError, say
from voxport.families import FAMILIES, check_flags
from voxport.manifest import BuildManifest
from voxport.progress import clock


@dataclass(frozen=True)
class Job:
    """A checkpoint, called `source`, and a recipe that fit each other. `components` are all parts of the build, `needs` tells what
    each takes, and `open` locks the build folder and returns its builder, None where only a plan can be made. Nothing is written
    before."""

    source: str
    checkpoint: Any
    recipe: Any
    components: tuple[str, ...]
    needs: Callable[[Any, Any], Mapping[str, Need]]
    open: Callable[[Path], Any] | None = None

    def choose(self, asked: tuple[str, ...] | None) -> tuple[str, ...]:
        """The parts to build; UserError for one that this checkpoint has not."""
        foreign = [name for name in asked or () if name not in self.components]
        if foreign:
            raise UserError(f"this checkpoint has no part {foreign[0]}; choose from {', '.join(self.components)}")
        return asked or self.components

    def check_output(self, output: Path, components: tuple[str, ...]) -> None:
        """UserError if these parts cannot go into the folder for the build that lies there: of something else, or made another way."""
        fingerprint, whole = self.checkpoint.fingerprint(), self.is_whole(components)
        check_source(output, self.source, fingerprint, whole)
        if not whole:
            check_way(output, self.recipe, fingerprint, components)

    def is_whole(self, components: tuple[str, ...]) -> bool:
        """Whether these are all parts of the build."""
        return {*components} == {*self.components}

    def describe_change(self, output: Path, components: tuple[str, ...]) -> str | None:
        """What of a finished build there gives way to these parts of this one."""
        whole = self.is_whole(components)
        return describe_change(output, self.source, self.checkpoint.fingerprint(), self.recipe.record(), whole)

    def plan(self, components: tuple[str, ...], output: Path) -> Plan:
        return make_plan(self.checkpoint, self.recipe, components, output, self.needs)


def choose_family(args: argparse.Namespace, folder: Path) -> str:
    """The family of a checkpoint: the one named, else the first that recognises its own, else the first, whose reader then says
    what is missing. UserError if the one named is another's, or for a flag that has no use with it."""
    named = [name for name, family in FAMILIES.items() if family.short == args.family]
    recognised = recognise(folder)
    if named and recognised and named[0] not in recognised:
        kind = FAMILIES[recognised[0]].short
        raise UserError(f"--family {args.family}: {args.checkpoint} is a checkpoint of the {kind} family; leave --family out")
    name = next(iter([*named, *recognised, *FAMILIES]))
    check_flags(args, name, {other: family.builder.OWN_FLAGS for other, family in FAMILIES.items()}, "checkpoint")
    return name


def recognise(folder: Path) -> list[str]:
    """The families that take a folder for a checkpoint of theirs."""
    return [name for name, family in FAMILIES.items() if family.builder.recognises(folder)]


def all_components() -> list[str]:
    """Every part of every family, each once."""
    return list(dict.fromkeys(part for family in FAMILIES.values() for part in family.builder.COMPONENTS))


def make_parts(builder: Any, components: tuple[str, ...], plan: Plan) -> dict[str, float]:
    """Make each part, say so, and return seconds a part (0 for one that was up to date)."""
    seconds, begun = {}, time.perf_counter()
    for i, name in enumerate(components, 1):
        start = time.perf_counter()
        made = builder.build(name)
        seconds[name] = round(time.perf_counter() - start, 2) if made else 0.0
        if made:
            remember_seconds({name: seconds[name]}, builder.shop.recipe, builder.shop.checkpoint)
        size = sum(record.bytes for record in builder.folder.manifest.parts[name].files.values())
        elapsed, left = time.perf_counter() - begun, plan.seconds_left((*components[i:], PROOF), seconds)
        when = f"{seconds[name]:.1f} s" if made else "up to date"
        say(f"{name:16} {size / 1e6:9.1f} MB  {when:>10}  {clock(elapsed)} elapsed, {clock(left)} left")
    start = time.perf_counter()
    builder.finish()
    if PROOF in plan.needs:
        remember_seconds({PROOF: round(time.perf_counter() - start, 2)}, builder.shop.recipe, builder.shop.checkpoint)
    return seconds


def describe_result(output: Path, manifest: BuildManifest, components: tuple[str, ...]) -> str:
    """What lies in the folder now, and what to do next: speak, or build what is missing of its `components`."""
    lacks = manifest.lacks()
    if lacks:
        return f"built {output}: it cannot speak yet; add what is missing with {manifest.rebuild_command(output, lacks)}"
    missing = [name for name in components if name not in manifest.parts]
    clones = f"; to clone voices: {manifest.rebuild_command(output, missing)}" if missing else ""
    return f"built {output}: python inference.py --model-path {output} --text \"...\" --out x.wav{clones}"
