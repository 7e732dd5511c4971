"""What speaking reads: manifests, references, text, lists of lines, dialogues, saved voices, tokenizers."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import soundfile

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from run_fakes import CONTROL, STRUCTURE, FakeParts, encoder_session, make_manifest, make_tokenizer  # noqa: E402

from fuzz.mutate import NUMBERS, change_somewhere, dump, mutate_bytes, mutate_json, random_text  # noqa: E402
from voxport.errors import UserError  # noqa: E402
from voxport.families import HIGGS, OMNIFISH  # noqa: E402
from voxport.manifest import Codec, Figure, Manifest, Proof, TensorSpec, record_file, verify_files  # noqa: E402
from voxport.manifest_omnifish import OmniFishManifest  # noqa: E402
from voxport.run.audio import load_reference, resample  # noqa: E402
from voxport.run.delay import check_codes  # noqa: E402
from voxport.run.higgs import Speaker  # noqa: E402
from voxport.run.lines import FIELDS, read_lines  # noqa: E402
from voxport.run.longtext import is_speakable, split_text  # noqa: E402
from voxport.run.omnifish_request import Wish as OmniWish  # noqa: E402
from voxport.run.omnifish_request import check_wish as check_omni_wish  # noqa: E402
from voxport.run.omnifish_text import dialogue_text, encode_prompt, read_dialogue, speakers  # noqa: E402
from voxport.run.proof import check_proof  # noqa: E402
from voxport.run.request import Wish, check_wish, count_rows  # noqa: E402
from voxport.run.take import Take  # noqa: E402
from voxport.run.text import TAG, TAG_POLICIES, build_prompt, check_script, encode, frame_cap, load_tokenizer  # noqa: E402
from voxport.run.voices import SOURCE, Shelf, write_arrays  # noqa: E402

VOICE = (np.sin(np.arange(700) / 5).astype(np.float32) * 0.5, 1000)
REAL_CODEC = Codec(24000, 960, 24000, 10)
REAL_LIMITS = dataclasses.replace(make_manifest().limits, warn_reference_seconds=30.0, max_reference_seconds=100.0)


def squeeze(text: str) -> str:
    return "".join(text.split())


def higgs_manifest() -> Manifest:
    """That of the stand-in, with every section filled."""
    manifest = make_manifest()
    figure = Figure("0" * 64, [4], [0.5], [[0.1] * 4], [[0, 1]], [[0.5, -0.5]])
    proof = Proof(1, "CPUExecutionProvider", "1.32.0", "any", 2, [], [1, -100, 3], [[1, 2, 3]], [[0.0, 1.0]], {"text_embed: prompt": figure})
    spec = TensorSpec("input_ids", "int64", ["B", "S"])
    parts = {name: dataclasses.replace(part, inputs=[spec], outputs=[spec], recipe={"bits": 4}) for name, part in manifest.parts.items()}
    return dataclasses.replace(manifest, parts=parts, proof=proof, files={"tokenizer.json": next(iter(parts["text_embed"].files.values()))})


def omnifish_manifest() -> dict:
    """One of an axial checkpoint, as JSON: the sections that both families have are the stand-in's."""
    shared = dataclasses.asdict(higgs_manifest())
    for name in ("audio", "codec", "tokens", "limits", "family", "control_tags"):
        del shared[name]
    licence = {"name": "none", "file": None}
    limits = {"context_rows": 200, "warn_reference_seconds": 0.5, "max_reference_seconds": 2.0, "cap_base_frames": 20,
              "cap_frames_per_char": 4, "cap_frames_per_wide_char": 10, "cap_frames_per_tag": 0, "max_rows": 100}  # fmt: skip
    return shared | {
        "family": OMNIFISH,
        "codec_licence": licence,
        "codebooks": {"sizes": [16, 8, 8], "vocab_size": 20, "mask_id": 16, "end_id": 17, "pad_ids": [18, 19]},
        "codec": {"sample_rate": 1000, "hop_length": 7, "max_frames": 100, "min_encode_samples": 7},
        "residual": {"kind": "axial", "size": 8, "num_layers": 2, "num_kv_heads": 1, "head_dim": 4, "prompt_cross": True},
        "prompt": {"names": ["en_anna", "pl_jan", "q1", "q2"], "num_speakers": 2, "languages": ["None", "en", "pl"],
                   "ref_text_prefix": True, "denoise_token": False, "instruct_template": "speaker:{spk} quality:{q}"},
        "control_tags": {},
        "generation": {"block_size": 4, "context_mode": "full", "steps": 2, "threshold": 0.9, "residual_rounds": 2},
        "residual_sampling": shared["sampling"],
        "limits": limits,
        "attention": "gqa",
    }  # fmt: skip


class ManifestReader:
    """manifest.json of either family, and the first that speaking does with it."""

    weight = 3000

    def __init__(self, family: str):
        self.name, self.family = f"manifest of {family}", family

    def prepare(self) -> None:
        self.base = dataclasses.asdict(higgs_manifest()) if self.family == HIGGS else omnifish_manifest()
        self.tokenizer = make_tokenizer()

    def run(self, rng: random.Random, folder: Path) -> None:
        # half of the damage goes below one section, or most would fall on the many file records
        within = (rng.choice([key for key, held in self.base.items() if isinstance(held, dict) and held]),)
        damaged = mutate_json(rng, self.base, within if rng.random() < 0.7 else ()) if rng.random() > 0.02 else dump(self.base)
        (folder / "manifest.json").write_bytes(damaged)
        manifest = Manifest.read(folder)
        assert isinstance(manifest, (Manifest, OmniFishManifest))
        self._files_stay_inside(manifest, folder)
        (self._use_higgs if isinstance(manifest, Manifest) else self._use_omnifish)(manifest)
        again = folder / "again"
        again.mkdir()
        manifest.write(again)
        assert json.dumps(dataclasses.asdict(Manifest.read(again))) == json.dumps(dataclasses.asdict(manifest))

    def _files_stay_inside(self, manifest, folder: Path) -> None:
        for name in [*manifest.files, *(file for part in manifest.parts.values() for file in part.files)]:
            assert (folder / name).parent == folder
        try:
            verify_files(folder, manifest.files)
        except UserError:
            pass
        if manifest.proof is not None and manifest.family == HIGGS:
            try:
                check_proof(manifest)
            except UserError:
                pass

    def _use_higgs(self, manifest: Manifest) -> None:
        """Everything up to the first part that would be loaded."""
        request = check_wish(Wish("Hello you", VOICE, "Hello", seed=1), manifest)
        assert np.isfinite(request.reference.samples).all() and request.max_frames >= 1
        prompt = build_prompt(self.tokenizer, manifest.tokens, request.script.text, None, 5)
        assert prompt.ids.dtype == np.int64
        take = Take(manifest.audio, count_rows(request, manifest), manifest.limits.plateau_frames)
        rng = np.random.default_rng(1)
        while take.finish_reason is None and len(take) < manifest.audio.num_codebooks + 5:
            take.add(rng.integers(0, manifest.audio.vocab_size, manifest.audio.num_codebooks))
        if len(take) >= manifest.audio.num_codebooks:
            check_codes(take.codes(), manifest.audio, "codes")
        for template in (manifest.kv_cache.past_key, manifest.kv_cache.present_value):
            assert template.format(3).count("3") > template.count("3")
        np.dtype(manifest.kv_cache.dtype)

    def _use_omnifish(self, manifest: OmniFishManifest) -> None:
        wish = OmniWish("Hello you", ref_audio=VOICE, ref_text="Hello", seed=1)
        for names in ({}, {"speaker": manifest.prompt.names[0]}) if manifest.prompt.num_speakers else ({},):
            request = check_omni_wish(dataclasses.replace(wish, **names), manifest)
            text = request.prompt_text(True, request.ref_text)
            ids = encode_prompt(lambda piece: encode(self.tokenizer, piece), text, manifest.prompt.names, manifest.dims.text_vocab_size)
            assert ids and request.max_blocks * request.block_size >= request.max_frames >= 1


class SoundReader:
    """References: WAV files built by hand with any header, and files of every format with damage."""

    name, weight = "reference sound", 4000

    def prepare(self) -> None:
        rng = np.random.default_rng(5)
        self.files = []
        for container, subtype, rate, channels, length in (
            ("WAV", "PCM_16", 24000, 1, 900), ("WAV", "PCM_U8", 8000, 2, 400), ("WAV", "FLOAT", 48000, 1, 300),
            ("WAV", "DOUBLE", 96000, 1, 100), ("WAV", "PCM_24", 44100, 3, 300), ("WAV", "ULAW", 16000, 1, 500),
            ("WAV", "IMA_ADPCM", 16000, 1, 2000), ("WAV", "MS_ADPCM", 16000, 1, 2000), ("WAV", "GSM610", 8000, 1, 1000),
            ("WAVEX", "PCM_16", 24000, 2, 300), ("RF64", "PCM_16", 24000, 1, 300), ("W64", "PCM_16", 24000, 1, 300),
            ("FLAC", "PCM_16", 44100, 1, 5000), ("FLAC", "PCM_24", 24000, 2, 3000), ("OGG", "VORBIS", 24000, 1, 3000),
            ("OGG", "OPUS", 48000, 1, 3000), ("AIFF", "PCM_16", 24000, 1, 300), ("CAF", "PCM_16", 24000, 1, 300),
            ("MP3", "MPEG_LAYER_III", 24000, 1, 3000), ("AU", "PCM_16", 8000, 1, 300),
        ):  # fmt: skip
            if soundfile.check_format(container, subtype):
                held = io.BytesIO()
                soundfile.write(held, rng.uniform(-0.5, 0.5, (length, channels)), rate, subtype, format=container)
                self.files.append(held.getvalue())

    def run(self, rng: random.Random, folder: Path) -> None:
        path = folder / rng.choice(("voice.wav", "voice.flac", "voice.ogg", "voice.mp3", "voice"))
        kind = rng.random()
        if kind < 0.4:
            path.write_bytes(mutate_bytes(rng, rng.choice(self.files), 96))
        elif kind < 0.75:
            path.write_bytes(self._riff(rng))
        elif kind < 0.8:
            path.write_bytes(rng.randbytes(rng.randrange(300)))
        else:
            return self._whole(rng, path)
        self._holds(load_reference(path, REAL_CODEC, REAL_LIMITS))

    def _holds(self, reference) -> None:
        samples = reference.samples
        assert samples.dtype == np.float32 and samples.ndim == 1 and np.isfinite(samples).all()
        assert 0 < reference.seconds <= REAL_LIMITS.max_reference_seconds
        wanted = max(REAL_CODEC.min_encode_samples, reference.seconds * REAL_CODEC.sample_rate)
        assert abs(len(samples) - wanted) < 2

    def _whole(self, rng: random.Random, path: Path) -> None:
        """An undamaged file of any rate and number of channels is read as the mean of its channels, at the codec's rate."""
        rate, channels, length = (
            rng.choice((8000, 11025, 24000, 44100, 48000, rng.randint(1000, 200_000))),
            rng.randint(1, 9),
            rng.randint(1, 3000),
        )
        sound = np.random.default_rng(rng.getrandbits(32)).integers(-9000, 9000, (length, channels)).astype(np.int16)
        soundfile.write(path, sound, rate, "PCM_16", format="WAV")
        reference = load_reference(path, REAL_CODEC, REAL_LIMITS)
        mono = (sound / np.float32(32768)).astype(np.float32).mean(axis=1, dtype=np.float32)
        wanted = resample(mono, rate, REAL_CODEC.sample_rate)
        assert len(wanted) == -(-length * REAL_CODEC.sample_rate // rate)
        assert np.array_equal(reference.samples[: len(wanted)], wanted) and not reference.samples[len(wanted) :].any()
        self._holds(reference)

    def _riff(self, rng: random.Random) -> bytes:
        """A header whose fields are right, or on the edge of their types, each by itself."""

        def field(right: int, bits: int) -> int:
            return right if rng.random() < 0.75 else rng.choice((*NUMBERS, rng.getrandbits(bits))) % (1 << bits)

        channels, rate, bits = rng.choice((1, 1, 2, 6)), rng.choice((8000, 24000, 44100)), rng.choice((8, 16, 24, 32))
        block = channels * bits // 8
        fmt = struct.pack("<HHIIHH", field(rng.choice((1, 1, 3, 6, 7, 0x11, 0x55)), 16), field(channels, 16), field(rate, 32),
                          field(rate * block, 32), field(block, 16), field(bits, 16))  # fmt: skip
        if rng.random() < 0.25:
            guid = struct.pack("<H", field(1, 16)) + bytes.fromhex("000000001000800000aa00389b71")
            fmt = struct.pack("<H", 0xFFFE) + fmt[2:] + struct.pack("<HHI", field(22, 16), field(bits, 16), field(3, 32)) + guid
        body = rng.randbytes(block * rng.randrange(600) + rng.choice((0, 0, 0, 1)))
        chunks = [(b"fmt ", fmt), (b"data", body)]
        if rng.random() < 0.3:
            chunks.insert(
                rng.randrange(3), (rng.choice((b"LIST", b"fact", b"ds64", b"fmt ", b"data", b"\0\0\0\0")), rng.randbytes(rng.randrange(40)))
            )
        packed = b"".join(name + struct.pack("<I", field(len(held), 32)) + held for name, held in chunks)
        whole = rng.choice((b"RIFF", b"RIFF", b"RIFF", b"RF64", b"RIFX")) + struct.pack("<I", field(4 + len(packed), 32)) + b"WAVE" + packed
        return whole[: rng.randrange(len(whole))] if rng.random() < 0.1 else whole


class TextReader:
    """The check of a text, its tags, its prompt and its parts."""

    name, weight = "text", 3000

    def prepare(self) -> None:
        self.manifest, self.tokenizer = make_manifest(), make_tokenizer()
        self.structure = set(self.manifest.structural_tokens.values())

    def run(self, rng: random.Random, folder: Path) -> None:
        manifest, policy = self.manifest, rng.choice(TAG_POLICIES)
        unknown = ("<|emotion:elatoin|>", "<|x|>", "<||>", "<|a>b|>")
        tokens = (*CONTROL, *unknown, *(STRUCTURE if rng.random() < 0.2 else ()))
        script = check_script(random_text(rng, tokens), "the text", manifest, policy)
        count = lambda piece: len(encode(self.tokenizer, piece))
        ids = build_prompt(self.tokenizer, manifest.tokens, script.text).ids.tolist()
        assert [i for i in ids if i in self.structure] == [manifest.tokens.tts, manifest.tokens.text, manifest.tokens.audio]
        assert 1 <= frame_cap(script, manifest.limits, manifest.audio.num_codebooks) <= manifest.limits.max_rows
        parts = split_text(script.text, count, rng.choice((1, 8, 30, 150)), rng.choice((None, 5, 40)))
        assert squeeze("".join(part.text for part in parts)) == squeeze(script.text)
        assert [tag for part in parts for tag in TAG.findall(part.text)] == TAG.findall(script.text)
        for part in parts:
            assert is_speakable(part.text)
            check_script(part.spoken, "a part", manifest, policy if policy != "strip" else "error")


class LinesReader:
    """--input: lines of text or of JSON."""

    name, weight = "lines", 1500

    def prepare(self) -> None:
        self.manifest = make_manifest()

    def run(self, rng: random.Random, folder: Path) -> None:
        path = folder / rng.choice(("lines.txt", "lines.jsonl", "lines.jsonl", "LINES.JSONL"))
        path.write_bytes(self._content(rng, path.suffix.lower()))
        lines = read_lines(path)
        names = [line.name.lower() for line in lines if line.fault is None]
        assert lines and len(set(names)) == len(names)
        assert [line.number for line in lines] == sorted({line.number for line in lines})
        for line in (line for line in lines if line.fault is None):
            assert (folder / f"{line.name}.wav").parent == folder and set(line.asks) <= set(FIELDS)
            wish = {key: value for key, value in line.asks.items() if key not in ("voice", "ref_audio")}
            try:
                assert check_wish(Wish(**wish), self.manifest).max_frames >= 1
            except UserError:
                pass

    def _content(self, rng: random.Random, suffix: str) -> bytes:
        lines = [self._line(rng, suffix) for _ in range(rng.randrange(6))]
        whole = rng.choice((b"\n", b"\r\n", b"\n\n")).join(lines)
        return mutate_bytes(rng, whole) if rng.random() < 0.2 else rng.choice((b"", b"", b"\xef\xbb\xbf")) + whole

    def _line(self, rng: random.Random, suffix: str) -> bytes:
        text = random_text(rng, CONTROL, 6).replace("\n", " ")
        if suffix == ".txt":
            return text.encode("utf-8", rng.choice(("ignore", "ignore", "surrogatepass")))
        whole = {"text": text, "name": rng.choice(("a", "A", "b", "c d")), "seed": 3, "temperature": 0.5, "top_k": 5, "top_p": 0.5,
                 "max_frames": 20, "ref_text": "x"}  # fmt: skip
        kept = {key: value for key, value in whole.items() if key == "text" or rng.random() < 0.5}
        return mutate_json(rng, kept) if rng.random() < 0.7 else dump(kept)


class DialogueReader:
    """--dialogue: lines `speaker: text`."""

    name, weight = "dialogue", 1000

    def prepare(self) -> None:
        self.base = omnifish_manifest()

    def run(self, rng: random.Random, folder: Path) -> None:
        (folder / "manifest.json").write_bytes(dump(self.base))
        manifest, path = Manifest.read(folder), folder / "talk.txt"
        names = ("en_anna", "pl_jan") if rng.random() < 0.8 else ("en_anna", "nobody", "", "q1", "en anna")
        lines = [f"{rng.choice(names)}{rng.choice((':', ': ', ' : '))}{random_text(rng, STRUCTURE, 3)}" for _ in range(rng.randint(1, 4))]
        whole = rng.choice(("\n", "\r\n", "\n\n", "\u2028")).join(lines).encode("utf-8", "ignore")
        path.write_bytes(mutate_bytes(rng, whole) if rng.random() < 0.15 else whole)
        turns = read_dialogue(path, manifest)
        assert turns and all(name in speakers(manifest.prompt) and line.strip() == line != "" for name, line in turns)
        request = check_omni_wish(OmniWish(turns=turns, seed=1), manifest)
        assert request.text == dialogue_text(turns)


class VoiceReader:
    """Saved voices: the recording, and what a build made of it."""

    name, weight = "saved voices", 2000

    def prepare(self) -> None:
        self.speaker = self._make_speaker()

    def _make_speaker(self) -> Speaker:
        manifest = make_manifest()
        parts = FakeParts(manifest, audio_encoder=encoder_session(code=2))
        speaker = Speaker("nowhere", manifest, parts, warn=lambda message: None, verify=False)
        speaker.tokenizer = make_tokenizer()
        return speaker

    def run(self, rng: random.Random, folder: Path) -> None:
        shelf = Shelf(folder)
        shelf.save("Anna", self.speaker, VOICE, "What it says")
        kept, recorded = sorted((folder / "Anna").iterdir(), key=lambda path: path.name == SOURCE)
        self._damage(rng, recorded if rng.random() < 0.6 else kept)
        for facts in shelf.list().values():
            assert set(facts) in ({"error"}, {"seconds", "transcript"})
        voice = shelf.load("Anna", self.speaker)
        check_codes(voice.codes, self.speaker.manifest.audio, "codes")
        dims = self.speaker.manifest.dims
        assert len(voice.pieces) == 2 * dims.num_layers and voice.ids.ndim == 1 and voice.ids.dtype == np.int64
        assert all(piece.shape == (dims.num_kv_heads, len(voice.ids), dims.head_dim) for piece in voice.pieces)
        assert voice.ref_text is None or isinstance(voice.ref_text, str)
        shelf.delete("Anna")
        assert shelf.names() == []

    def _damage(self, rng: random.Random, path: Path) -> None:
        if rng.random() < 0.6:
            path.write_bytes(mutate_bytes(rng, path.read_bytes(), 400))
            return
        with np.load(path) as held:
            arrays = {name: held[name] for name in held.files}
        facts = json.loads(bytes(arrays.pop("facts")).decode())
        if rng.random() < 0.5:
            name = rng.choice(list(arrays))
            arrays[name] = rng.choice(ARRAY_CHANGES)(arrays[name])
        else:
            change_somewhere(rng, facts)
        write_arrays(path, facts, arrays)


ARRAY_CHANGES: tuple[Callable[[np.ndarray], np.ndarray], ...] = (
    lambda a: a[:0],
    lambda a: a[None],
    lambda a: a.astype(np.float64),
    lambda a: a.astype(np.complex64),
    lambda a: a.astype(bool),
    lambda a: np.full_like(a, np.nan if a.dtype.kind == "f" else -5),
    lambda a: np.full_like(a, 1e30 if a.dtype.kind == "f" else 10**9),
    lambda a: np.array(["text"] * 3),
    lambda a: np.float32(1),
    lambda a: a[::-1],
    lambda a: a[:-1],
    lambda a: np.concatenate([a, a]),
    lambda a: a.astype(a.dtype.newbyteorder(">")),
)


class TokenizerReader:
    """tokenizer.json of a build whose manifest records what lies there, so that only reading it can refuse."""

    name, weight = "tokenizer of a build", 1000

    def prepare(self) -> None:
        self.base, self.manifest = json.loads(make_tokenizer().to_str()), make_manifest()

    def run(self, rng: random.Random, folder: Path) -> None:
        path = folder / "tokenizer.json"
        path.write_bytes(mutate_json(rng, self.base, () if rng.random() < 0.6 else ("added_tokens",)))
        manifest = dataclasses.replace(self.manifest, files={path.name: record_file(path)})
        tokenizer = load_tokenizer(folder, manifest)
        ids = build_prompt(tokenizer, manifest.tokens, "Hello <|emotion:anger|> you, 你好 3.14", "and", 4).ids
        assert ids.dtype == np.int64 and manifest.control_tags["<|emotion:anger|>"] in ids


READERS = (ManifestReader(HIGGS), ManifestReader(OMNIFISH), SoundReader(), TextReader(), LinesReader(), DialogueReader(), VoiceReader(),
           TokenizerReader())  # fmt: skip
