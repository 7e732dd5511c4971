"""What eval.py needs to know of a Higgs build: its bench, its levels of evidence, and the original's own speech."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from voxport.build.checkpoint import Checkpoint
from voxport.judge.levels import Bench, judge_all, prompt_embeds
from voxport.judge.listeners import Spoken
from voxport.judge.reference import Original, is_small
from voxport.run.higgs import Speaker
from voxport.run.sampler import Dice
from voxport.run.speech import Speech

__all__ = ["judge_all", "open_bench", "speak_original"]


def open_bench(speaker: Speaker, folder: Path) -> Bench:
    """A build beside its original in `folder`, with the rotary tables that the build was made with."""
    return Bench(speaker, Original(Checkpoint.open(folder), speaker.manifest.recipe["rope_table"] == "bf16"))


def speak_original(bench: Bench, speeches: Sequence[Speech]) -> list[Spoken]:
    """The original's own speech for the same prompts and seeds; none if it is too large to be spoken here."""
    if not is_small(bench.original.checkpoint.weight_files()):
        return []
    model, codec = bench.original.in_memory(), bench.original.codec()
    return [_speak(model, codec, bench, speech) for speech in speeches]


def _speak(model, codec, bench: Bench, speech: Speech) -> Spoken:
    dice, step = Dice(speech.sampling, speech.seed), iter(range(10**9))
    choose = lambda logits: torch.from_numpy(dice.roll(logits.numpy(), next(step)))
    embeds = torch.from_numpy(prompt_embeds(bench.speaker, speech))
    rows = speech.max_frames + bench.speaker.manifest.audio.num_codebooks - 1
    codes = model.generate(embeds, rows, choose).codes
    return Spoken(speech.text, codec.decode(codes.t()[None])[0, 0].numpy(), bench.rate)
