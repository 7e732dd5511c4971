"""The proof that a build carries: answers of its own graphs on the CPU, taken when each has passed its check against `_ref`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from voxport.build.folder import BuildFolder
from voxport.families import FAMILIES
from voxport.manifest import BuildManifest, Figure, Proof
from voxport.run.proof import Asking, Task, machine_name, runtime_name, take_figure
from voxport.run.session import CPU, Engine, Parts

EDGES = 4  # pairs of clips a hair apart; each feels about half of the changes that are as small as float32 rounding
HALVINGS = 24  # brings two clips that differ by 1 % to within the last bit of a float32 sample


def prove_whole(
    folder: BuildFolder, parts: Iterable[str], run: Callable = lambda label, step, *arguments: step(*arguments)
) -> None:
    """Let a build that lacks none of `parts` record its proof, unless it has one."""
    manifest = folder.manifest
    is_proved = manifest.proof is not None and manifest.proof.version == FAMILIES[manifest.family].proof.VERSION
    if not is_proved and manifest.parts.keys() >= set(parts):
        folder.record_proof(run("proof", prove, folder.next, manifest))


def prove(folder: Path, manifest: BuildManifest) -> Proof:
    """Ask the graphs in `folder` every question of the family on the CPU and keep the answers."""
    engine, questions = Engine.choose("cpu", None, False, "cpu"), FAMILIES[manifest.family].proof
    parts = Parts(folder, manifest, engine)
    replay = questions.Replay(parts, manifest, *questions.pose(folder, manifest), [])
    replay.edges = [find_edge(lambda factor, pair=pair: replay.encode_mixed(pair, factor)) for pair in range(EDGES)]
    for part in parts.providers():
        parts.release(part)
    return Proof(
        version=questions.VERSION,
        provider=CPU,
        onnxruntime=runtime_name(),
        machine=machine_name(),
        threads=engine.threads,
        prompt_ids=replay.prompt_ids,
        reference_codes=replay.reference_codes,
        edges=replay.edges,
        figures=answer([task for task in questions.TASKS if task.part in manifest.parts], replay),
    )


def answer(tasks: list[Task], replay: Asking) -> dict[str, Figure]:
    """The answer to each question. A part is held only as long as questions need it: all at once would be the whole model."""
    figures = {}
    for i, task in enumerate(tasks):
        figures[task.name] = take_figure(task, task.ask(replay))
        needed = {part for later in tasks[i + 1 :] for part in (later.part, *later.fed_by)}
        for part in replay.parts.providers():
            if part not in needed:
                replay.parts.release(part)
    return figures


def find_edge(encode: Callable[[float], np.ndarray]) -> list[float]:
    """Two factors as near as can be told apart between which `encode` [T, N] changes; [0, 1] if it does not change at all."""
    low, high = 0.0, 1.0
    first = encode(low)
    if np.array_equal(first, encode(high)):
        return [low, high]
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if np.array_equal(first, encode(middle)):
            low = middle
        else:
            high = middle
    return [low, high]
