"""OmniFish: text, and perhaps a voice, speakers or a dialogue, to speech at 44.1 kHz.

speaker = Speaker.load("onnx/cpu_int4")
speech = speaker.speak("Dzień dobry.", language="pl", speaker="pl_1")
speech.save("hello.wav")
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from voxport.errors import UserError, WorkError
from voxport.families import OMNIFISH
from voxport.manifest import Manifest, verify_files
from voxport.manifest_omnifish import (
    AUDIO_EMBED,
    BODY,
    CODEC_DECODER,
    CODEC_ENCODER,
    SEMANTIC_HEAD,
    TEXT_EMBED,
    OmniFishManifest,
)
from voxport.progress import bar
from voxport.run.audio import Reference, fade_end
from voxport.run.omnifish_blocks import Block, BlockWriter, Model
from voxport.run.omnifish_codec import CodecStream, check_lively, decode, encode
from voxport.run.omnifish_request import Request, Voice, Wish, check_reference, check_wish
from voxport.run.omnifish_residual import make_residual
from voxport.run.omnifish_speech import END, MAX_FRAMES, OmniSpeech, measure
from voxport.run.omnifish_text import encode_prompt
from voxport.run.sampler import is_greedy
from voxport.run.session import Engine, Parts
from voxport.run.speech import Stopwatch
from voxport.run.stamps import Stamps
from voxport.run.stream import SpeechStream
from voxport.run.text import encode as encode_text
from voxport.run.text import load_tokenizer
from voxport.run.trust import Trust

PATTERN_FRAMES = 3  # of the self test
PATTERN_STRIDE = 37  # odd, so that the pattern visits every code of a power-of-two codebook


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=7)  # whoever called speak()


class Speaker:
    """A build folder that speaks. Parts are loaded when first needed; several threads may share one Speaker."""

    def __init__(
        self, folder: Path, manifest: OmniFishManifest, parts: Parts, warn: Callable[[str], None] = _warn, verify: bool = True
    ):
        self.folder, self.manifest, self.parts, self.warn = Path(folder), manifest, parts, warn
        self.trust = Trust(parts, manifest) if verify else None

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike,
        *,
        provider: str | None = None,
        threads: int | None = None,
        allow_fallback: bool = False,
        warn: Callable[[str], None] = _warn,
        verify: bool = True,
    ) -> Speaker:
        """Open a build folder: `provider` cpu, cuda, dml, coreml or a full name (default: what the build is for).

        Parts replay the build's proof before they first speak on a provider and machine, unless `verify` is False.
        """
        manifest = Manifest.read(folder)
        if manifest.family != OMNIFISH:
            raise UserError(f"{folder} holds a build of the family {manifest.family}; this speaker reads {OMNIFISH}")
        engine = Engine.choose(provider, threads, allow_fallback, manifest.target.device)
        return cls(Path(folder), manifest, Parts(Path(folder), manifest, engine, Stamps(folder).verify), warn, verify)

    def speak(self, text: str | None = None, *, progress: bool | None = None, **options) -> OmniSpeech:
        """Speak `text`; `options` are the other fields of `Wish`. UserError before anything is loaded if it cannot be met."""
        return self.grant(Wish(text, **options), progress)

    def speak_stream(self, text: str | None = None, **options) -> SpeechStream:
        """Like `speak`, as an iterable of samples [n] float32, a block at a time while the rest is still being made."""
        return self.stream(Wish(text, **options))

    def speak_many(self, wishes: Iterable[Wish], size: int = 1) -> Iterator[tuple[int, OmniSpeech | UserError]]:
        """Speak many texts, one after the other whatever `size`: a pass reads a whole block, so weights are read seldom enough.
        Yields (index, speech); a text that fails yields its error instead."""
        for index, wish in enumerate(wishes):
            try:
                yield index, self.grant(wish, progress=False)
            except UserError as error:
                yield index, error

    def hear(self, ref_audio: str | os.PathLike | tuple, ref_text: str | None = None, tags: str = "error") -> Voice:
        """Listen to a reference once, to speak in its voice many times."""
        return self.hear_reference(*self.check_reference(ref_audio, ref_text, tags))

    def grant(self, wish: Wish, progress: bool | None = None) -> OmniSpeech:
        """Speak one wish, decoded whole."""
        request, watch = self._check(wish), Stopwatch()
        blocks = []
        with bar(request.max_blocks, "speaking", "block", progress) as shown:
            take = self.begin(request, watch)
            for block in take.blocks():
                blocks.append(block)
                shown.update()
        codes = take.spoken(blocks)
        with watch.lap("codec"):
            samples = decode(self.parts, self.manifest, codes)
        watch.mark("first_sound")
        return self._make_speech(take, blocks, codes, samples)

    def stream(self, wish: Wish, progress: bool | None = False) -> SpeechStream:
        """Speak one wish as it comes; `.speech` is there when the last chunk was taken."""
        return SpeechStream(self._perform(self._check(wish), Stopwatch()), self.manifest.codec.sample_rate)

    def _perform(self, request: Request, watch: Stopwatch) -> Generator[np.ndarray, None, OmniSpeech]:
        take, blocks, chunks = self.begin(request, watch), [], []
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
        self._pass_on(request.warnings)
        return request

    def _pass_on(self, warnings: tuple[str, ...]) -> None:
        for warning in warnings:
            self.warn(warning)

    def begin(self, request: Request, watch: Stopwatch) -> Take:
        """Hear the reference and read the context. The model is loaded only once all of it is known to fit."""
        voice = request.voice
        if request.reference is not None:
            voice = Voice(self._encode(request.reference, watch), request.ref_text)
        codes = voice.codes if voice else np.empty((len(self.manifest.codebooks.sizes), 0), np.int64)
        with watch.lap("load"):
            text = request.prompt_text(voice is not None, voice.ref_text if voice else None)
            ids = encode_prompt(self.encode, text, self.manifest.prompt.names, self.manifest.dims.text_vocab_size)
            self._check_room(len(ids), codes.shape[1], request)
            model, residual = self.model, make_residual(self.parts, self.manifest)
            self._load(TEXT_EMBED, AUDIO_EMBED, BODY, SEMANTIC_HEAD, *residual.needs(codes.shape[1]), CODEC_DECODER)
        self._pass_on(self.parts.new_fallbacks())
        with watch.lap("prefill"):
            hidden, cache = model.prefill(ids, codes)
            residual.prime(hidden, codes)
        settings = request.settings
        writer = BlockWriter(model, cache, residual, settings.dice(), settings.steps, settings.threshold, watch)
        return Take(request, writer, np.array(ids, np.int64), voice, self.manifest)

    def _load(self, *names: str) -> None:
        self.parts.load(*names)
        if self.trust is not None:
            self.trust.require(*names)

    def _encode(self, reference: Reference, watch: Stopwatch) -> np.ndarray:
        """[N, P] codes of a reference."""
        with watch.lap("load"):
            self._load(CODEC_ENCODER)
        with watch.lap("encode"):
            return encode(self.parts, self.manifest, reference.samples)

    def check_reference(
        self, ref_audio: str | os.PathLike | tuple, ref_text: str | None = None, tags: str = "error"
    ) -> tuple[Reference, str | None]:
        """The reference ready to be encoded, and the transcript that is read with it; UserError if it holds no voice."""
        reference, ref_text, warnings = check_reference(ref_audio, ref_text, tags, self.manifest)
        self._pass_on(warnings)
        return reference, ref_text

    def hear_reference(self, reference: Reference, ref_text: str | None) -> Voice:
        """Encode a reference."""
        return Voice(self._encode(reference, Stopwatch()), ref_text)

    def running_provider(self) -> str:
        """The provider on which references are encoded."""
        self._load(CODEC_ENCODER)
        return self.parts[CODEC_ENCODER].provider

    def voice_settings(self) -> dict:
        """What of the manifest, beside its files, decides what is made of a reference: nothing."""
        return {}

    def pack_voice(self, voice: Voice) -> dict[str, np.ndarray]:
        """The arrays of a voice, for a shelf."""
        return {"codes": voice.codes}

    def unpack_voice(self, arrays: dict[str, np.ndarray], ref_text: str | None) -> Voice | None:
        """The voice again; None if its codes are none."""
        codes, sizes = arrays["codes"], np.array(self.manifest.codebooks.sizes)[:, None]
        whole = codes.dtype == np.int64 and codes.ndim == 2 and len(codes) == len(sizes) and codes.size > 0
        return Voice(codes, ref_text) if whole and codes.min() >= 0 and (codes < sizes).all() else None

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
            reference=take.voice.codes if take.voice else None,
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
    voice: Voice | None
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
            drawn = "a --temperature above 0" if is_greedy(self.request.settings.semantic) else "another seed"
            raise WorkError(f"the model ended its speech before it began; try {drawn}, another text or another voice")
        return codes

    def is_cut(self, blocks: list[Block]) -> bool:
        """Whether these are all blocks and speech did not end within them."""
        ended = blocks[-1].speech < self.manifest.generation.block_size
        if ended and sum(block.speech for block in blocks) <= self.request.max_frames:
            return False
        return ended or len(blocks) == self.request.max_blocks
