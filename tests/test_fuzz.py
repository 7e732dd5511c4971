"""The fuzzer: some hundred cases of every reader each time, and that it sees the faults it is there for."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT))

from fuzz import harness, mutate, originals, readers
from fuzz.__main__ import main, shares, vacuous
from fuzz.harness import ACCEPTED, REFUSED, Fault, run_case

linux = pytest.mark.skipif(sys.platform != "linux", reason="its limits are Linux's")
FEW = {"codec of omnifish": 60}  # the slow ones
EVERY = [*readers.READERS, *originals.READERS]


@linux
@pytest.mark.parametrize("reader", EVERY, ids=lambda reader: reader.name)
def test_damage_is_answered_rightly_or_refused_in_one_line(reader):
    reader.prepare()
    outcomes = [run_case(reader, 1, case) for case in range(FEW.get(reader.name, 150))]
    assert [outcome for outcome in outcomes if isinstance(outcome, Fault)] == []
    assert {ACCEPTED, REFUSED} <= set(outcomes)


def test_a_case_is_the_same_each_time(tmp_path):
    for reader in (readers.READERS[0], readers.READERS[2]):
        reader.prepare()
        for case in range(5):
            made = []
            for name in "ab":
                folder = tmp_path / f"{reader.name} {case} {name}"
                folder.mkdir()
                try:
                    reader.run(random.Random(f"0/{reader.name}/{case}"), folder)
                except Exception:
                    pass
                made.append({path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()})
            assert made[0] == made[1] and made[0]


SCRIPT = """
import json, sys
from fuzz import harness
from fuzz.__main__ import run_reader
harness.CPU_SECONDS = 0.5
for name in sys.argv[1:]:
    found = list(run_reader("fuzz_faulty", name, 0, range(3)))
    print(json.dumps([name, [o if isinstance(o, str) else o.what for o in found]]))
"""


@linux
def test_every_kind_of_fault_is_seen_and_ends_no_other_case():
    names = ("raises", "asserts", "dies", "spins", "eats", "peeks", "strays", "litters")
    done = subprocess.run([sys.executable, "-c", SCRIPT, *names], cwd=ROOT, capture_output=True, text=True, timeout=120,
                          env={**__import__("os").environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    said = {"raises": "KeyError", "asserts": "IndexError", "dies": "the process died (status 7)", "spins": "TookTooLong: more than 0.5 s",
            "eats": "MemoryError", "peeks": "Strayed: open of /etc/hostname", "strays": "Strayed: open of", "litters": "['case', 'litter']"}  # fmt: skip
    assert set(found) == set(names)
    for name, outcomes in found.items():
        assert outcomes[0] == ACCEPTED and outcomes[1].startswith(said[name]), (name, outcomes)
        assert outcomes[2] == (ACCEPTED if name == "dies" else REFUSED), (name, outcomes)  # a new process counts anew


def test_what_tests_nothing_is_a_fault():
    whole = {"cases": 9, ACCEPTED: 4, REFUSED: 5}
    assert vacuous({"a": whole}) == []
    assert vacuous({"a": whole, "b": whole | {ACCEPTED: 0}, "c": whole | {REFUSED: 0}}) == ["b", "c"]


def test_cases_are_dealt_out_by_weight():
    assert shares(100, {"a": 3, "b": 1}) == {"a": 75, "b": 25}
    assert sum(shares(20_000, {reader.name: reader.weight for reader in EVERY}).values()) >= 20_000


@linux
def test_the_runner_writes_what_it_found(tmp_path, capsys):
    done = subprocess.run([sys.executable, "-m", "fuzz", "--only", "dialogue", "--cases", "60", "--out", tmp_path / "fuzz.json"],
                          cwd=ROOT, capture_output=True, text=True, timeout=200)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "fuzz.json").read_text(encoding="utf-8"))
    assert report["faults"] == [] and report["cases"] == 60 and report["readers"]["dialogue"][REFUSED] > 0
    assert callable(main)


def test_the_recorded_run_is_whole():
    """The figures that stand in the repository: enough cases, no fault, nothing vacuous."""
    report = json.loads((ROOT / "benchmarks/fuzz.json").read_text(encoding="utf-8"))
    assert report["cases"] >= 20_000 and report["faults"] == [] and vacuous(report["readers"]) == []
    assert set(report["readers"]) == {reader.name for reader in EVERY}


def test_a_path_is_judged_by_where_it_lies(tmp_path):
    case = tmp_path / "case"
    case.mkdir()
    with harness.watched_files(case):
        harness._look("open", (str(case / "a"), "w", 0))
        harness._look("open", (str(Path(json.__file__)), "r", 0))
        for event, arguments in (("open", (str(tmp_path / "a"), "r", 0)), ("open", (str(ROOT / "a"), "w", 0)),
                                 ("open", (str(case / ".." / "a"), "r", 0)), ("os.rename", (str(case / "a"), str(tmp_path / "b"), -1, -1)),
                                 ("os.remove", (str(ROOT / "a"), -1))):  # fmt: skip
            with pytest.raises(harness.Strayed):
                harness._look(event, arguments)


def test_damage_is_damage():
    rng, whole = random.Random(3), {"a": [1, 2, {"b": "c"}], "d": {"e": 0.5}}
    changed = [mutate.mutate_json(rng, whole) != mutate.dump(whole) for _ in range(200)]
    assert sum(changed) > 180 and whole == {"a": [1, 2, {"b": "c"}], "d": {"e": 0.5}}
    assert sum(mutate.mutate_bytes(rng, b"0123456789" * 20) != b"0123456789" * 20 for _ in range(200)) > 180
