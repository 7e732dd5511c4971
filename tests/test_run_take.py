"""When an utterance ends, what of it is kept, and when a frame is settled."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from run_fakes import N, V, make_manifest

from voxport.errors import WorkError
from voxport.run.delay import reverse_delay, sanitise
from voxport.run.take import EOC, LENGTH, PLATEAU, Take

AUDIO = make_manifest().audio


def perform(rows, max_rows=100, plateau_frames=0):
    """Feed sampled rows until the take is over."""
    take = Take(AUDIO, max_rows, plateau_frames)
    for row in rows:
        take.add(np.array(row))
        if take.finish_reason:
            break
    return take


def speech(num_rows):
    """Rows that differ from one to the next."""
    return [[r % 5, (r + 1) % 5, (r + 2) % 5] for r in range(num_rows)]


def test_eoc_keeps_every_frame_before_it():
    take = perform([*speech(10), [V - 1, 1, 2], *speech(9)])
    assert take.finish_reason == EOC
    assert len(take.codes()) == 10
    assert len(take) == 10 + N - 1


def test_the_cap_counts_rows_and_leaves_n_minus_one_fewer_frames():
    take = perform(speech(50), max_rows=20)
    assert (take.finish_reason, len(take), len(take.codes())) == (LENGTH, 20, 20 - N + 1)


def test_eoc_in_the_last_row_of_the_cap_still_counts_as_eoc():
    take = perform([*speech(10), [V - 1, 1, 2], [1, 1, 1], [1, 1, 1]], max_rows=10 + N - 1)
    assert take.finish_reason == EOC


def test_a_plateau_is_cut_where_it_began_and_the_speech_before_it_stays():
    take = perform([*speech(20), *[[7, 7, 7]] * 50], plateau_frames=12)
    assert take.finish_reason == PLATEAU
    codes = take.codes()
    expected = reverse_delay(np.array([*speech(20), *[[7, 7, 7]] * (N - 1)]), AUDIO)
    assert len(codes) == 20
    assert codes[N:].tolist() == expected[N:].tolist()
    assert len(take.rows) == len(codes) + N - 1
    assert take.num_steps == 32


def test_a_pause_just_shorter_than_the_guard_is_not_cut():
    rows = [*speech(20), *[[7, 7, 7]] * 11, *speech(10)]
    take = perform(rows, max_rows=len(rows), plateau_frames=12)
    assert (take.finish_reason, len(take)) == (LENGTH, len(rows))


def test_sameness_of_some_codebooks_is_no_plateau():
    rows = [[3, 3, r % 5] for r in range(60)]
    assert perform(rows, max_rows=60, plateau_frames=12).finish_reason == LENGTH


def test_without_a_guard_sameness_runs_to_the_cap():
    assert perform([[7, 7, 7]] * 90, max_rows=60).finish_reason == LENGTH


@given(st.lists(st.sampled_from([[1, 1, 1], [2, 2, 2], [V - 1, 1, 1]]), min_size=1, max_size=40), st.integers(2, 6))
def test_settled_frames_never_change_and_all_kept_frames_get_settled(rows, plateau_frames):
    take, seen = Take(AUDIO, 30, plateau_frames), []
    for row in rows:
        take.add(np.array(row))
        settled = sanitise(reverse_delay(take.rows, AUDIO, allow_short=True), AUDIO)[: take.settled_frames].tolist()
        assert settled[: len(seen)] == seen
        seen = settled
        if take.finish_reason:
            frames = sanitise(reverse_delay(take.rows, AUDIO, allow_short=True), AUDIO)
            assert seen == frames.tolist()
            return


@given(arrays(np.int64, (30, N), elements=st.integers(0, V - 1)), st.integers(N, 30))
def test_no_special_id_is_left_in_codes_however_the_take_ends(rows, max_rows):
    codes = perform(rows, max_rows=max_rows, plateau_frames=5)
    if len(codes) >= N:
        assert 0 <= codes.codes().min() and codes.codes().max() < AUDIO.codebook_size


def test_a_take_without_a_whole_frame_is_a_failure_not_an_empty_file():
    with pytest.raises(WorkError, match="no sound"):
        perform(speech(5), max_rows=N - 1).codes()
