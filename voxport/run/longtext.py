"""Long text: cut at sentences into parts that the model speaks well, and joined again with the pauses between them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from voxport.errors import UserError
from voxport.run.text import TAG
from voxport.run.values import is_whole

PART_TOKENS = 150  # some 600 letters or 40 s of English; from some 900 letters on the model drops the end of a text
LEAST_TOKENS = 8  # longer than nearly every word
SENTENCE_PAUSE, PARAGRAPH_PAUSE, PHRASE_PAUSE = 0.35, 0.7, 0.1  # seconds between parts, as readers aloud leave them
QUIET = 0.01  # of full scale: below, sound counts as a pause

CLOSERS = "\"'”’»)]}›」』）】》"
OPENERS = "\"'“‘«([{‹「『（【《¿¡"
WIDE_ENDS = "。！？｡"
END = re.compile(rf"[.!?…]+[{re.escape(CLOSERS)}]*(?=\s|$)|[{WIDE_ENDS}]+[{re.escape(CLOSERS)}]*|\n[^\S\n]*\n\s*")
# Words before a full stop that ends no sentence, even when a capital follows; others are told by the lower case after them
ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof st sr jr rev hon gen col sgt capt lt cmdr gov sen rep mt no nos vol fig eq ch sec pp vs approx "
    "dept est inc ltd co corp jan feb mar apr jun jul aug sep sept oct nov dec mon tue wed thu fri sat sun "
    "z.b bzw ca nr bd abb mme mlle m".split()
)
PHRASE = re.compile(rf"[,;:—–.!?…][{re.escape(CLOSERS)}]*\s+|[，、；：]")  # full stops: some write no capitals
INLINE = re.compile(r"<\|(?:sfx:|prosody:(?:long_)?pause)")  # tags with a place of their own; all others govern a sentence
LEADING_TAGS = re.compile(rf"\s*((?:{TAG.pattern}\s*)+)")


@dataclass(frozen=True)
class Part:
    """A stretch of text to be spoken at once. `carried` are the tags of its sentence, which began in an earlier part; `pause`
    are seconds of quiet after it."""

    text: str
    carried: str = ""
    pause: float = 0.0

    @property
    def spoken(self) -> str:
        """What the model is given."""
        return self.carried + self.text


def part_budget(asked: int | None, in_one_part: bool) -> int:
    """Tokens that a part may have: as asked, else `PART_TOKENS`, or no limit where all must come from one part."""
    if asked is not None:
        return asked
    return sys.maxsize if in_one_part else PART_TOKENS


def check_budget(budget: int) -> None:
    """UserError unless parts of `budget` tokens can hold most words."""
    if not (is_whole(budget) and budget >= LEAST_TOKENS):
        raise UserError(f"--part-tokens must be a whole number of at least {LEAST_TOKENS}, not {budget!r}: fewer would cut words")


def split_text(text: str, count: Callable[[str], int], budget: int = PART_TOKENS, first: int | None = None) -> list[Part]:
    """Cut text into parts of at most `budget` tokens, as `count` counts them, the `first` of fewer if it is to be the voice
    of the rest. The parts joined are the text, but for spaces.

    Cuts fall behind sentences, else behind phrases, else between words, and inside a word only where it alone is too long;
    never inside a tag, and inside a number or an address only then.
    """
    parts: list[Part] = []
    held, pause = "", 0.0
    for sentence in sentences(text):
        room = budget if parts or first is None else min(first, budget)
        if held and count((held + sentence).strip()) <= room:
            held, pause = held + sentence, pause_after(sentence)
            continue
        if held.strip():
            parts.append(Part(held.strip(), "", pause))
        room = budget if parts or first is None else room
        held, pause = sentence, pause_after(sentence)
        if count(sentence.strip()) > room:
            *whole, last = split_sentence(sentence, count, room)
            parts += whole
            parts.append(Part(last.text, last.carried, pause))
            held = ""
    if held.strip():
        parts.append(Part(held.strip(), "", pause))
    return _join_mute(parts, text)


def _join_mute(parts: list[Part], text: str) -> list[Part]:
    """Give a part without a letter or digit, which cannot be spoken, to the part before it, or else to the one behind. What
    stands between them in `text` is kept: a space more could make a tag of marks that are none."""
    joined: list[Part] = []
    start = end = 0  # in the text, of the last part that was joined
    for part in parts:
        begin = _skip_spaces(text, end)
        end = begin + len(part.text)
        if joined and not (is_speakable(joined[-1].text) and is_speakable(part.text)):
            part = Part(text[start:end], joined.pop().carried, part.pause)
        else:
            start = begin
        joined.append(part)
    return joined


def is_speakable(text: str) -> bool:
    """Whether there is a letter or digit outside the tags."""
    return any(character.isalnum() for character in TAG.sub("", text))


def pause_after(sentence: str) -> float:
    """Seconds of quiet that a reader leaves behind a sentence."""
    return PARAGRAPH_PAUSE if sentence.count("\n") > 1 and not sentence.rsplit("\n", 1)[1].strip() else SENTENCE_PAUSE


def sentences(text: str) -> Iterator[str]:
    """Sentences with the spaces that follow them; joined they are the text."""
    tags = [tag.span() for tag in TAG.finditer(text)]
    start = position = 0
    for end in END.finditer(text):
        while tags and tags[0][1] <= end.start():
            tags.pop(0)
        inside = tags and tags[0][0] < end.end() and end.start() < tags[0][1]
        if end.end() <= position or inside or not _ends_sentence(text, start, end):
            continue
        position = _skip_spaces(text, end.end())
        yield text[start:position]
        start = position
    if start < len(text):
        yield text[start:]


def _skip_spaces(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _ends_sentence(text: str, start: int, end: re.Match) -> bool:
    """Whether the mark at `end` ends the sentence that began at `start`."""
    mark = end[0]
    if mark[0] == "\n" or mark[0] in WIDE_ENDS:
        return True
    if _next_letter(text, end.end()).islower():
        return False
    if not mark.startswith(".") or mark.startswith(".."):
        return True
    before = text[max(start, end.start() - 20) : end.start()].split()
    word = before[-1].lstrip(OPENERS) if before else ""
    is_initial = len(word) == 1 and word.isalpha() and word.isupper()
    is_item = word.isdecimal() and text[start : end.start()].strip() == word  # "1." at the head of a list
    return not (is_initial or is_item or word.lower() in ABBREVIATIONS or re.fullmatch(r"(?:[A-Za-z]\.)+[A-Za-z]", word))


def _next_letter(text: str, position: int) -> str:
    """The first character behind spaces, opening marks and tags."""
    while position < len(text):
        tag = TAG.match(text, position)
        if tag:
            position = tag.end()
        elif text[position].isspace() or text[position] in OPENERS:
            position += 1
        else:
            return text[position]
    return ""


def split_sentence(sentence: str, count: Callable[[str], int], budget: int) -> list[Part]:
    """Parts of a sentence that is too long; those behind the first carry its tags."""
    carried = leading_tags(sentence)
    room = budget - (count(carried) if carried else 0)
    parts, held = [], ""
    for piece in _pieces(sentence, count, max(1, room)):
        if held.strip() and count((held + piece).strip()) > room:
            parts.append(Part(held.strip(), carried if parts else "", PHRASE_PAUSE))
            held = ""
        held += piece
    if held.strip():
        parts.append(Part(held.strip(), carried if parts else "", PHRASE_PAUSE))
    return parts


def leading_tags(sentence: str) -> str:
    """The tags at the head of a sentence that govern all of it."""
    found = LEADING_TAGS.match(sentence)
    return "".join(tag for tag in TAG.findall(found[1]) if not INLINE.match(tag)) if found else ""


def _pieces(sentence: str, count: Callable[[str], int], budget: int) -> Iterator[str]:
    """Phrases, those too long as words, those too long as characters; joined they are the sentence."""
    for phrase in _cut(sentence, [mark.end() for mark in PHRASE.finditer(sentence)]):
        if count(phrase.strip()) <= budget:
            yield phrase
            continue
        tags = [tag.span() for tag in TAG.finditer(phrase)]
        for word in _cut(phrase, _word_ends(phrase, tags)):
            if TAG.fullmatch(word.strip()) or count(word.strip()) <= budget:
                yield word
            else:
                yield from _characters(word, count, budget)


def _word_ends(phrase: str, tags: list[tuple[int, int]]) -> list[int]:
    """Places behind spaces, and on both sides of tags."""
    ends = {space.end() for space in re.finditer(r"\s+", phrase)} | {end for tag in tags for end in tag}
    return sorted(end for end in ends if not any(start < end < stop for start, stop in tags))


def _characters(word: str, count: Callable[[str], int], budget: int) -> Iterator[str]:
    """A word without a place to cut, in runs of characters: as East Asian text is written, or a very long address."""
    size = max(1, len(word) * budget // max(1, count(word)))
    start = 0
    while start < len(word):
        length = min(size, len(word) - start)
        while length > 1 and count(word[start : start + length]) > budget:
            length = max(1, length * 3 // 4)
        yield word[start : start + length]
        start += length


def _cut(text: str, ends: list[int]) -> Iterator[str]:
    start = 0
    for end in (*ends, len(text)):
        if end > start:
            yield text[start:end]
            start = end


def quiet_between(before: np.ndarray, after: np.ndarray, pause: float, rate: int) -> np.ndarray:
    """Zeros [n] float32 that make the quiet between two parts `pause` seconds long, with what they bring themselves."""
    missing = round(pause * rate) - quiet_length(before[::-1]) - quiet_length(after)
    return np.zeros(max(0, missing), np.float32)


def quiet_length(samples: np.ndarray) -> int:
    """Samples at the beginning that are quiet."""
    loud = np.abs(samples) > QUIET
    return int(loud.argmax()) if loud.any() else len(samples)
