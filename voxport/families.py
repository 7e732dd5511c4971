"""The model families by the name in their manifests, and where each keeps what is its own. A new family is one more line."""

from __future__ import annotations

import importlib
import typing
from dataclasses import dataclass

from voxport.errors import UserError

HIGGS, OMNIFISH = "higgs_audio_v3", "omnifish"


@dataclass(frozen=True)
class Family:
    """Places spelt `module:name`, imported only when asked for: the run side must not meet the build side's needs."""

    manifest: str
    speaker: str
    script: str | None  # `speak(folder, arguments) -> report`, where inference.py is told more than a Higgs build knows


FAMILIES = {
    HIGGS: Family("voxport.manifest:Manifest", "voxport.run.higgs:Speaker", None),
    OMNIFISH: Family("voxport.manifest_omnifish:OmniFishManifest", "voxport.run.omnifish:Speaker", "voxport.run.omnifish_script:speak"),
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
