"""ONNX Runtime sessions that run where they were asked to run, from files that are what the build recorded."""

from __future__ import annotations

import dataclasses
import math
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from voxport.errors import UserError, WorkError
from voxport.manifest import FileRecord, Manifest, verify_files
from voxport.memory import require_memory
from voxport.run.external import check_external
from voxport.run.values import is_whole

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
SHORT_NAMES = {"cpu": CPU, "cuda": CUDA, "dml": "DmlExecutionProvider", "coreml": "CoreMLExecutionProvider"}
MEMORY = {CUDA: "cuda"}  # where a provider keeps its tensors; all others exchange them through host memory
REMEDIES = {
    CUDA: "pip install onnxruntime-gpu in place of onnxruntime, with the CUDA and cuDNN versions that it needs",
    "DmlExecutionProvider": "pip install onnxruntime-directml in place of onnxruntime (Windows only)",
    "CoreMLExecutionProvider": "pip install onnxruntime on macOS",
}
# Threads that have no work wait in a loop, which spares waking them between two operators of one graph. Here several graphs
# take turns on the same cores: those of one must have stopped looping when the next one starts.
SPINNING = {"session.intra_op.spin_duration_us": "200", "session.force_spinning_stop": "1"}
LEAST_LIMIT = 64  # threads that may be asked for on any machine; beyond, four a core
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
LOOKUPS = ("text_embed", "audio_embed")  # parts that only look rows up: a second thread costs more than it does
# Share of a part's file that becomes private memory, as measured: tables are read where they are mapped, convolutions in part
PRIVATE = dict.fromkeys(LOOKUPS, 0) | dict.fromkeys(("audio_tokenizer", "audio_encoder", "codec_decoder", "codec_encoder"), 0.5)
GRAPH_BYTES = 16e6  # what ONNX Runtime takes for a graph beside its weights, in addresses (a tiny build: 90 MB for five parts)
NUMPY_TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}
# ONNX Runtime's own exceptions share no base class but Exception
ORT_ERRORS = (RuntimeError, ValueError, MemoryError) + tuple(
    kind for kind in vars(ort_state).values() if isinstance(kind, type) and issubclass(kind, Exception)
)


@dataclass(frozen=True)
class Engine:
    """Where and how graphs run: an ONNX Runtime provider, CPU threads, whether the CPU may stand in for the provider, and whether
    it packs weights for its kernels. Unpacked it computes from the mapped file: slow, but without a copy of them in memory."""

    provider: str
    threads: int
    allow_fallback: bool = False
    packed: bool = True

    @classmethod
    def choose(cls, provider: str | None, threads: int | None, allow_fallback: bool, device: str) -> Engine:
        """Complete a request: no provider means the `device` that the build is for, no threads means every usable core."""
        threads = usable_cores() if threads is None else threads
        most = max(LEAST_LIMIT, 4 * (os.cpu_count() or 1))
        if not (is_whole(threads) and 1 <= threads <= most):
            raise UserError(f"--threads must be a whole number from 1 to {most}, not {threads!r}; each takes memory of its own")
        return cls(full_name(provider or device), threads, allow_fallback)


def full_name(provider: str) -> str:
    """`cuda` -> `CUDAExecutionProvider`; full names pass; anything else is a UserError listing the choices."""
    known = SHORT_NAMES | {name.lower(): name for name in (*SHORT_NAMES.values(), *ort.get_all_providers())}
    name = known.get(provider.lower()) if isinstance(provider, str) else None
    if name is None:
        raise UserError(f"unknown provider {provider!r}; choose {', '.join(SHORT_NAMES)} or a full ONNX Runtime name")
    return name


def usable_cores() -> int:
    """Cores that this process may run on: a container or taskset often allows fewer than the machine has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _quota() or cores))


def _quota() -> int | None:
    """Cores' worth of time that a container's limit grants (cgroup v2), rounded up; None without a limit."""
    try:
        granted, period = CPU_LIMIT.read_text(encoding="ascii").split()
        return math.ceil(int(granted) / int(period))
    except (OSError, ValueError, ZeroDivisionError):  # "max" stands for no limit
        return None


def open_session(path: Path, engine: Engine) -> ort.InferenceSession:
    """A session on exactly the provider asked for, or a UserError saying what was asked, got and available."""
    available = ort.get_available_providers()
    if engine.provider not in available and not engine.allow_fallback:
        raise _refusal(engine.provider, "nothing", available)
    if engine.provider == CUDA and CUDA in available:
        ort.preload_dlls()  # finds the CUDA and cuDNN wheels of pip without LD_LIBRARY_PATH
    wanted = [name for name in dict.fromkeys((engine.provider, CPU)) if name in available]
    try:
        # enable_fallback is ONNX Runtime's own quiet retry on the CPU
        session = ort.InferenceSession(str(path), _options(engine), providers=wanted, enable_fallback=0)
    except ORT_ERRORS as error:
        raise WorkError(f"{path} cannot be loaded on {wanted[0]}: {_first_line(error)}") from error
    got = session.get_providers()[0]
    if got != engine.provider and not engine.allow_fallback:
        raise _refusal(engine.provider, got, available)
    return session


def _refusal(asked: str, got: str, available: list[str]) -> UserError:
    remedy = REMEDIES.get(asked, "install an onnxruntime that has it")
    return UserError(
        f"asked for {asked}, got {got} (available here: {', '.join(available)}); {remedy}, "
        "or choose --provider cpu, or pass --allow-fallback to run on the CPU"
    )


def _options(engine: Engine) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = engine.threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors only: warnings about node placement are not the user's concern
    for name, value in SPINNING.items():
        options.add_session_config_entry(name, value)
    if not engine.packed:
        keep_unpacked(options)
    return options


def keep_unpacked(options: ort.SessionOptions) -> None:
    """Let kernels compute from the mapped file, with no second copy of the weights."""
    options.enable_cpu_mem_arena = False  # it grows by doubling: on large weights up to twice what is needed
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # it would fold float16 into float32
    options.execution_order = ort.ExecutionOrder.PRIORITY_BASED  # one matrix is cast at a time, where it is used
    options.enable_mem_pattern = False


def _first_line(error: BaseException) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, MemoryError) or "bad_alloc" in line or "Failed to allocate memory" in line:
        return f"memory ran out ({line}); close other programs, raise the limit of this process, or take a smaller build (int4)"
    return line


class Graph:
    """One loaded part: feeds are cast to what the graph declares, outputs come back by name."""

    def __init__(self, session, name: str, packed: bool = True):
        self.session = session
        self.name = name
        self.packed = packed
        self.provider = session.get_providers()[0]
        self.input_types = {value.name: self._numpy_type(value.type) for value in session.get_inputs()}
        self.output_types = {value.name: self._numpy_type(value.type) for value in session.get_outputs()}

    @property
    def memory(self) -> str:
        """ONNX Runtime's name of the memory in which this graph's provider keeps tensors."""
        return MEMORY.get(self.provider, "cpu")

    def require(self, inputs: list[str], outputs: list[str]) -> None:
        """UserError naming the first input or output that the graph lacks."""
        missing = [n for n in inputs if n not in self.input_types] + [n for n in outputs if n not in self.output_types]
        if missing:
            raise UserError(f"{self.name}: the graph has no {missing[0]!r}; build this part again with optimize.py")

    def cast(self, name: str, value: np.ndarray) -> np.ndarray:
        """`value` contiguous and in the dtype that input `name` declares."""
        return np.ascontiguousarray(value, dtype=self.input_types[name])

    def run(self, **feeds: np.ndarray) -> np.ndarray:
        """Run once and return the first output. WorkError names part and provider when the kernel fails."""
        self.require(list(feeds), [])
        with self.explained():
            return self.session.run(None, {name: self.cast(name, value) for name, value in feeds.items()})[0]

    @contextmanager
    def explained(self) -> Iterator[None]:
        """An ONNX Runtime error inside becomes a WorkError naming part and provider."""
        try:
            yield
        except ORT_ERRORS as error:
            raise WorkError(f"{self.name} failed on {self.provider}: {_first_line(error)}") from error

    def _numpy_type(self, onnx_type: str) -> type:
        if onnx_type not in NUMPY_TYPES:
            raise UserError(f"{self.name}: {onnx_type} cannot be fed from NumPy; build this part in another precision")
        return NUMPY_TYPES[onnx_type]


class Parts:
    """The graphs of a build folder, each verified against the manifest and loaded when it is first asked for; those called
    `unpacked` without packing their weights, where they run on the CPU."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        engine: Engine,
        verify: Callable[[dict[str, FileRecord]], None] | None = None,
        unpacked: Collection[str] = (),
    ):
        self.folder = Path(folder)
        self.manifest = manifest
        self.engine = engine
        self.unpacked = frozenset(unpacked if engine.provider == CPU else ())
        self.verify = verify or (lambda files: verify_files(self.folder, files))
        self._graphs: dict[str, Graph] = {}
        self._locks = {name: threading.Lock() for name in manifest.parts}
        self._lock = threading.Lock()
        self._told: set[str] = set()

    def __getitem__(self, name: str) -> Graph:
        with self._locks.get(name, self._lock):
            graph = self._graphs.get(name) or self._load(name)
        with self._lock:
            return self._graphs.setdefault(name, graph)

    def load(self, *names: str) -> None:
        """Load the parts called `names` now, on every core that is allowed: ONNX Runtime loads a graph on one."""
        with self._lock:
            missing = [name for name in names if name not in self._graphs]
        if missing:
            if self.engine.provider == CPU:
                need = sum(self._size(name) * PRIVATE.get(name, 1) + GRAPH_BYTES for name in missing)
                require_memory(need, f"loading {self.folder}")
            with ThreadPoolExecutor(min(self.engine.threads, len(missing))) as pool:
                list(pool.map(self.__getitem__, sorted(missing, key=self._size, reverse=True)))

    def keep_only(self, names: Iterable[str]) -> None:
        """Forget all loaded graphs but these; the others are loaded again when they are asked for."""
        with self._lock:
            self._graphs = {name: graph for name, graph in self._graphs.items() if name in names}

    def _size(self, name: str) -> int:
        return sum(record.bytes for record in self.manifest.part(name, self.folder).files.values())

    def providers(self) -> dict[str, str]:
        """The provider on which each loaded part really runs."""
        with self._lock:
            return {name: graph.provider for name, graph in self._graphs.items()}

    def fallbacks(self) -> tuple[str, ...]:
        """A warning if loaded parts do not run on the provider that was asked for; it names them if others do."""
        asked, providers = self.engine.provider, self.providers()
        fallen = [name for name, got in providers.items() if got != asked]
        if not fallen:
            return ()
        what = "this build" if len(fallen) == len(providers) else ", ".join(fallen)
        return (f"{providers[fallen[0]]} computes {what} because {asked} could not be had",)

    def new_fallbacks(self) -> tuple[str, ...]:
        """The same, but only what this has not said before: one line is enough for all that is spoken."""
        warnings = self.fallbacks()
        with self._lock:
            new = tuple(warning for warning in warnings if warning not in self._told)
            self._told.update(new)
        return new

    def check_files(self, name: str) -> None:
        """UserError if a file of a part is not what the build recorded."""
        files = self.manifest.part(name, self.folder).files
        try:
            self.verify(files)
        except UserError as error:
            raise UserError(f"{error} ({name} alone: {self.manifest.rebuild_command(self.folder, [name])})") from error

    def _load(self, name: str) -> Graph:
        part = self.manifest.part(name, self.folder)
        self.check_files(name)
        check_external(self.folder / part.graph, set(part.files))
        threads, packed = 1 if name in LOOKUPS else self.engine.threads, name not in self.unpacked
        engine = dataclasses.replace(self.engine, threads=threads, packed=packed)
        graph = Graph(open_session(self.folder / part.graph, engine), name, packed)
        graph.require([value.name for value in part.inputs], [value.name for value in part.outputs])
        return graph


def check_alive(values: np.ndarray, what: str, graph: Graph) -> np.ndarray:
    """Return `values`; WorkError if they are all zero or hold NaN or Inf, as a broken kernel returns them."""
    fault = "only zeros" if not values.any() else "NaN or Inf" if not np.isfinite(values).all() else None
    if fault:
        raise WorkError(
            f"{graph.name} on {graph.provider} returned {fault} as {what}: this provider miscomputes this build; "
            "run diagnose_cuda.py to find the operator, or speak with --provider cpu"
        )
    return values
