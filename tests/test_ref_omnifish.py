"""_ref/omnifish.py against golden data (what the original module computed), against that module, and against itself."""

import dataclasses
import functools
import importlib.util
import json
import math
import os
import shutil
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, shared_golden
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from _ref import omnifish as ref
from _ref.omnifish import MASK_ID, NUM_CODEBOOKS, OmniFish, OmniFishConfig, Recipe, block_mask

LOCAL = ROOT / "tests/golden_omnifish"
FOLDERS = ("axial", "axial_px", "mtpdec")
CASES = ("mid_end", "boundary_end", "max_blocks", "ref_mid_end", "empty", "pad_first", "other_mode_ref", "other_mode_ids")
HIDDEN, LOGITS, EMBED = 5e-4, 2e-3, 1e-5  # the golden data's own tolerances


def read_json(path: Path):
    return json.loads(path.read_text(encoding="utf-8"))


def golden_folder(name: str) -> Path:
    for folder in (LOCAL / name, shared_golden() / "omnifish" / name):
        if (folder / "model.safetensors").is_file():
            return folder
    pytest.skip(f"golden omnifish/{name} is neither in the repository nor at {shared_golden()}; set VOXPORT_GOLDEN")


def make_encode(folder: Path):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer, lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def make_model(folder: Path, config: dict, tensors: dict) -> OmniFish:
    tokenizer, encode = make_encode(folder)
    made = OmniFishConfig.from_dict(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    return OmniFish(made, tensors, tokenizer.token_to_id("<|lang_start|>"), ref.language_tokens(encode))


@dataclasses.dataclass
class Golden:
    """A golden checkpoint: the model, how to run it, and what the original computed."""

    model: OmniFish
    recipe: Recipe
    encode: object
    names: list
    arrays: dict
    facts: dict

    def tensor(self, key: str) -> Tensor:
        return torch.from_numpy(self.arrays[key])

    def row(self, key: str) -> Tensor:
        return self.tensor(key)[0]

    def ids(self, text: str) -> list[int]:
        return ref.encode_text(self.encode, text, self.names, self.model.config.text_vocab_size)

    def prompt(self, key: str) -> tuple[Tensor, Tensor]:
        """States and codes of a residual case's prompt; empty where it has none."""
        if f"{key}.prompt_h" in self.arrays:
            return self.tensor(f"{key}.prompt_h"), self.tensor(f"{key}.prompt_codes")
        return self.tensor(f"{key}.h")[:0], torch.empty(NUM_CODEBOOKS, 0, dtype=torch.int64)


@functools.lru_cache
def load(folder: Path) -> Golden:
    with np.load(folder / "expected.npz") as arrays:
        arrays = dict(arrays)
    model = make_model(folder, read_json(folder / "config.json"), load_file(folder / "model.safetensors"))
    side, facts, names = (read_json(folder / f"{name}.json") for name in ("omnifish", "expected", "id_vocab"))
    return Golden(model, Recipe.from_dict(side), make_encode(folder)[1], names, arrays, facts)


@pytest.fixture(params=FOLDERS)
def golden(request) -> Golden:
    return load(golden_folder(request.param))


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def worst(found: Tensor, expected) -> float:
    expected = torch.as_tensor(expected)
    assert found.shape == expected.shape
    return float((found - expected).abs().max())


def same(found: Tensor, expected) -> bool:
    return torch.equal(found, torch.as_tensor(expected))


def margin(logits: Tensor) -> Tensor:
    """Best minus second logit, [S]."""
    best = logits.topk(2).values
    return best[..., 0] - best[..., 1]


# What golden text becomes


def test_text_becomes_the_golden_ids(golden):
    for case in golden.facts["encode_text"]:
        assert golden.ids(case["text"]) == case["ids"], case["text"]
    for case in golden.facts["encode_text_ids_false"]:
        assert golden.encode(case["text"]) == case["ids"], case["text"]


def test_prompt_strings_are_the_golden_ones(golden):
    for case in golden.facts["context_text"]:
        assert ref.context_text(*case["args"]) == case["out"]
    for case in golden.facts["dialogue_text"]:
        assert ref.dialogue_text([tuple(turn) for turn in case["turns"]]) == case["out"]
    for case in golden.facts["e2e"]:
        text = ref.dialogue_text(case["turns"]) if case["turns"] else case["text"]
        around = case["language"], case["instruct"], case["ref_text"], case["before"], case["after"]
        assert ref.prompt_text(text, *around) == case["prompt_text"]
        assert golden.ids(case["prompt_text"]) == case["input_ids"]


def test_id_and_language_tables_are_the_golden_ones(golden):
    config, facts = golden.model.config, golden.facts
    ref.check_names(golden.names, config)
    assert (config.num_speakers, config.text_vocab_size) == (facts["n_spk"], facts["text_vocab"])
    tokens = {ref.LANGUAGES[row]: token for token, row in golden.model.languages.items()}
    assert tokens == facts["lang_token_ids"]


def test_the_residual_decoder_is_found_from_the_shapes(golden):
    found, sizes = golden.model.config.residual, golden.facts["mtp"]["sizes"]
    assert (found.size, found.num_kv_heads) == (sizes["dim"], sizes["n_kv"])
    assert found.num_layers == sizes["layers" if "layers" in sizes else "blocks"]
    if isinstance(found, ref.AxialConfig):
        assert (found.ffn, found.prompt_cross) == (sizes["ffn"], golden.facts["prompt_x"])
    else:
        assert golden.facts["arch"] != "axial"


# Body


@pytest.mark.parametrize("case", ["embed", "embed_noid"])
def test_embeddings_of_every_branch(golden, case):
    found = golden.model.embed(golden.row(f"{case}.input_ids"), golden.row(f"{case}.audio_mask"))
    assert worst(found, golden.row(f"{case}.out")) <= EMBED


@pytest.mark.parametrize("copies", [3, 2])
def test_block_masks(golden, copies):
    kinds, blocks, masks = (golden.tensor(f"mask{copies}.{name}") for name in ("kind", "block", "mask"))
    assert len(kinds) == 2
    for kind, block, mask in zip(kinds, blocks, masks):
        assert same(block_mask(kind, block), mask[0])


@pytest.mark.parametrize("copies", [3, 2])
def test_one_masked_pass_gives_the_golden_states_and_logits(golden, copies):
    key, model = f"backbone{copies}", golden.model
    visible = block_mask(golden.row(f"{key}.kind"), golden.row(f"{key}.block"))
    embeds = model.embed(golden.row(f"{key}.input_ids"), golden.row(f"{key}.audio_mask"))
    hidden, _ = model.hidden_states(embeds, None, golden.row(f"{key}.position_ids"), visible)
    assert worst(hidden, golden.row(f"{key}.hidden")) <= HIDDEN
    logits = model.semantic_logits(hidden)
    assert worst(logits[golden.tensor(f"{key}.logit_rows")], golden.tensor(f"{key}.logits")) <= LOGITS
    assert same(logits.argmax(-1), golden.tensor(f"{key}.argmax"))
    assert worst(logits.logsumexp(-1), golden.tensor(f"{key}.logsumexp")) <= LOGITS
    assert worst(margin(logits), golden.tensor(f"{key}.margin")) <= LOGITS


@pytest.mark.parametrize("copies", [3, 2])
def test_passes_over_a_kept_past_equal_the_one_masked_pass(golden, copies):
    key, model = f"backbone{copies}", golden.model
    kind, block, expected = (golden.row(f"{key}.{name}") for name in ("kind", "block", "hidden"))
    embeds = model.embed(golden.row(f"{key}.input_ids"), golden.row(f"{key}.audio_mask"))
    decided = ref.FULL if copies == 3 else ref.SEMANTIC
    context = kind == ref.CONTEXT
    hidden, past = model.hidden_states(embeds[context])
    assert worst(hidden, expected[context]) <= HIDDEN
    for b in block[kind == decided].unique():
        kept = None
        for copy in kind[~context].unique():
            chosen = (kind == copy) & (block == b)
            hidden, seen = model.hidden_states(embeds[chosen], past)
            assert worst(hidden, expected[chosen]) <= HIDDEN
            kept = seen if copy == decided else kept
        past = kept


def test_the_last_position_reaches_the_first_state(golden):
    embeds = golden.model.embed(golden.row("embed.input_ids"), golden.row("embed.audio_mask"))[:8]
    changed = torch.cat([embeds[:-1], -embeds[-1:]])
    first, other = (golden.model.hidden_states(x)[0][0] for x in (embeds, changed))
    assert float((first - other).abs().max()) > 100 * HIDDEN


def test_an_audio_code_is_no_language_start(golden):
    model = golden.model
    ids = torch.full((NUM_CODEBOOKS, 2), model.lang_start)
    ids[0, 1] = 3
    found = model.embed(ids, torch.tensor([True, False]))
    assert same(found[1], model.embed_text(torch.tensor([3]))[0])


# Residual decoders


def block_numbers(prompt: int, frames: int, size: int) -> Tensor:
    return torch.cat([torch.full((prompt,), -1), torch.arange(frames) // size])


def test_teacher_forced_residual_logits(golden):
    config, w = golden.model.config.residual, golden.model.residual_weights
    h, codes, block = (golden.tensor(f"mtp_tf.{name}") for name in ("h", "codes", "block"))
    first = int((block < 0).sum())
    if isinstance(config, ref.AxialConfig):
        assert worst(ref.axial_grid(config, w, h, codes, block)[:, first:], golden.tensor("mtp_tf.logits")) <= LOGITS
        alone = ref.axial_grid(config, w, h[first:], codes[:, first:], block[first:])
        assert worst(alone[:, :2], golden.tensor("mtp_tf_noprompt.logits")) <= LOGITS
        return
    visible = block[None] <= block[:, None]
    _, logits = ref.chain_grid(config, w, h, codes, visible)
    assert worst(logits[:, first:], golden.tensor("mtp_tf.logits")) <= LOGITS
    _, logits = ref.chain_grid(config, w, h, codes)
    assert worst(logits[:, 3:5], golden.tensor("mtp_tf_noattn.logits")) <= LOGITS
    states, logits = ref.chain_grid(config, w, h, codes, visible, clean=True)
    assert worst(states, golden.tensor("mtp_tf_clean.states")) <= HIDDEN
    assert worst(logits[:, 3:4], golden.tensor("mtp_tf_clean.logits")) <= LOGITS


@pytest.mark.parametrize("case", ["mtp_p0", "mtp_p5", "mtp_short"])
def test_residual_codes_of_block_after_block(golden, case):
    h, semantic, (prompt_h, prompt_codes) = golden.tensor(f"{case}.h"), golden.tensor(f"{case}.semantic"), golden.prompt(case)
    size, config = golden.recipe.block_size, golden.model.config.residual
    assert len(h) % size  # the last block is a partial one
    decoder = golden.model.residual_decoder(golden.recipe.residual_rounds)
    decoder.prime(prompt_h, prompt_codes)
    codes = torch.cat([decoder.decode(*block) for block in zip(h.split(size), semantic.split(size))], dim=1)
    assert same(codes, golden.tensor(f"{case}.codes"))
    block = block_numbers(len(prompt_h), len(h), size)
    h, codes = torch.cat([prompt_h, h]), torch.cat([prompt_codes, codes], dim=1)
    if isinstance(config, ref.AxialConfig):
        logits = ref.axial_grid(config, golden.model.residual_weights, h, codes, block)[:, len(prompt_h) :]
        assert worst(margin(logits), golden.tensor(f"{case}.margin")) <= LOGITS
    else:
        states, _ = ref.chain_grid(config, golden.model.residual_weights, h, codes, block[None] <= block[:, None], clean=True)
        assert worst(states, golden.tensor(f"{case}.states")) <= HIDDEN


# End to end


def reveal_gaps(block: ref.Block) -> list[float]:
    """Per round, log confidence of the last frame revealed minus that of the first one left."""
    gaps, before = [], torch.full_like(block.raw, MASK_ID)
    for ids, confidence in zip(block.rounds, block.confidence.log()):
        left, shown = ids == MASK_ID, (before == MASK_ID) & (ids != MASK_ID)
        gaps.append(float(confidence[shown].min() - confidence[left].max()) if left.any() else math.inf)
        before = ids
    return gaps


@pytest.mark.parametrize("name", CASES)
def test_speech_is_the_golden_one(golden, name):
    facts = next(case for case in golden.facts["e2e"] if case["name"] == name)
    key = f"e2e.{name}"
    recipe = dataclasses.replace(golden.recipe, context_mode=facts["context_mode"])
    ref_codes = golden.tensor(f"{key}.ref_codes") if facts["ref_frames"] else None
    margins = []

    def choose(logits: Tensor) -> Tensor:
        margins.append(margin(logits))
        return logits.argmax(-1)

    speech = golden.model.generate(facts["input_ids"], recipe, facts["max_blocks"], ref_codes, choose)
    assert speech.finish_reason == facts["stop"]
    assert [block.speech for block in speech.blocks] == golden.arrays[f"{key}.frames_per_block"].tolist()
    assert same(speech.codes, golden.tensor(f"{key}.codes"))

    def stack(field: str) -> Tensor:
        return torch.stack([getattr(block, field) for block in speech.blocks])

    for field, array in (("rounds", "sem_rounds"), ("chosen", "argmax"), ("raw", "sem_raw"), ("semantic", "sem")):
        assert same(stack(field), golden.tensor(f"{key}.{array}")), array
    assert torch.allclose(stack("confidence"), golden.tensor(f"{key}.conf"), rtol=1e-3, atol=0)
    assert worst(stack("hidden"), golden.tensor(f"{key}.h_finish")) <= HIDDEN
    expected = golden.tensor(f"{key}.logit_margin")
    assert worst(torch.stack(margins).view_as(expected), expected) <= LOGITS
    gaps = torch.tensor([reveal_gaps(block) for block in speech.blocks])
    assert torch.allclose(gaps, golden.tensor(f"{key}.reveal_gap"), rtol=0, atol=2e-3)
    if ref_codes is not None:
        assert worst(speech.prompt_hidden, golden.tensor(f"{key}.h_prompt")) <= HIDDEN


def test_golden_cases_cover_every_way_to_stop(golden):
    facts = {case["name"]: case for case in golden.facts["e2e"]}
    assert set(facts) == set(CASES)
    assert facts["empty"]["frames_per_block"] == [0]
    assert facts["boundary_end"]["frames_per_block"][-1] == 0
    assert facts["max_blocks"]["stop"] == "max_blocks"
    assert {case["context_mode"] for case in facts.values()} == {"full", "semantic"}


# The original module on random models


ORACLE = Path(os.environ.get("VOXPORT_ORACLE", ROOT.parent / "shared/oracle")) / "omnifish_seed.py"
ID_NAMES = ["aa_1", "spk_x", "bb_2", "q0", "q7"]


class TemperatureOne:
    """torch.nn.functional whose softmax undoes the division by 1e-5: the agreed confidence of the chain decoder."""

    def __getattr__(self, name):
        return getattr(torch.nn.functional, name)

    @staticmethod
    def softmax(x, dim):
        return torch.softmax(x * 1e-5, dim)


def import_oracle(folder: Path, environment: dict, monkeypatch) -> types.ModuleType:
    """The original module beside its own list of names, read under `environment`."""
    if not ORACLE.is_file():
        pytest.skip(f"the original module is not at {ORACLE}; set VOXPORT_ORACLE to its folder")
    pytest.importorskip("transformers")
    shutil.copy(ORACLE, folder / "oracle.py")
    (folder / "id_vocab.json").write_text(json.dumps(ID_NAMES), encoding="utf-8")
    for name in ("ARCH", "DIM", "BLOCKS", "KV_HEADS"):
        monkeypatch.delenv(f"OMNIFISH_MTP_{name}", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(f"OMNIFISH_MTP_{name}", str(value))
    spec = importlib.util.spec_from_file_location(f"oracle_{folder.name}", folder / "oracle.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_body(rng: np.random.Generator) -> dict:
    heads = int(rng.choice([1, 2, 4]))
    return {
        "model_type": "qwen3", "vocab_size": 352, "hidden_size": int(rng.choice([24, 48])), "head_dim": 16,
        "num_hidden_layers": int(rng.integers(1, 4)), "num_key_value_heads": heads,
        "num_attention_heads": heads * int(rng.choice([1, 2, 3])), "intermediate_size": int(rng.choice([40, 64])),
        "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    }  # fmt: skip


def spread(tensors: dict) -> dict:
    """Random weights that keep states of size about 1 and decisions far apart; norms near 1."""
    generator = torch.Generator().manual_seed(len(tensors))
    made = {}
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim == 1:
            made[name] = 1 + 0.2 * noise
        else:
            table = "emb" in name or "revealed" in name
            made[name] = noise if table else 2 * noise / math.sqrt(tensor.shape[1])
    return made


@dataclasses.dataclass
class Pair:
    """The same random model twice: the original module and ours."""

    oracle: types.ModuleType
    theirs: torch.nn.Module
    ours: OmniFish


SEEDS = (0, 4, 6)  # no decision of theirs is closer than 5e-4, about 50 times float32 rounding


@pytest.fixture(params=[(kind, seed) for kind in ("axial", "axial_px", "chain") for seed in SEEDS], ids="{0[0]}-{0[1]}".format)
def pair(request, tmp_path, monkeypatch) -> Pair:
    kind, seed = request.param
    rng = np.random.default_rng(seed)
    size, layers, kv = int(rng.choice([32, 64])), int(rng.integers(1, 4)), int(rng.choice([1, 2, 4]))
    chain = {"ARCH": "chain", "DIM": size, "BLOCKS": layers, "KV_HEADS": kv}
    oracle = import_oracle(tmp_path, chain if kind == "chain" else {}, monkeypatch)
    oracle.AxialMTP = functools.partial(oracle.AxialMTP, dim=size, layers=layers, n_head=8, n_kv=kv, ffn=72)
    oracle.F = TemperatureOne()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(LOCAL / "axial_px" / name, tmp_path)
    config = {"llm_config": random_body(rng)}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    theirs, _ = oracle.OmniFish.from_config_dir(str(tmp_path), prompt_x=kind == "axial_px")
    theirs.load_state_dict(spread(theirs.state_dict()))
    return Pair(oracle, theirs.eval(), make_model(tmp_path, config, theirs.state_dict()))


def random_layout(seed: int, copies: int) -> tuple[Tensor, Tensor, Tensor]:
    """kind, block and position of a sequence: 7 context positions, then the copies of 11 frames in blocks of 4."""
    kinds = [ref.SEMANTIC, ref.FULL, ref.NOISY] if copies == 3 else [ref.SEMANTIC, ref.NOISY]
    kind = torch.cat([torch.zeros(7, dtype=torch.int64), *[torch.full((11,), k) for k in kinds]])
    frames = torch.arange(11).repeat(copies)
    return kind, torch.cat([torch.full((7,), -1), frames // 4]), torch.cat([torch.arange(7), 7 + frames])


def test_random_bodies_agree_with_the_original(pair):
    rng = np.random.default_rng(5)
    for copies in (3, 2):
        kind, block, positions = random_layout(copies, copies)
        ids = torch.from_numpy(rng.integers(0, 1024, (NUM_CODEBOOKS, len(kind))))
        ids[0, :7] = torch.tensor([pair.ours.lang_start, 258, 352, 357, 355, 20, 999])  # language, speakers, recordings, text
        ids[:, -11:][:, ::2] = MASK_ID
        audio, mask = kind > 0, block_mask(kind, block)
        assert torch.equal(mask[None, None], pair.oracle.block_attention(kind[None], block[None]))
        expected = pair.theirs.embed(ids[None], audio[None])[0]
        found = pair.ours.embed(ids, audio)
        assert worst(found, expected) <= EMBED
        expected = pair.theirs.backbone(ids[None], audio[None], mask[None, None], positions[None])[0]
        hidden, _ = pair.ours.hidden_states(found, None, positions, mask)
        assert worst(hidden, expected) <= HIDDEN
        assert worst(pair.ours.semantic_logits(hidden), pair.theirs.semantic_head(expected)) <= LOGITS


def oracle_codes(pair: Pair, h: Tensor, semantic: Tensor, prompt: Tensor, size: int) -> Tensor:
    """What the original's decode_block makes of states h [P + T, D] after the prompt's codes [N, P]."""
    decoder, count = pair.theirs.mtp, prompt.shape[1]
    state = decoder.new_state(len(h), h.shape[1], h.device, h.dtype)
    state["states"][0][0], state["codes"][:, :count], state["codes"][0, count:] = h, prompt, semantic
    if count:
        decoder.prime(state, count)
    for low in range(count, len(h), size):
        decoder.decode_block(state, low, min(low + size, len(h)), size, prefix=count)
    return state["codes"][:, count:]


@pytest.mark.parametrize(("prompt", "frames"), [(0, 9), (3, 10), (2, 3)])
def test_random_residual_decoders_agree_with_the_original(pair, prompt, frames):
    size, rng = 4, torch.Generator().manual_seed(frames)
    h = torch.randn(prompt + frames, pair.ours.config.hidden_size, generator=rng)
    semantic = torch.randint(0, 4096, (frames,), generator=rng)
    prompt_codes = torch.randint(0, 1024, (NUM_CODEBOOKS, prompt), generator=rng)
    expected = oracle_codes(pair, h, semantic, prompt_codes, size)
    decoder = pair.ours.residual_decoder(4)
    decoder.prime(h[:prompt], prompt_codes)
    blocks = zip(h[prompt:].split(size), semantic.split(size))
    assert same(torch.cat([decoder.decode(*block) for block in blocks], dim=1), expected)


def test_awkward_prompts_agree_with_the_original(tmp_path, monkeypatch):
    oracle = import_oracle(tmp_path, {}, monkeypatch)
    turns = "<|quad_start|>bb_2<|quad_end|>hi <|quad_start|>cc_1<|quad_end|>"
    texts = ["speaker:aa_1 quality:q7", "speaker:spk_xquality:q0", turns, "speaker:bb_2speaker:aa_1", "quality:q07 é", ""]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(LOCAL / "axial_px")
    _, encode = make_encode(LOCAL / "axial_px")
    for text in texts:
        expected = oracle.encode_text(tokenizer, text, 352)[0].tolist()
        assert ref.encode_text(encode, text, ID_NAMES, 352) == expected, text


# The parts alone


def test_cached_axial_decoding_equals_the_whole_grid():
    """Every code is the argmax of the one-shot logits that are shown the codes: no cache drops or shifts anything."""
    for prompt_cross in (False, True):
        config = ref.AxialConfig(size=32, num_layers=2, ffn=40, num_kv_heads=2, prompt_cross=prompt_cross)
        w = spread({name: torch.empty(shape) for name, shape in config.shapes(24).items()})
        for prompt in (0, 3):
            rng = torch.Generator().manual_seed(prompt)
            h, semantic = torch.randn(prompt + 10, 24, generator=rng), torch.randint(0, 4096, (10,), generator=rng)
            prompt_codes = torch.randint(0, 1024, (NUM_CODEBOOKS, prompt), generator=rng)
            decoder = ref.AxialDecoder(config, w)
            decoder.prime(h[:prompt], prompt_codes)
            codes = [decoder.decode(*block) for block in zip(h[prompt:].split(4), semantic.split(4))]
            codes = torch.cat([prompt_codes, *codes], dim=1)
            logits = ref.axial_grid(config, w, h, codes, block_numbers(prompt, 10, 4))[:, prompt:]
            assert same(codes[1:, prompt:], logits.argmax(-1))


def chain_recomputed(config: ref.ChainConfig, w: dict, h: Tensor, semantic: Tensor, size: int) -> Tensor:
    """The chain decoder without caches: every round and every clean pass runs over all frames so far, under masks."""
    codes = torch.cat([semantic[None], torch.zeros(NUM_CODEBOOKS - 1, len(h), dtype=torch.int64)])
    block, states = block_numbers(0, len(h), size), [h, *[torch.zeros(len(h), config.size)] * 9]
    states = [state.clone() for state in states]
    for low in range(0, len(h), size):
        high, now = min(low + size, len(h)), slice(low, min(low + size, len(h)))
        visible = block[None, :high] <= block[:high, None]
        for k in range(NUM_CODEBOOKS - 1):
            link, positions, none = ref.scoped(w, f"layers.{k}."), torch.arange(high), [None] * config.num_layers
            codes[k + 1, now] = 1024
            for step in range(4):
                args = states[k][:high], codes[k, :high], codes[k + 1, :high], positions, none, visible
                logits = ref.chain_link(config, link, *args)[1][now]
                chosen = logits.argmax(-1)
                confidence, keep = ref.confidence_of(logits, chosen), ref.still_masked(high - low, step, 4)
                codes[k + 1, now] = ref.reveal(codes[k + 1, now], 1024, chosen, confidence, keep)
            args = states[k][:high], codes[k, :high], codes[k + 1, :high], positions, none, visible
            states[k + 1][now] = ref.chain_link(config, link, *args)[0][now]
    return codes


def test_cached_chain_decoding_equals_recomputation():
    config = ref.ChainConfig(size=32, num_layers=2, ffn=40, num_kv_heads=2)
    w = spread({name: torch.empty(shape) for name, shape in config.shapes(24).items()})
    rng = torch.Generator().manual_seed(1)
    h, semantic = torch.randn(11, 24, generator=rng), torch.randint(0, 4096, (11,), generator=rng)
    decoder = ref.ChainDecoder(config, w, rounds=4)
    decoder.prime(h[:0], torch.empty(NUM_CODEBOOKS, 0, dtype=torch.int64))
    codes = [decoder.decode(*block) for block in zip(h.split(4), semantic.split(4))]
    assert same(torch.cat(codes, dim=1), chain_recomputed(config, w, h, semantic, 4))


def test_without_a_prompt_the_cross_attention_adds_nothing():
    config = ref.AxialConfig(size=32, num_layers=1, ffn=40, num_kv_heads=2, prompt_cross=True)
    w = ref.scoped(spread({name: torch.empty(shape) for name, shape in config.shapes(24).items()}), "px.0.")
    grid = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(0))
    assert same(ref.prompt_attention(config, w, grid, ref.prompt_keys(config, w, grid[:0])), grid)
    assert float((ref.prompt_attention(config, w, grid, ref.prompt_keys(config, w, grid[:1])) - grid).abs().max()) > 0.1


def test_a_block_is_revealed_along_a_cosine():
    assert [ref.still_masked(8, step, 4) for step in range(4)] == [7, 5, 3, 0]
    assert all(ref.still_masked(size, steps - 1, steps) == 0 for size in range(1, 65) for steps in range(1, 33))


def test_the_most_confident_frames_are_revealed_and_ties_go_to_the_earlier():
    ids, chosen = torch.tensor([MASK_ID, 7, MASK_ID, MASK_ID]), torch.tensor([1, 2, 3, 4])
    confidence = torch.tensor([0.5, 0.9, 0.5, 0.8])
    assert ref.reveal(ids, MASK_ID, chosen, confidence, 2).tolist() == [MASK_ID, 7, MASK_ID, 4]
    assert ref.reveal(ids, MASK_ID, chosen, confidence, 1).tolist() == [1, 7, MASK_ID, 4]
    assert ref.reveal(ids, MASK_ID, chosen, confidence, 3).tolist() == ids.tolist()
    assert ref.reveal(ids, MASK_ID, chosen, confidence, 3, threshold=0.6).tolist() == [MASK_ID, 7, MASK_ID, 4]
    assert ref.reveal(ids, MASK_ID, chosen, confidence, 0).tolist() == [1, 7, 3, 4]


@pytest.mark.parametrize(
    ("ids", "closed", "speech"),
    [
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 4097, 3], [1, 4097, 4098], 1),
        ([1, 4100, 3], [1, 4097, 4098], 1),
        ([4097, 5, 4097], [4097, 4098, 4099], 0),
        ([4104] + [9] * 9, [4097, *range(4098, 4105), 4098, 4099], 0),
        ([4095, 4096 + 1], [4095, 4097], 1),
    ],
)
def test_the_first_end_or_pad_closes_a_block(ids, closed, speech):
    found, count = ref.close_block(torch.tensor(ids))
    assert (found.tolist(), count) == (closed, speech)


def test_a_threshold_can_end_the_rounds_early():
    golden = load(golden_folder("axial_px"))
    _, past = golden.model.hidden_states(golden.model.embed_text(torch.tensor(golden.facts["e2e"][0]["input_ids"])))
    block = golden.model.denoise(past, dataclasses.replace(golden.recipe, threshold=0.0), ref.greedy)
    assert len(block.rounds) == 1
    assert same(block.raw, block.chosen[0])


# What is refused


def a_config(**changes) -> tuple[dict, dict]:
    """A valid config.json and the shapes of its tensors, the named fields of `llm_config` changed."""
    folder = LOCAL / "axial_px"
    config = read_json(folder / "config.json")
    shapes = load(golden_folder("axial_px")).model.config.shapes()
    return config | {"llm_config": config["llm_config"] | changes}, shapes


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model_type": "llama"}, ValueError), ({"attention_bias": True}, NotImplementedError),
        ({"use_sliding_window": True}, NotImplementedError), ({"hidden_act": "gelu"}, NotImplementedError),
        ({"rope_scaling": {"type": "yarn"}}, NotImplementedError), ({"num_hidden_layers": 4}, ValueError),
        ({"hidden_size": 64}, ValueError), ({"rope_parameters": {"rope_type": "yarn"}}, ValueError),
    ],
)  # fmt: skip
def test_configs_that_are_not_supported_are_refused(changes, error):
    with pytest.raises(error):
        OmniFishConfig.from_dict(*a_config(**changes))


def test_checkpoints_that_are_not_whole_are_refused():
    config, shapes = a_config()
    OmniFishConfig.from_dict(config, shapes)
    for change, message in (
        ({ref.AUDIO_EMBEDDING: (10 * 4097, 32)}, "cannot stop"),
        ({"mtp.lvl.1.wq.weight": (64, 32)}, "mtp.lvl.1.wq.weight"),
        ({"mtp.lvl.0.wkv.weight": (24, 64)}, "whole heads"),
        ({"surplus": (1,)}, "unexpected"),
    ):
        with pytest.raises(ValueError, match=message):
            OmniFishConfig.from_dict(config, shapes | change)
    with pytest.raises(ValueError, match="missing"):
        OmniFishConfig.from_dict(config, {name: shape for name, shape in shapes.items() if name != "mtp.heads.8.weight"})


def test_without_its_tensors_there_is_no_prompt_cross_attention():
    config, shapes = a_config()
    shapes = {name: shape for name, shape in shapes.items() if ".px." not in name}
    assert not OmniFishConfig.from_dict(config, shapes).residual.prompt_cross


def test_what_no_weight_tells_must_be_told():
    side = read_json(LOCAL / "axial_px/omnifish.json")
    for name in ("block_size", "context_mode", "steps"):
        with pytest.raises(KeyError, match=name):
            Recipe.from_dict({key: value for key, value in side.items() if key != name})
    for change, error in (
        ({"context_mode": "both"}, ValueError), ({"block_size": 0}, ValueError), ({"steps": 5}, ValueError),
        ({"ctx_frames": 8}, NotImplementedError), ({"generation": {"schedule": "linear"}}, NotImplementedError),
        ({"generation": {"guidance_scale": 2}}, NotImplementedError),
    ):  # fmt: skip
        with pytest.raises(error):
            Recipe.from_dict(side | change)


def test_names_must_fit_the_tables():
    config = load(golden_folder("axial_px")).model.config
    good = ["a_1", "b_1", "c_1", "d_1", "e_1", "q1", "q2", "q3"]
    ref.check_names(good, config)
    for bad in (good[:-1], [*good[:4], "q0", *good[5:]], ["q9", *good[1:]], [*good[:4], "a_1", *good[5:]], [*good, "f_1"]):
        with pytest.raises(ValueError, match="id names"):
            ref.check_names(bad, config)


def test_a_checkpoint_without_recordings_speaks_text_and_speakers():
    golden = load(golden_folder("axial_px"))
    w = dict(golden.model.tensors) | {"q_embeddings.weight": torch.empty(0, 64)}
    w = {name: tensor.float() for name, tensor in w.items() if not name.startswith(("llm.layers", "mtp."))}
    rows, languages = golden.model.config.text_vocab_size, golden.model.languages
    ids = torch.tensor([5, rows, rows + 4, rows + 7])
    found = ref.text_embed(w, ids, golden.model.lang_start, languages)
    expected = golden.model.embed_text(torch.tensor([5, rows, rows + 4, rows + 4]))
    assert same(found, expected)


def test_bad_requests_are_refused_before_the_work():
    golden = load(golden_folder("axial_px"))
    model, recipe = golden.model, golden.recipe
    with pytest.raises(ValueError, match="positions"):
        model.generate([1, 2], recipe, 4096 // recipe.block_size)
    with pytest.raises(ValueError, match="max_blocks"):
        model.generate([1, 2], recipe, 0)
    with pytest.raises(ValueError, match="codebooks"):
        model.generate([1, 2], recipe, 1, torch.zeros(8, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="audio ids"):
        model.generate([1, 2], recipe, 1, torch.full((10, 3), 4105))


def test_wrapped_state_dicts_are_unwrapped():
    one = torch.ones(1)
    for state in ({"a.b": one}, {"model": {"module.a.b": one}}, {"state_dict": {"_orig_mod.module.a.b": one}},
                  {"ema": {"a.b": one}, "step": 3}):  # fmt: skip
        assert list(ref.plain_names(state)) == ["a.b"]
