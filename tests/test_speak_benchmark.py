"""benchmarks/speak.py: its stages run, its lines judge what they say, and a stage that fails is no figure."""

import json

import pytest

from benchmarks import speak as bench
from voxport.errors import DONE, FAILED
from voxport.manifest import Manifest


def stages(**changes):
    """Figures that just pass."""
    frames = {
        str(p): {kind: {"frames_per_second": f} for kind, f in (("loop", f), ("bare", 10), ("naive", 5))} | {"bytes": 1e9}
        for p, f in ((50, 10), (500, 8), (1500, 7.1))
    }
    whole = {
        "frames": {"positions": frames, "bandwidth_gb_per_second": 20},
        "batch": {str(size): {"frames_per_second": f} for size, f in ((1, 5), (4, 10))},
        "voice": {"first_time_first_row": 8.5, "saved_first_row": 1},
        "stream": {
            "steps_before_first_sound": 20,
            "equal_to_file": True,
            "decoder_mb": 1000,
            "memory": {"speaking_anonymous_mb": 1450, "cache_mb": 50},
        },
        "load_again": {"seconds": 3},
        "torch_bf16": {"loop": {"frames_per_second": 6}, "torch": {"frames_per_second": 2}},
    }
    return whole | changes


def test_figures_at_their_bounds_pass(capsys):
    lines = bench.judge(stages())
    assert all(line["passed"] for line in lines) and {line["acceptance"] for line in lines} == set("123456")
    bench.show(stages(), lines)
    assert "memory allows 20.00" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change, number",
    [
        ({"batch": {"1": {"frames_per_second": 5}, "4": {"frames_per_second": 9.9}}}, "2"),
        ({"voice": {"first_time_first_row": 7.9, "saved_first_row": 1}}, "3"),
        ({"stream": stages()["stream"] | {"steps_before_first_sound": 21}}, "4"),
        ({"stream": stages()["stream"] | {"equal_to_file": False}}, "4"),
        ({"load_again": {"seconds": 4.1}}, "5"),
        ({"stream": stages()["stream"] | {"memory": {"speaking_anonymous_mb": 1451, "cache_mb": 50}}}, "5"),
    ],
)
def test_a_figure_beyond_its_bound_is_missed(change, number):
    missed = [line["acceptance"] for line in bench.judge(stages(**change)) if not line["passed"]]
    assert missed == [number]


def test_a_stage_that_failed_is_unknown_and_not_passed(capsys):
    lines = bench.judge(stages(torch_bf16={"failed": "no torch"}, voice={}))
    assert [line["acceptance"] for line in lines if line["passed"] is None] == ["3", "6"]
    bench.show({}, lines)
    assert "unknown" in capsys.readouterr().out


def test_a_packed_body_has_its_codes_and_a_scale_and_a_sum_a_block(tiny_build, tiny_int4):
    dims = Manifest.read(tiny_int4).dims
    attention = 2 * dims.hidden_size * dims.head_dim * (dims.num_heads + dims.num_kv_heads)
    weights = dims.num_layers * (attention + 3 * dims.hidden_size * dims.intermediate_size)
    assert bench.packed_bytes(tiny_int4 / "llm_decoder.onnx") == weights // 32 * (16 + 4 + 4)
    assert bench.packed_bytes(tiny_build / "llm_decoder.onnx") == weights * 4


def test_every_stage_but_torch_runs_on_a_small_build(tiny_build, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "POSITIONS", (5, 7, 9))
    found = {name: stage(tiny_build, True) for name, stage in bench.STAGES.items() if not name.startswith("torch")}
    assert found["stream"]["equal_to_file"] and found["voice"]["equal_rows"]
    assert found["stream"]["steps_before_first_sound"] == 20
    assert set(json.loads(json.dumps(found["frames"]))["positions"]) == {"5", "7", "9"}


def test_the_script_writes_its_figures_and_survives_a_stage_that_fails(tiny_build, tmp_path, monkeypatch, capsys):
    def run(name, folder, quick, cache):
        return {"failed": "broken"} if name == "voice" else stages().get(name, {})

    monkeypatch.setattr(bench, "run_stage", run)
    out = tmp_path / "a.json"
    assert bench.main([str(tiny_build), "--out", str(out)]) == DONE
    told = json.loads(out.read_text(encoding="utf-8"))
    assert told["stages"]["voice"] == {"failed": "broken"} and told["build"]["target"]["precision"] == "fp32"
    monkeypatch.setattr(bench, "run_stage", lambda name, *rest: stages(load_again={"seconds": 9}).get(name, {}))
    assert bench.main([str(tiny_build)]) == FAILED


def test_a_stage_in_its_own_process_gives_its_figures_or_its_fault(tiny_build, tmp_path):
    assert bench.run_stage("load", tiny_build, True, str(tmp_path))["seconds"] > 0
    assert "manifest" in bench.run_stage("load", tmp_path, True, str(tmp_path))["failed"]


def test_pytorch_computes_a_frame_of_the_same_dims(tiny_build):
    import torch

    from benchmarks.torch_body import TorchBody

    manifest = Manifest.read(tiny_build)
    body = TorchBody(manifest.dims, manifest.audio, torch.float32, 4)
    logits = [body.frame(torch.ones(1, manifest.dims.hidden_size), position) for position in (0, 1)]
    assert logits[0].shape == (1, manifest.audio.num_codebooks * manifest.audio.vocab_size)
    assert all(torch.isfinite(each).all() for each in logits)
    assert all(layer.cache[:, :, :2].any() and not layer.cache[:, :, 2:].any() for layer in body.layers)
