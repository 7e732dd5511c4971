"""Write a checkpoint folder in the layout of bosonai/higgs-audio-v3-tts-4b."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from _ref.higgs import CODEC_PREFIX
from codec import codec_config
from text import LAYOUT, tokenizer_config

SHARDS = 2


def write_json(path, content):
    Path(path).write_text(json.dumps(content, indent=2, ensure_ascii=True) + "\n", encoding="utf-8")


def model_config(body, end_of_text):
    """config.json with all keys of the real one and the sizes of `body` (a HiggsConfig). -> dict"""
    config = json.loads((LAYOUT / "config.json").read_text(encoding="utf-8"))
    config.update(_hidden_size=body.hidden_size, _vocab_size=body.text_vocab_size)
    config["audio_encoder_config"].update(out_dim=body.hidden_size, num_codebooks=body.num_codebooks,
                                          vocab_size=body.audio_vocab_size)
    config["text_config"].update(
        _name_or_path="", bos_token_id=end_of_text, eos_token_id=end_of_text, head_dim=body.head_dim,
        hidden_size=body.hidden_size, intermediate_size=body.intermediate_size,
        layer_types=["full_attention"] * body.num_layers, max_position_embeddings=body.max_position_embeddings,
        max_window_layers=body.num_layers, num_attention_heads=body.num_heads, num_hidden_layers=body.num_layers,
        num_key_value_heads=body.num_kv_heads, vocab_size=body.text_vocab_size)
    return config


def split_shards(tensors):
    """Names in order, cut where half of the bytes are reached. -> list of name lists"""
    total, shards, filled = sum(t.nbytes for t in tensors.values()), [[] for _ in range(SHARDS)], 0
    for name in sorted(tensors):
        shards[min(SHARDS - 1, filled * SHARDS // total)].append(name)
        filled += tensors[name].nbytes
    return shards


def write_tensors(folder, tensors):
    """bf16 shards and their index."""
    shards, weight_map = split_shards(tensors), {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({n: tensors[n].contiguous() for n in names}, str(folder / file), metadata={"format": "pt"})
        (folder / file).chmod(0o644)
        weight_map.update({n: file for n in names})
    total = sum(t.nbytes for t in tensors.values())
    write_json(folder / "model.safetensors.index.json",
               {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def write_checkpoint(folder, body_config, body, plan, codec, tokenizer, texts):
    """The whole folder, written beside its place and moved there. body, codec: {name: tensor}; texts: sentences to judge by"""
    folder = Path(folder)
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    tensors = {n: t.to(torch.bfloat16) for n, t in body.items()} | {CODEC_PREFIX + n: t for n, t in codec.items()}
    write_tensors(fresh, tensors)
    write_json(fresh / "config.json", model_config(body_config, tokenizer.token_to_id("<|endoftext|>")))
    write_json(fresh / "codec_config.json", codec_config(plan))
    write_json(fresh / "tokenizer_config.json", tokenizer_config())
    tokenizer.save(str(fresh / "tokenizer.json"))
    shutil.copyfile(LAYOUT / "LICENSE", fresh / "LICENSE")
    (fresh / "eval_texts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


def folder_bytes(*folders):
    return sum(f.stat().st_size for folder in folders for f in Path(folder).rglob("*") if f.is_file())
