"""Find a checkpoint: the repository's demo, a local folder, or a hub repository downloaded into `model/`."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from voxport.build.fetch import fetch, partial_path, size_of
from voxport.build.sizes import at_least, at_most
from voxport.errors import UserError, WorkError
from voxport.files import free_disk, is_folder

DEFAULT_ID = "bosonai/higgs-audio-v3-tts-4b"
DEMO = "demo"
DEMO_FOLDER = Path(__file__).parents[2] / "demo" / "checkpoint"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
CONFIGS, WEIGHTS = ("config.json", "codec_config.json"), "*.safetensors"
NEEDED = (*CONFIGS, WEIGHTS, "*.safetensors.index.json", "tokenizer.json",
          "tokenizer_config.json", "LICENSE*")  # fmt: skip


@dataclass(frozen=True)
class Found:
    """Where a checkpoint lies: the id as given, its commit if known, and the folder; `missing` are the files, as the hub lists
    them, that are still to be fetched into it, None if the hub has no part in it."""

    id: str
    revision: str | None
    folder: Path
    missing: tuple[Any, ...] | None = None

    @property
    def lacks_weights(self) -> bool:
        """Whether what is missing is more than a few small files."""
        return any(fnmatch.fnmatch(file.path, WEIGHTS) for file in self.missing or ())

    @property
    def coming(self) -> int:
        """Bytes still to be fetched."""
        return missing_bytes(self.missing or (), self.folder)


def look_up(name: str, model_dir: Path, skip_download: bool) -> Found:
    """Resolve `demo`, a folder or a hub id, and of the latter ask which files are missing here. Fetches nothing. UserError if nothing
    is there, WorkError if the hub cannot be asked.

    A hub id may have been renamed since: the hub redirects the old one, and the revision recorded is the commit that was read.
    """
    if name == DEMO:
        return Found(DEMO, None, DEMO_FOLDER)
    if name and is_folder(name):
        return Found(name, None, Path(name))
    if not HUB_ID.fullmatch(name) or ".." in name or "--" in name:
        raise UserError(f"checkpoint {name!r} is neither 'demo', nor an existing folder, nor a hub id of the form owner/name")
    folder = model_dir / name.split("/")[1]
    if skip_download or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return _local_copy(name, folder)
    return _ask_hub(name, folder)


def _local_copy(name: str, folder: Path) -> Found:
    if not (folder / "config.json").is_file():
        raise UserError(f"{name} is not in {folder} and downloading is switched off; copy it there or allow the download")
    return Found(name, _recorded_revision(folder), folder)


def _recorded_revision(folder: Path) -> str | None:
    """The commit that huggingface_hub noted beside the files, None if they were copied in by hand."""
    note = folder / ".cache" / "huggingface" / "download" / "config.json.metadata"
    return note.read_text(encoding="utf-8").split("\n")[0] or None if note.is_file() else None


def _ask_hub(name: str, folder: Path) -> Found:
    from huggingface_hub import HfApi

    with explained(name, folder):
        revision = HfApi().model_info(name).sha
        return Found(name, revision, folder, tuple(missing_files(name, revision, folder)))


def download(found: Found) -> Found:
    """Fetch what is missing, and small files anew if the hub's are others; the same place, whole. WorkError if that fails."""
    if found.missing is None:
        return found
    require_disk(found.coming, found.id, found.folder)
    with explained(found.id, found.folder):
        for file in found.missing:
            if file.lfs is not None:
                _fetch(found.id, found.revision, file, found.folder)
        fetch_small(found, NEEDED, found.folder)
    return dataclasses.replace(found, missing=None)


def fetch_configs(found: Found, folder: Path) -> None:
    """Fetch into `folder` what tells a checkpoint's sizes: its config files alone."""
    with explained(found.id, folder):
        fetch_small(found, CONFIGS, folder)


def fetch_small(found: Found, names: Iterable[str], folder: Path) -> None:
    """Fetch files by the hub's own client, those that `folder` lacks."""
    from huggingface_hub import snapshot_download

    snapshot_download(found.id, revision=found.revision, local_dir=folder, allow_patterns=list(names))


@contextlib.contextmanager
def explained(name: str, folder: Path) -> Iterator[None]:
    """What goes wrong between here and the hub, as a UserError or WorkError."""
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    try:
        yield
    except RepositoryNotFoundError as error:
        raise UserError(
            f"the hub has no repository {name} that you may read; check the id, or, if its licence must be accepted first,"
            " do so on its page and log in with: hf auth login"
        ) from error
    except HfHubHTTPError.__bases__ as error:  # OSError, and the base of whichever HTTP library the hub's client uses
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise WorkError(
            f"downloading {name} into {folder} failed: {reason}; run again to fetch what is still missing,"
            " or name a local folder with --checkpoint"
        ) from error


def _fetch(name: str, revision: str, file, folder: Path) -> None:
    """Fetch a large file of the repository, by itself so that it can be continued."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(name, file.path, revision=revision)
    fetch(url, folder / file.path, file.size, file.lfs.sha256, build_hf_headers())


def missing_files(name: str, revision: str, folder: Path) -> list:
    """The needed files of a repository, as the hub lists them, that `folder` lacks."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    files = [entry for entry in HfApi().list_repo_tree(name, revision=revision) if isinstance(entry, RepoFile)]
    needed = [file for file in files if any(fnmatch.fnmatch(file.path, pattern) for pattern in NEEDED)]
    return [file for file in needed if size_of(folder / file.path) != file.size]


def missing_bytes(missing: Iterable, folder: Path) -> int:
    """Bytes still to come; what was fetched of a cut file counts as there."""
    begun = [size_of(partial_path(folder / file.path, file.lfs.sha256)) for file in missing if file.lfs is not None]
    return max(0, sum(file.size for file in missing) - sum(begun))


def require_disk(size: int, name: str, folder: Path) -> None:
    """UserError unless `size` bytes fit where `folder` lies."""
    free = free_disk(folder)
    if size > free:
        raise UserError(
            f"downloading {name} needs {at_least(size)} more, {at_most(free)} is free where {folder} lies; free some, or"
            " fetch it elsewhere and name that folder with --checkpoint"
        )
