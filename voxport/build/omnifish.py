"""OmniFish from checkpoint to build folder: what its manifest says, and how each of its parts is made and checked."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path

from _ref import omnifish as ref
from _ref.fish_codec import MAX_FRAMES
from _ref.higgs import GREEDY_TEMPERATURE
from voxport.build import builder as base
from voxport.build import llm
from voxport.build.checkpoint import read_added_tokens
from voxport.build.download import Found
from voxport.build.folder import STANDALONE, BuildFolder, is_begun
from voxport.build.omnifish_checkpoint import NAMES_FILE, OmniFishCheckpoint, read_recipe
from voxport.build.omnifish_parts import part_names
from voxport.build.omnifish_workshop import OmniFishRecipe, Workshop
from voxport.build.prove import prove_whole
from voxport.build.workshop import disk_full_explained
from voxport.errors import UserError, say
from voxport.families import OMNIFISH
from voxport.manifest import SCHEMA_VERSION, KVCache, Licence, Sampling, Source, Target
from voxport.manifest_omnifish import (
    AXIAL,
    CHAIN,
    CODEC_LICENCE_FILE,
    EXPLICIT,
    GQA,
    LICENCE_FILE,
    Codebooks,
    FishCodec,
    Generation,
    Limits,
    OmniFishManifest,
    Prompt,
    Residual,
)
from voxport.manifest_values import check_values

UNKNOWN_LICENCE = Licence("unknown (no LICENSE file)", None)
# A step in a process of its own gives its memory back; the codec, which is half of a checkpoint, is large beside any model.
ISOLATED_BYTES = 1 << 29
MAX_SECONDS = 120  # of one answer; longer text is read in parts
CAP_SECONDS = 3.0
CAP_SECONDS_PER_CHAR, CAP_SECONDS_PER_WIDE_CHAR = 0.17, 0.7  # twice the pace of slow English, and of digits or CJK
INSTRUCT_TEMPLATE = "speaker:{spk} quality:{q}"


class Builder(base.Builder):
    """Makes the parts of one target from one checkpoint into one folder."""

    shop: Workshop

    def _provide_standalone(self) -> None:
        if self.shop.recipe.attention == EXPLICIT:
            return
        if self.skip_extract:
            llm.check_extracted(self.shop.checkpoint, self.shop.standalone, self.shop.recipe.body_block)
        else:
            self._run(f"{llm.DECODER}: extract", self.shop.extract)

    def _bring_along(self, name: str, graph: Path) -> None:
        if self.shop.recipe.attention == GQA:
            super()._bring_along(name, graph)

    @property
    def components(self) -> tuple[str, ...]:
        """The parts of this checkpoint."""
        return part_names(self.shop.checkpoint)

    @property
    def licences(self) -> str:
        """The terms of what goes into the build, for the screen."""
        return f"{super().licences}; of the codec: {self.folder.manifest.codec_licence.name}"

    def finish(self) -> None:
        """Copy what belongs to no part; if no part is missing, let the build prove itself; put it in place."""
        checkpoint, manifest = self.shop.checkpoint, self.folder.manifest
        with disk_full_explained("build", self.folder.folder):
            for name in (*llm.TOKENIZER_FILES, NAMES_FILE):
                self.folder.copy_in(checkpoint.folder / name, name)
            for licence, home in ((manifest.licence, checkpoint.folder), (manifest.codec_licence, checkpoint.codec_folder)):
                if licence.file is None:
                    say(f"warning: {home} has no LICENSE file; find out its terms before you pass the build on")
                else:
                    self.folder.copy_in(licence_file(home), licence.file)
            self.folder.complete()
            prove_whole(self.folder, self.components, self._run)
            self.folder.commit()


def licence_file(folder: Path | None) -> Path | None:
    found = sorted(folder.glob("LICENSE*")) if folder else []
    return found[0] if found else None


def find_licence(folder: Path | None, name: str) -> Licence:
    """The licence in a folder by the first line of its file, to be kept as `name`."""
    path = licence_file(folder)
    if path is None:
        return UNKNOWN_LICENCE
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    return Licence(next((line for line in lines if line), path.name), name)


def describe(checkpoint: OmniFishCheckpoint, side: Mapping, found: Found, recipe: OmniFishRecipe) -> OmniFishManifest:
    """The manifest of a build, without parts and files."""
    config = checkpoint.config
    codec = describe_codec(checkpoint)
    manifest = OmniFishManifest(
        schema_version=SCHEMA_VERSION,
        family=OMNIFISH,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        target=Target(recipe.device, recipe.precision),
        source=Source(found.id, found.revision, str(checkpoint.folder.resolve()), checkpoint.fingerprint()),
        licence=find_licence(checkpoint.folder, LICENCE_FILE),
        codec_licence=find_licence(checkpoint.codec_folder, CODEC_LICENCE_FILE),
        tools=base.tool_versions(),
        recipe=recipe.record() | {"rope_theta": config.rope_theta},
        dims=base.describe_dims(config),
        codebooks=Codebooks(list(ref.CODEBOOK_SIZES), ref.VOCAB, ref.MASK_ID, ref.END_ID, list(ref.PAD_IDS)),
        codec=codec,
        residual=describe_residual(checkpoint),
        prompt=describe_prompt(checkpoint, side),
        control_tags={},
        structural_tokens=added_tokens(checkpoint.folder),
        generation=describe_generation(side, str(checkpoint.folder)),
        sampling=describe_sampling(side, ""),
        residual_sampling=describe_sampling(side, "mtp_"),
        limits=describe_limits(config, codec),
        kv_cache=KVCache(
            dtype=cache_dtype(recipe),
            past_key="past_key_values.{}.key",
            past_value="past_key_values.{}.value",
            present_key="present.{}.key",
            present_value="present.{}.value",
        ),
        attention=recipe.attention,
        parts={},
        files={},
        codec_path=str(checkpoint.codec_home.resolve()),
    )
    check_values(manifest, str(checkpoint.folder), "this checkpoint cannot be built")
    return manifest


def cache_dtype(recipe: OmniFishRecipe) -> str:
    wide = recipe.device == "cpu" or recipe.precision == "fp32" or recipe.attention == EXPLICIT
    return "float32" if wide else "float16"


def describe_codec(checkpoint: OmniFishCheckpoint) -> FishCodec:
    config = checkpoint.codec_config()
    if list(config.codebook_sizes) != list(ref.CODEBOOK_SIZES):
        raise UserError(f"{checkpoint.codec_home}: codebooks of {config.codebook_sizes} codes, not {ref.CODEBOOK_SIZES}")
    return FishCodec(config.sample_rate, config.hop_length, MAX_FRAMES, min_encode_samples=config.hop_length)


def describe_residual(checkpoint: OmniFishCheckpoint) -> Residual:
    residual = checkpoint.config.residual
    return Residual(
        kind=AXIAL if checkpoint.is_axial else CHAIN,
        size=residual.size,
        num_layers=residual.num_layers,
        num_kv_heads=residual.num_kv_heads,
        head_dim=residual.head_dim,
        prompt_cross=checkpoint.is_axial and residual.prompt_cross,
    )


def describe_prompt(checkpoint: OmniFishCheckpoint, side: Mapping) -> Prompt:
    prompt = side.get("prompt", {})
    return Prompt(
        names=checkpoint.names,
        num_speakers=checkpoint.config.num_speakers,
        languages=[ref.LANGUAGES[row] for row in sorted(checkpoint.languages.values())],
        ref_text_prefix=prompt.get("ref_text_prefix", True),
        denoise_token=prompt.get("denoise_token", False),
        instruct_template=prompt.get("instruct_template", INSTRUCT_TEMPLATE),
    )


def describe_generation(side: Mapping, where: str) -> Generation:
    recipe = read_recipe(side, where)
    threshold = None if recipe.threshold is None else float(recipe.threshold)
    return Generation(recipe.block_size, recipe.context_mode, recipe.steps, threshold, recipe.residual_rounds)


def describe_sampling(side: Mapping, prefix: str) -> Sampling:
    generation = side.get("generation", {})
    temperature, top_k = generation.get(f"{prefix}temperature", 0), generation.get(f"{prefix}top_k", 0)
    return Sampling(float(temperature), 1.0, top_k, GREEDY_TEMPERATURE)


def describe_limits(config: ref.OmniFishConfig, codec: FishCodec) -> Limits:
    frames = lambda seconds: round(seconds * codec.sample_rate / codec.hop_length)
    return Limits(
        context_rows=config.max_position_embeddings,
        warn_reference_seconds=30.0,
        max_reference_seconds=100.0,
        cap_base_frames=frames(CAP_SECONDS),
        cap_frames_per_char=frames(CAP_SECONDS_PER_CHAR),
        cap_frames_per_wide_char=frames(CAP_SECONDS_PER_WIDE_CHAR),
        cap_frames_per_tag=0,
        max_rows=frames(MAX_SECONDS),
    )


def added_tokens(folder: Path) -> dict[str, int]:
    """Tokens that steer the model, and that no text may hold."""
    return read_added_tokens(folder / "tokenizer.json")


def open_checkpoint(found: Found, recipe: OmniFishRecipe, codec: Path | None) -> OmniFishCheckpoint:
    """Check the checkpoint, and that this recipe can be made from it. UserError before anything is written."""
    checkpoint = OmniFishCheckpoint.open(found.folder, codec)
    checkpoint.codec_config()
    block, config = recipe.body_block, checkpoint.config
    for size in (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim) if block else ():
        if size % block.block_size:
            raise UserError(f"a width of {size} cannot be rounded in blocks of {block.block_size}; take --precision fp32")
    return checkpoint


def open_build(checkpoint: OmniFishCheckpoint, found: Found, recipe: OmniFishRecipe, output: Path, side: Mapping,
               skip_extract: bool = False, keep_intermediate: bool = False) -> Builder:  # fmt: skip
    """Open and lock the build folder. `side` is what no weight tells (`read_side`)."""
    manifest = describe(checkpoint, side, found, recipe)
    if not is_begun(output, manifest):
        checkpoint.check_finite()
    folder = BuildFolder(output, manifest, keep_intermediate)
    shop = Workshop(checkpoint, recipe, folder.work / STANDALONE, folder.scratch)
    isolated = sum(path.stat().st_size for path in checkpoint.weight_files()) >= ISOLATED_BYTES
    return Builder(shop, folder, skip_extract, isolated)
