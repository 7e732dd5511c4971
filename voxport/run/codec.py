"""Codes to sound and back."""

import numpy as np

from voxport.errors import WorkError
from voxport.manifest import Manifest
from voxport.run.delay import check_codes
from voxport.run.session import CPU, Parts

DECODER, ENCODER = "audio_tokenizer", "audio_encoder"


def silence_remedy(provider: str) -> str:
    """What to do about sound that is none, which may be a kernel's fault, a file's, or all that the model drew."""
    if provider != CPU:
        return "speak with --provider cpu"
    return "try another seed, text or voice, and if it stays so ask --verify whether the build is as it was made"


class Codec:
    """The codec's two graphs, each loaded at its first use."""

    def __init__(self, parts: Parts, manifest: Manifest):
        self.parts = parts
        self.audio = manifest.audio
        self.figures = manifest.codec

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """[T, N] codes -> [T * hop] float32, unclipped. WorkError unless the sound is whole, finite and not flat."""
        samples = self.decode_window(codes, 0, len(codes))
        self.check_lively(np.ptp(samples))
        return samples

    def decode_window(self, codes: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Frames [start, stop) of [T, N] codes -> [(stop - start) * hop] float32, as decoding all codes at once gives them.

        `codes` must reach `context_frames` beyond `stop`, or end where speech ends: that far a sample depends on frames.
        """
        codes, context, hop = check_codes(codes, self.audio, "codes"), self.figures.context_frames, self.figures.hop_length
        first = max(0, start - context)
        window = codes[first : stop + context]
        graph = self.parts[DECODER]
        samples = graph.run(codes=window.T[None]).reshape(-1)
        wanted = len(window) * hop
        if len(samples) != wanted:
            raise WorkError(f"{graph.name} gave {len(samples)} samples for {len(window)} frames instead of {wanted}")
        if not np.isfinite(samples).all():
            raise self._fault("NaN or Inf")
        return samples[(start - first) * hop : (stop - first) * hop].astype(np.float32)

    def check_lively(self, swing: float) -> None:
        """WorkError if the samples of an utterance lie 0 apart at most: what a kernel that computes nothing returns."""
        if swing == 0:
            raise self._fault("a flat line")

    def _fault(self, fault: str) -> WorkError:
        graph = self.parts[DECODER]
        return WorkError(f"{graph.name} on {graph.provider} returned {fault} as sound; {silence_remedy(graph.provider)}")

    def encode(self, samples: np.ndarray) -> np.ndarray:
        """[n] float32 at the codec's rate -> [T, N] int64 codes. WorkError if they are not codes."""
        graph = self.parts[ENCODER]
        codes = graph.run(waveform=samples[None, None])
        if codes.ndim != 3 or codes.shape[:2] != (1, self.audio.num_codebooks) or codes.size == 0:
            raise WorkError(f"{graph.name} gave codes of shape {list(codes.shape)} for {len(samples)} samples")
        if codes.min() < 0 or codes.max() >= self.audio.codebook_size:
            raise WorkError(f"{graph.name} on {graph.provider} gave codes outside 0..{self.audio.codebook_size - 1}")
        return codes[0].T.astype(np.int64)
