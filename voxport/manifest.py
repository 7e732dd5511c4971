"""manifest.json: the contract between building and running.

The build writes it, the run side reads it, and nothing that running needs to know is written anywhere else. Each section is
one frozen dataclass; reading checks every key and type and names the one that is wrong.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from voxport.errors import UserError
from voxport.families import HIGGS as HIGGS
from voxport.families import find_family, resolve
from voxport.files import check_plain_name, is_file, read_json, sha256_file, write_json
from voxport.manifest_values import check_values

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
DEFAULT_RECIPE = "rtn-32-asym"  # how int4 is rounded unless the user says otherwise; voxport/build/recipes.py has them all
SPEAKING = ("llm_decoder", "text_embed", "audio_embed", "audio_heads", "audio_tokenizer")  # parts of a Higgs build, all but its encoder


@dataclass(frozen=True)
class FileRecord:
    """One file of the folder: its bytes and SHA-256 when the build recorded it."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class TensorSpec:
    """One graph input or output: ONNX dtype in NumPy's spelling, and a shape of ints and symbolic names."""

    name: str
    dtype: str
    shape: list[int | str]


@dataclass(frozen=True)
class Part:
    """One ONNX graph. `files` holds the graph and its external data; `precision` is that of its weights."""

    graph: str
    precision: str
    files: dict[str, FileRecord]
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    recipe: dict[str, typing.Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """Where a build is meant to run and in which precision: `device` cpu or cuda, `precision` int4, fp16 or fp32."""

    device: str
    precision: str


@dataclass(frozen=True)
class Source:
    """The checkpoint: hub id or folder name as given, commit if known, where it lay, and a fingerprint of its files."""

    id: str
    revision: str | None
    path: str
    fingerprint: str


@dataclass(frozen=True)
class Licence:
    """Licence of the weights; `file` is its copy in the folder, None if the checkpoint has none."""

    name: str
    file: str | None


@dataclass(frozen=True)
class Dims:
    """Sizes of the language model: D hidden, text vocabulary rows, longest position of its rotary tables."""

    hidden_size: int
    text_vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int


@dataclass(frozen=True)
class Audio:
    """Codebooks: N of them, V ids each, of which the first `codebook_size` are real codes; BOC and EOC fill the delay."""

    num_codebooks: int
    vocab_size: int
    codebook_size: int
    boc_id: int
    eoc_id: int


@dataclass(frozen=True)
class Codec:
    """Waveform side: Hz, samples a frame, the shortest input of the encoder, frames that a sample depends on each side."""

    sample_rate: int
    hop_length: int
    min_encode_samples: int
    context_frames: int


@dataclass(frozen=True)
class Tokens:
    """Structural ids of the prompt, found by name in the tokenizer. `ref_text` is None in old tokenizers."""

    tts: int
    text: int
    audio: int
    ref_audio: int
    ref_text: int | None
    placeholder: int


@dataclass(frozen=True)
class Sampling:
    """Defaults of the sampler. `top_k` 0 and `top_p` 1.0 mean off; at or below `greedy_temperature` the argmax is taken."""

    temperature: float
    top_p: float
    top_k: int
    greedy_temperature: float


@dataclass(frozen=True)
class Limits:
    """Budgets. Rows count positions of the context; frames and seconds count audio.

    The cap on frames when none is given is `cap_base_frames` plus, for each character of the text,
    `cap_frames_per_char` (or `cap_frames_per_wide_char` for digits and East Asian wide characters, which stand for whole
    words or syllables) plus `cap_frames_per_tag` for each control tag.
    """

    context_rows: int
    max_rows: int
    warn_reference_seconds: float
    max_reference_seconds: float
    plateau_frames: int
    cap_base_frames: int
    cap_frames_per_char: int
    cap_frames_per_wide_char: int
    cap_frames_per_tag: int


@dataclass(frozen=True)
class KVCache:
    """Cache tensors [B, num_kv_heads, P, head_dim]; names are templates over the layer number, e.g. `present.{}.key`."""

    dtype: str
    past_key: str
    past_value: str
    present_key: str
    present_value: str


@dataclass(frozen=True)
class Figure:
    """One output as it must be again: `digest` of its bytes, and of each group of its numbers the size, the root mean square
    (`scales`), random projections (`sums`), and the numbers (`values`) at some `places`."""

    digest: str
    sizes: list[int]
    scales: list[float]
    sums: list[list[float]]
    places: list[list[int]]
    values: list[list[float]]


@dataclass(frozen=True)
class Proof:
    """What the build's own graphs computed when they had passed their check; `voxport/run/proof.py` asks them again.

    `provider`, `onnxruntime`, `machine` and `threads` say where; the parts in `unpacked` computed from their files, for want of
    memory. The questions: `prompt_ids` [P] with the placeholder at the
    delayed rows of `reference_codes` [R, N]; `edges` are pairs of mixing factors between which the encoder changes a code.
    """

    version: int
    provider: str
    onnxruntime: str
    machine: str
    threads: int
    unpacked: list[str]
    prompt_ids: list[int]
    reference_codes: list[list[int]]
    edges: list[list[float]]
    figures: dict[str, Figure]


class BuildManifest:
    """What the manifests of all families can do. Each has `schema_version`, `family`, `created`, `target`, `source`, `licence`,
    `tools`, `recipe`, `dims`, `kv_cache`, `parts`, `files` and `proof`, and sections of its own; and `speaking_parts()` and
    `own_flags()`."""

    @classmethod
    def read(cls, folder: str | os.PathLike) -> typing.Any:
        """Read and check `folder/manifest.json`, of whichever family it is: a Higgs build's is a `Manifest`.

        UserError if absent, of another schema or an unknown family, or wrong in any key.
        """
        if not isinstance(folder, (str, os.PathLike)):
            raise UserError(f"a build is named by its folder's path, not by {folder!r}")
        path = Path(folder) / MANIFEST_NAME
        if any("\ud800" <= c <= "\udfff" for c in str(folder)):  # neither ONNX Runtime nor tokenizers could open it
            raise UserError(f"{folder} is not spelt in UTF-8 here; set PYTHONUTF8=1, or rename the folder")
        if not is_file(path):
            raise UserError(f"{folder} holds no {MANIFEST_NAME}: not a finished build; make one with optimize.py")
        try:
            data = read_json(path, "manifest")
        except UserError as error:
            raise UserError(f"{error}; copy the folder again, or build it again") from error
        if data.get("schema_version") != SCHEMA_VERSION:
            found = data.get("schema_version")
            raise UserError(f"{path}: schema_version is {found!r}, this version reads {SCHEMA_VERSION}; build again")
        kind = resolve(find_family(data.get("family"), str(path)).manifest)
        manifest = decode(kind, data, str(path))
        manifest._check_names(str(path))
        check_values(manifest, str(path))
        return manifest

    def write(self, folder: Path) -> None:
        """Write `folder/manifest.json` atomically."""
        write_json(Path(folder) / MANIFEST_NAME, dataclasses.asdict(self))

    def part(self, name: str, folder: str | os.PathLike | None = None) -> Part:
        """The part called `name`; a UserError says how to build it, into `folder` if that is known, if the build lacks it."""
        if name not in self.parts:
            how = f"optimize.py --components {name}, its --checkpoint and --output"
            raise UserError(f"this build has no {name}; add it with {how if folder is None else self.rebuild_command(folder, [name])}")
        return self.parts[name]

    def rebuild_command(self, folder: str | os.PathLike, parts: Iterable[str]) -> str:
        """What to type to make `parts` of this build in `folder` again, as the others were made."""
        rounding = self.recipe.get("rounding")
        chosen = {"--checkpoint": self.source.id, "--output": folder, "--device": self.target.device, "--precision": self.target.precision,
                  "--recipe": rounding if rounding != DEFAULT_RECIPE else None, **self.own_flags(),
                  "--components": ",".join(parts)}  # fmt: skip
        return f"python optimize.py {' '.join(f'{flag} {shlex.quote(str(value))}' for flag, value in chosen.items() if value is not None)}"

    def lacks(self) -> list[str]:
        """The parts without which the build cannot speak; to clone a voice it may need more."""
        return [name for name in self.speaking_parts() if name not in self.parts]

    def _check_names(self, where: str) -> None:
        for name, template in dataclasses.asdict(self.kv_cache).items():
            if name != "dtype" and (template.count("{}") != 1 or template.count("{") + template.count("}") != 2):
                raise UserError(f"{where}: kv_cache: {name} must hold {{}} once, where the layer's number goes, not {template[:40]!r}")
        for name in self.files:
            check_plain_name(name, f"{where}: files")
        for part_name, part in self.parts.items():
            for name in (part.graph, *part.files):
                check_plain_name(name, f"{where}: parts.{part_name}")
            if part.graph not in part.files:
                raise UserError(f"{where}: parts.{part_name}: {part.graph} is not among its files")


@dataclass(frozen=True)
class Manifest(BuildManifest):
    """Everything that running needs. `files` lists what belongs to no part (tokenizer, licence, genai_config); `proof` is None
    until all parts are there."""

    schema_version: int
    family: str
    created: str
    target: Target
    source: Source
    licence: Licence
    tools: dict[str, str]
    recipe: dict[str, typing.Any]
    dims: Dims
    audio: Audio
    codec: Codec
    tokens: Tokens
    control_tags: dict[str, int]
    structural_tokens: dict[str, int]
    sampling: Sampling
    limits: Limits
    kv_cache: KVCache
    parts: dict[str, Part]
    files: dict[str, FileRecord]
    proof: Proof | None = None

    def speaking_parts(self) -> tuple[str, ...]:
        """Those that every utterance takes."""
        return SPEAKING

    def own_flags(self) -> dict[str, typing.Any]:
        """Of optimize.py, with what was chosen by them; None where that is the default."""
        rope_table = self.recipe.get("rope_table")
        return {"--rope-table": None if rope_table == "bf16" else rope_table, "--heads-precision": self.recipe.get("heads")}


def refuse_part(path: str | os.PathLike) -> None:
    """UserError if a path is a file of the build that lies in its folder."""
    path = Path(os.path.realpath(path))
    if not is_file(path) or not is_file(path.parent / MANIFEST_NAME):
        return
    try:
        found = Manifest.read(path.parent)
        owned = {*found.files, *(name for part in found.parts.values() for name in part.files)}
    except UserError:
        owned = set()
    if path.name in {MANIFEST_NAME, *owned}:
        raise UserError(f"{path} is a file of the build in {path.parent}, which would be lost; choose another name")


def record_file(path: Path) -> FileRecord:
    """Size and hash of a finished file."""
    return FileRecord(path.stat().st_size, sha256_file(path))


def verify_files(folder: Path, files: dict[str, FileRecord]) -> None:
    """Compare size and SHA-256 of each file with its record; UserError names the first that differs or is missing."""
    for name, record in files.items():
        path = Path(folder) / name
        if not is_file(path):
            raise UserError(f"{path} is missing; build it again or copy the whole folder")
        if os.path.realpath(path.parent) != os.path.dirname(os.path.realpath(path)):
            raise UserError(f"{path} is a link to a file outside of the folder; copy the folder with the files themselves (cp -rL)")
        size = path.stat().st_size
        if size != record.bytes:
            raise UserError(f"{path} has {size} bytes, the manifest says {record.bytes}; build it again or copy it again")
        if sha256_file(path) != record.sha256:
            raise UserError(f"{path} was changed after the build (its sha256 differs); build it again or copy it again")


def decode(kind: typing.Any, value: typing.Any, where: str) -> typing.Any:
    """Turn parsed JSON into `kind` (a dataclass, dict, list, union or plain type); UserError names the key at fault."""
    if kind is typing.Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is dict:
        return {k: decode(arguments[1], v, f"{where}: {k}") for k, v in _typed(value, dict, where).items()}
    if origin is list:
        return [decode(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(_typed(value, list, where))]
    if origin in (typing.Union, types.UnionType):
        made_of = [a for a in arguments if dataclasses.is_dataclass(a)]
        if made_of and value is not None:
            return _decode_dataclass(made_of[0], value, where)
        return _typed(value, tuple(arguments), where)
    if kind is float:
        return _number(value, where)
    return _typed(value, kind, where)


def _number(value: typing.Any, where: str) -> float:
    """A float that is one: JSON as Python reads it has NaN, Infinity, and whole numbers past every float."""
    try:
        number = float(_typed(value, (int, float), where))
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise UserError(f"{where}: {str(value)[:40]} is not a finite number")
    return number


def _decode_dataclass(kind: type, value: typing.Any, where: str) -> typing.Any:
    value = _typed(value, dict, where)
    hints = typing.get_type_hints(kind)
    made = {}
    for f in dataclasses.fields(kind):
        if f.name in value:
            made[f.name] = decode(hints[f.name], value[f.name], f"{where}: {f.name}")
        elif f.default_factory is dataclasses.MISSING and f.default is dataclasses.MISSING:
            raise UserError(f"{where}: key {f.name!r} is missing; build again with this version of optimize.py")
    return kind(**made)


def _typed(value: typing.Any, kinds: type | tuple, where: str) -> typing.Any:
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    is_stray_bool = isinstance(value, bool) and bool not in kinds
    if is_stray_bool or not isinstance(value, kinds):
        names = " or ".join("null" if k is type(None) else k.__name__ for k in kinds)
        raise UserError(f"{where}: expected {names}, found {type(value).__name__} {str(value)[:40]!r}")
    return value
