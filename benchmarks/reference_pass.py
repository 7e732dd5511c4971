"""The streamed reference at the published size: one teacher-forced pass over 64 positions, its time and memory.

    python benchmarks/reference_pass.py --checkpoint DIR --out benchmarks/reference_pass.json

Without --checkpoint a synthetic one is written first (9.3 GB, random weights).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.machine import describe_machine
from benchmarks.memory import run_watched
from benchmarks.synthetic import published_config, write_checkpoint
from voxport.build.checkpoint import Checkpoint
from voxport.files import write_json
from voxport.judge.reference import Original

POSITIONS = 64
LARGEST_PRIVATE = 4e9  # bytes


def read_once(checkpoint: Path) -> None:
    """The pass itself; fails if a state is not finite."""
    original = Original(Checkpoint.open(checkpoint), True)
    config = original.model.config
    embeds = 0.02 * torch.randn(POSITIONS, config.hidden_size, generator=torch.Generator().manual_seed(0))
    (states,) = original.hidden_states([embeds])
    assert torch.isfinite(original.model.logits(states)).all()


def measure(checkpoint: Path, out: Path) -> int:
    """Run the pass in a process of its own and write what it took."""
    code, peak = run_watched([sys.executable, __file__, "--pass-over", str(checkpoint)])
    result = {
        "command": "python benchmarks/reference_pass.py --out benchmarks/reference_pass.json",
        "machine": describe_machine(),
        "positions": POSITIONS,
        "layers": Checkpoint.open(checkpoint).config.num_layers,
        "exit_code": code,
        "private_bytes": peak.private,
        "resident_bytes": peak.resident,
        "seconds": round(peak.seconds, 1),
    }
    write_json(out, result)
    print(f"exit {code}, private {peak.private / 1e9:.2f} GB, resident {peak.resident / 1e9:.2f} GB, {peak.seconds:.0f} s")
    return 0 if code == 0 and peak.private <= LARGEST_PRIVATE else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="folder with the published dims (default: write a synthetic one)")
    parser.add_argument("--out", type=Path, default=Path("reference_pass.json"), help="JSON file to write")
    parser.add_argument("--pass-over", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.pass_over:
        read_once(args.pass_over)
        return 0
    if args.checkpoint:
        return measure(args.checkpoint, args.out)
    with tempfile.TemporaryDirectory() as name:
        return measure(write_checkpoint(Path(name), published_config()), args.out)


if __name__ == "__main__":
    sys.exit(main())
