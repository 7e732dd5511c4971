"""Where a build may go: a folder of its own, never over files that no build made."""

from __future__ import annotations

from pathlib import Path

from voxport.build.swap import WORK
from voxport.errors import UserError
from voxport.files import is_same_file
from voxport.manifest import MANIFEST_NAME

TAKEN = ("LICENSE", "tokenizer.json", "tokenizer_config.json", "genai_config.json", "*.onnx", "*.onnx.data", "config.json")


def check_place(output: Path, checkpoint: Path) -> None:
    """UserError if `output` is the checkpoint's own folder, or holds files that a build would replace and none has made."""
    if is_same_file(output, checkpoint):
        raise UserError(f"--output {output} is the folder of the checkpoint; name another")
    if (output / MANIFEST_NAME).exists() or (output / WORK).exists():
        return
    found = sorted(path.name for pattern in TAKEN for path in output.glob(pattern)) if output.is_dir() else []
    if found:
        raise UserError(f"--output {output} is no build and holds {found[0]}, which a build would replace; name a folder of its own")
