"""Judge: is a build the original? Part by part and as a whole, against the PyTorch reference, and by ear."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from voxport.errors import BY_SIGNALS, DONE, FAILED, UserError, run_script, say, start_quietly

if __name__ == "__main__":
    start_quietly()

from voxport.files import is_folder, read_utf8, write_json
from voxport.judge import report
from voxport.judge.finding import PASS, verdict
from voxport.judge.listeners import Resemblyzer, Whisper
from voxport.judge.page import write_page
from voxport.judge.reference import check_alike, find_reference
from voxport.judge.trial import Questions, Trial, beside, try_build
from voxport.manifest import BuildManifest
from voxport.run.audio import check_output, load_reference
from voxport.run.load import load_speaker
from voxport.run.text import load_tokenizer

DEFAULT_TEXTS = ("Hello there, and welcome aboard the morning train.", "What shall we do now? The light changes.")
TEXTS_NAME = "eval_texts.txt"
GREEDY_TEXTS = 2  # texts of the greedy run and the teacher-forced comparison; all texts are for the listener


def parser() -> argparse.ArgumentParser:
    codes = f"exit codes: 0 every level passed, 1 not, 2 wrong input, {BY_SIGNALS}"
    p = argparse.ArgumentParser(prog="eval.py", description=__doc__, epilog=codes)
    p.add_argument("--model-path", type=Path, required=True, metavar="DIR", help="build folder to judge")
    p.add_argument("--reference", metavar="DIR|demo", help="the original checkpoint (default: the one that the manifest records)")
    p.add_argument("--compare", type=Path, metavar="DIR", help="judge a second build of the same checkpoint beside it")
    p.add_argument("--texts", type=Path, metavar="FILE",
                   help=f"one text a line to speak (default: the checkpoint's {TEXTS_NAME}, else two English sentences)")  # fmt: skip
    p.add_argument("--ref-audio", metavar="WAV", help="also clone this voice, with the first text")
    p.add_argument("--ref-text", help="transcript of --ref-audio")
    p.add_argument("--frames", type=int, default=48, metavar="T", help="frames of each greedy run (default: 48)")
    p.add_argument("--asr", metavar="NAME|DIR", help="Whisper model that hears the speech, e.g. tiny.en, or a folder that holds one;"
                   " needs requirements-listen.txt (default: nobody listens)")  # fmt: skip
    p.add_argument("--voices", type=Path, metavar="DIR", help="folder of sound files, a voice each, with transcripts NAME.txt: every text is"
                   " cloned in every voice and a speaker encoder tells them apart; needs requirements-listen.txt (default: nobody does)")  # fmt: skip
    p.add_argument("--provider", help="cpu, cuda or an ONNX Runtime name (default: the device of the build)")
    p.add_argument("--allow-fallback", action="store_true", help="judge on the CPU if the provider cannot be had")
    p.add_argument("--threads", type=int, help="CPU threads (default: every usable core)")
    p.add_argument("--output", type=Path, metavar="FILE", help="also write the report as JSON to this file")
    p.add_argument("--html", type=Path, metavar="FILE", help="also write the report as one self-contained page")
    p.add_argument("--json", action="store_true", help="print the report as one JSON object on stdout")
    return p


def read_texts(given: Path | None, checkpoint: Path) -> list[str]:
    """The texts to speak; UserError if the file cannot be read or has none."""
    path = given or checkpoint / TEXTS_NAME
    if given is None and not path.is_file():
        return list(DEFAULT_TEXTS)
    texts = [line.strip() for line in read_utf8(path, "--texts").splitlines() if line.strip()]
    if not texts:
        raise UserError(f"--texts {path} holds no text")
    return texts


def ask(args: argparse.Namespace, checkpoint: Path) -> Questions:
    """What each build is asked."""
    texts = read_texts(args.texts, checkpoint)
    requests = [{"text": text} for text in texts[:GREEDY_TEXTS]]
    if args.ref_audio:
        requests.append({"text": texts[0], "ref_audio": args.ref_audio, "ref_text": args.ref_text})
    voices = read_voices(args.voices) if args.voices else ()
    return Questions(
        requests, args.frames, Whisper(args.asr) if args.asr else None, texts if args.asr or args.html or voices else (),
        Resemblyzer() if voices else None, voices,
    )  # fmt: skip


def read_voices(folder: Path) -> list[Path]:
    """Sound files of a folder of voices; UserError if there are fewer than two to tell apart."""
    if not is_folder(folder):
        raise UserError(f"--voices {folder} is no folder")
    found = sorted(path for path in folder.glob("*") if path.suffix.lower() in (".wav", ".flac", ".ogg"))
    if len(found) < 2:
        raise UserError(f"--voices {folder} holds {len(found)} sound files; two voices at least are needed to tell them apart")
    return found


def check_arguments(args: argparse.Namespace) -> None:
    """What can be said of the flags alone, before hours of work."""
    if args.frames < 1:
        raise UserError(f"--frames must be at least 1, not {args.frames}")
    if args.ref_text is not None and args.ref_audio is None:
        raise UserError("--ref-text is the transcript of a recording: name that with --ref-audio")
    for path, *endings in ((args.output, ".json"), (args.html, ".html", ".htm")):
        if path is not None:
            check_output(path, *endings)


def load(folder: Path, args: argparse.Namespace) -> Any:
    """The family's Speaker. A judge must look at a build that its own proof would refuse."""
    return load_speaker(
        folder, provider=args.provider, threads=args.threads, allow_fallback=args.allow_fallback, verify=False,
        warn=lambda message: say(f"warning: {message}"),
    )  # fmt: skip


def inspect(folder: Path, args: argparse.Namespace) -> BuildManifest:
    """The manifest of a build whose files are all as it says; UserError if one is not, or if the recording to clone is none."""
    speaker = load(folder, args)
    for name in speaker.manifest.parts:
        speaker.parts.check_files(name)
    load_tokenizer(folder, speaker.manifest)
    if args.ref_audio is not None:
        load_reference(args.ref_audio, speaker.manifest.codec, speaker.manifest.limits)
    return speaker.manifest


def try_folder(folder: Path, args: argparse.Namespace, checkpoint: Path, questions: Questions) -> Trial:
    """Judge one folder and print its table."""
    speaker = load(folder, args)
    trial = try_build(speaker, checkpoint, args.reference or speaker.manifest.source.id, questions)
    stream = sys.stderr if args.json else sys.stdout
    say(report.table(trial.findings), stream)
    say(f"verdict: {verdict(trial.findings)}", stream)
    return trial


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    check_arguments(args)
    folders = [folder for folder in (args.model_path, args.compare) if folder is not None]
    manifests = [inspect(folder, args) for folder in folders]
    check_alike(manifests[0], manifests[-1], f"--compare {args.compare}")
    checkpoint = find_reference(args.reference, manifests[0])
    questions = ask(args, checkpoint)
    trials = [try_folder(folder, args, checkpoint, questions) for folder in folders]
    results = [trial.result for trial in trials]
    if args.output:
        write_json(args.output, results[0] if len(results) == 1 else {"builds": results})
    if args.html:
        write_page(args.html, results[0], beside(trials))
    if args.json:
        say(json.dumps(results[0] if len(results) == 1 else {"builds": results}), sys.stdout)
    return DONE if all(verdict(trial.findings) == PASS for trial in trials) else FAILED


if __name__ == "__main__":
    sys.exit(run_script(main))
