"""Level 5: properties that a right model has and a plausible wrong one lacks, seen without the original."""

from __future__ import annotations

import numpy as np

from voxport.build.check import cosine
from voxport.judge.finding import Finding, judge, not_judged
from voxport.run.higgs import BODY, HEADS, Speaker

PROBES = "probes"
STILL = 1e-3  # relative movement of earlier states; rounding of one more position in a kernel's tiles stays far below
FEWEST_CODES = 3  # a collapsed head repeats one code, silence included it is two
FEWEST_ROWS = 16
SAME_LOGITS = 0.99999  # cosine above which two different texts count as unheard


def judge_causality(speaker: Speaker, embeds: np.ndarray) -> Finding:
    """Change the last position [P, D]: no earlier hidden state may move, and the last one must."""
    changed = embeds.copy()
    changed[-1] = embeds[0] - embeds[-1]
    before, after = (speaker.decoder.states(x[None])[0].astype(np.float64) for x in (embeds, changed))
    moved = np.linalg.norm(after - before, axis=-1) / np.maximum(np.linalg.norm(before, axis=-1), 1e-30)
    passed = bool(moved[:-1].max(initial=0.0) < STILL < moved[-1])
    return judge(PROBES, BODY, passed, f"the last position moves earlier states by {moved[:-1].max(initial=0.0):.1e},"
                 f" its own by {moved[-1]:.1e}", earlier=float(moved[:-1].max(initial=0.0)), own=float(moved[-1]))  # fmt: skip


def judge_diversity(speaker: Speaker, rows: list[np.ndarray]) -> Finding:
    """Distinct codes a codebook over all rows [L, N]: a dead head or a chat prompt collapses to one."""
    spoken = np.concatenate(rows)
    if len(spoken) < FEWEST_ROWS:
        return not_judged(PROBES, HEADS, f"{len(spoken)} rows are too few to count codes")
    counts = [len(np.unique(spoken[:, c])) for c in range(spoken.shape[1])]
    return judge(PROBES, HEADS, min(counts) >= FEWEST_CODES, f"{min(counts)} to {max(counts)} distinct codes a codebook"
                 f" in {len(spoken)} rows", distinct=counts)  # fmt: skip


def judge_sensitivity(speaker: Speaker, prompts: list[np.ndarray]) -> Finding:
    """First-row logits of two prompts [P, D]: if they are the same, the text is not heard."""
    if len(prompts) < 2:
        return not_judged(PROBES, "text", "one text alone cannot show that text is heard")
    hidden = [speaker.decoder.states(p[None])[0, -1] for p in prompts[:2]]
    a, b = (speaker.parts[HEADS].run(hidden_states=h[None, None])[0, 0].reshape(-1) for h in hidden)
    similarity = float(cosine(a, b))
    return judge(PROBES, "text", similarity < SAME_LOGITS, f"first logits of two texts have cosine {similarity:.4f}", cosine=similarity)
