"""An OmniFish checkpoint of the published size, random: what building and speaking cost, beside PyTorch in the same run.

Ends with 1 if the build took more private memory than promised, or if blocks become slower as speech goes on.

python -m benchmarks.omnifish_full_size --work out/omnifish --json benchmarks/omnifish_full_size.json
python -m benchmarks.omnifish_full_size --size middle ...    # a model of an eighth: block times only take minutes
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from _ref.omnifish import OmniFish, Recipe
from benchmarks.machine import describe_machine
from benchmarks.memory import run_watched
from benchmarks.omnifish_synthetic import middle_size, published, write_checkpoint, write_codec
from voxport.build.omnifish_checkpoint import OmniFishCheckpoint
from voxport.errors import DONE, FAILED, say
from voxport.files import write_json
from voxport.run.omnifish import Speaker
from voxport.run.omnifish_codec import decode
from voxport.run.omnifish_request import Wish, check_wish
from voxport.run.speech import Stopwatch, peak_rss_mb

ROOT = Path(__file__).parents[1]
TEXT = "The quick brown fox jumps over the lazy dog."
EARLY, LATE = slice(1, 4), slice(17, 20)  # blocks 2 to 4 and 18 to 20, counted from 1
GROWTH = 1.3  # at most, of the median time of a block from the early to the late ones
MOST_PRIVATE_MB = 3000.0  # of the build and all its processes together


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--work", type=Path, required=True, help="folder for the checkpoint and the build (about 6 GB at full size)")
    p.add_argument("--size", choices=("published", "middle"), default="published", help="of the model (default: published)")
    p.add_argument("--precision", choices=("int4", "fp32"), default="int4", help="of the build (default: int4)")
    p.add_argument("--blocks", type=int, default=20, help="blocks of 32 frames to speak (default: 20)")
    p.add_argument("--repeats", type=int, default=3, help="times that the blocks are spoken; medians are over all (default: 3)")
    p.add_argument("--torch-blocks", type=int, default=2, help="blocks that PyTorch speaks beside it, 0 for none (default: 2)")
    p.add_argument("--threads", type=int, default=None, help="CPU threads of both (default: every usable core)")
    p.add_argument("--json", type=Path, help="file for the figures")
    return p


def build(args: argparse.Namespace) -> dict:
    """Write the checkpoint, then build it in processes of their own. Seconds, and peak private memory in MB."""
    checkpoint, output = args.work / "checkpoint", args.work / f"onnx_{args.precision}"
    if not (checkpoint / "model.safetensors").is_file():
        write_checkpoint(checkpoint, published() if args.size == "published" else middle_size())
        write_codec(args.work / "codec")
    command = [sys.executable, str(ROOT / "optimize.py"), "--checkpoint", str(checkpoint), "--precision", args.precision,
               "--codec", str(args.work / "codec"), "--output", str(output), "--json"]  # fmt: skip
    with open(args.work / "build.json", "w", encoding="utf-8") as answer:
        code, peak = run_watched(command, cwd=ROOT, stdout=answer)
    if code:
        raise SystemExit(f"optimize.py ended with {code}")
    report = json.loads((args.work / "build.json").read_text(encoding="utf-8"))
    figures = {"part_seconds": report["seconds"], "bytes": report["bytes"]}
    return {"seconds": peak.seconds, "peak_private_mb": peak.private / 1e6} | figures


def speak_blocks(speaker: Speaker, blocks: int) -> tuple[Stopwatch, list[float], np.ndarray]:
    """Speak that many blocks: seconds in each step, seconds of each block, and the codes [N, T]."""
    size = speaker.manifest.generation.block_size
    watch, times, made = Stopwatch(), [], []
    take = speaker.begin(check_wish(Wish(TEXT, seed=0, max_frames=blocks * size), speaker.manifest), watch)
    started = time.perf_counter()
    for block in take.blocks():
        times.append(time.perf_counter() - started)
        made.append(block)
        started = time.perf_counter()
    codes = take.codes(made)
    with watch.lap("codec"):
        decode(speaker.parts, speaker.manifest, codes)
    return watch, times, codes


class Timed:
    """A residual decoder of the reference whose decoding is timed."""

    def __init__(self, decoder, watch: Stopwatch):
        self.decoder, self.watch = decoder, watch

    def prime(self, *arguments) -> None:
        self.decoder.prime(*arguments)

    def decode(self, *arguments):
        with self.watch.lap("residual"):
            return self.decoder.decode(*arguments)


def speak_torch(args: argparse.Namespace, speaker: Speaker) -> dict:
    """The reference in float32 on the same text: real-time factor of each step."""
    checkpoint = OmniFishCheckpoint.open(args.work / "checkpoint", args.work / "codec")
    weights = {name: tensor.float() for name, tensor in checkpoint.items()}
    model, watch = OmniFish(checkpoint.config, weights, checkpoint.lang_start, checkpoint.languages), Stopwatch()
    make = model.residual_decoder
    model.residual_decoder = lambda rounds: Timed(make(rounds), watch)
    generation = speaker.manifest.generation
    recipe = Recipe(generation.block_size, generation.context_mode, generation.steps)
    with watch.lap("all"):
        speech = model.generate(checkpoint.encode(TEXT), recipe, args.torch_blocks)
    codec = checkpoint.codec()
    with watch.lap("codec"), torch.no_grad():
        codec.decode(speech.codes[None])
    laps = watch.laps | {"body": watch.laps["all"] - watch.laps["residual"]}
    return factors(laps, speech.codes.shape[1], speaker)


def factors(laps: dict[str, float], frames: int, speaker: Speaker) -> dict[str, float]:
    """Seconds of work for each second of speech."""
    seconds = frames * speaker.manifest.codec.hop_length / speaker.manifest.codec.sample_rate
    return {name: laps[name] / seconds for name in ("body", "residual", "codec")}


def block_times(takes: list[list[float]]) -> dict[str, float]:
    """Median seconds of an early and of a late block over all takes: other work on the machine then moves neither alone."""
    early, late = (statistics.median(time for times in takes for time in times[part]) for part in (EARLY, LATE))
    return {"early_block_seconds": early, "late_block_seconds": late, "growth": late / early}


def speak(args: argparse.Namespace, speaker: Speaker) -> dict:
    """Real-time factors of each step, the median of all takes, and the seconds of each block of each take."""
    speak_blocks(speaker, 1)  # loads, and lets kernels pick their memory
    made = [speak_blocks(speaker, args.blocks) for _ in range(args.repeats)]
    each = [factors(watch.laps, codes.shape[1], speaker) for watch, _, codes in made]
    report = {"real_time_factor": {name: statistics.median(f[name] for f in each) for name in each[0]}}
    report |= {"peak_rss_mb": peak_rss_mb(), "block_seconds": [times for _, times, _ in made]}
    return report | ({"blocks": block_times(report["block_seconds"])} if args.blocks >= LATE.stop else {})


def judge(report: dict) -> dict[str, dict]:
    """The promises: what was found, what is allowed, and whether it was kept. One that was not measured is not kept."""
    figures = {"build_private_mb": (report["build"]["peak_private_mb"], MOST_PRIVATE_MB),
               "block_growth": (report.get("blocks", {}).get("growth"), GROWTH)}  # fmt: skip
    return {name: {"found": found, "allowed": most, "kept": found is not None and found <= most} for name, (found, most) in figures.items()}


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    if args.threads:
        torch.set_num_threads(args.threads)
    report = {"size": args.size, "precision": args.precision, "machine": describe_machine(), "build": build(args)}
    say(f"built in {report['build']['seconds']:.0f} s with {report['build']['peak_private_mb']:.0f} MB")
    speaker = Speaker.load(args.work / f"onnx_{args.precision}", threads=args.threads)
    report |= speak(args, speaker)
    if args.torch_blocks:
        report["torch_real_time_factor"] = speak_torch(args, speaker)
    report["promises"] = judge(report)
    say(json.dumps({name: value for name, value in report.items() if name not in ("machine", "build", "block_seconds")}))
    if args.json:
        write_json(args.json, report)
    broken = [name for name, promise in report["promises"].items() if not promise["kept"]]
    for name in broken:
        say(f"{name}: {report['promises'][name]['found']} is not within {report['promises'][name]['allowed']}")
    return FAILED if broken else DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
