"""The command line of inference.py: its flags in groups, and what can be said of them before any file is read."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from voxport.errors import EXIT_CODES, UserError
from voxport.families import FAMILIES, spell
from voxport.files import is_same_file
from voxport.manifest import MANIFEST_NAME, Manifest
from voxport.run.audio import ENCODINGS, FORMATS, Form, check_output
from voxport.run.batch import BATCH
from voxport.run.longtext import PART_TOKENS
from voxport.run.player import STDOUT
from voxport.run.text import TAG_POLICIES

BUILDS = Path("onnx")
CHECKS = ("selftest", "verify", "list_voices", "delete_voice")  # flags that stand alone: with them nothing is spoken
SPEAKING = ("out", "stream", "save_codes", "input", "out_dir", "save_voice", "ref_audio", "ref_text", "voice")
TYPED = ("text", "ref_text", "instruct", "before", "after")  # flags that hold words


class Once(argparse.Action):
    """A flag that may be given once only: a second reference must not silently replace the first."""

    def __call__(self, parser, namespace, value, option=None):
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option} was given more than once; this model takes exactly one")
        setattr(namespace, self.dest, value)


def make_parser(description: str | None = None) -> argparse.ArgumentParser:
    """The command line. Defaults of None come from the build or are chosen at run time."""
    parser = argparse.ArgumentParser(prog="inference.py", description=description, allow_abbrev=False, epilog=EXIT_CODES)
    families = [family.script.add_flags for family in FAMILIES.values()]
    for add_group in (add_speech, add_voices, add_lines, add_sampling, add_output, add_machine, add_checks, *families):
        add_group(parser)
    return parser


def own_flags() -> dict[str, tuple[str, ...]]:
    """The flags that only one family knows, of each."""
    return {name: family.script.OWN_FLAGS for name, family in FAMILIES.items()}


def text_flags() -> list[str]:
    """The flags that say what to speak."""
    return ["text", *(flag for family in FAMILIES.values() for flag in family.script.TEXT_FLAGS)]


def add_speech(parser: argparse.ArgumentParser) -> None:
    """Flags that say what to speak."""
    add = parser.add_argument
    add("--text", help="what to say, with control tags such as <|emotion:elation|> where the model knows them")
    add("--model-path", metavar="DIR", help=f"build folder (default: the only build under {BUILDS}/)")
    add("--tags", choices=TAG_POLICIES, default="error", help="what to do with unknown <|tags|> (default: error)")
    add("--part-tokens", type=int, metavar="N",
        help=f"longer text is cut at sentences and read in parts of up to N tokens (default: {PART_TOKENS};"
             " with --save-codes text is never cut unless this is given)")  # fmt: skip


def add_voices(parser: argparse.ArgumentParser) -> None:
    """Flags that say in whose voice."""
    add = parser.add_argument_group("voices").add_argument
    add("--ref-audio", metavar="WAV", action=Once, help="voice to clone: any sound file, best 7 to 30 s, at most 100 s")
    add("--ref-text", action=Once, help="exact transcript of --ref-audio (default: none, which clones less closely)")
    add("--voice", metavar="NAME", action=Once, help="speak in a voice saved before, which need not be heard again")
    add("--save-voice", metavar="NAME", help="keep the voice of --ref-audio under this name; --text is then not needed")
    add("--list-voices", action="store_true", help="print the saved voices, their seconds and transcripts, and stop")
    add("--delete-voice", metavar="NAME", help="forget a saved voice, its recording included, and stop")
    add("--voices-dir", metavar="DIR", help="where voices are kept (default: voxport/voices in the user's data folder)")


def add_lines(parser: argparse.ArgumentParser) -> None:
    """Flags for many texts at once."""
    add = parser.add_argument_group("many lines").add_argument
    add("--input", metavar="FILE", help="speak every line of a .txt, or every object of a .jsonl (text, name, voice, seed ...)")
    add("--out-dir", metavar="DIR", help="folder for --input: NAME.wav and NAME.json each; lines found there are not redone")
    add("--batch", type=int, default=BATCH, metavar="B", help=f"texts spoken at once (default: {BATCH}; more take more memory)")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Flags that change what is drawn."""
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", type=float, help="0 takes the likeliest code; higher varies more (default: the build's)")
    add("--top-k", type=int, help="draw among this many likeliest codes, 0 is off (default: the build's)")
    add("--top-p", type=float, help="draw among codes that sum to this probability, 1 is off (default: the build's)")
    add("--seed", type=int, help="whole number; the same seed gives the same file (default: drawn, and printed)")
    add("--max-frames", type=int, metavar="T", help="cut after T frames of 1/25 s (default: follows from the text's length)")


def add_output(parser: argparse.ArgumentParser) -> None:
    """Flags that say what to write."""
    add = parser.add_argument_group("output").add_argument
    add("--out", metavar="FILE", help=f"file to write, mono; its ending says which kind: {', '.join(FORMATS)}")
    add("--encoding", choices=ENCODINGS, default="pcm16", help="numbers in .wav and .flac (default: pcm16)")
    add("--sample-rate", type=int, metavar="HZ", help="resample what is written in files (default: the codec's rate)")
    add("--stream", metavar="FILE", help='write a 16-bit WAV while it is being made; "-" is stdout, reports then go to stderr')
    add("--raw", action="store_true", help="leave the WAV header out of --stream: samples s16le only")
    add("--save-codes", metavar="NPZ", help="also write prompt_ids, rows, codes and, for a clone, reference_codes")
    add("--json", nargs="?", const=STDOUT, metavar="FILE", help="write one JSON object about the run to FILE (default: stdout)")


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Flags that say where to run."""
    add = parser.add_argument_group("machine").add_argument
    add("--provider", help="cpu, cuda, dml, coreml or an ONNX Runtime name (default: the device of the build)")
    add("--allow-fallback", action="store_true", help="run on the CPU if the provider cannot be had, instead of stopping")
    add("--threads", type=int, help="CPU threads (default: every core that this process may use)")


def add_checks(parser: argparse.ArgumentParser) -> None:
    """Flags that check a build instead of speaking."""
    add = parser.add_argument_group("checks").add_argument
    add("--verify", action="store_true", help="replay all that the build proved of itself, name the part that fails, and stop")
    add("--selftest", action="store_true", help="verify every file, decode a fixed pattern of codes, and stop")


def check_arguments(arguments: argparse.Namespace) -> None:
    """What can be said about the flags alone; UserError before any file is read. Notes in `has_text` whether there is anything to
    speak, however it was given, and reads texts as they were typed."""
    arguments.has_text = any(getattr(arguments, flag) is not None for flag in text_flags())
    for name in TYPED:
        setattr(arguments, name, as_typed(getattr(arguments, name)))
    if arguments.json not in (None, STDOUT):
        check_output(arguments.json, ".json")
    if _check_alone(arguments):
        return
    if arguments.voice is not None:
        _refuse(arguments, ("ref_audio", "ref_text", "save_voice"), "with --voice, which brings a reference of its own")
    if arguments.batch < 1:
        raise UserError(f"--batch must be at least 1, not {arguments.batch}")
    if arguments.input is not None:
        return _check_lines(arguments)
    if arguments.out_dir is not None:
        raise UserError("--out-dir goes with --input; a single --text is written with --out")
    if arguments.save_voice is not None and arguments.ref_audio is None:
        raise UserError("--save-voice needs the recording of the voice: --ref-audio, best with --ref-text")
    if arguments.save_voice is not None and not arguments.has_text:
        return _refuse(arguments, ("out", "stream", "save_codes"), "without --text: --save-voice alone speaks nothing")
    if not arguments.has_text:
        raise UserError("--text is needed (or --dialogue, --input, --save-voice, --list-voices, --delete-voice, --selftest, --verify); see --help")
    if arguments.out is None and arguments.stream is None:
        raise UserError("nothing says where the speech is to go: add --out FILE, or --stream FILE to hear it while it is made")
    _check_outputs(arguments)


def _check_alone(arguments: argparse.Namespace) -> bool:
    """Whether a flag is given that does something else than speak; UserError if that leaves another flag nothing to do."""
    given = [flag for flag in CHECKS if getattr(arguments, flag) not in (None, False)]
    if given:
        _refuse(arguments, (*given[1:], *text_flags(), *SPEAKING), f"with {spell(given[0])}, which does one thing and stops")
    return bool(given)


def _refuse(arguments: argparse.Namespace, flags: Sequence[str], why: str) -> None:
    """UserError for the first of `flags` that is given."""
    for flag in flags:
        if getattr(arguments, flag) not in (None, False):
            raise UserError(f"{spell(flag)} does not go {why}")


def _check_lines(arguments: argparse.Namespace) -> None:
    if arguments.out_dir is None:
        raise UserError("--input needs --out-dir, a folder for what is spoken")
    _refuse(arguments, (*text_flags(), "out", "stream", "raw", "save_codes", "save_voice"), "with --input")


def _check_outputs(arguments: argparse.Namespace) -> None:
    if arguments.out is not None:
        check_output(arguments.out, *FORMATS)
    if arguments.save_codes is not None:
        check_output(arguments.save_codes, ".npz")
    if arguments.stream is None:
        if arguments.raw:
            raise UserError("--raw goes with --stream")
    elif arguments.out is None and (arguments.sample_rate is not None or arguments.encoding != ENCODINGS[0]):
        raise UserError("--sample-rate and --encoding are for --out; a stream is 16 bits at the build's rate")
    elif arguments.stream != STDOUT:
        check_output(arguments.stream, ".raw" if arguments.raw else ".wav", pipe=True)
        if arguments.out is not None and os.path.realpath(arguments.out) == os.path.realpath(arguments.stream):
            raise UserError("--out and --stream name the same file; one is enough, or choose another name for the stream")
    refuse_loss(arguments.ref_audio, out=arguments.out, stream=arguments.stream)


def refuse_loss(reference: str | None, **targets: str | None) -> None:
    """UserError if the recording to be heard is a file that would be written over."""
    for flag, target in targets.items():
        if reference is not None and target not in (None, STDOUT) and is_same_file(reference, target):
            raise UserError(f"--{flag} {target} is the recording of the voice itself; choose another name, it would be lost")


def read_form(arguments: argparse.Namespace) -> Form:
    """How files are written."""
    return Form(arguments.encoding, arguments.sample_rate)


def as_typed(text: str | list | None) -> str | list | None:
    """Text of the command line as its bytes say in UTF-8, where Python was told to read them as ASCII (locale C without UTF-8 mode)."""
    if isinstance(text, list):
        return [as_typed(each) for each in text]
    undecoded = text is not None and any("\udc80" <= character <= "\udcff" for character in text)
    try:
        return os.fsencode(text).decode("utf-8") if undecoded else text
    except UnicodeError:  # no UTF-8 after all: the check of the text says so
        return text


def find_build(model_path: str | None) -> Path:
    """The folder given, or the only one under onnx/ that can speak; UserError lists the choices otherwise."""
    if model_path is not None:
        return Path(model_path)
    found = {path.parent: missing_parts(path.parent) for path in sorted(BUILDS.glob(f"*/{MANIFEST_NAME}"))}
    whole = [folder for folder, missing in found.items() if not missing]
    if len(whole) == 1:
        return whole[0]
    if whole:
        raise UserError(f"several builds, choose one with --model-path: {', '.join(path.as_posix() for path in whole)}")
    if found:
        folder, missing = next(iter(found.items()))
        raise UserError(f"no build under {BUILDS} can speak: {folder.as_posix()} lacks {', '.join(missing)}; add what is missing with"
                        f" {Manifest.read(folder).rebuild_command(folder, missing)}, or name another build with --model-path")  # fmt: skip
    raise UserError(f"no build under {BUILDS.resolve()}; make one with optimize.py or name one with --model-path")


def missing_parts(folder: Path) -> list[str]:
    """What a build lacks to speak; nothing of one that cannot be read, so that whoever opens it hears why."""
    try:
        return Manifest.read(folder).lacks()
    except UserError:
        return []
