"""Higgs Audio v3 from checkpoint to build folder: what its manifest says, and how each of its parts is made and checked."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from _ref.higgs import GREEDY_TEMPERATURE, PLACEHOLDER, Higgs
from voxport import __version__
from voxport.build import llm
from voxport.build.check import CHECKS, PartSession, check_decoder
from voxport.build.checkpoint import Checkpoint, Vocabulary, read_vocabulary
from voxport.build.download import Found
from voxport.build.folder import BuildFolder
from voxport.build.parts import OLIVE_PARTS, PartPlan, build_part, plan_parts
from voxport.build.quantise import BlockFormat
from voxport.errors import UserError, say
from voxport.manifest import (
    HIGGS, SCHEMA_VERSION, Audio, Codec, Dims, KVCache, Licence, Limits, Manifest, Part, Sampling, Source, Target, Tokens,
)  # fmt: skip

COMPONENTS = (llm.DECODER, *OLIVE_PARTS)
CONTEXT_ROWS = 4096  # the published engine's context: prompt and rows together
MAX_ROWS = 2048  # its longest answer, 81.6 s
MIN_ENCODE_SECONDS = 1  # shorter references are padded by the published engine ("the encoder errors otherwise")
CONTEXT_FRAMES = 10  # frames on each side that a sample depends on: conv1 3, the first upsampling 1, its residual units 5, the rest 1
TOOLS = ("torch", "transformers", "onnx", "onnxruntime", "onnxruntime-genai", "olive-ai", "safetensors", "numpy")
SAMPLING = Sampling(temperature=0.8, top_p=0.8, top_k=30, greedy_temperature=GREEDY_TEMPERATURE)
LIMITS = Limits(
    context_rows=CONTEXT_ROWS,
    max_rows=MAX_ROWS,
    warn_reference_seconds=30.0,
    max_reference_seconds=100.0,
    plateau_frames=75,  # 3 s: twice the longest pause tag (1.5 s)
    cap_base_frames=75,
    cap_frames_per_char=4,  # 0.16 s, twice the pace of slow English
    cap_frames_per_wide_char=16,  # a digit or a CJK sign is a word or a syllable
    cap_frames_per_tag=38,  # 1.5 s
)


@dataclass(frozen=True)
class Recipe:
    """What a target is made of. `heads` is the precision of audio_heads, None for the target's default."""

    device: str
    precision: str
    heads: str | None = None
    rope_table: str = "bf16"
    block: BlockFormat = BlockFormat()

    def __post_init__(self):
        if self.device == "cpu" and self.precision == "fp16":
            raise UserError(
                "cpu with fp16 is not built: ONNX Runtime's CPU kernels compute in fp32, so it would be slower than int4"
                " and no better than fp32; take --precision int4 or fp32"
            )

    @property
    def body_block(self) -> BlockFormat | None:
        """How the body's projections are rounded, None if they are not."""
        return self.block if self.precision == "int4" else None

    def part_recipe(self, name: str, fingerprint: str) -> dict:
        """What decides a part's bytes: compared with the manifest to see whether it must be made again."""
        if name == llm.DECODER:
            block = asdict(self.block) if self.body_block else None
            return {"source": fingerprint, "device": self.device, "precision": self.precision,
                    "block": block, "rope_table": self.rope_table}  # fmt: skip
        return {"source": fingerprint, "precision": self.plans[name].precision}

    @property
    def plans(self) -> dict[str, PartPlan]:
        return plan_parts(self.device, self.precision, self.heads)


def find_licence(checkpoint: Checkpoint) -> Licence:
    """The checkpoint's licence by the first line of its file."""
    for path in sorted(checkpoint.folder.glob("LICENSE*")):
        lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
        return Licence(next((line for line in lines if line), path.name), "LICENSE")
    return Licence("unknown (the checkpoint has no LICENSE file)", None)


def describe(checkpoint: Checkpoint, vocabulary: Vocabulary, found: Found, recipe: Recipe) -> Manifest:
    """The manifest of a build, without parts and files."""
    config, codec = checkpoint.config, checkpoint.codec_config
    special = vocabulary.special
    return Manifest(
        schema_version=SCHEMA_VERSION,
        family=HIGGS,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        target=Target(recipe.device, recipe.precision),
        source=Source(found.id, found.revision, str(checkpoint.folder.resolve()), checkpoint.fingerprint()),
        licence=find_licence(checkpoint),
        tools=tool_versions(),
        recipe=asdict(recipe) | {"rope_theta": config.rope_theta},
        dims=Dims(
            hidden_size=config.hidden_size,
            text_vocab_size=config.text_vocab_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            max_position_embeddings=config.max_position_embeddings,
        ),
        audio=Audio(config.num_codebooks, config.audio_vocab_size, config.codebook_size, config.boc_id, config.eoc_id),
        codec=Codec(codec.sample_rate, codec.hop_length, MIN_ENCODE_SECONDS * codec.sample_rate, CONTEXT_FRAMES),
        tokens=Tokens(
            tts=special["<|tts|>"],
            text=special["<|text|>"],
            audio=special["<|audio|>"],
            ref_audio=special["<|ref_audio|>"],
            ref_text=special["<|ref_text|>"],
            placeholder=PLACEHOLDER,
        ),
        control_tags=vocabulary.control_tags,
        structural_tokens=vocabulary.structural,
        sampling=SAMPLING,
        limits=LIMITS,
        kv_cache=KVCache(
            dtype="float32" if recipe.device == "cpu" or recipe.precision == "fp32" else "float16",
            past_key="past_key_values.{}.key",
            past_value="past_key_values.{}.value",
            present_key="present.{}.key",
            present_value="present.{}.value",
        ),
        parts={},
        files={},
    )


def tool_versions() -> dict[str, str]:
    return {"voxport": __version__} | {name: importlib.metadata.version(name) for name in TOOLS}


@dataclass
class Builder:
    """Makes the parts of one target from one checkpoint into one folder."""

    checkpoint: Checkpoint
    recipe: Recipe
    folder: BuildFolder
    skip_extract: bool = False
    codec_from: Path | None = None

    def build(self, name: str) -> bool:
        """Make, check and install one part; False if the folder already holds it."""
        recipe = self.recipe.part_recipe(name, self.folder.manifest.source.fingerprint)
        if self.folder.is_current(name, recipe):
            return False
        staging = self.folder.work / "staging"
        shutil.rmtree(staging, ignore_errors=True)
        graph = self._build_decoder(staging) if name == llm.DECODER else self._build_olive_part(name, staging)
        inputs, outputs = self._check(name, graph)
        self.folder.install(name, graph, Part(graph.name, recipe["precision"], {}, inputs, outputs, recipe))
        if name == llm.DECODER:
            self.folder.copy_in(staging / "genai_config.json", "genai_config.json")
        return True

    @property
    def standalone(self) -> Path:
        return self.folder.work / "qwen3_standalone"

    def _build_decoder(self, staging: Path) -> Path:
        recipe, block = self.recipe, self.recipe.body_block
        if self.skip_extract:
            llm.check_extracted(self.checkpoint, self.standalone, block)
        else:
            shutil.rmtree(self.standalone, ignore_errors=True)
            llm.extract_qwen3(self.checkpoint, self.standalone, block)
        return llm.build_decoder(
            self.standalone, staging, self.checkpoint.config, recipe.device, recipe.precision, block, recipe.rope_table
        )

    def _build_olive_part(self, name: str, staging: Path) -> Path:
        if self.codec_from is not None:
            os.environ["VOXPORT_CODEC_FROM"] = str(self.codec_from)
        return build_part(self.recipe.plans[name], self.checkpoint.folder, self.folder.work, staging)

    def _check(self, name: str, graph: Path):
        session = PartSession(graph)
        if name == llm.DECODER:
            check_decoder(session, self.recipe.precision, self._rounded_model())
        else:
            CHECKS[name](session, self.recipe.plans[name].precision, self.checkpoint)
        return session.specs()

    def _rounded_model(self) -> Higgs:
        """`_ref` on the weights that the decoder computes with, read layer by layer."""
        weights = llm.StandaloneWeights(self.standalone, self.recipe.body_block)
        return Higgs(self.checkpoint.config, Overlay(weights, self.checkpoint), self.recipe.rope_table == "bf16")

    def finish(self) -> None:
        """Copy what belongs to no part: tokenizer and licence."""
        for name in llm.TOKENIZER_FILES:
            self.folder.copy_in(self.checkpoint.folder / name, name)
        licence = self.folder.manifest.licence
        if licence.file is None:
            say("warning: the checkpoint has no LICENSE file; find out its terms before you pass the build on")
        else:
            self.folder.copy_in(sorted(self.checkpoint.folder.glob("LICENSE*"))[0], licence.file)


@dataclass(frozen=True)
class Overlay(Mapping):
    """Tensors of `top` where it has them, else of `base`."""

    top: Mapping
    base: Mapping

    def __getitem__(self, name: str):
        return self.top[name] if name in self.top else self.base[name]

    def __iter__(self):
        return iter(self.top.keys() | self.base.keys())

    def __len__(self) -> int:
        return len(self.top.keys() | self.base.keys())


def open_build(found: Found, recipe: Recipe, output: Path, codec_from: Path | None, skip_extract: bool) -> Builder:
    """Check the checkpoint and its tokenizer, then open the build folder. UserError before anything is written."""
    checkpoint = Checkpoint.open(found.folder, codec_from)
    vocabulary = read_vocabulary(checkpoint.folder)
    block, config = recipe.body_block, checkpoint.config
    if block is not None:
        for size in (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim):
            if size % block.block_size:
                raise UserError(f"a width of {size} cannot be rounded in blocks of {block.block_size}; take --precision fp32")
    manifest = describe(checkpoint, vocabulary, found, recipe)
    return Builder(checkpoint, recipe, BuildFolder(output, manifest), skip_extract, codec_from)
