"""How well is the demo understood, and does a clone have the right voice? Measured by Whisper and a speaker encoder.

    python benchmarks/demo_listen.py --build onnx/demo_cpu_int4 --whisper FOLDER_OR_NAME

Sentences of 4 to 6 vocabulary words are heard twice: as the source clips (espeak-ng, by the recipe in demo/speech.py) and as
the build speaks them with its default sampling. Half are spoken zero-shot (the first voice), half as clones of the second.
Needs requirements-run.txt, requirements-listen.txt and espeak-ng.
"""

import argparse
import json
import platform
import random
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "demo")]

from speech import SAMPLE_RATE, VOICES, sentence_clip, word_clips  # noqa: E402
from text import vocabulary  # noqa: E402
from voxport.judge.listeners import Resemblyzer, Whisper, embed, hear  # noqa: E402
from voxport.judge.words import score, the_rule  # noqa: E402
from voxport.run.audio import resample  # noqa: E402
from voxport.run.higgs import Speaker  # noqa: E402

SENTENCE_SEED = 2024
PACKAGES = ("faster-whisper", "ctranslate2", "Resemblyzer", "onnxruntime", "torch", "numpy", "soxr")
FOREIGN_RATE = 44_100        # of the references that are neither frame-aligned nor at the codec's rate
CUT = 317                    # samples cut off their beginning


def random_sentences(words, count, seed):
    """`count` sentences of 4 to 6 different words. -> list of word lists"""
    rng = random.Random(seed)
    return [rng.sample(words, rng.randint(4, 6)) for _ in range(count)]


def as_typed(words):
    return " ".join(words).capitalize() + "."


def reference_of(voice):
    """-> path of the committed reference clip, its transcript"""
    folder = ROOT / "demo" / "voices"
    return folder / f"{voice}.wav", (folder / f"{voice}.txt").read_text(encoding="utf-8").strip()


def word_error(pairs):
    """(text, heard) pairs -> rates, normalised and raw"""
    errors = score(pairs, "en")
    return {"wer": errors["wer"].rate, "raw_wer": errors["raw_wer"].rate, "words": errors["wer"].length}


def listen_to_sentences(speaker, whisper, count):
    """Every sentence from the source and from the build, heard. -> figures, one row a sentence"""
    words, rows = vocabulary(), []
    clips = word_clips(words)
    for seed, sentence in enumerate(random_sentences(words, count, SENTENCE_SEED)):
        voice = VOICES[seed % 2].name
        path, transcript = reference_of(voice)
        cloned = {"ref_audio": path, "ref_text": transcript if seed % 4 == 1 else None} if seed % 2 else {}
        speech = speaker.speak(as_typed(sentence), seed=seed, progress=False, **cloned)
        source = sentence_clip(clips, voice, sentence)
        rows.append({"text": as_typed(sentence), "voice": voice, "seed": seed, "finish_reason": speech.finish_reason,
                     "frames_right": len(speech.samples) == len(source),
                     "source_heard": hear(whisper, source, SAMPLE_RATE),
                     "spoken_heard": hear(whisper, speech.samples, speech.sample_rate)})
    return summarise_sentences(rows), rows


def summarise_sentences(rows):
    def rates(key, chosen):
        return word_error([(r["text"], r[key]) for r in chosen])

    figures = {"sentences": len(rows), "source": rates("source_heard", rows), "spoken": rates("spoken_heard", rows)}
    for voice in VOICES:
        chosen = [r for r in rows if r["voice"] == voice.name]
        figures[voice.name] = {"source": rates("source_heard", chosen), "spoken": rates("spoken_heard", chosen)}
    figures["points_lost"] = 100 * (figures["spoken"]["wer"] - figures["source"]["wer"])
    figures["ended_by_eoc"] = float(np.mean([r["finish_reason"] == "eoc" for r in rows]))
    figures["length_of_source"] = float(np.mean([r["frames_right"] for r in rows]))
    return figures


def foreign(path):
    """The clip at another rate and without its first samples: what an ordinary reference is. -> (samples, rate)"""
    import soundfile

    samples, rate = soundfile.read(path, dtype="float32")
    return resample(samples[CUT:], rate, FOREIGN_RATE), FOREIGN_RATE


def compare_voices(speaker, encoder, count, prepare):
    """Clones of both voices in turn, with and without transcript. -> share whose nearest reference is the right one"""
    homes = {v.name: embed(encoder, *read_clip(reference_of(v.name)[0])) for v in VOICES}
    right = []
    for seed, sentence in enumerate(random_sentences(vocabulary(), count, SENTENCE_SEED + 1)):
        voice = VOICES[seed % 2].name
        path, transcript = reference_of(voice)
        speech = speaker.speak(as_typed(sentence), seed=seed, progress=False, ref_audio=prepare(path),
                               ref_text=transcript if seed % 4 < 2 else None)
        mark = embed(encoder, speech.samples, speech.sample_rate)
        right.append(mark is not None and max(homes, key=lambda name: float(homes[name] @ mark)) == voice)
    return float(np.mean(right))


def read_clip(path):
    import soundfile

    return soundfile.read(path, dtype="float32")


def processor():
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def installed(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def circumstances(arguments):
    import os

    return {"command": "python benchmarks/demo_listen.py " + " ".join(
                f"--{k} {Path(str(v)).name}" for k, v in vars(arguments).items() if k != "out"),   # folders by name only
            "processor": processor(), "cores": os.cpu_count(), "system": platform.platform(),
            "python": platform.python_version(), "versions": {p: installed(p) for p in PACKAGES}}


def build_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="onnx/demo_cpu_int4", help="build folder that speaks (default onnx/demo_cpu_int4)")
    parser.add_argument("--whisper", default="tiny.en", help="faster-whisper model: a name or a folder (default tiny.en)")
    parser.add_argument("--sentences", type=int, default=150, help="sentences to hear, seeds 0.. (default 150)")
    parser.add_argument("--clones", type=int, default=100, help="clips to assign to a voice (default 100)")
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "demo_listen.json"), help="JSON file to write")
    return parser


def main(argv=None):
    arguments, began = build_parser().parse_args(argv), time.monotonic()
    speaker, whisper, encoder = Speaker.load(arguments.build), Whisper(arguments.whisper), Resemblyzer()
    figures, rows = listen_to_sentences(speaker, whisper, arguments.sentences)
    figures["clones"] = arguments.clones
    figures["right_voice"] = compare_voices(speaker, encoder, arguments.clones, lambda path: path)
    figures["right_voice_foreign_reference"] = compare_voices(speaker, encoder, arguments.clones // 2, foreign)
    report = {"figures": figures, "normaliser": the_rule("en"), "recogniser": whisper.name, "encoder": encoder.name,
              "seconds": time.monotonic() - began, **circumstances(arguments), "rows": rows}
    Path(arguments.out).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
