"""What a level of evidence says: a verdict, the figures behind it, and the mark that they were held to."""

from __future__ import annotations

from dataclasses import dataclass, field

PASS, FAIL, NOT_JUDGED = "PASS", "FAIL", "n/a"


@dataclass(frozen=True)
class Finding:
    """One row of the verdict: which level looked at which part, and what it saw."""

    level: str
    part: str
    verdict: str
    says: str
    figures: dict = field(default_factory=dict)


def judge(level: str, part: str, passed: bool, says: str, **figures) -> Finding:
    """A finding that passed or failed."""
    return Finding(level, part, PASS if passed else FAIL, says, figures)


def not_judged(level: str, part: str, why: str) -> Finding:
    """A finding that could not be made; never counts as a pass."""
    return Finding(level, part, NOT_JUDGED, why)


def verdict(findings: list[Finding]) -> str:
    """FAIL if any level failed, n/a if nothing could be judged, else PASS."""
    seen = {finding.verdict for finding in findings}
    return FAIL if FAIL in seen else PASS if PASS in seen else NOT_JUDGED
