"""What is asked of an OmniFish build, and the same checked before any part is loaded."""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from voxport.errors import UserError
from voxport.manifest import Sampling
from voxport.manifest_omnifish import OmniFishManifest
from voxport.run.audio import Reference, load_reference
from voxport.run.omnifish_speech import Settings
from voxport.run.omnifish_text import (
    Turn,
    check_name,
    context_text,
    dialogue_text,
    fill_instruct,
    recordings,
    speakers,
    style_text,
)
from voxport.run.request import DRAWN_SEEDS, check_kinds
from voxport.run.sampler import check_frames, check_sampling, check_seed
from voxport.run.text import Script, check_script, frame_cap
from voxport.run.values import is_number, is_whole

DENOISE = "<|denoise|>"


@dataclass(frozen=True)
class Voice:
    """A reference as the model hears it: codes [N, P], and the transcript that goes with them. Text is read before it and sees
    it, so nothing more can be kept."""

    codes: np.ndarray
    ref_text: str | None


@dataclass(frozen=True)
class Wish:
    """One utterance as the user asks for it: `text`, or `turns` of a dialogue. None means the build's default, or nothing, or a
    drawn seed, or the cap of the text. `before` and `after` are sentences around it that are not spoken."""

    text: str | None = None
    turns: Sequence[Turn] = ()
    language: str | None = None
    speaker: str | None = None
    quality: str | None = None
    instruct: str | None = None
    before: Sequence[str] = ()
    after: Sequence[str] = ()
    ref_audio: str | os.PathLike | tuple | None = None
    ref_text: str | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    residual_temperature: float | None = None
    residual_top_k: int | None = None
    residual_top_p: float | None = None
    steps: int | None = None
    threshold: float | None = None
    seed: int | None = None
    max_frames: int | None = None
    tags: str = "error"
    voice: Voice | None = None


@dataclass(frozen=True)
class Request:
    """One utterance that can be spoken; `ref_text` belongs to `reference`. Of that and `voice`, heard before, one at least is None."""

    text: str
    style: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    reference: Reference | None
    ref_text: str | None
    voice: Voice | None
    ref_text_prefix: bool
    denoise: bool
    settings: Settings
    max_frames: int
    block_size: int
    warnings: tuple[str, ...]

    @property
    def max_blocks(self) -> int:
        """Blocks that hold `max_frames`."""
        return math.ceil(self.max_frames / self.block_size)

    def prompt_text(self, has_reference: bool, ref_text: str | None) -> str:
        """All text of the context; the transcript of the reference is read as the beginning of the text."""
        spoken = f"{ref_text} {self.text}" if ref_text and self.ref_text_prefix else self.text
        denoise = DENOISE if has_reference and self.denoise else ""
        return denoise + self.style + context_text(spoken, self.before, self.after)


def check_wish(wish: Wish, manifest: OmniFishManifest) -> Request:
    """Check text, names, settings and reference, the cheapest first; UserError names what is wrong."""
    check_kinds(wish, Wish, Voice)
    script = check_text(wish, manifest)
    settings = choose_settings(wish, manifest)
    max_frames = choose_frames(wish, script, manifest)
    around = [tuple(check_script(text, what, manifest, wish.tags).text for text in texts)
              for what, texts in (("the text before", wish.before), ("the text after", wish.after))]  # fmt: skip
    style = style_text(check_name(wish.language, manifest.prompt.languages, "language"), choose_instruct(wish, manifest))
    reference, ref_text, warnings = check_reference(wish.ref_audio, wish.ref_text, wish.tags, manifest)
    return Request(
        text=script.text,
        style=style,
        before=around[0],
        after=around[1],
        reference=reference,
        ref_text=ref_text,
        voice=wish.voice,
        ref_text_prefix=manifest.prompt.ref_text_prefix,
        denoise=manifest.prompt.denoise_token,
        settings=settings,
        max_frames=max_frames,
        block_size=manifest.generation.block_size,
        warnings=script.warnings + warnings,
    )


def check_text(wish: Wish, manifest: OmniFishManifest) -> Script:
    """The text, or the dialogue as one text."""
    if (wish.text is None) == (not wish.turns):
        raise UserError("give a text or the turns of a dialogue, one of the two")
    if wish.text is not None:
        return check_script(wish.text, "the text", manifest, wish.tags)
    names = speakers(manifest.prompt)
    turns = [(check_name(name, names, "speaker"), check_script(line, "a line", manifest, wish.tags)) for name, line in wish.turns]
    text = dialogue_text([(name, script.text) for name, script in turns])
    warnings = tuple(warning for _, script in turns for warning in script.warnings)
    return Script(text, " ".join(script.spoken for _, script in turns), 0, warnings)


def choose_instruct(wish: Wish, manifest: OmniFishManifest) -> str | None:
    """The instruction as given, or made of the names by the checkpoint's template."""
    prompt = manifest.prompt
    speaker = check_name(wish.speaker, speakers(prompt), "speaker")
    quality = check_name(wish.quality, recordings(prompt), "recording")
    made = fill_instruct(prompt.instruct_template, speaker, quality)
    if wish.instruct is not None and made is not None:
        raise UserError("an instruction stands where --speaker and --quality are written; give one of them")
    return made if wish.instruct is None else check_script(wish.instruct, "the instruction", manifest, wish.tags).text


def choose_settings(wish: Wish, manifest: OmniFishManifest) -> Settings:
    """The build's defaults with the wishes in their place, and a seed."""
    steps = manifest.generation.steps if wish.steps is None else wish.steps
    threshold = manifest.generation.threshold if wish.threshold is None else wish.threshold
    if not (is_whole(steps) and steps >= 1):
        raise UserError(f"--steps must be a whole number of at least 1, not {steps!r}")
    if threshold is not None and not (is_number(threshold) and 0 <= threshold <= 1):
        raise UserError(f"--threshold is a probability, not {threshold!r}")
    semantic = choose_sampling(manifest.sampling, wish.temperature, wish.top_k, wish.top_p)
    asked = (wish.residual_temperature, wish.residual_top_k, wish.residual_top_p)
    residual = choose_sampling(manifest.residual_sampling, *asked, prefix="residual-")
    seed = secrets.randbelow(DRAWN_SEEDS) if wish.seed is None else check_seed(wish.seed)
    return Settings(seed, semantic, residual, steps, threshold)


def choose_sampling(
    default: Sampling, temperature: float | None, top_k: int | None, top_p: float | None, prefix: str = ""
) -> Sampling:
    """The default with what is given in its place; `prefix` is that of the flags."""
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    return check_sampling(dataclasses.replace(default, **{name: value for name, value in given.items() if value is not None}), prefix)


def choose_frames(wish: Wish, script: Script, manifest: OmniFishManifest) -> int:
    """Frames T after which speech is cut: as wished, or by the rule of the text's length."""
    if wish.max_frames is None:
        return frame_cap(script, manifest.limits, 1)
    return check_frames(wish.max_frames, manifest.codec.max_frames)


def check_reference(
    ref_audio: str | os.PathLike | tuple | None, ref_text: str | None, tags: str, manifest: OmniFishManifest
) -> tuple[Reference | None, str | None, tuple[str, ...]]:
    """The reference, the transcript that is read with it, and warnings about both."""
    unread = why_unread(ref_audio, ref_text, manifest)
    script = check_script(ref_text, "the reference text", manifest, tags) if ref_text and not unread else None
    reference = None if ref_audio is None else load_reference(ref_audio, manifest.codec, manifest.limits)
    warnings = unread + tuple(w for part in (script, reference) if part is not None for w in part.warnings)
    return reference, script.text if script else None, warnings


def why_unread(ref_audio: object, ref_text: str | None, manifest: OmniFishManifest) -> tuple[str, ...]:
    """A warning if there is a transcript that the model will not read."""
    if ref_text is not None and not isinstance(ref_text, str):
        raise UserError(f"the reference text must be text, not {type(ref_text).__name__}")
    if not ref_text:
        return ()
    if ref_audio is None:
        return ("a reference text without reference audio has no effect",)
    if not manifest.prompt.ref_text_prefix:
        return ("this checkpoint reads no transcript; the reference text is ignored",)
    return ()
