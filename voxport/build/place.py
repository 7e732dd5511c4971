"""Where a build may go: a folder of its own, never over files that no build made."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from voxport.build.folder import SCRATCH, STANDALONE, read_manifest
from voxport.build.recipes import Recipe
from voxport.build.swap import ARRIVING, LOCK, NEXT, TRASH, WORK, aside
from voxport.errors import UserError
from voxport.families import FAMILIES
from voxport.files import is_same_file, read_any_json, read_json
from voxport.manifest import MANIFEST_NAME, BuildManifest, Target

WORK_NAMES = {LOCK, NEXT, ARRIVING, TRASH, SCRATCH, STANDALONE}  # all that a build leaves in its scratch space
MANIFEST_KEYS = {"schema_version", "family"}  # of a manifest of any version
TAKEN = ("LICENSE", "tokenizer.json", "tokenizer_config.json", "genai_config.json", "*.onnx", "*.onnx.data", "config.json")
# of a recipe, what the user chooses: what it is called, and the flag that asks for it
SETTINGS = {"device": ("device", "--device"), "precision": ("precision", "--precision"), "rounding": ("recipe", "--recipe"),
            "heads": ("heads", "--heads-precision"), "rope_table": ("rope table", "--rope-table"),
            "attention": ("attention", "--attention")}  # fmt: skip


def check_place(output: Path, checkpoint: Path, flag: str = "--output") -> None:
    """UserError if `output` can be no build's folder, is the checkpoint's own, or it or its neighbour by the name that builds change
    places under holds files that a build would replace and none has made."""
    if is_same_file(output, checkpoint):
        raise UserError(f"{flag} {output} is the folder of the checkpoint; name another")
    place = output.resolve()
    if not place.name:
        raise UserError(f"{flag} {output} is the top of a disk; name a folder of its own")
    found = strangers(place)
    if found:
        raise UserError(f"{flag} {output} holds {found[0]}, which a build would replace and none has made; name a folder of its own")
    beside = aside(place)
    if os.path.lexists(beside) and (beside.is_symlink() or not is_manifest(beside / MANIFEST_NAME)):
        raise UserError(f"{beside} is no build, and one in {output} would pass through a folder of that name; rename it, or choose"
                        " another place for the build")  # fmt: skip


def strangers(place: Path) -> list[str]:
    """Names in a folder that a build would replace and none has made; in the folder of a build there are none."""
    work = place / WORK
    if os.path.lexists(work) and not is_work(work):
        return [WORK]
    if os.path.lexists(place / MANIFEST_NAME):
        return [] if is_manifest(place / MANIFEST_NAME) or is_cut_build(place) else [MANIFEST_NAME]
    if (work / ARRIVING).is_dir():  # a first build that was killed while its files moved in
        return []
    return sorted(path.name for pattern in TAKEN for path in place.glob(pattern)) if place.is_dir() else []


def is_work(folder: Path) -> bool:
    """Whether a folder is scratch space of a build: it holds nothing else."""
    return folder.is_dir() and {path.name for path in folder.iterdir()} <= WORK_NAMES


def is_manifest(path: Path) -> bool:
    """Whether a file is the manifest of a build, of whichever version."""
    try:
        return read_json(path, "manifest").keys() >= MANIFEST_KEYS
    except UserError:
        return False


def is_cut_build(place: Path) -> bool:
    """Whether a folder's manifest is no JSON any more, and what a build leaves lies beside it."""
    try:
        read_any_json(place / MANIFEST_NAME, "manifest")
    except UserError:
        parts = {f"{name}.onnx" for family in FAMILIES.values() for name in family.builder.COMPONENTS}
        return (place / WORK).is_dir() or any((place / name).is_file() for name in parts)
    return False


def check_source(output: Path, source: str, fingerprint: str, whole: bool) -> None:
    """UserError if a finished build of another checkpoint than `source` lies in `output`, and not the `whole` of this one is to be
    made: nothing that speaks would be left. A build that cannot be read, such as an old version's, is of none."""
    found = read_manifest(output)
    if whole or found is None or found.source.fingerprint == fingerprint:
        return
    raise UserError(
        f"--output {output} holds a build of {_name(found, source)}; parts of {source} cannot be added to it: leave out --components to"
        " replace all of it, or name another folder"
    )


def describe_change(output: Path, source: str, fingerprint: str, recipe: dict, whole: bool = True) -> str | None:
    """What of the finished build in `output` gives way to one of the checkpoint `source` by `recipe` (as the manifest keeps it), of
    all parts or not; None if nothing does."""
    found = read_manifest(output)
    if found is None:
        return f"replaces the build in {output}, which cannot be read" if (output / MANIFEST_NAME).exists() else None
    old, new = ({key: str(held.get(key) or "default") for key in SETTINGS} for held in (found.recipe, recipe))
    if old["precision"] != new["precision"]:
        old["rounding"] = new["rounding"]  # it says how int4 is rounded
    changes = [f"{name} {new[key]} in place of {old[key]}" for key, (name, _) in SETTINGS.items() if new[key] != old[key]]
    if found.source.fingerprint != fingerprint:
        return f"replaces the build in {output}: {', '.join([f'{source} in place of {_name(found, source)}', *changes])}"
    if not changes:
        return None
    verb, rest = ("replaces", "") if whole else ("changes", "; parts that were not asked for stay as they are")
    return f"{verb} the build in {output}: {', '.join(changes)}{rest}"


def check_way(output: Path, recipe: Recipe, fingerprint: str, components: Collection[str]) -> None:
    """UserError if parts of the finished build of this checkpoint in `output` would serve on beside these `components` and were made
    for another target, or otherwise than by this `recipe`: the manifest speaks for all of them."""
    found = read_manifest(output)
    if found is None or found.source.fingerprint != fingerprint:
        return
    stay = {name: part for name, part in found.parts.items() if name not in components}
    old, new = found.target, Target(recipe.device, recipe.precision)
    if stay and old != new:
        raise UserError(
            f"--output {output} holds a {old.device}_{old.precision} build; parts of {new.device}_{new.precision} cannot be mixed in:"
            f" leave out --components, name another --output, or build with {_flags(found.recipe, recipe.record())}"
        )
    other = [name for name, part in stay.items() if part.recipe != recipe.part_recipe(name, fingerprint)]
    if other:
        flags = _flags(found.recipe, recipe.record())
        raise UserError(
            f"--output {output} holds {', '.join(other)} made another way than this build is to be: add {','.join(other)} to --components,"
            f" leave out --components, or name another --output{f', or build with {flags}' if flags else ''}"
        )


def _flags(old: dict, new: dict) -> str:
    """The flags that ask for what an `old` recipe chose and a `new` one does not."""
    differ = [(flag, old.get(key)) for key, (_, flag) in SETTINGS.items() if old.get(key) != new.get(key)]
    told = " ".join(f"{flag} {value}" for flag, value in differ if value is not None)
    return " and ".join([*([told] if told else []), *(f"no {flag}" for flag, value in differ if value is None)])


def _name(found: BuildManifest, source: str) -> str:
    """The checkpoint of a build; its files may have changed under the same name."""
    before = " as its files were then" if found.source.id == source else ""
    return f"the {FAMILIES[found.family].short} checkpoint {found.source.id}{before}"
