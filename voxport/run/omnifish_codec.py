"""Fish codec: codes to sound and back, whole or as the codes come."""

from __future__ import annotations

import numpy as np

from voxport.errors import UserError, WorkError
from voxport.manifest_omnifish import CODEC_DECODER, CODEC_ENCODER, OmniFishManifest
from voxport.run.codec import silence_remedy
from voxport.run.omnifish_residual import run_all
from voxport.run.session import Parts

MOST_FRAMES = 64  # decoded at once, some 3 s: at full size a frame takes 14 MB of memory


class CodecStream:
    """One utterance, decoded in chunks that joined are the whole: the codec looks back only, and what it still needs of earlier
    frames is carried over. `tails` are the graph's, one a layer; they begin as zeros, or as nothing where a length is open."""

    def __init__(self, parts: Parts, manifest: OmniFishManifest):
        self.graph, self.manifest, self.position = parts[CODEC_DECODER], manifest, 0
        specs = manifest.part(CODEC_DECODER).inputs[2:]
        lengths = lambda shape: [size if isinstance(size, int) else 0 for size in shape]
        self.tails = {spec.name: np.zeros(lengths(spec.shape), spec.dtype) for spec in specs}

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """The next frames [N, T] -> [T * hop] float32, unclipped. WorkError unless the sound is whole and finite."""
        frames = codes.shape[1]
        self._check(codes)
        waveform, *kept = run_all(self.graph, codes=codes[None], position=np.array(self.position), **self.tails)
        self.tails = dict(zip(self.tails, kept, strict=True))
        self.position += frames
        samples = waveform.reshape(-1).astype(np.float32)
        if len(samples) != frames * self.manifest.codec.hop_length:
            raise WorkError(f"{self.graph.name} gave {len(samples)} samples for {frames} frames")
        if not np.isfinite(samples).all():
            raise self.fault("NaN or Inf")
        return samples

    def _check(self, codes: np.ndarray) -> None:
        sizes, room = self.manifest.codebooks.sizes, self.manifest.codec.max_frames
        if codes.shape[0] != len(sizes) or codes.min() < 0 or (codes.max(axis=1) >= sizes).any():
            raise UserError(f"codes {list(codes.shape)} are not {len(sizes)} rows of ids within the codebooks")
        if self.position + codes.shape[1] > room:
            raise UserError(f"{self.position + codes.shape[1]} frames are more than the {room} of this build; speak it in parts")

    def fault(self, fault: str) -> WorkError:
        remedy = silence_remedy(self.graph.provider)
        return WorkError(f"{self.graph.name} on {self.graph.provider} returned {fault} as sound; {remedy}")


def decode(parts: Parts, manifest: OmniFishManifest, codes: np.ndarray) -> np.ndarray:
    """[N, T] codes -> [T * hop] float32. WorkError also on a flat line: a kernel that computes nothing."""
    stream = CodecStream(parts, manifest)
    samples = [stream.decode(codes[:, i : i + MOST_FRAMES]) for i in range(0, codes.shape[1], MOST_FRAMES)]
    return check_lively(stream, np.concatenate(samples))


def check_lively(stream: CodecStream, samples: np.ndarray) -> np.ndarray:
    if np.ptp(samples) == 0:
        raise stream.fault("a flat line")
    return samples


def encode(parts: Parts, manifest: OmniFishManifest, samples: np.ndarray) -> np.ndarray:
    """[n] float32 at the codec's rate -> codes [N, ceil(n / hop)] int64. WorkError if they are not codes."""
    graph, sizes = parts[CODEC_ENCODER], manifest.codebooks.sizes
    codes = graph.run(waveform=samples[None, None])
    if codes.shape != (1, len(sizes), -(-len(samples) // manifest.codec.hop_length)):
        raise WorkError(f"{graph.name} gave codes of shape {list(codes.shape)} for {len(samples)} samples")
    if codes.min() < 0 or (codes[0].max(axis=1) >= sizes).any():
        raise WorkError(f"{graph.name} on {graph.provider} gave codes outside the codebooks")
    return codes[0].astype(np.int64)
