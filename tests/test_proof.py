"""The build's own proof: a clean build gives it again, a damaged one is refused by name, and it is asked once a place."""

import dataclasses
import json
import math
import random
import sys

import numpy as np
import pytest
from conftest import ROOT, TINY, build
from faults import Graph as Damage
from faults import copy_build, repair_manifest

import inference
from voxport.build.folder import BuildFolder
from voxport.build.prove import find_edge, prove
from voxport.errors import WorkError, run_script
from voxport.files import read_json, sha256_file
from voxport.manifest import MANIFEST_NAME, Manifest
from voxport.run import proof, trust
from voxport.run.higgs import Speaker
from voxport.run.higgs_proof import TASKS, Replay, entry_codes
from voxport.run.proof import FAIL, FULL, NOT_JUDGED, OK, QUICK, judge_task, replay
from voxport.run.session import Engine, Parts
from voxport.run.trust import Trust

CUDA = "CUDAExecutionProvider"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of this test's own."""
    monkeypatch.setenv("VOXPORT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def copy(tiny_int4, tmp_path):
    return copy_build(tiny_int4, tmp_path / "copy")


def open_parts(folder, threads=None) -> Parts:
    manifest = Manifest.read(folder)
    return Parts(folder, manifest, Engine("CPUExecutionProvider", threads or manifest.proof.threads))


def verdicts(folder, depth=FULL, names=None) -> dict[tuple[str, str], proof.Verdict]:
    parts = open_parts(folder)
    return {(v.part, v.what): v for v in replay(parts, parts.manifest, depth, names)}


def find_tensor(part: str, damage: Damage) -> str:
    """A tensor of each kind that the acceptance names."""
    if part == "llm_decoder":
        return damage.nodes("MatMulNBits")[4].input[2]
    if part in ("audio_tokenizer", "audio_encoder"):
        return next(name for name in damage.tensors if name.endswith("block.1.res_unit2.conv1.weight"))
    return max(damage.tensors, key=lambda name: math.prod(damage.tensors[name].dims))


def change_byte(folder, part: str, byte: int, flip: int, place: int = 1000) -> None:
    """Flip bits of one byte (0 the lowest) of one number, and record the damaged file as if it were right."""
    damage = Damage(folder, part)
    numbers = damage.array(find_tensor(part, damage))
    raw = numbers.reshape(-1).view(np.uint8).reshape(-1, numbers.itemsize)
    raw[place % len(raw), byte] ^= flip
    numbers.flush()
    repair_manifest(folder)


def verify(*arguments) -> int:
    return run_script(inference.main, ["--verify", *map(str, arguments)])


def test_the_manifest_carries_a_small_proof_with_a_question_for_every_part(tiny_int4):
    manifest = Manifest.read(tiny_int4)
    assert {task.name for task in TASKS} == manifest.proof.figures.keys()
    assert {task.part for task in TASKS} == {task.part for task in TASKS if task.depth == QUICK} == manifest.parts.keys()
    assert (tiny_int4 / MANIFEST_NAME).stat().st_size < 150_000
    assert len(manifest.proof.prompt_ids) < 40
    first = manifest.proof.figures["audio_heads: first step"]
    assert all(values[:8] == sorted(values[:8], reverse=True) for values in first.values)


def test_a_clean_build_verifies_to_the_bit_and_says_so_for_every_part(tiny_int4, capsys):
    assert verify("--model-path", tiny_int4, "--json") == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)["verify"]
    assert len(report) == len(TASKS) and {row["state"] for row in report} == {OK}
    assert {row["says"] for row in report} == {"the same to the bit"}
    assert all(row["part"] in printed.err for row in report)


def test_a_body_too_large_to_be_packed_is_proved_from_its_file_and_verifies_to_the_bit(tiny_build, tmp_path, monkeypatch, capsys):
    folder = copy_build(tiny_build, tmp_path / "copy")
    monkeypatch.setattr("voxport.build.prove.PACKED_BYTES", 0)
    manifest = Manifest.read(folder)
    dataclasses.replace(manifest, proof=prove(folder, manifest)).write(folder)
    assert "llm_decoder" in Manifest.read(folder).proof.unpacked and manifest.proof.unpacked == []
    assert verify("--model-path", folder) == 0
    assert "answers as the build proved them" in capsys.readouterr().out
    change_byte(folder, "audio_heads", byte=3, flip=0x04)
    assert verify("--model-path", folder) == 1


def test_where_weights_are_packed_an_unpacked_proof_is_held_to_a_tolerance(tiny_build):
    parts = open_parts(tiny_build)
    told = dataclasses.replace(parts.manifest.proof, unpacked=["llm_decoder"])
    assert not proof.is_home(told, parts["llm_decoder"], told.threads) and proof.is_home(told, parts["audio_heads"], told.threads)


def test_only_the_graphs_that_a_question_needs_are_held_while_all_are_asked(tiny_int4):
    held, parts = [], open_parts(tiny_int4)
    for _ in replay(parts, parts.manifest, FULL):
        held.append(set(parts.providers()))
    assert max(map(len, held)) <= 3 and {"audio_encoder", "audio_tokenizer"} in held
    assert all("llm_decoder" not in names for names in held[-6:])


@pytest.mark.parametrize("part", ["llm_decoder", "audio_heads", "audio_tokenizer"])
def test_a_changed_exponent_under_a_repaired_hash_is_refused_naming_the_part(part, copy, capsys):
    change_byte(copy, part, byte=3, flip=0x04)
    assert verify("--model-path", copy) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith(f"error: {part} does not compute what this build proved") and "build it again" in last


@pytest.mark.parametrize("part", ["llm_decoder", "audio_heads", "audio_tokenizer"])
def test_it_does_not_even_speak(part, copy, cache, capsys):
    change_byte(copy, part, byte=3, flip=0x04)
    arguments = ["--model-path", copy, "--text", "Hello", "--out", copy / "x.wav", "--max-frames", "4"]
    assert run_script(inference.main, [str(a) for a in arguments]) == 1
    assert f"error: {part} does not compute" in capsys.readouterr().err
    assert not (copy / "x.wav").exists() and not cache.exists()
    assert len(Speaker.load(copy, verify=False).speak("Hello", max_frames=4).codes) > 0


@pytest.mark.parametrize("part, byte", [
    ("text_embed", 0), ("audio_embed", 2), ("audio_heads", 0), ("audio_tokenizer", 1), ("audio_encoder", 3), ("llm_decoder", 1),
])  # fmt: skip
def test_bytes_below_the_exponent_are_seen_too_where_the_proof_was_written(part, byte, copy):
    change_byte(copy, part, byte, flip=0x5A, place=31_007)
    assert FAIL in {v.state for v in verdicts(copy, names=[part]).values()}


def test_what_a_failed_part_feeds_is_not_judged(copy):
    damage = Damage(copy, "text_embed")
    rows = damage.array(find_tensor("text_embed", damage))
    rows[Manifest.read(copy).proof.prompt_ids[0]] += 1
    rows.flush()
    repair_manifest(copy)
    found = verdicts(copy, QUICK)
    assert found["text_embed", "prompt"].state == FAIL
    assert found["llm_decoder", "prompt"].state == found["audio_heads", "first step"].state == NOT_JUDGED
    assert found["audio_heads", "noise"].state == found["audio_tokenizer", "frames"].state == OK


def test_another_machine_may_round_otherwise_but_not_be_wrong(copy, monkeypatch):
    change_byte(copy, "llm_decoder", byte=0, flip=0x10)  # a scale's lowest byte: as small as rounding
    assert verdicts(copy, QUICK, ["llm_decoder"])["llm_decoder", "prompt"].state == FAIL
    monkeypatch.setattr(proof, "machine_name", lambda: "another")
    far = verdicts(copy, QUICK, ["llm_decoder"])["llm_decoder", "prompt"]
    assert far.state == OK and 0 < far.error < far.allowed == proof.OTHER_MACHINE["int4"]
    change_byte(copy, "llm_decoder", byte=3, flip=0x40)  # the same scale times 2**128
    assert verdicts(copy, QUICK, ["llm_decoder"])["llm_decoder", "prompt"].state == FAIL


@pytest.mark.parametrize("threads", [1, 3])
def test_other_thread_counts_are_held_to_a_tolerance(threads, tiny_int4, capsys):
    assert verify("--model-path", tiny_int4, "--threads", threads) == 0


class Elsewhere:
    """The parts as another provider would compute them: `bend` changes the floating-point answers of one part."""

    def __init__(self, parts: Parts, bent: str, bend):
        self.parts, self.bent, self.bend, self.engine = parts, bent, bend, parts.engine

    def __getitem__(self, name):
        graph = self.parts[name]
        if name == self.bent:
            graph.provider = CUDA
            session, graph.session = graph.session, self
            self.run = lambda names, feeds: [self.bend(x) if x.dtype.kind == "f" else x for x in session.run(names, feeds)]
            self.bent = None
        return graph


@pytest.mark.parametrize("bend, state", [
    (lambda x: x * np.float32(1.001), OK),
    (lambda x: x + 0.2 * x.std() * np.random.default_rng(0).standard_normal(x.shape).astype(x.dtype), OK),
    (np.zeros_like, FAIL),
    (lambda x: np.full_like(x, np.nan), FAIL),
    (lambda x: x[..., ::-1].copy(), FAIL),
])  # fmt: skip
def test_another_provider_may_be_fp16_but_not_zeros(bend, state, tiny_int4):
    parts = open_parts(tiny_int4)
    ask = Elsewhere(parts, "llm_decoder", bend)
    task = next(t for t in TASKS if t.name == "llm_decoder: prompt")
    known = parts.manifest.proof
    verdict = judge_task(task, Replay(ask, parts.manifest, known.prompt_ids, known.reference_codes, known.edges), known)
    assert verdict.state == state and verdict.provider == CUDA
    if state == FAIL:
        assert "diagnose_cuda.py" in proof.explain(verdict, known) and "llm_decoder" in proof.explain(verdict, known)


def count_replays(monkeypatch) -> list[list[str]]:
    asked = []

    def counting(parts, manifest, depth, names):
        asked.append(sorted(names))
        return replay(parts, manifest, depth, names)

    monkeypatch.setattr(trust, "replay", counting)
    return asked


def test_parts_are_asked_once_a_place_and_only_those_that_are_needed(tiny_int4, cache, monkeypatch):
    asked, parts = count_replays(monkeypatch), open_parts(tiny_int4)
    Trust(parts, parts.manifest).require("audio_heads", "text_embed")
    Trust(parts, parts.manifest).require("text_embed", "audio_heads")
    Trust(parts, parts.manifest).require("text_embed", "audio_encoder")
    assert asked == [["audio_heads", "text_embed"], ["audio_encoder"]]
    monkeypatch.setattr(trust, "runtime_name", lambda: "another")
    Trust(parts, parts.manifest).require("text_embed")
    monkeypatch.setattr(trust, "machine_name", lambda: "another")
    Trust(parts, parts.manifest).require("text_embed")
    assert asked[2:] == [["text_embed"], ["text_embed"]]


def test_another_build_is_asked_anew(tiny_int4, cache):
    manifest = Manifest.read(tiny_int4)
    part = manifest.parts["text_embed"]
    files = {name: dataclasses.replace(record, sha256="0" * 64) for name, record in part.files.items()}
    other = dataclasses.replace(manifest, parts=manifest.parts | {"text_embed": dataclasses.replace(part, files=files)})
    assert trust.build_key(manifest) != trust.build_key(other)
    assert trust.Entry(manifest).path != trust.Entry(other).path


@pytest.mark.parametrize("spoil", [
    lambda path: path.write_text("{", encoding="utf-8"),
    lambda path: path.write_bytes(b"\xff\x00"),
    lambda path: path.write_text("[]", encoding="utf-8"),
    lambda path: path.write_text(json.dumps(read_json(path, "") | {"passed": 3}), encoding="utf-8"),
    lambda path: path.write_text(json.dumps({"key": {}, "passed": ["text_embed on CPUExecutionProvider"]}), encoding="utf-8"),
    lambda path: (path.unlink(), path.mkdir()),
])  # fmt: skip
def test_a_stale_or_broken_entry_counts_as_none(spoil, tiny_int4, cache, monkeypatch):
    asked, parts = count_replays(monkeypatch), open_parts(tiny_int4)
    Trust(parts, parts.manifest).require("text_embed")
    spoil(next(cache.rglob("*.json")))
    Trust(parts, parts.manifest).require("text_embed")
    assert len(asked) == 2


@pytest.mark.parametrize("spoil", [
    lambda patch, path: patch.setenv("VOXPORT_CACHE", str(path)),  # a file stands where the folder would be
    lambda patch, path: patch.setattr(trust, "cache_folder", lambda: None),
])  # fmt: skip
def test_without_a_cache_it_is_asked_once_a_process(spoil, tiny_int4, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("", encoding="utf-8")
    spoil(monkeypatch, tmp_path / "file")
    asked, parts = count_replays(monkeypatch), open_parts(tiny_int4)
    for _ in range(2):
        held = Trust(parts, parts.manifest)
        held.require("text_embed")
        held.require("text_embed")
    assert len(asked) == 2


def test_the_cache_lies_where_the_system_keeps_such_things(monkeypatch, tmp_path):
    monkeypatch.delenv("VOXPORT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert trust.cache_folder() == tmp_path / "voxport"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(trust.sys, "platform", "linux")
    monkeypatch.setattr(trust.Path, "home", lambda: tmp_path)
    assert trust.cache_folder() == tmp_path / ".cache" / "voxport"

    def homeless():
        raise RuntimeError("no home")

    monkeypatch.setattr(trust.Path, "home", homeless)
    assert trust.cache_folder() is None


def test_a_build_without_a_proof_speaks_but_cannot_be_verified(copy, capsys):
    dataclasses.replace(Manifest.read(copy), proof=None).write(copy)
    assert len(Speaker.load(copy).speak("Hello", max_frames=4).codes) > 0
    assert verify("--model-path", copy) == 2
    assert "carries no proof" in capsys.readouterr().err


def test_a_proof_of_other_questions_is_not_replayed(copy, cache, capsys):
    manifest = Manifest.read(copy)
    dataclasses.replace(manifest, proof=dataclasses.replace(manifest.proof, version=99)).write(copy)
    assert verify("--model-path", copy) == 2
    assert "version 99" in capsys.readouterr().err


def test_a_new_part_drops_the_proof_and_a_finished_build_gets_one(copy, tmp_path):
    before = Manifest.read(copy).proof
    with BuildFolder(copy, Manifest.read(copy)) as folder:
        assert folder.manifest.proof == before
        part = folder.manifest.parts["text_embed"]
        for name in part.files:
            (tmp_path / name).write_bytes((copy / name).read_bytes())
        folder.install("text_embed", tmp_path / part.graph, dataclasses.replace(part, files={}, recipe={}))
        assert folder.manifest.proof is None
    build(TINY, copy, "--precision", "int4")
    assert Manifest.read(copy).proof.figures == before.figures


def splitmix64(seed: int, count: int) -> list[int]:
    """The published generator, one number at a time."""
    numbers, mask = [], (1 << 64) - 1
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        x = seed
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        numbers.append(x ^ (x >> 31))
    return numbers


def test_random_questions_are_those_of_the_published_generator():
    assert splitmix64(0, 1) == [0xE220A8397B1DCDAF]
    seed = int.from_bytes(proof.hashlib.sha256(b"any").digest()[:8], "little")
    assert proof.scramble("any", 5).tolist() == splitmix64(seed, 5)
    assert abs(proof.noise("n", 10_000).std() - 1) < 0.02


def test_every_entry_of_every_codebook_is_asked_for():
    codes = entry_codes(8, 1024)
    assert all(sorted(codes[:, k]) == list(range(1024)) for k in range(8))


@pytest.mark.parametrize("size", [1e-4, 1e-2, 0.3])
def test_the_estimated_error_is_the_true_one_within_a_factor_of_two(size):
    task, rng = TASKS[0], np.random.default_rng(1)
    truth = rng.standard_normal((20, 500))
    bent = truth + size * rng.standard_normal(truth.shape)
    expected = proof.take_figure(task, truth)
    error = proof.measure_error(proof.take_figure(task, bent, expected.places), expected)
    assert size / 2 < error < 2.5 * size


def test_an_edge_lies_where_the_answer_changes():
    low, high = find_edge(lambda factor: np.array([factor > 0.3, factor > 0.7]))
    assert low <= 0.3 < high and high - low < 1e-6
    assert find_edge(lambda factor: np.zeros(2)) == [0.0, 1.0]


def test_a_kernel_that_fails_is_a_failed_part(tiny_int4):
    parts = open_parts(tiny_int4)
    parts["audio_heads"].run = lambda **feeds: (_ for _ in ()).throw(WorkError("audio_heads failed on it"))
    found = {v.what: v for v in replay(parts, parts.manifest, QUICK, ["audio_heads"])}
    assert found["noise"].state == FAIL and "failed on it" in found["noise"].says


def test_the_measured_detection_rate_counts_what_was_changed_and_puts_it_back(copy, tmp_path):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import proof_detection

    digest = lambda: [sha256_file(path) for path in sorted(copy.iterdir())]
    before, bench = digest(), proof_detection.Bench(copy)
    change = bench.change(random.Random(5))
    assert digest() == before and change.part in bench.manifest.parts
    read, padding = (dataclasses.replace(change, meaning=meaning) for meaning in ("float32 low mantissa", proof_detection.PADDING))
    figures = proof_detection.summarise([read, padding])
    assert figures["all"]["changes"] == 2 and figures["bytes that the proof's graphs read"]["changes"] == 1
    places = bench.maps["llm_decoder"]
    assert proof_detection.describe(places, max(end for _, end, _ in places) + 1, 10) == ("", proof_detection.PADDING)
    start = next(start for start, _, tensor in places if tensor.name == "cos_cache")
    row = 4 * next(tensor.dims[1] for _, _, tensor in places if tensor.name == "cos_cache")
    assert proof_detection.describe(places, start + 9 * row + 3, 10) == ("cos_cache", "float32 sign and exponent")
    assert proof_detection.describe(places, start + 10 * row, 10) == ("cos_cache", proof_detection.UNREACHED)
