"""Sound files: references in any form that soundfile reads, speech out in those that it writes."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile

from voxport.errors import UserError, WorkError
from voxport.files import atomic_path, check_target, is_file
from voxport.manifest import Codec, Limits, refuse_part
from voxport.run.values import is_whole

BINARY = getattr(os, "O_BINARY", 0)  # Windows changes line ends otherwise
VOICE_NAME = "voice.npz"  # of the recording in the folder of a saved voice
READ_BLOCK = 1 << 18  # samples of all channels read at a time, so that channels are averaged before they fill the memory
PCM16_PEAK, PCM24_PEAK = 32767, 8388607
ENCODINGS = ("pcm16", "pcm24", "float")  # of WAV; FLAC holds the first two
# ending -> format and subtype in soundfile's names; None: the encoding decides
FORMATS = {".wav": ("WAV", None), ".flac": ("FLAC", None), ".ogg": ("OGG", "VORBIS"), ".opus": ("OGG", "OPUS"),
           ".mp3": ("MP3", "MPEG_LAYER_III")}  # fmt: skip
SUBTYPES = {"pcm16": "PCM_16", "pcm24": "PCM_24", "float": "FLOAT"}
FORMAT_RATES = {  # Hz that a coder knows; the others take any
    ".opus": tuple(48_000 // n for n in (6, 4, 3, 2, 1)),
    ".mp3": tuple(sorted(rate // n for rate in (32_000, 44_100, 48_000) for n in (4, 2, 1))),
}
WRITE_BLOCK = 1 << 16  # samples handed to an encoder at a time: some crash on a long recording in one piece
SILENCE_PEAK = 1 / 32768  # one step of 16-bit PCM: a signal that stays within it is silence
LOUDEST = 10.0  # beyond, float samples were never scaled: they are 16-bit integers in disguise
FULL_SCALE = 0.999  # samples at or above count as clipped; converters rarely stop exactly at 1
CLIPPED_WARN = 0.001  # share of clipped samples from which a reference is heard as distorted
LEVEL_WARN_DBFS = -45.0  # below, the clone follows the noise of the recording more than its voice
END_SECONDS, ABRUPT_DB = 0.02, 10.0  # a recording that is this little softer at its end was cut while somebody spoke
LOWEST_RATE, HIGHEST_RATE = 1000, 768_000  # Hz; beyond lies no recording of a voice, and a kernel that fills the memory
SINC_ZEROS, SINC_ROLLOFF = 6, 0.99  # torchaudio's defaults, with which the reference resamples
RESAMPLE_BLOCK = 1 << 15  # output samples at a time, to bound the memory
FADE_SECONDS = 0.005  # long enough to hide the step at a cut, too short to be heard as a fade


@dataclass(frozen=True)
class Clip:
    """Mono sound: samples [n] float32 at `rate` Hz, and the share of its samples that touched full scale."""

    samples: np.ndarray
    rate: int
    clipped: float

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return len(self.samples) / self.rate


@dataclass(frozen=True)
class Reference:
    """A voice to clone, ready for the encoder: samples [n] float32 at the codec's rate; `seconds` before padding."""

    samples: np.ndarray
    seconds: float
    warnings: tuple[str, ...]


def load_reference(source: str | os.PathLike | tuple, codec: Codec, limits: Limits) -> Reference:
    """Read, check, resample and pad a reference: a file, or a tuple of samples ([n] or [n, channels] float) and rate."""
    if isinstance(source, tuple):
        name, clip = "samples", clip_from_array(*_pair(source), limits.max_reference_seconds)
    elif isinstance(source, (str, os.PathLike)):
        name, clip = str(source), read_clip(source, limits.max_reference_seconds)
    else:
        raise UserError(f"a reference is a file or (samples, rate), not {type(source).__name__}")
    warnings = check_voice(clip, name, limits)
    return Reference(fit_to_codec(clip.samples, clip.rate, codec), clip.seconds, warnings)


def fit_to_codec(samples: np.ndarray, rate: int, codec: Codec) -> np.ndarray:
    """[n] at `rate` -> [m] float32 at the codec's rate, padded to the shortest input of its encoder."""
    samples = resample(samples, rate, codec.sample_rate)
    return np.pad(samples, (0, max(0, codec.min_encode_samples - len(samples))))


def _pair(source: tuple) -> tuple:
    if len(source) != 2:
        raise UserError(f"reference samples must be (samples, rate), not a tuple of {len(source)}")
    return source


def read_clip(path: str | os.PathLike, max_seconds: float) -> Clip:
    """Read a sound file as mono, its channels averaged. Its length is checked in the header before and while reading."""
    if not is_file(path):
        raise UserError(f"reference {path} does not exist or is not a file")
    try:
        with open_sound(path) as file:
            _check_header(file.frames, file.samplerate, str(path), max_seconds)
            return _mix(_blocks(file, str(path), max_seconds), file.samplerate)
    except (soundfile.SoundFileError, OSError) as error:
        raise UserError(f"reference {path} cannot be read as sound ({error}); convert it to WAV or FLAC") from error


def _blocks(file: soundfile.SoundFile, name: str, max_seconds: float):
    """Blocks [n, channels] float32; stops a file whose header promised less than it holds."""
    read = 0
    while len(block := file.read(max(1, READ_BLOCK // file.channels), dtype="float32", always_2d=True)):
        read += len(block)
        _check_seconds(read, file.samplerate, name, max_seconds)
        yield block


def clip_from_array(samples: np.ndarray, rate: int, max_seconds: float) -> Clip:
    """Samples [n] or [n, channels] of float in [-1, 1] as a mono clip."""
    samples = np.asarray(samples)
    if samples.ndim not in (1, 2) or not np.issubdtype(samples.dtype, np.floating):
        raise UserError(
            f"reference samples must be float [n] or [n, channels] in -1..1, not {samples.dtype} {list(samples.shape)}"
        )
    if samples.ndim == 2 and samples.shape[1] > samples.shape[0] > 0:
        raise UserError(f"reference samples {list(samples.shape)} have more channels than samples; pass samples.T")
    if not is_whole(rate) and not (isinstance(rate, float) and rate.is_integer()):
        raise UserError(f"the rate of the reference samples must be a whole number of Hz, not {rate!r}")
    _check_header(len(samples), int(rate), "samples", max_seconds)
    return _mix([samples.reshape(len(samples), -1 if samples.size else 1).astype(np.float32)], int(rate))


def _check_header(num_samples: int, rate: int, name: str, max_seconds: float) -> None:
    if not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise UserError(f"reference {name} has a sample rate of {rate} Hz, not one from {LOWEST_RATE} to {HIGHEST_RATE}")
    _check_seconds(num_samples, rate, name, max_seconds)


def _check_seconds(num_samples: int, rate: int, name: str, max_seconds: float) -> None:
    if num_samples > max_seconds * rate:
        raise UserError(f"reference {name} is {num_samples / rate:.1f} s long, at most {max_seconds:g} s; cut it")


def _mix(blocks, rate: int) -> Clip:
    """Average the channels of blocks [n, channels] and count the samples at full scale."""
    mono, clipped, total = [np.empty(0, np.float32)], 0, 0
    for block in blocks:
        mono.append(block.mean(axis=1, dtype=np.float32))
        clipped += int((np.abs(block) >= FULL_SCALE).sum())
        total += block.size
    return Clip(np.concatenate(mono), rate, clipped / total if total else 0.0)


def check_voice(clip: Clip, name: str, limits: Limits) -> tuple[str, ...]:
    """Refuse a clip that holds no voice; return warnings about one that will clone badly."""
    if len(clip.samples) == 0:
        raise UserError(f"reference {name} holds no samples")
    if not np.isfinite(clip.samples).all():
        raise UserError(f"reference {name} holds NaN or infinite samples; export it again")
    peak, swing = np.abs(clip.samples).max(), np.ptp(clip.samples)
    if peak <= SILENCE_PEAK or (len(clip.samples) > 1 and swing <= SILENCE_PEAK):  # zeros, or a constant
        raise UserError(f"reference {name} is silent; record it again or choose another file")
    if peak > LOUDEST:
        raise UserError(f"reference {name} reaches {peak:g} where full scale is 1; divide it first")
    warnings = []
    if clip.seconds > limits.warn_reference_seconds:
        warnings.append(f"reference {name} is {clip.seconds:.1f} s long; above {limits.warn_reference_seconds:g} s "
                        "it costs time and context and rarely helps")  # fmt: skip
    if level_dbfs(clip.samples) < LEVEL_WARN_DBFS:
        warnings.append(f"reference {name} is very quiet ({level_dbfs(clip.samples):.0f} dBFS); the clone may be too")
    if clip.clipped > CLIPPED_WARN:
        warnings.append(f"reference {name} is clipped ({clip.clipped:.1%} of its samples); the clone may sound harsh")
    end = clip.samples[-max(1, round(END_SECONDS * clip.rate)) :]
    if level_dbfs(end) > level_dbfs(clip.samples) - ABRUPT_DB:
        warnings.append(f"reference {name} breaks off in the middle of sound; the speech may begin or end with a piece of it: "
                        "let it end in silence")  # fmt: skip
    return tuple(warnings)


def level_dbfs(samples: np.ndarray) -> float:
    """Root mean square relative to full scale, in dB; -inf for zeros."""
    rms = math.sqrt(np.square(samples, dtype=np.float64).mean())
    return 20 * math.log10(rms) if rms else -math.inf


def resample(samples: np.ndarray, rate: int, new_rate: int) -> np.ndarray:
    """[n] float32 at `rate` -> [ceil(n * new_rate / rate)] at `new_rate`, by a windowed sinc; zeros beyond both ends.

    The reference code resamples voices with this very kernel (torchaudio's default) before it encodes them. A sharper filter
    differs from it by -40 dB within 0.8 of the band, which is enough to change codes.
    """
    if rate == new_rate:
        return samples
    divisor = math.gcd(rate, new_rate)
    rate, new_rate = rate // divisor, new_rate // divisor
    kernel, reach = _sinc_kernel(rate, new_rate)
    padded = np.pad(samples, (reach, reach + 1))
    length = -(-len(samples) * new_rate // rate)
    blocks = [np.arange(i, min(i + RESAMPLE_BLOCK, length)) for i in range(0, length, RESAMPLE_BLOCK)]
    taps = np.arange(kernel.shape[1])
    made = [np.einsum("ik,ik->i", padded[(i * rate // new_rate)[:, None] + taps], kernel[i % new_rate]) for i in blocks]
    return np.concatenate(made) if made else samples[:0]


def _sinc_kernel(rate: int, new_rate: int) -> tuple[np.ndarray, int]:
    """Weights [new_rate, taps] of the samples around output i % new_rate, and how many lie before its own place."""
    cutoff = SINC_ROLLOFF * min(rate, new_rate) / rate  # as a share of the input's band
    reach = math.ceil(SINC_ZEROS / cutoff)
    phase = np.arange(new_rate)[:, None] * rate % new_rate / new_rate
    crossings = np.clip((np.arange(-reach, reach + 2) - phase) * cutoff, -SINC_ZEROS, SINC_ZEROS)
    window = np.cos(crossings * math.pi / SINC_ZEROS / 2) ** 2
    return (np.sinc(crossings) * window * cutoff).astype(np.float32), reach


def fade_end(samples: np.ndarray, rate: int) -> np.ndarray:
    """A copy of [n] whose last 5 ms go linearly to zero, so that a cut does not click."""
    length = min(len(samples), round(FADE_SECONDS * rate))
    faded = samples.copy()
    faded[len(samples) - length :] *= np.linspace(1, 0, length, dtype=samples.dtype)
    return faded


def to_pcm16(samples: np.ndarray) -> np.ndarray:
    """[n] float -> [n] int16: clipped to -1..1 first, so that nothing wraps around, then rounded."""
    return np.rint(np.clip(samples, -1, 1) * PCM16_PEAK).astype(np.int16)


def to_pcm24(samples: np.ndarray) -> np.ndarray:
    """[n] float -> [n] int32 whose upper 24 bits are the sample, as soundfile takes them."""
    return np.rint(np.clip(samples, -1, 1).astype(np.float64) * PCM24_PEAK).astype(np.int32) << 8


def check_output(path: str | os.PathLike, *suffixes: str, pipe: bool = False) -> Path:
    """The path to write to; UserError before any work if nothing can be written there, or its ending is wrong."""
    if not isinstance(path, (str, os.PathLike)):
        raise UserError(f"a file to write is named by its path, not by {path!r}")
    if Path(path).suffix.lower() not in suffixes:
        raise UserError(f"{path} must end in {' or '.join(suffixes)}")
    refuse_part(path)
    if is_file(path) and is_file(Path(os.path.realpath(path)).with_name(VOICE_NAME)):
        raise UserError(f"{path} is in the folder of a saved voice, where it would be lost; choose another name")
    return check_target(path, pipe)


@dataclass(frozen=True)
class Form:
    """How speech is written. `rate` None keeps the codec's."""

    encoding: str = "pcm16"
    rate: int | None = None

    def check(self, path: str | os.PathLike, rate: int) -> Path:
        """The path to write to; UserError before any work if this ending, encoding and rate do not go together here."""
        path, rate = check_output(path, *FORMATS), rate if self.rate is None else self.rate
        suffix = path.suffix.lower()
        if self.encoding not in ENCODINGS:
            raise UserError(f"--encoding must be one of {', '.join(ENCODINGS)}, not {self.encoding!r}")
        if not LOWEST_RATE <= rate <= HIGHEST_RATE or rate not in FORMAT_RATES.get(suffix, (rate,)):
            allowed = ", ".join(map(str, FORMAT_RATES.get(suffix, ()))) or f"{LOWEST_RATE} to {HIGHEST_RATE}"
            raise UserError(f"{suffix} cannot hold {rate} Hz; choose --sample-rate among {allowed}")
        container, subtype = FORMATS[suffix]
        if subtype is not None and self.encoding != "pcm16":
            raise UserError(f"{suffix} has an encoding of its own; leave out --encoding, or write .wav")
        if not soundfile.check_format(container, subtype or SUBTYPES[self.encoding]):
            raise UserError(f"this soundfile cannot write {suffix} as {subtype or self.encoding}; write .wav")
        return path


def write_sound(path: str | os.PathLike, samples: np.ndarray, rate: int, form: Form = Form()) -> None:
    """Write [n] float samples as a mono file of the kind that its ending names: whole at `path`, or not there at all."""
    path, new_rate = form.check(path, rate), rate if form.rate is None else form.rate
    if not np.isfinite(samples).all():
        raise WorkError(f"the speech for {path} holds NaN or Inf; nothing was written")
    container, subtype = FORMATS[path.suffix.lower()]
    samples = _encode(resample(samples, rate, new_rate), subtype, form.encoding)
    try:
        with atomic_path(path) as temporary:
            kind = {"format": container, "subtype": subtype or SUBTYPES[form.encoding]}
            with soundfile.SoundFile(os.open(temporary, os.O_RDWR | BINARY), "w", new_rate, 1, **kind) as file:
                for start in range(0, len(samples), WRITE_BLOCK):
                    file.write(samples[start : start + WRITE_BLOCK])
            _check_written(temporary, len(samples))
    except (soundfile.SoundFileError, AssertionError) as error:  # soundfile asserts that all was written
        raise WorkError(f"cannot write {path}: {error or 'not all of it could be written'}; is the disk full?") from error


def _check_written(path: Path, num_samples: int) -> None:
    """Read back how long a file is: some encoders lose what a full disk does not take, and say nothing."""
    with open_sound(path) as file:
        if file.frames < num_samples:
            raise soundfile.SoundFileError(f"only {file.frames} of {num_samples} samples were kept")


def is_whole_sound(path: str | os.PathLike) -> bool:
    """Whether a file is sound that can be read to the end that its header promises."""
    try:
        with open_sound(path) as file:
            read = sum(len(block) for block in file.blocks(WRITE_BLOCK, dtype="float32"))
            return 0 < read == file.frames and (Path(path).suffix.lower() != ".wav" or os.stat(path).st_size >= _promised(path))
    except (soundfile.SoundFileError, OSError):
        return False


def _promised(path: str | os.PathLike) -> int:
    """Bytes that a RIFF file should have by its header; libsndfile reads a cut one as a shorter one."""
    with open(path, "rb") as file:
        header = file.read(8)
    return int.from_bytes(header[4:], "little") + 8 if header[:4] == b"RIFF" else 0


def open_sound(path: str | os.PathLike) -> soundfile.SoundFile:
    """A file to read, told by what it holds and not by its name, which may be any that the system has."""
    return soundfile.SoundFile(os.open(path, os.O_RDONLY | BINARY))


def _encode(samples: np.ndarray, subtype: str | None, encoding: str) -> np.ndarray:
    """Numbers as they go into the file: clipped, so that nothing wraps around, except where floats are kept as they are."""
    if subtype is not None:
        return np.clip(samples, -1, 1)
    return {"pcm16": to_pcm16, "pcm24": to_pcm24, "float": lambda kept: kept}[encoding](samples)
