"""How fast a build speaks here, and what it could reach at best: load, prefill, frames, batch, stream, voices, codec, memory.

    python benchmarks/speak.py onnx/cpu_int4 --out benchmarks/speak.json

Each stage runs in a process of its own, so that its memory is its own; what is compared with each other takes turns within one
stage. `--quick` takes few repetitions. Random weights are as good as trained ones for all of this. The lines of acceptance are
meant for the published size: in a small model the same fraction of a millisecond of sampling is most of a frame.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.machine import describe_machine
from voxport.errors import DONE, FAILED, run_script, say
from voxport.files import write_json
from voxport.manifest import Manifest
from voxport.run import session
from voxport.run.batch import Batch, Performance
from voxport.run.codec import DECODER, ENCODER
from voxport.run.higgs import AUDIO_EMBED, BODY, HEADS, TEXT_EMBED, Speaker
from voxport.run.request import Wish, check_wish
from voxport.run.session import usable_cores
from voxport.run.speech import Stopwatch
from voxport.run.stream import schedule
from voxport.run.take import Take
from voxport.run.voices import Shelf

POSITIONS = (50, 500, 1500)
BATCHES = (1, 2, 4, 8)
ROUNDS, QUICK_ROUNDS = 12, 4  # frames timed at each place; the median counts
SENTENCE = "Hello there, this is a short sentence."
REFERENCE_SECONDS = 10
CODEC_FRAMES = 100
MEGABYTE = 1e6


def memory() -> dict[str, float]:
    """MB of this process now: `anonymous` is its own, `file` is mapped from files and can be dropped at any time; `peak` of both."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines() if sys.platform == "linux" else []
    held = {line.split(":")[0]: int(line.split()[1]) * 1024 / MEGABYTE for line in lines if line.startswith("Rss")}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MEGABYTE
    return {"anonymous_mb": held.get("RssAnon", 0.0), "file_mb": held.get("RssFile", 0.0), "peak_mb": peak}


class Watcher(threading.Thread):
    """Notes the largest anonymous memory while it runs."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most, self.over = 0.0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.02):
            self.most = max(self.most, memory()["anonymous_mb"])


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def take_turns(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, called in turn so that whatever else the machine does meets all alike."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(timed(work))
    return {name: statistics.median(taken) for name, taken in times.items()}


class Bench:
    """A speaker and what is needed to put it at any position without speaking up to it."""

    def __init__(self, folder: Path, quick: bool):
        self.folder, self.rounds = folder, QUICK_ROUNDS if quick else ROUNDS
        self.speaker = Speaker.load(folder, verify=False, warn=lambda message: None)
        self.manifest = self.speaker.manifest
        self.noise = np.random.default_rng(0)

    @property
    def width(self) -> int:
        return self.manifest.dims.hidden_size

    def batch_at(self, position: int, size: int) -> Batch:
        """A batch whose rows hold `position` positions of noise and are in the middle of speech."""
        batch = Batch(self.speaker, size)
        batch.store.reserve(position)
        pieces = [self.noise.normal(size=piece.shape).astype(piece.dtype) for piece in batch.store.read(0, position)]
        wish = Wish(SENTENCE, seed=1, max_frames=self.manifest.limits.max_rows // 2)
        for row in range(size):
            request = check_wish(dataclasses.replace(wish, seed=row), self.manifest)
            batch.store.write(row, pieces)
            take = Take(self.manifest.audio, wish.max_frames)
            member = Performance.begin(request, None, take, Stopwatch(), self.speaker.codec)
            member.length, member.hidden = position, self.noise.normal(size=(1, self.width)).astype(np.float32)
            batch.members.append(member)
        return batch

    def bare_frame(self, position: int) -> Callable[[], None]:
        """One frame of the bare sessions: embedding, decoder, heads, all inputs and outputs bound once, nothing sampled."""
        parts, audio = self.speaker.parts, self.manifest.audio
        hidden = np.zeros((1, 1, self.width), np.float32)
        codes = np.zeros((1, 1, audio.num_codebooks), np.int64)
        embed, heads = parts[AUDIO_EMBED], parts[HEADS]
        bound = [bind(embed, {"codes": codes}), self.bind_body(position), bind(heads, {"hidden_states": hidden})]
        sessions = [embed.session, parts[BODY].session, heads.session]

        def frame() -> None:
            for bare, (binding, _) in zip(sessions, bound, strict=True):
                bare.run_with_iobinding(binding)

        return frame

    def bind_body(self, position: int):
        decoder = self.speaker.decoder
        cache = self.batch_at(position, 1).store
        embeds = np.zeros((1, 1, self.width), np.float32)
        binding, held = bind(decoder.graph, {"inputs_embeds": embeds, "attention_mask": np.ones((1, position), np.int64)})
        cache.bind(binding, decoder.past_names, decoder.present_names, 0, 1)
        return binding, (held, cache)

    def naive_frame(self, position: int) -> Callable[[], None]:
        """One frame as a first attempt would do it: past in and present out through NumPy, a longer one each time."""
        decoder, parts, dims = self.speaker.decoder, self.speaker.parts, self.manifest.dims
        shape = (1, dims.num_kv_heads, position, dims.head_dim)
        past = {name: np.zeros(shape, decoder.kind) for name in decoder.past_names}
        codes = np.zeros((1, 1, self.manifest.audio.num_codebooks), np.int64)

        def frame() -> None:
            embeds = parts[AUDIO_EMBED].session.run(None, {"codes": codes})[0]
            feeds = {"inputs_embeds": embeds, "attention_mask": np.ones((1, position + 1), np.int64), **past}
            hidden, *_ = decoder.graph.session.run(["hidden_states", *decoder.present_names], feeds)
            parts[HEADS].session.run(None, {"hidden_states": hidden})

        return frame


def bind(graph, feeds: dict[str, np.ndarray]):
    """A binding of inputs to memory and of the first output to memory that ONNX Runtime keeps."""
    binding = graph.session.io_binding()
    feeds = {name: graph.cast(name, value) for name, value in feeds.items() if name in graph.input_types}
    for name, value in feeds.items():
        binding.bind_cpu_input(name, value)
    binding.bind_output(next(iter(graph.output_types)), "cpu")
    return binding, feeds


def stage_load(bench_folder: Path, quick: bool) -> dict:
    """Seconds until zero-shot speech can begin, and the memory that it takes."""
    before, started = memory(), time.perf_counter()
    speaker = Speaker.load(bench_folder, verify=False)
    speaker.tokenizer  # noqa: B018
    taken = {}
    if quick:
        for name in (TEXT_EMBED, AUDIO_EMBED, BODY, HEADS, DECODER):
            taken[name] = timed(lambda name=name: speaker.parts[name])
    speaker.parts.load(TEXT_EMBED, AUDIO_EMBED, BODY, HEADS, DECODER)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "parts": taken, "before": before, "after": memory()}


def stage_frames(folder: Path, quick: bool) -> dict:
    """Frames/s of the loop, of the bare sessions and of a naive loop at three positions, in turn."""
    bench = Bench(folder, quick)
    weights, found = bench.speaker._bytes_per_row(), {}
    for position in POSITIONS:
        batch = bench.batch_at(position, 1)
        works = {"loop": batch.advance, "bare": bench.bare_frame(position), "naive": bench.naive_frame(position)}
        seconds = take_turns(works, bench.rounds)
        held = position * kv_bytes(bench.manifest)
        found[position] = {
            **{name: {"frames_per_second": 1 / s, "gb_per_second": (weights + held) / s / 1e9} for name, s in seconds.items()},
            "bytes": weights + held,
        }
    return {"positions": found, "weight_bytes": weights, "bandwidth_gb_per_second": read_bandwidth()}


def kv_bytes(manifest: Manifest) -> int:
    """Bytes of the cache a position."""
    dims = manifest.dims
    return 2 * dims.num_layers * dims.num_kv_heads * dims.head_dim * np.dtype(manifest.kv_cache.dtype).itemsize


def read_bandwidth(size: int = 1 << 28) -> float:
    """GB/s at which all cores together read memory."""
    array, cores = np.ones(size, np.float32), usable_cores()
    slices = np.array_split(array, cores)
    with ThreadPoolExecutor(cores) as pool:
        best = min(timed(lambda: list(pool.map(np.max, slices))) for _ in range(4))
    return array.nbytes / best / 1e9


def stage_batch(folder: Path, quick: bool) -> dict:
    """Frames/s of all utterances together, for batches in turn."""
    bench = Bench(folder, quick)
    batches = {str(size): bench.batch_at(POSITIONS[0], size).advance for size in BATCHES}
    seconds = take_turns(batches, bench.rounds)
    return {size: {"frames_per_second": int(size) / s} for size, s in seconds.items()}


def stage_prefill(folder: Path, quick: bool) -> dict:
    """Tokens/s of reading a prompt."""
    bench, found = Bench(folder, quick), {}
    for length in (16, 64, 256) if quick else (16, 64, 256, 512):
        embeds = bench.noise.normal(size=(1, length, bench.width)).astype(np.float32)
        works = {"s": lambda embeds=embeds: bench.speaker.decoder.prefill(embeds)}
        found[str(length)] = {"tokens_per_second": length / take_turns(works, 2)["s"]}
    return found


def stage_stream(folder: Path, quick: bool) -> dict:
    """When the first sound comes, after how many steps; that the joined stream is the file; memory while speaking."""
    bench, watcher = Bench(folder, quick), Watcher()
    frames = 24 if quick else 60
    options = {"seed": 1, "max_frames": frames}
    before = memory()
    bench.speaker.speak(SENTENCE, seed=1, max_frames=1)  # loads all parts
    loaded = memory()
    watcher.start()
    stream = bench.speaker.speak_stream(SENTENCE, **options)
    with counted_steps(bench.speaker) as steps:
        chunks = [next(iter_chunks := iter(stream))]
        first_steps = len(steps) - 1  # the first call reads the prompt
        chunks += list(iter_chunks)
    speech = bench.speaker.speak(SENTENCE, **options)
    watcher.over.set()
    kv = (len(speech.prompt_ids) + frames) * kv_bytes(bench.manifest) / MEGABYTE
    return {
        "timings": dataclasses.asdict(stream.speech.timings),
        "steps_before_first_sound": first_steps,
        "first_chunk_seconds": len(chunks[0]) / stream.sample_rate,
        "equal_to_file": bool(np.array_equal(np.concatenate(chunks), speech.faded())),
        "memory": {"before": before, "loaded": loaded, "speaking_anonymous_mb": watcher.most, "cache_mb": kv},
        "decoder_mb": packed_bytes(folder / bench.manifest.part(BODY).graph) / MEGABYTE,
    }


def packed_bytes(graph: Path) -> int:
    """Bytes of a decoder's matrices as the CPU's kernels pack them.

    Rounded ones: the codes, and for every block a float32 scale and, where activations are rounded to int8 (accuracy level 4),
    the float32 sum that takes the block's zero out of the product (MLAS, SQNBitGemm with CompInt8).
    """
    import onnx

    found = onnx.load(graph, load_external_data=False).graph
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in found.initializer}
    total = 0
    for node in found.node:
        facts = {attribute.name: attribute.i for attribute in node.attribute}
        if node.op_type == "MatMulNBits":
            blocks = facts["N"] * -(-facts["K"] // facts["block_size"])
            total += blocks * (facts["block_size"] * facts["bits"] // 8 + (8 if facts.get("accuracy_level") == 4 else 4))
        elif node.op_type == "MatMul":
            total += 4 * sum(sizes.get(name, 0) for name in node.input)
    return total


@contextmanager
def counted_steps(speaker: Speaker):
    """A list that grows by one with every call of the body."""
    decoder, calls = speaker.decoder, []
    whole = decoder.advance
    decoder.advance = lambda cache, embeds: calls.append(1) or whole(cache, embeds)
    try:
        yield calls
    finally:
        decoder.advance = whole


def stage_voice(folder: Path, quick: bool) -> dict:
    """From request to first row with a reference heard for the first time, and with the saved voice."""
    bench, rate = Bench(folder, quick), Manifest.read(folder).codec.sample_rate
    seconds = 3 if quick else REFERENCE_SECONDS
    wave = np.sin(np.arange(seconds * rate) * 0.05) * 0.2 + bench.noise.normal(size=seconds * rate) * 0.05
    reference = (wave.astype(np.float32), rate)
    bench.speaker.speak(SENTENCE, seed=1, max_frames=1, ref_audio=reference)  # loads all parts
    first = bench.speaker.speak(SENTENCE, seed=1, max_frames=4, ref_audio=reference, ref_text=SENTENCE)
    with tempfile.TemporaryDirectory() as place:
        Shelf(place).save("bench", bench.speaker, reference, SENTENCE)
        started = time.perf_counter()
        voice = Shelf(place).load("bench", bench.speaker)
        fetched = time.perf_counter() - started
    again = bench.speaker.speak(SENTENCE, seed=1, max_frames=4, voice=voice)
    return {
        "reference_seconds": seconds,
        "positions": len(first.prompt_ids),
        "first_time_first_row": first.timings.first_row,
        "first_time_first_sound": first.timings.first_sound,
        "saved_first_row": again.timings.first_row + fetched,
        "saved_first_sound": again.timings.first_sound + fetched,
        "fetch": fetched,
        "equal_rows": bool(np.array_equal(first.rows, again.rows)),
    }


def stage_codec(folder: Path, quick: bool) -> dict:
    """Real-time factor of decoding whole and by the schedule of streams, and of encoding."""
    bench = Bench(folder, quick)
    codec, figures, audio = bench.speaker.codec, bench.manifest.codec, bench.manifest.audio
    frames = CODEC_FRAMES // 4 if quick else CODEC_FRAMES
    codes = bench.noise.integers(0, audio.codebook_size, (frames, audio.num_codebooks))
    seconds = frames * figures.hop_length / figures.sample_rate
    clip = bench.noise.normal(size=int(seconds * figures.sample_rate)).astype(np.float32) * 0.1

    def by_schedule() -> None:
        for start, stop in schedule():
            if start >= frames:
                return
            codec.decode_window(codes, start, min(stop, frames))

    works = {DECODER: lambda: codec.decode(codes), "scheduled": by_schedule, ENCODER: lambda: codec.encode(clip)}
    return {name: {"rtf": s / seconds} for name, s in take_turns(works, 3).items()} | {"memory": memory()}


def stage_waiting(folder: Path, quick: bool) -> dict:
    """Frames/s with three ways for idle threads to wait: as chosen, as ONNX Runtime has it, and asleep at once."""
    ways = {"chosen": dict(session.SPINNING), "default": {}, "asleep": {"session.intra_op.allow_spinning": "0"}}
    works = {}
    for name, way in ways.items():
        session.SPINNING = way
        bench = Bench(folder, quick)
        works[name] = bench.batch_at(POSITIONS[0], 1).advance
    seconds = take_turns(works, bench.rounds)
    session.SPINNING = ways["chosen"]
    return {name: {"frames_per_second": 1 / s} for name, s in seconds.items()}


def stage_torch(folder: Path, quick: bool, kind: str) -> dict:
    """Frames/s of the same dims in PyTorch at the first position, against the loop in the same process, in turn."""
    import torch

    from benchmarks.torch_body import TorchBody

    torch.set_num_threads(usable_cores())
    bench = Bench(folder, quick)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[kind]
    body = TorchBody(bench.manifest.dims, bench.manifest.audio, dtype, POSITIONS[0] + 1)
    x = torch.zeros(1, bench.width, dtype=dtype)
    works = {"loop": bench.batch_at(POSITIONS[0], 1).advance, "torch": lambda: body.frame(x, POSITIONS[0])}
    seconds = take_turns(works, QUICK_ROUNDS)
    return {name: {"frames_per_second": 1 / s} for name, s in seconds.items()} | {"memory": memory()}


STAGES: dict[str, Callable[[Path, bool], dict]] = {
    "load": stage_load,
    "load_again": stage_load,
    "frames": stage_frames,
    "batch": stage_batch,
    "prefill": stage_prefill,
    "stream": stage_stream,
    "voice": stage_voice,
    "codec": stage_codec,
    "waiting": stage_waiting,
    "torch_bf16": lambda folder, quick: stage_torch(folder, quick, "bf16"),
    "torch_fp32": lambda folder, quick: stage_torch(folder, quick, "fp32"),
}


def run_stage(name: str, folder: Path, quick: bool, cache: str) -> dict:
    """Run one stage in a process of its own; what fails there is reported and stops nothing else."""
    command = [sys.executable, __file__, str(folder), "--stage", name, *(["--quick"] if quick else [])]
    done = subprocess.run(command, check=False, capture_output=True, encoding="utf-8", env=os.environ | {"VOXPORT_CACHE": cache})
    if done.returncode != DONE:
        reason = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
        say(f"{name:12} failed: {reason}")
        return {"failed": reason}
    say(f"{name:12} done")
    return json.loads(done.stdout.splitlines()[-1])


def judge(stages: dict[str, dict]) -> list[dict]:
    """The lines of acceptance, each with its figure; `passed` None where a stage failed."""
    at = lambda position, kind: stages["frames"]["positions"][str(position)][kind]["frames_per_second"]
    batch = lambda size: stages["batch"][str(size)]["frames_per_second"]
    stream, voice = stages["stream"], stages["voice"]
    spare = lambda: stream["memory"]["speaking_anonymous_mb"] - 1.1 * stream["decoder_mb"] - stream["memory"]["cache_mb"]
    near, far = POSITIONS[0], POSITIONS[-1]
    lines = [
        ("1", f"frames/s at {near} over the bare sessions'", lambda: at(near, "loop") / at(near, "bare"), ">=", 0.95),
        ("1", f"frames/s at {far} over those at {near}", lambda: at(far, "loop") / at(near, "loop"), ">=", 0.70),
        ("2", "frames/s in a batch of 4 over one", lambda: batch(4) / batch(1), ">=", 2.0),
        ("3", "first row: first time over saved voice", lambda: voice["first_time_first_row"] / voice["saved_first_row"], ">=", 8),
        ("4", "decoder steps before the first sound", lambda: stream["steps_before_first_sound"], "<=", 20),
        ("4", "joined stream equals the file", lambda: float(stream["equal_to_file"]), ">=", 1),
        ("5", "seconds to ready, warm", lambda: stages["load_again"]["seconds"], "<=", 4),
        ("5", "MB beyond 1.1 decoders as packed and the cache", spare, "<=", 300),
        ("6", "frames/s over PyTorch bf16", lambda: ratio_to_torch(stages["torch_bf16"]), ">=", 3),
    ]
    return [judge_line(*line) for line in lines]


def ratio_to_torch(stage: dict) -> float:
    return stage["loop"]["frames_per_second"] / stage["torch"]["frames_per_second"]


def judge_line(number: str, what: str, figure: Callable[[], float], sign: str, wanted: float) -> dict:
    """Figure, bound and verdict of one line."""
    try:
        value = figure()
    except KeyError:
        return {"acceptance": number, "what": what, "value": None, "wanted": f"{sign} {wanted:g}", "passed": None}
    passed = value >= wanted if sign == ">=" else value <= wanted
    return {"acceptance": number, "what": what, "value": value, "wanted": f"{sign} {wanted:g}", "passed": bool(passed)}


def show(stages: dict[str, dict], lines: list[dict]) -> None:
    """A table of frames and the lines of acceptance."""
    frames = stages.get("frames", {})
    for position, found in frames.get("positions", {}).items():
        bound = frames["bandwidth_gb_per_second"] * 1e9 / found["bytes"]
        figures = ", ".join(f"{kind} {found[kind]['frames_per_second']:.2f}" for kind in ("loop", "bare", "naive"))
        say(f"position {position:>5}: {figures} frames/s; memory allows {bound:.2f}", sys.stdout)
    for line in lines:
        value = "no figure" if line["value"] is None else f"{line['value']:.2f}"
        verdict = {True: "ok", False: "MISSED", None: "unknown"}[line["passed"]]
        say(f"{line['acceptance']}. {line['what']}: {value} (wanted {line['wanted']}) {verdict}", sys.stdout)


def main(argv: list[str]) -> int:
    """Run the stages asked for, judge them, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path, help="build folder")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--quick", action="store_true", help="few repetitions: to see that it runs, not for figures")
    parser.add_argument("--stages", default=",".join(STAGES), help="stages to run, comma separated (default: all)")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.stage:
        say(json.dumps(STAGES[arguments.stage](arguments.build, arguments.quick)), sys.stdout)
        return DONE
    wanted = arguments.stages.split(",")
    if unknown := set(wanted) - set(STAGES):
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    manifest = Manifest.read(arguments.build)
    with tempfile.TemporaryDirectory() as cache:
        stages = {name: run_stage(name, arguments.build, arguments.quick, cache) for name in wanted}
    stages = {name: stages.get(name, {}) for name in STAGES}
    lines = judge(stages)
    show(stages, lines)
    if arguments.out is not None:
        described = {"target": dataclasses.asdict(manifest.target), "dims": dataclasses.asdict(manifest.dims)}
        command = f"python benchmarks/speak.py BUILD --out {arguments.out.name}{' --quick' if arguments.quick else ''}"
        write_json(arguments.out, {"command": command, "machine": describe_machine(), "build": described, "stages": stages,
                                   "acceptance": lines})  # fmt: skip
    return FAILED if any(line["passed"] is False for line in lines) else DONE


if __name__ == "__main__":
    sys.exit(run_script(main))
