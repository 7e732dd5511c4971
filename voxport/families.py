"""The model families by the name in their manifests. A new family is one more line, and the modules that are called after it.

Of a family with the short name X, each module is imported only when asked for: the run side must not meet the build side's needs.

voxport/run/X_script.py     Speaker, its Wish, how texts are read in parts, and the flags of inference.py that only it knows
voxport/run/X_proof.py      the questions that a build's proof answers, and what diagnose_cuda.py feeds each part
voxport/build/X_script.py   whether a checkpoint is one of it, its flags of optimize.py, and the job of building
voxport/judge/X_judge.py    the levels of evidence of eval.py
"""

from __future__ import annotations

import importlib
import types
import typing
from dataclasses import dataclass

from voxport.errors import UserError

HIGGS, OMNIFISH = "higgs_audio_v3", "omnifish"


@dataclass(frozen=True)
class Family:
    """`short` is the name in flags and modules, `manifest` the place of its dataclass, spelt `module:name`."""

    short: str
    manifest: str

    @property
    def script(self) -> types.ModuleType:
        return importlib.import_module(f"voxport.run.{self.short}_script")

    @property
    def proof(self) -> types.ModuleType:
        return importlib.import_module(f"voxport.run.{self.short}_proof")

    @property
    def builder(self) -> types.ModuleType:
        return importlib.import_module(f"voxport.build.{self.short}_script")

    @property
    def judge(self) -> types.ModuleType:
        return importlib.import_module(f"voxport.judge.{self.short}_judge")


FAMILIES = {
    HIGGS: Family("higgs", "voxport.manifest:Manifest"),
    OMNIFISH: Family("omnifish", "voxport.manifest_omnifish:OmniFishManifest"),
}


def find_family(name: typing.Any, where: str) -> Family:
    """The family of that name; UserError lists the known ones."""
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(f"{where}: family is {name!r}; this version knows {', '.join(FAMILIES)}")
    return FAMILIES[name]


def resolve(place: str) -> typing.Any:
    """What stands at `module:name`."""
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


def spell(flag: str) -> str:
    """A flag as it is typed."""
    return f"--{flag.replace('_', '-')}"


def check_flags(arguments: typing.Any, name: str, flags: typing.Mapping[str, tuple[str, ...]], what: str) -> None:
    """UserError naming the first flag given that only other families know. `flags` maps each family to those of its own;
    `what` is what was given: a build, a checkpoint."""
    foreign = [flag for family, own in flags.items() if family != name for flag in own if flag not in flags[name]]
    for flag in foreign:
        if getattr(arguments, flag, None) is not None:
            raise UserError(f"{spell(flag)} has no use with a {what} of the family {name}")
