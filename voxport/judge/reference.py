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
from voxport.errors import UserError
from voxport.manifest import Manifest

LARGEST_SPOKEN = 1 << 30  # bytes of weights

def find_reference(given: str | None, manifest: Manifest) -> Path:
    """Folder of the original: the one given, else the one that the manifest records if it still lies there.

    UserError "not compared with the original" if neither is there.
    """
    if given is not None:
        folder = DEMO_FOLDER if given == DEMO else Path(given)
        if not folder.is_dir():
            raise UserError(f"not compared with the original: --reference {given} is not a folder")
        return folder
    folder = DEMO_FOLDER if manifest.source.id == DEMO else Path(manifest.source.path)
    if not (folder / "config.json").is_file():
        raise UserError(f"not compared with the original: {folder} is not here; name the checkpoint with --reference")
    return folder


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
