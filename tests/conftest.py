"""Shared fixtures: golden data, tiny builds made once a run, and the location of the full golden set if it is there."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "higgs"
TINY = GOLDEN / "ckpt_tiny"
DEMO = ROOT / "demo" / "checkpoint"
sys.path.insert(0, str(ROOT))


def shared_golden() -> Path:
    """The full golden set: beside the repository, or where VOXPORT_GOLDEN says. May not exist."""
    return Path(os.environ.get("VOXPORT_GOLDEN", ROOT.parent / "shared" / "golden"))


def run_cli(script: str, *args, env: dict | None = None, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """Run a top-level script as a user would; text output, no exception on failure."""
    command = [sys.executable, str(ROOT / script), *map(str, args)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **(env or {})}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, encoding="utf-8")


def build(checkpoint: Path, output: Path, *flags: str) -> Path:
    """Build a folder in this process; fails the test with the message on any error."""
    import optimize

    assert optimize.main(["--checkpoint", str(checkpoint), "--output", str(output), *flags]) == 0
    return output


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """What builds have proved is remembered for this run only, and not in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VOXPORT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tiny_build(tmp_path_factory) -> Path:
    """fp32 CPU build of the golden tiny checkpoint, rotary tables rounded to bf16 (the default)."""
    return build(TINY, tmp_path_factory.mktemp("builds") / "tiny_fp32", "--precision", "fp32")


@pytest.fixture(scope="session")
def tiny_build_exact(tiny_build, tmp_path_factory) -> Path:
    """The same with exact rotary tables; only the decoder differs."""
    import shutil

    folder = tmp_path_factory.mktemp("builds") / "tiny_exact"
    shutil.copytree(tiny_build, folder)
    return build(TINY, folder, "--precision", "fp32", "--rope-table", "exact")


@pytest.fixture(scope="session")
def tiny_int4(tmp_path_factory) -> Path:
    """int4 CPU build of the golden tiny checkpoint."""
    return build(TINY, tmp_path_factory.mktemp("builds") / "tiny_int4", "--precision", "int4")


@pytest.fixture(scope="session")
def demo_build(tmp_path_factory) -> Path:
    """int4 CPU build of the demo checkpoint."""
    return build(DEMO, tmp_path_factory.mktemp("builds") / "demo_int4", "--precision", "int4")


@dataclass(frozen=True)
class Golden:
    """expected.npz and expected.json of the golden tiny checkpoint."""

    arrays: dict[str, np.ndarray]
    facts: dict

    @property
    def cases(self) -> list[dict]:
        return self.facts["cases"]

    def of(self, kind: str, case: str, rope: str | None = None) -> np.ndarray:
        return self.arrays[f"{rope}__{kind}__{case}" if rope else f"{kind}__{case}"]


@pytest.fixture(scope="session")
def golden() -> Golden:
    with np.load(TINY / "expected.npz") as arrays:
        return Golden(dict(arrays), json.loads((TINY / "expected.json").read_text(encoding="utf-8")))
