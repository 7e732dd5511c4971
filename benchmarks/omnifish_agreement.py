"""How often rounded OmniFish builds choose the golden codes, each choice along the golden path: no error can lead to the next.

python -m benchmarks.omnifish_agreement --work out/agreement --json benchmarks/omnifish_agreement.json

The golden weights are random and sharp, so they amplify rounding far more than a trained model: these numbers compare recipes
with each other, and say nothing about the sound of any.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from benchmarks.machine import describe_machine
from voxport.build import omnifish
from voxport.build.download import Found
from voxport.build.omnifish_checkpoint import read_side
from voxport.build.omnifish_parts import CODEC_PARTS
from voxport.errors import say
from voxport.files import write_json
from voxport.manifest import Manifest
from voxport.run.omnifish_blocks import Model
from voxport.run.omnifish_residual import AxialDecoder, ChainDecoder, make_residual
from voxport.run.session import Engine, Parts

GOLDEN = Path(__file__).parents[2] / "shared" / "golden" / "omnifish"
LOCAL = Path(__file__).parents[1] / "tests" / "golden_omnifish"
KINDS = ("axial", "axial_px", "mtpdec")
RECIPES = {"fp32": ("fp32", "rtn-32"), "int4 rtn-32": ("int4", "rtn-32"), "int4 rtn-32-exact": ("int4", "rtn-32-exact"),
           "int8 rtn8-32": ("int4", "rtn8-32")}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--work", type=Path, required=True, help="folder for the builds")
    p.add_argument("--golden", type=Path, default=GOLDEN, help="folder of the golden checkpoints; those not there are left out")
    p.add_argument("--json", type=Path, help="file for the figures")
    return p


def build(folder: Path, output: Path, precision: str, rounding: str) -> Path:
    """Build all parts but the codec's."""
    found, recipe = Found(folder.name, None, folder), omnifish.OmniFishRecipe("cpu", precision, rounding=rounding)
    checkpoint = omnifish.open_checkpoint(found, recipe, LOCAL / "codec")
    builder = omnifish.open_build(checkpoint, found, recipe, output, read_side(folder))
    with builder.folder:
        for name in builder.components:
            if name not in CODEC_PARTS:
                builder.build(name)
        builder.finish()
    return output


def axial_hits(decoder: AxialDecoder, states: np.ndarray, codes: np.ndarray) -> list[np.ndarray]:
    """Where the decoder would choose the golden codes [N, S] of a block, each level shown the golden ones below it."""
    hits = []

    def choose(logits: np.ndarray, level: int, step: int) -> np.ndarray:
        hits.append(logits.argmax(-1) == codes[level])
        return codes[level]

    decoder.decode(states, codes[0], choose)
    return hits


def chain_hits(decoder: ChainDecoder, states: np.ndarray, codes: np.ndarray) -> list[np.ndarray]:
    """The same of the other kind: its rounds are its own within a codebook, and the next one is shown the golden codes."""
    hits = []
    for k in range(len(codes) - 1):
        hits.append(decoder.unmask(k, states, codes[k], lambda logits, level, step: logits.argmax(-1)) == codes[k + 1])
        states = decoder.clean(k, states, codes[k], codes[k + 1])
    decoder.count += codes.shape[1]
    return hits


def compare(folder: Path, golden: Path) -> dict[str, float]:
    """Share of golden choices that a build makes: semantic ids of frames still masked, and residual codes."""
    manifest = Manifest.read(folder)
    parts = Parts(folder, manifest, Engine.choose("cpu", None, False, "cpu"))
    model, semantic, residual = Model(parts, manifest), [], []
    facts = json.loads((golden / "expected.json").read_text(encoding="utf-8"))
    with np.load(golden / "expected.npz") as arrays:
        for case in facts["e2e"]:
            if case["context_mode"] == manifest.generation.context_mode:
                found = {name.split(".")[2]: arrays[name] for name in arrays.files if name.startswith(f"e2e.{case['name']}.")}
                follow(model, case, found, semantic, residual)
    return {"semantic": float(np.concatenate(semantic).mean()), "residual": float(np.concatenate(residual).mean())}


def follow(model: Model, case: dict, found: dict[str, np.ndarray], semantic: list, residual: list) -> None:
    """One case along its golden path; the hits are added to the lists."""
    reference = found.get("ref_codes", np.empty((len(model.manifest.codebooks.sizes), 0), np.int64))
    hidden, cache = model.prefill(case["input_ids"], reference)
    decoder, mask_id, done = make_residual(model.parts, model.manifest), model.manifest.codebooks.mask_id, 0
    decoder.prime(hidden, reference)
    for rounds, chosen, closed, speech in zip(found["sem_rounds"], found["argmax"], found["sem"], found["frames_per_block"]):
        for ids, wanted in zip([np.full_like(closed, mask_id), *rounds[:-1]], chosen):
            logits = model.semantic_logits(model.read(model.semantic_only(ids), cache)[0])
            semantic.append((logits.argmax(-1) == wanted)[ids == mask_id])
        states, seen = model.read(model.semantic_only(closed), cache)
        codes = found["codes"][:, done : done + speech]
        if speech:
            hits = axial_hits if isinstance(decoder, AxialDecoder) else chain_hits
            residual += hits(decoder, states[:speech], codes)
        done += speech
        if speech == len(closed):
            cache = model.read(codes, cache)[1] if model.manifest.generation.context_mode == "full" else seen


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    report = {"machine": describe_machine(), "agreement": {}}
    for kind in KINDS:
        golden = next((home / kind for home in (args.golden, LOCAL) if (home / kind / "expected.npz").is_file()), None)
        for name, recipe in RECIPES.items() if golden else ():
            folder = build(golden, args.work / f"{kind}_{name.replace(' ', '_')}", *recipe)
            report["agreement"].setdefault(kind, {})[name] = shares = compare(folder, golden)
            say(f"{kind:9} {name:18} semantic {shares['semantic']:.1%}, residual {shares['residual']:.1%}")
    if args.json:
        write_json(args.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
