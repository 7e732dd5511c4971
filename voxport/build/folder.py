"""One build folder: parts come in whole, are recorded as they come, and are rebuilt only when they do not verify."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

from voxport.errors import UserError
from voxport.files import atomic_path
from voxport.manifest import FileRecord, Manifest, Part, record_file, verify_files

WORK = ".build"


class BuildFolder:
    """`onnx/<target>/` while it is being built. `manifest` always describes what lies in the folder."""

    def __init__(self, folder: Path, manifest: Manifest):
        """Open `folder` for a build that `manifest` describes; parts of an earlier build are kept if they still serve."""
        self.folder, self.manifest = Path(folder), manifest
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make {folder}: {error.strerror}; choose another --output") from error
        earlier = self._earlier()
        if earlier is not None:
            kept = {n: p for n, p in earlier.parts.items() if p.recipe.get("source") == manifest.source.fingerprint}
            self.manifest = dataclasses.replace(manifest, parts=kept, files=earlier.files)

    def _earlier(self) -> Manifest | None:
        try:
            return Manifest.read(self.folder)
        except UserError:
            return None

    @property
    def work(self) -> Path:
        """Scratch space on the same file system, so that finished files can be renamed into place."""
        path = self.folder / WORK
        path.mkdir(exist_ok=True)
        return path

    def is_current(self, name: str, recipe: dict) -> bool:
        """Whether the part is there, was made by this recipe from this checkpoint, and still verifies."""
        part = self.manifest.parts.get(name)
        if part is None or part.recipe != recipe:
            return False
        try:
            verify_files(self.folder, part.files)
        except UserError:
            return False
        return True

    def install(self, name: str, graph: Path, part: Part) -> None:
        """Rename a checked part's files into the folder and record them. `part.files` is filled in here."""
        files = [graph.with_name(graph.name + ".data"), graph]
        records = {path.name: record_file(path) for path in files}
        for path in files:
            os.replace(path, self.folder / path.name)
        part = dataclasses.replace(part, graph=graph.name, files=records)
        self._record(parts=self.manifest.parts | {name: part})

    def copy_in(self, source: Path, name: str) -> None:
        """Copy a file that belongs to no part and record it."""
        with atomic_path(self.folder / name) as temporary:
            shutil.copyfile(source, temporary)
        record: dict[str, FileRecord] = {name: record_file(self.folder / name)}
        self._record(files=self.manifest.files | record)

    def _record(self, **changes) -> None:
        self.manifest = dataclasses.replace(self.manifest, **changes)
        self.manifest.write(self.folder)

    def clean(self) -> None:
        """Remove the scratch space."""
        shutil.rmtree(self.folder / WORK, ignore_errors=True)
