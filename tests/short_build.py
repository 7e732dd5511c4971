"""A short build in a process of its own that ends without a word at some step on the disk: `python short_build.py FOLDER STEP [plain]`.

A fork of the tests' own process would inherit locks and thread pools of threads that it has not.
"""

import dataclasses
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from voxport.build import swap
from voxport.build.folder import BuildFolder
from voxport.manifest import Manifest

STEPS = ("rename", "replace", "link", "mkdir", "unlink", "rmdir", "fsync")  # what changes a disk
NEVER = 10**9
DEAD = 9


def replace_text_embed(place: Path) -> None:
    """text_embed gets other bytes, all other parts serve on."""
    with BuildFolder(place, dataclasses.replace(Manifest.read(place), created="later")) as made:
        made.clear_scratch()
        part = made.manifest.parts["text_embed"]
        for name in part.files:
            (made.scratch / name).write_bytes((place / name).read_bytes() + b"\0")
        made.install("text_embed", made.scratch / part.graph, dataclasses.replace(part, files={}))
        made.commit()


def die_at(number: int) -> list[int]:
    """Let this process end without a word at the `number`-th step that changes the disk. Returns a list that counts."""
    count = [0]

    def counted(real):
        def step(*arguments, **named):
            count[0] += 1
            if count[0] == number:
                os._exit(DEAD)
            return real(*arguments, **named)

        return step

    for name in STEPS:
        setattr(os, name, counted(getattr(os, name)))
    swap.exchange = counted(swap.exchange)
    return count


if __name__ == "__main__":
    if "plain" in sys.argv[3:]:  # a system that cannot exchange two folders in one step
        swap.exchange = lambda first, second: False
    steps = die_at(int(sys.argv[2]))
    replace_text_embed(Path(sys.argv[1]))
    print(steps[0])
