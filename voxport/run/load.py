"""Open a build folder of whichever family it is.

speaker = load_speaker("onnx/cpu_int4")
speaker.speak("Hello there.").save("hello.wav")
"""

from __future__ import annotations

import os
import typing
from pathlib import Path

from voxport.families import find_family
from voxport.manifest import Manifest


def load_speaker(folder: str | os.PathLike, **options) -> typing.Any:
    """The `Speaker` of the folder's family; `options` are those of its `load`."""
    family = find_family(Manifest.read(folder).family, str(folder))
    return family.script.Speaker.load(folder, **options)
