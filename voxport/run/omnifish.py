"""OmniFish: text, and perhaps a voice, speakers or a dialogue, to speech at 44.1 kHz.

speaker = Speaker.load("onnx/cpu_int4")
speech = speaker.speak("Dzień dobry.", language="pl", speaker="pl_1")
speech.save("hello.wav")
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from voxport.errors import UserError, WorkError
from voxport.families import OMNIFISH
from voxport.manifest import Manifest, verify_files
from voxport.manifest_omnifish import CODEC_DECODER, CODEC_ENCODER, OmniFishManifest
from voxport.progress import bar
from voxport.run.audio import fade_end
from voxport.run.omnifish_blocks import Block, BlockWriter, Model
from voxport.run.omnifish_codec import CodecStream, check_lively, decode, encode
from voxport.run.omnifish_request import Request, Wish, check_wish
from voxport.run.omnifish_residual import make_residual
from voxport.run.omnifish_speech import END, MAX_FRAMES, OmniSpeech, measure
from voxport.run.omnifish_text import encode_prompt
from voxport.run.session import Engine, Parts
from voxport.run.speech import Stopwatch
from voxport.run.stream import SpeechStream
from voxport.run.text import encode as encode_text
from voxport.run.text import load_tokenizer

PATTERN_FRAMES = 3  # of the self test
PATTERN_STRIDE = 37  # odd, so that the pattern visits every code of a power-of-two codebook


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=7)  # whoever called speak()


@dataclass(frozen=True)
class Reference:
    """A voice as the model hears it: codes [N, P], and the transcript that goes with them."""

    codes: np.ndarray
    text: str | None


class Speaker:
    """A build folder that speaks. Parts are loaded when first needed; several threads may share one Speaker."""

    def __init__(self, folder: Path, manifest: OmniFishManifest, parts: Parts, warn: Callable[[str], None] = _warn):
        self.folder, self.manifest, self.parts, self.warn = Path(folder), manifest, parts, warn

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
        if manifest.family != OMNIFISH:
            raise UserError(f"{folder} holds a {manifest.family} build; this speaker reads {OMNIFISH}")
        engine = Engine.choose(provider, threads, allow_fallback, manifest.target.device)
        return cls(Path(folder), manifest, Parts(Path(folder), manifest, engine), warn)

    def speak(self, text: str | None = None, *, progress: bool | None = None, **options) -> OmniSpeech:
        """Speak `text`; `options` are the other fields of `Wish`. UserError before anything is loaded if it cannot be met."""
        return self.grant(Wish(text, **options), progress)

    def speak_stream(self, text: str | None = None, **options) -> SpeechStream:
        """Like `speak`, as an iterable of samples [n] float32, a block at a time while the rest is still being made."""
        return self.stream(Wish(text, **options))

    def grant(self, wish: Wish, progress: bool | None = None, reference: Reference | None = None) -> OmniSpeech:
        """Speak one wish, in the voice of a `reference` that was heard before if there is one."""
        request, watch = self._check(wish), Stopwatch()
        blocks = []
        with bar(request.max_blocks, "speaking", "block", progress) as shown:
            take = self._begin(request, watch, reference)
            for block in take.blocks():
                blocks.append(block)
                shown.update()
        codes = take.spoken(blocks)
        with watch.lap("codec"):
            samples = decode(self.parts, self.manifest, codes)
        watch.mark("first_sound")
        return self._make_speech(take, blocks, codes, samples)

    def stream(self, wish: Wish, progress: bool | None = False, reference: Reference | None = None) -> SpeechStream:
        """Speak one wish as it comes; `.speech` is there when the last chunk was taken."""
        return SpeechStream(self._perform(self._check(wish), Stopwatch(), reference), self.manifest.codec.sample_rate)

    def _perform(self, request: Request, watch: Stopwatch, reference: Reference | None) -> Generator[np.ndarray, None, OmniSpeech]:
        take, blocks, chunks = self._begin(request, watch, reference), [], []
        sound = CodecStream(self.parts, self.manifest)
        for block in take.blocks():
            blocks.append(block)
            new = take.codes(blocks)[:, sound.position :]
            if new.shape[1]:
                with watch.lap("codec"):
                    chunks.append(sound.decode(new))
                watch.mark("first_sound")
                yield fade_end(chunks[-1], self.manifest.codec.sample_rate) if take.is_cut(blocks) else chunks[-1]
        codes = take.spoken(blocks)
        return self._make_speech(take, blocks, codes, check_lively(sound, np.concatenate(chunks)))

    def _check(self, wish: Wish) -> Request:
        request = check_wish(wish, self.manifest)
        for warning in request.warnings:
            self.warn(warning)
        return request

    def _begin(self, request: Request, watch: Stopwatch, reference: Reference | None) -> Take:
        """Hear the reference and read the context. The model is loaded only once all of it is known to fit."""
        if request.reference is not None:
            reference = self._hear(request, watch)
        codes = reference.codes if reference else np.empty((len(self.manifest.codebooks.sizes), 0), np.int64)
        with watch.lap("load"):
            text = request.prompt_text(reference is not None, reference.text if reference else None)
            ids = encode_prompt(self.encode, text, self.manifest.prompt.names, self.manifest.dims.text_vocab_size)
            self._check_room(len(ids), codes.shape[1], request)
            model, residual = self.model, make_residual(self.parts, self.manifest)
            self.parts.load(CODEC_DECODER)
        for warning in self.parts.fallbacks():
            self.warn(warning)
        with watch.lap("prefill"):
            hidden, cache = model.prefill(ids, codes)
            residual.prime(hidden, codes)
        settings = request.settings
        writer = BlockWriter(model, cache, residual, settings.dice(), settings.steps, settings.threshold, watch)
        return Take(request, writer, np.array(ids, np.int64), reference, self.manifest)

    def _hear(self, request: Request, watch: Stopwatch) -> Reference:
        with watch.lap("load"):
            self.parts.load(CODEC_ENCODER)
        with watch.lap("encode"):
            return Reference(encode(self.parts, self.manifest, request.reference.samples), request.ref_text)

    def _check_room(self, text: int, frames: int, request: Request) -> None:
        size, room = self.manifest.generation.block_size, self.manifest.limits.context_rows
        wanted = text + frames + request.max_blocks * size
        if wanted > room:
            raise UserError(
                f"the text takes {text} positions, the reference {frames}, and {request.max_blocks} blocks of {size} frames the "
                f"rest of {wanted}, more than the {room} of this build; shorten the reference or the text, or lower --max-frames"
            )

    def _make_speech(self, take: Take, blocks: list[Block], codes: np.ndarray, samples: np.ndarray) -> OmniSpeech:
        request, rate = take.request, self.manifest.codec.sample_rate
        return OmniSpeech(
            text=request.text,
            samples=samples,
            sample_rate=rate,
            codes=codes,
            frames_per_block=[block.speech for block in blocks],
            prompt_ids=take.prompt_ids,
            reference=take.reference.codes if take.reference else None,
            finish_reason=MAX_FRAMES if take.is_cut(blocks) else END,
            settings=request.settings,
            max_frames=request.max_frames,
            providers=self.parts.providers(),
            warnings=request.warnings + self.parts.fallbacks(),
            health=measure(take.writer.watch, len(blocks), codes.shape[1], len(samples) / rate),
        )

    def encode(self, text: str) -> list[int]:
        """Ids of `text` alone."""
        return encode_text(self.tokenizer, text)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The build's tokenizer, verified when first used."""
        return load_tokenizer(self.folder, self.manifest)

    @cached_property
    def model(self) -> Model:
        """The body and what surrounds it, loaded and probed when first used."""
        return Model(self.parts, self.manifest)

    def selftest(self) -> dict:
        """Verify every file, then decode a fixed pattern of codes; the codec checks its length and finiteness."""
        parts = self.manifest.parts.values()
        files = self.manifest.files | {name: record for part in parts for name, record in part.files.items()}
        verify_files(self.folder, files)
        sizes = np.array(self.manifest.codebooks.sizes)[:, None]
        codes = np.arange(len(sizes) * PATTERN_FRAMES).reshape(-1, PATTERN_FRAMES) * PATTERN_STRIDE % sizes
        samples = decode(self.parts, self.manifest, codes)
        return {"files": len(files), "frames": PATTERN_FRAMES, "samples": len(samples), "peak": float(np.abs(samples).max()),
                "providers": self.parts.providers()}  # fmt: skip


@dataclass(frozen=True)
class Take:
    """One utterance being written."""

    request: Request
    writer: BlockWriter
    prompt_ids: np.ndarray
    reference: Reference | None
    manifest: OmniFishManifest

    def blocks(self) -> Iterator[Block]:
        """Block after block, up to the one in which speech ends or the last that is allowed."""
        for _ in range(self.request.max_blocks):
            block = self.writer.write()
            if self.writer.count == 1:
                self.writer.watch.mark("first_block")
            yield block
            if block.speech < self.manifest.generation.block_size:
                return

    def codes(self, blocks: list[Block]) -> np.ndarray:
        """[N, T] of all blocks, no more frames than were asked for."""
        return np.concatenate([block.codes for block in blocks], axis=1)[:, : self.request.max_frames]

    def spoken(self, blocks: list[Block]) -> np.ndarray:
        """The same of speech that is over. WorkError if there is none."""
        codes = self.codes(blocks)
        if not codes.shape[1]:
            raise WorkError("the model ended its speech before it began; try another seed, text or voice")
        return codes

    def is_cut(self, blocks: list[Block]) -> bool:
        """Whether these are all blocks and speech did not end within them."""
        ended = blocks[-1].speech < self.manifest.generation.block_size
        if ended and sum(block.speech for block in blocks) <= self.request.max_frames:
            return False
        return ended or len(blocks) == self.request.max_blocks
