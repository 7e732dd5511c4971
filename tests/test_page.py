"""The page: whole in one file, safe with any text, and every figure is on it."""

import base64
import io
import re
import struct
import zlib
from dataclasses import dataclass, replace
from html.parser import HTMLParser

import numpy as np
import pytest
import soundfile

from voxport.judge.finding import FAIL, NOT_JUDGED, PASS
from voxport.judge.page import Extras, Utterance, page, write_page
from voxport.judge.plots import RAMP, bars, in_bytes, mel_power, picture, png, ticks
from voxport.run.audio import to_pcm16

RATE = 24_000


@dataclass
class Tensor:
    """As voxport.judge.rounding.LayerError."""

    name: str
    bits: int
    bytes: int
    error: float


def tensors(scale: float = 1.0, layers: int = 3) -> list[Tensor]:
    kinds = ("self_attn.q_proj", "mlp.down_proj")
    rounded = [Tensor(f"body.layers.{i}.{kind}.weight", 4, 1000 + k, scale * (0.05 + 0.01 * i + 0.03 * k))
               for i in range(layers) for k, kind in enumerate(kinds)]  # fmt: skip
    return [*rounded, Tensor("body.norm.weight", 32, 8, 0.0)]


def finding(level: str, part: str, verdict: str, says: str, **figures) -> dict:
    return {"level": level, "part": part, "verdict": verdict, "says": says, "figures": figures}


def result(target: str = "cpu_int4", **changed) -> dict:
    findings = [
        finding("parts", "text_embed", PASS, "error 1.1e-04"),
        finding("parts", "audio_heads", FAIL, "argmax 0.8712"),
        finding("teacher-forced", "llm_decoder", PASS, "top-1 agreement 0.9811", per_codebook=[0.9912, 0.9710]),
        finding("greedy rows", "whole loop", PASS, "1 of 2 part", cases=2,
                parted=[{"text": "Good day.", "row": 12, "margin": 0.25}]),
        finding("listeners", "words heard", NOT_JUDGED, "too few words", listener="some ear", normaliser="en: folded",
                heard=[{"text": "Good day.", "heard": "good dye"}],
                controls=[{"name": "zeros", "passed": True, "says": "heard nothing"}]),
    ]  # fmt: skip
    return {"verdict": FAIL, "target": target, "source": {"id": "some/model", "revision": "abc"}, "reference": "some/model",
            "recipe": {"heads": None, "block": {"bits": 4, "block_size": 32}}, "tools": {"onnxruntime": "1.32.0"},
            "findings": findings, **changed}  # fmt: skip


def chirp(seconds: float = 0.5, rate: int = RATE) -> np.ndarray:
    time = np.arange(round(seconds * rate)) / rate
    return (0.5 * np.sin(2 * np.pi * (300 + 2000 * time) * time)).astype(np.float32)


@pytest.fixture(scope="module")
def extras() -> Extras:
    speech = [Utterance("Good day.", {"original": (chirp(), RATE), "cpu_int4": (chirp(0.4), RATE)})]
    return Extras("", tensors(), {"llm_decoder": 2_200_000_000, "audio_heads": 42_000_000}, speech)


class Reader(HTMLParser):
    """Text, attributes and balance of a page."""

    VOID = {"meta", "img", "line", "br"}

    def __init__(self, text: str):
        super().__init__()
        self.open, self.text, self.tags, self.attributes = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def all(self, tag: str, name: str) -> list[str]:
        return [value for t, n, value in self.attributes if (t, n) == (tag, name)]


def words(text: str) -> str:
    """What a reader sees before opening the JSON at the end."""
    return " ".join(" ".join(Reader(text).text).split()).split("All figures")[0]


def png_chunks(data: bytes) -> dict[bytes, bytes]:
    """Name -> body, each with a right checksum."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, place = {}, 8
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        assert struct.unpack(">I", data[place + 8 + length : place + 12 + length]) == (zlib.crc32(kind + body),)
        chunks[kind], place = body, place + 12 + length
    return chunks


def png_rows(data: bytes) -> np.ndarray:
    """[height, width] colour numbers."""
    chunks = png_chunks(data)
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not rows[:, 0].any()
    return rows[:, 1:]


def decode(uri: str, kind: str) -> bytes:
    head, data = uri.split(",", 1)
    assert head == f"data:{kind};base64"
    return base64.b64decode(data, validate=True)


def test_the_page_fetches_nothing_and_runs_nothing(extras):
    text = page(result(), extras)
    read = Reader(text)
    assert read.open == []
    assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r"base64,[A-Za-z0-9+/=]+", "", text))
    assert not {"script", "link", "iframe", "object"} & set(read.tags)
    assert not [name for _, name, _ in read.attributes if name.startswith("on")]
    for _, _, value in [a for a in read.attributes if a[1] in ("src", "href")]:
        assert value.startswith("data:")
    assert "default-src 'none'" in text


@pytest.mark.parametrize(
    "evil", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</pre></style><b>", "' onload='x"]
)
def test_text_from_anywhere_is_shown_as_text(evil):
    listener = finding(evil, evil, FAIL, evil, listener=evil, normaliser=evil, heard=[{"text": evil, "heard": evil}],
                       controls=[{"name": evil, "passed": False, "says": evil}],
                       parted=[{"text": evil, "row": 1, "margin": 1.0}])  # fmt: skip
    bad = result(
        evil, reference=evil, source={"id": evil, "revision": evil}, recipe={evil: evil}, tools={evil: evil}, findings=[listener]
    )
    told = Extras(evil, [Tensor(evil, 4, 10, 0.1)], {evil: 1}, [Utterance(evil, {evil: (chirp(), RATE)})])
    plain = result("x", findings=[])
    harmless = page(plain | {"findings": [{**listener, "level": "a"}]}, replace(told, name="a"))
    text = page(bad, told)
    read = Reader(text)
    assert read.open == [] and "script" not in read.tags and "b" not in read.tags
    assert not [name for _, name, _ in read.attributes if name.startswith("on")]
    assert read.tags.count("img") == Reader(harmless).tags.count("img") == 1
    assert words(text).count(" ".join(evil.split())) >= 15


def test_verdict_findings_and_their_numbers_are_on_the_page(extras):
    text = words(page(result(), extras))
    for f in result()["findings"]:
        assert f["says"] in text and f["part"] in text and f["level"] in text
    for piece in ("3 of 5 findings passed, 1 failed, 1 could not be judged", "0.9912", "0.25 at row 12", "2.2 GB", "some ear",
                  "good dye", "en: folded", "heard nothing", "Recipe block (bits 4, block_size 32) Made with",
                  "onnxruntime 1.32.0"):  # fmt: skip
        assert piece in text
    assert text.index("FAIL cpu_int4") < text.index("audio_heads (parts)") < text.index("Findings")


def test_a_verdict_is_told_in_words_not_in_colour_alone(extras):
    text = page(result(), extras)
    for verdict, sign, mark in ((PASS, "✓", "pass"), (FAIL, "✗", "fail"), (NOT_JUDGED, "–", "none")):
        assert f'<span class="badge {mark}"><span aria-hidden="true">{sign}</span> {verdict}</span>' in text


def test_pictures_have_descriptions_and_tables_have_heads(extras):
    read = Reader(page(result(), extras))
    assert all(read.all("img", "alt")) and len(read.all("img", "alt")) == 2
    assert len(read.all("audio", "aria-label")) == 2
    tables = read.tags.count("table")
    assert read.tags.count("caption") == tables and read.all("th", "scope").count("col") >= 2 * tables
    assert read.tags.count("h1") == 1


def test_sound_comes_back_as_it_went_in(extras):
    uris = Reader(page(result(), extras)).all("audio", "src")
    for uri, (samples, rate) in zip(uris, extras.speech[0].waveforms.values()):
        found, found_rate = soundfile.read(io.BytesIO(decode(uri, "audio/wav")), dtype="int16")
        assert found_rate == rate and np.array_equal(found, to_pcm16(samples))


@pytest.mark.parametrize("bad, says", [(np.full(100, np.nan), "NaN or Inf"), (np.empty(0), "no sound")])
def test_what_is_no_sound_is_told_and_has_no_player(bad, says):
    speech = [Utterance("Good day.", {"original": (chirp(), RATE), "build": (bad, RATE)})]
    text = page(result(), Extras(speech=speech))
    assert says in text and Reader(text).tags.count("audio") == 1


def test_silence_and_a_short_click_can_be_drawn():
    page(
        result(),
        Extras(speech=[Utterance("a", {"zeros": (np.zeros(RATE), RATE)}), Utterance("b", {"click": (np.ones(1), 8000)})]),
    )


def test_a_second_build_stands_beside_the_first(extras):
    other = result("cpu_int8", verdict=PASS, findings=[finding("parts", "audio_heads", PASS, "argmax 0.9996"),
                                                       finding("parts", "new_part", PASS, "only there")])  # fmt: skip
    second = Extras("", tensors(0.1), {"llm_decoder": 4_000_000_000}, [Utterance("Good day.", {"cpu_int8": (chirp(), RATE)})])
    text = page(result(), replace(extras, other=(other, second)))
    told = words(text)
    assert "FAIL cpu_int4" in told and "PASS cpu_int8" in told
    row = told[told.index("parts audio_heads") :]
    assert re.match(r"parts audio_heads ✗ FAIL argmax 0.8712 ✓ PASS argmax 0.9996", row)
    for piece in ("only there", "2.2 GB 4.0 GB", "0.1000 in 1.0 kB, 4 bits 0.0100 in 1.0 kB, 4 bits"):
        assert piece in told
    assert len(Reader(text).all("audio", "src")) == 3


def test_builds_of_one_name_are_told_apart():
    told = words(page(result(), Extras(other=(result(), Extras()))))
    assert "cpu_int4 (1) and cpu_int4 (2) against" in told


@pytest.mark.parametrize("layers", [1, 36])
def test_every_rounded_tensor_has_a_column_and_exact_ones_are_counted(layers):
    text = page(result(), Extras(layers=tensors(layers=layers)))
    assert text.count('class="bits4" x=') == 2 * layers
    assert f"1 of {2 * layers + 1} equal their source" in text
    heights = [float(h) for h in re.findall(r'class="bits4" x="[\d.]+" y="[\d.]+" width="[\d.]+" height="([\d.]+)"', text)]
    errors = [t.error for t in tensors(layers=layers) if t.error]
    np.testing.assert_allclose(np.array(heights) / heights[0], np.array(errors) / errors[0], rtol=1e-2)


@pytest.mark.parametrize("error", [float("nan"), float("inf")])
def test_an_error_that_is_no_number_is_the_worst_and_reaches_the_top(error):
    made = tensors()
    made[2].error = error
    text = page(result(), Extras(layers=made))
    assert 'class="broken"' in text and "NaN or Inf, drawn to the top" in text
    assert words(text).index("layers.1.self_attn.q_proj") < words(text).index(f"{error:.4f} in 1.0 kB")
    assert re.search(r"Tensor .*?layers\.1\.self_attn\.q_proj", words(text)[words(text).index("lose most") :]).end() < 120


def test_a_build_without_loss_or_speech_has_no_empty_sections():
    text = words(page(result(findings=[]), Extras(layers=[Tensor("a", 32, 4, 0.0)])))
    for title in ("Weights", "Speech", "Agreement", "Bytes", "Listener"):
        assert title not in text


def test_a_png_holds_its_pixels_and_colours():
    pixels = np.arange(256, dtype=np.uint8).reshape(8, 32)
    assert np.array_equal(png_rows(png(pixels)), pixels)
    colours = np.frombuffer(png_chunks(png(pixels))[b"PLTE"], np.uint8).reshape(256, 3)
    assert tuple(colours[0]) == RAMP[0] and tuple(colours[-1]) == RAMP[-1]


def test_high_tones_lie_above_low_ones_and_later_ones_to_the_right():
    low, high = (0.5 * np.sin(2 * np.pi * hz * np.arange(RATE) / RATE) for hz in (300, 6000))
    bands = mel_power(np.concatenate([low, high]), RATE, 2.0)
    rows = png_rows(decode(picture(bands, bands.max()), "image/png")).astype(float)
    third = rows.shape[1] // 3
    assert rows[:, -third:].mean(1).argmax() < 20 < 60 < rows[:, :third].mean(1).argmax()  # row 0 is the top
    assert len(mel_power(np.zeros(60 * RATE), RATE, 60.0)) <= 800


def test_both_pictures_share_one_scale_of_loudness():
    bands = mel_power(chirp(), RATE, 0.5)
    assert picture(bands, bands.max()) != picture(bands * 1e-4, bands.max())
    assert picture(bands, bands.max()) == picture(bands * 1e-4, bands.max() * 1e-4)


@pytest.mark.parametrize("top", [1e-6, 0.07, 0.1, 0.1364, 1.0, 3.0, 250.0])
def test_an_axis_has_a_few_round_numbers_and_holds_everything(top):
    made = ticks(top)
    assert made[0] == 0 and made[-1] >= top * (1 - 1e-6) and made[-2] < top and 3 <= len(made) <= 6


def test_bars_start_at_zero_and_the_largest_fills():
    chart = bars("t", "c", "h", ["x"], [("a", [1.0], [""]), ("b", [4.0], [""]), ("c", [None], [""]), ("d", [float("nan")], [""])])
    assert [row["shares"] for row in chart["rows"]] == [[25.0], [100.0], [0.0], [100.0]]


@pytest.mark.parametrize("count, text", [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2_211_400_000, "2.2 GB"), (None, "")])
def test_bytes_are_spelt_as_on_disks(count, text):
    assert in_bytes(count) == text


def test_the_file_is_whole_small_and_survives_any_text(tmp_path, extras):
    path = tmp_path / "report.html"
    write_page(path, result(reference="a lone \ud800 surrogate, 你好 🙂"), extras)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>") and text.rstrip().endswith("</html>") and "你好 🙂" in text
    sound = sum(len(samples) for samples, _ in extras.speech[0].waveforms.values()) * 2 * 4 / 3
    assert path.stat().st_size < sound + 100_000
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
