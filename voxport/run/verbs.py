"""What inference.py does with a build of any family: speak, speak many lines, tend voices, verify, and tell what was done.

`Build` holds the folder, its manifest and the family's script, which knows the family's Speaker and how wishes are read.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from voxport.errors import DONE, UserError, WorkError, say
from voxport.families import FAMILIES, check_flags
from voxport.files import sha256_file, write_json
from voxport.manifest import MANIFEST_NAME, BuildManifest, Manifest
from voxport.progress import bar, plural
from voxport.run.asks import describe_wish
from voxport.run.cli import own_flags, read_form
from voxport.run.lines import Recital, read_lines
from voxport.run.longtext import part_budget
from voxport.run.player import STDOUT, open_player
from voxport.run.proof import FAIL, explain, verify_build
from voxport.run.voices import Shelf


@dataclass(frozen=True)
class Build:
    """A folder to speak from."""

    folder: Path
    manifest: BuildManifest
    script: types.ModuleType

    @classmethod
    def open(cls, folder: Path, arguments: argparse.Namespace) -> Build:
        """Read the manifest; UserError for a flag that has no use with its family."""
        manifest = Manifest.read(folder)
        check_flags(arguments, manifest.family, own_flags(), "build")
        return cls(folder, manifest, FAMILIES[manifest.family].script)

    def load(self, arguments: argparse.Namespace) -> Any:
        """The family's Speaker, on the machine that the flags name."""
        options = {name: getattr(arguments, name) for name in ("provider", "threads", "allow_fallback")}
        return self.script.Speaker.load(self.folder, **options, warn=lambda message: say(f"warning: {message}"))

    def report(self) -> dict:
        """Which build spoke: enough to find it again."""
        target, source = self.manifest.target, self.manifest.source
        return {
            "folder": str(self.folder),
            "target": f"{target.device}_{target.precision}",
            "source": source.id,
            "revision": source.revision,
            "created": self.manifest.created,
            "manifest_sha256": sha256_file(self.folder / MANIFEST_NAME),
        }


def speak(build: Build, speaker: Any, shelf: Shelf, arguments: argparse.Namespace) -> dict:
    """Say the text, as it comes or in one piece, and write the files."""
    form, wish = read_form(arguments), build.script.read_wish(arguments, speaker, arguments.text)
    if arguments.out is not None:
        form.check(arguments.out, speaker.manifest.codec.sample_rate)
    build.script.check_wish(wish, speaker.manifest)
    name, asks = arguments.save_voice or arguments.voice, {"part_tokens": arguments.part_tokens, **describe_wish(wish)}
    if arguments.save_voice is not None:
        voice = shelf.save(name, speaker, wish.ref_audio, wish.ref_text, wish.tags)
        wish = dataclasses.replace(wish, ref_audio=None, ref_text=None, voice=voice)
        say(f"the voice {name} is kept in {shelf.folder}")
    elif arguments.voice is not None:
        wish = dataclasses.replace(wish, voice=shelf.load(name, speaker))
        asks = asks | {"voice_sha256": shelf.fingerprint(name)}
    speech = perform(build, speaker, wish, arguments)
    if arguments.out is not None:
        speech.save(arguments.out, form)
    if arguments.save_codes is not None:
        speech.save_codes(arguments.save_codes)
    written = arguments.out or ("stdout" if arguments.stream == STDOUT else arguments.stream)
    say(f"{written}: {speech.health_line()}")
    files = {"out": arguments.out, "stream": arguments.stream, "form": dataclasses.asdict(form)}
    return files | {"voice": name, "asks": asks, **speech.report()}


def perform(build: Build, speaker: Any, wish: Any, arguments: argparse.Namespace) -> Any:
    """The speech of a wish; text longer than a part is read in parts."""
    script = build.script
    parts = script.plan(speaker, wish, part_budget(arguments.part_tokens, arguments.save_codes is not None))
    if len(parts) > 1 and arguments.save_codes is not None:
        raise UserError(f"--save-codes holds one part and this text makes {len(parts)}; raise --part-tokens or shorten it")
    if arguments.stream is None:
        return speaker.grant(wish) if len(parts) == 1 else script.read(speaker, wish, parts, arguments.batch)
    stream = speaker.stream(wish) if len(parts) == 1 else script.read_stream(speaker, wish, parts)
    with open_player(arguments.stream, stream.sample_rate, arguments.raw) as player:
        for chunk in stream:
            player.play(chunk)
    return stream.speech


def speak_lines(build: Build, speaker: Any, shelf: Shelf, arguments: argparse.Namespace) -> dict:
    """Speak every line of a file into a folder; a line that fails is told and holds up no other."""
    lines, wish = read_lines(arguments.input, build.script.LINE_FIELDS), build.script.read_wish(arguments, speaker, "")
    if arguments.voice is not None:
        wish = dataclasses.replace(wish, voice=shelf.load(arguments.voice, speaker))
    budget = part_budget(arguments.part_tokens, in_one_part=False)
    recital = Recital(speaker, arguments.out_dir, wish, shelf, build.report(), read_form(arguments), budget)
    counts = {"spoken": 0, "kept": 0, "failed": 0}
    with recital.lock(), bar(len(lines), "speaking", "line") as shown:
        for outcome in recital.speak(lines, arguments.batch):
            shown.update()
            counts["failed" if outcome.error else "spoken" if outcome.speech else "kept"] += 1
            if outcome.error:
                say(f"line {outcome.line.number} ({outcome.line.name}): {outcome.error}")
            elif outcome.speech:
                how = "; another take was there and is replaced" if outcome.replaced else ""
                say(f"{outcome.path}: {outcome.speech.health_line()}{how}")
    say(f"{arguments.out_dir}: {counts['spoken']} spoken, {counts['kept']} there before, {counts['failed']} failed")
    return {"out_dir": arguments.out_dir, **counts}


def save_voice(speaker: Any, shelf: Shelf, arguments: argparse.Namespace) -> dict:
    """Keep the voice of a reference and say nothing in it."""
    shelf.save(arguments.save_voice, speaker, arguments.ref_audio, arguments.ref_text, arguments.tags)
    say(f"the voice {arguments.save_voice} is kept in {shelf.folder}")
    return {}


def tend_voices(shelf: Shelf, arguments: argparse.Namespace) -> dict:
    """List the saved voices or forget one."""
    if arguments.delete_voice is not None:
        shelf.delete(arguments.delete_voice)
        say(f"the voice {arguments.delete_voice} is forgotten")
        return {"deleted": arguments.delete_voice}
    shelf.require()
    voices = shelf.list()
    for name, facts in voices.items():
        line = facts.get("error") or f"{name}: {facts['seconds']:.1f} s, {facts['transcript'] or 'no transcript'}"
        say(line, answers(arguments))
    say(f"{plural(len(voices), 'voice')} in {shelf.folder}")
    return {"voices": voices}


def selftest(speaker: Any) -> dict:
    """Verify every file and decode a fixed pattern of codes."""
    test = speaker.selftest()
    say(f"self test passed: {test['files']} files as built, {test['frames']} frames decoded and finite")
    return {"selftest": test}


def verify(build: Build, arguments: argparse.Namespace) -> int:
    """Replay the build's proof, a line a question; the first part that fails is named last, with the remedy."""
    verdicts, options = [], (arguments.provider, arguments.threads, arguments.allow_fallback)
    for verdict in verify_build(build.folder, build.manifest, *options):
        say(f"{verdict.part:16} {verdict.what:13} {verdict.state:11} {verdict.says}", answers(arguments))
        verdicts.append(verdict)
    failed = [verdict for verdict in verdicts if verdict.state == FAIL]
    tell({"build": build.report(), "verify": [dataclasses.asdict(verdict) for verdict in verdicts]}, arguments)
    if failed:
        raise WorkError(explain(failed[0], build.manifest.proof))
    say(f"verified: {len(verdicts)} answers as the build proved them", answers(arguments))
    return DONE


def answers(arguments: argparse.Namespace) -> TextIO | None:
    """Where what was asked for is printed: stdout, unless that is for the report."""
    return sys.stderr if arguments.json == STDOUT else sys.stdout


def tell(report: dict, arguments: argparse.Namespace) -> None:
    """Write the report where --json says; stdout gives way to sound."""
    if arguments.json == STDOUT:
        say(json.dumps(report), sys.stderr if arguments.stream == STDOUT else sys.stdout)
    elif arguments.json is not None:
        write_json(Path(arguments.json), report)
