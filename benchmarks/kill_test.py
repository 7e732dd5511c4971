"""Kill a build at random moments: what lies in the folder must always speak, and the end be as if undisturbed.

    python benchmarks/kill_test.py --work DIR --out benchmarks/kill_test.json [--checkpoint demo] [--kills 20]

The folder starts with a finished fp32 build; every killed run builds int4 from the same checkpoint over it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.machine import describe_machine
from voxport.files import write_json
from voxport.manifest import Manifest, verify_files
from voxport.run.higgs import Speaker

ROOT = Path(__file__).parents[1]


def command(checkpoint: str, output: Path, precision: str) -> list[str]:
    return [sys.executable, str(ROOT / "optimize.py"), "--checkpoint", checkpoint, "--output", str(output), "--precision", precision]


def read_whole(folder: Path) -> Manifest:
    """The manifest but for its date, of a folder whose every file verifies."""
    manifest = Manifest.read(folder)
    verify_files(folder, manifest.files | {n: r for part in manifest.parts.values() for n, r in part.files.items()})
    return dataclasses.replace(manifest, created="")


def kill_one(arguments: list[str], after: float) -> int:
    """Start a build, kill it and its children after some seconds; its exit code."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        process.wait(after)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def same_files(first: Path, second: Path) -> bool:
    names = [{path.name for path in folder.iterdir()} for folder in (first, second)]
    equal = all((first / n).read_bytes() == (second / n).read_bytes() for n in names[0] if n != "manifest.json")
    return names[0] == names[1] and equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for builds")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--checkpoint", default="demo", help="what to build (default: demo)")
    parser.add_argument("--kills", type=int, default=20, help="builds to kill (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    args = parser.parse_args()
    risky, calm = args.work / "risky", args.work / "calm"
    for folder in (risky, calm):
        shutil.rmtree(folder, ignore_errors=True)
    subprocess.run(command(args.checkpoint, risky, "fp32"), check=True)
    start = time.perf_counter()
    subprocess.run(command(args.checkpoint, calm, "int4"), check=True)
    lasts, old, new = time.perf_counter() - start, read_whole(risky), read_whole(calm)
    rng, moments, whole, spoke = random.Random(args.seed), [], 0, 0
    for _ in range(args.kills):
        moments.append(round(rng.uniform(0, lasts), 2))
        kill_one(command(args.checkpoint, risky, "int4"), moments[-1])
        whole += read_whole(risky) in (old, new)
        spoke += len(Speaker.load(risky).speak("Hello", seed=1, max_frames=2).codes) == 2
    subprocess.run(command(args.checkpoint, risky, "int4"), check=True)
    result = {
        "command": f"python benchmarks/kill_test.py --work DIR --out benchmarks/kill_test.json --checkpoint {args.checkpoint}",
        "machine": describe_machine(),
        "undisturbed_seconds": round(lasts, 1),
        "kills": args.kills,
        "moments": moments,
        "whole_after_kill": whole,
        "spoke_after_kill": spoke,
        "final_manifest_equal": read_whole(risky) == new,
        "final_files_identical": same_files(risky, calm),
    }
    write_json(args.out, result)
    print(result)
    done = whole == spoke == args.kills and result["final_manifest_equal"] and result["final_files_identical"]
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
