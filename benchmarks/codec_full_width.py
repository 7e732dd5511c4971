"""The codec at its published widths, random weights: it exports, runs, and agrees with PyTorch at six lengths.

    python benchmarks/codec_full_width.py --out benchmarks/codec_full_width.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from benchmarks.machine import describe_machine
from benchmarks.synthetic import published_config, write_checkpoint
from _ref.higgs_codec import load_codec
from voxport.build.check import PartSession, relative_error, unexplained_flips
from voxport.build.checkpoint import Checkpoint
from voxport.build.parts import AUDIO_ENCODER, AUDIO_TOKENIZER, PartPlan, build_part
from voxport.files import write_json

SMALL_BODY = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
              "vocab_size": 576}  # fmt: skip
SAMPLES = (24_000, 24_118, 24_119, 24_631, 24_632, 50_000)  # both edges of the branch that pads, and a longer clip
FRAMES = (1, 2, 25)


def export(name: str, checkpoint: Path, folder: Path) -> tuple[PartSession, dict]:
    """Build one part; the session, seconds and bytes."""
    start = time.perf_counter()
    graph = build_part(PartPlan(name, "fp32"), checkpoint, folder, folder / "parts")
    size = sum(path.stat().st_size for path in (graph, graph.with_name(graph.name + ".data")))
    return PartSession(graph), {"seconds": round(time.perf_counter() - start, 1), "bytes": size}


def compare_encoder(session: PartSession, codec, samples: int) -> dict:
    waveform = 0.1 * torch.randn(1, 1, samples, generator=torch.Generator().manual_seed(samples))
    found = session.run(waveform=waveform)[0]
    equal = float((found == codec.encode(waveform).numpy()).mean())
    return {"samples": samples, "frames": found.shape[-1], "equal_codes": equal,
            "frames_not_near_ties": unexplained_flips(codec, waveform, torch.from_numpy(found))}  # fmt: skip


def compare_decoder(session: PartSession, codec, frames: int) -> dict:
    shape = (1, codec.config.num_codebooks, frames)
    codes = torch.from_numpy(np.random.default_rng(frames).integers(0, codec.config.codebook_size, shape))
    expected = codec.decode(codes).numpy()
    found = session.run(codes=codes)[0]
    return {"frames": frames, "error": relative_error(found, expected), "max_abs": float(np.abs(found - expected).max())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        folder = Path(name)
        checkpoint = write_checkpoint(folder / "checkpoint", published_config(layers=1, **SMALL_BODY))
        opened = Checkpoint.open(checkpoint)
        codec = load_codec(opened.codec_config, opened.codec_tensors())
        encoder, encoder_build = export(AUDIO_ENCODER, checkpoint, folder)
        decoder, decoder_build = export(AUDIO_TOKENIZER, checkpoint, folder)
        result = {
            "command": "python benchmarks/codec_full_width.py --out benchmarks/codec_full_width.json",
            "machine": describe_machine(),
            "encoder": encoder_build | {"lengths": [compare_encoder(encoder, codec, n) for n in SAMPLES]},
            "decoder": decoder_build | {"lengths": [compare_decoder(decoder, codec, n) for n in FRAMES]},
        }
    write_json(args.out, result)
    wrong = sum(x["frames_not_near_ties"] for x in result["encoder"]["lengths"])
    error = max(x["error"] for x in result["decoder"]["lengths"])
    print(f"encoder: {wrong} frames with other codes; decoder: error at most {error:.1e}")
    return 0 if wrong == 0 and error <= 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
