"""What a build will need in memory and on disk, and whether this machine has it: known before anything heavy starts.

Memory is private memory (mapped files are the system's to drop), the peak of the part's hungriest step. The factors were measured
on the published dims (benchmarks/full_size.json) and rounded up.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from _ref.higgs import CODEC_PREFIX, body_shapes
from voxport.build.check import PACKED_BYTES
from voxport.build.checkpoint import Checkpoint, expected_shapes
from voxport.build.folder import owned_files, read_manifest
from voxport.build.llm import DECODER
from voxport.build.parts import AUDIO_EMBED, AUDIO_ENCODER, AUDIO_HEADS, AUDIO_TOKENIZER, TEXT_EMBED
from voxport.build.recipes import Recipe
from voxport.build.sizes import GB, at_least, at_most
from voxport.build.workshop import streams_table
from voxport.errors import UserError, say
from voxport.files import free_disk, read_json, write_json
from voxport.memory import available_memory
from voxport.run.trust import cache_folder

PYTHON = 0.65 * GB  # two interpreters: the build's, and its child with torch, Olive or ModelBuilder, and ONNX Runtime
BYTES = {"fp32": 4.0, "fp16": 2.0, "int8": 1.2, "int4": 0.7}  # a weight, scales included
OLIVE_COPIES = 4.0  # of a module's float32 weights while it is traced, exported and saved
CODEC_SIDES = {AUDIO_TOKENIZER: ("acoustic_decoder", "quantizer", "fc2"),
               AUDIO_ENCODER: ("acoustic_encoder", "encoder_semantic", "semantic_model", "quantizer", "fc")}  # fmt: skip
PROOF = "proof"  # the row for the questions that a whole build answers at the end
PACKED = 1.2  # of a rounded body's bytes: packed for its kernels it has a sum a block as well
HISTORY = "history.json"


@dataclass(frozen=True)
class Need:
    """Bytes that one part takes: private memory at the peak, disk for what it leaves, disk while it is made."""

    memory: float
    result: float
    scratch: float


@dataclass(frozen=True)
class Machine:
    """Bytes that are to be had; None where the system does not say."""

    memory: float | None
    disk: float


def count_weights(shapes: Mapping[str, tuple[int, ...]], *starts: str) -> int:
    """Weights of the tensors whose names begin with one of `starts`."""
    return sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(starts))


def needs(checkpoint: Checkpoint, recipe: Recipe) -> dict[str, Need]:
    """Part -> what it takes, from the dims alone."""
    config, shapes = checkpoint.config, expected_shapes(checkpoint.config, checkpoint.codec_config)
    made = {DECODER: decoder_need(checkpoint, recipe)}
    sizes = {TEXT_EMBED: config.text_vocab_size * config.hidden_size,
             AUDIO_EMBED: config.num_codebooks * config.audio_vocab_size * config.hidden_size}  # fmt: skip
    sizes[AUDIO_HEADS] = sizes[AUDIO_EMBED]
    for name, sides in CODEC_SIDES.items():
        sizes[name] = count_weights(shapes, *(f"{CODEC_PREFIX}{side}." for side in sides))
    codec = count_weights(shapes, CODEC_PREFIX)
    for name, weights in sizes.items():
        result = weights * BYTES[recipe.plans[name].precision]
        exported, checked = OLIVE_COPIES * 4 * weights, (5 * codec + 12 * weights) * (name in CODEC_SIDES)
        made[name] = Need(PYTHON + max(exported, checked), result, 2 * 4 * weights)
    if streams_table(checkpoint):  # the check holds the stored table once
        made[TEXT_EMBED] = Need(PYTHON + 2 * sizes[TEXT_EMBED], made[TEXT_EMBED].result, made[TEXT_EMBED].result)
    return made


def decoder_need(checkpoint: Checkpoint, recipe: Recipe) -> Need:
    config = checkpoint.config
    layers = {n: math.prod(s) for n, s in body_shapes(config).items() if ".layers." in n}
    return body_need(layers, config.text_vocab_size * config.hidden_size, recipe)


def body_need(layers: Mapping[str, int], embedding: int, recipe: Recipe) -> Need:
    """What a Qwen3 body takes, from the weights of each of its tensors and of the `embedding` that is copied with them.

    Rounded weights are packed in the check, up to a limit. Of floats only joined query, key and value are held.
    """
    form = recipe.body_block
    largest = max(layers.values()) * 4.0
    if form is not None:
        result = sum(count * rounded_bytes(form.of(name)) for name, count in layers.items())
        return Need(PYTHON + min(1.3 * result, 1.5 * PACKED_BYTES) + 4 * largest, result, 1.1 * result)
    joint = sum(count for name, count in layers.items() if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")))
    result = sum(layers.values()) * BYTES[recipe.precision]
    return Need(PYTHON + 2 * joint + 8 * largest, result, 2 * (sum(layers.values()) + embedding))


def proof_need(decoder: Need, recipe: Recipe) -> Need:
    """A rounded body is packed whole, as it is for speech; of floats at most `PACKED_BYTES`, from float16 to twice the size."""
    packed = PACKED * decoder.result if recipe.body_block is not None else 2 * min(decoder.result, PACKED_BYTES)
    return Need(PYTHON + packed, 0.0, 0.0)


def rounded_bytes(form) -> float:
    """Bytes a weight with its share of a float32 scale and of a zero."""
    return form.bits / 8 + (4 + form.bits / 8) / form.block_size


def machine(output: Path) -> Machine:
    return Machine(available_memory(), free_disk(output))


@dataclass(frozen=True)
class Plan:
    """What the parts of one build need that are not there yet, against what the machine has."""

    needs: dict[str, Need]
    machine: Machine
    seconds: dict[str, float]
    output: Path

    @property
    def memory(self) -> float:
        """One after the other: the hungriest decides."""
        return max((need.memory for need in self.needs.values()), default=0.0)

    @property
    def disk(self) -> float:
        """All results, and the scratch of one part at a time. The build in place is on the disk already."""
        return sum(n.result for n in self.needs.values()) + max((n.scratch for n in self.needs.values()), default=0.0)

    def seconds_left(self, names: tuple[str, ...], measured: Mapping[str, float]) -> float | None:
        """Time for the parts still to come: what each took last time, else by size at the pace of this run; None if unknown."""
        done = {name: s for name, s in measured.items() if s and name in self.needs}
        pace = sum(done.values()) / max(sum(self.needs[name].result for name in done), 1.0)
        coming = [name for name in names if name in self.needs]
        if not done and any(name not in self.seconds for name in coming):
            return None
        return sum(self.seconds.get(name, pace * self.needs[name].result) for name in coming)

    def lines(self) -> list[str]:
        """A table for the screen."""
        rows = [f"{'part':16} {'memory':>8} {'disk':>8} {'meanwhile':>10} {'last time':>10}"]
        for name, need in self.needs.items():
            last = f"{self.seconds[name]:.0f} s" if name in self.seconds else "-"
            rows.append(f"{name:16} {at_least(need.memory):>8} {at_least(need.result):>8} {at_least(need.scratch):>10} {last:>10}")
        has = at_most(self.machine.memory) if self.machine.memory is not None else "unknown"
        rows.append(f"needed at once: {at_least(self.memory)} of memory ({has} available),"
                    f" {at_least(self.disk)} of disk ({at_most(self.machine.disk)} free)")  # fmt: skip
        return rows

    def tell(self) -> None:
        """Print the table on stdout."""
        for line in self.lines():
            say(line, sys.stdout)

    def beside(self, taken: float) -> Plan:
        """The same plan where something else takes so many bytes of the disk first."""
        return replace(self, machine=replace(self.machine, disk=self.machine.disk - taken))

    def require(self) -> None:
        """UserError, with the flag that would help, if the build cannot fit."""
        hungry = [name for name, need in self.needs.items() if need.memory > (self.machine.memory or math.inf)]
        if hungry:
            raise UserError(
                f"{hungry[0]} needs {at_least(self.needs[hungry[0]].memory)} of memory, {at_most(self.machine.memory)} is"
                f" available; close other programs, or {self._smaller(hungry)}"
            )
        if self.disk > self.machine.disk:
            raise UserError(
                f"the build needs {at_least(self.disk)} of disk, {at_most(self.machine.disk)} is free where {self.output}"
                " lies; free some, or name a folder on another disk with --output"
            )

    def _smaller(self, hungry: list[str]) -> str:
        fits = [name for name in self.needs if name not in (*hungry, PROOF)]
        if not fits:
            return "build on a machine with more memory and copy the folder"
        return f"build what fits with --components {','.join(fits)} and the rest on a machine with more"


def make_plan(
    checkpoint: Checkpoint, recipe: Recipe, components: tuple[str, ...], output: Path, foretell: Callable = needs
) -> Plan:
    """The plan for the components that the folder does not hold yet; `foretell` is what `needs` is to the family."""
    held = held_parts(output, recipe, checkpoint.fingerprint())
    every = foretell(checkpoint, recipe)
    wanted = {name: need for name, need in every.items() if name in components and name not in held}
    if wanted and every.keys() <= wanted.keys() | held:
        wanted[PROOF] = proof_need(every[DECODER], recipe)
    seconds = {name: last for name in wanted if (last := recall_seconds(name, recipe, checkpoint)) is not None}
    return Plan(wanted, machine(output), seconds, output)


def held_parts(output: Path, recipe: Recipe, fingerprint: str) -> set[str]:
    """Parts that the build in the folder lists as made this way; whether they verify is seen when they are used."""
    found = read_manifest(output)
    if found is None or not all((output / name).is_file() for name in owned_files(output)):
        return set()
    return {name for name, part in found.parts.items() if part.recipe == recipe.part_recipe(name, fingerprint)}


def _history_key(name: str, recipe: Recipe, checkpoint: Checkpoint) -> str:
    size = sum(path.stat().st_size for path in checkpoint.weight_files())
    return f"{name} {recipe.device}_{recipe.precision} {recipe.rounding} {size}"


def recall_seconds(name: str, recipe: Recipe, checkpoint: Checkpoint) -> float | None:
    """How long this part of a checkpoint of this size took last time on this machine."""
    return _history().get(_history_key(name, recipe, checkpoint))


def remember_seconds(seconds: Mapping[str, float], recipe: Recipe, checkpoint: Checkpoint) -> None:
    """Note what parts took; a note that cannot be written is not worth an error."""
    place = cache_folder()
    if place is None:
        return
    try:
        place.mkdir(parents=True, exist_ok=True)
        write_json(place / HISTORY, _history() | {_history_key(name, recipe, checkpoint): s for name, s in seconds.items()})
    except (OSError, UserError):
        pass


def _history() -> dict[str, float]:
    place = cache_folder()
    try:
        found = read_json(place / HISTORY, "build history") if place else {}
    except UserError:
        return {}
    return {key: float(value) for key, value in found.items() if isinstance(value, (int, float))}
