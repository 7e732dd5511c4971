"""What each rounding recipe costs and keeps: one table, on the demo and at the published size.

    python benchmarks/recipes.py --work DIR --out benchmarks/recipes.json [--full CHECKPOINT] [--listen PYTHON --whisper MODEL]

On the demo every recipe is fed the same rows: agreement with the original is teacher-forced. `--listen` names a Python that has
the listeners and adds word error rates. `--full` names a checkpoint of the published size (benchmarks/synthetic.py writes one):
there the body is rounded and assembled, and its weight error is taken from its first, middle and last layer; random weights say
nothing about agreement.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

import optimize
from _ref.higgs import LAYER
from benchmarks.machine import describe_machine
from benchmarks.memory import run_watched
from voxport.build import llm
from voxport.build.checkpoint import Checkpoint
from voxport.build.download import DEMO_FOLDER
from voxport.build.recipes import DEFAULT_RECIPE, RECIPES, Recipe
from voxport.errors import UserError
from voxport.files import write_json
from voxport.judge.levels import Bench, judge_forced, speak_cases, take_views
from voxport.judge.reference import Original
from voxport.judge.rounding import LayerError, layer_error
from voxport.judge.weights import decoder_weights
from voxport.run.higgs import Speaker

ROOT = Path(__file__).parents[1]
SENTENCES, FRAMES = 8, 60  # rows that agreement is taken over: some 400
PASSES = 3  # the fastest counts: other work on the machine only slows
SPEED = """
import json, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
import numpy as np
from voxport.build.check import PartSession
from voxport.files import read_json
start = time.perf_counter()
session = PartSession(Path({graph!r}))
load = time.perf_counter() - start
heads, dim, width, steps = {kv_heads}, {head_dim}, {hidden}, {steps}
rng = np.random.default_rng(0)
embed = lambda length: 0.05 * rng.standard_normal((1, length, width))
names = [o.name for o in session.session.get_outputs()]
past = {{n: np.zeros((1, heads, 0, dim)) for n in session.dtypes if n.startswith("past_key_values.")}}
best = 1e9
for length in [32] + [1] * steps:
    seen = next(iter(past.values())).shape[2] + length
    feeds = {{"inputs_embeds": embed(length), "attention_mask": np.ones((1, seen)), **past}}
    start = time.perf_counter()
    made = dict(zip(names, session.run(**feeds)))
    best = min(best, time.perf_counter() - start) if length == 1 else best
    past = {{n: made[n.replace("past_key_values", "present")] for n in past}}
print(json.dumps({{"load_seconds": round(load, 2), "frames_per_second": round(1 / best, 2)}}))
"""


def sentences(count: int) -> list[str]:
    """Sentences of five words of the demo's vocabulary."""
    words = (ROOT / "demo" / "words.txt").read_text(encoding="utf-8").split()
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(words, 5)).capitalize() + "." for _ in range(count)]


def weigh(errors: list[LayerError]) -> dict:
    """Bytes and relative error (RMS, weighed by tensor size) of the rounded tensors."""
    rounded = [e for e in errors if e.bits < 16]
    share = [e.bytes * 8 / e.bits for e in rounded]
    error = float(np.sqrt(np.average([e.error**2 for e in rounded], weights=share)))
    return {"bytes": sum(e.bytes for e in errors), "weight_error": round(error, 5)}


def measure_speed(graph: Path, config, steps: int, scratch: Path) -> dict:
    """Steps a second of the decoder alone, and the memory that holding it takes, in a process of its own."""
    code = SPEED.format(root=str(ROOT), graph=str(graph), kv_heads=config.num_kv_heads, head_dim=config.head_dim,
                        hidden=config.hidden_size, steps=steps)  # fmt: skip
    best = {"frames_per_second": 0.0}
    for _ in range(PASSES):
        with open(scratch, "w", encoding="utf-8") as file:
            status, peak = run_watched([sys.executable, "-c", code], stdout=file)
        found = json.loads(scratch.read_text(encoding="utf-8")) if status == 0 else best
        best = max(best, found | {"load_private_mb": round(peak.private / 1e6)}, key=lambda f: f["frames_per_second"])
    return best


def judge_demo(folder: Path, original: Original, cases: list) -> dict:
    """Agreement with the original on `cases`, and what the weights lost."""
    speaker = Speaker.load(folder, verify=False)
    bench = Bench(speaker, original)
    hidden, chosen = (finding.figures for finding in judge_forced(bench, take_views(bench, cases)))
    found = weigh([layer_error(bench.weights, name, original.checkpoint[name]) for name in bench.weights])
    return found | {"hidden_cosine": round(hidden["cosine"], 5), "top1": round(chosen["top1"], 5), "kl": round(chosen["kl"], 5)}


def listen(folder: Path, args: argparse.Namespace) -> dict:
    """Word error rate of the spoken sentences, by benchmarks/demo_listen.py in the listeners' Python."""
    out = args.work / "heard.json"
    command = [args.listen, str(ROOT / "benchmarks" / "demo_listen.py"), "--build", str(folder), "--whisper", args.whisper]
    subprocess.run([*command, "--clones", "0", "--sentences", str(args.sentences), "--out", str(out)], check=True)
    heard = json.loads(out.read_text(encoding="utf-8"))
    return {"wer": heard["figures"]["spoken"]["wer"], "source_wer": heard["figures"]["source"]["wer"]}


def try_demo(args: argparse.Namespace) -> dict[str, dict]:
    """Every recipe on the demo; parts other than the decoder are made once and serve on."""
    original, folder, found, cases = Original(Checkpoint.open(DEMO_FOLDER), True), args.work / "demo", {}, None
    for name in (DEFAULT_RECIPE, *(n for n in RECIPES if n != DEFAULT_RECIPE)):
        try:
            optimize.main(["--checkpoint", "demo", "--output", str(folder), "--recipe", name])
        except UserError as error:
            found[name] = {"skipped": str(error)}
            continue
        cases = cases or speak_cases(Speaker.load(folder, verify=False), [{"text": t} for t in sentences(SENTENCES)], FRAMES)
        found[name] = judge_demo(folder, original, cases)
        found[name] |= measure_speed(folder / f"{llm.DECODER}.onnx", original.checkpoint.config, 100, args.work / "speed.json")
        found[name] |= listen(folder, args) if args.listen else {}
        print(name, found[name], flush=True)
    return found


def try_full(args: argparse.Namespace) -> dict[str, dict]:
    """Every recipe at the published size, one on the disk at a time."""
    checkpoint, found = Checkpoint.open(args.full), {}
    layers = (0, checkpoint.config.num_layers // 2, checkpoint.config.num_layers - 1)
    for name in args.recipes or RECIPES:
        recipe, work = Recipe("cpu", "int4", rounding=name), args.work / "full"
        shutil.rmtree(work, ignore_errors=True)
        start = time.perf_counter()
        llm.extract_qwen3(checkpoint, work / "standalone", recipe.body_block)
        rounding = time.perf_counter() - start
        graph = llm.build_decoder(work / "standalone", work / "out", checkpoint.config, "cpu", "int4", recipe.body_block, "bf16")
        weights = decoder_weights(graph)
        some = [n for n in weights if n.startswith(tuple(LAYER.format(i) for i in layers))]
        found[name] = weigh([layer_error(weights, n, checkpoint[n]) for n in some])
        found[name] |= {"bytes": sum(weights.bytes_of(n) for n in weights), "rounding_seconds": round(rounding, 1)}
        found[name] |= measure_speed(graph, checkpoint.config, 10, args.work / "speed.json")
        print(name, found[name], flush=True)
    shutil.rmtree(args.work / "full", ignore_errors=True)
    return found


def table(found: dict[str, dict]) -> list[str]:
    """Recipes as lines, columns as their figures come."""
    columns = list(found[DEFAULT_RECIPE] if DEFAULT_RECIPE in found else next(iter(found.values())))
    head = f"{'recipe':14}" + "".join(f"{c:>19}" for c in columns)
    return [head, *(f"{name:14}" + "".join(f"{row.get(c, '-'):>19}" for c in columns) for name, row in found.items())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for builds")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write; a section that is not measured now is kept")
    parser.add_argument("--full", type=Path, help="a checkpoint of the published size: measure there, not on the demo")
    parser.add_argument("--recipes", nargs="*", help="with --full: only these")
    parser.add_argument("--listen", help="Python with the listeners (requirements-listen.txt)")
    parser.add_argument("--whisper", default="tiny.en", help="faster-whisper model: a name or a folder (default: tiny.en)")
    parser.add_argument("--sentences", type=int, default=150, help="sentences that are heard a recipe (default: 150)")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    result = json.loads(args.out.read_text(encoding="utf-8")) if args.out.is_file() else {}
    section, found = ("full_size", try_full(args)) if args.full else ("demo", try_demo(args))
    command = "python benchmarks/recipes.py --work DIR --out benchmarks/recipes.json" + (" --full CHECKPOINT" if args.full else "")
    result[section] = {"command": command, "machine": describe_machine(), "recipes": result.get(section, {}).get("recipes", {}) | found}
    write_json(args.out, result)
    print("\n".join(table(result[section]["recipes"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
