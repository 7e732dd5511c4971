"""Higgs Audio v3: text, and perhaps a voice to clone, to speech.

speaker = Speaker.load("onnx/cpu_int4")
speech = speaker.speak("Hello there.", ref_audio="voice.wav", ref_text="What the voice says.")
speech.save("hello.wav")
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from voxport.errors import UserError
from voxport.manifest import HIGGS, Manifest, verify_files
from voxport.progress import bar
from voxport.run.audio import Reference
from voxport.run.batch import BATCH, Batch, Cue, Heard, Performance, check_size
from voxport.run.codec import DECODER, ENCODER, Codec
from voxport.run.decoder import Decoder
from voxport.run.delay import apply_delay, check_codes
from voxport.run.higgs_proof import AUDIO_EMBED, BODY, HEADS, TEXT_EMBED
from voxport.run.request import Request, Voice, Wish, check_context, check_reference, check_wish, count_rows
from voxport.run.session import Engine, Parts, check_alive
from voxport.run.speech import Speech, Stopwatch, measure_health, read_timings
from voxport.run.stamps import Stamps
from voxport.run.stream import SpeechStream
from voxport.run.take import Take
from voxport.run.text import TAG, Prompt, build_prompt, load_tokenizer
from voxport.run.trust import Trust

PATTERN_STRIDE = 37  # odd, so that the fixed pattern of the self test visits every code of a power-of-two codebook


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=7)  # whoever called speak()


class Speaker:
    """A build folder that speaks. Parts are loaded when first needed, the codec's encoder only for cloning.

    Several threads may share one Speaker: nothing of an utterance is kept in it, parts are loaded and proved once, and each
    thread gets what it would get alone. A stream belongs to the thread that reads it. Threads share the cores: several
    texts are spoken sooner by one `speak_many` than by one thread each.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, parts: Parts, warn: Callable[[str], None] = _warn, verify: bool = True
    ):
        self.folder = Path(folder)
        self.manifest = manifest
        self.parts = parts
        self.codec = Codec(parts, manifest)
        self.trust = Trust(parts, manifest) if verify else None
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
        verify: bool = True,
    ) -> Speaker:
        """Open a build folder: `provider` cpu, cuda, dml, coreml or a full name (default: what the build is for).

        Parts replay the build's proof before they first speak on a provider and machine, unless `verify` is False.
        """
        manifest = Manifest.read(folder)
        if manifest.family != HIGGS:
            raise UserError(f"{folder} holds a build of the family {manifest.family}; this speaker reads {HIGGS}")
        engine = Engine.choose(provider, threads, allow_fallback, manifest.target.device)
        return cls(Path(folder), manifest, Parts(Path(folder), manifest, engine, Stamps(folder).verify), warn, verify)

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
        voice: Voice | None = None,
        progress: bool | None = None,
    ) -> Speech:
        """Speak `text`, in the voice of `ref_audio` (a file or (samples, rate)) if given, with its transcript `ref_text`,
        or in a `voice` that was heard before.

        Sampling values left out are the build's; a seed left out is drawn; `max_frames` left out follows from the text.
        `progress` shows a bar (None: on a terminal). UserError before anything is loaded if the request cannot be met.
        """
        wish = Wish(text, ref_audio, ref_text, temperature, top_k, top_p, seed, max_frames, tags, voice)
        return self.grant(wish, progress)

    def speak_stream(self, text: str, **options) -> SpeechStream:
        """Like `speak`, as an iterable of samples [n] float32 that come while the rest is still being made."""
        return self.stream(Wish(text, **options), progress=False)

    def speak_many(self, wishes: Iterable[Wish], size: int = BATCH) -> Iterator[tuple[int, Speech | UserError]]:
        """Speak many texts, up to `size` at once. Yields (index, speech), in the order in which they are over; a text that
        fails yields its error instead and holds up no other."""
        check_size(size)
        queue, heard, batch = enumerate(wishes), Heard(), None
        places: dict[Performance, int] = {}
        while True:
            while batch is None or batch.has_room:
                index, wish = next(queue, (None, None))
                if index is None:
                    break
                try:
                    member = self._begin(self._check(wish), Stopwatch(), heard)
                    batch = batch or Batch(self, size)
                    batch.admit(member)
                    places[member] = index
                except UserError as error:
                    yield index, error
            if not places:
                return
            for member in batch.advance():
                yield places.pop(member), self._outcome(member)

    def hear(self, ref_audio: str | os.PathLike | tuple, ref_text: str | None = None, tags: str = "error") -> Voice:
        """Listen to a reference once, to speak in its voice many times."""
        return self.hear_reference(*self.check_reference(ref_audio, ref_text, tags))

    def grant(self, wish: Wish, progress: bool | None = None) -> Speech:
        """Check a wish, then hear, speak and decode: the stream, joined."""
        stream = self.stream(wish, progress)
        for _ in stream:
            pass
        return stream.speech

    def stream(self, wish: Wish, progress: bool | None = None) -> SpeechStream:
        """Check a wish; hear, speak and decode as the stream is read."""
        watch = Stopwatch()
        chunks = self._perform(self._check(wish), watch, progress)
        return SpeechStream(chunks, self.manifest.codec.sample_rate)

    def _check(self, wish: Wish) -> Request:
        request = check_wish(wish, self.manifest)
        self._pass_on(request.warnings)
        return request

    def _perform(self, request: Request, watch: Stopwatch, progress: bool | None) -> Generator[np.ndarray, None, Speech]:
        member = self._begin(request, watch, Heard())
        batch = Batch(self, 1)
        batch.admit(member)
        with bar(request.max_frames, "speaking", "frame", progress) as shown:
            while batch.members:
                batch.advance()
                shown.update(member.take.settled_frames - shown.n)
                yield from member.sound()
        return self._make_speech(member)

    def _begin(self, request: Request, watch: Stopwatch, heard: Heard) -> Performance:
        cue = self._prepare(request, watch, heard)
        self._pass_on(self.parts.new_fallbacks())
        return Performance.begin(request, cue, self._start_take(request), watch, self.codec)

    def _outcome(self, member: Performance) -> Speech | UserError:
        try:
            for _ in member.sound():
                pass
            return self._make_speech(member)
        except UserError as error:
            return error

    def _pass_on(self, warnings: tuple[str, ...]) -> None:
        for warning in warnings:
            self.warn(warning)

    def _make_speech(self, member: Performance) -> Speech:
        request, cue, take, samples = member.request, member.cue, member.take, member.playback.samples()
        rate, timings = self.manifest.codec.sample_rate, read_timings(member.watch)
        return Speech(
            text=request.script.text,
            samples=samples,
            sample_rate=rate,
            codes=take.codes(),
            rows=take.rows.copy(),
            prompt_ids=cue.prompt.ids,
            reference_codes=cue.voice.codes if cue.voice else None,
            finish_reason=take.finish_reason,
            seed=request.dice.seed,
            sampling=request.dice.sampling,
            max_frames=request.max_frames,
            providers=self.parts.providers(),
            warnings=request.warnings + self.parts.fallbacks(),
            timings=timings,
            health=measure_health(timings, take, len(samples) / rate, self._bytes_per_row()),
        )

    def _prepare(self, request: Request, watch: Stopwatch, heard: Heard) -> Cue:
        """Write the prompt, hear the voice, embed the text. The model is loaded only once all of it is known to fit."""
        voice = heard.find(request) or request.voice
        codes = voice.codes if voice else self._encode(request.reference, watch)
        ref_text = voice.ref_text if voice else request.ref_text
        with watch.lap("load"):
            tokenizer = self.tokenizer
        prompt = build_prompt(tokenizer, self.manifest.tokens, request.script.text, ref_text, self._count_rows(codes))
        check_context(request, len(prompt.ids), self._count_rows(codes), self.manifest)
        with watch.lap("load"):
            self._load(TEXT_EMBED, AUDIO_EMBED, BODY, HEADS, DECODER)
        if codes is not None and voice is None:
            voice = heard.keep(request, self._hear_prompt(prompt, codes, ref_text, watch))
        start = 0 if voice is None else prompt.ref_span[1]
        with watch.lap("prefill"):
            embeds = self.embed_prompt(Prompt(prompt.ids[start:], None), None)
        return Cue(prompt, voice, embeds)

    def _count_rows(self, codes: np.ndarray | None) -> int:
        return 0 if codes is None else len(codes) + self.manifest.audio.num_codebooks - 1

    def _encode(self, reference: Reference | None, watch: Stopwatch) -> np.ndarray | None:
        """[R, N] codes of a reference."""
        if reference is None:
            return None
        with watch.lap("load"):
            self._load(ENCODER)
        with watch.lap("encode"):
            return self.codec.encode(reference.samples)

    def _hear_prompt(self, prompt: Prompt, codes: np.ndarray, ref_text: str | None, watch: Stopwatch) -> Voice:
        """Read a prompt up to its text. The text is always read apart, so that a saved voice speaks the same bits."""
        with watch.lap("prefill"):
            ids = prompt.ids[: prompt.ref_span[1]]
            rows = apply_delay(codes, self.manifest.audio)
            _, cache = self.decoder.prefill(self.embed_prompt(Prompt(ids, prompt.ref_span), rows))
            return Voice(codes, ref_text, ids, cache.read())

    def check_reference(
        self, ref_audio: str | os.PathLike | tuple, ref_text: str | None = None, tags: str = "error"
    ) -> tuple[Reference, str | None]:
        """The reference ready to be encoded, and the transcript that is heard with it; UserError if it holds no voice."""
        reference, ref_text, warnings = check_reference(ref_audio, ref_text, tags, self.manifest)
        self._pass_on(warnings)
        return reference, ref_text

    def hear_reference(self, reference: Reference, ref_text: str | None) -> Voice:
        """Encode a reference and read it as the beginning of a prompt."""
        watch = Stopwatch()
        codes = self._encode(reference, watch)
        prompt = build_prompt(self.tokenizer, self.manifest.tokens, "", ref_text, self._count_rows(codes))
        if len(prompt.ids) >= self.manifest.limits.context_rows:
            room = self.manifest.limits.context_rows
            raise UserError(f"the reference takes {len(prompt.ids)} of the {room} positions of this build; shorten it")
        self._load(TEXT_EMBED, AUDIO_EMBED, BODY)
        return self._hear_prompt(prompt, codes, ref_text, watch)

    def remember(self, speech: Speech) -> Voice:
        """The voice of something that was spoken, for saying more in it."""
        ref_text = self.manifest.tokens.ref_text and TAG.sub("", speech.text)
        prompt = build_prompt(self.tokenizer, self.manifest.tokens, "", ref_text, self._count_rows(speech.codes))
        return self._hear_prompt(prompt, speech.codes, ref_text, Stopwatch())

    def running_provider(self) -> str:
        """The provider on which the language model really runs."""
        self._load(BODY)
        return self.parts[BODY].provider

    def voice_settings(self) -> dict:
        """What of the manifest, beside its files, decides what is made of a reference."""
        return {"tokens": dataclasses.asdict(self.manifest.tokens)}

    def pack_voice(self, voice: Voice) -> dict[str, np.ndarray]:
        """The arrays of a voice, for a shelf."""
        return {"codes": voice.codes, "ids": voice.ids, "pieces": np.stack(voice.pieces)}

    def unpack_voice(self, arrays: dict[str, np.ndarray], ref_text: str | None) -> Voice | None:
        """The voice again; None if its cache is not of this build's shape, UserError if its codes are none."""
        dims, ids, pieces = self.manifest.dims, arrays["ids"], arrays["pieces"]
        codes = check_codes(arrays["codes"], self.manifest.audio, "codes")
        shape = (2 * dims.num_layers, dims.num_kv_heads, ids.size, dims.head_dim)
        has_ids = ids.ndim == 1 and ids.dtype == np.int64
        has_pieces = pieces.shape == shape and pieces.dtype == self.manifest.kv_cache.dtype and np.isfinite(pieces).all()
        return Voice(codes, ref_text, ids, list(pieces)) if has_ids and has_pieces else None

    def _load(self, *names: str) -> None:
        self.parts.load(*names)
        if self.trust is not None:
            self.trust.require(*names)

    def _start_take(self, request: Request) -> Take:
        return Take(self.manifest.audio, count_rows(request, self.manifest), self.manifest.limits.plateau_frames)

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

    def read_logits(self, hidden: np.ndarray) -> np.ndarray:
        """Hidden states [B, 1, D] -> [B, N, V]."""
        heads, audio = self.parts[HEADS], self.manifest.audio
        logits = heads.run(hidden_states=hidden)[:, 0]
        if logits.shape[1:] != (audio.num_codebooks, audio.vocab_size):
            wanted = [audio.num_codebooks, audio.vocab_size]
            found = list(logits.shape[1:])
            raise UserError(f"{heads.name} gives {found} logits a row, the manifest says {wanted}; build it again")
        for its_logits in logits:
            check_alive(its_logits, "logits", heads)
        return logits

    @cached_property
    def tokenizer(self) -> Tokenizer:
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
