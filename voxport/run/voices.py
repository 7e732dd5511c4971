"""A shelf of saved voices: what was heard once need not be heard again, by builds of any family.

NAME/voice.npz           the reference as an encoder gets it, with its transcript: enough to hear the voice again
NAME/<build key>.npz     what one build on one provider made of it, as its family packs it: codes, and perhaps a prompt's cache
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort

from voxport.errors import BAD_INPUT, UserError, WorkError
from voxport.files import atomic_path, is_folder, is_reserved, parse_json, sha256_file
from voxport.manifest import BuildManifest
from voxport.run.audio import HIGHEST_RATE, LOWEST_RATE, VOICE_NAME, Reference, fit_to_codec
from voxport.run.text import check_script

MEMORY = re.compile(r"[0-9a-f]{32}\.npz")  # names of what builds made of a voice
VERSION = 1  # of the files on the shelf
SOURCE = VOICE_NAME
LONGEST_NAME = 64
KEPT = 4  # builds and providers for which a voice is kept ready; some 90 MB each at full size for 10 s
# What zipfile, json and NumPy raise for files that are not theirs
READ_ERRORS = (OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile)  # NotImplementedError is one
# Each family has its own; all have `ref_text`, the transcript that was heard with it
Voice = Any


class Hearer(Protocol):
    """A speaker, as far as a shelf needs one."""

    manifest: BuildManifest

    def check_reference(self, ref_audio, ref_text: str | None, tags: str) -> tuple[Reference, str | None]:
        """The reference and the transcript that may be heard with it."""

    def hear_reference(self, reference: Reference, ref_text: str | None) -> Voice:
        """Encode and read a reference."""

    def running_provider(self) -> str:
        """The provider on which voices are heard."""

    def voice_settings(self) -> dict:
        """What of the manifest, beside its files, decides what is made of a reference."""

    def pack_voice(self, voice: Voice) -> dict[str, np.ndarray]:
        """The arrays of a voice."""

    def unpack_voice(self, arrays: dict[str, np.ndarray], ref_text: str | None) -> Voice | None:
        """The voice again; None if the arrays are not what this build makes. KeyError or UserError if they are no voice."""


def default_shelf() -> Path:
    """Where voices are kept when no folder is named: the user's data folder; UserError if there is none."""
    given = os.environ.get("XDG_DATA_HOME", "")
    if os.path.isabs(given):
        return Path(given) / "voxport" / "voices"
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "voxport" / "voices"
    try:
        base = Path.home() / ("Library/Application Support" if sys.platform == "darwin" else ".local/share")
    except RuntimeError:
        raise UserError("there is no home folder to keep voices in; name one with --voices-dir") from None
    return base / "voxport" / "voices"


def check_name(name: str) -> str:
    """Return `name` if it can be a folder's name on every system; UserError otherwise."""
    plain = isinstance(name, str) and name and len(name) <= LONGEST_NAME and all(c.isalnum() or c in "-_. " for c in name)
    if not plain or name[0] in ". " or name[-1] in ". " or is_reserved(name):
        raise UserError(
            f"{name!r} cannot be the name of a voice: 1 to {LONGEST_NAME} letters, digits, '-', '_', '.' and spaces, "
            "beginning and ending with none of the last two"
        )
    return name


class Shelf:
    """A folder of saved voices."""

    def __init__(self, folder: str | os.PathLike | None = None):
        self._folder = Path(folder) if folder is not None else None

    @property
    def folder(self) -> Path:
        """Where it is; asked for only when voices are, since there may be no home folder."""
        return self._folder or default_shelf()

    def require(self) -> None:
        """UserError if a folder was named that is none: a slip of the pen must not look like an empty shelf."""
        if self._folder is not None and not is_folder(self._folder):
            raise UserError(f"--voices-dir {self._folder} is no folder; --save-voice makes it")

    def names(self) -> list[str]:
        """Names of the saved voices, sorted."""
        return sorted(path.parent.name for path in self.folder.glob(f"*/{SOURCE}")) if is_folder(self.folder) else []

    def list(self) -> dict[str, dict]:
        """Name -> seconds and transcript; a voice that cannot be read is listed with its fault."""
        listed = {}
        for name in self.names():
            try:
                _, facts = self._read_source(name)
                listed[name] = {"seconds": facts["seconds"], "transcript": facts["ref_text"]}
            except UserError as error:
                listed[name] = {"error": str(error)}
        return listed

    def save(self, name: str, speaker: Hearer, ref_audio, ref_text: str | None = None, tags: str = "error") -> Voice:
        """Hear a reference and keep it as `name`; the same again changes nothing. UserError if it cannot be a reference, or if
        another recording or transcript is kept by that name: it may be the only copy."""
        check_name(name)
        reference, ref_text = speaker.check_reference(ref_audio, ref_text, tags)
        self._refuse_loss(name, reference, ref_text)
        voice = speaker.hear_reference(reference, ref_text)
        facts = {"version": VERSION, "seconds": reference.seconds, "ref_text": ref_text, "rate": speaker.manifest.codec.sample_rate}
        try:
            (self.folder / name).mkdir(parents=True, exist_ok=True)
            write_arrays(self.folder / name / SOURCE, facts, {"samples": reference.samples})
        except (OSError, UserError) as error:
            with contextlib.suppress(OSError):  # it was there before, or was never made
                (self.folder / name).rmdir()
            code = getattr(error, "code", BAD_INPUT)
            raise UserError(f"cannot keep voices in {self.folder}: {error}; choose another folder with --voices-dir", code) from None
        self._keep(name, build_key(speaker, reference, ref_text), voice, speaker)
        return voice

    def load(self, name: str, speaker: Hearer) -> Voice:
        """The voice called `name` as this build hears it: from the shelf, or heard again if that is missing, stale or damaged."""
        self._find(name)
        samples, facts = self._read_source(name)
        codec, ref_text = speaker.manifest.codec, facts["ref_text"]
        rate = facts.get("rate", codec.sample_rate)
        samples = samples if rate == codec.sample_rate else fit_to_codec(samples, rate, codec)
        if ref_text:  # a build of another family may have saved it, which knows other tokens
            check_script(ref_text, f"the transcript of the voice {name!r}", speaker.manifest, "keep")
        reference = Reference(samples, facts["seconds"], ())
        key = build_key(speaker, reference, ref_text)
        voice = self._recall(name, key, speaker)
        if voice is None:
            voice = speaker.hear_reference(reference, ref_text)
            self._keep(name, key, voice, speaker)
        return voice

    def fingerprint(self, name: str) -> str:
        """SHA-256 of what is kept as `name`: the same for the same recording and transcript."""
        return sha256_file(self._find(name) / SOURCE)

    def delete(self, name: str) -> None:
        """Forget a voice; files that are not of it stay."""
        folder = self._find(name)
        try:
            for path in folder.iterdir():
                if path.name == SOURCE or MEMORY.fullmatch(path.name):
                    path.unlink()
        except OSError as error:
            raise WorkError(f"cannot delete the voice {name}: {error}") from error
        with contextlib.suppress(OSError):  # something else is kept there
            folder.rmdir()

    def _find(self, name: str) -> Path:
        check_name(name)
        self.require()
        if name not in self.names():
            known = f"there are: {', '.join(self.names())}" if self.names() else "there is none"
            raise UserError(f"no voice {name!r} in {self.folder}; {known}; save one with --save-voice")
        return self.folder / name

    def _refuse_loss(self, name: str, reference: Reference, ref_text: str | None) -> None:
        """UserError unless nothing is kept as `name` that could be heard, or only this very recording."""
        try:
            samples, facts = self._read_source(name)
        except UserError:  # nothing is there, or nothing of use
            return
        if facts["ref_text"] != ref_text or not np.array_equal(samples, reference.samples):
            raise UserError(f"the voice {name!r} is another recording or has another transcript; choose another name, or forget it"
                            f" first: --delete-voice {name!r}")  # fmt: skip

    def _read_source(self, name: str) -> tuple[np.ndarray, dict]:
        """Samples [n] of the reference, and its facts: `seconds`, `ref_text`, and unless it is old `rate`."""
        path = self.folder / name / SOURCE
        facts, arrays = read_arrays(path, f"the voice {name!r}")
        samples, ref_text, rate = arrays.get("samples"), facts.get("ref_text"), facts.get("rate", LOWEST_RATE)
        sound = samples is not None and samples.ndim == 1 and samples.dtype == np.float32 and np.isfinite(samples).all()
        told = isinstance(facts.get("seconds"), float) and isinstance(ref_text, (str, type(None)))
        if not sound or not told or not isinstance(rate, int) or not LOWEST_RATE <= rate <= HIGHEST_RATE:
            raise UserError(f"{path} is not a saved voice; delete it with --delete-voice and save it again")
        return samples, facts | {"ref_text": ref_text}

    def _keep(self, name: str, key: str, voice: Voice, speaker: Hearer) -> None:
        """Remember what a build made of a voice, and forget the oldest; where nothing can be written it is made again."""
        folder = self.folder / name
        facts = {"version": VERSION, "key": key, "ref_text": voice.ref_text}
        try:
            write_arrays(folder / f"{key[:32]}.npz", facts, speaker.pack_voice(voice))
            kept = sorted((path for path in folder.iterdir() if MEMORY.fullmatch(path.name)), key=lambda path: path.stat().st_mtime)
            for path in kept[:-KEPT]:
                path.unlink(missing_ok=True)
        except (OSError, UserError):
            pass  # a full or read-only disk must not keep anybody from speaking

    def _recall(self, name: str, key: str, speaker: Hearer) -> Voice | None:
        try:
            facts, arrays = read_arrays(self.folder / name / f"{key[:32]}.npz", "what is kept of a voice")
            ref_text = facts["ref_text"]
            voice = speaker.unpack_voice(arrays, ref_text) if isinstance(ref_text, (str, type(None))) else None
        except (UserError, KeyError):
            return None
        return voice if facts.get("key") == key else None


def build_key(speaker: Hearer, reference: Reference, ref_text: str | None) -> str:
    """Hash of all that decides what a voice becomes: reference, build, provider, ONNX Runtime."""
    manifest = speaker.manifest
    told = {
        "parts": {name: {file: asdict(record) for file, record in part.files.items()} for name, part in manifest.parts.items()},
        "files": {name: asdict(record) for name, record in manifest.files.items()},
        "provider": speaker.running_provider(),
        "onnxruntime": ort.__version__,
        "samples": hashlib.sha256(reference.samples.tobytes()).hexdigest(),
        "ref_text": ref_text,
    } | speaker.voice_settings()
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode("utf-8")).hexdigest()


def write_arrays(path: Path, facts: Mapping, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an uncompressed .npz of arrays and, as `facts`, UTF-8 JSON. Whole or not at all."""
    text = np.frombuffer(json.dumps(facts).encode("utf-8"), np.uint8)
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, facts=text, **{name: np.ascontiguousarray(array) for name, array in arrays.items()})


def read_arrays(path: Path, what: str) -> tuple[dict, dict[str, np.ndarray]]:
    """Read what `write_arrays` wrote; UserError for anything else. Nothing is unpickled, and a header cannot promise more
    than its file holds: sizes are compared before memory is taken. Checksums are those of the zip format."""
    try:
        with zipfile.ZipFile(path) as archive:
            arrays = {member.filename.removesuffix(".npy"): _read_member(archive, member) for member in archive.infolist()}
        facts = parse_json(bytes(arrays.pop("facts")).decode("utf-8"))
        if not isinstance(facts, dict) or facts.get("version") != VERSION:
            raise ValueError(f"not of version {VERSION}")
    except READ_ERRORS as error:
        raise UserError(f"{what}: {path} cannot be read ({error}); save the voice again") from error
    return facts, arrays


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size or member.flag_bits & 1:
        raise ValueError(f"{member.filename} is compressed")
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, in_fortran_order, dtype = read_header(file)
        data = file.read()
    if dtype.hasobject or in_fortran_order:
        raise ValueError(f"{member.filename} is no plain array")
    return np.frombuffer(data, dtype).reshape(shape)
