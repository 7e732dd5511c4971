"""The build's own proof: ask its graphs again what they were asked when they had passed their check, and compare.

Where the proof was written (same provider, ONNX Runtime, machine and thread count) kernels repeat themselves to the bit, so
every output must have the digest that the manifest holds. Elsewhere sums run in another order, so numbers and random
projections are compared instead, with a tolerance for each precision.

Quick tasks are cheap enough to run once before a build first speaks somewhere. Full tasks read out whatever a graph can be
made to show: every row of the embeddings, every weight of the heads, every codebook entry of the codec's decoder.

What is asked is each family's own (`FAMILY_proof.py`); how answers are kept and compared is here.
"""

from __future__ import annotations

import hashlib
import math
import platform
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime as ort

from voxport.errors import UserError, WorkError
from voxport.families import FAMILIES
from voxport.manifest import BuildManifest, Figure, Manifest, Proof
from voxport.run.decoder import EMBEDS, HIDDEN, MASK, POSITIONS
from voxport.run.session import Engine, Graph, Parts

BODY = "llm_decoder"  # in every family: what ModelBuilder makes
QUICK, FULL = "quick", "full"
OK, FAIL, NOT_JUDGED = "ok", "FAIL", "not judged"

LONG_ROWS = 128  # positions of the full pass through the body after the prompt: less work than 5 s of speech
TABLE_ROWS = 256  # rows of a table, or unit vectors, at once: bounds the output to some MB
NOISE_ROWS = 4  # hidden states that a quick task gives the heads; one meets every weight, four outvote a rounding
QUICK_FRAMES = 8  # frames that a quick task decodes: every weight of the codec's decoder counts in each, apart from the entries
CODEC_FRAMES = 64  # frames that a full task decodes at once: bounds the codec's memory

NUM_SUMS = 4  # random projections a group: their mean square estimates the error of all numbers to within a factor of 2
NUM_VALUES = 4  # numbers a group that are kept as they are, for a reader of the manifest
NUM_CODES = 200  # codes a group that are kept: a second of them, so that one frame is less than the share that may differ
DIGITS = 9  # significant digits that give a float32 back exactly

GAMMA = 0x9E3779B97F4A7C15  # SplitMix64 (Steele, Lea, Flood 2014): the same numbers on every machine and NumPy

# Largest error of a group, relative to its size, where kernels may add in another order: another CPU, ONNX Runtime or number
# of threads. fp32: ten times what the build allows against PyTorch in one part. fp16: 2**-11 a rounding over a few dozen
# layers. int4: the kernel rounds activations to 8 bits; at build time that costs a cosine of up to 0.001 with exact
# arithmetic, an error of sqrt(2 * 0.001) = 0.045, and two machines may round apart. Saturating 8-bit kernels (correlation
# 0.13 with the truth) and kernels that return zeros have errors of about 1.
OTHER_MACHINE = {"fp32": 1e-3, "fp16": 2e-2, "int8": 5e-2, "int4": 0.1}
# On another provider arithmetic itself differs. fp32 may be computed in TF32 (10 bits of mantissa); int4 computes in fp16
# where the CPU rounds activations to 8 bits: a healthy Jetson had a cosine of 0.95, an error of sqrt(2 * 0.05) = 0.32.
OTHER_PROVIDER = {"fp32": 5e-2, "fp16": 0.1, "int8": 0.2, "int4": 0.4}
# Share of codes that may differ: an encoder's near ties fall the other way, and with one code the later ones of its frame.
OTHER_MACHINE_CODES, OTHER_PROVIDER_CODES = 0.05, 0.25


def scramble(name: str, count: int) -> np.ndarray:
    """[count] uint64: the random sequence called `name`."""
    seed = int.from_bytes(hashlib.sha256(name.encode("utf-8")).digest()[:8], "little")
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GAMMA) + np.uint64(seed)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def noise(name: str, *shape: int) -> np.ndarray:
    """float32 noise of unit variance, uniform in +-sqrt(3)."""
    unit = (scramble(name, math.prod(shape)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return ((unit - 0.5) * math.sqrt(12)).astype(np.float32).reshape(shape)


def integers(name: str, limit: int, *shape: int) -> np.ndarray:
    """int64 in 0..limit-1."""
    return (scramble(name, math.prod(shape)) % np.uint64(limit)).astype(np.int64).reshape(shape)


def buzz(name: str, samples: int, rate: int) -> np.ndarray:
    """[samples] float32: a 110 Hz triangle under noise, some -20 dB. No sine: libraries differ in its last bit."""
    phase = np.arange(samples) * 110 / rate % 1
    triangle = 4 * np.abs(phase - 0.5) - 1
    return (0.1 * triangle + 0.05 * noise(name, samples)).astype(np.float32)


def edge_clip(pair: int, factor: float, samples: int, rate: int) -> np.ndarray:
    """[samples] float32: `factor` 0 to 1 leads from one clip to a slightly different one."""
    return (buzz(f"edge {pair}", samples, rate) + factor * 0.01 * noise(f"edge {pair} away", samples)).astype(np.float32)


def chunks(rows: np.ndarray, size: int = TABLE_ROWS) -> Iterator[np.ndarray]:
    return (rows[i : i + size] for i in range(0, len(rows), size))


def unit_vectors(width: int) -> Iterator[np.ndarray]:
    """Every unit vector [1, n, width] float32, some at a time: what is linear shows its weights, none added to another."""
    for places in chunks(np.arange(width)):
        yield (places[:, None] == np.arange(width)).astype(np.float32)[None]


@dataclass
class Asking:
    """Puts questions to the parts of a build; each family adds methods that yield an answer in groups of numbers."""

    parts: Parts
    manifest: BuildManifest
    prompt_ids: list[int]
    reference_codes: list[list[int]]
    edges: list[list[float]]

    def run_body(self, embeds: np.ndarray, past: list[np.ndarray] | None = None) -> tuple[np.ndarray, list[np.ndarray]]:
        """[1, S, D] -> hidden states [1, S, D] and the cache, given the cache of what came before.

        Through NumPy and not as the speaker does it, so that a proof outlives changes in how the speaker keeps its cache.
        """
        graph, names, dims = self.parts[BODY], self.manifest.kv_cache, self.manifest.dims
        each = lambda *templates: [t.format(layer) for layer in range(dims.num_layers) for t in templates]
        if past is None:
            past = [np.zeros((1, dims.num_kv_heads, 0, dims.head_dim), names.dtype)] * (2 * dims.num_layers)
        start, end = past[0].shape[2], past[0].shape[2] + embeds.shape[1]
        feeds = {EMBEDS: embeds, MASK: np.ones((1, end)), POSITIONS: np.arange(start, end)[None]}
        feeds |= zip(each(names.past_key, names.past_value), past)
        feeds = {name: graph.cast(name, value) for name, value in feeds.items() if name in graph.input_types}
        with graph.explained():
            hidden, *present = graph.session.run([HIDDEN, *each(names.present_key, names.present_value)], feeds)
        return hidden, present

    def encode_mixed(self, pair: int, factor: float) -> np.ndarray:
        """Codes of one of the clips between which `edges` lie."""
        raise NotImplementedError


def body_feeds(embeds: np.ndarray, manifest: BuildManifest) -> dict[str, np.ndarray]:
    """Feeds of the body for embeddings [1, S, D] that stand alone."""
    names, dims = manifest.kv_cache, manifest.dims
    past = [t.format(i) for i in range(dims.num_layers) for t in (names.past_key, names.past_value)]
    empty = np.zeros((1, dims.num_kv_heads, 0, dims.head_dim), np.float32)
    whole = {EMBEDS: embeds, MASK: np.ones((1, embeds.shape[1])), POSITIONS: np.arange(embeds.shape[1])[None]}
    return whole | dict.fromkeys(past, empty)


@dataclass(frozen=True)
class Task:
    """One question: which part answers it, which parts make what that part is fed, how it is put, and to whom it matters.

    `exact` answers are the same bits on every provider, so that their digest tells all; `codes` are counted, not measured;
    `tops` largest numbers are kept.
    """

    part: str
    what: str
    depth: str
    ask: Callable[[typing.Any], Iterable[np.ndarray]]
    fed_by: tuple[str, ...] = ()
    exact: bool = False
    codes: bool = False
    tops: int = 0

    @property
    def name(self) -> str:
        return f"{self.part}: {self.what}"

    @property
    def parts(self) -> tuple[str, ...]:
        """All that the question needs."""
        return (*self.fed_by, self.part)


def read_digest(groups: Iterable[np.ndarray]) -> str:
    """SHA-256 of all bytes of an answer."""
    digest = hashlib.sha256()
    for group in groups:
        digest.update(np.ascontiguousarray(group).tobytes())
    return digest.hexdigest()


def take_figure(task: Task, groups: Iterable[np.ndarray], places: list[list[int]] | None = None) -> Figure:
    """Reduce an answer to what the manifest keeps of it. `places` are those of an earlier figure; None chooses them."""
    digest, figure = hashlib.sha256(), Figure("", [], [], [], [], [])
    for i, group in enumerate(groups):
        digest.update(np.ascontiguousarray(group).tobytes())
        numbers = group.reshape(-1).astype(np.float64)
        chosen = _choose_places(task, i, numbers) if places is None else places[i] if i < len(places) else []
        figure.sizes.append(len(numbers))
        figure.scales.append(_short(np.sqrt(np.mean(numbers**2))))
        figure.sums.append([] if task.codes or task.exact else [_short(s) for s in project(f"{task.name} {i}", numbers)])
        figure.places.append(chosen)
        figure.values.append([_short(numbers[p]) if p < len(numbers) else math.nan for p in chosen])
    return Figure(digest.hexdigest(), figure.sizes, figure.scales, figure.sums, figure.places, figure.values)


def _choose_places(task: Task, i: int, numbers: np.ndarray) -> list[int]:
    if task.codes:
        return list(range(min(len(numbers), NUM_CODES)))
    tops = np.argsort(-numbers, kind="stable")[: task.tops].tolist()
    return tops + integers(f"{task.name} {i} places", len(numbers), NUM_VALUES).tolist()


def project(name: str, numbers: np.ndarray) -> np.ndarray:
    """[NUM_SUMS] sums of `numbers` with random signs, each as large as one number on average."""
    bits = scramble(name, len(numbers))
    signs = [1.0 - 2.0 * ((bits >> np.uint64(k)) & np.uint64(1)) for k in range(NUM_SUMS)]
    return np.array([numbers @ s for s in signs]) / math.sqrt(max(1, len(numbers)))


def _short(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")


def measure_error(found: Figure, expected: Figure) -> float:
    """Largest over groups of the estimated error relative to the group's size; infinite if sizes or finiteness differ."""
    if found.sizes != expected.sizes:
        return math.inf
    worst = 0.0
    for i, scale in enumerate(expected.scales):
        ours, theirs = ([*f.sums[i], *f.values[i]] for f in (found, expected))
        difference = np.subtract(ours, theirs)
        error = math.sqrt(np.mean(difference**2)) / max(scale, 1e-30)
        worst = max(worst, error) if math.isfinite(error) else math.inf
    return worst


def count_other_codes(found: Figure, expected: Figure) -> float:
    """Share of the codes kept that differ."""
    if found.sizes != expected.sizes:
        return math.inf
    return float(np.mean(np.not_equal(np.concatenate(found.values), np.concatenate(expected.values))))


@dataclass(frozen=True)
class Verdict:
    """What replaying one task showed. `error` and `allowed` are None where bits were compared or nothing was."""

    part: str
    what: str
    state: str
    says: str
    provider: str
    error: float | None = None
    allowed: float | None = None


def replay(parts: Parts, manifest: Manifest, depth: str, names: Iterable[str] | None = None) -> Iterator[Verdict]:
    """Put the proof's questions to the parts called `names` (default: all). UserError if the build carries none to put."""
    proof, failed, questions = check_proof(manifest), set(), FAMILIES[manifest.family].proof
    names = set(manifest.parts) if names is None else set(names)
    ask = questions.Replay(parts, manifest, proof.prompt_ids, proof.reference_codes, proof.edges)
    for task in questions.TASKS:
        if task.part not in names or (task.depth == FULL and depth == QUICK):
            continue
        if depth == FULL:  # a quick look leaves loaded what speaks next
            parts.keep_only(task.parts)
        culprits = [part for part in task.fed_by if part in failed]
        if culprits:
            says = f"{culprits[0]}, which feeds it, failed"
            yield Verdict(task.part, task.what, NOT_JUDGED, says, parts[task.part].provider)
            continue
        verdict = judge_task(task, ask, proof)
        if verdict.state == FAIL:
            failed.add(task.part)
        yield verdict


def verify_build(
    folder: Path, manifest: Manifest, provider: str | None, threads: int | None, allow_fallback: bool
) -> Iterator[Verdict]:
    """Replay everything. No `threads` means as many as wrote the proof, so that bits can be compared where it was written."""
    proof = check_proof(manifest)
    engine = Engine.choose(provider, proof.threads if threads is None else threads, allow_fallback, manifest.target.device)
    return replay(Parts(folder, manifest, engine, unpacked=proof.unpacked), manifest, FULL)


def judge_task(task: Task, ask: Asking, proof: Proof) -> Verdict:
    """Ask, and hold the answer to the digest or to a tolerance."""
    graph, expected = ask.parts[task.part], proof.figures[task.name]
    result = lambda state, says, *figures: Verdict(task.part, task.what, state, says, graph.provider, *figures)
    strict = task.exact or is_home(proof, graph, ask.parts.engine.threads)
    try:
        if strict and read_digest(task.ask(ask)) == expected.digest:
            return result(OK, "the same to the bit")
        found = take_figure(task, task.ask(ask), expected.places)
    except WorkError as error:
        return result(FAIL, str(error))
    if found.digest == expected.digest:
        return result(OK, "the same to the bit")
    error = count_other_codes(found, expected) if task.codes else measure_error(found, expected)
    if not math.isfinite(error):
        return result(FAIL, "not finite" if found.sizes == expected.sizes else "of another shape")
    says = f"{error:.2g} of the codes differ" if task.codes else f"off by {error:.2g} of its size" if error else "other bits"
    if strict:
        return result(FAIL, f"{says}, where every bit must be as it was", error, 0.0)
    allowed = tolerance(task, ask.manifest, proof, graph.provider)
    return result(OK if error <= allowed else FAIL, f"{says}, {allowed:g} is allowed", error, allowed)


def is_home(proof: Proof, graph: Graph, threads: int) -> bool:
    """Whether this is where the proof was written. Threads and packing count: what is cut otherwise adds in another order."""
    here = (graph.provider, runtime_name(), machine_name(), threads, graph.packed)
    return here == (proof.provider, proof.onnxruntime, proof.machine, proof.threads, graph.name not in proof.unpacked)


def tolerance(task: Task, manifest: Manifest, proof: Proof, provider: str) -> float:
    """Error that is allowed away from home."""
    same_provider = provider == proof.provider
    if task.codes:
        return OTHER_MACHINE_CODES if same_provider else OTHER_PROVIDER_CODES
    feeders = [manifest.part(name).precision for name in (task.part, *task.fed_by)]
    table = OTHER_MACHINE if same_provider else OTHER_PROVIDER
    return max(table[precision] for precision in feeders)


def check_proof(manifest: Manifest) -> Proof:
    """The proof; UserError if there is none or it answers other questions."""
    proof, questions = manifest.proof, FAMILIES[manifest.family].proof
    if proof is None:
        raise UserError("this build carries no proof of itself: it is old or lacks parts; build it again with optimize.py")
    asked = [task.name for task in questions.TASKS if task.part in manifest.parts]
    if proof.version != questions.VERSION or any(name not in proof.figures for name in asked):
        raise UserError(
            f"this build's proof has version {proof.version}, {questions.VERSION} is read here; build it again with optimize.py"
        )
    return proof


def explain(verdict: Verdict, proof: Proof) -> str:
    """One line for a part that failed: figure and remedy."""
    if verdict.provider != proof.provider:
        remedy = (
            "this provider miscomputes this build: find the operator with diagnose_cuda.py, or speak with --provider cpu"
        )
    elif (runtime_name(), machine_name()) == (proof.onnxruntime, proof.machine):
        remedy = "it was changed after the build: build it again, or copy it again from where it is whole"
    else:
        remedy = (
            f"it was changed after the build, or onnxruntime {ort.__version__} miscomputes it on this machine: "
            f"build or copy it again, or try onnxruntime {proof.onnxruntime.split()[0]}"
        )
    return f"{verdict.part} does not compute what this build proved ({verdict.what}: {verdict.says}); {remedy}"


def runtime_name() -> str:
    """Version of ONNX Runtime and a mark of its build: wheels for CPU and GPU are compiled apart."""
    build = hashlib.sha256(f"{ort.get_build_info()} {ort.get_device()}".encode()).hexdigest()
    return f"{ort.__version__} {build[:8]}"


@cache
def machine_name() -> str:
    """What decides which kernels run: system, processor with its features, and graphics processors, as far as known."""
    model, flags = _read_cpuinfo()
    graphics = sorted(
        {line for path in Path("/proc/driver/nvidia/gpus").glob("*/information") for line in _model_lines(path)}
    )
    described = " ".join([platform.system(), platform.machine(), model or platform.processor(), *graphics])
    return f"{described} {hashlib.sha256(flags.encode()).hexdigest()[:8]}" if flags else described


def _read_cpuinfo() -> tuple[str, str]:
    """Model and feature flags of the processor on Linux; elsewhere empty."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "", ""
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return facts.get("model name", facts.get("CPU part", "")), facts.get("flags", facts.get("Features", ""))


def _model_lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]
