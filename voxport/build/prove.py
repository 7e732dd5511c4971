"""The proof that a build carries: answers of its own graphs on the CPU, taken when each has passed its check against `_ref`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from voxport.build.folder import BuildFolder
from voxport.families import FAMILIES
from voxport.manifest import BuildManifest, Figure, Part, Proof
from voxport.progress import bar
from voxport.run.proof import Asking, Task, machine_name, runtime_name, take_figure
from voxport.run.session import CPU, Engine, Parts

EDGES = 4  # pairs of clips a hair apart; each feels about half of the changes that are as small as float32 rounding
# Of float weights in one part: a large body's kernels would pack a second copy of them, from float16 one of twice the size.
PACKED_BYTES = 1 << 30
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
    unpacked = [name for name, part in manifest.parts.items() if too_large_to_pack(part)]
    parts = Parts(folder, manifest, engine, unpacked=unpacked)
    replay = questions.Replay(parts, manifest, *questions.pose(folder, manifest), [])
    tasks, figures = [task for task in questions.TASKS if task.part in manifest.parts], {}
    with bar(EDGES + len(tasks), "proof", "question") as progress:
        for pair in range(EDGES):
            replay.edges.append(find_edge(lambda factor, pair=pair: replay.encode_mixed(pair, factor)))
            progress.update()
        for task in tasks:
            progress.set_postfix_str(task.name)
            figures[task.name] = answer(task, replay)
            progress.update()
    return Proof(
        version=questions.VERSION,
        provider=CPU,
        onnxruntime=runtime_name(),
        machine=machine_name(),
        threads=engine.threads,
        unpacked=unpacked,
        prompt_ids=replay.prompt_ids,
        reference_codes=replay.reference_codes,
        edges=replay.edges,
        figures=figures,
    )


def too_large_to_pack(part: Part) -> bool:
    """Whether a part must compute from its file while it is proved. Rounded weights are packed to about their own size."""
    return part.precision in ("fp16", "fp32") and sum(record.bytes for record in part.files.values()) > PACKED_BYTES


def answer(task: Task, replay: Asking) -> Figure:
    """What the manifest keeps of the answer. Graphs that the question does not need are let go: together they fill the memory."""
    replay.parts.keep_only(task.parts)
    return take_figure(task, task.ask(replay))


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
