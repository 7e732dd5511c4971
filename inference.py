#!/usr/bin/env python3
"""Speak from a build folder: text, and perhaps a voice to clone, to a sound file. Needs neither torch nor transformers."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from voxport.errors import DONE, FAILED, UserError, WorkError, run_script, say, start_quietly

if __name__ == "__main__":
    start_quietly()

from voxport.families import FAMILIES, Family, resolve
from voxport.files import sha256_file, write_json
from voxport.manifest import MANIFEST_NAME, Manifest
from voxport.progress import bar
from voxport.run.cli import check_arguments, find_build, make_parser, read_form, read_wish
from voxport.run.higgs import Speaker
from voxport.run.lines import Recital, read_lines
from voxport.run.longtext import part_budget
from voxport.run.omnifish_script import OWN_FLAGS, refuse_flags
from voxport.run.player import STDOUT, PipeClosed, open_player, silence_stdout
from voxport.run.proof import FAIL, explain, verify_build
from voxport.run.reading import Reading, plan, read, read_stream
from voxport.run.request import check_wish
from voxport.run.speech import Speech
from voxport.run.voices import Shelf


def speak(speaker: Speaker, shelf: Shelf, arguments: argparse.Namespace) -> dict:
    """Say the text, as it comes or in one piece, and write the files."""
    form, wish = read_form(arguments), read_wish(arguments, arguments.text)
    if arguments.out is not None:
        form.check(arguments.out, speaker.manifest.codec.sample_rate)
    check_wish(wish, speaker.manifest)
    name = arguments.save_voice or arguments.voice
    if arguments.save_voice is not None:
        voice = shelf.save(name, speaker, wish.ref_audio, wish.ref_text, wish.tags)
        wish = dataclasses.replace(wish, ref_audio=None, ref_text=None, voice=voice)
    elif arguments.voice is not None:
        wish = dataclasses.replace(wish, voice=shelf.load(name, speaker))
    speech = perform(speaker, wish, arguments)
    if arguments.out is not None:
        speech.save(arguments.out, form)
    if arguments.save_codes is not None:
        speech.save_codes(arguments.save_codes)
    written = arguments.out or ("stdout" if arguments.stream == STDOUT else arguments.stream)
    say(f"{written}: {speech.health_line()}")
    return {"out": arguments.out, "stream": arguments.stream, "voice": name, "form": dataclasses.asdict(form), **speech.report()}


def perform(speaker: Speaker, wish, arguments: argparse.Namespace) -> Speech | Reading:
    """The speech of a wish; text longer than a part is read in parts."""
    parts = plan(speaker, wish, part_budget(arguments.part_tokens, arguments.save_codes is not None))
    if len(parts) > 1 and arguments.save_codes is not None:
        raise UserError(f"--save-codes holds one part and this text makes {len(parts)}; raise --part-tokens or shorten it")
    if arguments.stream is None:
        return speaker.grant(wish) if len(parts) == 1 else read(speaker, wish, parts, arguments.batch)
    stream = speaker.stream(wish) if len(parts) == 1 else read_stream(speaker, wish, parts)
    with open_player(arguments.stream, stream.sample_rate, arguments.raw) as player:
        for chunk in stream:
            player.play(chunk)
    return stream.speech


def speak_lines(speaker: Speaker, shelf: Shelf, arguments: argparse.Namespace, build: dict) -> dict:
    """Speak every line of a file into a folder; a line that fails is told and holds up no other."""
    lines, wish = read_lines(arguments.input), read_wish(arguments, "")
    if arguments.voice is not None:
        wish = dataclasses.replace(wish, voice=shelf.load(arguments.voice, speaker))
    recital = Recital(speaker, arguments.out_dir, wish, shelf, build, read_form(arguments))
    counts = {"spoken": 0, "kept": 0, "failed": 0}
    with bar(len(lines), "speaking", "line") as shown:
        for outcome in recital.speak(lines, arguments.batch):
            shown.update()
            counts["failed" if outcome.error else "spoken" if outcome.speech else "kept"] += 1
            if outcome.error:
                say(f"line {outcome.line.number} ({outcome.line.name}): {outcome.error}")
            elif outcome.speech:
                say(f"{outcome.path}: {outcome.speech.health_line()}")
    say(f"{arguments.out_dir}: {counts['spoken']} spoken, {counts['kept']} there before, {counts['failed']} failed")
    return {"out_dir": arguments.out_dir, **counts}


def tend_voices(shelf: Shelf, arguments: argparse.Namespace) -> dict:
    """List the saved voices or forget one."""
    if arguments.delete_voice is not None:
        shelf.delete(arguments.delete_voice)
        say(f"the voice {arguments.delete_voice} is forgotten")
        return {"deleted": arguments.delete_voice}
    voices = shelf.list()
    for name, facts in voices.items():
        say(facts.get("error") or f"{name}: {facts['seconds']:.1f} s, {facts['transcript'] or 'no transcript'}")
    say(f"{len(voices)} voices in {shelf.folder}")
    return {"voices": voices}


def verify(folder: Path, arguments: argparse.Namespace) -> int:
    """Replay the build's proof, a line a question; the first part that fails is named last, with the remedy."""
    manifest = Manifest.read(folder)
    verdicts = []
    for verdict in verify_build(folder, manifest, arguments.provider, arguments.threads, arguments.allow_fallback):
        say(f"{verdict.part:16} {verdict.what:13} {verdict.state:11} {verdict.says}")
        verdicts.append(verdict)
    failed = [verdict for verdict in verdicts if verdict.state == FAIL]
    tell({"build": report_build(folder, manifest), "verify": [dataclasses.asdict(verdict) for verdict in verdicts]}, arguments)
    if failed:
        raise WorkError(explain(failed[0], manifest.proof))
    say(f"verified: {len(verdicts)} answers as the build proved them")
    return DONE


def report_build(folder: Path, manifest: Manifest) -> dict:
    """Which build spoke: enough to find it again."""
    target, source = manifest.target, manifest.source
    return {
        "folder": str(folder),
        "target": f"{target.device}_{target.precision}",
        "source": source.id,
        "revision": source.revision,
        "created": manifest.created,
        "manifest_sha256": sha256_file(folder / MANIFEST_NAME),
    }


def tell(report: dict, arguments: argparse.Namespace) -> None:
    """Write the report where --json says; stdout gives way to sound."""
    if arguments.json == STDOUT:
        say(json.dumps(report), sys.stderr if arguments.stream == STDOUT else sys.stdout)
    elif arguments.json is not None:
        write_json(Path(arguments.json), report)


def speak_other(folder: Path, family: Family, arguments: argparse.Namespace) -> int:
    """Speak from a build of another family than Higgs."""
    report = {"build": report_build(folder, Manifest.read(folder))}
    try:
        report |= resolve(family.script)(folder, arguments)
    except PipeClosed:
        silence_stdout()
        return DONE
    tell(report, arguments)
    return DONE


def main(argv: list[str]) -> int:
    """Parse, check, speak, report."""
    arguments = make_parser(__doc__).parse_args(argv)
    check_arguments(arguments)
    shelf = Shelf(arguments.voices_dir)
    if arguments.list_voices or arguments.delete_voice is not None:
        tell(tend_voices(shelf, arguments), arguments)
        return DONE
    folder = find_build(arguments.model_path)
    if arguments.verify:
        return verify(folder, arguments)
    family = Manifest.read(folder).family
    if FAMILIES[family].script is not None:
        return speak_other(folder, FAMILIES[family], arguments)
    refuse_flags(arguments, OWN_FLAGS, family)
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
        say(f"self test passed: {test['files']} files as built, {test['frames']} frames decoded and finite")
    elif arguments.input is not None:
        report |= speak_lines(speaker, shelf, arguments, report["build"])
    elif arguments.text is None:
        shelf.save(arguments.save_voice, speaker, arguments.ref_audio, arguments.ref_text, arguments.tags)
        say(f"the voice {arguments.save_voice} is kept in {shelf.folder}")
    else:
        try:
            report |= speak(speaker, shelf, arguments)
        except PipeClosed:
            silence_stdout()
            return DONE
    tell(report, arguments)
    return FAILED if report.get("failed") else DONE


if __name__ == "__main__":
    sys.exit(run_script(main))
