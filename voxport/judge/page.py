"""One HTML page of a judgement, with plots and sound inside it: nothing is fetched, nothing runs.

`page.html` is the page; here its figures become bars, pictures and players.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
import numpy as np

from voxport.files import atomic_path
from voxport.judge.finding import FAIL, NOT_JUDGED, PASS
from voxport.judge.plots import (
    LAYER_NUMBER,
    badness,
    bars,
    data_uri,
    error_columns,
    in_bytes,
    mel_power,
    mel_ticks,
    picture,
    short,
    time_ticks,
    wav,
)
from voxport.run.audio import level_dbfs

if TYPE_CHECKING:
    from voxport.judge.rounding import LayerError

Waveform = tuple[np.ndarray, int]  # samples [n] float in -1..1, rate in Hz

WORST = 10  # tensors in the list of those that lose most


@dataclass(frozen=True)
class Utterance:
    """A text and its speech by each speaker: "original", the build's name, ..."""

    text: str
    waveforms: Mapping[str, Waveform]


@dataclass(frozen=True)
class Extras:
    """What the page shows beyond the result in JSON: errors of each tensor, bytes of each part, speech, a second build."""

    name: str = ""  # of the build; its target if empty
    layers: Sequence[LayerError] = ()
    part_bytes: Mapping[str, int] = field(default_factory=dict)
    speech: Sequence[Utterance] = ()
    other: tuple[dict, Extras] | None = None  # result and extras of the build to compare with


def write_page(path: Path, result: dict, extras: Extras = Extras()) -> None:
    """Write the page of `result`, as `report.as_json` gives it: whole at `path`, or not there at all."""
    text = page(result, extras)
    with atomic_path(Path(path)) as temporary:
        # a lone surrogate in a text cannot be UTF-8; it must not cost the report
        temporary.write_bytes(text.encode("utf-8", "replace"))


def page(result: dict, extras: Extras = Extras()) -> str:
    """The page as HTML. Whatever stands in texts is shown as text."""
    pairs = [(result, extras), *([extras.other] if extras.other else [])]
    results = [r for r, _ in pairs]
    names = build_names(pairs)
    content = {
        "builds": [build(*pair) for pair in zip(names, results)],
        "findings": side_by_side([r["findings"] for r in results]),
        **weight_charts(names, [e.layers for _, e in pairs]),
        "charts": [chart for chart in (agreement(names, results), partings(names, results), sizes(names, pairs)) if chart],
        "speech": [utterance(u.text, u.waveforms) for u in gather_speech([e.speech for _, e in pairs])],
        "listeners": [listener for name, r in zip(names, results) for listener in listeners(name, r, len(pairs) > 1)],
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["mark"] = {PASS: "pass", FAIL: "fail", NOT_JUDGED: "none"}.get
    return environment.get_template("page.html").render(content).lstrip()


def build_names(pairs: Sequence[tuple[dict, Extras]]) -> list[str]:
    """A name for each build; alike ones are numbered."""
    names = [extras.name or result["target"] for result, extras in pairs]
    return names if len(set(names)) == len(names) else [f"{name} ({i})" for i, name in enumerate(names, 1)]


def build(name: str, result: dict) -> dict:
    """The box with the verdict."""
    findings = result["findings"]
    passed, failed, rest = (sum(f["verdict"] == v for f in findings) for v in (PASS, FAIL, NOT_JUDGED))
    source = result["source"]
    facts = {
        "Target": result["target"],
        "Source": " ".join(filter(None, (source["id"], source["revision"]))),
        "Compared with": result["reference"],
        "Recipe": spell(result["recipe"]),
        "Made with": spell(result["tools"]),
    }
    return {
        "name": name,
        "verdict": result["verdict"],
        "reference": result["reference"],
        "counts": f"{passed} of {len(findings)} findings passed, {failed} failed, {rest} could not be judged.",
        "failed": [f for f in findings if f["verdict"] == FAIL],
        "facts": [(key, value) for key, value in facts.items() if value],
        "json": json.dumps(result, indent=1, ensure_ascii=False),
    }


def spell(figures: Mapping) -> str:
    """Settings in one line, those that are not set left out."""
    told = {
        key: f"({spell(value)})" if isinstance(value, Mapping) else value for key, value in figures.items() if value is not None
    }
    return ", ".join(f"{key} {value}" for key, value in told.items())


def side_by_side(results: Sequence[Sequence[dict]]) -> list[dict]:
    """One row for each (level, part) of any build, its nth finding beside the other's nth."""
    rows: dict[tuple, dict] = {}
    for i, findings in enumerate(results):
        seen: dict[tuple, int] = {}
        for finding in findings:
            what = (finding["level"], finding["part"])
            seen[what] = seen.get(what, 0) + 1
            empty = {"level": what[0], "part": what[1], "found": [None] * len(results)}
            rows.setdefault((*what, seen[what]), empty)["found"][i] = finding
    return list(rows.values())


def figure(result: dict, name: str):
    """The first figure of that name in any finding; None if there is none."""
    return next((f["figures"][name] for f in result["findings"] if name in f["figures"]), None)


def agreement(names: Sequence[str], results: Sequence[dict]) -> dict | None:
    """Top-1 agreement of each codebook; the bar is what is missing from 1, where the differences can be seen."""
    found = [figure(r, "per_codebook") or [] for r in results]
    rows = []
    for c in range(max(map(len, found))):
        values = [f[c] if c < len(f) else None for f in found]
        missing = [None if v is None else 1 - v for v in values]
        rows.append((str(c), missing, ["" if v is None else f"{v:.4f}" for v in values]))
    caption = "Number: share of choices equal to the original's, both fed the same rows. Bar: share of those that differ."
    return bars("Agreement by codebook", caption, "Codebook", names, rows)


def partings(names: Sequence[str], results: Sequence[dict]) -> dict | None:
    """Where greedy rows first part from the original's, and how near the choice was."""
    found = [{p["text"]: p for p in figure(r, "parted") or []} for r in results]
    rows = []
    for text in dict.fromkeys(text for parted in found for text in parted):
        at = [parted.get(text) for parted in found]
        says = ["never" if p is None else f"{p['margin']:.3g} at row {p['row']}" for p in at]
        rows.append((text, [p and p["margin"] for p in at], says))
    caption = "How much higher the original rates its own choice, in logits, at the first row where the build chose otherwise."
    return bars("First divergence of greedy rows", caption, "Text", names, rows)


def sizes(names: Sequence[str], pairs: Sequence[tuple[dict, Extras]]) -> dict | None:
    """Bytes of each part."""
    found = [extras.part_bytes for _, extras in pairs]
    parts = dict.fromkeys(part for sizes in found for part in sizes)
    rows = [(part, [f.get(part) for f in found], [in_bytes(f.get(part)) for f in found]) for part in parts]
    totals = ", ".join(f"{name} {in_bytes(sum(f.values()))}" for name, f in zip(names, found) if f)
    return bars("Bytes by part", f"Graph with its weights. Together: {totals}.", "Part", names, rows)


def weight_charts(names: Sequence[str], layers: Sequence[Sequence[LayerError]]) -> dict:
    """Error of every tensor in the order of the graph, by kind, and the worst; the second build on the first one's scale."""
    rounded = [[e for e in errors if badness(e) > 0] for errors in layers]
    top = max((e.error for errors in rounded for e in errors if math.isfinite(e.error)), default=0.0) or 1.0
    charts = [
        error_columns(name, errors, len(all_errors), top) for name, errors, all_errors in zip(names, rounded, layers) if errors
    ]
    return {"layers": charts, "kinds": error_by_kind(names, layers), "worst": worst_tensors(names, layers)}


def error_by_kind(names: Sequence[str], layers: Sequence[Sequence[LayerError]]) -> dict | None:
    """The same matrix of every layer taken together: what a recipe can choose."""
    found = [group_by_kind(errors) for errors in layers]
    mean = lambda group: float(np.average([e.error for e in group], weights=[e.bytes for e in group]))
    rows = []
    for kind in dict.fromkeys(kind for groups in found for kind in groups):
        groups = [g.get(kind) for g in found]
        says = ["" if g is None else f"{mean(g):.4f} in {in_bytes(sum(e.bytes for e in g))}" for g in groups]
        rows.append((kind, [g and mean(g) for g in groups], says))
    caption = "Mean relative error of the rounded tensors of one kind over all layers, weighted by bytes."
    return bars("By kind of tensor", caption, "Kind", names, rows)


def group_by_kind(errors: Sequence[LayerError]) -> dict[str, list[LayerError]]:
    """Tensors that differ from their source, by their name without the number of the layer."""
    groups: dict[str, list[LayerError]] = {}
    for e in errors:
        if badness(e) > 0:
            groups.setdefault(short(LAYER_NUMBER.sub("", e.name)), []).append(e)
    return groups


def worst_tensors(names: Sequence[str], layers: Sequence[Sequence[LayerError]]) -> dict | None:
    """The tensors that lose most in the first build, and the same ones in the second."""
    found = [{e.name: e for e in errors} for errors in layers]
    worst = sorted((e for e in layers[0] if badness(e) > 0), key=badness, reverse=True)[:WORST]
    rows = []
    for name in (e.name for e in worst):
        at = [f.get(name) for f in found]
        says = ["" if e is None else f"{e.error:.4f} in {in_bytes(e.bytes)}, {e.bits} bits" for e in at]
        rows.append((short(name), [e and e.error for e in at], says))
    return bars("Those that lose most", f"The {len(rows)} largest relative errors of {names[0]}.", "Tensor", names, rows)


def listeners(build_name: str, result: dict, several: bool) -> list[dict]:
    """What listeners heard, and the controls that they stood."""
    found = [f["figures"] for f in result["findings"] if "controls" in f["figures"]]
    where = f", {build_name}" if several else ""
    return [
        {"name": f["listener"] + where, "normaliser": f.get("normaliser"), "heard": f.get("heard"), "controls": f["controls"]}
        for f in found
    ]  # fmt: skip


def gather_speech(speech: Sequence[Sequence[Utterance]]) -> list[Utterance]:
    """The waveforms of one text by all builds together; a label that comes again is the same sound."""
    gathered: dict[str, dict] = {}
    for utterances in speech:
        for u in utterances:
            gathered.setdefault(u.text, {}).update(u.waveforms)
    return [Utterance(text, waveforms) for text, waveforms in gathered.items()]


def utterance(text: str, waveforms: Mapping[str, Waveform]) -> dict:
    """Spectrograms on one scale of time and loudness, and players."""
    sound = {label: w for label, w in waveforms.items() if len(w[0]) and np.isfinite(w[0]).all()}
    seconds = max((len(samples) / rate for samples, rate in sound.values()), default=0.0)
    bands = {label: mel_power(*w, seconds) for label, w in sound.items()}
    peak = max((float(b.max()) for b in bands.values()), default=0.0) or 1.0
    clips = []
    for label, (samples, rate) in waveforms.items():
        if label in sound:
            clips.append(clip(label, samples, rate) | {"image": picture(bands[label], peak), "seconds": time_ticks(seconds)})
        else:
            clips.append(
                {"label": label, "says": "no sound" if len(samples) == 0 else "NaN or Inf among its samples", "image": None}
            )
    return {"text": text, "clips": clips}


def clip(label: str, samples: np.ndarray, rate: int) -> dict:
    """Caption, frequency axis and player of one waveform."""
    says = f"{len(samples) / rate:.2f} s at {rate} Hz, RMS {level_dbfs(samples):.1f} dBFS, peak {np.abs(samples).max():.2f}"
    return {"label": label, "says": says, "hertz": mel_ticks(rate), "audio": data_uri("audio/wav", wav(samples, rate))}
