"""The delay pattern: exact golden data, round trips, and special ids that never reach the codec."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from run_fakes import REAL_AUDIO

from _ref import higgs as ref
from voxport.errors import UserError, WorkError
from voxport.manifest import Audio
from voxport.run.delay import apply_delay, check_codes, reverse_delay, sanitise

GOLDEN = json.loads((Path(__file__).parent / "golden/higgs/delay.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", GOLDEN["delay_cases"], ids=lambda case: case["name"])
def test_delay_and_its_reverse_equal_the_golden_rows(case):
    raw = np.array(case["raw"])
    delayed = apply_delay(raw, REAL_AUDIO)
    assert delayed.tolist() == case["delayed"]
    assert reverse_delay(delayed, REAL_AUDIO).tolist() == case["reversed"] == raw.tolist()


@pytest.mark.parametrize("case", GOLDEN["reverse_only_cases"], ids=lambda case: f"L{case['L']}")
def test_reverse_and_sanitising_equal_the_golden_codes(case):
    frames = reverse_delay(np.array(case["delayed"]), REAL_AUDIO)
    assert frames.tolist() == case["reversed"]
    assert sanitise(frames, REAL_AUDIO).tolist() == case["codes_for_codec"]


@pytest.mark.parametrize("case", GOLDEN["too_short"], ids=lambda case: f"L{case['L']}")
def test_rows_without_a_whole_frame_are_refused_or_empty_on_request(case):
    rows = np.zeros((case["L"], REAL_AUDIO.num_codebooks), np.int64)
    with pytest.raises(UserError, match="hold no whole frame"):
        reverse_delay(rows, REAL_AUDIO)
    assert list(reverse_delay(rows, REAL_AUDIO, allow_short=True).shape) == case["allow_short_shape"]


def test_no_frames_cannot_be_delayed():
    with pytest.raises(UserError, match="no frame"):
        apply_delay(np.zeros((0, 8), np.int64), REAL_AUDIO)


@given(st.integers(1, 12), st.integers(1, 60), st.data())
def test_delay_round_trip_equals_the_reference_for_any_size(num_codebooks, num_frames, data):
    audio = Audio(num_codebooks, 18, 16, 16, 17)
    codes = data.draw(arrays(np.int64, (num_frames, num_codebooks), elements=st.integers(0, 15)))
    rows = apply_delay(codes, audio)
    assert rows.tolist() == ref.apply_delay(torch.from_numpy(codes), 16, 17).tolist()
    assert reverse_delay(rows, audio).tolist() == codes.tolist()


@given(arrays(np.int64, st.tuples(st.integers(8, 20), st.just(8)), elements=st.integers(0, 1025)))
def test_special_ids_become_zero_and_never_the_last_code(rows):
    frames = reverse_delay(rows, REAL_AUDIO)
    expected = ref.sanitise(ref.reverse_delay(torch.from_numpy(rows)), 1024)
    made = sanitise(frames, REAL_AUDIO)
    assert made.tolist() == expected.tolist()
    assert (made[frames >= 1024] == 0).all()


def test_rows_after_the_end_never_reach_the_codec():
    with pytest.raises(WorkError, match="after the end"):
        sanitise(np.full((2, 8), -1), REAL_AUDIO)


@pytest.mark.parametrize(
    "codes",
    [
        np.zeros((3, 7), int),
        np.zeros((0, 8), int),
        np.zeros((3, 8)),
        np.full((3, 8), 1024),
        np.full((3, 8), -1),
        np.zeros(8, int),
    ],
    ids=["seven codebooks", "no frame", "float", "special id", "negative", "flat"],
)
def test_codes_that_are_not_codes_are_refused(codes):
    with pytest.raises(UserError):
        check_codes(codes, REAL_AUDIO, "codes")
