"""What the user asks for, and the same checked: everything that can be refused before a part is loaded is refused here."""

from __future__ import annotations

import dataclasses
import os
import secrets
from dataclasses import dataclass

import numpy as np

from voxport.errors import UserError
from voxport.manifest import Manifest
from voxport.run.audio import Reference, load_reference
from voxport.run.sampler import Dice, check_frames, check_sampling, check_seed, is_greedy
from voxport.run.text import Script, check_script, frame_cap, most_frames

GREEDY_WARNING = "without sampling (temperature 0 or top-k 1) speech tends to get stuck; it is for tests"
DRAWN_SEEDS = 1 << 31  # a seed that is drawn stays short enough to be typed again


@dataclass(frozen=True)
class Voice:
    """A reference that the model has heard: codes [R, N], its transcript if that was heard too, the ids [P] of the prompt up
    to the text, and what the model remembers of them: for each layer keys and values [H, P, head_dim]."""

    codes: np.ndarray
    ref_text: str | None
    ids: np.ndarray
    pieces: list[np.ndarray]


@dataclass(frozen=True)
class Wish:
    """One utterance as the user asks for it. None means the build's default, or a drawn seed, or the cap of the text."""

    text: str
    ref_audio: str | os.PathLike | tuple | None = None
    ref_text: str | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    max_frames: int | None = None
    tags: str = "error"
    voice: Voice | None = None


@dataclass(frozen=True)
class Request:
    """One utterance that can be spoken. `warnings` hold what the checks found strange but usable; of `reference`, with its
    transcript `ref_text`, and `voice`, which was heard before, one is None at least."""

    script: Script
    ref_text: str | None
    reference: Reference | None
    voice: Voice | None
    dice: Dice
    max_frames: int
    warnings: tuple[str, ...]


def check_wish(wish: Wish, manifest: Manifest) -> Request:
    """Check text, settings and reference, the cheapest first; UserError names what is wrong."""
    check_kinds(wish, Wish, Voice)
    script = check_script(wish.text, "the text", manifest, wish.tags)
    dice = choose_dice(wish, manifest)
    max_frames = choose_frames(wish, script, manifest)
    reference, ref_text, warnings = check_reference(wish.ref_audio, wish.ref_text, wish.tags, manifest)
    warnings += script.warnings + (() if not is_greedy(dice.sampling) else (GREEDY_WARNING,))
    return Request(script, ref_text, reference, wish.voice, dice, max_frames, warnings)


def check_kinds(wish: object, kind: type, voice: type) -> None:
    """UserError unless a wish is of a family's own `kind`, and its voice, if it has one, of its `voice` and without a reference."""
    if not isinstance(wish, kind):
        raise UserError(f"what is to be spoken is a Wish, not {type(wish).__name__}")
    if wish.voice is None:
        return
    if not isinstance(wish.voice, voice):
        raise UserError(f"a voice is what Speaker.hear or Shelf.load gave, not {type(wish.voice).__name__}")
    if wish.ref_audio is not None or wish.ref_text:
        raise UserError("a voice that was saved brings its own reference; leave out --voice, or --ref-audio and --ref-text")


def check_reference(
    ref_audio: str | os.PathLike | tuple | None, ref_text: str | None, tags: str, manifest: Manifest
) -> tuple[Reference | None, str | None, tuple[str, ...]]:
    """The reference, the transcript that is heard with it, and warnings about both."""
    unheard = why_unheard(ref_audio, ref_text, manifest)
    script = check_script(ref_text, "the reference text", manifest, tags) if ref_text and not unheard else None
    reference = None if ref_audio is None else load_reference(ref_audio, manifest.codec, manifest.limits)
    warnings = unheard + tuple(w for part in (script, reference) if part is not None for w in part.warnings)
    return reference, script.text if script else None, warnings


def choose_dice(wish: Wish, manifest: Manifest) -> Dice:
    """The build's sampling defaults with the wishes in their place, and a seed."""
    names = ("temperature", "top_k", "top_p")
    given = {name: getattr(wish, name) for name in names if getattr(wish, name) is not None}
    sampling = check_sampling(dataclasses.replace(manifest.sampling, **given))
    return Dice(sampling, secrets.randbelow(DRAWN_SEEDS) if wish.seed is None else check_seed(wish.seed))


def choose_frames(wish: Wish, script: Script, manifest: Manifest) -> int:
    """Frames T after which speech is cut: as wished, or by the rule of the text's length."""
    limits, num_codebooks = manifest.limits, manifest.audio.num_codebooks
    if wish.max_frames is None:
        return frame_cap(script, limits, num_codebooks)
    return check_frames(wish.max_frames, most_frames(limits, num_codebooks))


def why_unheard(ref_audio: object, ref_text: str | None, manifest: Manifest) -> tuple[str, ...]:
    """A warning if there is a reference text that the model will not hear."""
    if ref_text is not None and not isinstance(ref_text, str):
        raise UserError(f"the reference text must be text, not {type(ref_text).__name__}")
    if not ref_text:
        return ()
    if ref_audio is None:
        return ("a reference text without reference audio has no effect",)
    if manifest.tokens.ref_text is None:
        return ("this checkpoint's tokenizer has no token for a reference text; it is ignored",)
    return ()


def check_context(request: Request, prompt_length: int, reference_rows: int, manifest: Manifest) -> None:
    """UserError with numbers if the prompt and the rows of the longest take exceed the context."""
    room, rows = manifest.limits.context_rows, count_rows(request, manifest)
    if prompt_length + rows > room:
        raise UserError(
            f"the prompt takes {prompt_length} positions ({reference_rows} of them the reference) and up to "
            f"{request.max_frames} frames take {rows}, together more than the {room} of this build; shorten the reference, "
            "split the text, or lower --max-frames"
        )


def count_rows(request: Request, manifest: Manifest) -> int:
    """Rows L = T + N - 1 of the longest take."""
    return request.max_frames + manifest.audio.num_codebooks - 1
