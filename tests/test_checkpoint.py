"""Reading a checkpoint: every layout that is out there is read or refused, and a refusal names the file and the key."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import (
    INDEX,
    MASK_EMBED,
    SINGLE,
    copy_configs,
    drop_token,
    edit_json,
    golden_copies,
    link_checkpoint,
    own_head,
    split,
    tiny_tensors,
    untie,
    use_variant,
    with_duplicates,
    write_checkpoint,
    write_index,
    write_shards,
)
from conftest import TINY, run_cli
from safetensors import safe_open
from safetensors.torch import save_file

import optimize
from _ref.higgs import AUDIO_EMBEDDING, AUDIO_HEAD, CODEC_PREFIX, TEXT_EMBEDDING, TEXT_HEAD
from voxport.build.checkpoint import Checkpoint, read_vocabulary
from voxport.errors import UserError, run_script

VARIANTS = sorted(path.stem for path in (TINY / "config_variants").glob("*.json"))
A_CODEC_TENSOR = CODEC_PREFIX + "fc2.bias"
A_PROJECTION = "body.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return tiny_tensors()


def refusal(folder: Path, *arguments) -> str:
    """The message with which a checkpoint is refused: one line, the user's to read."""
    with pytest.raises(UserError) as caught:
        Checkpoint.open(folder, *arguments)
    message = str(caught.value)
    assert caught.value.code == 2
    assert "\n" not in message
    return message


def assert_same(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint[name], tensor), name


def test_a_single_file_without_index_is_read(tmp_path, tensors):
    assert_same(Checkpoint.open(write_checkpoint(tmp_path)), tensors)


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_any_number_of_shards_is_read(shards, tmp_path, tensors):
    write_shards(copy_configs(tmp_path), split(tensors, shards))
    checkpoint = Checkpoint.open(tmp_path)
    assert set(checkpoint) == set(tensors)
    assert_same(checkpoint, tensors)


def test_tied_duplicates_in_the_file_but_not_in_the_index_do_no_harm(tmp_path, tensors):
    write_shards(copy_configs(tmp_path), {SINGLE: with_duplicates(tensors)}, unlisted=(TEXT_HEAD, AUDIO_HEAD))
    checkpoint = Checkpoint.open(tmp_path)
    assert TEXT_HEAD not in checkpoint
    assert_same(checkpoint, tensors)


def test_tied_duplicates_in_the_index_do_no_harm(tmp_path, tensors):
    write_shards(copy_configs(tmp_path), split(with_duplicates(tensors), 2))
    assert_same(Checkpoint.open(tmp_path), tensors)


def test_the_mask_embedding_may_be_there_or_not(tmp_path, tensors):
    assert MASK_EMBED in tensors
    without = {n: t for n, t in tensors.items() if n != MASK_EMBED}
    assert len(Checkpoint.open(write_checkpoint(tmp_path, without))) == len(tensors) - 1


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "unlisted"])
def test_an_untied_head_keeps_its_own_values(listed, tmp_path, tensors):
    head = own_head()
    write_shards(untie(copy_configs(tmp_path)), split(tensors | {AUDIO_HEAD: head}, 2), () if listed else (AUDIO_HEAD,))
    checkpoint = Checkpoint.open(tmp_path)
    assert not checkpoint.config.tied_audio_head
    assert torch.equal(checkpoint[AUDIO_HEAD], head)
    assert not torch.equal(checkpoint[AUDIO_EMBEDDING], head)


def test_an_untied_head_that_is_missing_is_never_tied_in_silence(tmp_path):
    assert AUDIO_HEAD in refusal(untie(link_checkpoint(tmp_path)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_spelling_of_theta_is_read(variant, tmp_path):
    assert Checkpoint.open(use_variant(link_checkpoint(tmp_path), variant)).config == Checkpoint.open(TINY).config


def without_codec(tensors: dict) -> dict:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(CODEC_PREFIX)}


def test_a_checkpoint_without_codec_says_where_to_get_one(tmp_path, tensors):
    message = refusal(write_checkpoint(tmp_path, without_codec(tensors)))
    assert str(tmp_path) in message
    assert "does not bundle the codec" in message
    assert "--codec-from" in message


def test_another_checkpoint_lends_its_codec(tmp_path, tensors):
    bare = write_checkpoint(tmp_path, without_codec(tensors))
    (bare / "codec_config.json").unlink()
    checkpoint = Checkpoint.open(bare, TINY)
    assert checkpoint.codec_config == Checkpoint.open(TINY).codec_config
    assert set(checkpoint.codec_tensors()) == set(Checkpoint.open(TINY).codec_tensors())


def test_a_bundled_codec_is_preferred_to_a_lent_one(tmp_path, tensors):
    changed = tensors | {A_CODEC_TENSOR: tensors[A_CODEC_TENSOR] + 1}
    checkpoint = Checkpoint.open(TINY, write_checkpoint(tmp_path, changed))
    assert torch.equal(checkpoint[A_CODEC_TENSOR], tensors[A_CODEC_TENSOR])


def test_a_lender_without_codec_is_refused(tmp_path, tensors):
    bare = write_checkpoint(tmp_path / "bare", without_codec(tensors))
    assert "codec" in refusal(bare, write_checkpoint(tmp_path / "lender", without_codec(tensors)))


@pytest.mark.parametrize("encoder_type", ["whisper", "qwen3_aut", None])
def test_another_encoder_type_is_refused_with_its_value(encoder_type, tmp_path):
    edit_json(link_checkpoint(tmp_path) / "config.json", lambda c: c["audio_encoder_config"].update(encoder_type=encoder_type))
    message = refusal(tmp_path)
    assert repr(encoder_type) in message
    assert "encoder_type" in message
    assert "config.json" in message


def asr_config(config: dict) -> None:
    config["audio_encoder_config"] = {"encoder_type": "whisper", "model_type": "higgs_audio_encoder", "whisper_config": {}}


def test_an_asr_checkpoint_is_named_as_such(tmp_path):
    edit_json(link_checkpoint(tmp_path) / "config.json", asr_config)
    assert "ASR" in refusal(tmp_path)


@pytest.mark.parametrize("model_type", ["qwen3", "higgs_audio", None])
def test_another_model_is_refused(model_type, tmp_path):
    edit_json(link_checkpoint(tmp_path) / "config.json", lambda c: c.update(model_type=model_type))
    assert "not a Higgs Audio v3 checkpoint" in refusal(tmp_path)


def test_a_community_relayout_is_recognised(tmp_path, tensors):
    renamed = {"model." + n.removeprefix("body."): t for n, t in tensors.items() if n.startswith("body.")}
    renamed |= {"audio_embedding.weight": tensors[AUDIO_EMBEDDING], "model.embed_tokens.weight": tensors[TEXT_EMBEDDING]}
    message = refusal(write_checkpoint(tmp_path, renamed))
    assert "community re-layout" in message
    assert "original" in message


def mlx_quantised(tensors: dict) -> dict:
    weight = tensors[A_PROJECTION]
    stem = A_PROJECTION.removesuffix("weight")
    parts = {"weight": torch.zeros(weight.shape[0], weight.shape[1] // 8, dtype=torch.uint32)}
    parts |= {name: torch.zeros(weight.shape[0], weight.shape[1] // 32, dtype=weight.dtype) for name in ("scales", "biases")}
    return tensors | {stem + name: tensor for name, tensor in parts.items()}


def test_a_quantised_copy_is_refused_by_its_first_surplus_tensor(tmp_path, tensors):
    message = refusal(write_checkpoint(tmp_path, mlx_quantised(tensors)))
    assert A_PROJECTION.removesuffix("weight") + "biases" in message
    assert "quantised" in message


def test_integers_in_place_of_weights_are_refused(tmp_path, tensors):
    message = refusal(write_checkpoint(tmp_path, tensors | {A_PROJECTION: tensors[A_PROJECTION].to(torch.int8)}))
    assert A_PROJECTION in message
    assert "I8" in message


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_float_types_are_read(dtype, tmp_path, tensors):
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, {n: t.to(dtype) for n, t in tensors.items()}))
    assert checkpoint[A_PROJECTION].dtype == dtype


def test_a_missing_tensor_is_named(tmp_path, tensors):
    for name in (A_PROJECTION, A_CODEC_TENSOR, TEXT_EMBEDDING):
        assert name in refusal(write_checkpoint(tmp_path / name, {n: t for n, t in tensors.items() if n != name}))


def test_an_extra_tensor_is_named_with_its_file(tmp_path, tensors):
    message = refusal(write_checkpoint(tmp_path, tensors | {"body.layers.1.self_attn.q_proj.bias": torch.zeros(256)}))
    assert "body.layers.1.self_attn.q_proj.bias" in message
    assert SINGLE in message


@pytest.mark.parametrize("name", [A_PROJECTION, A_CODEC_TENSOR])
def test_a_wrong_shape_is_named_with_both_shapes(name, tmp_path, tensors):
    message = refusal(write_checkpoint(tmp_path, tensors | {name: tensors[name][:-1].contiguous()}))
    assert name in message
    assert str(list(tensors[name].shape)) in message


def test_a_truncated_shard_is_named(tmp_path):
    folder = link_checkpoint(tmp_path)
    shard = sorted(folder.glob("*.safetensors"))[1]
    half = shard.read_bytes()[: shard.stat().st_size // 2]
    shard.unlink()
    shard.write_bytes(half)
    message = refusal(folder)
    assert shard.name in message
    assert "download it again" in message


def test_an_empty_shard_is_named(tmp_path):
    folder = copy_configs(tmp_path)
    (folder / SINGLE).touch()
    assert SINGLE in refusal(folder)


def test_a_shard_that_the_index_promises_must_be_there(tmp_path):
    folder = link_checkpoint(tmp_path)
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.unlink()
    message = refusal(folder)
    assert shard.name in message
    assert "does not exist" in message


def test_a_tensor_that_is_not_where_the_index_says_is_named(tmp_path, tensors):
    first, second = (path.name for path in sorted(link_checkpoint(tmp_path).glob("*.safetensors")))
    with safe_open(tmp_path / first, framework="pt") as file:
        misplaced = next(name for name in file.keys() if name.startswith("body."))
    (tmp_path / INDEX).unlink()
    shutil.copyfile(TINY / INDEX, tmp_path / INDEX)
    edit_json(tmp_path / INDEX, lambda index: index["weight_map"].update({misplaced: second}))
    message = refusal(tmp_path)
    assert misplaced in message
    assert second in message


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors",
                                  "..\\model.safetensors", "C:model.safetensors", "..", "", 7])  # fmt: skip
def test_an_index_that_leaves_its_folder_is_refused(file, tmp_path, tensors):
    inside = copy_configs(tmp_path / "checkpoint")
    save_file(tensors, tmp_path / SINGLE)
    write_index(inside, dict.fromkeys(tensors, file))
    message = refusal(inside)
    assert repr(file) in message
    assert INDEX in message


@pytest.mark.parametrize("index", ['{"metadata": {}}', '{"weight_map": []}', "[]", "{", ""])
def test_a_broken_index_is_refused(index, tmp_path):
    (copy_configs(tmp_path) / INDEX).write_text(index, encoding="utf-8")
    assert INDEX in refusal(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path):
    assert SINGLE in refusal(copy_configs(tmp_path))


def test_a_folder_that_is_none_is_refused(tmp_path):
    assert "not a folder" in refusal(tmp_path / "nowhere")


def test_a_folder_without_config_is_refused(tmp_path):
    assert "config.json" in refusal(tmp_path)


REQUIRED = [
    ("text_config",), ("audio_encoder_config",), ("audio_encoder_config", "encoder_type"),
    ("audio_encoder_config", "num_codebooks"), ("audio_encoder_config", "vocab_size"), ("text_config", "model_type"),
    ("text_config", "hidden_size"),
    ("text_config", "intermediate_size"), ("text_config", "num_hidden_layers"), ("text_config", "num_attention_heads"),
    ("text_config", "num_key_value_heads"), ("text_config", "head_dim"), ("text_config", "rms_norm_eps"),
    ("text_config", "vocab_size"), ("text_config", "max_position_embeddings"),
]  # fmt: skip
OPTIONAL = [("audio_encoder_config", "out_dim"), ("audio_encoder_config", "tie_word_embeddings"),
            ("audio_encoder_config", "use_delay_pattern"), ("text_config", "rope_parameters"), ("audio_token_id",)]  # fmt: skip


def parent(config: dict, path: tuple[str, ...]) -> dict:
    return config[path[0]] if len(path) == 2 else config


@pytest.mark.parametrize("path", REQUIRED, ids=".".join)
def test_a_missing_config_key_is_named_with_its_file(path, tmp_path):
    edit_json(link_checkpoint(tmp_path) / "config.json", lambda c: parent(c, path).pop(path[-1]))
    message = refusal(tmp_path)
    assert repr(path[-1]) in message
    assert str(tmp_path / "config.json") in message


@pytest.mark.parametrize("path", OPTIONAL, ids=".".join)
def test_other_keys_may_be_absent(path, tmp_path):
    edit_json(link_checkpoint(tmp_path) / "config.json", lambda c: parent(c, path).pop(path[-1]))
    assert Checkpoint.open(tmp_path).config == Checkpoint.open(TINY).config


def test_every_other_key_may_be_absent_and_unknown_ones_are_ignored(tmp_path):
    def change(config):
        for section in (config, config["text_config"], config["audio_encoder_config"]):
            used = {path[-1] for path in REQUIRED + OPTIONAL} | {"model_type"}
            for key in [key for key in section if key not in used]:
                del section[key]
            section["a_later_invention"] = {"of": ["any", "kind"]}

    edit_json(link_checkpoint(tmp_path) / "config.json", change)
    assert Checkpoint.open(tmp_path).config == Checkpoint.open(TINY).config


@pytest.mark.parametrize("path, value", [
    (("text_config",), []), (("text_config",), None), (("audio_encoder_config",), "discrete"),
    (("text_config", "hidden_size"), "128"), (("text_config", "hidden_size"), None), (("text_config", "num_hidden_layers"), 0),
    (("text_config", "num_hidden_layers"), -3), (("text_config", "head_dim"), [32]), (("text_config", "rms_norm_eps"), "small"),
    (("text_config", "num_attention_heads"), True), (("text_config", "num_attention_heads"), 8.5),
    (("audio_encoder_config", "num_codebooks"), {}), (("audio_encoder_config", "tie_word_embeddings"), "yes"),
    (("text_config", "rope_theta"), "1e6 or so"), (("text_config", "rope_parameters"), 1e6),
    (("text_config", "model_type"), "llama"),
    (("audio_encoder_config", "use_delay_pattern"), False), (("audio_encoder_config", "out_dim"), 64),
    (("text_config", "rope_parameters"), {"rope_type": "yarn", "rope_theta": 1e6}), (("text_config", "head_dim"), 20),
    (("text_config", "num_key_value_heads"), 3),
])  # fmt: skip
def test_a_wrong_config_value_is_one_line_that_names_the_file(path, value, tmp_path):
    edit_json(link_checkpoint(tmp_path) / "config.json", lambda c: parent(c, path).update({path[-1]: value}))
    assert str(tmp_path / "config.json") in refusal(tmp_path)


def test_sizes_that_the_weights_do_not_have_are_refused(tmp_path):
    edit_json(link_checkpoint(tmp_path) / "config.json", lambda c: c["text_config"].update(num_hidden_layers=4))
    assert "body.layers.3." in refusal(tmp_path)


@pytest.mark.parametrize("path, value", [(("sample_rate",), None), (("acoustic_model_config", "downsampling_ratios"), 960),
                                         (("semantic_model_config", "conv_dim"), []), (("target_bandwidths",), []),
                                         (("semantic_model_config", "feat_extract_norm"), "layer")])  # fmt: skip
def test_a_wrong_codec_config_is_one_line_that_names_the_file(path, value, tmp_path):
    edit_json(link_checkpoint(tmp_path) / "codec_config.json", lambda c: parent(c, path).update({path[-1]: value}))
    assert "codec_config.json" in refusal(tmp_path)


@pytest.mark.parametrize("change", [{"target_bandwidths": [1.75]}, {"codebook_size": 512}], ids=["codebooks", "codes"])
def test_a_codec_of_another_size_than_the_language_model_is_refused(change, tmp_path):
    edit_json(link_checkpoint(tmp_path) / "codec_config.json", lambda c: c.update(change))
    assert "do not belong together" in refusal(tmp_path)


def test_special_tokens_are_found_by_name():
    names = {token["content"]: token["id"] for token in json.loads((TINY / "tokenizer.json").read_text())["added_tokens"]}
    vocabulary = read_vocabulary(TINY)
    assert vocabulary.special == {name: names[name] for name in vocabulary.special}
    assert vocabulary.control_tags | vocabulary.structural == names
    assert all(":" in name for name in vocabulary.control_tags)


@pytest.mark.parametrize("name", ["<|tts|>", "<|text|>", "<|audio|>", "<|ref_audio|>"])
def test_a_tokenizer_without_a_required_token_is_refused(name, tmp_path):
    edit_json(copy_configs(tmp_path) / "tokenizer.json", drop_token(name))
    with pytest.raises(UserError, match="tokenizer.json") as caught:
        read_vocabulary(tmp_path)
    assert name in str(caught.value)


def test_an_old_tokenizer_without_ref_text_is_read(tmp_path):
    edit_json(copy_configs(tmp_path) / "tokenizer.json", drop_token("<|ref_text|>"))
    assert read_vocabulary(tmp_path).special["<|ref_text|>"] is None


@pytest.mark.parametrize(
    "content", ['{"added_tokens": null}', '{"added_tokens": [1]}', "{}", '{"added_tokens": [{"id": 1}]}', "{"]
)
def test_a_broken_tokenizer_is_refused(content, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match="tokenizer"):
        read_vocabulary(tmp_path)


def test_the_full_size_tokenizer_has_its_published_ids():
    found = golden_copies("tokenizer/tokenizer.json")
    if not found:
        pytest.skip("the full-size tokenizer is only in the full golden set; set VOXPORT_GOLDEN to test it")
    vocabulary = read_vocabulary(found[0].parent)
    assert vocabulary.special == {
        "<|tts|>": 151667, "<|text|>": 151672, "<|audio|>": 151670, "<|ref_audio|>": 151679, "<|ref_text|>": 151680,
    }  # fmt: skip
    assert len(vocabulary.control_tags) + len(vocabulary.structural) == 84


def test_the_fingerprint_changes_with_config_and_weights(tmp_path, tensors):
    folder = write_checkpoint(tmp_path)
    before = Checkpoint.open(folder).fingerprint()
    assert Checkpoint.open(folder).fingerprint() == before
    save_file(tensors | {A_CODEC_TENSOR: tensors[A_CODEC_TENSOR] + 1}, folder / SINGLE)
    changed = Checkpoint.open(folder).fingerprint()
    edit_json(folder / "config.json", lambda c: c["text_config"].update(rms_norm_eps=1e-5))
    assert len({before, changed, Checkpoint.open(folder).fingerprint()}) == 3


def broken_build(kind: str, folder: Path) -> Path:
    """A checkpoint that cannot be built, each for another reason."""
    if kind == "absent":
        return folder
    file, change = {
        "asr": ("config.json", asr_config),
        "keyless": ("config.json", lambda config: config["text_config"].pop("head_dim")),
        "tokenless": ("tokenizer.json", drop_token("<|tts|>")),
    }[kind]
    edit_json(link_checkpoint(folder) / file, change)
    return folder


@pytest.mark.parametrize(
    "kind, named", [("asr", "whisper"), ("keyless", "head_dim"), ("tokenless", "<|tts|>"), ("absent", "absent")]
)
def test_a_build_is_refused_in_one_line_before_anything_is_written(kind, named, tmp_path, capsys):
    folder = broken_build(kind, tmp_path / kind)
    assert run_script(optimize.main, ["--checkpoint", str(folder), "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert named in said.err
    assert not (tmp_path / "out").exists()


def test_optimize_ends_with_exit_code_2_and_no_traceback(tmp_path):
    done = run_cli("optimize.py", "--checkpoint", broken_build("keyless", tmp_path / "keyless"), "--output", tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "head_dim" in done.stderr
