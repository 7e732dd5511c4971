"""Word and character errors between a text and what a listener wrote down, as they stand and under a stated normaliser."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

UNSPACED = {"zh", "yue", "ja", "th", "lo", "my", "km"}  # written without spaces: judged by characters
TAGS = re.compile(r"<[^>]*>|\[[^\]]*\]")


@dataclass(frozen=True)
class Errors:
    """Edits that turn a reference of `length` units into what was heard."""

    substitutions: int
    deletions: int
    insertions: int
    length: int

    def __add__(self, other: Errors) -> Errors:
        return Errors(*(a + b for a, b in zip(self._fields(), other._fields())))

    def _fields(self) -> tuple[int, ...]:
        return self.substitutions, self.deletions, self.insertions, self.length

    @property
    def edits(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float:
        """Edits per unit of the reference; above 1 if more was heard than said."""
        return self.edits / max(1, self.length)


def word_errors(reference: str, heard: str) -> Errors:
    """Edits between the words of two texts, split at white space and compared as they are."""
    return count_errors(reference.split(), heard.split())


def character_errors(reference: str, heard: str) -> Errors:
    """Edits between the characters of two texts, white space left out: recognisers place it freely."""
    return count_errors("".join(reference.split()), "".join(heard.split()))


def count_errors(reference: Sequence[str], heard: Sequence[str]) -> Errors:
    """Fewest edits (Levenshtein); among equals the one with fewest deletions, as scorers usually align."""
    # row[j]: (edits, deletions, insertions, substitutions) from the reference so far to heard[:j]
    row = [(j, 0, j, 0) for j in range(len(heard) + 1)]
    for i, unit in enumerate(reference, 1):
        above, row = row, [(i, i, 0, 0)]
        for j, other in enumerate(heard, 1):
            miss = unit != other
            row.append(min(
                _plus(above[j - 1], (miss, 0, 0, miss)), _plus(above[j], (1, 1, 0, 0)), _plus(row[j - 1], (1, 0, 1, 0)),
            ))  # fmt: skip
    _, deletions, insertions, substitutions = row[-1]
    return Errors(substitutions, deletions, insertions, len(reference))


def _plus(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]


def normalise(text: str, language: str) -> str:
    """`text` as the rule of its language sees it, words joined by one space."""
    return " ".join(_normaliser(language)[1](text).split())


def the_rule(language: str) -> str:
    """The normaliser of a language, in words."""
    return _normaliser(language)[0]


@functools.cache
def _normaliser(language: str) -> tuple[str, Callable[[str], str]]:
    """The rule under which two texts are the same words, in words and as a function.

    English: Whisper's own, as most published error rates use it; its spelling table is not in the package, so "colour" is not
    "color". It removes marks on letters and combining vowel signs, so other languages get a rule of their own.
    """
    if language != "en":
        return f"{language}: NFKC, case folded, tags and punctuation removed; numbers stay as written", _plain_words
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    rule = "en: Whisper's EnglishTextNormalizer: numbers as digits, contractions in full, fillers, tags and punctuation removed"
    return rule, EnglishTextNormalizer({})


def _plain_words(text: str) -> str:
    folded = unicodedata.normalize("NFKC", TAGS.sub(" ", text)).casefold()
    # apostrophes join ("l'eau"); letters, marks and digits stay
    return "".join(c if unicodedata.category(c)[0] in "LMN" else "" if c in "'\u2019" else " " for c in folded)


def score(pairs: Iterable[tuple[str, str]], language: str) -> dict[str, Errors]:
    """(text, heard) of every utterance -> errors of all together: words and characters, normalised and raw."""
    nothing = Errors(0, 0, 0, 0)
    pairs = list(pairs)
    plain = [(normalise(text, language), normalise(heard, language)) for text, heard in pairs]
    return {
        "wer": sum((word_errors(*pair) for pair in plain), nothing),
        "cer": sum((character_errors(*pair) for pair in plain), nothing),
        "raw_wer": sum((word_errors(*pair) for pair in pairs), nothing),
        "raw_cer": sum((character_errors(*pair) for pair in pairs), nothing),
    }


def judged_measure(language: str) -> str:
    """Which of the errors decides: words, or characters where words are not spaced."""
    return "cer" if language in UNSPACED else "wer"
