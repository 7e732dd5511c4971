"""Does a process that goes on speaking grow? Two thousand short utterances by one speaker, and what they leave behind.

    python benchmarks/soak.py --build onnx/demo_cpu_int4 --out benchmarks/soak.json [--utterances 2000]

Sentences of the demo's words, each with a seed of its own: one in eight as a stream, half in batches of four, the others in
one piece; every fifth is a clone. Each must have hop_length samples a frame and must be heard. Every hundred utterances the
process's anonymous memory, open files and threads are noted. Linux only.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.machine import describe_machine
from benchmarks.memory import read_memory
from voxport.errors import UserError
from voxport.files import write_json
from voxport.run.higgs import Speaker
from voxport.run.request import Wish
from voxport.run.speech import Speech

ROOT = Path(__file__).parents[1]
EVERY = 100  # utterances between two notes
FRAMES = (6, 30)  # of an utterance, at least and at most: 0.24 to 1.2 s
HEARD = 0.003  # root mean square, -50 dBFS: far below any speech, far above the noise that a codec makes of silence
# Growth in bytes an utterance, over the second half, from which a process counts as leaking: less than the smallest array that
# an utterance makes, the rows of the shortest (13 of 8 int64: 832 bytes). Its samples are 23 KB, its keys and values more.
LEAK = 512


def sentences(seed: int) -> Iterator[str]:
    """Three to six of the demo's words as one types them, without end."""
    words, rng = (ROOT / "demo" / "words.txt").read_text(encoding="utf-8").split(), random.Random(seed)
    while True:
        yield " ".join(rng.sample(words, rng.randint(3, 6))).capitalize() + "."


def wishes(seed: int) -> Iterator[Wish]:
    """Wishes with seeds 0, 1, 2 ...; every fifth is a clone, so that clones come in each way of speaking."""
    rng, voices = random.Random(seed), itertools.cycle(sorted((ROOT / "demo" / "voices").glob("*.wav")))
    for number, text in enumerate(sentences(seed)):
        wish = {"seed": number, "max_frames": rng.randint(*FRAMES)}
        if number % 5 == 3:
            voice = next(voices)
            wish |= {"ref_audio": voice, "ref_text": voice.with_suffix(".txt").read_text(encoding="utf-8").strip()}
        yield Wish(text, **wish)


def speak_eight(speaker: Speaker, eight: list[Wish]) -> Iterator[Speech]:
    """Of eight wishes three are spoken one by one, one as a stream, four as a batch."""
    yield from (speaker.grant(wish, progress=False) for wish in eight[:3])
    stream = speaker.stream(eight[3], progress=False)
    chunks = list(stream)
    if sum(map(len, chunks)) != len(stream.speech.samples):
        raise SystemExit("a stream has not as many samples as its speech")
    yield stream.speech
    for _, speech in speaker.speak_many(eight[4:]):
        if isinstance(speech, UserError):
            raise speech
        yield speech


def fault_of(speech: Speech, hop: int) -> str | None:
    """What is wrong with one utterance."""
    if len(speech.samples) != len(speech.codes) * hop or not 0 < len(speech.codes) <= speech.max_frames:
        return f"seed {speech.seed}: {len(speech.samples)} samples of {len(speech.codes)} frames, {speech.max_frames} at most"
    loudness = float((speech.samples.astype(float) ** 2).mean() ** 0.5)
    return None if loudness > HEARD else f"seed {speech.seed}: root mean square {loudness:.2g} is silence"


def note(spoken: int) -> dict:
    """What the process holds after `spoken` utterances."""
    gc.collect()
    return {
        "spoken": spoken,
        "private_bytes": read_memory()[0],
        "open_files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def slope(notes: list[dict]) -> float:
    """Bytes of growth an utterance: the median over all pairs of notes, which no single step moves (Theil and Sen)."""
    pairs = itertools.combinations(notes, 2)
    return statistics.median((b["private_bytes"] - a["private_bytes"]) / (b["spoken"] - a["spoken"]) for a, b in pairs)


def judge(notes: list[dict], faults: list[str]) -> dict:
    """The second half must be flat: in memory by the median slope, in files and threads to the number."""
    later = notes[len(notes) // 2 :]
    growth = slope(later)
    same = {f"same_{name}": len({n[name] for n in later}) == 1 for name in ("open_files", "threads")}
    flat = growth < LEAK and all(same.values())
    return {"bytes_an_utterance": round(growth, 1), "limit": LEAK, **same, "flat": flat, "passed": flat and not faults}


def soak(speaker: Speaker, utterances: int, seed: int) -> tuple[list[dict], list[str]]:
    """Speak so many utterances; notes and faults."""
    coming, hop, spoken = wishes(seed), speaker.manifest.codec.hop_length, 0
    notes, faults = [note(0)], []
    while spoken < utterances:
        for speech in speak_eight(speaker, list(itertools.islice(coming, 8))):
            fault = fault_of(speech, hop)
            faults += [fault] if fault else []
            spoken += 1
        if spoken - notes[-1]["spoken"] >= EVERY:
            notes.append(note(spoken))
            print(notes[-1], flush=True)
    return notes, faults


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, required=True, help="build folder of the demo")
    parser.add_argument("--out", type=Path, help="JSON file to write (default: none)")
    parser.add_argument("--utterances", type=int, default=2000, help="how many to speak (default: 2000)")
    parser.add_argument("--seed", type=int, default=0, help="of the sentences and lengths (default: 0)")
    return parser


def main() -> int:
    args = make_parser().parse_args()
    speaker, start = Speaker.load(args.build), time.perf_counter()
    notes, faults = soak(speaker, args.utterances, args.seed)
    verdict = judge(notes, faults)
    result = {
        "command": f"python benchmarks/soak.py --build onnx/demo_cpu_int4 --out benchmarks/soak.json --utterances {args.utterances}",
        "machine": describe_machine(),
        "seconds": round(time.perf_counter() - start, 1),
        "seed": args.seed,
        "notes": notes,
        "faults": faults,
        "verdict": verdict,
    }
    print(verdict, *faults, sep="\n")
    if args.out is not None:
        write_json(args.out, result)
    return 0 if verdict["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
