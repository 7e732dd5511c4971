"""Splitting long text: nothing is lost or doubled, no part is too long, and cuts fall where a reader would pause."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_fakes import CONTROL, make_tokenizer

from voxport.run.longtext import (
    PARAGRAPH_PAUSE,
    PHRASE_PAUSE,
    SENTENCE_PAUSE,
    Part,
    is_speakable,
    quiet_between,
    sentences,
    split_text,
)
from voxport.run.text import TAG, encode

TOKENIZER = make_tokenizer()
MOOD, PAUSE, LAUGH = CONTROL[0], CONTROL[2], CONTROL[4]


def count(text):
    return len(encode(TOKENIZER, text))


def squeeze(text):
    return "".join(text.split())


def texts(parts):
    return [part.text for part in parts]


WORDS = st.sampled_from(
    ["Hello", "there", "Mr.", "3.14", "1,000", "https://a.example/b?c=d.e", "e.g.", "(no)", '"Go!"', "U.S.", "you", "x" * 30]
    + ["你好，世界。", "今天天气很好！", "...", "?!", "\n\n", "\n", "—", "end.", "Why?", "ok;", "well,", *CONTROL]
)  # fmt: skip
PROSE = st.lists(st.one_of(WORDS, st.text(max_size=8)), max_size=40).map(" ".join)


@settings(max_examples=300, deadline=None)
@given(PROSE, st.integers(8, 120))
def test_parts_joined_are_the_text_and_none_is_over_budget(text, budget):
    parts = split_text(text, count, budget)
    assert squeeze("".join(texts(parts))) == squeeze(text)
    for part in parts:
        assert part.text == part.text.strip() and part.text
        # only what cannot be spoken alone, and is thus joined to its neighbour, may go over the budget
        assert count(part.text) <= budget or count(letters_of(part.text)) <= budget < len(part.text.encode())


def letters_of(text):
    """What is left without tags and all else that is no letter or digit."""
    return "".join(character for character in TAG.sub("", text) if character.isalnum())


@settings(max_examples=300, deadline=None)
@given(PROSE, st.integers(8, 60))
def test_no_tag_is_cut_and_every_part_can_be_spoken(text, budget):
    parts = split_text(text, count, budget)
    assert [tag for part in parts for tag in TAG.findall(part.text)] == TAG.findall(text)
    if is_speakable(text):
        assert all(is_speakable(part.text) for part in parts)


@settings(max_examples=200, deadline=None)
@given(PROSE)
def test_sentences_joined_are_the_text_to_the_letter(text):
    assert "".join(sentences(text)) == text


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("One. Two! Three? Four… Five", 5),
        ("Mr. Smith met Dr. Jones. They spoke.", 2),
        ("It costs 3.14 dollars. No. 5 is out.", 2),
        ("See https://a.example/b.c?d=e. Then go.", 2),
        ('"Go!" he said. "Why?" she asked.', 2),
        ("J. R. Tolkien wrote. He read.", 2),
        ("Apples, e.g. red ones. Pears.", 2),
        ("The U.S. Army came. It left.", 2),
        ("1. First item here. 2. Second item.", 2),
        ("He left (at last.) She stayed.", 2),
        ("你好。今天很好！“走吧。”他说", 4),
        ("A paragraph\n\nAnother\nwrapped line", 2),
        (f"It ends. {MOOD}It begins.", 2),
        ("Wait... what? yes. really", 1),
        ("", 0),
        ("no end", 1),
    ],
)
def test_sentences_end_where_a_reader_would_say(text, wanted):
    found = list(sentences(text))
    assert len(found) == wanted, found


def test_sentences_are_gathered_up_to_the_budget():
    text = "One two three. Four five six. Seven eight nine."
    assert texts(split_text(text, count, 30)) == ["One two three. Four five six.", "Seven eight nine."]
    assert texts(split_text(text, count, 100)) == [text]


def test_a_long_sentence_is_cut_at_phrases_and_its_tags_are_carried():
    text = f"{MOOD}First comes this, then comes that, and last of all comes {PAUSE} the end. Next."
    parts = split_text(text, count, 26)
    assert [part.carried for part in parts] == ["", *[MOOD] * (len(parts) - 2), ""]
    assert parts[0].text == f"{MOOD}First comes this," and parts[1].text.startswith("then comes that,")
    assert parts[0].pause == PHRASE_PAUSE and parts[-2].pause == SENTENCE_PAUSE
    assert squeeze("".join(texts(parts))) == squeeze(text)


def test_tags_with_a_place_of_their_own_are_not_carried():
    parts = split_text(f"{LAUGH}Haha this one is far too long to be spoken at once", count, 20)
    assert len(parts) > 2 and not any(part.carried for part in parts)


def test_text_without_capitals_is_still_cut_behind_its_marks():
    assert texts(split_text("hello there you. how are you now? fine.", count, 20)) == [
        "hello there you.", "how are you now?", "fine.",
    ]  # fmt: skip


def test_a_number_and_an_address_stay_whole():
    parts = split_text("Call 1,234,567.89 now or write to https://a.example/b?c=d, yes please do", count, 26)
    joined = texts(parts)
    assert any("1,234,567.89" in text for text in joined) and any("https://a.example/b?c=d" in text for text in joined)


def test_text_without_spaces_is_cut_between_characters():
    parts = split_text("这是一段没有标点的很长的文字" * 20, count, 40)
    assert max(count(part.text) for part in parts) <= 40
    assert "".join(texts(parts)) == "这是一段没有标点的很长的文字" * 20


def test_pauses_tell_sentences_from_paragraphs():
    parts = split_text("One is here now.\n\nTwo is here now. Three is here.", count, 18)
    assert [part.pause for part in parts] == [PARAGRAPH_PAUSE, SENTENCE_PAUSE, SENTENCE_PAUSE]


@pytest.mark.parametrize(
    "piece", ["The quick brown fox, they say, jumps. ", "很长的中文。", "word ", "x", "a. ", f"{MOOD}Hi. ", "\n\n", "1.5 "]
)
def test_a_hundred_thousand_characters_take_less_than_a_second(piece):
    text = piece * (100_000 // len(piece))
    started = time.process_time()
    parts = split_text(text, lambda text: len(text.encode()) // 4 + 1)
    assert time.process_time() - started < 1
    assert squeeze("".join(texts(parts))) == squeeze(text)


def test_pauses_are_topped_up_not_added():
    loud = np.ones(50, np.float32)
    padded = np.concatenate([np.zeros(30, np.float32), loud, np.zeros(20, np.float32)])
    assert len(quiet_between(padded, padded, 0.1, 1000)) == 50
    assert len(quiet_between(padded, loud, 0.01, 1000)) == 0
    assert len(quiet_between(loud, loud, 0.1, 1000)) == 100
    assert len(quiet_between(loud, np.zeros(30, np.float32), 0.1, 1000)) == 70
    assert not quiet_between(loud, loud, 0.1, 1000).any()


def test_a_part_says_what_the_model_is_given():
    assert Part("so on", MOOD).spoken == f"{MOOD}so on"
