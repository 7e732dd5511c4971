"""Which part, and in it which operator, does an execution provider compute otherwise than the CPU?

Each part is fed what the CPU made of the proof's prompt, so that each is judged alone. In the first one that differs the outputs
of its heavy operators are made graph outputs; from the first wrong one the way leads back through operators whose outputs
are wrong to one that is wrong even when it is given the CPU's inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

from voxport.errors import UserError, WorkError
from voxport.families import FAMILIES
from voxport.files import atomic_path
from voxport.manifest import Manifest, verify_files
from voxport.run.proof import OTHER_PROVIDER, OTHER_PROVIDER_CODES, check_proof
from voxport.run.session import CPU, CUDA, ORT_ERRORS, REMEDIES, Graph

# Operators that are looked at first: those with weights, attention and norms. What lies between two of them is cheap.
WATCHED = {
    "GroupQueryAttention", "MatMulNBits", "MatMul", "Gemm", "Conv", "ConvTranspose", "Gather", "GatherBlockQuantized",
    "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization", "LayerNormalization", "InstanceNormalization", "Softmax",
}  # fmt: skip
# Relative error of one operator on equal inputs: TF32 and fp16 round to 2**-11, int4 kernels also round activations to 8 bits.
NODE_TOLERANCE = {"fp32": 5e-3, "fp16": 1e-2, "int8": 5e-2, "int4": 5e-2}
# ONNX Runtime resolves the weights of a model given as bytes against this folder
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
NODE_REMEDIES = {
    "GroupQueryAttention": (
        "the wheel's attention kernel does not work on this device (seen with prebuilt aarch64 wheels on Jetson, SM 8.7: zeros"
        " and no error); build onnxruntime from source for its architecture (CMAKE_CUDA_ARCHITECTURES=87,"
        " onnxruntime_USE_FLASH_ATTENTION=ON)"
    ),
    "MatMulNBits": "take a build without rounded weights (optimize.py --device cuda --precision fp16)",
}

Opener = Callable[[onnx.ModelProto, Path, str], ort.InferenceSession]
Arrays = dict[str, np.ndarray]


def open_model(model: onnx.ModelProto, folder: Path, provider: str) -> ort.InferenceSession:
    """A session on `provider` whose weights lie in `folder`. UserError if the provider cannot be had."""
    available = ort.get_available_providers()
    if provider not in available:
        raise UserError(f"no {provider} here: onnxruntime {ort.__version__} offers {', '.join(available)}; {_install(provider)}")
    if provider == CUDA:
        ort.preload_dlls()  # finds the CUDA and cuDNN wheels of pip
    options = ort.SessionOptions()
    options.log_severity_level = 4  # a kernel that fails is reported as a finding, not by ONNX Runtime's log
    options.add_session_config_entry(WEIGHTS_FOLDER, str(folder.resolve()))
    wanted = list(dict.fromkeys((provider, CPU)))
    session = ort.InferenceSession(model.SerializeToString(), options, providers=wanted, enable_fallback=0)
    if session.get_providers()[0] != provider:
        raise UserError(f"{provider} does not start on this machine; {_install(provider)}")
    return session


def _install(provider: str) -> str:
    return REMEDIES.get(provider, "install an onnxruntime that has it")


def stand_in(target: str, provider: str) -> Opener:
    """An opener for rehearsals: the CPU in place of `provider`, with zeros from every node of op type or name `target`.

    On a machine that has the provider, what runs is still the CPU.
    """

    def open_damaged(model: onnx.ModelProto, folder: Path, wanted: str) -> ort.InferenceSession:
        return open_model(silence(model, target) if wanted == provider else model, folder, CPU)

    return open_damaged


def silence(model: onnx.ModelProto, target: str) -> onnx.ModelProto:
    """A copy in which the first output of each node of op type or name `target` is zero."""
    damaged = onnx.ModelProto()
    damaged.CopyFrom(model)
    del damaged.graph.node[:]
    for node in model.graph.node:
        damaged.graph.node.append(node)
        if target in (node.op_type, node.name):
            output = node.output[0]
            damaged.graph.node[-1].output[0] = output + "/lost"
            damaged.graph.node.append(onnx.helper.make_node("Sub", [output + "/lost"] * 2, [output]))
    return damaged


@dataclass(frozen=True)
class Difference:
    """How far a provider's numbers are from the CPU's. `fault` says what they look like if they are no numbers at all."""

    error: float
    allowed: float
    fault: str | None

    @property
    def is_wrong(self) -> bool:
        return self.fault is not None or not self.error <= self.allowed

    def __str__(self) -> str:
        figure = f"error {self.error:.2g}, {self.allowed:g} is allowed"
        return f"{self.fault} ({figure})" if self.fault else figure


def compare(found: np.ndarray, expected: np.ndarray, allowed: float) -> Difference:
    """Root mean square of the difference over that of `expected`; for integers the share that differs."""
    if found.shape != expected.shape:
        return Difference(math.inf, allowed, f"shape {list(found.shape)} instead of {list(expected.shape)}")
    if expected.dtype.kind != "f":
        return Difference(float(np.mean(found != expected)) if found.size else 0.0, allowed, None)
    ours, theirs = found.astype(np.float64), expected.astype(np.float64)
    if not np.isfinite(ours).all() and np.isfinite(theirs).all():
        return Difference(math.inf, allowed, "NaN or Inf")
    size = math.sqrt(np.mean(theirs**2)) if theirs.size else 0.0
    error = math.sqrt(np.mean((ours - theirs) ** 2)) / max(size, 1e-30) if theirs.size else 0.0
    return Difference(error, allowed, "only zeros" if size > 0 and not ours.any() else None)


@dataclass(frozen=True)
class PartFinding:
    """One part on the provider against the CPU."""

    part: str
    difference: Difference


@dataclass(frozen=True)
class NodeFinding:
    """The first node that is wrong on its own: `inputs` are the CPU's, `cpu` and `found` what CPU and provider made of them."""

    part: str
    node: onnx.NodeProto
    model: onnx.ModelProto
    difference: Difference
    inputs: Arrays
    cpu: np.ndarray
    found: np.ndarray | None

    @property
    def remedy(self) -> str:
        return NODE_REMEDIES.get(self.node.op_type, "try another onnxruntime version and report this operator to its makers")


class Lab:
    """Runs graphs of one build, whole or edited, on the CPU and on the provider in question."""

    def __init__(self, folder: Path, provider: str, opener: Opener = open_model):
        self.folder, self.provider, self.opener = Path(folder), provider, opener
        self.manifest = Manifest.read(self.folder)
        self.proof, self.questions = check_proof(self.manifest), FAMILIES[self.manifest.family].proof
        self.answers: dict[str, Arrays] = {}  # the CPU's outputs, which feed later parts

    def load(self, part: str) -> onnx.ModelProto:
        """The part's graph without its weights, which stay in their file."""
        record = self.manifest.part(part)
        verify_files(self.folder, record.files)
        return onnx.load(self.folder / record.graph, load_external_data=False)

    def operators(self) -> set[str]:
        """Types and names of all nodes of the build."""
        nodes = [node for part in self.manifest.parts for node in self.load(part).graph.node]
        return {node.op_type for node in nodes} | {node.name for node in nodes}

    def run(self, model: onnx.ModelProto, feeds: Arrays, provider: str, name: str) -> Arrays:
        """All outputs by name. WorkError if a kernel fails."""
        graph = Graph(self.opener(model, self.folder, provider), name)
        outputs = list(graph.output_types)
        feeds = {name: graph.cast(name, value) for name, value in feeds.items() if name in graph.input_types}
        with graph.explained():
            return dict(zip(outputs, graph.session.run(outputs, feeds)))

    def feeds(self, part: str) -> Arrays:
        """What the part is fed for the proof's prompt."""
        return self.questions.make_feeds(part, self.manifest, self.proof, self.answers)

    def judge_part(self, part: str) -> PartFinding:
        """Run a part on the CPU and on the provider and compare all outputs; the worst one counts."""
        model, feeds = self.load(part), self.feeds(part)
        self.answers[part] = expected = self.run(model, feeds, CPU, part)
        allowed = self.allow(part)
        found, failure = self.attempt(model, feeds, part)
        if failure:
            return PartFinding(part, Difference(math.inf, allowed, failure))
        differences = [compare(found[name], expected[name], allowed) for name in expected]
        return PartFinding(part, max(differences, key=lambda d: (d.is_wrong, d.error)))

    def allow(self, part: str) -> float:
        """Error that a healthy provider may show in the whole part: deep parts add up the errors of their operators."""
        if part in self.questions.EXACT:
            return 0.0  # a lookup computes nothing
        if part in self.questions.CODES:
            return OTHER_PROVIDER_CODES
        table = OTHER_PROVIDER if part in self.questions.DEEP else NODE_TOLERANCE
        return table[self.manifest.part(part).precision]

    def is_suspect(self, finding: PartFinding) -> bool:
        """Whether a part deserves a look inside: it differs, or by more than one healthy operator would."""
        mark = NODE_TOLERANCE[self.manifest.part(finding.part).precision]
        return finding.difference.is_wrong or (finding.part in self.questions.DEEP and finding.difference.error > mark)

    def attempt(self, model: onnx.ModelProto, feeds: Arrays, name: str) -> tuple[Arrays, str | None]:
        """Run on the provider; the message if a kernel fails."""
        try:
            return self.run(model, feeds, self.provider, name), None
        except WorkError as error:
            return {}, str(error)
        except ORT_ERRORS as error:  # the session itself cannot be made
            return {}, str(error).splitlines()[0]


def expose(model: onnx.ModelProto, names: list[str]) -> onnx.ModelProto:
    """A copy whose only outputs are the tensors called `names`."""
    edited = onnx.ModelProto()
    edited.CopyFrom(model)
    del edited.graph.output[:]
    edited.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
    return edited


@dataclass
class Dissection:
    """The nodes of one part, run on the CPU and the provider with their outputs laid open."""

    lab: Lab
    part: str

    def __post_init__(self):
        self.model, self.inputs = self.lab.load(self.part), self.lab.feeds(self.part)
        self.nodes = list(self.model.graph.node)
        self.makers = {name: i for i, node in enumerate(self.nodes) for name in node.output if name}
        self.weights = {tensor.name: tensor for tensor in self.model.graph.initializer}
        self.allowed = NODE_TOLERANCE[self.lab.manifest.part(self.part).precision]

    def find(self) -> NodeFinding | None:
        """The first node that is wrong when it is given the CPU's inputs; None if every one that was tried is right alone.

        Tried are all that lead to the first wrong one of the watched nodes, then the other wrong ones of those.
        """
        watched = {i for i, node in enumerate(self.nodes) if node.op_type in WATCHED}
        ends = {self.makers[output.name] for output in self.model.graph.output}
        wrong = sorted(self.wrong_among(sorted(watched | ends)))
        if not wrong:
            return None
        suspects = self.trace_back(wrong[0], watched - set(wrong))
        for places in (sorted(self.wrong_among(suspects)), wrong):
            fed = self.cpu_inputs(places)
            for place in places:
                finding = self.try_alone(self.nodes[place], fed)
                if finding.difference.is_wrong:
                    return finding
        return None

    def wrong_among(self, places: list[int]) -> set[int]:
        """Those nodes at `places` whose first output the provider computes otherwise."""
        names = [self.nodes[i].output[0] for i in places]
        edited = expose(self.model, names)
        expected = self.lab.run(edited, self.inputs, CPU, self.part)
        found, failure = self.lab.attempt(edited, self.inputs, self.part)
        if failure:  # it does not even run: each must be tried alone
            return set(places)
        return {i for i, name in zip(places, names) if compare(found[name], expected[name], self.allowed).is_wrong}

    def trace_back(self, place: int, cleared: set[int]) -> list[int]:
        """The node at `place` and all that lead to it without passing one that is cleared, in graph order."""
        reached, waiting = set(), [place]
        while waiting:
            i = waiting.pop()
            if i in reached or i in cleared:
                continue
            reached.add(i)
            waiting.extend(self.makers[name] for name in self.nodes[i].input if name in self.makers)
        return sorted(i for i in reached if self.nodes[i].op_type != "Constant")

    def cpu_inputs(self, places: list[int]) -> Arrays:
        """What the CPU feeds the nodes at `places`, by tensor name."""
        names = {name for i in places for name in self.nodes[i].input}
        made = sorted(names & self.makers.keys())
        fed = self.lab.run(expose(self.model, made), self.inputs, CPU, self.part) if made else {}
        graph = {value.name: value for value in self.model.graph.input}
        kinds = {n: onnx.helper.tensor_dtype_to_np_dtype(graph[n].type.tensor_type.elem_type) for n in names & graph.keys()}
        return fed | {name: self.inputs[name].astype(kind) for name, kind in kinds.items()}

    def try_alone(self, node: onnx.NodeProto, fed: Arrays) -> NodeFinding:
        """The node as a graph of its own, on the CPU's inputs."""
        inputs = {name: fed[name] for name in dict.fromkeys(node.input) if name in fed}
        model, output = self.isolate(node, inputs), node.output[0]
        cpu = self.lab.run(model, inputs, CPU, node.name)[output]
        found, failure = self.lab.attempt(model, inputs, node.name)
        difference = Difference(math.inf, self.allowed, failure) if failure else compare(found[output], cpu, self.allowed)
        return NodeFinding(self.part, node, model, difference, inputs, cpu, found.get(output))

    def isolate(self, node: onnx.NodeProto, inputs: Arrays) -> onnx.ModelProto:
        """A model of this node alone; its weights stay where they are."""
        feeds = [_describe(name, array) for name, array in inputs.items()]
        outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in node.output if name]
        weights = [self.weights[name] for name in dict.fromkeys(node.input) if name in self.weights]
        graph = onnx.helper.make_graph([node], node.name or node.op_type, feeds, outputs, weights)
        return onnx.helper.make_model(graph, opset_imports=self.model.opset_import, ir_version=self.model.ir_version)


def _describe(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)


def judge_parts(lab: Lab) -> Iterator[PartFinding]:
    """Each part of the build in the order in which one feeds the next."""
    for part in lab.questions.ORDER:
        if part in lab.manifest.parts:
            yield lab.judge_part(part)


def save_node(finding: NodeFinding, folder: Path, path: Path) -> None:
    """Write what is needed to show the fault elsewhere: `model` (ONNX bytes, weights included), inputs, and both outputs."""
    model = onnx.ModelProto()
    model.CopyFrom(finding.model)
    for tensor in model.graph.initializer:
        if uses_external_data(tensor):
            load_external_data_for_tensor(tensor, str(folder))
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]
    names = list(finding.inputs)
    arrays = {f"input_{i}": finding.inputs[name] for i, name in enumerate(names)} | {"cpu": finding.cpu}
    if finding.found is not None:
        arrays["provider"] = finding.found
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, input_names=names, model=np.frombuffer(model.SerializeToString(), np.uint8), **arrays)
