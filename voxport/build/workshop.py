"""The steps that make and check the parts of a Higgs build, each fit to run in a process of its own."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from _ref.higgs import TEXT_EMBEDDING, Higgs
from voxport.build import llm
from voxport.build.check import CHECKS, PartSession, check_decoder
from voxport.build.checkpoint import Checkpoint
from voxport.build.lookup import table_rows, write_lookup
from voxport.build.parts import TEXT_EMBED, build_part, temporary_files_in
from voxport.build.recipes import Recipe
from voxport.errors import WorkError
from voxport.manifest import TensorSpec

STREAMED_WEIGHTS = 1 << 27  # of a text embedding: Olive holds a table several times over, one of this size in more than 1 GB


@dataclass(frozen=True)
class Workshop:
    """What the steps of a build work on, and the steps. Picklable, so that each may run in a process of its own."""

    checkpoint: Checkpoint
    recipe: Recipe
    standalone: Path
    scratch: Path
    codec_from: Path | None = None

    @property
    def staging(self) -> Path:
        """Where a part lies before it is installed."""
        return self.scratch / "staging"

    def extract(self) -> None:
        """Write the rounded body as a checkpoint of its own."""
        shutil.rmtree(self.standalone, ignore_errors=True)
        llm.extract_qwen3(self.checkpoint, self.standalone, self.recipe.body_block)

    def make(self, name: str) -> Path:
        """Write one part into `staging`. Returns the graph."""
        recipe = self.recipe
        if name == llm.DECODER:
            return llm.build_decoder(self.standalone, self.staging, self.checkpoint.config, recipe.device, recipe.precision,
                                     recipe.body_block, recipe.rope_table)  # fmt: skip
        if name == TEXT_EMBED and streams_table(self.checkpoint):
            return stream_text_embed(self.checkpoint, self.staging, recipe.plans[name].precision)
        os.environ["VOXPORT_CODEC_FROM"] = str(self.codec_from or "")  # user_script reads it; empty means none
        with temporary_files_in(self.scratch):
            return build_part(recipe.plans[name], self.checkpoint.folder, self.scratch, self.staging)

    def check(self, name: str, graph: Path) -> tuple[list[TensorSpec], list[TensorSpec]]:
        """Compare a part in `staging` with `_ref`; what it takes and gives."""
        if name == llm.DECODER:
            return check_decoder(graph, self.recipe.precision, self.rounded_model()).specs()
        session = PartSession(graph)
        CHECKS[name](session, self.recipe.plans[name].precision, self.checkpoint)
        return session.specs()

    def rounded_model(self) -> Higgs:
        """`_ref` on the weights that the decoder computes with, read layer by layer."""
        weights = llm.StandaloneWeights(self.standalone, self.recipe.body_block)
        return Higgs(self.checkpoint.config, Overlay(weights, self.checkpoint), self.recipe.rope_table == "bf16")


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


def streams_table(checkpoint: Checkpoint) -> bool:
    """Whether the text embedding is written row by row, without Olive."""
    return checkpoint.config.text_vocab_size * checkpoint.config.hidden_size >= STREAMED_WEIGHTS


def stream_text_embed(checkpoint: Checkpoint, out: Path, precision: str) -> Path:
    """The text embedding without Olive: rows go from the checkpoint to the data file. Returns the graph."""
    out.mkdir(parents=True, exist_ok=True)
    shape = (checkpoint.config.text_vocab_size, checkpoint.config.hidden_size)
    rows = table_rows(checkpoint.files[TEXT_EMBEDDING], TEXT_EMBEDDING)
    return write_lookup(out / f"{TEXT_EMBED}.onnx", shape, rows, precision)


@contextlib.contextmanager
def disk_full_explained(what: str, folder: Path) -> Iterator[None]:
    """Say what a full disk means; some tools wrap the system's error in one of their own."""
    try:
        yield
    except Exception as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error)
        if not full:
            raise
        raise WorkError(f"{what}: the disk of {folder} is full; the build in place was not touched. Free space and run again:"
                        " finished parts are kept") from error  # fmt: skip
