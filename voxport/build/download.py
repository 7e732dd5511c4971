"""Find a checkpoint: the repository's demo, a local folder, or a hub repository downloaded into `model/`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from voxport.errors import UserError, WorkError

DEFAULT_ID = "bosonai/higgs-audio-v3-tts-4b"
DEMO = "demo"
DEMO_FOLDER = Path(__file__).parents[2] / "demo" / "checkpoint"
NEEDED = ("config.json", "codec_config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json",
          "tokenizer_config.json", "LICENSE*")  # fmt: skip


@dataclass(frozen=True)
class Found:
    """Where a checkpoint lies: the id as given, its commit if known, and the folder."""

    id: str
    revision: str | None
    folder: Path


def find_checkpoint(name: str, model_dir: Path, skip_download: bool) -> Found:
    """Resolve `demo`, a folder or a hub id. UserError if nothing is there, WorkError if the download fails.

    A hub id may have been renamed since: the hub redirects the old one, and the revision recorded is the commit that was read.
    """
    if name == DEMO:
        return Found(DEMO, None, DEMO_FOLDER)
    if Path(name).is_dir():
        return Found(name, None, Path(name))
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UserError(f"checkpoint {name!r} is neither 'demo', nor an existing folder, nor a hub id of the form owner/name")
    folder = model_dir / name.split("/")[1]
    if skip_download or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return _local_copy(name, folder)
    return _download(name, folder)


def _local_copy(name: str, folder: Path) -> Found:
    if not (folder / "config.json").is_file():
        raise UserError(f"{name} is not in {folder} and downloading is switched off; copy it there or allow the download")
    return Found(name, _recorded_revision(folder), folder)


def _recorded_revision(folder: Path) -> str | None:
    """The commit that huggingface_hub noted beside the files, None if they were copied in by hand."""
    note = folder / ".cache" / "huggingface" / "download" / "config.json.metadata"
    return note.read_text(encoding="utf-8").split("\n")[0] or None if note.is_file() else None


def _download(name: str, folder: Path) -> Found:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        revision = HfApi().model_info(name).sha
        snapshot_download(name, revision=revision, local_dir=folder, allow_patterns=list(NEEDED))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise WorkError(
            f"downloading {name} into {folder} failed: {reason}; run again to go on where it stopped,"
            " or name a local folder with --checkpoint"
        ) from error
    return Found(name, revision, folder)
