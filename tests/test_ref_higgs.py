"""The PyTorch reference says what the published code says: delay, sampler, filters, prompts, greedy speech."""

import hashlib
import json

import numpy as np
import pytest
import torch
from checkpoints import golden_copies
from conftest import GOLDEN, TINY
from tokenizers import Tokenizer

from _ref import higgs
from _ref.higgs_codec import load_codec
from voxport.build.checkpoint import Checkpoint, read_vocabulary

BOC, EOC, CODEBOOK_SIZE = 1024, 1025, 1024
DELAY = json.loads((GOLDEN / "delay.json").read_text(encoding="utf-8"))
TRACES = json.loads((GOLDEN / "sampler.json").read_text(encoding="utf-8"))["cases"]
COMBINATIONS = json.loads((GOLDEN / "filters.json").read_text(encoding="utf-8"))["combinations"]
CASES = [case["name"] for case in json.loads((TINY / "expected.json").read_text(encoding="utf-8"))["cases"]]
VARIANTS = sorted(path.stem for path in (TINY / "config_variants").glob("*.json"))
named = {"ids": lambda case: case["name"]}


@pytest.mark.parametrize("case", DELAY["delay_cases"], **named)
def test_delay_and_its_reverse_are_the_published_ones(case):
    raw = torch.tensor(case["raw"])
    delayed = higgs.apply_delay(raw, BOC, EOC)
    assert delayed.tolist() == case["delayed"]
    assert higgs.reverse_delay(delayed).tolist() == case["reversed"]


@pytest.mark.parametrize("case", DELAY["reverse_only_cases"], ids=lambda case: f"L{case['L']}")
def test_any_rows_reverse_and_specials_become_code_0(case):
    frames = higgs.reverse_delay(torch.tensor(case["delayed"]))
    assert frames.tolist() == case["reversed"]
    assert higgs.sanitise(frames, CODEBOOK_SIZE).tolist() == case["codes_for_codec"]


@pytest.mark.parametrize("case", DELAY["too_short"], ids=lambda case: f"L{case['L']}")
def test_rows_without_a_whole_frame_are_refused_or_empty(case):
    rows = torch.zeros(case["L"], 8, dtype=torch.int64)
    with pytest.raises(ValueError, match="no complete frame"):
        higgs.reverse_delay(rows)
    assert list(higgs.reverse_delay(rows, allow_short=True).shape) == case["allow_short_shape"]


def test_no_frames_cannot_be_delayed():
    with pytest.raises(ValueError, match="no frames"):
        higgs.apply_delay(torch.zeros(0, 8, dtype=torch.int64), BOC, EOC)


def trace_logits(case: dict) -> np.ndarray:
    """The logits of a sampler trace, by the recipe in its file."""
    shape = (case["rows_available"], 8, 1026)
    x = np.random.default_rng(case["seed"]).standard_normal(shape).astype(np.float32) * np.float32(4)
    if case["mask_specials"]:
        x[:, :, BOC : EOC + 1] = -50.0
    for s in case["set_logits"]:
        x[s["row"], s["cb"], s["id"]] = s["value"]
    return x


def run_trace(case: dict) -> tuple[list, list, higgs.SamplerState]:
    """Emitted rows, the state after each, and the last state."""
    state, rows, states = higgs.SamplerState(), [], []
    for logits in torch.from_numpy(trace_logits(case)):
        if state.done:
            break
        rows.append(higgs.step(state, logits.argmax(-1).tolist(), BOC, EOC))
        states.append(vars(state).copy())
    return rows, states, state


@pytest.mark.parametrize("case", TRACES, **named)
def test_sampler_emits_the_published_rows_and_states(case):
    assert hashlib.sha256(trace_logits(case).tobytes()).hexdigest() == case["logits_sha256"], "another NumPy generator"
    rows, states, state = run_trace(case)
    assert rows == case["rows"]
    assert states == case["states"]
    assert ("eoc" if state.done else "length") == case["finish_reason"]
    codes = higgs.sanitise(higgs.reverse_delay(torch.tensor(rows), allow_short=True), CODEBOOK_SIZE)
    assert codes.tolist() == case["codes_for_codec"]


@pytest.mark.parametrize("case", [c for c in TRACES if c["rows_after_done"]], **named)
def test_a_finished_sampler_only_stops(case):
    _, _, state = run_trace(case)
    before = vars(state).copy()
    after = [higgs.step(state, [5] * 8, BOC, EOC) for _ in case["rows_after_done"]]
    assert after == case["rows_after_done"]
    assert vars(state) == before


@pytest.fixture(scope="module")
def filters():
    with np.load(GOLDEN / "filters.npz") as arrays:
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: "t{temperature}_k{top_k}_p{top_p}".format(**c))
def test_filters_keep_the_published_ids_and_probabilities(combination, filters):
    i = combination["index"]
    settings = (combination[key] for key in ("temperature", "top_k", "top_p"))
    probs = higgs.filter_logits(filters["logits"][i], *settings).softmax(-1)
    assert torch.equal(probs > 0, filters["kept"][i])
    assert (probs - filters["probs"][i]).abs().max() <= 1e-6


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_spelling_of_theta_means_the_same_config(variant):
    read = lambda path: higgs.HiggsConfig.from_dict(json.loads(path.read_text(encoding="utf-8")))
    config = read(TINY / "config_variants" / f"{variant}.json")
    assert config == read(TINY / "config.json")
    assert config.rope_theta == 1e6


def test_another_rope_type_is_refused():
    with pytest.raises(ValueError, match="yarn"):
        higgs.rope_theta({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"}})


def test_ids_outside_a_codebook_never_read_its_neighbour():
    weight = torch.zeros(8 * 1026, 4)
    for stray in (1026, -1):
        with pytest.raises(ValueError, match="0..1025"):
            higgs.audio_embed(weight, torch.tensor([[stray] + [0] * 7]), 1026)


@pytest.fixture(scope="module")
def tiny() -> Checkpoint:
    return Checkpoint.open(TINY)


@pytest.fixture(scope="module")
def tensors(tiny) -> dict[str, torch.Tensor]:
    """The body of the tiny checkpoint in memory: `_ref` reads each tensor at every step."""
    return {name: tiny[name].float() for name in higgs.body_shapes(tiny.config)}


@pytest.fixture(scope="module")
def codec(tiny):
    return load_codec(tiny.codec_config, tiny.codec_tensors())


def make_prompt(case: dict, golden) -> tuple[higgs.Prompt, torch.Tensor | None]:
    """The prompt of a golden case and its reference rows."""
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    rows = torch.from_numpy(golden.arrays["ref_rows"]) if case["clone"] else None
    num_rows = 0 if rows is None else len(rows)
    return higgs.build_prompt(encode, read_vocabulary(TINY).special, case["text"], case["ref_text"], num_rows), rows


@pytest.fixture(params=CASES)
def case(request, golden) -> dict:
    return next(case for case in golden.cases if case["name"] == request.param)


@pytest.mark.parametrize("rope", ["exact", "bf16"])
def test_greedy_speech_of_the_tiny_checkpoint_is_the_published_one(case, rope, golden, tiny, tensors, codec):
    model = higgs.Higgs(tiny.config, tensors, bf16_rope=rope == "bf16")
    prompt, ref_rows = make_prompt(case, golden)
    name, expected = case["name"], lambda kind: golden.of(kind, case["name"], rope)
    assert prompt.ids == golden.of("ids", name).tolist()
    assert (list(prompt.ref_span) if prompt.ref_span else None) == case["ref_span"]
    embeds = model.embed_prompt(prompt, ref_rows)
    np.testing.assert_allclose(embeds, golden.of("prompt_embeds", name), atol=1e-6, rtol=0)

    made = model.generate(embeds, max_rows=60)

    assert made.rows.tolist() == expected("rows").tolist()
    assert made.codes.tolist() == expected("codes").tolist()
    assert made.finish_reason == case[rope]["finish_reason"]
    np.testing.assert_allclose(made.hidden, expected("hidden"), atol=2e-3, rtol=0)
    np.testing.assert_allclose(made.logits[0], expected("logits0"), atol=2e-3, rtol=0)
    wav = codec.decode(made.codes.t()[None])[0, 0]
    np.testing.assert_allclose(wav, expected("wav"), atol=1e-4, rtol=0)


def test_teacher_forcing_in_one_pass_gives_the_states_of_stepping(case, golden, tiny, tensors):
    name = case["name"]
    embeds = torch.from_numpy(golden.of("prompt_embeds", name))
    hidden = higgs.Higgs(tiny.config, tensors).teacher_forced(embeds, torch.from_numpy(golden.of("rows", name, "bf16")))
    np.testing.assert_allclose(hidden, golden.of("hidden", name, "bf16"), atol=2e-3, rtol=0)


def test_the_two_rope_tables_can_be_told_apart(golden):
    for name in CASES:
        exact, rounded = golden.of("hidden", name, "exact")[0], golden.of("hidden", name, "bf16")[0]
        assert np.abs(exact - rounded).max() > 0.05


def test_reference_rows_are_the_delayed_codes_of_the_reference_clip(golden, codec):
    codes = codec.encode(torch.from_numpy(golden.arrays["ref_sig"].astype(np.float32))[None, None])[0].t()
    assert codes.tolist() == golden.arrays["ref_codes"].tolist()
    assert higgs.apply_delay(codes, BOC, EOC).tolist() == golden.arrays["ref_rows"].tolist()


def full_tokenizer():
    found = golden_copies("tokenizer/tokenizer.json")
    if not found:
        pytest.skip("the full-size tokenizer is only in the full golden set; set VOXPORT_GOLDEN to test it")
    return found[0]


def test_prompts_of_the_full_size_tokenizer_are_the_published_ones():
    path = full_tokenizer()
    tokenizer, special = Tokenizer.from_file(str(path)), read_vocabulary(path.parent).special
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    prompts = json.loads((GOLDEN / "prompts.json").read_text(encoding="utf-8"))
    for case in prompts["cases"]:
        check_prompts(case, encode, special)


def check_prompts(case, encode, special):
    build = lambda *reference: higgs.build_prompt(encode, special, case["text"], *reference)
    assert build().ids == case["zero_shot"], case["text"]
    assert build(case["ref_text"], case["num_ref_rows"]).ids == case["clone_with_transcript"], case["text"]
    assert build(None, case["num_ref_rows"]).ids == case["clone_without_transcript"], case["text"]
