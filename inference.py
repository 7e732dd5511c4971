#!/usr/bin/env python3
"""Speak from a build folder: text, and perhaps a voice to clone, to a sound file. Needs neither torch nor transformers."""

import argparse
import sys

from voxport.errors import DONE, FAILED, run_script, start_quietly

if __name__ == "__main__":
    start_quietly()

from voxport.run.cli import check_arguments, find_build, make_parser
from voxport.run.player import PipeClosed, silence_stdout
from voxport.run.verbs import Build, save_voice, selftest, speak, speak_lines, tell, tend_voices, verify
from voxport.run.voices import Shelf


def use(build: Build, shelf: Shelf, arguments: argparse.Namespace) -> dict:
    """Do with a build what the flags ask for; returns the report."""
    speaker = build.load(arguments)
    report = {"build": build.report()}
    if arguments.selftest:
        return report | selftest(speaker)
    if arguments.input is not None:
        return report | speak_lines(build, speaker, shelf, arguments)
    if arguments.save_voice is not None and not arguments.has_text:
        return report | save_voice(speaker, shelf, arguments)
    return report | speak(build, speaker, shelf, arguments)


def main(argv: list[str]) -> int:
    """Parse, check, speak, report."""
    arguments = make_parser(__doc__).parse_args(argv)
    check_arguments(arguments)
    shelf = Shelf(arguments.voices_dir)
    if arguments.list_voices or arguments.delete_voice is not None:
        tell(tend_voices(shelf, arguments), arguments)
        return DONE
    build = Build.open(find_build(arguments.model_path), arguments)
    if arguments.verify:
        return verify(build, arguments)
    try:
        report = use(build, shelf, arguments)
    except PipeClosed:
        silence_stdout()
        return DONE
    tell(report, arguments)
    return FAILED if report.get("failed") else DONE


if __name__ == "__main__":
    sys.exit(run_script(main))
