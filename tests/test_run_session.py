"""Sessions: the provider that was asked for, the files that were built, dtypes as declared, faults in plain words."""

import dataclasses
import os

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from run_fakes import FakeSession, decoder_session, make_manifest

from voxport.errors import UserError, WorkError
from voxport.manifest import KVCache, Part, TensorSpec, record_file
from voxport.run import session as run_session
from voxport.run.decoder import Decoder
from voxport.run.session import CPU, CUDA, Engine, Graph, Parts, check_alive, full_name, open_session, usable_cores


def write_graph(folder, dtype=TensorProto.FLOAT16, name="double"):
    """A part that adds its input to itself: x [n] -> y [n]."""
    ends = [helper.make_tensor_value_info(end, dtype, ["n"]) for end in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], name, ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path = folder / f"{name}.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def make_part(path, inputs=("x",), outputs=("y",)):
    specs = [[TensorSpec(name, "float16", ["n"]) for name in names] for names in (inputs, outputs)]
    return Part(path.name, "fp16", {path.name: record_file(path)}, *specs)


ON_CPU = Engine(CPU, 1)


def make_parts(folder, part, engine=ON_CPU):
    return Parts(folder, make_manifest(parts={"double": part}), engine)


def test_a_part_is_loaded_once_and_fed_in_the_dtype_it_declares(tmp_path):
    parts = make_parts(tmp_path, make_part(write_graph(tmp_path)))
    made = parts["double"].run(x=np.array([1.5, -2.0], np.float64))
    assert (made.dtype, made.tolist()) == (np.float16, [3.0, -4.0])
    assert parts["double"] is parts["double"]
    assert parts.providers() == {"double": CPU}


def test_a_moved_folder_still_runs(tmp_path):
    (tmp_path / "old").mkdir()
    part = make_part(write_graph(tmp_path / "old"))
    (tmp_path / "old").rename(tmp_path / "neu ö 名")
    assert make_parts(tmp_path / "neu ö 名", part)["double"].run(x=np.ones(2)).tolist() == [2, 2]


def test_one_changed_byte_is_refused_with_the_name_of_the_file(tmp_path):
    path = write_graph(tmp_path)
    part = make_part(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="double.onnx was changed"):
        make_parts(tmp_path, part)["double"]


def test_a_part_that_the_build_lacks_is_named_with_the_remedy(tmp_path):
    command = f"python optimize.py --checkpoint stand-in --output {tmp_path} .* --components audio_encoder"
    with pytest.raises(UserError, match=f"no audio_encoder; add it with {command}"):
        make_parts(tmp_path, make_part(write_graph(tmp_path)))["audio_encoder"]


def test_a_graph_that_is_not_what_the_manifest_says_is_refused(tmp_path):
    path = write_graph(tmp_path)
    with pytest.raises(UserError, match="no 'z'"):
        make_parts(tmp_path, make_part(path, outputs=("z",)))["double"]
    with pytest.raises(UserError, match="no 'codes'"):
        make_parts(tmp_path, make_part(path))["double"].run(codes=np.ones(2))


def test_a_file_that_is_no_graph_fails_with_its_name(tmp_path):
    path = tmp_path / "double.onnx"
    path.write_bytes(b"not a graph")
    with pytest.raises(WorkError, match="double.onnx cannot be loaded"):
        make_parts(tmp_path, make_part(path))["double"]


def test_a_type_that_numpy_lacks_is_refused(tmp_path):
    path = write_graph(tmp_path, TensorProto.DOUBLE)
    session = ort.InferenceSession(str(path), providers=[CPU])
    assert Graph(session, "double").run(x=np.ones(1, np.float32)).dtype == np.float64
    value = FakeSession({"x": "float32"}, {}, None)
    value.get_inputs = lambda: [type("V", (), {"name": "x", "type": "tensor(bfloat16)"})]
    with pytest.raises(UserError, match="bfloat16"):
        Graph(value, "double")


def test_a_kernel_that_fails_is_named_with_its_provider(tmp_path):
    graph = make_parts(tmp_path, make_part(write_graph(tmp_path)))["double"]
    with pytest.raises(WorkError, match="double failed on CPUExecutionProvider"):
        graph.run(x=np.ones((2, 2)))


@pytest.mark.parametrize("asked", ["cuda", "CUDAExecutionProvider", "dml", "coreml"])
def test_a_provider_that_is_not_installed_is_refused_with_asked_got_and_remedy(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CPU])
    engine = Engine.choose(asked, 1, False, "cpu")
    with pytest.raises(UserError) as error:
        open_session(write_graph(tmp_path), engine)
    for part in (engine.provider, "got nothing", f"available here: {CPU}", "pip install", "--allow-fallback"):
        assert part in str(error.value)


class QuietlyOnCpu(ort.InferenceSession):
    """What happens when the CUDA libraries are missing: the provider is listed, the session runs on the CPU."""

    def __init__(self, path, options, providers, enable_fallback):
        super().__init__(path, options, providers=[CPU])


def test_a_session_that_quietly_fell_back_to_the_cpu_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(ort, "InferenceSession", QuietlyOnCpu)
    monkeypatch.setattr(ort, "preload_dlls", lambda: None)
    path = write_graph(tmp_path)
    with pytest.raises(UserError, match=f"asked for {CUDA}, got {CPU}.*onnxruntime-gpu"):
        open_session(path, Engine(CUDA, 1))
    assert Graph(open_session(path, Engine(CUDA, 1, allow_fallback=True)), "double").provider == CPU


def test_fallback_on_request_runs_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CPU])
    parts = make_parts(tmp_path, make_part(write_graph(tmp_path)), Engine(CUDA, 1, allow_fallback=True))
    parts.load("double")
    assert parts.providers() == {"double": CPU}


def test_provider_names_may_be_short_full_and_of_any_case():
    assert full_name("cpu") == full_name("CPU") == full_name("cpuexecutionprovider") == CPU
    with pytest.raises(UserError, match="unknown provider 'gpu'; choose cpu, cuda"):
        full_name("gpu")


def test_threads_default_to_the_cores_that_may_be_used():
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        assert usable_cores() == 1
        assert Engine.choose(None, None, False, "cuda") == Engine(CUDA, 1)
    finally:
        os.sched_setaffinity(0, cores)
    with pytest.raises(UserError, match="--threads"):
        Engine.choose("cpu", 0, False, "cpu")


def test_threads_reach_the_session():
    options = run_session._options(Engine(CPU, 3))
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 1)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_dead_values_name_provider_and_remedy(value):
    graph = Graph(FakeSession({}, {}, None, provider=CUDA), "llm_decoder")
    with pytest.raises(WorkError, match=f"llm_decoder on {CUDA} returned .*diagnose_cuda.py.*--provider cpu"):
        check_alive(np.full(3, value), "hidden states", graph)
    assert check_alive(np.ones(3), "hidden states", graph).tolist() == [1, 1, 1]


def make_decoder(session):
    manifest = make_manifest()
    return Decoder(Graph(session, "llm_decoder"), manifest.kv_cache, manifest.dims)


@pytest.mark.parametrize("position_ids", [False, True])
def test_the_cache_is_carried_from_step_to_step(position_ids):
    decoder = make_decoder(decoder_session(position_ids))
    embeds = np.arange(24, dtype=np.float32).reshape(1, 6, 4)
    hidden, cache = decoder.prefill(embeds[:, :3])
    assert hidden.tolist() == [[embeds[0, :3].sum(0).tolist()]] and cache.length == 3
    for i in (3, 4, 5):
        hidden, cache = decoder.step(cache, embeds[:, i : i + 1])
        assert hidden.tolist() == [[embeds[0, : i + 1].sum(0).tolist()]] and cache.length == i + 1


def test_a_cache_can_be_continued_twice():
    decoder = make_decoder(decoder_session())
    _, cache = decoder.prefill(np.ones((1, 3, 4)))
    first, _ = decoder.step(cache, np.full((1, 1, 4), 5))
    decoder.step(cache, np.full((1, 1, 4), 9))
    again, _ = decoder.step(cache, np.full((1, 1, 4), 5))
    assert cache.length == 3
    assert first.tolist() == again.tolist() == [[[8.0] * 4]]


@pytest.mark.parametrize("hidden", [0.0, np.nan])
def test_a_dead_prompt_is_stopped_after_prefill(hidden):
    with pytest.raises(WorkError, match="llm_decoder on DmlExecutionProvider.*hidden states of the prompt"):
        make_decoder(decoder_session(hidden=hidden, provider="DmlExecutionProvider")).prefill(np.ones((1, 3, 4)))


def test_a_decoder_without_the_cache_that_the_manifest_names_is_refused():
    manifest = make_manifest()
    graph = Graph(decoder_session(), "llm_decoder")
    with pytest.raises(UserError, match="no 'past.0.key'"):
        Decoder(graph, dataclasses.replace(manifest.kv_cache, past_key="past.{}.key"), manifest.dims)
    with pytest.raises(UserError, match="cache is float32, the manifest says float16"):
        Decoder(graph, KVCache("float16", *dataclasses.astuple(manifest.kv_cache)[1:]), manifest.dims)


LIMITS = [("max 100000", 8), ("150000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8), ("?", 8), (None, 8)]


@pytest.mark.parametrize("text, cores", LIMITS)
def test_a_containers_limit_on_time_counts_as_cores(text, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(run_session.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(run_session, "CPU_LIMIT", tmp_path / "cpu.max")
    if text is not None:
        (tmp_path / "cpu.max").write_text(text)
    assert usable_cores() == cores


def test_parts_are_loaded_side_by_side_each_once_and_lookups_on_one_thread(tmp_path, monkeypatch):
    names = ("text_embed", "audio_embed", "llm_decoder", "audio_heads")
    made = {name: make_part(write_graph(tmp_path, name=name)) for name in names}
    threads = []
    monkeypatch.setattr(
        run_session, "open_session", lambda path, engine: threads.append((path.stem, engine.threads)) or open_session(path, engine)
    )
    parts = Parts(tmp_path, make_manifest(parts=made), Engine(CPU, 2))
    parts.load(*names)
    parts.load(*names)
    assert sorted(threads) == [("audio_embed", 1), ("audio_heads", 2), ("llm_decoder", 2), ("text_embed", 1)]
    assert set(parts.providers()) == set(names)


def test_a_part_that_cannot_be_loaded_stops_the_others_with_its_name(tmp_path):
    made = {name: make_part(write_graph(tmp_path, name=name)) for name in ("a", "b")}
    (tmp_path / "b.onnx").unlink()
    with pytest.raises(UserError, match="b.onnx is missing"):
        Parts(tmp_path, make_manifest(parts=made), Engine(CPU, 2)).load("a", "b")
    with pytest.raises(UserError, match="no c; add it"):
        Parts(tmp_path, make_manifest(parts=made), Engine(CPU, 2)).load("a", "c")
