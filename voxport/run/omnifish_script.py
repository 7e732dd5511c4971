"""What the verbs of inference.py need to know of an OmniFish build."""

from __future__ import annotations

import argparse
from pathlib import Path

from voxport.run.omnifish import Speaker
from voxport.run.omnifish_reading import plan, read, read_stream
from voxport.run.omnifish_request import Wish, check_wish
from voxport.run.omnifish_text import read_dialogue

__all__ = ["LINE_FIELDS", "OWN_FLAGS", "TEXT_FLAGS", "Speaker", "Wish", "add_flags", "check_wish", "plan", "read", "read_stream", "read_wish"]
OWN_FLAGS = ("dialogue", "language", "speaker", "quality", "instruct", "before", "after", "residual_temperature",
             "residual_top_k", "residual_top_p", "steps", "threshold")  # fmt: skip
TEXT_FLAGS = ("dialogue",)  # those of them that stand in place of --text
LINE_FIELDS = {"language": str, "speaker": str, "quality": str, "instruct": str, "residual_temperature": (int, float),
               "residual_top_k": int, "residual_top_p": (int, float), "steps": int, "threshold": (int, float)}  # fmt: skip
WISHES = ("ref_audio", "ref_text", "temperature", "top_k", "top_p", "seed", "max_frames", "tags",
          *(flag for flag in OWN_FLAGS if flag not in ("dialogue", "before", "after")))  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that only OmniFish builds know."""
    add = parser.add_argument_group("OmniFish builds").add_argument
    add("--dialogue", type=Path, metavar="FILE", help="speak the lines 'speaker: text' of a file, in place of --text")
    add("--language", help="of the text, e.g. en or pl (default: none)")
    add("--speaker", metavar="NAME", help="a voice that the model learnt by name (default: none)")
    add("--quality", metavar="NAME", help="a recording that the model learnt by name, e.g. q35 (default: none)")
    add("--instruct", metavar="TEXT", help="how to speak, in words, in place of --speaker and --quality (default: none)")
    add("--before", action="append", metavar="TEXT", help="sentence before the text, not spoken; may be repeated")
    add("--after", action="append", metavar="TEXT", help="sentence after the text, not spoken; may be repeated")
    add("--residual-temperature", type=float, help="of the nine codes that follow the first (default: the build's)")
    add("--residual-top-k", type=int, help="of the same, 0 is off (default: the build's)")
    add("--residual-top-p", type=float, help="of the same, 1 is off (default: the build's)")
    add("--steps", type=int, help="rounds in which a block is revealed; more are slower and surer (default: the build's)")
    add("--threshold", type=float, help="reveal frames of more than this probability at once (default: the build's)")


def read_wish(arguments: argparse.Namespace, speaker: Speaker, text: str | None) -> Wish:
    """What the flags ask for."""
    turns = read_dialogue(arguments.dialogue, speaker.manifest) if arguments.dialogue is not None else ()
    wishes = {name: getattr(arguments, name) for name in WISHES}
    return Wish(text, turns, before=tuple(arguments.before or ()), after=tuple(arguments.after or ()), **wishes)
