"""Open a Higgs Audio v3 checkpoint: check every name, shape and dtype, then hand out tensors one at a time.

The checks come before any heavy work and name the key and the file. Layout: `_ref.higgs` has the names of the language model,
`_ref.higgs_codec` those of the codec.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from _ref.higgs import AUDIO_HEAD, CODEC_PREFIX, SPECIALS, TEXT_HEAD, HiggsConfig, body_shapes
from _ref.higgs_codec import IGNORED_KEYS, CodecConfig, HiggsCodec
from voxport.build.config_keys import HIGGS, HIGGS_CODEC, LARGEST_VOCABULARY, check_keys
from voxport.build.finite import check_finite
from voxport.build.mapped import map_safetensors, read_tensor
from voxport.errors import UserError
from voxport.files import check_plain_name, read_json

MODEL_TYPE, DISCRETE = "higgs_multimodal_qwen3", "discrete"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
BUNDLED_CODEC_CONFIG = Path(__file__).with_name("higgs_codec_config.json")
FLOAT_DTYPES = {"BF16", "F16", "F32"}
RELAYOUT_PREFIXES = ("model.", "audio_embedding.", "audio_head.", "lm_head.")


@dataclass(frozen=True)
class Checkpoint(Mapping):
    """A checked checkpoint; as a mapping, tensor name -> tensor as stored, read from disk at each access."""

    folder: Path
    config: HiggsConfig
    codec_config: CodecConfig
    files: dict[str, Path]

    @classmethod
    def open(cls, folder: Path, codec_from: Path | None = None) -> Checkpoint:
        """Read config, index and headers; UserError on anything that is not a complete Higgs Audio v3 checkpoint.

        `codec_from` names another checkpoint folder that lends its codec to one that bundles none.
        """
        folder = Path(folder)
        config = read_config(folder)
        files = tensor_files(folder)
        codec_folder = folder
        if codec_from is not None and not any(name.startswith(CODEC_PREFIX) for name in files):
            codec_folder = Path(codec_from)
            files |= {n: f for n, f in tensor_files(codec_folder).items() if n.startswith(CODEC_PREFIX)}
        checkpoint = cls(folder, config, read_codec_config(codec_folder), files)
        checkpoint._check_layout()
        checkpoint._check_tensors()
        return checkpoint

    def __getitem__(self, name: str) -> torch.Tensor:
        return read_tensor(self.files[name], name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def codec_tensors(self) -> dict[str, torch.Tensor]:
        """The codec's tensors under their names without prefix."""
        return {n.removeprefix(CODEC_PREFIX): self[n] for n in self.files if n.startswith(CODEC_PREFIX)}

    def check_finite(self) -> None:
        """Read every weight; UserError names the first tensor that holds NaN or Inf, and its file."""
        mapped = ((path, map_safetensors(path)) for path in self.weight_files())
        named = ((n, tensors[n], str(path)) for path, tensors in mapped for n in tensors if self.files.get(n) == path)
        check_finite(named, sum(path.stat().st_size for path in self.weight_files()) // 2)

    def weight_files(self) -> list[Path]:
        """The files that hold tensors, each once."""
        return sorted(set(self.files.values()))

    def fingerprint(self) -> str:
        """Changes when the checkpoint does: a hash of its configs and of each weight file's name, size and time."""
        digest = hashlib.sha256(json.dumps([repr(self.config), repr(self.codec_config)]).encode())
        for path in self.weight_files():
            stat = path.stat()
            digest.update(f"{path.name}:{stat.st_size}:{stat.st_mtime_ns}".encode())
        return digest.hexdigest()

    def _check_layout(self) -> None:
        names = list(self.files)
        if any(n.startswith(RELAYOUT_PREFIXES) for n in names) and not any(n.startswith("body.") for n in names):
            raise UserError(
                f"{self.folder}: tensor names such as {names[0]!r} are those of a community re-layout;"
                " take the original checkpoint (names begin with body., tied.)"
            )
        if not any(n.startswith(CODEC_PREFIX) for n in names):
            raise UserError(
                f"{self.folder}: checkpoint does not bundle the codec (no tensor under {CODEC_PREFIX});"
                " name a checkpoint that does with --codec-from"
            )
        speech = (self.config.num_codebooks, self.config.codebook_size)
        codec = (self.codec_config.num_codebooks, self.codec_config.codebook_size)
        if speech != codec:
            raise UserError(
                f"{self.folder}: config.json has {speech[0]} codebooks of {speech[1]} codes, the codec {codec[0]} of {codec[1]};"
                " they do not belong together"
            )

    def _check_tensors(self) -> None:
        expected = expected_shapes(self.config, self.codec_config)
        missing = sorted(expected.keys() - self.files.keys())
        if missing:
            raise UserError(f"{self.folder}: {len(missing)} tensors are missing, the first is {missing[0]}")
        optional = {TEXT_HEAD, AUDIO_HEAD} | {CODEC_PREFIX + key for key in IGNORED_KEYS}
        unexpected = sorted(self.files.keys() - expected.keys() - optional)
        if unexpected:
            raise UserError(
                f"{self.folder}: {len(unexpected)} tensors are not part of this model, the first is {unexpected[0]}"
                f" in {self.files[unexpected[0]].name}; quantised or extended copies cannot be read"
            )
        for path in self.weight_files():
            self._check_headers(path, expected)

    def _check_headers(self, path: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
        with _open(path) as file:
            held = set(file.keys())
            for name in (n for n, f in self.files.items() if f == path):
                if name not in held:
                    raise UserError(f"{path} lacks the tensor {name} that the index places in it")
                view = file.get_slice(name)
                shape, dtype = tuple(view.get_shape()), view.get_dtype()
                if dtype not in FLOAT_DTYPES:
                    raise UserError(f"{path}: {name} is stored as {dtype}; quantised copies cannot be read, take the original")
                if name in expected and shape != expected[name]:
                    raise UserError(f"{path}: {name} has shape {list(shape)}, config.json asks for {list(expected[name])}")


def expected_shapes(config: HiggsConfig, codec_config: CodecConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that must be there, language model and codec."""
    return body_shapes(config) | {CODEC_PREFIX + name: shape for name, shape in codec_shapes(codec_config).items()}


def read_config(folder: Path) -> HiggsConfig:
    """config.json as a HiggsConfig; UserError names the key and the file."""
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise UserError(f"{folder} is not a folder; give a checkpoint folder, a hub id or 'demo'")
    data = read_json(path, "checkpoint")
    if data.get("model_type") != MODEL_TYPE:
        raise UserError(f"{path}: model_type is {data.get('model_type')!r}, not {MODEL_TYPE!r}: not a Higgs Audio v3 checkpoint")
    audio = data.get("audio_encoder_config")
    encoder = audio.get("encoder_type", DISCRETE) if isinstance(audio, dict) else DISCRETE
    if encoder != DISCRETE:
        raise UserError(f"{path}: audio_encoder_config.encoder_type is {encoder!r}, not {DISCRETE!r};"
                        " only text-to-speech checkpoints with discrete codes can be built, not ASR")  # fmt: skip
    check_keys(data, HIGGS, path)
    try:
        config = HiggsConfig.from_dict(data)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    _check_sizes(path, config)
    return config


def _check_sizes(path: Path, config: HiggsConfig) -> None:
    if config.audio_vocab_size < 3:
        raise UserError(f"{path}: audio_encoder_config.vocab_size is {config.audio_vocab_size}: no code is left beside BOC and EOC")
    if config.num_heads % config.num_kv_heads:
        raise UserError(f"{path}: {config.num_heads} heads cannot share {config.num_kv_heads} key/value heads evenly")
    if config.head_dim % 16:
        raise UserError(f"{path}: head_dim is {config.head_dim}; ONNX Runtime's attention needs a multiple of 16")


def read_codec_config(folder: Path) -> CodecConfig:
    """codec_config.json of the checkpoint, else the published one that comes with the toolkit."""
    own = Path(folder) / "codec_config.json"
    path = own if own.is_file() else BUNDLED_CODEC_CONFIG
    data = read_json(path, "codec config")
    check_keys(data, HIGGS_CODEC, path)
    try:
        config = CodecConfig.from_dict(data)
        codec_shapes(config)
    except (ValueError, TypeError, ArithmeticError, IndexError, RuntimeError) as error:  # modules of sizes that do not fit
        raise UserError(f"{path}: these sizes make no codec ({error})") from error
    return config


@functools.cache
def codec_shapes(config: CodecConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of the codec's tensors, without the prefix."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in HiggsCodec(config).state_dict().items()}


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index or from the single file's header.

    The published file holds tied duplicates that its index does not list, so an indexed checkpoint is read by the index; only
    an unlisted audio head, which an untied model needs, is looked for in the files.
    """
    index = folder / INDEX
    if not index.is_file():
        return dict.fromkeys(_header(folder / SINGLE), folder / SINGLE)
    files = read_index(index)
    for path in sorted(set(files.values())):
        if AUDIO_HEAD not in files and AUDIO_HEAD in _header(path):
            files[AUDIO_HEAD] = path
    return files


def read_index(index: Path) -> dict[str, Path]:
    """Tensor name -> file, as an index says; files lie beside it."""
    weight_map = read_json(index, "checkpoint index").get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index}: key 'weight_map' is missing or not an object")
    return {name: index.parent / check_plain_name(file, f"{index}: weight_map") for name, file in weight_map.items()}


def _header(path: Path) -> list[str]:
    with _open(path) as file:
        return list(file.keys())


def check_safetensors(path: Path) -> None:
    """UserError unless the header is that of a safetensors file: known types, and tensors side by side that fill the file."""
    with _open(path):
        pass


def _open(path: Path):
    try:
        return safe_open(path, framework="np")  # for headers only; for torch it would map the file as private memory
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; download the checkpoint again") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read as safetensors ({error}); download it again") from error


@dataclass(frozen=True)
class Vocabulary:
    """Added tokens of tokenizer.json by role; ids are looked up by name, never assumed."""

    special: dict[str, int | None]
    control_tags: dict[str, int]
    structural: dict[str, int]


def read_vocabulary(folder: Path) -> Vocabulary:
    """Read tokenizer.json. Control tags are spelled `<|kind:name|>`; every other added token gives the prompt structure."""
    path = Path(folder) / "tokenizer.json"
    ids = read_added_tokens(path)
    missing = [name for name in SPECIALS if name not in ids and name != "<|ref_text|>"]
    if missing:
        raise UserError(f"{path}: tokenizer is missing Higgs TTS specials: {missing}")
    tags = {name: i for name, i in ids.items() if name.startswith("<|") and ":" in name}
    structural = {name: i for name, i in ids.items() if name not in tags}
    return Vocabulary({name: ids.get(name) for name in SPECIALS}, tags, structural)


def read_added_tokens(path: Path) -> dict[str, int]:
    """Text -> id of the added tokens of a tokenizer.json."""
    added = read_json(path, "tokenizer").get("added_tokens")
    try:
        ids = {token["content"]: token["id"] for token in added}
        is_table = all(isinstance(name, str) and type(i) is int and 0 <= i < LARGEST_VOCABULARY for name, i in ids.items())
    except (TypeError, KeyError):
        is_table = False
    if not is_table:
        raise UserError(f"{path}: 'added_tokens' is not a list of tokens with 'content' and 'id'")
    return ids
