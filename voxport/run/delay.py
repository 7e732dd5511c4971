"""The delay pattern: codebook c is spoken c rows after codebook 0, so that one row never needs itself.

codes: [T, N] real ids; rows: [L, N] delayed, with BOC before a codebook starts and EOC after it ends; L = T + N - 1.
"""

import numpy as np

from voxport.errors import UserError, WorkError
from voxport.manifest import Audio


def check_codes(codes: np.ndarray, audio: Audio, what: str) -> np.ndarray:
    """Return `codes` as int64 [T, N]; UserError unless T > 0 and every value is a real code."""
    codes = np.asarray(codes)
    if codes.ndim != 2 or codes.shape[1] != audio.num_codebooks or not np.issubdtype(codes.dtype, np.integer):
        raise UserError(f"{what} must be integers [T, {audio.num_codebooks}], not {codes.dtype} {list(codes.shape)}")
    if len(codes) == 0:
        raise UserError(f"{what} hold no frame")
    if codes.min() < 0 or codes.max() >= audio.codebook_size:
        raise UserError(f"{what} must lie in 0..{audio.codebook_size - 1}, found {codes.min()}..{codes.max()}")
    return codes.astype(np.int64)


def apply_delay(codes: np.ndarray, audio: Audio) -> np.ndarray:
    """[T, N] -> [T + N - 1, N]: row r of codebook c is frame r - c, BOC before the first frame, EOC after the last."""
    if len(codes) == 0:
        raise UserError("no frame to delay: the codes are empty")
    num_frames, num_codebooks = codes.shape
    codebook = np.arange(num_codebooks)
    frame = np.arange(num_frames + num_codebooks - 1)[:, None] - codebook
    rows = codes[np.clip(frame, 0, num_frames - 1), codebook]
    rows = np.where(frame < 0, audio.boc_id, rows)
    return np.where(frame >= num_frames, audio.eoc_id, rows).astype(np.int64)


def reverse_delay(rows: np.ndarray, audio: Audio, *, allow_short: bool = False) -> np.ndarray:
    """[L, N] -> [L - N + 1, N]: frame t of codebook c is row t + c. Fewer than N rows hold no whole frame."""
    num_codebooks = audio.num_codebooks
    num_frames = len(rows) - num_codebooks + 1
    if num_frames < 1 and not allow_short:
        raise UserError(f"{len(rows)} rows hold no whole frame; at least {num_codebooks} are needed")
    codebook = np.arange(num_codebooks)
    return rows[np.arange(max(num_frames, 0))[:, None] + codebook, codebook]


def sanitise(codes: np.ndarray, audio: Audio) -> np.ndarray:
    """Replace special ids by 0 before the codec: clipping them to the last code is audible (spec 11)."""
    if codes.size and codes.min() < 0:
        raise WorkError("a row made after the end of speech reached the codec; please report this")
    return np.where(codes >= audio.codebook_size, 0, codes)
