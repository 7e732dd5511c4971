"""Open an OmniFish checkpoint and its Fish codec: check every name and shape, the names of voices, and what no weight tells."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from _ref import fish_codec, omnifish
from _ref.fish_codec import FishCodec, FishConfig
from _ref.omnifish import OmniFishConfig, Recipe
from voxport.build.checkpoint import check_safetensors, read_index
from voxport.build.config_keys import FISH_CODEC, OMNIFISH, OMNIFISH_SIDE, check_keys
from voxport.build.finite import check_finite
from voxport.build.mapped import map_safetensors
from voxport.errors import UserError
from voxport.files import read_any_json, read_json

INDEX, SINGLE, SIDE_FILE, NAMES_FILE = "model.safetensors.index.json", "model.safetensors", "omnifish.json", "id_vocab.json"
PICKLED = (".pt", ".pth")
CODEC_FILES, CODEC_CONFIG = ("codec.safetensors", "codec.pth"), "codec_config.json"
BUNDLED_CODEC_CONFIG = Path(__file__).with_name("fish_codec_config.json")
ENCODE_ONLY = ("encoder.", "quantizer.pre_module.", "quantizer.downsample.")  # prefixes of the codec's two sides
DECODE_ONLY = ("decoder.", "quantizer.post_module.", "quantizer.upsample.")
LANG_START = "<|lang_start|>"
MATRIX = re.compile(r"(?:embeddings|embed_tokens|embedding|_emb|\.w1|\.wkv)\.weight$")  # tensors whose shapes tell sizes
KERNEL_HALVES = tuple("." + name for pair in fish_codec.WEIGHT_NORM_NAMES for name in pair)
DEMANDED = ("block_size", "context_mode", "steps")  # by omnifish.json or a flag; a wrong one makes noise and no error


@dataclass(frozen=True)
class OmniFishCheckpoint(Mapping):
    """A checked checkpoint; as a mapping, tensor name -> tensor as stored, mapped from disk where the format allows."""

    folder: Path
    codec_folder: Path | None
    config: OmniFishConfig
    tensors: Mapping[str, Tensor]
    names: list[str]

    @classmethod
    def open(cls, folder: Path, codec_folder: Path | None = None) -> OmniFishCheckpoint:
        """Read config, names and tensors' shapes; UserError on anything that is not a complete OmniFish checkpoint."""
        folder = Path(folder)
        tensors = read_tensors(folder)
        config = read_config(folder, tensors)
        names = read_names(folder, config)
        return cls(folder, find_codec(folder, codec_folder), config, tensors, names)

    def __reduce__(self):
        return OmniFishCheckpoint.open, (self.folder, self.codec_folder)  # another process maps the files itself

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return read_tokenizer(self.folder)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    @property
    def lang_start(self) -> int:
        return self.tokenizer.token_to_id(LANG_START)

    @property
    def languages(self) -> dict[int, int]:
        """Token id -> row of the language table."""
        return omnifish.language_tokens(self.encode)

    @property
    def is_axial(self) -> bool:
        return isinstance(self.config.residual, omnifish.AxialConfig)

    def codec_config(self) -> FishConfig:
        return read_codec_config(self.codec_home)

    def codec(self, without: tuple[str, ...] = ()) -> FishCodec:
        """The codec in float32; modules under the prefixes `without` (one side of it) are there and hold nothing."""
        return load_codec(self.codec_home, without)

    @property
    def codec_home(self) -> Path:
        if self.codec_folder is None:
            raise UserError(f"{self.folder}: no Fish codec ({' or '.join(CODEC_FILES)}) in it, in its folder codec, or beside it;"
                            " name the folder that holds it with --codec")  # fmt: skip
        return self.codec_folder

    def weight_files(self) -> list[Path]:
        files = model_files(self.folder)
        return files if self.codec_folder is None else [*files, codec_file(self.codec_folder)]

    def check_finite(self) -> None:
        """Read every weight, the codec's too; UserError names the first tensor that holds NaN or Inf."""
        named = [(name, tensor, name_weights(self.folder)) for name, tensor in self.tensors.items()]
        if self.codec_folder is not None:
            path = codec_file(self.codec_folder)
            named += [(name, tensor, str(path)) for name, tensor in read_codec_tensors(path).items()]
        check_finite(named, sum(tensor.numel() for _, tensor, _ in named))

    def fingerprint(self) -> str:
        """Changes when the checkpoint does: a hash of its config and of each weight file's name, size and time."""
        digest = hashlib.sha256(json.dumps([repr(self.config), self.names]).encode())
        for path in self.weight_files():
            stat = path.stat()
            digest.update(f"{path.name}:{stat.st_size}:{stat.st_mtime_ns}".encode())
        return digest.hexdigest()


def is_omnifish(folder: Path) -> bool:
    """Whether a folder's config.json is that of an OmniFish checkpoint."""
    return (Path(folder) / "config.json").is_file() and "llm_config" in read_json(Path(folder) / "config.json", "checkpoint")


def model_files(folder: Path) -> list[Path]:
    """The files that hold the model's tensors: those of the index, else the usual name, else the only one there is."""
    if (folder / INDEX).is_file():
        return sorted(set(read_index(folder / INDEX).values()))
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    found = [path for path in sorted(folder.glob("*")) if path.suffix in (".safetensors", *PICKLED)]
    found = [path for path in found if path.name not in CODEC_FILES]
    if len(found) != 1:
        raise UserError(f"{folder} holds {len(found)} weight files (*.safetensors, *.pt, *.pth), not one; name it {SINGLE}")
    return found


def read_tensors(folder: Path) -> dict:
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give a checkpoint folder")
    tensors = {}
    for path in model_files(folder):
        tensors |= read_weights(path)
    for name, path in read_index(folder / INDEX).items() if (folder / INDEX).is_file() else ():
        if name not in tensors:
            raise UserError(f"{path} lacks the tensor {name} that the index places in it")
    try:
        return omnifish.plain_names(tensors)
    except (AttributeError, TypeError, RecursionError) as error:
        raise UserError(f"{name_weights(folder)}: {error}: it holds something else than tensors by name") from error


def name_weights(folder: Path) -> str:
    """The file of the weights for a message, or the folder if there are several."""
    files = model_files(folder)
    return str(files[0] if len(files) == 1 else folder)


def read_weights(path: Path) -> dict:
    """The content of a weight file. Of a pickle only tensors are read; it may nest them."""
    try:
        if path.suffix in PICKLED:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        check_safetensors(path)
        return map_safetensors(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; download the checkpoint again") from None
    except UserError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise UserError(f"{path} cannot be read ({type(error).__name__}: {error}); download it again") from error


def read_config(folder: Path, tensors: Mapping[str, Tensor]) -> OmniFishConfig:
    path = folder / "config.json"
    data = read_json(path, "checkpoint")
    check_keys(data, OMNIFISH, path)
    for name, tensor in tensors.items():
        if MATRIX.search(name) and getattr(tensor, "ndim", 0) != 2:
            raise UserError(f"{name_weights(folder)}: {name} is no matrix [rows, columns]")
    try:
        config = OmniFishConfig.from_dict(data, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    except KeyError as error:
        raise UserError(f"{name_weights(folder)}: the tensor {error.args[0]!r} is missing") from error
    except NotImplementedError as error:
        raise UserError(f"{path}: {error}") from error
    except (ValueError, TypeError, AttributeError, IndexError, ArithmeticError) as error:
        raise UserError(f"{name_weights(folder)}: {error}; it does not fit {path.name}") from error
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise UserError(f"{name_weights(folder)}: {name} is stored as {tensor.dtype}; quantised copies cannot be read")
    if config.num_heads % config.num_kv_heads:
        raise UserError(f"{path}: {config.num_heads} heads cannot share {config.num_kv_heads} key/value heads evenly")
    if config.head_dim % 16:
        raise UserError(f"{path}: head_dim is {config.head_dim}; ONNX Runtime's attention needs a multiple of 16")
    return config


def read_names(folder: Path, config: OmniFishConfig) -> list[str]:
    """Names of speakers and recordings, in the order of their ids."""
    path = folder / NAMES_FILE
    names = read_any_json(path, "list of names")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path} must hold a list of names")
    try:
        omnifish.check_names(names, config)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    return names


def read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise UserError(f"{path} cannot be read as a tokenizer ({error})") from error
    if tokenizer.token_to_id(LANG_START) is None:
        raise UserError(f"{path} has no token {LANG_START}: it is not that of an OmniVoice model")
    return tokenizer


def read_side(folder: Path, **given) -> dict:
    """omnifish.json of a checkpoint with the `given` fields that are not None put over it; UserError names what nobody says."""
    path = folder / SIDE_FILE
    side = read_json(path, "OmniFish settings") if path.is_file() else {}
    check_keys(side, OMNIFISH_SIDE, path)
    given = {name: value for name, value in given.items() if value is not None}
    if "steps" in given:
        side = side | {"generation": side.get("generation", {}) | {"steps": given["steps"]}}
    side = side | given
    missing = [name for name in DEMANDED if name not in side]
    if missing:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise UserError(f"{folder}: no weight tells {' and '.join(missing)}, and a wrong guess would speak noise;"
                        f" give {flags}, or a file {path.name} beside the checkpoint")  # fmt: skip
    return side


def read_recipe(side: Mapping, where: str) -> Recipe:
    try:
        return Recipe.from_dict(side)
    except (ValueError, TypeError, AttributeError, NotImplementedError) as error:
        raise UserError(f"{where}: {error}") from error


def find_codec(folder: Path, given: Path | None) -> Path | None:
    """The folder that holds the codec: the one given, the checkpoint, or a folder `codec` in it or beside it."""
    if given is not None:
        codec_file(Path(given))
        return Path(given)
    homes = (folder, folder / "codec", folder.parent / "codec")
    return next((home for home in homes if any((home / name).is_file() for name in CODEC_FILES)), None)


def codec_file(folder: Path) -> Path:
    for name in CODEC_FILES:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"{folder} holds no Fish codec; {' or '.join(CODEC_FILES)} is looked for")


def read_codec_config(folder: Path) -> FishConfig:
    """codec_config.json beside the codec, else the published one that comes with the toolkit."""
    path = folder / CODEC_CONFIG if (folder / CODEC_CONFIG).is_file() else BUNDLED_CODEC_CONFIG
    data = read_json(path, "codec config")
    check_keys(data, FISH_CODEC, path)
    config = _explained(path, lambda: FishConfig.from_dict(data))
    _explained(path, lambda: codec_shapes(config))
    return config


@functools.cache
def codec_shapes(config: FishConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in FishCodec(config, max_frames=1).state_dict().items()}


def read_codec_tensors(path: Path) -> dict[str, Tensor]:
    """The codec's tensors as stored, under their own names."""
    stored = _explained(path, lambda: fish_codec.plain_names(read_weights(path)))
    for name, tensor in stored.items():
        if not isinstance(tensor, Tensor):
            raise UserError(f"{path}: {name} is a {type(tensor).__name__}, not a tensor")
        if name.endswith(KERNEL_HALVES) and tensor.ndim != 3:
            raise UserError(f"{path}: {name} has {tensor.ndim} axes; magnitude and direction of a kernel have three")
    return stored


def load_codec(folder: Path, without: tuple[str, ...] = ()) -> FishCodec:
    path, config = codec_file(folder), read_codec_config(folder)
    stored = read_codec_tensors(path)
    tensors = {name: tensor.detach() for name, tensor in stored.items() if not name.startswith(without)}
    shapes = codec_shapes(config)
    tensors |= {name: torch.zeros(()).expand(shape) for name, shape in shapes.items() if name.startswith(without)}
    return _explained(path, lambda: fish_codec.load_codec(config, tensors))


def _explained(path: Path, read: Callable):
    try:
        return read()
    except KeyError as error:
        raise UserError(f"{path}: {error.args[0]!r} is missing") from error
    except (ValueError, TypeError, AttributeError, IndexError, ArithmeticError, RuntimeError) as error:  # torch's own are the last
        raise UserError(f"{path}: {error}") from error
