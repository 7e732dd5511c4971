"""The README's tables of measured figures, written from the JSON files beside this one.

    python benchmarks/tables.py

replaces what stands between `<!-- table: NAME -->` and `<!-- end -->`. A test holds the README to it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from voxport.errors import UserError, run_script, say
from voxport.files import read_json

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def lay_out(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def build_memory(found: dict) -> str:
    """Peak private and resident memory of every part of every target, and the decoder's time beside the stock path's."""
    targets = [name for name in ("cpu_int4", "cuda_int4", "cuda_fp16") if name in found]
    parts = list(found[targets[0]]["parts"])
    cell = lambda p: f"{p['private_gb']:.1f} / {p['resident_gb']:.1f}" if p["exit"] == 0 else f"failed ({p['exit']})"
    label = lambda part: f"{part}, then the proof of the whole" if part == parts[-1] else part
    rows = [[label(part), *(cell(found[target]["parts"][part]) for target in targets)] for part in parts]
    table = lay_out(["GB at the peak, private / resident", *(f"`{target}`" for target in targets)], rows)
    return table + "\n" + stock_lines(found)


def stock_lines(found: dict) -> str:
    """How the decoder alone compares with ModelBuilder's own int4 path."""
    deep = next(key for key in found if key.startswith("stock_") and key.endswith("_layers"))
    ours, stock, layers = found[deep]["ours"], found[deep]["stock"], deep.split("_")[1]
    text = (f"The decoder at {layers} layers, extraction included: {found[deep]['time_ratio']} of the time of ModelBuilder's own int4 path in the same"
            f" run, {ours['private_gb']:.1f} GB of private memory where that takes {stock['private_gb']:.1f} GB.")  # fmt: skip
    full = found.get("stock_full_size")
    if full is None:
        return text + "\n"
    end = f"{full['private_gb']:.1f} GB" if full["exit"] == 0 else f"{full['private_gb']:.1f} GB when it was killed (exit {full['exit']})"
    return text + f" At full size that path takes {end}.\n"


def recipe_rows(found: dict) -> str:
    """Every recipe: what it costs at the published size and what it keeps of the demo."""
    demo, full = found["demo"]["recipes"], found["full_size"]["recipes"]
    head = ["recipe", "GB a frame", "weight error", "frames/s", "to load, GB", "demo: cosine", "equal choices", "WER"]
    rows = []
    for name, large in full.items():
        small = demo[name]
        heard = f"{100 * small['wer']:.1f} %" if "wer" in small else "-"
        agreed = [f"{small['hidden_cosine']:.4f}", f"{100 * small['top1']:.1f} %", heard] if "top1" in small else ["-"] * 3
        rows.append([f"`{name}`", f"{large['bytes'] / 1e9:.2f}", f"{100 * large['weight_error']:.2f} %",
                     f"{large['frames_per_second']:.1f}", f"{large['load_private_mb'] / 1e3:.1f}", *agreed])  # fmt: skip
    return lay_out(head, rows)


def speech_lines(found: dict) -> str:
    """The lines of acceptance of benchmarks/speak.py."""
    number = lambda line: "-" if line["value"] is None else f"{line['value']:.2f}"
    return lay_out(["what", "figure", "wanted"], [[line["what"], number(line), line["wanted"]] for line in found["acceptance"]])


def speech_frames(found: dict) -> str:
    """Frames a second by position: the loop, the bare sessions, a naive loop, and what memory would allow."""
    frames = found["stages"]["frames"]
    rows = []
    for position, place in frames["positions"].items():
        bound = frames["bandwidth_gb_per_second"] * 1e9 / place["bytes"]
        rows.append([position, *(f"{place[kind]['frames_per_second']:.2f}" for kind in ("loop", "bare", "naive")), f"{bound:.2f}"])
    return lay_out(["position", "spoken", "bare sessions", "naive loop", "memory allows"], rows)


def omnifish_lines(found: dict) -> str:
    """OmniFish at the published size: seconds of work a second of speech beside PyTorch's, memory of the build, growth of blocks."""
    ours, torch = found["real_time_factor"], found["torch_real_time_factor"]
    rows = [[f"{part}: seconds a second of speech, PyTorch's", f"{ours[part]:.2f}, {torch[part]:.2f}"] for part in ours]
    promises = found["promises"]
    memory, growth = promises["build_private_mb"], promises["block_growth"]
    rows += [["whole build: private memory at the peak", f"{memory['found'] / 1e3:.2f} GB ({memory['allowed'] / 1e3:.0f} allowed)"],
             ["median time of blocks 18 to 20 over blocks 2 to 4", f"{growth['found']:.2f} ({growth['allowed']} allowed)"]]  # fmt: skip
    return lay_out(["what", "figure"], rows)


TABLES: dict[str, tuple[str, Callable[[dict], str]]] = {
    "build_memory": ("full_size.json", build_memory),
    "recipes": ("recipes.json", recipe_rows),
    "speech": ("speak.json", speech_lines),
    "frames": ("speak.json", speech_frames),
    "omnifish": ("omnifish_full_size.json", omnifish_lines),
}


def fill(text: str) -> str:
    """The text with every table as the files have it. UserError for a table that nobody knows."""

    def table(match: re.Match) -> str:
        if match[2] not in TABLES:
            raise UserError(f"README.md: no table {match[2]}; there are {', '.join(TABLES)}")
        file, write = TABLES[match[2]]
        return match[1] + write(read_json(HERE / file, "measured figures")) + match[3]

    return BLOCK.sub(table, text)


def main(argv: list[str]) -> int:
    text = README.read_text(encoding="utf-8")
    README.write_text(fill(text), encoding="utf-8")
    say(f"{README.name}: {len(BLOCK.findall(text))} tables written")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
