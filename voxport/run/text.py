"""Text to prompt ids: which tags may pass, what is worth speaking, and where the reference goes."""

from __future__ import annotations

import difflib
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from voxport.errors import UserError
from voxport.manifest import Limits, Manifest, Tokens, verify_files

TAG = re.compile(r"<\|[^|>]{1,64}\|>")
WORD = re.compile(r"[a-z0-9]+")
TAG_POLICIES = ("error", "strip", "keep")  # what happens to a tag that the tokenizer does not know
NORMALISERS = ("NFC", "NFD", "NFKC", "NFKD")
LONGEST_TEXT = 1_000_000  # characters; some 18 hours of speech, and half a minute to cut into parts
LAYOUT = "\t\n\v\f\r\x85"  # control characters that only break lines or leave a space
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class Script:
    """Text that may be spoken: exactly what the tokenizer gets, what is left without control tags, and their number."""

    text: str
    spoken: str
    num_tags: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """ids: [P] int64 with the placeholder at reference rows; ref_span: [start, end) of those rows, None without any."""

    ids: np.ndarray
    ref_span: tuple[int, int] | None


def check_script(text: str, what: str, manifest: Manifest, policy: str = "error") -> Script:
    """Check one text before anything is loaded. `what` names it in messages, e.g. "--text".

    Unknown tags follow `policy`, structural tokens are always refused, and so is text without a letter or digit. Nothing is
    trimmed or normalised: spaces, line breaks and invisible characters go to the tokenizer as they are.
    """
    _check_characters(text, what)
    odd = _control_characters(text, what)
    text, warnings = _treat_unknown_tags(text, what, manifest, policy)
    for token in manifest.structural_tokens:
        if token in text:
            raise UserError(f"{what} holds {token!r}, which steers the model and cannot be spoken; take it out")
    control = manifest.control_tags
    num_tags = sum(tag in control for tag in TAG.findall(text))
    spoken = TAG.sub(lambda tag: "" if tag[0] in control else tag[0], text)
    if not any(character.isalnum() for character in TAG.sub("", spoken)):
        raise UserError(f"{what} {text[:40]!r} has no letter or digit to speak; write at least one word")
    return Script(text, spoken, num_tags, odd + warnings)


def _check_characters(text: str, what: str) -> None:
    if not isinstance(text, str):
        raise UserError(f"{what} must be text, not {type(text).__name__}")
    if len(text) > LONGEST_TEXT:
        raise UserError(f"{what} has {len(text)} characters, more than {LONGEST_TEXT}; speak it in pieces, a chapter each")
    if "\0" in text:
        raise UserError(f"{what} holds a NUL character at {text.index(chr(0))}: that is binary data, not text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{what} is not valid Unicode at character {error.start}; save or pass it as UTF-8") from None


def _control_characters(text: str, what: str) -> tuple[str, ...]:
    """A warning if there are characters in the text that steer terminals and printers."""
    found = [f"U+{ord(c):04X}" for c in dict.fromkeys(text) if unicodedata.category(c) == "Cc" and c not in LAYOUT]
    return (f"{what} holds control characters, which the model gets as they are: {' '.join(found[:8])}",) if found else ()


def _treat_unknown_tags(text: str, what: str, manifest: Manifest, policy: str) -> tuple[str, tuple[str, ...]]:
    if policy not in TAG_POLICIES:
        raise UserError(f"--tags must be one of {', '.join(TAG_POLICIES)}, not {policy!r}")
    known = manifest.control_tags | manifest.structural_tokens
    unknown = _unknown_tags(text, known)
    if not unknown:
        return text, ()
    if policy == "error":
        raise UserError(
            f"{what} holds the unknown tag {unknown[0]!r}{_nearest(unknown[0], manifest.control_tags)}; "
            "--tags strip removes unknown tags, --tags keep has them read as text"
        )
    if policy == "keep":
        return text, (f"{what}: unknown tags are read as text: {' '.join(unknown)}",)
    warnings = (f"{what}: unknown tags were removed: {' '.join(unknown)}",)
    while unknown := _unknown_tags(text, known):  # what is left around a removed tag may form another one
        text = TAG.sub(lambda tag: tag[0] if tag[0] in known else "", text)
    return text, warnings


def _unknown_tags(text: str, known: dict[str, int]) -> list[str]:
    return [tag for tag in dict.fromkeys(TAG.findall(text)) if tag not in known]


def _nearest(tag: str, control_tags: dict[str, int]) -> str:
    tags = {_words(known): known for known in control_tags}
    found = difflib.get_close_matches(_words(tag), tags, n=1, cutoff=0.0)
    return f" (nearest valid tag: {tags[found[0]]})" if found else " (this checkpoint knows no control tags)"


def _words(tag: str) -> str:
    """A tag's words in alphabetical order: pause_long is then long_pause, and case and spaces do not count."""
    return " ".join(sorted(WORD.findall(tag.lower())))


def frame_cap(script: Script, limits: Limits, num_codebooks: int) -> int:
    """Frames T after which speech of this text is cut when the user gives no cap; the rule is in `Limits`."""
    wide = sum(character.isdecimal() or unicodedata.east_asian_width(character) in "WF" for character in script.spoken)
    frames = (
        limits.cap_base_frames
        + limits.cap_frames_per_char * (len(script.spoken) - wide)
        + limits.cap_frames_per_wide_char * wide
        + limits.cap_frames_per_tag * script.num_tags
    )
    return min(frames, most_frames(limits, num_codebooks))


def most_frames(limits: Limits, num_codebooks: int) -> int:
    """The largest T whose L = T + N - 1 rows fit in `max_rows`."""
    return limits.max_rows - (num_codebooks - 1)


def load_tokenizer(folder: Path, manifest: Manifest) -> Tokenizer:
    """The build's tokenizer, verified; UserError if a token that the manifest names has another id in it."""
    if TOKENIZER_FILE not in manifest.files:
        raise UserError(f"{folder}: the manifest lists no {TOKENIZER_FILE}; build it again with optimize.py")
    verify_files(folder, {TOKENIZER_FILE: manifest.files[TOKENIZER_FILE]})
    path = Path(folder) / TOKENIZER_FILE
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise UserError(f"{path} cannot be read as a tokenizer ({error}); build it again") from error
    _check_normaliser(tokenizer.normalizer, path)
    for token, token_id in (manifest.control_tags | manifest.structural_tokens).items():
        if tokenizer.token_to_id(token) != token_id:
            raise UserError(f"{path}: {token} has id {tokenizer.token_to_id(token)}, the manifest says {token_id}")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _check_normaliser(normaliser: object, path: Path) -> None:
    """Only Unicode's own forms may be applied to a text before it is cut: a chain of replacements could fill the memory with it."""
    if normaliser is not None and type(normaliser).__name__ not in NORMALISERS:
        raise UserError(f"{path}: its normaliser {type(normaliser).__name__} is none of {', '.join(NORMALISERS)}; build it again")


def build_prompt(
    tokenizer: Tokenizer, tokens: Tokens, text: str, ref_text: str | None = None, num_ref_rows: int = 0
) -> Prompt:
    """Prompt ids in the order that the model was trained on (spec 6), for text as it is.

    zero-shot: tts text TEXT audio; clone: tts [ref_text REF_TEXT] ref_audio placeholder*num_ref_rows text TEXT audio.
    A transcript needs both reference rows and the `ref_text` token; otherwise it is left out.
    """
    ids, ref_span = [tokens.tts], None
    if num_ref_rows < 0:
        raise UserError(f"a reference cannot have {num_ref_rows} rows")
    if num_ref_rows:
        if ref_text and tokens.ref_text is not None:
            ids += [tokens.ref_text, *encode(tokenizer, ref_text)]
        ids.append(tokens.ref_audio)
        ref_span = (len(ids), len(ids) + num_ref_rows)
        ids += [tokens.placeholder] * num_ref_rows
    ids += [tokens.text, *encode(tokenizer, text), tokens.audio]
    return Prompt(np.array(ids, np.int64), ref_span)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of `text` alone: no token is added at either end."""
    return tokenizer.encode(text, add_special_tokens=False).ids
