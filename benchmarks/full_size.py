"""The whole build at the published size, on random weights: memory, disk and time of every part, and a short speech.

    python benchmarks/full_size.py --work DIR --out benchmarks/full_size.json [--target cuda_int4] [--stock] [--layers 12]

Needs some 40 GB of disk in DIR. Every part is built by optimize.py under a hard limit on private memory (prlimit --data);
`--layers N` compares the time of the decoder with ModelBuilder's own int4 path at N layers; `--stock` runs that path at full
size, which needs more than 20 GB: being killed is a result.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from _ref.higgs import body_shapes
from benchmarks.machine import describe_machine
from benchmarks.memory import run_watched
from benchmarks.synthetic import published_config, write_checkpoint
from voxport.build.checkpoint import Checkpoint
from voxport.build.higgs import COMPONENTS
from voxport.build.llm import DECODER
from voxport.build.parts import AUDIO_HEADS, CODEC_PARTS
from voxport.files import write_json
from voxport.manifest import Manifest

ROOT = Path(__file__).parents[1]
GB = 1e9
LIMITS = {"int4": 3 * GB, "fp16": 5 * GB, "fp32": 5 * GB}  # of private memory, for all parts but the codec's
CODEC_LIMIT = 5 * GB
# Bytes a weight of the body. ONNX Runtime maps weights as private writable memory, which prlimit counts though the pages are
# the file's; what is really private is watched beside.
MAPPED = {"int4": 0.66, "fp16": 2.0, "fp32": 4.0}
# The part that completes a build: in its run all parts together answer the proof's questions, and the whole decoder is packed
# for its kernels as it is for speech. That is more than any part needs while it is made.
LAST = AUDIO_HEADS
ORDER = (*(name for name in COMPONENTS if name != LAST), LAST)
SENTENCE, FRAMES = "A short speech.", 25
STEP = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from voxport.build import llm
from voxport.build.checkpoint import Checkpoint
from voxport.build.quantise import BlockFormat
checkpoint, work, rounded = Checkpoint.open(Path({checkpoint!r})), Path({work!r}), {rounded}
llm.extract_qwen3(checkpoint, work / "standalone", BlockFormat() if rounded else None)
if rounded:
    llm.build_decoder(work / "standalone", work / "out", checkpoint.config, "cpu", "int4", BlockFormat(), "bf16")
else:
    from onnxruntime_genai.models.builder import create_model, parse_extra_options
    arguments = ("", str(work / "standalone"), str(work / "out"), "int4", "cpu", str(work / "cache"))
    options = ["exclude_embeds=true", "exclude_lm_head=true", "accuracy_level=4", "block_size=32", "is_symmetric=true"]
    create_model(*arguments, **parse_extra_options(*arguments, options))
"""


def provide_checkpoint(given: Path | None, work: Path, layers: int | None = None) -> Path:
    """The checkpoint given, or one written now."""
    folder = given or work / f"checkpoint_{layers or 'all'}"
    if not (folder / "config.json").is_file():
        write_checkpoint(folder, published_config(layers=layers))
    return folder


def build_part(name: str, checkpoint: Path, target: tuple[str, str], output: Path) -> dict:
    """One part under its limit: exit code, peak memory, seconds, and the last line that was said."""
    limit = CODEC_LIMIT if name in (*CODEC_PARTS, LAST) else LIMITS[target[1]]
    mapped = MAPPED[target[1]] * body_weights(checkpoint) if name in (DECODER, LAST) else 0
    command = ["prlimit", f"--data={int(limit + mapped)}", sys.executable, str(ROOT / "optimize.py"), "--checkpoint", str(checkpoint)]
    command += ["--device", target[0], "--precision", target[1], "--output", str(output), "--components", name]
    found = watch(command, output.with_suffix(".log"))
    return {"cap_gb": limit / GB, "prlimit_gb": round((limit + mapped) / GB, 2), "within": found["private_gb"] <= limit / GB} | found


def body_weights(checkpoint: Path) -> int:
    shapes = body_shapes(Checkpoint.open(checkpoint).config)
    return sum(math.prod(shape) for name, shape in shapes.items() if ".layers." in name)


def watch(command: list[str], log: Path) -> dict:
    """Run a command; its exit code, peaks in GB, seconds, and the end of what it said."""
    with open(log, "w", encoding="utf-8") as file:
        code, peak = run_watched(command, stdout=file, stderr=file)
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    figures = {"exit": code, "private_gb": round(peak.private / GB, 2), "resident_gb": round(peak.resident / GB, 2)}
    return figures | {"seconds": round(peak.seconds, 1)} | ({"said": said[-1]} if code and said else {})


def build_all(checkpoint: Path, target: tuple[str, str], output: Path, names: tuple[str, ...]) -> dict:
    if set(names) == set(COMPONENTS):
        shutil.rmtree(output, ignore_errors=True)
    parts = {}
    for name in names:
        parts[name] = build_part(name, checkpoint, target, output)
        print(f"{'_'.join(target)} {name}: {parts[name]}", flush=True)
    held = Manifest.read(output).parts if (output / "manifest.json").is_file() else {}
    sizes = {name: sum(record.bytes for record in part.files.values()) for name, part in held.items()}
    return {name: figures | {"bytes": sizes.get(name)} for name, figures in parts.items()}


def speak(output: Path) -> dict:
    """A second of speech from the folder: peak memory and what inference.py says of itself."""
    log = output.with_suffix(".speech.json")
    command = [sys.executable, str(ROOT / "inference.py"), "--model-path", str(output), "--text", SENTENCE, "--seed", "1",
               "--max-frames", str(FRAMES), "--out", str(output.with_suffix(".wav")), "--json"]  # fmt: skip
    with open(log, "w", encoding="utf-8") as file:
        code, peak = run_watched(command, stdout=file)
    text = log.read_text(encoding="utf-8").strip()
    report = json.loads(text) if code == 0 and text else None
    return {"exit": code, "private_gb": round(peak.private / GB, 2), "resident_gb": round(peak.resident / GB, 2), "report": report}


def compare_stock(checkpoint: Path, work: Path, both: bool) -> dict:
    """ModelBuilder's own int4 path, and ours before it if `both`, extraction included; no limit, no check."""
    found = {}
    for name, rounded in (("ours", True), ("stock", False)) if both else (("stock", False),):
        place = work / f"compare_{name}"
        shutil.rmtree(place, ignore_errors=True)
        code = STEP.format(root=str(ROOT), checkpoint=str(checkpoint), work=str(place), rounded=rounded)
        found[name] = watch([sys.executable, "-c", code], work / f"compare_{name}.log")
        shutil.rmtree(place, ignore_errors=True)
        print(name, found[name], flush=True)
    if both:
        found["time_ratio"] = round(found["ours"]["seconds"] / found["stock"]["seconds"], 2)
    return found


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--work", type=Path, required=True, help="folder for checkpoints and builds")
    p.add_argument("--out", type=Path, required=True, help="JSON file to write; what it holds of other targets is kept")
    p.add_argument("--checkpoint", type=Path, help="use this synthetic checkpoint instead of writing one")
    p.add_argument("--target", action="append", help="cpu_int4, cuda_int4, cuda_fp16, ...; may be repeated (default: cpu_int4)")
    p.add_argument("--layers", type=int, help="compare decoder times with the stock path at this many layers, and build nothing else")
    p.add_argument("--stock", action="store_true", help="run the stock path at full size, and build nothing else")
    p.add_argument("--parts", nargs="*", choices=COMPONENTS, help="measure only these, into a folder kept by --keep (default: all)")
    p.add_argument("--keep", action="store_true", help="keep the builds")
    return p


def main() -> int:
    args = parser().parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    result = json.loads(args.out.read_text(encoding="utf-8")) if args.out.is_file() else {}
    result |= {"command": "python benchmarks/full_size.py --work DIR --out benchmarks/full_size.json", "machine": describe_machine()}
    if args.layers:
        checkpoint = provide_checkpoint(None, args.work, args.layers)
        result[f"stock_{args.layers}_layers"] = compare_stock(checkpoint, args.work, both=True)
        shutil.rmtree(checkpoint)
    if args.stock:
        result["stock_full_size"] = compare_stock(provide_checkpoint(args.checkpoint, args.work), args.work, both=False)["stock"]
    failed = 0
    for name in args.target or ([] if args.layers or args.stock else ["cpu_int4"]):
        checkpoint, target = provide_checkpoint(args.checkpoint, args.work), tuple(name.split("_"))
        output = args.work / name
        earlier = result.get(name, {}).get("parts", {})
        result[name] = {"parts": earlier | build_all(checkpoint, target, output, tuple(args.parts or ORDER))}
        if target[0] == "cpu":
            result[name]["speech"] = speak(output)
        failed += sum(figures["exit"] != 0 or not figures["within"] for figures in result[name]["parts"].values())
        shutil.rmtree(output, ignore_errors=True) if not args.keep else None
        write_json(args.out, result)
    write_json(args.out, result)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
