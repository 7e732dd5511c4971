"""Build: checkpoint -> onnx/<device>_<precision>/, one ONNX graph a part, and a manifest that tells running all it needs."""

import argparse
import json
import sys
from pathlib import Path

from voxport.errors import DONE, EXIT_CODES, UserError, run_script, say, start_quietly

if __name__ == "__main__":
    start_quietly()

from voxport.build.ahead import plan_ahead
from voxport.build.download import DEFAULT_ID, download, look_up
from voxport.build.job import Job, all_components, choose_family, describe_result, make_parts
from voxport.build.place import check_place, check_source
from voxport.build.plan import Plan
from voxport.build.recipes import DEFAULT_RECIPE, RECIPES, describe_recipes
from voxport.families import FAMILIES
from voxport.files import check_folder


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="optimize.py", description=__doc__, epilog=EXIT_CODES)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the build will run (default: cpu)")
    p.add_argument("--precision", choices=("int4", "fp16", "fp32"), default="int4",
                   help="of the language model's weights; the codec is always fp32 (default: int4)")  # fmt: skip
    p.add_argument("--checkpoint", default=DEFAULT_ID, metavar="ID|DIR|demo",
                   help=f"hub id, folder, or 'demo' for the small one that comes with the toolkit (default: {DEFAULT_ID})")  # fmt: skip
    p.add_argument("--output", type=folder_name, metavar="DIR", help="build folder (default: onnx/<device>_<precision>)")
    p.add_argument("--components", type=component_list, metavar="A,B",
                   help=f"parts to build, of {','.join(all_components())} (default: all that the checkpoint has)")  # fmt: skip
    p.add_argument("--recipe", choices=tuple(RECIPES), default=DEFAULT_RECIPE, metavar="NAME",
                   help=f"how int4 rounds the language model (default: {DEFAULT_RECIPE}): {describe_recipes()}")  # fmt: skip
    p.add_argument("--skip-download", action="store_true", help="use what lies in model/ and stay off the network")
    p.add_argument("--skip-extract", action="store_true", help="reuse the Qwen3 checkpoint kept by --keep-intermediate")
    p.add_argument("--keep-intermediate", action="store_true", help="keep <output>/.build with the extracted Qwen3 checkpoint")
    p.add_argument("--plan", action="store_true",
                   help="print what each part will need in memory and on disk, and what this machine has; build and download nothing")  # fmt: skip
    p.add_argument("--json", action="store_true", help="print one object about the build on stdout")
    p.add_argument("--family", choices=[family.short for family in FAMILIES.values()],
                   help="of the checkpoint (default: told by its config.json)")  # fmt: skip
    for family in FAMILIES.values():
        family.builder.add_flags(p)
    return p


def folder_name(text: str) -> Path:
    """UserError for no name, which would be the folder that the user is in."""
    if not text:
        raise UserError("--output: the name is empty; name a folder, or write . for the one here")
    return Path(text)


def component_list(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in all_components()]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"unknown part {unknown[0] if unknown else text!r}; choose from {', '.join(all_components())}")
    return names


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    output = args.output or Path("onnx") / f"{args.device}_{args.precision}"
    check_folder(output, "--output")
    found = look_up(args.checkpoint, Path("model"), args.skip_download)
    check_place(output, found.folder)
    if found.lacks_weights and args.components:  # a build of weights that were downloaded before is of other files
        check_source(output, found.id, fingerprint="", whole=False)
    if found.lacks_weights and args.plan:
        plan_ahead(args, found, output)
        return DONE
    found = download(found)
    job = FAMILIES[choose_family(args, found.folder)].builder.make_job(args, found)
    components = job.choose(args.components)
    plan = job.plan(components, output)
    if args.plan:
        plan.tell()
    job.check_output(output, components)
    plan.require()
    return DONE if args.plan else build(job, components, plan, output, args.json)


def build(job: Job, components: tuple[str, ...], plan: Plan, output: Path, in_json: bool) -> int:
    """Make the parts and put the build in place."""
    change = job.describe_change(output, components)
    builder = job.open(output)
    with builder.folder:
        builder.folder.require_whole(components)
        say(builder.licences)
        if change:
            say(change)
        seconds = make_parts(builder, components, plan)
    say(describe_result(output, builder.folder.manifest, job.components))
    if in_json:
        parts = {n: sum(r.bytes for r in p.files.values()) for n, p in builder.folder.manifest.parts.items()}
        say(json.dumps({"output": str(output), "seconds": seconds, "bytes": parts}), sys.stdout)
    return DONE


if __name__ == "__main__":
    sys.exit(run_script(main))
