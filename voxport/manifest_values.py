"""Numbers and words of a manifest that can be what they say: a typed value may still be no size, no rate, no probability."""

from __future__ import annotations

import string
import typing

from voxport.errors import UserError

SIZE, ROWS, ANY_INT = (1, 1 << 20), (1, 1 << 20), (0, (1 << 31) - 1)  # rows: eleven hours of speech
# Least and largest value of a field by its name; other whole numbers are 0 to 2**31 - 1, other floats 0 to 2**31
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "size", "head_dim", "num_heads", "num_kv_heads"), SIZE),
    **dict.fromkeys(("context_rows", "max_rows", "max_frames"), ROWS),
    **dict.fromkeys(("vocab_size", "codebook_size", "hop_length", "block_size", "steps", "residual_rounds"), SIZE),
    **dict.fromkeys(("text_vocab_size", "max_position_embeddings"), (1, 1 << 24)),
    "num_layers": (1, 1 << 12),
    "num_codebooks": (1, 64),
    "sample_rate": (1000, 768_000),  # Hz; what the reader of references takes
    "min_encode_samples": (1, 1 << 24),  # what a short reference is padded to
    "context_frames": (0, 1 << 12),
    "max_reference_seconds": (0, 3600),
    "placeholder": (-(1 << 31), (1 << 31) - 1),  # no id: a mark
    "top_p": (1e-9, 1),
    "threshold": (0, 1),
}
CHECKED = ("dims", "audio", "codebooks", "codec", "tokens", "residual", "generation", "sampling", "residual_sampling", "limits", "prompt")
CHOICES = {"kind": ("axial", "chain"), "context_mode": ("full", "semantic")}
CACHE_DTYPES = ("float32", "float16")
INSTRUCT_FIELDS = {"spk", "q"}


def check_values(manifest: typing.Any, where: str, remedy: str = "build again") -> None:
    """UserError naming the first value that running cannot use, in a manifest of whichever family."""
    try:
        _check_sections(manifest)
        _check_heads(manifest.dims)
        _check_cache(manifest.kv_cache)
        _check_files(manifest)
        if hasattr(manifest, "audio"):
            _check_audio(manifest)
        if hasattr(manifest, "codebooks"):
            _check_codebooks(manifest.codebooks)
            _check_prompt(manifest.prompt)
    except ValueError as error:
        raise UserError(f"{where}: {error}; {remedy}") from None


def _check_sections(manifest) -> None:
    for section in CHECKED:
        if hasattr(manifest, section):
            for name, value in vars(getattr(manifest, section)).items():
                _check_value(value, name, f"{section}: {name}")
    for table in ("control_tags", "structural_tokens"):
        for name, value in getattr(manifest, table).items():
            _check_value(value, "id", f"{table}: {name}")


def _check_value(value: typing.Any, name: str, where: str) -> None:
    for number in value if isinstance(value, list) else (value,):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            if name in CHOICES and number not in CHOICES[name]:
                raise ValueError(f"{where} is {number!r}, not one of {', '.join(CHOICES[name])}")
            continue
        low, high = RANGES.get(name, ANY_INT)
        if not low <= number <= high:  # NaN is neither
            raise ValueError(f"{where} is {number!s:.40}, not from {low:g} to {high:g}")


def _check_heads(dims) -> None:
    if dims.num_heads % dims.num_kv_heads:
        raise ValueError(f"dims: {dims.num_heads} heads cannot share {dims.num_kv_heads} key/value heads evenly")


def _check_cache(cache) -> None:
    if cache.dtype not in CACHE_DTYPES:
        raise ValueError(f"kv_cache: dtype is {cache.dtype!r}, not one of {', '.join(CACHE_DTYPES)}")
    for name in ("past_key", "past_value", "present_key", "present_value"):
        template = getattr(cache, name)
        if template.count("{}") != 1 or set(template.replace("{}", "")) & set("{}"):
            raise ValueError(f"kv_cache: {name} is {template!r}, which has no place {{}} for the layer")


def _check_files(manifest) -> None:
    tables = {"files": manifest.files} | {f"parts: {name}": part.files for name, part in manifest.parts.items()}
    for table, files in tables.items():
        for name, record in files.items():
            if record.bytes < 0 or len(record.sha256) != 64 or set(record.sha256) - set(string.hexdigits.lower()):
                raise ValueError(f"{table}: {name} has no size and SHA-256")


def _check_audio(manifest) -> None:
    audio, limits = manifest.audio, manifest.limits
    special = (audio.boc_id, audio.eoc_id)
    if not all(audio.codebook_size <= i < audio.vocab_size for i in special) or audio.boc_id == audio.eoc_id:
        raise ValueError(f"audio: boc_id and eoc_id are {special}, not two ids behind the codes")
    if limits.max_rows < audio.num_codebooks:
        raise ValueError(f"limits: max_rows is {limits.max_rows}, which holds no frame")


def _check_codebooks(books) -> None:
    if not books.sizes or min(books.sizes) < 1 or len(books.sizes) > RANGES["num_codebooks"][1] or not books.pad_ids:
        raise ValueError(f"codebooks: sizes {books.sizes!s:.40} and pad_ids {books.pad_ids!s:.40} are no codebooks")
    special = [books.mask_id, books.end_id, *books.pad_ids]
    if len(set(special)) < len(special) or not all(max(books.sizes) <= i < books.vocab_size for i in special):
        raise ValueError(f"codebooks: {special!s:.60} are not different ids behind the codes")


def _check_prompt(prompt) -> None:
    if prompt.num_speakers > len(prompt.names):
        raise ValueError(f"prompt: num_speakers is {prompt.num_speakers} and there are {len(prompt.names)} names")
    try:
        fields = list(string.Formatter().parse(prompt.instruct_template))
    except ValueError as error:
        raise ValueError(f"prompt: instruct_template {prompt.instruct_template!r:.60} cannot be filled in ({error})") from None
    if any(field is not None and (field not in INSTRUCT_FIELDS or form or change) for _, field, form, change in fields):
        raise ValueError(f"prompt: instruct_template {prompt.instruct_template!r:.60} has other fields than {{spk}} and {{q}}")
