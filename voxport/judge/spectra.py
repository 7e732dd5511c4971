"""How far apart two sounds are to an ear: log-mel spectra in NumPy.

80 triangular mel bands (HTK scale, O'Shaughnessy 1987) from 40 Hz to half the rate, windows of 1024 samples every 256, natural
logarithm with a floor at -80 dB of the louder sound's peak, so that silence compares as silence.
"""

import numpy as np

WINDOW, STEP, BANDS, LOWEST_HZ = 1024, 256, 80, 40.0
FLOOR = 10.0 ** (-80 / 10)


def mel(hz: np.ndarray | float) -> np.ndarray | float:
    """Mel of a frequency in Hz."""
    return 2595.0 * np.log10(1.0 + np.asarray(hz) / 700.0)


def mel_bands(rate: int) -> np.ndarray:
    """Triangular filters [BANDS, WINDOW // 2 + 1]."""
    edges = np.linspace(mel(LOWEST_HZ), mel(rate / 2), BANDS + 2)
    bins = mel(np.fft.rfftfreq(WINDOW, 1 / rate))
    left, centre, right = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    return np.clip(np.minimum((bins - left) / (centre - left), (right - bins) / (right - centre)), 0, None)


def power(samples: np.ndarray) -> np.ndarray:
    """Power spectra [frames, WINDOW // 2 + 1] of samples [n], padded to at least one window."""
    padded = np.pad(samples.astype(np.float64), (0, max(0, WINDOW - len(samples))))
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::STEP]
    return np.abs(np.fft.rfft(windows * np.hanning(WINDOW), axis=-1)) ** 2


def log_mel(samples: np.ndarray, rate: int, peak: float) -> np.ndarray:
    """[frames, BANDS]; `peak` is the power that the floor is relative to."""
    return np.log(np.maximum(power(samples) @ mel_bands(rate).T, FLOOR * peak))


def log_mel_distance(a: np.ndarray, b: np.ndarray, rate: int) -> float:
    """Mean absolute difference of the log-mel spectra in dB (power), over the shorter of the two."""
    length = min(len(a), len(b))
    a, b = a[:length], b[:length]
    peak = max(float((power(x) @ mel_bands(rate).T).max()) for x in (a, b)) or 1.0
    return float(np.abs(log_mel(a, rate, peak) - log_mel(b, rate, peak)).mean() * 10 / np.log(10))


def spectral_match(a: np.ndarray, b: np.ndarray) -> float:
    """Cosine of the long-term power spectra: 1 for the same colour, whatever the timing."""
    x, y = (power(s).mean(0) for s in (a, b))
    return float(x @ y / max(np.linalg.norm(x) * np.linalg.norm(y), 1e-30))
