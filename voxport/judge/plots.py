"""Figures as shapes: bars, columns over layers, spectrograms as PNG, sound as WAV, all to stand inside a page."""

from __future__ import annotations

import base64
import io
import itertools
import math
import re
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import soundfile

from voxport.judge.spectra import BANDS, LOWEST_HZ, WINDOW, mel, mel_bands, power
from voxport.run.audio import to_pcm16

if TYPE_CHECKING:
    from voxport.judge.rounding import LayerError

LAYER_NUMBER = re.compile(r"(?:\w+\.)?layers\.(\d+)\.")
LEFT, RIGHT, TOP, BOTTOM = 56, 960, 10, 210  # of the columns in page.html's drawing
RANGE_DB = 80.0  # from the loudest point to black
MOST_COLUMNS = 800  # a spectrogram wider than the page shows no more
# matplotlib's magma at equal steps: lightness rises evenly, so that it reads without colour vision and in grey print
RAMP = [(0, 0, 4), (40, 17, 89), (114, 31, 129), (182, 54, 121), (241, 96, 93), (254, 175, 119), (252, 253, 191)]
TICKS_HZ = (500, 1000, 2000, 4000, 8000)


def bars(title: str, caption: str, head: str, columns: Sequence[str], rows: Sequence[tuple]) -> dict | None:
    """A table with a bar for each value: rows of (label, values, texts). None without rows.

    Bars start at zero and the largest finite value fills its cell; a value that is no number fills it too.
    """
    if not rows:
        return None
    top = max((v for _, values, _ in rows for v in values if v is not None and math.isfinite(v)), default=0) or 1
    made = [{"label": label, "shares": [share_of(v, top) for v in values], "texts": texts} for label, values, texts in rows]
    return {"title": title, "caption": caption, "head": head, "columns": columns, "rows": made}


def share_of(value: float | None, top: float) -> float:
    """Per cent of `top`."""
    if value is None:
        return 0.0
    return 100 * max(0.0, value) / top if math.isfinite(value) else 100.0


def in_bytes(count: int | None) -> str:
    """A size as people read it; decimal units, as disks are sold."""
    if count is None:
        return ""
    power = min(3, int(math.log10(max(1, count))) // 3)
    return f"{count / 1000**power:.{0 if power == 0 else 1}f} {('B', 'kB', 'MB', 'GB')[power]}"


def error_columns(name: str, errors: Sequence[LayerError], count: int, top: float) -> dict:
    """One column a tensor, in the order of the graph, marked with the number of its layer."""
    step = (RIGHT - LEFT) / max(len(errors), 24)  # few columns stay slim
    height = lambda error: (BOTTOM - TOP) * share_of(error, ticks(top)[-1]) / 100
    columns = [
        {"mark": bits_mark(e), "title": f"{e.name}: {e.error:.4g}, {e.bits} bits, {in_bytes(e.bytes)}",
         "x": f"{LEFT + (i + 0.1) * step:.2f}", "width": f"{0.8 * step:.2f}",
         "y": f"{BOTTOM - height(e.error):.2f}", "height": f"{height(e.error):.2f}"}
        for i, e in enumerate(errors)
    ]  # fmt: skip
    worst = max(errors, key=badness)
    exact = f"; {count - len(errors)} of {count} equal their source and are left out" if len(errors) < count else ""
    caption = f"{name}: relative error (RMS) of each tensor against its source{exact}"
    return {
        "caption": caption,
        "says": f"{caption}. Worst: {worst.name} with {worst.error:.4g}",
        "columns": columns,
        "ticks": [{"y": BOTTOM - height(t), "text": f"{t:g}"} for t in ticks(top)],
        "layers": list(layer_marks(errors, step)),
        "legend": sorted({(bits_mark(e), bits_text(e)) for e in errors}),
    }


def bits_mark(error: LayerError) -> str:
    """Class of a column."""
    return f"bits{error.bits}" if math.isfinite(error.error) else "broken"


def bits_text(error: LayerError) -> str:
    """What its colour means."""
    return f"{error.bits} bits" if math.isfinite(error.error) else "NaN or Inf, drawn to the top"


def layer_marks(errors: Sequence[LayerError], step: float) -> Iterable[dict]:
    """Where the columns of each layer begin, and its number if there is room for it."""
    numbers = [m and int(m[1]) for m in (LAYER_NUMBER.search(e.name) for e in errors)]
    starts = [i for i, n in enumerate(numbers) if n is not None and (i == 0 or numbers[i - 1] != n)]
    free_from = 0.0
    for i in starts:
        width = step * sum(1 for _ in itertools.takewhile(lambda n: n == numbers[i], numbers[i:]))
        middle = LEFT + i * step + width / 2
        text = str(numbers[i]) if middle >= free_from else ""
        free_from = middle + 24 if text else free_from  # three digits of 12 px and a gap
        yield {"x": f"{LEFT + i * step:.2f}", "middle": f"{middle:.2f}", "text": text}


def ticks(top: float) -> list[float]:
    """Round numbers from 0 to at least `top`, in steps of 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(top / 4))
    step = next(m * power for m in (1, 2, 5, 10) if m * power * 4 >= top)
    return [round(i * step, 12) for i in range(math.ceil(top / step - 1e-9) + 1)]


def badness(error: LayerError) -> float:
    """For sorting: NaN is the worst."""
    return error.error if math.isfinite(error.error) else math.inf


def short(name: str) -> str:
    """A tensor's name without what all names share."""
    return re.sub(r"^\w+\.(?=layers\.)", "", name.removesuffix(".weight"))


def time_ticks(seconds: float) -> list[str]:
    """Five labels from 0 to the end."""
    return [f"{seconds * i / 4:.2g} s" for i in range(5)]


def mel_ticks(rate: int) -> list[dict]:
    """Round frequencies, and how far up a spectrogram each lies in per cent."""
    height = lambda hz: 100 * float((mel(hz) - mel(LOWEST_HZ)) / (mel(rate / 2) - mel(LOWEST_HZ)))
    return [{"bottom": f"{height(hz):.1f}", "text": f"{hz / 1000:g} kHz"} for hz in TICKS_HZ if hz < rate / 2]


def mel_power(samples: np.ndarray, rate: int, seconds: float) -> np.ndarray:
    """[frames, BANDS] over `seconds`, silence after the end, at most `MOST_COLUMNS` frames."""
    padded = np.pad(samples, (0, max(WINDOW, round(seconds * rate)) - len(samples)))
    bands = power(padded) @ mel_bands(rate).T
    stride = -(-len(bands) // MOST_COLUMNS)
    return np.pad(bands, ((0, -len(bands) % stride), (0, 0)), "edge").reshape(-1, stride, BANDS).mean(1)


def picture(bands: np.ndarray, peak: float) -> str:
    """Power [frames, BANDS] as an image, `RANGE_DB` down from `peak`, low bands at the bottom."""
    decibels = 10 * np.log10(np.maximum(bands / peak, 10 ** (-RANGE_DB / 10)))
    grey = np.rint((decibels / RANGE_DB + 1).clip(0, 1) * 255).astype(np.uint8)
    return data_uri("image/png", png(grey.T[::-1]))


def png(pixels: np.ndarray) -> bytes:
    """[height, width] uint8 -> a PNG file, each value a colour of `RAMP` (PNG specification, colour type 3)."""
    height, width = pixels.shape
    places = np.linspace(0, len(RAMP) - 1, 256)
    colours = np.stack([np.interp(places, range(len(RAMP)), channel) for channel in zip(*RAMP)], axis=1).round().astype(np.uint8)
    rows = np.pad(pixels, ((0, 0), (1, 0)))  # each row begins with its filter: 0, none
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", colours.tobytes()),
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    ]
    framed = (struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def wav(samples: np.ndarray, rate: int) -> bytes:
    """[n] float as a 16-bit WAV file."""
    file = io.BytesIO()
    soundfile.write(file, to_pcm16(samples), rate, subtype="PCM_16", format="WAV")
    return file.getvalue()


def data_uri(kind: str, data: bytes) -> str:
    """Bytes that stand in the page itself."""
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"
