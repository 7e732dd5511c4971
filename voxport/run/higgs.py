"""Higgs Audio v3: text, and perhaps a voice to clone, to speech.

speaker = Speaker.load("onnx/cpu_int4")
speech = speaker.speak("Hello there.", ref_audio="voice.wav", ref_text="What the voice says.")
speech.save("hello.wav")
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from voxport.errors import UserError
from voxport.manifest import HIGGS, Manifest, verify_files
from voxport.progress import bar
from voxport.run.audio import Reference, load_reference
from voxport.run.codec import DECODER, ENCODER, Codec
from voxport.run.decoder import Decoder
from voxport.run.delay import apply_delay
from voxport.run.sampler import Dice, check_sampling, check_seed, is_greedy
from voxport.run.session import Engine, Parts, check_alive
from voxport.run.speech import Speech, Stopwatch, Timings, measure_health, read_timings
from voxport.run.take import Take
from voxport.run.text import Prompt, Script, build_prompt, check_script, frame_cap, load_tokenizer, most_frames

BODY, HEADS, TEXT_EMBED, AUDIO_EMBED = "llm_decoder", "audio_heads", "text_embed", "audio_embed"
DRAWN_SEEDS = 1 << 31  # a seed that is drawn stays short enough to be typed again
PATTERN_STRIDE = 37  # odd, so that the fixed pattern of the self test visits every code of a power-of-two codebook


@dataclass(frozen=True)
class Request:
    """One utterance as asked for, checked before any part is loaded."""

    script: Script
    ref_script: Script | None
    reference: Reference | None
    dice: Dice
    max_frames: int

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the checks found strange but usable."""
        checked = (self.script, self.ref_script, self.reference)
        return tuple(warning for part in checked if part is not None for warning in part.warnings)


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)


class Speaker:
    """A build folder that speaks. Parts are loaded when first needed, the codec's encoder only for cloning.

    Several threads may share one Speaker: nothing of an utterance is kept in it.
    """

    def __init__(self, folder: Path, manifest: Manifest, parts: Parts, warn: Callable[[str], None] = _warn):
        self.folder = Path(folder)
        self.manifest = manifest
        self.parts = parts
        self.codec = Codec(parts, manifest)
        self.warn = warn

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike,
        *,
        provider: str | None = None,
        threads: int | None = None,
        allow_fallback: bool = False,
        warn: Callable[[str], None] = _warn,
    ) -> Speaker:
        """Open a build folder: `provider` cpu, cuda, dml, coreml or a full name (default: what the build is for)."""
        manifest = Manifest.read(Path(folder))
        if manifest.family != HIGGS:
            raise UserError(f"{folder} holds a {manifest.family} build; this speaker reads {HIGGS}")
        engine = Engine.choose(provider, threads, allow_fallback, manifest.target.device)
        return cls(Path(folder), manifest, Parts(Path(folder), manifest, engine), warn)

    def speak(
        self,
        text: str,
        *,
        ref_audio: str | os.PathLike | tuple | None = None,
        ref_text: str | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        max_frames: int | None = None,
        tags: str = "error",
        progress: bool | None = None,
    ) -> Speech:
        """Speak `text`, in the voice of `ref_audio` (a file or (samples, rate)) if given, with its transcript `ref_text`.

        Sampling values left out are the build's; a seed left out is drawn; `max_frames` left out follows from the text.
        `progress` shows a bar (None: on a terminal). UserError before anything is loaded if the request cannot be met.
        """
        watch = Stopwatch()
        given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        dice = self.choose_dice({name: value for name, value in given.items() if value is not None}, seed)
        request = self.check_request(text, ref_audio, ref_text, dice, max_frames, tags)
        return self._speak(request, watch, progress)

    def choose_dice(self, given: dict[str, float], seed: int | None) -> Dice:
        """The build's sampling defaults with `given` in their place, and a seed."""
        sampling = check_sampling(dataclasses.replace(self.manifest.sampling, **given))
        return Dice(sampling, secrets.randbelow(DRAWN_SEEDS) if seed is None else check_seed(seed))

    def check_request(
        self,
        text: str,
        ref_audio: str | os.PathLike | tuple | None,
        ref_text: str | None,
        dice: Dice,
        max_frames: int | None,
        tags: str,
    ) -> Request:
        """Check everything that can be checked without loading a part; warn about the rest."""
        script = check_script(text, "the text", self.manifest, tags)
        ref_script = None
        if ref_text and self._hears_transcript(ref_audio):
            ref_script = check_script(ref_text, "the reference text", self.manifest, tags)
        cap = self._check_frames(max_frames, script)
        reference = None
        if ref_audio is not None:
            reference = load_reference(ref_audio, self.manifest.codec, self.manifest.limits)
        request = Request(script, ref_script, reference, dice, cap)
        for warning in request.warnings:
            self.warn(warning)
        return request

    def _hears_transcript(self, ref_audio: object) -> bool:
        if ref_audio is None:
            self.warn("a reference text without reference audio has no effect")
            return False
        if self.manifest.tokens.ref_text is None:
            self.warn("this checkpoint's tokenizer has no token for a reference text; it is ignored")
            return False
        return True

    def _check_frames(self, max_frames: int | None, script: Script) -> int:
        limits, num_codebooks = self.manifest.limits, self.manifest.audio.num_codebooks
        if max_frames is None:
            return frame_cap(script, limits, num_codebooks)
        if not 1 <= max_frames <= most_frames(limits, num_codebooks):
            raise UserError(f"--max-frames must lie in 1..{most_frames(limits, num_codebooks)}, not {max_frames}")
        return max_frames

    def _speak(self, request: Request, watch: Stopwatch, progress: bool | None) -> Speech:
        reference_codes = self._encode_reference(request.reference, watch)
        prompt, embeds = self._read_prompt(request, reference_codes, watch)
        take = self._start_take(request)
        with bar(request.max_frames, "speaking", "frame", progress) as shown:
            for settled_frames in self._perform(embeds, take, request.dice, watch):
                shown.update(settled_frames - shown.n)
        with watch.lap("decode"):
            codes = take.codes()
            samples = self.codec.decode(codes)
        return self._make_speech(request, prompt, reference_codes, take, codes, samples, read_timings(watch))

    def _make_speech(
        self,
        request: Request,
        prompt: Prompt,
        reference_codes: np.ndarray | None,
        take: Take,
        codes: np.ndarray,
        samples: np.ndarray,
        timings: Timings,
    ) -> Speech:
        rate = self.manifest.codec.sample_rate
        return Speech(
            text=request.script.text,
            samples=samples,
            sample_rate=rate,
            codes=codes,
            rows=take.rows.copy(),
            prompt_ids=prompt.ids,
            reference_codes=reference_codes,
            finish_reason=take.finish_reason,
            seed=request.dice.seed,
            sampling=request.dice.sampling,
            max_frames=request.max_frames,
            providers=self.parts.providers(),
            warnings=request.warnings,
            timings=timings,
            health=measure_health(timings, take, len(samples) / rate, self._bytes_per_row()),
        )

    def _encode_reference(self, reference: Reference | None, watch: Stopwatch) -> np.ndarray | None:
        if reference is None:
            return None
        with watch.lap("load"):
            self.parts.load(ENCODER)
        with watch.lap("encode"):
            return self.codec.encode(reference.samples)

    def _read_prompt(
        self, request: Request, reference_codes: np.ndarray | None, watch: Stopwatch
    ) -> tuple[Prompt, np.ndarray]:
        """Prompt ids and their embeddings [1, P, D]; UserError if prompt and rows exceed the context."""
        rows = None if reference_codes is None else apply_delay(reference_codes, self.manifest.audio)
        with watch.lap("load"):
            tokenizer = self.tokenizer
        ref_text = request.ref_script.text if request.ref_script else None
        num_rows = 0 if rows is None else len(rows)
        prompt = build_prompt(tokenizer, self.manifest.tokens, request.script.text, ref_text, num_rows)
        self._check_context(len(prompt.ids), num_rows, request.max_frames)
        with watch.lap("load"):
            self.parts.load(TEXT_EMBED, AUDIO_EMBED, BODY, HEADS, DECODER)
        with watch.lap("prefill"):
            return prompt, self.embed_prompt(prompt, rows)

    def _check_context(self, prompt_length: int, reference_rows: int, max_frames: int) -> None:
        room, rows = self.manifest.limits.context_rows, max_frames + self.manifest.audio.num_codebooks - 1
        if prompt_length + rows > room:
            raise UserError(
                f"the prompt takes {prompt_length} positions ({reference_rows} of them the reference) and up to "
                f"{max_frames} frames take {rows}, together more than the {room} of this build; shorten the reference, "
                "split the text, or lower --max-frames"
            )

    def _start_take(self, request: Request) -> Take:
        guard = 0 if is_greedy(request.dice.sampling) else self.manifest.limits.plateau_frames
        return Take(self.manifest.audio, request.max_frames + self.manifest.audio.num_codebooks - 1, guard)

    def _perform(self, embeds: np.ndarray, take: Take, dice: Dice, watch: Stopwatch) -> Iterator[int]:
        """Add rows to `take` until it is over; yields the number of settled frames after each row."""
        decoder, heads = self.decoder, self.parts[HEADS]
        with watch.lap("prefill"):
            hidden, cache = decoder.prefill(embeds)
        while True:
            with watch.lap("rows"):
                logits = check_alive(heads.run(hidden_states=hidden)[0, 0], "logits", heads)
                take.add(dice.roll(logits, len(take)))
            watch.mark("first_row")
            yield take.settled_frames
            if take.finish_reason:
                return
            with watch.lap("rows"):
                hidden, cache = decoder.step(cache, self.embed_rows(take.next_input[None]))

    def embed_prompt(self, prompt: Prompt, reference_rows: np.ndarray | None) -> np.ndarray:
        """[1, P, D] float32: text embeddings with the reference rows [R + N - 1, N] laid over their span."""
        ids = prompt.ids.copy()
        if prompt.ref_span is None:
            return self.parts[TEXT_EMBED].run(input_ids=ids[None]).astype(np.float32)
        span = slice(*prompt.ref_span)
        ids[span] = 0  # any valid id: the placeholder is none, and its embedding is written over
        embeds = self.parts[TEXT_EMBED].run(input_ids=ids[None]).astype(np.float32)
        embeds[:, span] = self.embed_rows(reference_rows)
        return embeds

    def embed_rows(self, rows: np.ndarray) -> np.ndarray:
        """[L, N] rows -> [1, L, D]."""
        return self.parts[AUDIO_EMBED].run(codes=rows[None])

    @cached_property
    def tokenizer(self):
        """The build's tokenizer, verified when first used."""
        return load_tokenizer(self.folder, self.manifest)

    @cached_property
    def decoder(self) -> Decoder:
        """The language model, loaded when first used."""
        return Decoder(self.parts[BODY], self.manifest.kv_cache, self.manifest.dims)

    def _bytes_per_row(self) -> int:
        weights = (self.manifest.part(name) for name in (BODY, HEADS))
        return sum(record.bytes for part in weights for record in part.files.values())

    def selftest(self) -> dict:
        """Verify every file, then decode a fixed pattern of codes; the codec checks its length and finiteness."""
        parts = self.manifest.parts.values()
        files = self.manifest.files | {name: record for part in parts for name, record in part.files.items()}
        verify_files(self.folder, files)
        audio, num_frames = self.manifest.audio, 2 * self.manifest.codec.context_frames + 1
        codes = np.arange(num_frames * audio.num_codebooks).reshape(num_frames, -1) * PATTERN_STRIDE
        samples = self.codec.decode(codes % audio.codebook_size)
        return {
            "files": len(files),
            "frames": num_frames,
            "samples": len(samples),
            "peak": float(np.abs(samples).max()),
            "providers": self.parts.providers(),
        }
