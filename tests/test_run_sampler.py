"""Filters, draws and the state machine against the golden traces, the reference and their own definition."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from run_fakes import REAL_AUDIO

from _ref import higgs as ref
from voxport.errors import UserError
from voxport.manifest import Audio, Sampling
from voxport.run.delay import reverse_delay, sanitise
from voxport.run.sampler import (
    DelayMachine,
    Dice,
    check_frames,
    check_sampling,
    check_seed,
    distance,
    draw,
    is_greedy,
    probabilities,
    uniforms,
)
from voxport.run.take import Take

FOLDER = Path(__file__).parent / "golden/higgs"
TRACES = json.loads((FOLDER / "sampler.json").read_text(encoding="utf-8"))
FILTERS = json.loads((FOLDER / "filters.json").read_text(encoding="utf-8"))["combinations"]
GREEDY = Sampling(0.0, 1.0, 0, 1e-5)
DEFAULT = Sampling(0.8, 0.8, 30, 1e-5)


def make_logits(case):
    """The logits of a golden trace, by the recipe in the file."""
    shape = (case["rows_available"], 8, 1026)
    logits = np.random.default_rng(case["seed"]).standard_normal(shape).astype(np.float32) * np.float32(4)
    if case["mask_specials"]:
        logits[:, :, 1024:1026] = -50.0
    for change in case["set_logits"]:
        logits[change["row"], change["cb"], change["id"]] = change["value"]
    assert hashlib.sha256(logits.tobytes()).hexdigest() == case["logits_sha256"]
    return logits


@pytest.mark.parametrize("case", TRACES["cases"], ids=lambda case: case["name"])
def test_rows_states_and_end_equal_the_golden_trace(case):
    logits, dice = make_logits(case), Dice(Sampling(case["temperature"], 1.0, 0, 1e-5), 0)
    take = Take(REAL_AUDIO, case["rows_available"])
    for step, state in enumerate(case["states"]):
        take.add(dice.roll(logits[step], step))
        machine = take.machine
        assert (machine.delay_count, machine.eoc_countdown, machine.done) == tuple(
            state[k] for k in ("delay_count", "eoc_countdown", "done")
        )
        assert machine.last_codes.tolist() == state["last_codes"]
    assert take.rows.tolist() == case["rows"]
    assert take.finish_reason == case["finish_reason"]
    frames = reverse_delay(take.rows, REAL_AUDIO, allow_short=True)
    assert frames.tolist() == case["frames"]
    assert sanitise(frames, REAL_AUDIO).tolist() == case["codes_for_codec"]
    for row in case["rows_after_done"]:
        assert take.machine.advance(logits[-1].argmax(-1)).tolist() == row
        assert take.machine.last_codes.tolist() == case["states"][-1]["last_codes"]


def golden_sampling(combination):
    off = {"top_k": combination["top_k"] or 0, "top_p": combination["top_p"] or 1.0}
    return Sampling(combination["temperature"], off["top_p"], off["top_k"], 1e-5)


@pytest.mark.parametrize(
    "combination", FILTERS, ids=lambda c: f"{c['logits_kind']}-{c['temperature']}-{c['top_k']}-{c['top_p']}"
)
def test_kept_ids_and_probabilities_equal_the_golden_filters(combination):
    with np.load(FOLDER / "filters.npz") as golden:
        logits, kept, probs = (golden[name][combination["index"]] for name in ("logits", "kept", "probs"))
    made = probabilities(logits, golden_sampling(combination))
    assert ((made > 0) == kept).all()
    np.testing.assert_allclose(made, probs, atol=1e-6)


@given(
    arrays(np.float32, (3, 20), elements=st.integers(-8, 8).map(lambda i: i / 2)),
    st.sampled_from([0.3, 0.8, 1.0, 2.0]),
    st.integers(0, 25),
    st.sampled_from([0.1, 0.5, 0.8, 0.95, 1.0]),
)
def test_filters_equal_the_definition_written_out(logits, temperature, top_k, top_p):
    made = probabilities(logits, Sampling(temperature, top_p, top_k, 1e-5))
    for row, probs in zip(logits, made, strict=True):
        assert probs.sum() == pytest.approx(1)
        np.testing.assert_allclose(probs, slow_probabilities(row, temperature, top_k, top_p), atol=1e-9)


def slow_probabilities(row, temperature, top_k, top_p):
    """One codebook, one id at a time; equal logits in order of their ids, as a stable sort leaves them."""
    scaled = row.astype(np.float32) / np.float32(temperature)
    ranked = sorted(range(len(row)), key=lambda i: -scaled[i])
    if 0 < top_k < len(row):
        ranked = [i for i in ranked if scaled[i] >= scaled[ranked[top_k - 1]]]
    weights = np.exp(scaled.astype(np.float64) - scaled.max())
    share = weights / sum(weights[i] for i in ranked)
    kept, total = [], 0.0
    for i in ranked:
        if top_p >= 1 or not kept or total <= top_p:
            kept.append(i)
        total += share[i]
    made = np.zeros(len(row))
    made[kept] = weights[kept] / weights[kept].sum()
    return made


@given(arrays(np.int64, (40, 4), elements=st.sampled_from([0, 1, 5, 8, 9])), st.integers(1, 4))
def test_state_machine_equals_the_scalar_reference(sampled, num_codebooks):
    audio, state = Audio(num_codebooks, 10, 8, 8, 9), ref.SamplerState()
    machine = DelayMachine(audio)
    for codes in sampled[:, :num_codebooks]:
        assert machine.advance(codes).tolist() == ref.step(state, codes.tolist(), 8, 9)
        assert (machine.delay_count, machine.eoc_countdown, machine.done) == (
            state.delay_count,
            state.eoc_countdown,
            state.done,
        )
        assert machine.last_codes.tolist() == state.last_codes


def test_draws_follow_the_probabilities():
    logits = np.log(np.array([[0.5, 0.3, 0.2, 0.0001]], np.float32))
    sampling = Sampling(1.0, 0.99, 0, 1e-5)
    draws = [int(draw(logits, sampling, uniforms(1, step, 1))[0]) for step in range(20_000)]
    shares = np.bincount(draws, minlength=4) / len(draws)
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.2, 0], atol=0.01)
    assert shares[3] == 0


def test_a_dropped_id_is_never_drawn_even_at_the_ends_of_the_interval():
    logits = np.array([[-9.0, 5.0, 5.0, -9.0]], np.float32)
    sampling = Sampling(1.0, 1.0, 2, 1e-5)
    assert draw(logits, sampling, np.array([0.0]))[0] == 1
    assert draw(logits, sampling, np.array([1 - 2.0**-53]))[0] == 2


def test_random_numbers_depend_on_seed_step_and_codebook_only():
    assert uniforms(7, 3, 8)[:5].tolist() == uniforms(7, 3, 5).tolist()
    rows = np.concatenate([uniforms(seed, step, 8) for seed in (7, 8) for step in range(50)])
    assert len(set(rows.tolist())) == rows.size
    assert ((0 <= rows) & (rows < 1)).all()
    # pinned: another NumPy, machine or version of this toolkit must speak the same take from the same seed
    assert uniforms(42, 0, 2).tolist() == [0.8201981478608876, 0.18924562408645496]


@settings(max_examples=25)
@given(st.integers(0, 2**62), st.integers(0, 500), arrays(np.float32, (5, 8, 30), elements=st.floats(-9, 9, width=32)))
def test_a_batch_draws_what_each_of_its_rows_draws_alone(seed, step, logits):
    sampling = Sampling(0.8, 0.9, 10, 1e-5)
    random = np.stack([uniforms(seed + i, step, 8) for i in range(5)])
    together = draw(logits, sampling, random)
    assert together.tolist() == [draw(logits[i], sampling, random[i]).tolist() for i in range(5)]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1e-5, 0.8, 30, 1e-5), Sampling(1.0, 0.8, 1, 1e-5)])
def test_greedy_takes_the_first_of_equal_logits_whatever_the_seed(sampling):
    logits = np.zeros((8, 12), np.float32)
    logits[:, [4, 9]] = 3
    assert is_greedy(sampling)
    assert {tuple(Dice(sampling, seed).roll(logits, 0)) for seed in range(5)} == {(4,) * 8}


def test_seeds_change_what_is_drawn_and_the_same_seed_does_not():
    logits = np.random.default_rng(0).standard_normal((8, 1026)).astype(np.float32)
    rolls = {seed: Dice(DEFAULT, seed).roll(logits, 3).tolist() for seed in range(4)}
    assert rolls[2] == Dice(DEFAULT, 2).roll(logits, 3).tolist()
    assert len({tuple(roll) for roll in rolls.values()}) == 4


@pytest.mark.parametrize(
    "values",
    [
        (-0.1, 0.8, 30),
        (float("nan"), 0.8, 30),
        (float("inf"), 0.8, 30),
        (0.8, 0.0, 30),
        (0.8, 1.1, 30),
        (0.8, float("nan"), 30),
        (0.8, 0.8, -1),
        ("hot", 0.8, 30),
        (True, 0.8, 30),
        (0.8, "x", 30),
        (0.8, 0.8, "x"),
        (0.8, 0.8, 2.5),
    ],
)
def test_sampling_values_that_mean_nothing_are_refused_by_name(values):
    with pytest.raises(UserError, match="--(temperature|top-p|top-k)"):
        check_sampling(Sampling(*values, 1e-5))
    with pytest.raises(UserError, match="--residual-(temperature|top-p|top-k)"):
        check_sampling(Sampling(*values, 1e-5), "residual-")


def test_numbers_of_numpy_are_numbers():
    sampling = Sampling(np.float32(0.5), np.float64(0.9), np.int64(3), 1e-5)
    assert check_sampling(sampling) is sampling and check_seed(np.uint8(3)) == 3 and check_frames(np.int32(4), 9) == 4


@pytest.mark.parametrize("max_frames", [0, 10, 2.5, "3", True])
def test_frames_that_no_take_could_have_are_refused(max_frames):
    with pytest.raises(UserError, match="--max-frames must be a whole number in 1..9"):
        check_frames(max_frames, 9)


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, "1", True])
def test_seeds_that_are_not_seeds_are_refused(seed):
    with pytest.raises(UserError, match="--seed"):
        check_seed(seed)


@given(arrays(np.float64, (2, 12), elements=st.floats(-4, 4)), st.floats(0.01, 0.99), st.integers(0, 11), st.floats(0.3, 1))
def test_a_draw_changes_only_when_its_distance_is_crossed(logits, uniform, top_k, top_p):
    sampling = Sampling(0.9, top_p, top_k, 1e-5)
    uniform = np.full(2, uniform)
    safe = distance(logits, sampling, uniform) > 1e-3
    moved = logits + 1e-5 * np.sin(np.arange(24)).reshape(2, 12)
    same = draw(logits, sampling, uniform) == draw(moved, sampling, uniform)
    assert same[safe].all()


def test_the_distance_of_a_greedy_choice_is_its_lead():
    logits = np.array([[1.0, 5.0, 4.5, 0.0]])
    assert distance(logits, Sampling(0.0, 0.8, 30, 1e-5), np.zeros(1)).tolist() == [0.5]
