"""diagnose_cuda.py: names part, operator and node that a provider computes wrong, without a GPU."""

import json

import numpy as np
import onnxruntime as ort
import pytest
from conftest import run_cli

import diagnose_cuda
from voxport.errors import run_script
from voxport.judge.diagnose import Dissection, Lab, compare, judge_parts, open_model, silence
from voxport.run.session import CPU, CUDA

GQA = "/model/layers.0/attn/GroupQueryAttention"
Q_NORM = "/model/layers.2/attn/q_norm/SimplifiedLayerNormalization"


def diagnose(build, tmp_path, *flags) -> int:
    return run_script(diagnose_cuda.main, ["--model-path", str(build), "--save", str(tmp_path / "node.npz"), *flags])


@pytest.mark.parametrize("target, part, op, node", [
    ("GroupQueryAttention", "llm_decoder", "GroupQueryAttention", GQA),
    ("MatMulNBits", "llm_decoder", "MatMulNBits", "/model/layers.0/attn/qkv_proj/MatMulNBits"),
    ("SkipSimplifiedLayerNormalization", "llm_decoder", "SkipSimplifiedLayerNormalization",
     "/model/layers.0/post_attention_layernorm/SkipLayerNorm"),
    (Q_NORM, "llm_decoder", "SimplifiedLayerNormalization", Q_NORM),  # not even out of the part's tolerance
    ("Sigmoid", "llm_decoder", "Sigmoid", "/model/layers.0/mlp/act_fn/Sigmoid"),  # lies between watched operators
    ("Sin", "audio_tokenizer", "Sin", None),
    ("Softmax", "audio_encoder", "Softmax", None),
])  # fmt: skip
def test_a_stand_in_is_convicted_by_op_and_node(target, part, op, node, tiny_int4, tmp_path, capsys):
    assert diagnose(tiny_int4, tmp_path, "--rehearse", target, "--json") == 1
    printed = capsys.readouterr()
    found = json.loads(printed.out)["node"]
    assert (found["part"], found["op"]) == (part, op) and found["name"] == (node or found["name"])
    assert f"verdict: {op} is wrong on the stand-in" in printed.err and found["name"] in printed.err
    assert found["fault"] == "only zeros"


def test_the_jetson_case_gets_its_remedy_and_the_runtime_is_described(tiny_int4, tmp_path, capsys):
    assert diagnose(tiny_int4, tmp_path, "--rehearse", "GroupQueryAttention") == 1
    printed = capsys.readouterr().out
    assert "CMAKE_CUDA_ARCHITECTURES=87" in printed and "--provider cpu" in printed
    assert ort.get_build_info().strip() in printed and f"onnxruntime {ort.__version__}" in printed
    assert "llm_decoder      DIFFERS" in printed and "audio_heads      agrees" in printed


def test_what_is_kept_shows_the_fault_on_its_own(tiny_int4, tmp_path):
    diagnose(tiny_int4, tmp_path, "--rehearse", "MatMulNBits")
    with np.load(tmp_path / "node.npz") as kept:
        session = ort.InferenceSession(kept["model"].tobytes(), providers=[CPU])
        feeds = {str(name): kept[f"input_{i}"] for i, name in enumerate(kept["input_names"])}
        assert np.array_equal(session.run(None, feeds)[0], kept["cpu"])
        assert kept["cpu"].any() and not kept["provider"].any()


def test_without_cuda_one_line_and_two(tiny_int4, tmp_path):
    if CUDA in ort.get_available_providers():
        pytest.skip("this machine has CUDA")
    done = run_cli("diagnose_cuda.py", "--model-path", tiny_int4, "--save", tmp_path / "x.npz")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "no CUDAExecutionProvider on this machine" in done.stderr


def test_the_cpu_agrees_with_itself_and_nothing_is_kept(tiny_int4, tmp_path, capsys):
    assert diagnose(tiny_int4, tmp_path, "--provider", "cpu") == 0
    assert "computes this build as the CPU does" in capsys.readouterr().out
    assert not (tmp_path / "node.npz").exists()


@pytest.mark.parametrize("flags, message", [
    (["--rehearse", "Bogus"], "no node of"),
    (["--provider", "gpu"], "unknown provider"),
    (["--save", "x.txt"], "must end in .npz"),
])  # fmt: skip
def test_wrong_input_ends_with_two(flags, message, tiny_int4, tmp_path, capsys):
    assert diagnose(tiny_int4, tmp_path, *flags) == 2
    assert message in capsys.readouterr().err


class Broken:
    """A session whose kernel gives up."""

    def __init__(self, session):
        self.session = session

    def __getattr__(self, name):
        return getattr(self.session, name)

    def run(self, names, feeds):
        raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")


def test_a_kernel_that_fails_is_found_among_those_that_run(tiny_int4):
    def opener(model, folder, provider):
        session = open_model(model, folder, CPU)
        fails = provider == CUDA and any(node.name == GQA for node in model.graph.node)
        return Broken(session) if fails else session

    lab = Lab(tiny_int4, CUDA, opener)
    findings = {f.part: f.difference for f in judge_parts(lab)}
    assert "CUDNN_STATUS" in findings["llm_decoder"].fault and not findings["audio_heads"].is_wrong
    assert Dissection(lab, "llm_decoder").find().node.name == GQA


def test_a_fault_that_no_operator_has_alone_is_blamed_on_the_whole(tiny_int4, tmp_path, capsys, monkeypatch):
    def opener(model, folder, provider):
        is_whole = provider == CUDA and len(model.graph.node) > 1
        return open_model(silence(model, "GroupQueryAttention") if is_whole else model, folder, CPU)

    monkeypatch.setattr(diagnose_cuda, "stand_in", lambda target, provider: opener)
    assert diagnose(tiny_int4, tmp_path, "--rehearse", "GroupQueryAttention") == 1
    assert "though each operator that was tried is right alone" in capsys.readouterr().out


def test_differences_are_told_by_what_they_look_like():
    truth = np.arange(1.0, 7.0, dtype=np.float32)
    assert not compare(truth * 1.001, truth, 0.01).is_wrong
    assert compare(truth * 1.1, truth, 0.01).is_wrong
    assert compare(truth * 0, truth, 2.0).fault == "only zeros"
    assert compare(truth * np.nan, truth, 2.0).fault == "NaN or Inf"
    assert "shape" in compare(truth[:3], truth, 2.0).fault
    assert not compare(truth * 0, truth * 0, 0.0).is_wrong
    assert compare(np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5]), 0.2).error == 0.25
    assert not compare(np.zeros((1, 0)), np.zeros((1, 0)), 0.0).is_wrong
