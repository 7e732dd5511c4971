"""Higgs Audio v3 from checkpoint to build folder: what its manifest says, and how each of its parts is made and checked."""

from __future__ import annotations

import datetime
from pathlib import Path

from _ref.higgs import GREEDY_TEMPERATURE, PLACEHOLDER
from voxport.build import builder as base
from voxport.build import llm
from voxport.build.checkpoint import Checkpoint, Vocabulary, read_codec_config, read_config, read_vocabulary
from voxport.build.download import Found
from voxport.build.folder import STANDALONE, BuildFolder, is_begun
from voxport.build.parts import OLIVE_PARTS
from voxport.build.prove import prove_whole
from voxport.build.recipes import Recipe
from voxport.build.workshop import Overlay, Workshop, disk_full_explained, stream_text_embed, streams_table
from voxport.errors import UserError, say
from voxport.manifest import (
    HIGGS,
    SCHEMA_VERSION,
    Audio,
    Codec,
    KVCache,
    Licence,
    Limits,
    Manifest,
    Sampling,
    Source,
    Target,
    Tokens,
)  # fmt: skip
from voxport.manifest_values import check_values

__all__ = ["COMPONENTS", "Builder", "Overlay", "Recipe", "open_build", "open_checkpoint", "stream_text_embed"]
COMPONENTS = (llm.DECODER, *OLIVE_PARTS)
# A step in a process of its own gives its memory back; starting one takes seconds, which small checkpoints do not need to pay.
ISOLATED_BYTES = 1 << 30
CONTEXT_ROWS = 4096  # the published engine's context: prompt and rows together
MAX_ROWS = 2048  # its longest answer, 81.6 s
MIN_ENCODE_SECONDS = 1  # shorter references are padded by the published engine ("the encoder errors otherwise")
CONTEXT_FRAMES = 10  # frames on each side that a sample depends on: conv1 3, the first upsampling 1, its residual units 5, the rest 1
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
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        family=HIGGS,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        target=Target(recipe.device, recipe.precision),
        source=Source(found.id, found.revision, str(checkpoint.folder.resolve()), checkpoint.fingerprint()),
        licence=find_licence(checkpoint),
        tools=base.tool_versions(),
        recipe=recipe.record()
        | {"rope_theta": config.rope_theta, "text_embed_by": "rows streamed" if streams_table(checkpoint) else "Olive"},
        dims=base.describe_dims(config),
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
    check_values(manifest, str(checkpoint.folder), "this checkpoint cannot be built")
    return manifest


class Builder(base.Builder):
    """Makes the parts of one target from one checkpoint into one folder."""

    def finish(self) -> None:
        """Copy what belongs to no part, tokenizer and licence; if no part is missing, let the build prove itself; put it in place."""
        checkpoint, licence = self.shop.checkpoint, self.folder.manifest.licence
        with disk_full_explained("build", self.folder.folder):
            for name in llm.TOKENIZER_FILES:
                self.folder.copy_in(checkpoint.folder / name, name)
            if licence.file is None:
                say("warning: the checkpoint has no LICENSE file; find out its terms before you pass the build on")
            else:
                self.folder.copy_in(sorted(checkpoint.folder.glob("LICENSE*"))[0], licence.file)
            self.folder.complete()
            prove_whole(self.folder, COMPONENTS, self._run)
            self.folder.commit()


def open_checkpoint(found: Found, recipe: Recipe, codec_from: Path | None) -> Checkpoint:
    """Check the checkpoint and that this recipe can be made from it. UserError before anything is written."""
    checkpoint = Checkpoint.open(found.folder, codec_from)
    check_widths(checkpoint, recipe)
    return checkpoint


def outline(configs: Path, recipe: Recipe, codec_from: Path | None) -> Checkpoint:
    """A checkpoint of which only the config files are here: it has sizes and no tensors."""
    own = codec_from is None or (configs / "codec_config.json").is_file()
    checkpoint = Checkpoint(configs, read_config(configs), read_codec_config(configs if own else codec_from), {})
    check_widths(checkpoint, recipe)
    return checkpoint


def check_widths(checkpoint: Checkpoint, recipe: Recipe) -> None:
    """UserError if a width of the body cannot be cut into blocks."""
    block, config = recipe.body_block, checkpoint.config
    if block is not None:
        for size in (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim):
            if size % block.block_size:
                raise UserError(f"a width of {size} cannot be rounded in blocks of {block.block_size}; take --precision fp32")


def open_build(checkpoint: Checkpoint, found: Found, recipe: Recipe, output: Path, codec_from: Path | None = None,
               skip_extract: bool = False, keep_intermediate: bool = False) -> Builder:  # fmt: skip
    """Open and lock the build folder. UserError before anything is written if a weight is no number."""
    manifest = describe(checkpoint, read_vocabulary(checkpoint.folder), found, recipe)
    if not is_begun(output, manifest):
        checkpoint.check_finite()
    folder = BuildFolder(output, manifest, keep_intermediate)
    shop = Workshop(checkpoint, recipe, folder.work / STANDALONE, folder.scratch, codec_from)
    isolated = sum(path.stat().st_size for path in checkpoint.weight_files()) >= ISOLATED_BYTES
    return Builder(shop, folder, skip_extract, isolated)
