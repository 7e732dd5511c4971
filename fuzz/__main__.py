"""Damage what this toolkit reads, many thousand times, and see that each reader answers rightly or refuses in one line.

    python -m fuzz --cases 20000 --seed 0 [--out benchmarks/fuzz.json]
    python -m fuzz --only "reference sound" --case 17 --seed 0

A case may end in two ways: what was read holds (its invariants stand in fuzz/readers.py and fuzz/originals.py), or it is refused
by a UserError of one line. Anything else is a fault: another exception, more than 5 s of processor time, more than 512 MB of
memory, a file opened outside of the case's folder, a process that dies. So is a reader of which no case is accepted, or none
refused: then the damage tests nothing. Exit status 1 on any fault. Linux only, for its limits.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from fuzz import harness
from fuzz.harness import ACCEPTED, REFUSED, Fault
from voxport.files import write_json

ROOMS = ("fuzz.readers", "fuzz.originals")
FORK = multiprocessing.get_context("fork")


def reader_names() -> dict[str, tuple[str, int]]:
    """Reader -> its module and weight. Asked in a process of their own, so that this one stays small and single-threaded."""
    with FORK.Pool(1) as pool:
        return {name: found for room in ROOMS for name, found in pool.apply(_list_readers, (room,)).items()}


def _list_readers(room: str) -> dict[str, tuple[str, int]]:
    return {reader.name: (room, reader.weight) for reader in _readers(room)}


def _readers(room: str):
    return __import__(room, fromlist=["READERS"]).READERS


def shares(cases: int, weights: dict[str, int]) -> dict[str, int]:
    """Cases of each reader, by its weight; `cases` in all at least."""
    total = sum(weights.values())
    return {name: -(-cases * weight // total) for name, weight in weights.items()}


def run_reader(room: str, name: str, seed: int, cases: range) -> Iterator[str | Fault]:
    """The outcomes of the cases of one reader, run in a process; one that dies is a fault, and the next goes on behind it."""
    begin = cases.start
    while begin < cases.stop:
        outcomes = FORK.SimpleQueue()
        worker = FORK.Process(target=_work, args=(room, name, seed, range(begin, cases.stop), outcomes))
        worker.start()
        while begin < cases.stop and (worker.is_alive() or not outcomes.empty()):
            if not outcomes.empty():
                begin += 1
                yield outcomes.get()
            else:
                time.sleep(0.005)
        worker.join()
        if begin < cases.stop:
            yield Fault(name, begin, f"the process died (status {worker.exitcode})", "")
            begin += 1


def _work(room: str, name: str, seed: int, cases: range, outcomes) -> None:
    """Body of the worker: prepare, warm up, then run under limits. Libraries' notes go nowhere, a stuck case's stack to stderr."""
    faulthandler.enable(os.fdopen(os.dup(2), "w"))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    warnings.simplefilter("ignore")
    harness.start_watching()
    reader = next(reader for reader in _readers(room) if reader.name == name)
    reader.prepare()
    harness.run_case(reader, seed, 0)
    harness.limit_memory()
    for case in cases:
        outcomes.put(harness.run_case(reader, seed, case))


def summarise(name: str, outcomes: list[str | Fault], seconds: float) -> dict:
    faults = [outcome for outcome in outcomes if isinstance(outcome, Fault)]
    counts = collections.Counter(outcome for outcome in outcomes if isinstance(outcome, str))
    figures = {"cases": len(outcomes), ACCEPTED: counts[ACCEPTED], REFUSED: counts[REFUSED], "faults": len(faults)}
    print(f"{name:30} " + "  ".join(f"{key} {value}" for key, value in figures.items()) + f"  {seconds:.0f} s", flush=True)
    return figures | {"seconds": round(seconds, 1)}


def show_faults(faults: list[Fault], seed: int) -> None:
    """Each kind of fault once, with a command that repeats it."""
    kinds = collections.defaultdict(list)
    for fault in faults:
        kinds[fault.reader, fault.what.split(":")[0], fault.where].append(fault)
    for same in kinds.values():
        first = same[0]
        print(f"{len(same)} x {first.what} at {first.where}\n    python -m fuzz --only {first.reader!r} --seed {seed} --case {first.case}")


def vacuous(figures: dict[str, dict]) -> list[str]:
    """Readers that accepted nothing or refused nothing."""
    return [name for name, found in figures.items() if not (found[ACCEPTED] and found[REFUSED])]


def describe_run(args: argparse.Namespace, figures: dict[str, dict], faults: list[Fault]) -> dict:
    from benchmarks.machine import describe_machine

    return {
        "command": f"python -m fuzz --cases {args.cases} --seed {args.seed} --out benchmarks/fuzz.json",
        "machine": describe_machine(),
        "cases": sum(found["cases"] for found in figures.values()),
        "limits": {"cpu_seconds": harness.CPU_SECONDS, "bytes": harness.SPARE_BYTES},
        "readers": figures,
        "faults": [asdict(fault) for fault in faults],
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000, help="in all, over all readers (default: 20000)")
    parser.add_argument("--seed", type=int, default=0, help="of all damage (default: 0)")
    parser.add_argument("--only", metavar="READER", help="this reader alone; a part of its name is enough")
    parser.add_argument("--case", type=int, help="this case alone, of the reader named with --only")
    parser.add_argument("--out", type=Path, help="JSON file to write (default: none)")
    return parser


def main(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    known = {name: found for name, found in reader_names().items() if args.only is None or args.only in name}
    counts = shares(args.cases, {name: weight for name, (_, weight) in known.items()})
    figures, faults = {}, []
    for name, (room, _) in known.items():
        start, cases = time.perf_counter(), range(counts[name]) if args.case is None else range(args.case, args.case + 1)
        outcomes = list(run_reader(room, name, args.seed, cases))
        figures[name] = summarise(name, outcomes, time.perf_counter() - start)
        faults += [outcome for outcome in outcomes if isinstance(outcome, Fault)]
    show_faults(faults, args.seed)
    empty = vacuous(figures) if args.case is None else []
    print(
        *(f"{name}: nothing was accepted, or nothing refused; the damage tests nothing" for name in empty),
        sep="\n",
        end="\n" if empty else "",
    )
    if args.out is not None:
        write_json(args.out, describe_run(args, figures, faults))
    return 1 if faults or empty or not figures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
