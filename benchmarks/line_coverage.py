"""Which lines of voxport/run no test reaches, as `make coverage` found it.

make coverage
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.machine import describe_machine
from voxport.files import read_json, write_json


def main(measured: str, out: str) -> int:
    data = read_json(Path(measured), "coverage")
    totals = data["totals"]
    missed = {name: found["missing_lines"] for name, found in sorted(data["files"].items()) if found["missing_lines"]}
    result = {
        "command": "make coverage",
        "machine": describe_machine(),
        "coverage": data["meta"]["version"],
        "statements": totals["num_statements"],
        "missed": totals["missing_lines"],
        "percent": round(totals["percent_covered"], 2),
        "missed_lines": missed,
    }
    write_json(Path(out), result)
    print(f"{result['percent']} % of {result['statements']} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
