"""The whole path on real ONNX parts: golden rows, codes and waveforms of the tiny checkpoint, by Python and by script."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from voxport.errors import UserError
from voxport.run.audio import load_reference, to_pcm16
from voxport.run.delay import apply_delay
from voxport.run.higgs import Speaker
from voxport.run.text import build_prompt

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / "golden/higgs/ckpt_tiny"
CODEC_FOLDER = Path(__file__).parent / "golden/higgs/codec_tiny"
CASES = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))["cases"] if FOLDER.is_dir() else []
GREEDY = {"temperature": 0, "max_frames": 53}


@pytest.fixture(scope="module")
def golden():
    with np.load(FOLDER / "expected.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def codec_golden():
    with np.load(CODEC_FOLDER / "expected.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def speaker(tiny_build):
    return Speaker.load(tiny_build)


def speak(speaker, case, golden, **options):
    voice = (golden["ref_sig"].astype(np.float32), 24000) if case["clone"] else None
    return speaker.speak(case["text"], ref_audio=voice, ref_text=case["ref_text"], **(GREEDY | options))


def compare(speech, case, golden, kind):
    name = case["name"]
    assert speech.prompt_ids.tolist() == golden[f"ids__{name}"].tolist()
    assert speech.rows.tolist() == golden[f"{kind}__rows__{name}"].tolist()
    assert speech.codes.tolist() == golden[f"{kind}__codes__{name}"].tolist()
    assert speech.finish_reason == case[kind]["finish_reason"]
    if case["clone"]:
        assert speech.reference_codes.tolist() == golden["ref_codes"].tolist()
    np.testing.assert_allclose(speech.samples, golden[f"{kind}__wav__{name}"], atol=1e-4)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_default_build_speaks_the_golden_rows(case, speaker, golden):
    compare(speak(speaker, case, golden), case, golden, "bf16")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_build_with_exact_rope_tables_speaks_its_own_golden_rows(case, tiny_build_exact, golden):
    compare(speak(Speaker.load(tiny_build_exact), case, golden), case, golden, "exact")


@pytest.mark.parametrize("num_threads", [1, 2])
def test_golden_rows_do_not_depend_on_the_number_of_threads(num_threads, tiny_build, golden):
    case = CASES[1]
    compare(speak(Speaker.load(tiny_build, threads=num_threads), case, golden), case, golden, "bf16")


def test_prompt_embeddings_equal_the_golden_ones(speaker, golden):
    rows = apply_delay(golden["ref_codes"], speaker.manifest.audio)
    assert rows.tolist() == golden["ref_rows"].tolist()
    for case in CASES:
        prompt = build_prompt(
            speaker.tokenizer, speaker.manifest.tokens, case["text"], case["ref_text"], len(rows) if case["clone"] else 0
        )
        made = speaker.embed_prompt(prompt, rows)
        np.testing.assert_allclose(made[0], golden[f"prompt_embeds__{case['name']}"], atol=1e-6)


def test_the_hidden_state_and_logits_of_the_first_row_equal_the_golden_ones(speaker, golden):
    for case in CASES:
        hidden, _ = speaker.decoder.prefill(golden[f"prompt_embeds__{case['name']}"][None])
        np.testing.assert_allclose(hidden[0, 0], golden[f"bf16__hidden__{case['name']}"][0], atol=2e-3)
        logits = speaker.parts["audio_heads"].run(hidden_states=hidden)[0, 0]
        np.testing.assert_allclose(logits, golden[f"bf16__logits0__{case['name']}"], atol=2e-3)


def test_references_of_any_rate_give_the_golden_codes(speaker, codec_golden):
    seen = 0
    for name in codec_golden:
        if not name.startswith("ref_sig_"):
            continue
        rate = int(name.split("_")[2])
        reference = load_reference(
            (codec_golden[name].astype(np.float32), rate), speaker.manifest.codec, speaker.manifest.limits
        )
        expected = codec_golden[name.replace("sig", "codes")]
        assert speaker.codec.encode(reference.samples).tolist() == expected.tolist(), name
        seen += 1
    assert seen


def test_golden_codes_and_waveforms_of_the_codec(speaker, codec_golden):
    for name, array in codec_golden.items():
        if name.startswith("sig_"):
            assert (
                speaker.codec.encode(array.astype(np.float32)).T.tolist()
                == codec_golden[name.replace("sig", "codes")].tolist()
            )
        if name.startswith("dec_codes_"):
            expected = codec_golden[name.replace("codes", "wav")]
            np.testing.assert_allclose(speaker.codec.decode(array.T), expected, atol=1e-4)


def run_script(*arguments, cwd=ROOT, code=None, **environment):
    """inference.py in a process of its own; `code` runs first in that process."""
    command = [sys.executable, str(ROOT / "inference.py")]
    if code:
        start = f"import runpy\nrunpy.run_path({str(ROOT / 'inference.py')!r}, run_name='__main__')"
        command = [sys.executable, "-c", f"{code}\n{start}"]
    whole = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(
        [*command, *map(str, arguments)], cwd=cwd, env=whole, capture_output=True, encoding="utf-8", timeout=120
    )


BLOCKED = "torch transformers torchaudio librosa scipy safetensors onnx olive onnxruntime_genai soxr".split()
BLOCKER = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {BLOCKED!r}:
            raise ImportError(name + ' is blocked')
sys.meta_path.insert(0, Blocker())
try:
    import torch
except ImportError:
    pass
else:
    raise SystemExit('the blocker does not block')
"""


def write_voice(folder, golden):
    soundfile.write(folder / "voice.wav", golden["ref_sig"].astype(np.float32), 24000, subtype="FLOAT")
    return folder / "voice.wav"


@pytest.mark.parametrize("case", [CASES[1], CASES[3]] if CASES else [], ids=["zero-shot", "clone"])
def test_the_script_speaks_and_clones_without_the_build_side_installed(case, tiny_build, golden, tmp_path):
    clone = ["--ref-audio", write_voice(tmp_path, golden), "--ref-text", case["ref_text"]] if case["clone"] else []
    done = run_script(
        "--text",
        case["text"],
        "--out",
        tmp_path / "x.wav",
        "--model-path",
        tiny_build,
        "--temperature",
        0,
        "--max-frames",
        53,
        "--save-codes",
        tmp_path / "x.npz",
        "--json",
        *clone,
        code=BLOCKER,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["finish_reason"] == case["bf16"]["finish_reason"] and report["rows"] == case["bf16"]["rows"]
    name = case["name"]
    with np.load(tmp_path / "x.npz") as saved:
        assert saved["prompt_ids"].tolist() == golden[f"ids__{name}"].tolist()
        assert saved["rows"].tolist() == golden[f"bf16__rows__{name}"].tolist()
        assert saved["codes"].tolist() == golden[f"bf16__codes__{name}"].tolist()
        assert ("reference_codes" in saved) == case["clone"]
    written, rate = soundfile.read(tmp_path / "x.wav", dtype="int16")
    wav = golden[f"bf16__wav__{name}"]
    fade = round(report["fade_seconds"] * rate)
    assert (
        len(written) == len(wav)
        and np.abs(written[: len(wav) - fade] - to_pcm16(wav)[: len(wav) - fade].astype(int)).max() <= 4
    )
    told = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
    assert len(told) == 1 and f"seed {report['seed']}" in told[0]


def test_the_same_seed_gives_the_same_file_in_two_processes(tiny_build, tmp_path):
    digests = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        done = run_script(
            "--text",
            "Hello there",
            "--out",
            tmp_path / f"{name}.wav",
            "--model-path",
            tiny_build,
            "--seed",
            seed,
            "--max-frames",
            30,
        )
        assert done.returncode == 0, done.stderr
        digests.append(hashlib.sha256((tmp_path / f"{name}.wav").read_bytes()).hexdigest())
    assert digests[0] == digests[1] != digests[2]


def test_a_moved_folder_speaks_and_a_changed_byte_is_refused_by_name(tiny_build, golden, tmp_path):
    moved = shutil.copytree(tiny_build, tmp_path / "an other place ö")
    case = CASES[1]
    compare(speak(Speaker.load(moved), case, golden), case, golden, "bf16")
    for name in ("llm_decoder.onnx", "llm_decoder.onnx.data", "tokenizer.json"):
        path = moved / name
        original = path.read_bytes()
        changed = bytearray(original)
        changed[len(changed) // 2] ^= 1
        path.write_bytes(changed)
        with pytest.raises(UserError, match=f"{name} was changed"):
            Speaker.load(moved).speak("Hello")
        path.write_bytes(original)


def test_the_self_test_reads_every_file_and_finds_a_changed_one(tiny_build, tmp_path):
    done = run_script("--selftest", "--json", "--model-path", tiny_build)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["selftest"]
    manifest = Speaker.load(tiny_build).manifest
    assert report["samples"] == report["frames"] * manifest.codec.hop_length and 0 < report["peak"]
    moved = shutil.copytree(tiny_build, tmp_path / "moved")
    (moved / "audio_encoder.onnx").write_bytes(b"short")
    done = run_script("--selftest", "--model-path", moved)
    assert done.returncode == 2 and "audio_encoder.onnx has 5 bytes" in done.stderr


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_any_text_speaks_on_a_console_that_cannot_print_it(encoding, tiny_build, tmp_path):
    out = tmp_path / "你好 🙂.wav"
    done = run_script(
        "--text",
        "你好 🙂 Łódź",
        "--out",
        out,
        "--model-path",
        tiny_build,
        "--max-frames",
        20,
        "--json",
        PYTHONIOENCODING=encoding,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["text"] == "你好 🙂 Łódź" and out.is_file()


def test_the_only_build_is_found_and_two_are_listed(tiny_build, tmp_path):
    arguments = ["--selftest"]
    assert "no build under" in run_script(*arguments, cwd=tmp_path).stderr
    shutil.copytree(tiny_build, tmp_path / "onnx/cpu_fp32")
    assert run_script(*arguments, cwd=tmp_path).returncode == 0
    shutil.copytree(tiny_build, tmp_path / "onnx/cpu_two")
    done = run_script(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and "onnx/cpu_fp32, onnx/cpu_two" in done.stderr
