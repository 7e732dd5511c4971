"""The table of faults in docs/faults.md names tests that exist; and the faults that are kept out by what is not there."""

import ast
import re
from pathlib import Path

from conftest import ROOT

from voxport.run.cli import make_parser

TABLE = ROOT / "docs" / "faults.md"
SOURCES = sorted({*ROOT.glob("*.py"), *(ROOT / "voxport").rglob("*.py"), *(ROOT / "_ref").glob("*.py"), *(ROOT / "demo").glob("*.py")})


def rows() -> list[list[str]]:
    """The cells of every row."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| [CHOX]", line)]


def names_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_entry_has_a_row_and_every_test_that_is_named_exists():
    found = rows()
    assert {f"C{number}" for number in range(1, 39)} <= {row[0] for row in found}
    held = {path.name: names_of(path) for path in (ROOT / "tests").glob("test_*.py")}
    for entry, *_, named in found:
        tests = re.findall(r"`(test_\w+\.py)::(test_\w+)`", named)
        assert tests and re.sub(r"`test_\w+\.py::test_\w+`", "", named).strip() == "", entry
        missing = [f"{file}::{name}" for file, name in tests if name not in held.get(file, ())]
        assert not missing, (entry, missing)


def test_no_repetition_penalty_is_offered():
    """One would have to spare reference codes and the ids that begin and end speech; the model does without."""
    assert not [flag for action in make_parser()._actions for flag in action.option_strings if "penalty" in flag or "repeat" in flag]


def text_calls(tree: ast.AST):
    """Calls that read or write text, with the names of their arguments."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        modes = [a.value for a in (*node.args, *(k.value for k in node.keywords)) if isinstance(a, ast.Constant)]
        is_open = isinstance(node.func, ast.Name) and name == "open" and not any(isinstance(m, str) and "b" in m and len(m) < 4 for m in modes)
        if is_open or name in ("read_text", "write_text"):
            yield node, {keyword.arg for keyword in node.keywords}


def test_every_text_file_is_opened_with_an_encoding():
    found = [(path.name, node.lineno) for path in SOURCES for node, named in text_calls(ast.parse(path.read_text(encoding="utf-8")))
             if "encoding" not in named]  # fmt: skip
    assert not found


def test_what_is_printed_in_literals_is_ascii():
    """`say` survives any console; `print` does not."""
    for path in (*ROOT.glob("*.py"), *(ROOT / "voxport").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"), (path, node.lineno)
