"""Rebuild text_embed inside an existing build folder: without Olive, in little memory, and with the manifest kept true."""

import argparse
import sys
import time
from pathlib import Path

from voxport.errors import DONE, EXIT_CODES, UserError, run_script, say, start_quietly

if __name__ == "__main__":
    start_quietly()

from voxport.build.check import CHECKS, PartSession
from voxport.build.checkpoint import Checkpoint
from voxport.build.folder import BuildFolder
from voxport.build.higgs import COMPONENTS, stream_text_embed
from voxport.build.parts import TEXT_EMBED, plan_parts
from voxport.build.place import check_place
from voxport.build.prove import prove_whole
from voxport.manifest import HIGGS, Manifest, Part, verify_files


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="_build_text_embed.py", description=__doc__, epilog=EXIT_CODES)
    p.add_argument("folder", type=Path, metavar="DIR", help="build folder made by optimize.py")
    p.add_argument("--checkpoint", type=Path, metavar="DIR",
                   help="the checkpoint that the folder was built from (default: where it lay then)")  # fmt: skip
    p.add_argument("--codec-from", type=Path, metavar="DIR", help="as given to optimize.py, for a checkpoint without codec")
    return p


def open_source(manifest: Manifest, given: Path | None, codec_from: Path | None) -> Checkpoint:
    """The checkpoint of a build. UserError if it is gone or is no longer what the folder was built from."""
    folder = given or Path(manifest.source.path)
    if not folder.is_dir():
        raise UserError(f"the checkpoint {manifest.source.id} is not in {folder}; say where it is with --checkpoint")
    checkpoint = Checkpoint.open(folder, codec_from)
    if checkpoint.fingerprint() != manifest.source.fingerprint:
        raise UserError(
            f"{folder} is not the checkpoint that this folder was built from (its files differ in size, time or config);"
            " name the right one with --checkpoint, or build everything again with optimize.py"
        )
    return checkpoint


def part_precision(manifest: Manifest) -> str:
    """That of the part in the folder; if there is none, what optimize.py would choose."""
    if TEXT_EMBED in manifest.parts:
        return manifest.parts[TEXT_EMBED].precision
    return plan_parts(manifest.target.device, manifest.target.precision, None)[TEXT_EMBED].precision


def rebuild(folder: BuildFolder, checkpoint: Checkpoint, precision: str) -> None:
    """Write the part beside the folder's files, check it against the checkpoint, and rename it into place."""
    graph = stream_text_embed(checkpoint, folder.scratch, precision)
    session = PartSession(graph)
    CHECKS[TEXT_EMBED](session, precision, checkpoint)
    recipe = {"source": checkpoint.fingerprint(), "precision": precision}
    folder.install(TEXT_EMBED, graph, Part(graph.name, precision, {}, *session.specs(), recipe))
    folder.complete()
    prove_whole(folder, COMPONENTS)
    folder.commit()


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    manifest = Manifest.read(args.folder)
    if manifest.family != HIGGS:
        raise UserError(f"{args.folder} holds a {manifest.family} build; only {HIGGS} builds have this {TEXT_EMBED}")
    checkpoint = open_source(manifest, args.checkpoint, args.codec_from)
    check_place(args.folder, checkpoint.folder, flag="the build folder")
    start = time.perf_counter()
    verify_files(args.folder, manifest.files)
    with BuildFolder(args.folder, manifest, keep_intermediate=True) as folder:
        folder.require_whole([TEXT_EMBED])
        rebuild(folder, checkpoint, part_precision(manifest))
    size = sum(record.bytes for record in folder.manifest.parts[TEXT_EMBED].files.values())
    say(f"{TEXT_EMBED:16} {size / 1e6:9.1f} MB  {time.perf_counter() - start:.1f} s")
    return DONE


if __name__ == "__main__":
    sys.exit(run_script(main))
