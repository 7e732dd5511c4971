"""Findings as a table for the screen and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from voxport.judge.finding import Finding, verdict
from voxport.manifest import Manifest


def table(findings: Iterable[Finding]) -> str:
    """One aligned line a finding."""
    rows = [(f.verdict, f.level, f.part, f.says) for f in findings]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join("  ".join([*(cell.ljust(w) for cell, w in zip(row, widths)), row[3]]) for row in rows)


def as_json(findings: list[Finding], manifest: Manifest, reference: str) -> dict:
    """Verdict, findings, and what was compared with what."""
    target = manifest.target
    return {
        "verdict": verdict(findings),
        "target": f"{target.device}_{target.precision}",
        "source": {"id": manifest.source.id, "revision": manifest.source.revision},
        "reference": reference,
        "recipe": manifest.recipe,
        "tools": manifest.tools,
        "findings": [asdict(finding) for finding in findings],
    }
