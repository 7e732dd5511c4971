"""What inference.py does with an OmniFish build: its own flags, and what is spoken with them."""

from __future__ import annotations

import argparse
from pathlib import Path

from voxport.errors import UserError, say
from voxport.run.audio import Form
from voxport.run.longtext import part_budget
from voxport.run.omnifish import Speaker
from voxport.run.omnifish_reading import Reading, plan, read, read_stream
from voxport.run.omnifish_request import Wish
from voxport.run.omnifish_speech import OmniSpeech
from voxport.run.omnifish_text import read_dialogue
from voxport.run.player import STDOUT, open_player

OWN_FLAGS = ("dialogue", "language", "speaker", "quality", "instruct", "before", "after", "residual_temperature",
             "residual_top_k", "steps", "threshold")  # fmt: skip
FOREIGN_FLAGS = ("voice", "save_voice", "input")  # of inference.py, that this family does not know yet
WISHES = ("text", "ref_audio", "ref_text", "temperature", "top_k", "top_p", "seed", "max_frames", "tags",
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
    add("--steps", type=int, help="rounds in which a block is revealed; more are slower and surer (default: the build's)")
    add("--threshold", type=float, help="reveal frames of more than this probability at once (default: the build's)")


def refuse_flags(arguments: argparse.Namespace, flags: tuple[str, ...], family: str) -> None:
    """UserError naming the first of `flags` that was given although a build of this family has no use for it."""
    for flag in flags:
        if getattr(arguments, flag, None) is not None:
            raise UserError(f"--{flag.replace('_', '-')} has no use with a build of the family {family}")


def read_wish(arguments: argparse.Namespace, speaker: Speaker) -> Wish:
    """What the flags ask for."""
    turns = read_dialogue(arguments.dialogue, speaker.manifest) if arguments.dialogue is not None else ()
    wishes = {name: getattr(arguments, name) for name in WISHES}
    return Wish(turns=turns, before=tuple(arguments.before or ()), after=tuple(arguments.after or ()), **wishes)


def perform(speaker: Speaker, wish: Wish, arguments: argparse.Namespace) -> OmniSpeech | Reading:
    """The speech of a wish; text longer than a part is read in parts."""
    parts = plan(speaker, wish, part_budget(arguments.part_tokens, arguments.save_codes is not None))
    if len(parts) > 1 and arguments.save_codes is not None:
        raise UserError(f"--save-codes holds one part and this text makes {len(parts)}; raise --part-tokens or shorten it")
    if arguments.stream is None:
        return speaker.grant(wish) if len(parts) == 1 else read(speaker, wish, parts)
    stream = speaker.stream(wish) if len(parts) == 1 else read_stream(speaker, wish, parts)
    with open_player(arguments.stream, stream.sample_rate, arguments.raw) as player:
        for chunk in stream:
            player.play(chunk)
    return stream.speech


def speak(folder: Path, arguments: argparse.Namespace) -> dict:
    """Do what the flags ask with the build in `folder`; returns the report."""
    refuse_flags(arguments, FOREIGN_FLAGS, "omnifish")
    options = {name: getattr(arguments, name) for name in ("provider", "threads", "allow_fallback")}
    speaker = Speaker.load(folder, **options, warn=lambda message: say(f"warning: {message}"))
    if arguments.selftest:
        return {"selftest": speaker.selftest()}
    form = Form(arguments.encoding, arguments.sample_rate)
    if arguments.out is not None:
        form.check(arguments.out, speaker.manifest.codec.sample_rate)
    speech = perform(speaker, read_wish(arguments, speaker), arguments)
    if arguments.out is not None:
        speech.save(arguments.out, form)
    if arguments.save_codes is not None:
        speech.save_codes(arguments.save_codes)
    written = arguments.out or ("stdout" if arguments.stream == STDOUT else arguments.stream)
    say(f"{written}: {speech.health_line()}")
    return {"out": arguments.out, "stream": arguments.stream, **speech.report()}
