#!/usr/bin/env python3
"""Speak from a build folder: text, and perhaps a voice to clone, to a WAV file. Needs neither torch nor transformers."""

import argparse
import json
import sys
from pathlib import Path

from voxport.errors import DONE, UserError, run_script, say
from voxport.manifest import MANIFEST_NAME, Manifest
from voxport.run.audio import check_output
from voxport.run.higgs import Speaker
from voxport.run.speech import Speech
from voxport.run.text import TAG_POLICIES

BUILDS = Path("onnx")


class Once(argparse.Action):
    """A flag that may be given once only: a second reference must not silently replace the first."""

    def __call__(self, parser, namespace, value, option=None):
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option} was given more than once; this model takes exactly one")
        setattr(namespace, self.dest, value)


def make_parser() -> argparse.ArgumentParser:
    """The command line. Defaults of None come from the build or are chosen at run time."""
    parser = argparse.ArgumentParser(
        prog="inference.py", description=__doc__, allow_abbrev=False, epilog="exit codes: 0 done, 1 failed, 2 wrong input"
    )
    add = parser.add_argument
    add("--text", help="what to say, with control tags such as <|emotion:elation|> where the model knows them")
    add("--out", metavar="WAV", help="file to write: mono, 16 bit, at the codec's rate; needed with --text")
    add("--model-path", metavar="DIR", help=f"build folder (default: the only build under {BUILDS}/)")
    add("--ref-audio", metavar="WAV", action=Once, help="voice to clone: any sound file, best 7 to 30 s, at most 100 s")
    add("--ref-text", action=Once, help="exact transcript of --ref-audio (default: none, which clones less closely)")
    add_sampling(parser)
    add_machine(parser)
    add("--tags", choices=TAG_POLICIES, default="error", help="what to do with unknown <|tags|> (default: error)")
    add("--save-codes", metavar="NPZ", help="also write prompt_ids, rows, codes and, for a clone, reference_codes")
    add("--json", action="store_true", help="print one JSON object about the run on stdout")
    add("--selftest", action="store_true", help="verify every file, decode a fixed pattern of codes, and stop")
    return parser


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Flags that change what is drawn."""
    add = parser.add_argument
    add("--temperature", type=float, help="0 takes the likeliest code; higher varies more (default: the build's, 0.8)")
    add("--top-k", type=int, help="draw among this many likeliest codes, 0 is off (default: the build's, 30)")
    add("--top-p", type=float, help="draw among codes that sum to this probability, 1 is off (default: the build's, 0.8)")
    add("--seed", type=int, help="whole number; the same seed gives the same file (default: drawn, and printed)")
    add("--max-frames", type=int, metavar="T", help="cut after T frames of 1/25 s (default: follows from the text's length)")


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Flags that say where to run."""
    add = parser.add_argument
    add("--provider", help="cpu, cuda, dml, coreml or an ONNX Runtime name (default: the device of the build)")
    add("--allow-fallback", action="store_true", help="run on the CPU if the provider cannot be had, instead of stopping")
    add("--threads", type=int, help="CPU threads (default: every core that this process may use)")


def find_build(model_path: str | None) -> Path:
    """The folder given, or the only one under onnx/ that holds a manifest; UserError lists the choices otherwise."""
    if model_path is not None:
        return Path(model_path)
    found = sorted(path.parent for path in BUILDS.glob(f"*/{MANIFEST_NAME}"))
    if len(found) == 1:
        return found[0]
    if not found:
        raise UserError(f"no build under {BUILDS.resolve()}; make one with optimize.py or name one with --model-path")
    raise UserError(f"several builds, choose one with --model-path: {', '.join(path.as_posix() for path in found)}")


def check_arguments(arguments: argparse.Namespace) -> None:
    """What can be said about the flags alone; UserError before any file is read."""
    if arguments.selftest:
        return
    if arguments.text is None or arguments.out is None:
        raise UserError("--text and --out are needed (or --selftest); see --help")
    check_output(arguments.out, ".wav")
    if arguments.save_codes is not None:
        check_output(arguments.save_codes, ".npz")


def speak(speaker: Speaker, arguments: argparse.Namespace) -> Speech:
    """Say the text and write the files."""
    speech = speaker.speak(
        arguments.text,
        ref_audio=arguments.ref_audio,
        ref_text=arguments.ref_text,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        max_frames=arguments.max_frames,
        tags=arguments.tags,
    )
    speech.save(arguments.out)
    if arguments.save_codes is not None:
        speech.save_codes(arguments.save_codes)
    return speech


def report_build(folder: Path, manifest: Manifest) -> dict:
    """Which build spoke: enough to find it again."""
    target, source = manifest.target, manifest.source
    return {
        "folder": str(folder),
        "target": f"{target.device}_{target.precision}",
        "source": source.id,
        "revision": source.revision,
        "created": manifest.created,
    }


def main(argv: list[str]) -> int:
    """Parse, check, speak, report."""
    arguments = make_parser().parse_args(argv)
    check_arguments(arguments)
    folder = find_build(arguments.model_path)
    speaker = Speaker.load(
        folder,
        provider=arguments.provider,
        threads=arguments.threads,
        allow_fallback=arguments.allow_fallback,
        warn=lambda message: say(f"warning: {message}"),
    )
    report = {"build": report_build(folder, speaker.manifest)}
    if arguments.selftest:
        report["selftest"] = test = speaker.selftest()
        line = f"self test passed: {test['files']} files verified, {test['samples']} finite samples from {test['frames']} frames"
    else:
        speech = speak(speaker, arguments)
        report |= {"out": arguments.out, **speech.report()}
        line = f"{arguments.out}: {speech.health_line()}"
    say(line)
    if arguments.json:
        say(json.dumps(report), sys.stdout)
    return DONE


if __name__ == "__main__":
    sys.exit(run_script(main))
