"""The demo's tokenizer and the ways in which its sentences are written."""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LAYOUT = Path(__file__).with_name("layout")
WORDS = Path(__file__).with_name("words.txt")
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
BASE_TOKENS = 1024           # 256 bytes and the merges that make every vocabulary word one token
# The 22 tokens of the Qwen base tokenizer that precede the 62 of Higgs in `extra_special_tokens`.
QWEN_TOKENS = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|>
<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> <tool_call>
</tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>""".split()
PLAIN_TOKENS = {t for t in QWEN_TOKENS if "tool_call" in t or "fim" in t or t in ("<|repo_name|>", "<|file_sep|>")}


def vocabulary():
    return WORDS.read_text(encoding="utf-8").split()


def tokenizer_config():
    return json.loads((LAYOUT / "tokenizer_config.json").read_text(encoding="utf-8"))


def make_tokenizer(words):
    """Byte-level BPE as in the real tokenizer.json; each word is one token, with a space or a capital letter or both."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    forms = [space + form for w in words for space in ("", " ") for form in (w, w.capitalize())]
    trainer = trainers.BpeTrainer(vocab_size=BASE_TOKENS, min_frequency=1, show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(forms, trainer)
    names = QWEN_TOKENS + tokenizer_config()["extra_special_tokens"]
    tokenizer.add_tokens([AddedToken(n, normalized=False, special=n not in PLAIN_TOKENS) for n in names])
    return tokenizer


def write_sentence(words, rng):
    """One of the ways in which people type a sentence of these words. -> str"""
    style = rng.choice(["plain", "period", "commas", "titles"], p=[0.4, 0.35, 0.2, 0.05])
    if style == "plain":
        return " ".join(words)
    if style == "titles":
        return " ".join(w.capitalize() for w in words)
    marks = ["," if style == "commas" and rng.random() < 0.4 else "" for _ in words[1:]]
    marks.append(rng.choice([".", "!", "?", ""], p=[0.8, 0.05, 0.05, 0.1]))
    first, *rest = [w + m for w, m in zip(words, marks)]
    return " ".join([first.capitalize(), *rest])
