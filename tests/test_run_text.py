"""What may be spoken, and the ids it becomes."""

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_fakes import CONTROL, STRUCTURE, make_manifest, make_tokenizer
from tokenizers import Tokenizer

from voxport.errors import UserError
from voxport.manifest import FileRecord, Tokens, record_file
from voxport.run.text import LONGEST_TEXT, build_prompt, check_script, encode, frame_cap, load_tokenizer, most_frames

HERE = Path(__file__).parent
PROMPTS = json.loads((HERE / "golden/higgs/prompts.json").read_text(encoding="utf-8"))
FULL_SIZE = Path(os.environ.get("VOXPORT_GOLDEN", HERE.parents[1] / "shared/golden")) / "higgs/tokenizer/tokenizer.json"
MANIFEST = make_manifest()
TOKENIZER = make_tokenizer()
SPECIALS = ("<|tts|>", "<|text|>", "<|audio|>", "<|ref_audio|>", "<|ref_text|>")


@pytest.fixture(scope="module")
def full_size():
    if not FULL_SIZE.is_file():
        pytest.skip(f"the full-size tokenizer is not at {FULL_SIZE}; set VOXPORT_GOLDEN to the golden folder")
    return Tokenizer.from_file(str(FULL_SIZE))


@pytest.mark.parametrize("case", PROMPTS["cases"], ids=lambda case: case["name"])
def test_prompts_equal_the_golden_ids_of_the_full_size_tokenizer(case, full_size):
    tokens = Tokens(*(PROMPTS["special_ids"][name] for name in SPECIALS), PROMPTS["placeholder_id"])
    text, ref_text, num_rows = case["text"], case["ref_text"], case["num_ref_rows"]
    assert build_prompt(full_size, tokens, text).ids.tolist() == case["zero_shot"]
    clone = build_prompt(full_size, tokens, text, ref_text, num_rows)
    assert clone.ids.tolist() == case["clone_with_transcript"]
    assert list(clone.ref_span) == case["ref_span_with_transcript"]
    bare = build_prompt(full_size, tokens, text, None, num_rows)
    assert bare.ids.tolist() == case["clone_without_transcript"]
    assert list(bare.ref_span) == case["ref_span_without_transcript"]


def test_golden_texts_of_the_checkpoint_become_its_golden_ids():
    folder = HERE / "golden/higgs/ckpt_tiny"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = Tokens(*(tokenizer.token_to_id(name) for name in SPECIALS), -100)
    facts = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    with np.load(folder / "expected.npz") as golden:
        num_rows = len(golden["ref_rows"])
        for case in facts["cases"]:
            prompt = build_prompt(tokenizer, tokens, case["text"], case["ref_text"], num_rows if case["clone"] else 0)
            assert prompt.ids.tolist() == golden[f"ids__{case['name']}"].tolist()
            assert (prompt.ref_span and list(prompt.ref_span)) == case["ref_span"]


def test_a_transcript_is_left_out_where_the_tokenizer_has_no_token_for_it():
    old = dataclasses.replace(MANIFEST.tokens, ref_text=None)
    with_text = build_prompt(TOKENIZER, old, "Hi", "transcript", 4)
    assert with_text.ids.tolist() == build_prompt(TOKENIZER, old, "Hi", None, 4).ids.tolist()


def test_a_transcript_without_reference_rows_changes_nothing():
    assert (
        build_prompt(TOKENIZER, MANIFEST.tokens, "Hi", "transcript").ids.tolist()
        == build_prompt(TOKENIZER, MANIFEST.tokens, "Hi").ids.tolist()
    )


def test_spaces_and_line_breaks_reach_the_tokenizer_untouched():
    text = "  a\r\n\tb <|prosody:pause|> c\u200b\u200d \n"
    script = check_script(text, "text", MANIFEST)
    assert script.text == text
    assert TOKENIZER.decode(encode(TOKENIZER, script.text), skip_special_tokens=False) == text


WORDLESS = [
    "",
    " ",
    "\n",
    "\t \r\n",
    "\u200b",
    "\u200d\u2060",
    "\ufeff",
    "...",
    "?!",
    "—",
    "«»",
    "🙂",
    "👍🏽 👨‍👩‍👧",
    "❤️",
    "<|emotion:anger|>",
    "<|emotion:anger|> <|prosody:pause|>...",
    "\u0301",
    "*** ---",
    "\x07",
    "、。",
]


@pytest.mark.parametrize("text", WORDLESS, ids=ascii)
def test_text_without_a_letter_or_digit_is_refused(text):
    with pytest.raises(UserError, match="no letter or digit"):
        check_script(text, "text", MANIFEST)


@pytest.mark.parametrize("text", ["a", "7", "你好", "नमस्ते", "٣", "<|emotion:anger|>no", "½", "\ufeffword"], ids=ascii)
def test_one_letter_or_digit_of_any_script_is_enough(text):
    assert check_script(text, "text", MANIFEST).text == text


def test_a_text_without_end_is_refused_before_it_is_cut():
    assert check_script("a" * LONGEST_TEXT, "text", MANIFEST).spoken
    with pytest.raises(UserError, match="text has 1000001 characters, more than 1000000"):
        check_script("a" * (LONGEST_TEXT + 1), "text", MANIFEST)


def test_control_characters_are_told_and_stay():
    script = check_script("a\x1b[31mred\x07 \t\r\n", "text", MANIFEST)
    assert script.text == "a\x1b[31mred\x07 \t\r\n"
    assert script.warnings == ("text holds control characters, which the model gets as they are: U+001B U+0007",)
    assert check_script("line\r\nline\ttab\u200b", "text", MANIFEST).warnings == ()


@pytest.mark.parametrize("text", ["\0", "a\0b", "bad \udc80 bytes", b"bytes", None])
def test_what_is_not_text_is_refused(text):
    with pytest.raises(UserError, match="NUL|Unicode|must be text"):
        check_script(text, "--text", MANIFEST)


@pytest.mark.parametrize(
    "tag, nearest",
    [
        ("<|Emotion:anger|>", "<|emotion:anger|>"),
        ("<| emotion:anger |>", "<|emotion:anger|>"),
        ("<|prosody:pause_long|>", "<|prosody:long_pause|>"),
        ("<|sfx:laugh|>", "<|sfx:laughter|>"),
        ("<|emotion:happy|>", "<|emotion:"),
    ],
)
def test_an_unknown_tag_is_refused_with_the_nearest_valid_one(tag, nearest):
    with pytest.raises(UserError) as error:
        check_script(f"Hello {tag} there", "text", MANIFEST)
    assert repr(tag) in str(error.value) and nearest in str(error.value)


def test_unknown_tags_can_be_removed_or_kept_with_a_warning():
    text = "Hello <|emotion:calm|>there <|prosody:pause|> you"
    stripped = check_script(text, "text", MANIFEST, "strip")
    assert stripped.text == "Hello there <|prosody:pause|> you"
    kept = check_script(text, "text", MANIFEST, "keep")
    assert kept.text == text
    assert all("<|emotion:calm|>" in script.warnings[0] for script in (stripped, kept))


def test_an_unknown_policy_is_refused():
    with pytest.raises(UserError, match="--tags"):
        check_script("Hello", "text", MANIFEST, "ignore")


@pytest.mark.parametrize("policy", ["error", "strip", "keep"])
@pytest.mark.parametrize("token", STRUCTURE)
def test_structural_tokens_are_refused_under_every_policy(token, policy):
    with pytest.raises(UserError, match="cannot be spoken|unknown tag"):
        check_script(f"Hello {token} world", "text", MANIFEST, policy)


def test_removing_a_tag_cannot_make_a_structural_one():
    with pytest.raises(UserError, match="cannot be spoken"):
        check_script("Hello <|au<|x|>dio|> world", "text", MANIFEST, "strip")
    nested = check_script("Hello <|y<|x|>z|> world", "text", MANIFEST, "strip")
    assert nested.text == "Hello  world"


PIECES = st.sampled_from(
    [*CONTROL, *STRUCTURE, "<|", "|>", "<|x|>", "<|tts", "audio|>", "a", " ", "<tool_", "call>", "你", "|", "<", ">"]
)


@given(st.lists(PIECES, max_size=12), st.lists(PIECES, max_size=6), st.sampled_from(["error", "strip", "keep"]))
def test_no_accepted_text_adds_a_structural_id(text, ref_text, policy):
    try:
        text = check_script("".join(text), "text", MANIFEST, policy).text
        ref_text = check_script("".join(ref_text), "ref", MANIFEST, policy).text
    except UserError:
        return
    structural = set(MANIFEST.structural_tokens.values())
    prompt = build_prompt(TOKENIZER, MANIFEST.tokens, text, ref_text, 3)
    tokens = MANIFEST.tokens
    assert [i for i in prompt.ids if i in structural] == [
        tokens.tts,
        tokens.ref_text,
        tokens.ref_audio,
        tokens.text,
        tokens.audio,
    ]
    assert (prompt.ids == tokens.placeholder).sum() == 3
    assert (prompt.ids[slice(*prompt.ref_span)] == tokens.placeholder).all()


def test_the_frame_cap_follows_its_documented_rule():
    limits, rule = MANIFEST.limits, MANIFEST.limits
    cap = lambda text, lim=limits: frame_cap(check_script(text, "text", MANIFEST), lim, 3)  # noqa: E731
    roomy = dataclasses.replace(limits, max_rows=10_000)
    assert cap("abc d", roomy) == rule.cap_base_frames + 5 * rule.cap_frames_per_char
    assert cap("你好 7", roomy) == rule.cap_base_frames + 3 * rule.cap_frames_per_wide_char + rule.cap_frames_per_char
    assert cap("a<|prosody:pause|>", roomy) == rule.cap_base_frames + rule.cap_frames_per_char + rule.cap_frames_per_tag
    assert cap("word " * 1000) == most_frames(limits, 3) == limits.max_rows - 2


def write_tokenizer(folder, manifest=MANIFEST):
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return dataclasses.replace(manifest, files={"tokenizer.json": record_file(folder / "tokenizer.json")})


def test_a_tokenizer_is_loaded_and_its_ids_compared_with_the_manifest(tmp_path):
    manifest = write_tokenizer(tmp_path)
    assert encode(load_tokenizer(tmp_path, manifest), "<|audio|>") == [manifest.tokens.audio]
    wrong = dataclasses.replace(manifest, control_tags=manifest.control_tags | {"<|emotion:anger|>": 5})
    with pytest.raises(UserError, match="emotion:anger.*has id"):
        load_tokenizer(tmp_path, wrong)


def test_a_changed_broken_or_unlisted_tokenizer_is_refused_by_name(tmp_path):
    manifest = write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    with pytest.raises(UserError, match="lists no tokenizer.json"):
        load_tokenizer(tmp_path, MANIFEST)
    path.write_bytes(path.read_bytes().replace(b"emotion:anger", b"emotion:angel"))
    with pytest.raises(UserError, match="tokenizer.json was changed"):
        load_tokenizer(tmp_path, manifest)
    path.write_bytes(b"{}")
    with pytest.raises(UserError, match="cannot be read as a tokenizer"):
        load_tokenizer(tmp_path, dataclasses.replace(manifest, files={"tokenizer.json": record_file(path)}))
    with pytest.raises(UserError, match="tokenizer.json is missing"):
        load_tokenizer(
            tmp_path / "nowhere", dataclasses.replace(manifest, files={"tokenizer.json": FileRecord(1, "0" * 64)})
        )
