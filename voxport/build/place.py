"""Where a build may go: a folder of its own, never over files that no build made."""

from __future__ import annotations

from pathlib import Path

from voxport.build.folder import read_manifest
from voxport.build.swap import WORK
from voxport.errors import UserError
from voxport.families import FAMILIES
from voxport.files import is_same_file
from voxport.manifest import MANIFEST_NAME, BuildManifest

TAKEN = ("LICENSE", "tokenizer.json", "tokenizer_config.json", "genai_config.json", "*.onnx", "*.onnx.data", "config.json")
# of a recipe, what the user chooses, and what it is called
SETTINGS = {"device": "device", "precision": "precision", "rounding": "recipe", "heads": "heads", "rope_table": "rope table",
            "attention": "attention"}  # fmt: skip


def check_place(output: Path, checkpoint: Path) -> None:
    """UserError if `output` is the checkpoint's own folder, or holds files that a build would replace and none has made."""
    if is_same_file(output, checkpoint):
        raise UserError(f"--output {output} is the folder of the checkpoint; name another")
    if (output / MANIFEST_NAME).exists() or (output / WORK).exists():
        return
    found = sorted(path.name for pattern in TAKEN for path in output.glob(pattern)) if output.is_dir() else []
    if found:
        raise UserError(f"--output {output} is no build and holds {found[0]}, which a build would replace; name a folder of its own")


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
    changes = [f"{name} {new[key]} in place of {old[key]}" for key, name in SETTINGS.items() if new[key] != old[key]]
    if found.source.fingerprint != fingerprint:
        return f"replaces the build in {output}: {', '.join([f'{source} in place of {_name(found, source)}', *changes])}"
    if not changes:
        return None
    verb, rest = ("replaces", "") if whole else ("changes", "; parts that were not asked for stay as they are")
    return f"{verb} the build in {output}: {', '.join(changes)}{rest}"


def _name(found: BuildManifest, source: str) -> str:
    """The checkpoint of a build; its files may have changed under the same name."""
    before = " as its files were then" if found.source.id == source else ""
    return f"the {FAMILIES[found.family].short} checkpoint {found.source.id}{before}"
