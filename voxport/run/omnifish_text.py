"""Text to prompt ids of OmniFish: languages, names of speakers and recordings, dialogues, sentences around the text."""

from __future__ import annotations

import difflib
import re
import string
from collections.abc import Callable, Sequence
from pathlib import Path

from voxport.errors import UserError
from voxport.files import read_utf8
from voxport.manifest_omnifish import OmniFishManifest, Prompt

NOTHING = "None"  # stands for an absent language or instruction
SPEAKER_NAME, RECORDING_NAME = r"(?:[A-Za-z]{2}|spk)_\w+", r"q\d+"
# Lookbehind, so that a name which ends in `speaker:` does not swallow the beginning of the next one
NAME_IN_TEXT = re.compile(
    rf"(?<=speaker:){SPEAKER_NAME}|(?<=quality:){RECORDING_NAME}|(?<=<\|quad_start\|>){SPEAKER_NAME}(?=<\|quad_end\|>)"
)
LISTED_NAMES = 9  # all languages; of speakers there are thousands
TURN = re.compile(r"\s*([^\s:]+)\s*:\s*(.*\S)\s*")

Turn = tuple[str, str]  # speaker, line


def encode_prompt(encode: Callable[[str], list[int]], text: str, names: Sequence[str], text_vocab_size: int) -> list[int]:
    """Ids of a prompt: a known name where a name may stand is one id, the text between them is encoded piece by piece.

    `encode` turns text into ids without adding any. An unknown name stays part of the text around it.
    """
    rows = {name: row for row, name in enumerate(names)}
    ids, done = [], 0
    for match in NAME_IN_TEXT.finditer(text):
        if match[0] in rows:
            ids += [*encode(text[done : match.start()]), text_vocab_size + rows[match[0]]]
            done = match.end()
    return ids + encode(text[done:])


def style_text(language: str | None, instruct: str | None) -> str:
    """How to speak, in front of what."""
    return f"<|lang_start|>{language or NOTHING}<|lang_end|><|instruct_start|>{instruct or NOTHING}<|instruct_end|>"


def context_text(text: str, before: Sequence[str] = (), after: Sequence[str] = ()) -> str:
    """The text to speak between the sentences around it, which are not spoken."""
    earlier = f"<|object_ref_start|>{' '.join(before)}<|object_ref_end|>" if before else ""
    later = f"<|box_start|>{' '.join(after)}<|box_end|>" if after else ""
    return f"{earlier}<|text_start|>{text}<|text_end|>{later}"


def dialogue_text(turns: Sequence[Turn]) -> str:
    """Lines joined by blanks, each preceded by its speaker where the speaker changes."""
    lines, speaking = [], None
    for speaker, line in turns:
        lines.append(line if speaker == speaking else f"<|quad_start|>{speaker}<|quad_end|>{line}")
        speaking = speaker
    return " ".join(lines)


def fill_instruct(template: str, speaker: str | None, quality: str | None) -> str | None:
    """The words of a template whose fields {spk} and {q} are given; None if no field is."""
    given = {name: value for name, value in (("spk", speaker), ("q", quality)) if value is not None}
    fields = lambda word: [field for _, field, _, _ in string.Formatter().parse(word) if field]
    words = [word.format(**given) for word in template.split() if all(field in given for field in fields(word))]
    return " ".join(words) if given else None


def check_name(name: str | None, known: Sequence[str], what: str) -> str | None:
    """Return `name`; UserError with the nearest known one if the checkpoint does not know it."""
    if name is None or name in known:
        return name
    if not isinstance(name, str):
        raise UserError(f"a {what} is given by its name, not by {name!r}")
    known = [each for each in known if each != NOTHING]
    near = difflib.get_close_matches(name, known, n=LISTED_NAMES, cutoff=0.0)
    hint = f"it knows {len(known)}, the nearest are {', '.join(near)}" if near else "it knows none"
    raise UserError(f"this checkpoint has no {what} {name!r}; {hint}")


def speakers(prompt: Prompt) -> list[str]:
    """Names that may be given to --speaker or stand in a dialogue."""
    return prompt.names[: prompt.num_speakers]


def recordings(prompt: Prompt) -> list[str]:
    """Names that may be given to --quality."""
    return prompt.names[prompt.num_speakers :]


def read_dialogue(path: Path, manifest: OmniFishManifest) -> tuple[Turn, ...]:
    """Lines `speaker: text` of a UTF-8 file; blank lines do not count. UserError names the line at fault."""
    turns = []
    for number, line in enumerate(read_utf8(path, "dialogue").splitlines(), 1):
        found = TURN.fullmatch(line)
        if line.strip() and found is None:
            raise UserError(f"{path}, line {number}: {line[:40]!r} is not of the form 'speaker: text'")
        if found:
            turns.append((check_name(found[1], speakers(manifest.prompt), f"speaker (line {number} of {path})"), found[2]))
    if not turns:
        raise UserError(f"dialogue {path} has no line to speak")
    return tuple(turns)
