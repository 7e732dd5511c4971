"""How many single-byte changes does a build's own proof see?

In a copy of each build a random byte of a random part's data gets another random value, and the part is asked to prove
itself, as `inference.py --verify` does on the machine that wrote the proof once the manifest's hash has been repaired by hand.
The byte is put back before the next change. Also counted: the quick check before speaking, and what another machine's
tolerance would see.

    python benchmarks/proof_detection.py onnx/demo_cpu_int4 --changes 100
"""

import argparse
import collections
import platform
import random
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import onnx
from onnx.external_data_helper import ExternalDataInfo

sys.path.insert(0, str(Path(__file__).parents[1]))

from voxport.errors import DONE, UserError, WorkError, run_script, say  # noqa: E402
from voxport.files import write_json  # noqa: E402
from voxport.manifest import Manifest  # noqa: E402
from voxport.progress import bar  # noqa: E402
from voxport.run.higgs_proof import TASKS, Replay  # noqa: E402
from voxport.run.proof import FAIL, QUICK, check_proof, judge_task, machine_name, runtime_name, tolerance  # noqa: E402
from voxport.run.session import Engine, Graph, Parts, open_session  # noqa: E402

RESULT = Path(__file__).with_suffix(".json")
PADDING, UNREACHED = "padding", "rotary table past the proof's positions"
# Bytes of an element, lowest first (little endian): what changing one does.
FLOAT_BYTES = {
    4: ("low mantissa", "middle mantissa", "exponent and mantissa", "sign and exponent"),
    2: ("mantissa", "sign, exponent and mantissa"),
}


@dataclass(frozen=True)
class Change:
    """One changed byte: where it lies, what it means, and who saw it. `error` is relative to the output's size."""

    part: str
    offset: int
    tensor: str
    meaning: str
    before: int
    after: int
    seen: bool
    seen_quick: bool
    seen_elsewhere: bool
    error: float | None


class Bench:
    """A copy of a build whose parts are damaged one at a time. The whole ones stay loaded."""

    def __init__(self, folder: Path):
        self.folder, self.manifest = folder, Manifest.read(folder)
        self.proof = check_proof(self.manifest)
        self.engine = Engine.choose("cpu", self.proof.threads, False, "cpu")
        whole = Parts(folder, self.manifest, self.engine)
        self.graphs = {name: whole[name] for name in self.manifest.parts}
        self.maps = {name: map_bytes(folder / part.graph) for name, part in self.manifest.parts.items()}

    def __getitem__(self, name: str) -> Graph:
        return self.graphs[name]

    def check_whole(self) -> None:
        """UserError unless the build proves itself to the bit here: a change could not be told from the machine."""
        for name in self.manifest.parts:
            if any(self.examine(name)[:3]):
                raise UserError(f"{self.folder}: {name} does not prove itself here; build it again on this machine")

    def change(self, dice: random.Random) -> Change:
        """Change one byte, see who notices, and put it back."""
        part = dice.choice(sorted(self.manifest.parts))
        path = data_path(self.folder / self.manifest.parts[part].graph)
        offset = dice.randrange(path.stat().st_size)
        tensor, meaning = describe(self.maps[part], offset, self.reach)
        with open(path, "r+b") as file:
            file.seek(offset)
            before = file.read(1)[0]
            after = dice.choice([value for value in range(256) if value != before])
            put(file, offset, after)
            try:
                seen = self.examine_anew(part)
            finally:
                put(file, offset, before)
        return Change(part, offset, tensor, meaning, before, after, *seen)

    @property
    def reach(self) -> int:
        """Positions that the longest task of the decoder visits."""
        return sum(self.proof.figures["llm_decoder: long pass"].sizes) // self.manifest.dims.hidden_size

    def examine_anew(self, part: str) -> tuple[bool, bool, bool, float | None]:
        """Load the damaged part in place of the whole one and examine it. A part that does not load is seen at once."""
        whole = self.graphs[part]
        try:
            session = open_session(self.folder / self.manifest.parts[part].graph, self.engine)
        except WorkError:
            return True, True, True, None
        self.graphs[part] = Graph(session, part)
        try:
            return self.examine(part)
        finally:
            self.graphs[part] = whole

    def examine(self, part: str) -> tuple[bool, bool, bool, float | None]:
        """Seen by everything, by the quick tasks, by another machine's tolerance; and the largest error."""
        ask = Replay(self, self.manifest, self.proof.prompt_ids, self.proof.reference_codes, self.proof.edges)
        seen = quick = elsewhere = False
        worst = 0.0
        for task in (t for t in TASKS if t.part == part):
            verdict = judge_task(task, ask, self.proof)
            failed = verdict.state == FAIL
            error = verdict.error if verdict.error is not None else float("inf") if failed else 0.0
            seen, quick = seen or failed, quick or (failed and task.depth == QUICK)
            allowed = 0.0 if task.exact else tolerance(task, self.manifest, self.proof, self.proof.provider)
            elsewhere = elsewhere or failed and (error > allowed or task.exact)
            worst = max(worst, error)
        return seen, quick, elsewhere, worst if worst < float("inf") else None


def put(file, offset: int, value: int) -> None:
    file.seek(offset)
    file.write(bytes([value]))
    file.flush()


def data_path(graph: Path) -> Path:
    return graph.with_name(graph.name + ".data")


def map_bytes(graph: Path) -> list[tuple[int, int, onnx.TensorProto]]:
    """(start, end, initialiser) of every tensor in the part's data file."""
    model = onnx.load(graph, load_external_data=False)
    external = [t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    infos = [(ExternalDataInfo(tensor), tensor) for tensor in external]
    return [(info.offset or 0, (info.offset or 0) + info.length, tensor) for info, tensor in infos]


def describe(places: list, offset: int, reach: int) -> tuple[str, str]:
    """Name of the tensor at `offset` and what its byte there means."""
    for start, end, tensor in places:
        if start <= offset < end:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            element, byte = divmod(offset - start, dtype.itemsize)
            if tensor.name in ("cos_cache", "sin_cache") and element // tensor.dims[1] >= reach:
                return tensor.name, UNREACHED
            if dtype.kind == "f":
                return tensor.name, f"{dtype.name} {FLOAT_BYTES[dtype.itemsize][byte]}"
            return tensor.name, "4-bit weights" if dtype.itemsize == 1 else f"{dtype.name} byte {byte}"
    return "", PADDING


def rates(changes: list[Change]) -> dict:
    """How many there were and how many each check saw."""
    seen = {kind: sum(getattr(c, kind) for c in changes) for kind in ("seen", "seen_quick", "seen_elsewhere")}
    return {"changes": len(changes), **seen}


def summarise(changes: list[Change]) -> dict:
    """Rates in all, of bytes that the graph reads, by part and by meaning."""
    parts, meanings = collections.defaultdict(list), collections.defaultdict(list)
    for change in changes:
        parts[change.part].append(change)
        meanings[change.meaning].append(change)
    read = [c for c in changes if c.meaning not in (PADDING, UNREACHED)]
    return {
        "all": rates(changes),
        "bytes that the proof's graphs read": rates(read),
        "by part": {name: rates(of) for name, of in sorted(parts.items())},
        "by meaning": {name: rates(of) for name, of in sorted(meanings.items())},
        "unseen": [asdict(c) for c in changes if not c.seen],
    }


def measure(build: Path, num_changes: int, seed: int) -> dict:
    """Change bytes in a copy of `build`."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(Path(shutil.copytree(build, Path(scratch) / build.name)))
        bench.check_whole()
        changes = []
        with bar(num_changes, build.name, "change") as shown:
            for _ in range(num_changes):
                changes.append(bench.change(dice))
                shown.update()
    return {"source": bench.manifest.source.id, "target": asdict(bench.manifest.target), **summarise(changes)}


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(prog="proof_detection.py", description=__doc__, formatter_class=raw)
    p.add_argument("builds", nargs="+", type=Path, metavar="DIR", help="build folders, made on this machine")
    p.add_argument("--changes", type=int, default=100, help="changes a build (default: 100)")
    p.add_argument("--seed", type=int, default=0, help="of places and values (default: 0)")
    p.add_argument("--output", type=Path, default=RESULT, metavar="FILE", help="JSON to write (default: beside this script)")
    return p


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    builds = {folder.name: measure(folder, args.changes, args.seed) for folder in args.builds}
    for name, figures in builds.items():
        for label in ("all", "bytes that the proof's graphs read"):
            r = figures[label]
            say(f"{name}: {label}: {r['seen']} of {r['changes']} seen, {r['seen_quick']} by the quick check,"
                f" {r['seen_elsewhere']} within another machine's tolerance", sys.stdout)  # fmt: skip
    builds_named = " ".join(folder.name for folder in args.builds)
    command = f"python benchmarks/proof_detection.py {builds_named} --changes {args.changes} --seed {args.seed}"
    where = {"machine": machine_name(), "onnxruntime": runtime_name(), "python": platform.python_version()}
    write_json(args.output, {"command": command, **where, "builds": builds})
    return DONE


if __name__ == "__main__":
    sys.exit(run_script(main))
