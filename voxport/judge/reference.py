"""The original, streamed: `_ref` over whole teacher-forced sequences, each layer's weights read once and let go again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from _ref.higgs import CODEC_PREFIX, FINAL_NORM, Higgs, KVCache, qwen3_layer, rms_norm, rope_table
from _ref.higgs_codec import HiggsCodec, load_codec
from voxport.build.checkpoint import Checkpoint
from voxport.build.download import DEMO, DEMO_FOLDER
from voxport.build.job import recognise
from voxport.errors import UserError
from voxport.families import FAMILIES
from voxport.manifest import BuildManifest

LARGEST_SPOKEN = 1 << 30  # bytes of weights


def find_reference(given: str | None, manifest: BuildManifest) -> Path:
    """Folder of the original: the one given, else the one that the manifest records if it still lies there.

    UserError "not compared with the original" if neither is there, or it is a checkpoint of another family.
    """
    if given is not None:
        folder = DEMO_FOLDER if given == DEMO else Path(given)
        if not folder.is_dir():
            raise UserError(f"not compared with the original: --reference {given} is not a folder")
    else:
        folder = DEMO_FOLDER if manifest.source.id == DEMO else Path(manifest.source.path)
        if not (folder / "config.json").is_file():
            raise UserError(f"not compared with the original: {folder} is not here; name the checkpoint with --reference")
    kinds = recognise(folder)
    if kinds and manifest.family not in kinds:
        raise UserError(f"not compared with the original: {given or folder} is a checkpoint of the {FAMILIES[kinds[0]].short} family,"
                        f" the build is of {FAMILIES[manifest.family].short}; name its own with --reference")  # fmt: skip
    return folder


def check_alike(first: BuildManifest, second: BuildManifest, flag: str) -> None:
    """UserError, which names the second by its `flag`, unless both builds were made from one checkpoint: the same files, or the same
    commit of the same repository."""
    kinds = [FAMILIES[manifest.family].short for manifest in (first, second)]
    one, other = first.source, second.source
    same_commit = one.revision is not None and (one.id, one.revision) == (other.id, other.revision)
    if kinds[0] == kinds[1] and (one.fingerprint == other.fingerprint or same_commit):
        return
    changed = " as its files were at another time" if one.id == other.id else ""
    raise UserError(
        f"{flag} was built from the {kinds[1]} checkpoint {other.id}{changed}, the build to judge from the {kinds[0]} checkpoint"
        f" {one.id}; only builds of one checkpoint can be compared"
    )


def is_small(weight_files: Iterable[Path]) -> bool:
    """Whether the original is small enough to speak too: it reads every weight for every step."""
    return sum(path.stat().st_size for path in weight_files) <= LARGEST_SPOKEN


class Original:
    """The checkpoint's model in float32, with the rotary tables that the build was made with."""

    def __init__(self, checkpoint: Checkpoint, bf16_rope: bool):
        self.checkpoint = checkpoint
        self.model = Higgs(checkpoint.config, checkpoint, bf16_rope)

    def with_weights(self, weights: Mapping[str, Tensor]) -> Original:
        """The same model with `weights` in place of the checkpoint's."""
        other = Original(self.checkpoint, self.model.bf16_rope)
        other.model = Higgs(self.checkpoint.config, {**dict.fromkeys(self.checkpoint), **weights}, self.model.bf16_rope)
        return other

    def in_memory(self) -> Higgs:
        """The language model with every weight held in float32; for small checkpoints only."""
        names = [name for name in self.checkpoint if not name.startswith(CODEC_PREFIX)]
        return Higgs(self.checkpoint.config, {name: self.checkpoint[name].float() for name in names}, self.model.bf16_rope)

    def codec(self) -> HiggsCodec:
        return load_codec(self.checkpoint.codec_config, self.checkpoint.codec_tensors())

    @torch.no_grad()
    def hidden_states(self, sequences: list[Tensor]) -> list[Tensor]:
        """embeds [S, D] of each sequence -> hidden states [S, D] after the final norm. One layer in memory at a time."""
        config, model = self.model.config, self.model
        states = list(sequences)
        ropes = [rope_table(config, torch.arange(len(s)), model.bf16_rope) for s in states]
        for i in range(config.num_layers):
            weights = model.layer_weights(i)
            states = [qwen3_layer(config, x, weights, rope, KVCache()) for x, rope in zip(states, ropes)]
        return [rms_norm(x, model.weight(FINAL_NORM), config.rms_norm_eps) for x in states]
