"""One build folder: a build is made beside the one that is there, part by part, and takes its place when it is whole.

`.build/next` is the build that will be: parts come in checked, are recorded as they come, and are made again only when they do
not verify. Parts that serve on are hard links, so that nothing is copied and the build in place is never written to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import types
from collections.abc import Collection, Iterator
from pathlib import Path

from voxport.build.swap import LOCK, NEXT, WORK, recover, replace_build
from voxport.errors import UserError, say
from voxport.files import atomic_path
from voxport.lock import Lock
from voxport.manifest import MANIFEST_NAME, FileRecord, Manifest, Part, Proof, record_file, verify_files

STANDALONE = "qwen3_standalone"
SCRATCH = "scratch"


class BuildFolder:
    """`onnx/<target>/` while it is being built, and locked. `manifest` describes `next`, the build that will be.

    Use as a context: leaving it gives the lock back and removes scratch; unless `commit` was called the folder is as it was,
    and parts that were finished serve the next run.
    """

    def __init__(self, folder: Path, manifest: Manifest, keep_intermediate: bool = False):
        """Open `folder` for a build that `manifest` describes; parts of an earlier build are kept if they still serve."""
        self.folder = Path(folder).resolve()
        self._kept = {LOCK, STANDALONE} if keep_intermediate else {LOCK}
        self._make_room()
        self._lock = Lock(self.work / LOCK)
        recover(self.folder, owned_files)
        self._sweep(keep={LOCK, NEXT, STANDALONE})
        self.next = self.work / NEXT
        self._earlier = [(home, found) for home in (self.folder, self.next) if (found := read_manifest(home)) is not None]
        self._made = self.next.exists()
        self._present: set[str] = set()  # files that this run put into `next`, or found there and trusts
        self._settled: list[str] = []  # parts that this run made, or was asked for and found
        self.next.mkdir(exist_ok=True)
        self.manifest = self._merge(manifest)

    def _make_room(self) -> None:
        try:
            self.work.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make {self.folder}: {error.strerror}; choose another --output") from error

    @property
    def work(self) -> Path:
        """Scratch space on the same file system, so that finished files can be renamed into place."""
        return self.folder / WORK

    @property
    def scratch(self) -> Path:
        """Where parts are made, one after the other."""
        return self.work / SCRATCH

    def clear_scratch(self) -> None:
        """Remove what an earlier part left."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir()

    def __enter__(self) -> BuildFolder:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        self._sweep(keep=self._kept | {NEXT} if self._made else self._kept)
        self._lock.release()
        with contextlib.suppress(OSError):  # something is kept there, or the next build has just begun
            self.work.rmdir()

    def _sweep(self, keep: set[str]) -> None:
        for path in list(self.work.iterdir()):
            if path.name not in keep:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _merge(self, manifest: Manifest) -> Manifest:
        """`manifest` with the parts and files of earlier builds of the same checkpoint, those in place first. What was begun
        serves only if it was to be made in the same way, and lists parts that were to serve on from the build in place; they are not
        its own."""
        parts, files = {}, {}
        for home, found in reversed(self._earlier):
            same_way = home != self.next or (found.target, found.recipe) == (manifest.target, manifest.recipe)
            if same_way and found.source.fingerprint == manifest.source.fingerprint:
                own = lambda part: home != self.next or all(_has(home, name, record) for name, record in part.files.items())
                parts |= {name: part for name, part in found.parts.items() if own(part)}
                files |= found.files
        return self._with_proof(dataclasses.replace(manifest, parts=parts, files=files, proof=None))

    def _with_proof(self, manifest: Manifest) -> Manifest:
        """A proof speaks for all parts together: it is kept while they are those that it was taken from."""
        proofs = [found.proof for _, found in self._earlier if found.proof is not None and found.parts == manifest.parts]
        return dataclasses.replace(manifest, proof=proofs[0] if proofs else None)

    def is_current(self, name: str, recipe: dict) -> bool:
        """Whether the part is there, was made by this recipe from this checkpoint, and still verifies."""
        for home, part in self._copies(name, recipe):
            try:
                verify_files(home, part.files)
            except UserError:
                continue
            self._take(home, part.files)
            self._settle(name, part)
            return True
        return False

    def _copies(self, name: str, recipe: dict) -> Iterator[tuple[Path, Part]]:
        for home, found in self._earlier:
            if name in found.parts and found.parts[name].recipe == recipe:
                yield home, found.parts[name]

    def _take(self, home: Path, files: dict[str, FileRecord]) -> None:
        """Link files of an earlier build into `next`, or copy them where the file system has no links."""
        for name in files if home != self.next else ():
            (self.next / name).unlink(missing_ok=True)
            try:
                os.link(home / name, self.next / name)
            except OSError:
                shutil.copy2(home / name, self.next / name)
        self._present.update(files)

    def install(self, name: str, graph: Path, part: Part) -> None:
        """Rename a checked part's files into `next` and record them. `part.files` is filled in here."""
        files = [graph.with_name(graph.name + ".data"), graph]
        records = {path.name: record_file(path) for path in files}
        for path in files:
            os.replace(path, self.next / path.name)
        self._present.update(records)
        part = dataclasses.replace(part, graph=graph.name, files=records)
        self._made = True
        self._settle(name, part)

    def copy_in(self, source: Path, name: str) -> None:
        """Copy a file that belongs to no part and record it."""
        with atomic_path(self.next / name) as temporary:
            shutil.copyfile(source, temporary)
        record: dict[str, FileRecord] = {name: record_file(self.next / name)}
        self._present.add(name)
        self._record(files=self.manifest.files | record)

    def record_proof(self, proof: Proof) -> None:
        """Let the manifest carry what the finished parts computed."""
        self.manifest = dataclasses.replace(self.manifest, proof=proof)
        self.manifest.write(self.next)

    def _settle(self, name: str, part: Part) -> None:
        self._settled.append(name)
        self._record(parts=self.manifest.parts | {name: part})

    def _record(self, **changes) -> None:
        self.manifest = self._with_proof(dataclasses.replace(self.manifest, **changes))
        self.manifest.write(self.next)

    def require_whole(self, asked: Collection[str]) -> None:
        """UserError if a part that is to serve on, and is not among those `asked` for, is not whole any more."""
        broken = [name for name, part in self.manifest.parts.items() if name not in asked and not self._home_of(part.files)]
        if broken:
            raise UserError(
                f"{self.folder}: files of {', '.join(broken)} are missing or cut; the build there is as it was, and what was made now is"
                f" kept: make all of it whole with {self.manifest.rebuild_command(self.folder, dict.fromkeys([*asked, *broken]))}"
            )

    def complete(self) -> None:
        """Bring in the parts and files that this run was not asked about. UserError if a part is not whole any more; other files
        that are gone are dropped with a warning."""
        self.require_whole(self._settled)
        for part in self.manifest.parts.values():
            self._bring(part.files)
        for name, record in list(self.manifest.files.items()):
            if not self._bring({name: record}):
                say(f"warning: {name} is missing or cut and is left out of {self.folder}")
                self._record(files={n: r for n, r in self.manifest.files.items() if n != name})

    def _bring(self, files: dict[str, FileRecord]) -> bool:
        """Whether `next` has these files by now, or could take them from an earlier build that recorded them."""
        home = self._home_of(files)
        if home is None:
            return False
        if not self._present.issuperset(files):
            self._take(home, files)
        return True

    def _home_of(self, files: dict[str, FileRecord]) -> Path | None:
        """Where these files lie whole: `next`, or an earlier build that recorded them."""
        if self._present.issuperset(files):
            return self.next
        for home, found in self._earlier:
            recorded = found.files | {name: r for part in found.parts.values() for name, r in part.files.items()}
            if files.items() <= recorded.items() and all(_has(home, name, record) for name, record in files.items()):
                return home
        return None

    def commit(self) -> None:
        """Let `next` take the place of the build in the folder, unless they are the same."""
        self.complete()
        owned = owned_files(self.folder)
        if self._is_same():
            self.manifest = read_manifest(self.folder)
        else:
            self._finish_next()
            self._lock = replace_build(self.folder, owned, self._lock)
        self._made = False

    def _is_same(self) -> bool:
        """Whether the build in place is this one but for the date, and is this one's very files."""
        old = read_manifest(self.folder)
        if old is None or dataclasses.replace(old, created=self.manifest.created) != self.manifest:
            return False
        same = lambda name: os.path.samefile(self.next / name, self.folder / name) or _alike(self.next / name, self.folder / name)
        return all((self.folder / name).is_file() and same(name) for name in owned_files(self.next))

    def _finish_next(self) -> None:
        """Leave nothing in `next` that its manifest does not list, and have all of it on the disk."""
        self.manifest.write(self.next)
        owned = {*owned_files(self.next), MANIFEST_NAME}
        for path in list(self.next.iterdir()):
            if path.name not in owned:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            else:
                _sync(path)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of the build in a folder, None if it has none that can be read."""
    try:
        return Manifest.read(folder)
    except UserError:
        return None


def is_begun(folder: Path, manifest: Manifest) -> bool:
    """Whether a build of this very checkpoint, finished or not, has parts in `folder`: its weights were read before."""
    found = [read_manifest(home) for home in (Path(folder), Path(folder) / WORK / NEXT)]
    return any(m is not None and m.parts and m.source.fingerprint == manifest.source.fingerprint for m in found)


def owned_files(folder: Path) -> set[str]:
    """Names of the files of the build in a folder, without the manifest."""
    found = read_manifest(folder)
    return {*found.files, *(name for part in found.parts.values() for name in part.files)} if found else set()


def _has(folder: Path, name: str, record: FileRecord) -> bool:
    path = folder / name
    return path.is_file() and path.stat().st_size == record.bytes


def _alike(first: Path, second: Path) -> bool:
    """Whether two small files have the same bytes; large ones are links to each other if they are the same."""
    return first.stat().st_size < 1 << 26 and first.read_bytes() == second.read_bytes()


def _sync(path: Path) -> None:
    """Have a file's bytes on the disk before anything depends on them."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
