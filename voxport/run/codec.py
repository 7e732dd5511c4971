"""Codes to sound and back."""

import numpy as np

from voxport.errors import WorkError
from voxport.manifest import Manifest
from voxport.run.delay import check_codes
from voxport.run.session import Parts

DECODER, ENCODER = "audio_tokenizer", "audio_encoder"


class Codec:
    """The codec's two graphs, each loaded at its first use."""

    def __init__(self, parts: Parts, manifest: Manifest):
        self.parts = parts
        self.audio = manifest.audio
        self.figures = manifest.codec

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """[T, N] codes -> [T * hop] float32, unclipped. WorkError unless the sound is whole, finite and not flat."""
        codes = check_codes(codes, self.audio, "codes")
        graph = self.parts[DECODER]
        samples = graph.run(codes=codes.T[None]).reshape(-1)
        wanted = len(codes) * self.figures.hop_length
        if len(samples) != wanted:
            raise WorkError(f"{graph.name} gave {len(samples)} samples for {len(codes)} frames instead of {wanted}")
        if not np.isfinite(samples).all() or np.ptp(samples) == 0:
            fault = "a flat line" if np.isfinite(samples).all() else "NaN or Inf"
            raise WorkError(f"{graph.name} on {graph.provider} returned {fault} as sound; speak with --provider cpu")
        return samples.astype(np.float32)

    def encode(self, samples: np.ndarray) -> np.ndarray:
        """[n] float32 at the codec's rate -> [T, N] int64 codes. WorkError if they are not codes."""
        graph = self.parts[ENCODER]
        codes = graph.run(waveform=samples[None, None])
        if codes.ndim != 3 or codes.shape[:2] != (1, self.audio.num_codebooks) or codes.size == 0:
            raise WorkError(f"{graph.name} gave codes of shape {list(codes.shape)} for {len(samples)} samples")
        if codes.min() < 0 or codes.max() >= self.audio.codebook_size:
            raise WorkError(f"{graph.name} on {graph.provider} gave codes outside 0..{self.audio.codebook_size - 1}")
        return codes[0].T.astype(np.int64)
