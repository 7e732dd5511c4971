"""What the verbs of inference.py need to know of a Higgs build."""

from __future__ import annotations

import argparse

from voxport.run.higgs import Speaker
from voxport.run.reading import plan, read, read_stream
from voxport.run.request import Wish, check_wish

__all__ = ["LINE_FIELDS", "OWN_FLAGS", "TEXT_FLAGS", "Speaker", "Wish", "add_flags", "check_wish", "plan", "read", "read_stream", "read_wish"]
OWN_FLAGS: tuple[str, ...] = ()  # flags of inference.py that only this family knows
TEXT_FLAGS: tuple[str, ...] = ()  # those of them that stand in place of --text
LINE_FIELDS: dict = {}  # keys of a .jsonl line beyond those that all families know, and their types
WISHES = ("ref_audio", "ref_text", "temperature", "top_k", "top_p", "seed", "max_frames", "tags")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """This family has no flag of its own."""


def read_wish(arguments: argparse.Namespace, speaker: Speaker, text: str | None) -> Wish:
    """What the flags ask for."""
    return Wish(text, **{name: getattr(arguments, name) for name in WISHES})
