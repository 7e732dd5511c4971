"""Make the demo checkpoint: espeak-ng's words, a codec built for them, a small body trained to speak them.

    python demo/make_demo.py --out demo/checkpoint

Needs espeak-ng 1.51, torch, numpy, soundfile, soxr, tokenizers and safetensors; runs on a CPU. Everything is seeded.
"""

import argparse
import platform
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import soundfile as sf
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))

from _ref.higgs import HiggsConfig  # noqa: E402
from body import Training, train  # noqa: E402
from check import check_speech  # noqa: E402
from codec import CodecPlan, build_codec, open_codec  # noqa: E402
from corpus import Corpus, heard_codes  # noqa: E402
from folder import folder_bytes, write_checkpoint, write_json  # noqa: E402
from speech import HOP, SAMPLE_RATE, VOICES, sentence_clip, word_clips  # noqa: E402
from text import make_tokenizer, vocabulary  # noqa: E402

REFERENCE_WORDS = "morning elephant golden station".split()
EVAL_TEXTS = (
    "Golden elephant travel tomorrow.", "Summer evening, music under green mountain.", "always remember happy children",
    "Million people open library november.", "Captain station hotel island america.", "simple computer always dangerous",
    "Monday morning coffee summer travel.", "Chicken honey chocolate breakfast table.",
    "tiger monkey rabbit elephant africa", "Beautiful london airport, telephone camera.",
)
TEXT_ROWS = 64               # the text embedding has a multiple of this many rows


def body_config(text_rows):
    """2.2 M parameters; heads * head_dim (192) differs from hidden_size (128), as 4096 from 2560 in the real one."""
    return HiggsConfig(hidden_size=128, intermediate_size=512, num_layers=4, num_heads=6, num_kv_heads=2, head_dim=32,
                       rms_norm_eps=1e-6, rope_theta=1e6, text_vocab_size=-(-text_rows // TEXT_ROWS) * TEXT_ROWS,
                       max_position_embeddings=32768, num_codebooks=8, audio_vocab_size=1026, tied_audio_head=True)


def split_codes(clips, sounding, codes):
    """Codes of each word; silent frames are all 0. -> {key: [F, 8] int64}"""
    everything = np.zeros((len(sounding), codes.shape[1]), np.int64)
    everything[sounding] = codes
    ends = np.cumsum([len(clip) // HOP for clip in clips.values()])
    return {key: torch.from_numpy(part) for key, part in zip(clips, np.split(everything, ends[:-1]))}


def make_codec(clips, plan):
    """-> codec tensors, {key: codes [F, 8]}"""
    frames = np.concatenate([clip.reshape(-1, HOP) for clip in clips.values()])
    sounding = np.abs(frames).max(1) > 0
    tensors, codes = build_codec(plan, frames[sounding])
    return tensors, split_codes(clips, sounding, codes)


def signal_to_noise(codec, clips, spoken):
    """Decoded against original, all words together, in dB."""
    error = power = 0.0
    for key, clip in clips.items():
        with torch.no_grad():
            decoded = codec.decode(spoken[key].t()[None])[0, 0].numpy()
        error, power = error + float(((decoded - clip) ** 2).sum()), power + float((clip ** 2).sum())
    return 10 * np.log10(power / error)


def write_voices(folder, clips):
    """One reference clip and its transcript a voice."""
    folder.mkdir(parents=True, exist_ok=True)
    for voice in VOICES:
        sf.write(folder / f"{voice.name}.wav", sentence_clip(clips, voice.name, REFERENCE_WORDS), SAMPLE_RATE, "PCM_16")
        transcript = " ".join(REFERENCE_WORDS).capitalize() + ".\n"
        (folder / f"{voice.name}.txt").write_text(transcript.strip(), encoding="utf-8")


def versions():
    espeak = subprocess.run(["espeak-ng", "--version"], capture_output=True, text=True, check=True).stdout
    return {"espeak-ng": espeak.split("Data at")[0].strip(), "torch": torch.__version__, "numpy": np.__version__,
            "python": platform.python_version()}


def make(arguments):
    """Run all steps. -> measured figures"""
    began, words = time.monotonic(), vocabulary()
    print(f"{len(words)} words, {len(VOICES)} voices: speaking them with espeak-ng")
    clips = word_clips(words)
    print("building the codec")
    plan = CodecPlan()
    codec_tensors, spoken = make_codec(clips, plan)
    codec = open_codec(plan, codec_tensors)
    figures = {"frames": sum(len(c) for c in spoken.values()), "codec_snr_db": signal_to_noise(codec, clips, spoken)}
    print(f"{figures['frames']} frames, signal to noise {figures['codec_snr_db']:.1f} dB; encoding reference material")
    tokenizer = make_tokenizer(words)
    heard = heard_codes(codec, clips, np.random.default_rng(arguments.seed + 1))
    corpus = Corpus(words, spoken, heard, tokenizer, boc=1024, eoc=1025)
    config = body_config(tokenizer.get_vocab_size())
    print("training the body")
    body = train(config, corpus, Training(steps=arguments.steps, seed=arguments.seed))
    write_checkpoint(arguments.out, config, body, plan, codec_tensors, tokenizer, EVAL_TEXTS)
    write_voices(arguments.voices, clips)
    print("checking what it says, as stored and with int4 weights")
    figures |= check_speech(config, body, corpus, arguments.seed)
    return figures | {"checkpoint_bytes": folder_bytes(arguments.out), "voices_bytes": folder_bytes(arguments.voices),
                      "minutes": (time.monotonic() - began) / 60, "versions": versions(),
                      "threads": torch.get_num_threads(), "steps": arguments.steps, "seed": arguments.seed}


def build_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "checkpoint", help="checkpoint folder (default demo/checkpoint)")
    parser.add_argument("--voices", type=Path, default=HERE / "voices", help="reference clips (default demo/voices)")
    parser.add_argument("--figures", type=Path, default=HERE / "make_demo.json", help="JSON file of what was measured")
    parser.add_argument("--steps", type=int, default=Training.steps, help="training steps; fewer speak less surely")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; with another number the weights differ a little")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and training sentences (default 0)")
    return parser


def main(argv=None):
    arguments = build_parser().parse_args(argv)
    torch.set_num_threads(arguments.threads)
    figures = make(arguments)
    write_json(arguments.figures, figures)
    print(f"done in {figures['minutes']:.1f} minutes: {arguments.out}, {figures['checkpoint_bytes'] / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
