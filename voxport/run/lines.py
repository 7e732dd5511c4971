"""Many lines to speak: read from a file, spoken in batches into a folder, and taken up again where they were interrupted.

A .txt file has a text on each line. A .jsonl file has an object on each: "text", and if wanted "name", "voice", "ref_audio",
"ref_text", "seed", "temperature", "top_k", "top_p", "max_frames", and what else the build's family knows.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from voxport.errors import UserError, WorkError, describe
from voxport.families import FAMILIES
from voxport.files import (
    LONGEST_NAME,
    check_plain_name,
    check_target,
    is_reserved,
    is_same_file,
    parse_json,
    read_json,
    read_utf8,
    write_json,
)
from voxport.lock import Lock
from voxport.manifest import record_file
from voxport.run.asks import describe_wish, hash_sound
from voxport.run.audio import Form, is_whole_sound
from voxport.run.batch import REMEMBERED
from voxport.run.longtext import PART_TOKENS, check_budget
from voxport.run.voices import Shelf, Voice

FIELDS = {"text": str, "name": str, "voice": str, "ref_audio": str, "ref_text": str, "seed": int, "temperature": (int, float),
          "top_k": int, "top_p": (int, float), "max_frames": int}  # fmt: skip
KINDS = {str: "text", int: "a whole number", (int, float): "a number"}  # of fields, in words
SUFFIX = ".wav"
LOCK = ".speaking"
BUSY = "process {process} is speaking lines into this folder; wait for it or choose another --out-dir"


@dataclass(frozen=True)
class Line:
    """One line: its number in the file, the name of its output, and what it asks for; `fault` if that cannot be read."""

    number: int
    name: str
    asks: dict = field(default_factory=dict)
    fault: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a line: its speech, or why there is none; both None if it had been spoken before. `replaced` tells that
    the file of an earlier run, which asked for something else or is damaged, had to go for it."""

    line: Line
    path: Path
    speech: Any = None
    error: UserError | None = None
    replaced: bool = False


def read_lines(path: str | os.PathLike, more: Mapping = MappingProxyType({})) -> list[Line]:
    """The lines of a .txt or .jsonl file that hold something. A line that cannot be read keeps its place, with its fault.

    `more` are the keys that a family's lines may have beyond `FIELDS`, with their types.
    """
    path = Path(path)
    if path.suffix.lower() not in (".txt", ".jsonl"):
        raise UserError(f"--input {path} must end in .txt (a text on each line) or .jsonl (an object on each line)")
    held = [(number, text) for number, text in enumerate(read_utf8(path, "--input").split("\n"), 1) if text.strip()]
    if not held:
        raise UserError(f"--input {path} holds no line to speak")
    fields = FIELDS | dict(more)
    parse = (lambda *line: _parse_object(*line, fields)) if path.suffix.lower() == ".jsonl" else _parse_text
    return _refuse_doubles([parse(number, text) for number, text in held])


def _parse_text(number: int, text: str) -> Line:
    return Line(number, _number_name(number), {"text": text.rstrip("\r")})


def _parse_object(number: int, text: str, fields: dict) -> Line:
    try:
        asks = parse_json(text, unique=True)
        if not isinstance(asks, dict) or "text" not in asks:
            raise ValueError('it must be an object with "text"')
        for key, value in asks.items():
            if key not in fields:
                raise ValueError(f"unknown key {key!r}; known are {', '.join(fields)}")
            if not isinstance(value, fields[key]) or isinstance(value, bool):
                raise ValueError(f"{key} must be {KINDS[fields[key]]}, not {value!r}")
        return Line(number, _check_name(asks.pop("name", _number_name(number))), asks)
    except json.JSONDecodeError as error:
        return Line(number, _number_name(number), fault=f"it is not JSON from character {error.pos + 1} on ({error.msg})")
    except RecursionError:
        return Line(number, _number_name(number), fault="it is not an object of texts and numbers, but nested without end")
    except (ValueError, UserError) as error:
        return Line(number, _number_name(number), fault=str(error))


def _check_name(name: str) -> str:
    """The name without the ending that it gets anyway."""
    name = check_plain_name(name, "name").removesuffix(SUFFIX)
    if not name or is_reserved(name) or len(os.fsencode(name)) > LONGEST_NAME - len(".json"):
        raise UserError(f"name {name!r} cannot be the name of a file on every system; choose another")
    return name


def _number_name(number: int) -> str:
    return f"{number:04}"


def _refuse_doubles(lines: list[Line]) -> list[Line]:
    """Lines with a name that an earlier one has would overwrite it; case does not tell files apart everywhere."""
    seen: set[str] = set()
    checked = []
    for line in lines:
        if line.name.lower() in seen and line.fault is None:
            line = dataclasses.replace(line, fault=f"an earlier line is called {line.name!r} too")
        seen.add(line.name.lower())
        checked.append(line)
    return checked


class Recital:
    """Speaks lines into a folder: NAME.wav, and NAME.json with all that is needed to speak it again."""

    def __init__(
        self, speaker: Any, folder: str | os.PathLike, common: Any, shelf: Shelf, build: dict, form: Form, part_tokens: int = PART_TOKENS
    ):
        """`speaker` of any family, `common` a wish of that family: what all lines ask for. Lines of more than `part_tokens` tokens
        are read in parts."""
        check_budget(part_tokens)
        self.speaker, self.folder, self.common, self.shelf = speaker, Path(folder), common, shelf
        self.build, self.form, self.part_tokens = build, form, part_tokens
        self._script = FAMILIES[speaker.manifest.family].script
        self._voices: dict[str, Voice] = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out-dir {folder} cannot be made: {error}") from None
        form.check(self.folder / f"check{SUFFIX}", speaker.manifest.codec.sample_rate)

    def lock(self) -> Lock:
        """The right to speak into the folder: two at once would write over each other. UserError if another process has it."""
        return Lock(self.folder / LOCK, f"{self.folder}: {BUSY}")

    def speak(self, lines: list[Line], size: int) -> Iterator[Outcome]:
        """Speak what has not been spoken, up to `size` lines at once. Outcomes come as they are known."""
        begun: list[Line] = []  # lines whose wish was handed on, in that order
        others: list[Outcome] = []
        for index, made in self.speaker.speak_many(self._wishes(lines, begun, others, size), size):
            yield from _drain(others)
            yield self._keep(begun[index], made)
        yield from _drain(others)

    def _wishes(self, lines: list[Line], begun: list[Line], others: list[Outcome], size: int) -> Iterator[Any]:
        """Wishes of the lines that are to be spoken together; voices are fetched when their line is due. A long line is read by
        itself, `size` of its parts at once, and is then one of `others`."""
        for line in lines:
            try:
                if line.fault:
                    raise UserError(line.fault)
                told = self._told(line)
                if told is not None and self._is_done(line, told):
                    others.append(Outcome(line, self._path(line)))
                    continue
                wish = self._wish(line)
                self._check_place(line, wish, told)
                parts = self._script.plan(self.speaker, wish, self.part_tokens)
                if len(parts) > 1:
                    others.append(self._keep(line, self._script.read(self.speaker, wish, parts, size)))
                    continue
            except UserError as error:
                others.append(Outcome(line, self._path(line), error=error))
                continue
            begun.append(line)
            yield wish

    def _check_place(self, line: Line, wish: Any, told: dict | None) -> None:
        """UserError if the line's files would take the place of something that no such run has made, as far as is `told`."""
        path, report = check_target(self._path(line)), self._report_path(line)
        if isinstance(wish.ref_audio, (str, os.PathLike)) and is_same_file(wish.ref_audio, path):
            raise UserError(f"{path} is the recording of the voice itself; choose another name or --out-dir, it would be lost")
        strange = next((each for each in (path, report) if os.path.lexists(each)), None)
        if strange is not None and told is None:
            raise UserError(f"{strange} would be lost: no report beside it says that it was made from lines; delete it, or choose another"
                            " name or --out-dir")  # fmt: skip
        if told is not None and told["sound"] is not None and self._differs(line, told) and is_whole_sound(path):
            raise UserError(f"{path} is not what was made: if it was edited it would be lost; delete it, or choose another name or --out-dir")

    def _wish(self, line: Line) -> Any:
        asks = dict(line.asks)
        name = asks.pop("voice", None)
        if name is not None:
            asks |= {"voice": self._fetch_voice(name), "ref_audio": asks.get("ref_audio"), "ref_text": asks.get("ref_text")}
        elif "ref_audio" in asks:
            asks |= {"voice": None, "ref_text": asks.get("ref_text")}
        return dataclasses.replace(self.common, **asks)

    def _fetch_voice(self, name: str) -> Voice:
        if name not in self._voices:
            for oldest in list(self._voices)[: -REMEMBERED + 1]:
                del self._voices[oldest]
            self._voices[name] = self.shelf.load(name, self.speaker)
        return self._voices[name]

    def _path(self, line: Line) -> Path:
        return self.folder / f"{line.name}{SUFFIX}"

    def _report_path(self, line: Line) -> Path:
        return self.folder / f"{line.name}.json"

    def _is_done(self, line: Line, told: dict) -> bool:
        """Whether what is `told` is that this very line was spoken by this very build before, to the end, and it is still there."""
        return told["asks"] == self._asks(line) and told["build"] == self.build and not self._differs(line, told)

    def _differs(self, line: Line, told: dict) -> bool:
        """Whether the sound that is there is not the one that was told of."""
        try:
            return told["sound"] != dataclasses.asdict(record_file(self._path(line)))
        except OSError:  # it cannot be read, so nobody can say that it is whole
            return True

    def _told(self, line: Line) -> dict | None:
        """The report of an earlier run on what it made under the line's name, None if there is none."""
        try:
            told = read_json(self._report_path(line), "report")
        except UserError:
            return None
        return told if {"asks", "build", "sound"} <= told.keys() else None

    def _asks(self, line: Line) -> dict:
        """All that decides what is made of a line."""
        asks = describe_wish(self.common) | {"form": dataclasses.asdict(self.form), "part_tokens": self.part_tokens} | line.asks
        if "voice" in line.asks:
            asks["voice_sha256"] = self.shelf.fingerprint(line.asks["voice"])
        if "ref_audio" in line.asks:
            asks["ref_audio_sha256"] = hash_sound(line.asks["ref_audio"])
        return asks

    def _keep(self, line: Line, made: Any) -> Outcome:
        path = self._path(line)
        if isinstance(made, UserError):
            return Outcome(line, path, error=made)
        report = {"build": self.build, "asks": self._asks(line), "out": path.name, "sound": None}
        replaced = os.path.lexists(path)
        try:
            write_json(self._report_path(line), report)  # whatever stops this run now: the next one knows the file as its own
            made.save(path, self.form)
            write_json(self._report_path(line), report | {"sound": dataclasses.asdict(record_file(path))} | made.report())
        except (UserError, OSError) as error:
            if not os.path.lexists(path):
                self._report_path(line).unlink(missing_ok=True)
            return Outcome(line, path, error=error if isinstance(error, UserError) else WorkError(describe(error)))
        return Outcome(line, path, made, replaced=replaced)


def _drain(outcomes: list[Outcome]) -> Iterator[Outcome]:
    while outcomes:
        yield outcomes.pop(0)
