"""Build: checkpoint -> onnx/<device>_<precision>/, one ONNX graph a part, and a manifest that tells running all it needs."""

import argparse
import json
import sys
import time
from pathlib import Path

from voxport.errors import DONE, UserError, run_script, say, start_quietly

if __name__ == "__main__":
    start_quietly()

from voxport.build import higgs, omnifish_script
from voxport.build.download import DEFAULT_ID, Found, find_checkpoint
from voxport.build.omnifish_parts import COMPONENTS as OMNIFISH_COMPONENTS
from voxport.build.plan import Plan, make_plan, remember_seconds
from voxport.build.recipes import DEFAULT_RECIPE, RECIPES, describe_recipes
from voxport.families import OMNIFISH
from voxport.files import check_folder
from voxport.progress import clock


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="optimize.py", description=__doc__)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the build will run (default: cpu)")
    p.add_argument("--precision", choices=("int4", "fp16", "fp32"), default="int4",
                   help="of the language model's weights; the codec is always fp32 (default: int4)")  # fmt: skip
    p.add_argument("--checkpoint", default=DEFAULT_ID, metavar="ID|DIR|demo",
                   help=f"hub id, folder, or 'demo' for the small one that comes with the toolkit (default: {DEFAULT_ID})")  # fmt: skip
    p.add_argument("--codec-from", type=Path, metavar="DIR", help="checkpoint folder that lends its codec to one without")
    p.add_argument("--output", type=Path, metavar="DIR", help="build folder (default: onnx/<device>_<precision>)")
    p.add_argument("--components", type=component_list, metavar="A,B",
                   help=f"parts to build, of {','.join(higgs.COMPONENTS)} (default: all)")  # fmt: skip
    p.add_argument("--rope-table", choices=("bf16", "exact"), default="bf16",
                   help="round the rotary cos and sin tables to bf16 values as the published engine does, or not (default: bf16)")  # fmt: skip
    p.add_argument("--recipe", choices=tuple(RECIPES), default=DEFAULT_RECIPE, metavar="NAME",
                   help=f"how int4 rounds the language model (default: {DEFAULT_RECIPE}): {describe_recipes()}")  # fmt: skip
    p.add_argument("--heads-precision", choices=("fp32", "fp16", "int8", "int4"),
                   help="of the audio heads; below fp16 they choose other codes now and then (default: fp32, cuda fp16)")  # fmt: skip
    p.add_argument("--skip-download", action="store_true", help="use what lies in model/ and stay off the network")
    p.add_argument("--skip-extract", action="store_true", help="reuse the Qwen3 checkpoint kept by --keep-intermediate")
    p.add_argument("--keep-intermediate", action="store_true", help="keep <output>/.build with the extracted Qwen3 checkpoint")
    p.add_argument("--plan", action="store_true",
                   help="print what each part will need in memory and on disk, and what this machine has, and build nothing")  # fmt: skip
    p.add_argument("--json", action="store_true", help="print one object about the build on stdout")
    omnifish_script.add_flags(p)
    return p


def component_list(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in (*higgs.COMPONENTS, *OMNIFISH_COMPONENTS)]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"unknown part {unknown[0] if unknown else text!r}; choose from {', '.join(higgs.COMPONENTS)}")
    return names


def build(builder: higgs.Builder, components: tuple[str, ...], plan: Plan) -> dict[str, float]:
    """Make each part, say so, and return seconds a part (0 for one that was up to date)."""
    seconds, begun = {}, time.perf_counter()
    for i, name in enumerate(components, 1):
        start = time.perf_counter()
        made = builder.build(name)
        seconds[name] = round(time.perf_counter() - start, 2) if made else 0.0
        if made:
            remember_seconds({name: seconds[name]}, builder.shop.recipe, builder.shop.checkpoint)
        size = sum(record.bytes for record in builder.folder.manifest.parts[name].files.values())
        elapsed, left = time.perf_counter() - begun, plan.seconds_left(components[i:], seconds)
        when = f"{seconds[name]:.1f} s" if made else "up to date"
        say(f"{name:16} {size / 1e6:9.1f} MB  {when:>10}  {clock(elapsed)} elapsed, {clock(left)} left")
    builder.finish()
    return seconds


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    output = args.output or Path("onnx") / f"{args.device}_{args.precision}"
    check_folder(output, "--output")
    found = find_checkpoint(args.checkpoint, Path("model"), args.skip_download)
    if omnifish_script.choose_family(args, found.folder) == OMNIFISH:
        return omnifish_script.build(args, found, output)
    return build_higgs(args, found, output)


def build_higgs(args: argparse.Namespace, found: Found, output: Path) -> int:
    components = args.components or higgs.COMPONENTS
    foreign = [name for name in components if name not in higgs.COMPONENTS]
    if foreign:
        raise UserError(f"this checkpoint has no part {foreign[0]}; choose from {', '.join(higgs.COMPONENTS)}")
    recipe = higgs.Recipe(args.device, args.precision, args.heads_precision, args.rope_table, args.recipe)
    checkpoint = higgs.open_checkpoint(found, recipe, args.codec_from)
    plan = make_plan(checkpoint, recipe, components, output)
    if args.plan:
        for line in plan.lines():
            say(line, sys.stdout)
    plan.require()
    if args.plan:
        return DONE
    builder = higgs.open_build(checkpoint, found, recipe, output, args.codec_from, args.skip_extract, args.keep_intermediate)
    with builder.folder:
        say(f"licence of the weights: {builder.folder.manifest.licence.name}")
        seconds = build(builder, components, plan)
    say(f"built {output}: python inference.py --model-path {output} --text \"...\" --out x.wav")
    if args.json:
        parts = {n: sum(r.bytes for r in p.files.values()) for n, p in builder.folder.manifest.parts.items()}
        say(json.dumps({"output": str(output), "seconds": seconds, "bytes": parts}), sys.stdout)
    return DONE


if __name__ == "__main__":
    sys.exit(run_script(main))
