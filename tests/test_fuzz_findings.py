"""What the fuzzer found, each as the smallest case that shows it: refused in one line that names the place, or right."""

import dataclasses
import json
import types

import numpy as np
import pytest
from checkpoints import edit_json, link_checkpoint
from run_fakes import make_manifest, make_tokenizer
from test_run_voices import MANIFEST, VOICE, kept_files, speaker

from fuzz.readers import higgs_manifest, omnifish_manifest
from voxport.build.checkpoint import Checkpoint, read_vocabulary
from voxport.build.omnifish_checkpoint import OmniFishCheckpoint
from voxport.errors import UserError
from voxport.files import read_any_json, read_json
from voxport.manifest import Manifest
from voxport.run import audio
from voxport.run.lines import read_lines
from voxport.run.longtext import split_text
from voxport.run.text import TAG, check_script, encode
from voxport.run.voices import Shelf, read_arrays, write_arrays

ODD_JSON = {"a number of 5000 digits": '{"a": %s}' % ("9" * 5000), "deep nesting": '{"a": %s' % ("[" * 200_000),
            "half a surrogate pair": r'{"a": "\ud800"}', "half a pair as a key": r'{"\uDFFF": 1}'}  # fmt: skip


@pytest.mark.parametrize("content", ODD_JSON.values(), ids=ODD_JSON)
def test_json_that_python_cannot_hold_or_write_again_is_refused(content, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(content, encoding="utf-8")
    for read in (read_json, read_any_json):
        with pytest.raises(UserError, match=r"a thing: .*x\.json cannot be read as JSON"):
            read(path, "a thing")


def test_a_whole_pair_and_an_escaped_backslash_are_no_half_pair(tmp_path):
    (tmp_path / "x.json").write_text(r'{"a": "\ud83d\ude00", "b": "\\ud800"}', encoding="utf-8")
    assert read_json(tmp_path / "x.json", "a thing") == {"a": "\U0001f600", "b": "\\ud800"}


def write_manifest(folder, data, path, value):
    holder = data = json.loads(json.dumps(data))
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    (folder / "manifest.json").write_text(json.dumps(data), encoding="utf-8")
    return folder


WRONG = [
    (("family",), ["higgs"]), (("family",), None), (("audio", "num_codebooks"), 0), (("audio", "num_codebooks"), 10**9),
    (("audio", "boc_id"), 3), (("audio", "eoc_id"), 8), (("codec", "sample_rate"), 0), (("codec", "sample_rate"), 10**12),
    (("codec", "hop_length"), -7), (("codec", "min_encode_samples"), 10**12), (("dims", "num_kv_heads"), 0), (("dims", "num_kv_heads"), 3),
    (("limits", "max_rows"), 10**12), (("limits", "max_rows"), 2), (("limits", "cap_base_frames"), -1), (("tokens", "tts"), -1),
    (("limits", "max_reference_seconds"), 10**400), (("limits", "max_reference_seconds"), float("nan")),
    (("sampling", "temperature"), float("inf")), (("sampling", "top_p"), 0), (("sampling", "top_k"), -1),
    (("kv_cache", "dtype"), "int7"), (("kv_cache", "past_key"), "past.key"), (("kv_cache", "past_key"), "past.{x}.{}"),
    (("kv_cache", "present_key"), "{0.__class__}"), (("control_tags", "<|emotion:anger|>"), -4),
    (("files", "tokenizer.json", "bytes"), -1), (("files", "tokenizer.json", "sha256"), "x"),
]  # fmt: skip
WRONG_OMNIFISH = [
    (("codebooks", "sizes"), []), (("codebooks", "sizes"), [16, 0]), (("codebooks", "pad_ids"), []), (("codebooks", "mask_id"), 3),
    (("codebooks", "vocab_size"), 18), (("codebooks", "end_id"), 16), (("codec", "min_encode_samples"), -7), (("codec", "max_frames"), 0),
    (("generation", "block_size"), 0), (("generation", "context_mode"), "half"), (("generation", "threshold"), 1.5),
    (("residual", "kind"), "ring"), (("prompt", "num_speakers"), 5), (("prompt", "instruct_template"), "{spk!r}"),
    (("prompt", "instruct_template"), "{spk"), (("prompt", "instruct_template"), "{spk:>99999999}"),
    (("prompt", "instruct_template"), "{0.__class__}"),
]  # fmt: skip


@pytest.mark.parametrize("path, value", WRONG, ids=lambda v: ".".join(v) if isinstance(v, tuple) else str(v)[:12])
def test_a_value_of_a_manifest_that_running_cannot_use_is_named(path, value, tmp_path):
    with pytest.raises(UserError, match="manifest.json") as caught:
        Manifest.read(write_manifest(tmp_path, dataclasses.asdict(higgs_manifest()), path, value))
    assert path[-1] in str(caught.value) or path[0] in str(caught.value)


@pytest.mark.parametrize("path, value", WRONG_OMNIFISH, ids=lambda v: ".".join(v) if isinstance(v, tuple) else str(v)[:12])
def test_a_value_of_the_other_familys_manifest_is_named(path, value, tmp_path):
    with pytest.raises(UserError, match="manifest.json") as caught:
        Manifest.read(write_manifest(tmp_path, omnifish_manifest(), path, value))
    assert path[-1] in str(caught.value) or path[0] in str(caught.value)


def test_the_whole_manifests_are_read(tmp_path):
    for data in (dataclasses.asdict(higgs_manifest()), omnifish_manifest()):
        Manifest.read(write_manifest(tmp_path, data, ("created",), "today"))


def test_an_error_is_one_line_whatever_it_quotes():
    assert str(UserError("a\nb\r\nc\u2028d")) == "a b c d"


def test_marks_that_are_no_tag_do_not_become_one_where_parts_are_joined():
    tokenizer = make_tokenizer()
    text = "<|emotion:elation| <||<||> end"
    assert TAG.findall(text) == []
    for budget in range(1, 12):
        parts = split_text(text, lambda piece: len(encode(tokenizer, piece)), budget)
        assert "".join("".join(part.text for part in parts).split()) == "".join(text.split())
        for part in parts:
            check_script(part.spoken, "a part", make_manifest())


def test_parts_that_are_joined_keep_what_stood_between_them():
    parts = split_text("One.\n\n...\n\n!!\n\nTwo.", len, 4)
    assert [part.text for part in parts] == ["One.\n\n...\n\n!!", "Two."]


@pytest.mark.parametrize("change", [
    lambda facts, arrays: arrays.update(ids=arrays["ids"].astype(np.float64)),
    lambda facts, arrays: arrays.update(ids=arrays["ids"][None]),
    lambda facts, arrays: arrays.update(pieces=np.full_like(arrays["pieces"], np.nan)),
    lambda facts, arrays: facts.update(ref_text=["not text"]),
    lambda facts, arrays: facts.pop("ref_text"),
    lambda facts, arrays: facts.update(ref_text="\ud800"),
], ids=["float ids", "ids of two axes", "no numbers", "list as text", "no text", "half a pair"])  # fmt: skip
def test_a_memory_of_a_voice_with_other_types_is_made_anew(change, tmp_path):
    shelf = Shelf(tmp_path / "voices")
    shelf.save("Anna", speaker(), VOICE, "What it says")
    (path,) = kept_files(shelf)
    facts, arrays = read_arrays(path, "x")
    change(facts, arrays)
    write_arrays(path, facts, arrays)
    voice = shelf.load("Anna", speaker(MANIFEST))
    assert voice.ids.dtype == np.int64 and voice.ids.ndim == 1 and voice.ref_text == "What it says"
    assert np.isfinite(np.stack(voice.pieces)).all()


def test_a_recording_whose_transcript_is_no_text_is_an_error(tmp_path):
    shelf = Shelf(tmp_path / "voices")
    shelf.save("Anna", speaker(), VOICE, "What it says")
    facts, arrays = read_arrays(shelf.folder / "Anna" / "voice.npz", "x")
    write_arrays(shelf.folder / "Anna" / "voice.npz", facts | {"ref_text": "\udc80"}, arrays)
    with pytest.raises(UserError, match="'Anna'.*cannot be read"):
        shelf.load("Anna", speaker())


def test_a_line_that_python_cannot_hold_is_a_fault_of_that_line_alone(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": "one", "seed": %s}\n{"text": "two", "name": "\\ud800"}\n{"text": "three"}\n' % ("9" * 5000), encoding="utf-8")
    faults = [line.fault for line in read_lines(path)]
    assert faults[0] and faults[1] and faults[2] is None


def test_the_size_of_a_block_does_not_grow_with_the_channels():
    sizes = []
    for channels in (1, 2, 1024):
        read = lambda frames, channels=channels, **_: sizes.append(frames * channels) or np.zeros((0, channels), np.float32)
        list(audio._blocks(types.SimpleNamespace(channels=channels, samplerate=24000, read=read), "x", 100.0))
    assert sizes == [audio.READ_BLOCK] * 3


ADDED = [[{"content": 1.5, "id": 3}], [{"content": "a", "id": -3}], [{"content": "a", "id": True}], [{"content": "a", "id": 10**30}],
         [{"content": ["a"], "id": 3}], {"content": "a", "id": 3}, [[]], None]  # fmt: skip


@pytest.mark.parametrize("added", ADDED, ids=str)
def test_added_tokens_that_are_none_are_refused(added, tmp_path):
    edit_json(link_checkpoint(tmp_path) / "tokenizer.json", lambda tokenizer: tokenizer.update(added_tokens=added))
    with pytest.raises(UserError, match="tokenizer.json: 'added_tokens'"):
        read_vocabulary(tmp_path)


@pytest.mark.parametrize("key, value", [("strides", [1, 3]), ("codebook_dim", 3), ("unit_kernel_size", 2), ("block_dilations", [7] * 60)])
def test_codec_sizes_that_make_no_codec_or_another_one_name_their_file_or_tensor(key, value, tmp_path):
    edit_json(link_checkpoint(tmp_path) / "codec_config.json", lambda config: config.update({key: value}))
    with pytest.raises(UserError) as caught:
        Checkpoint.open(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_names_in_nested_lists_are_no_names(tmp_path):
    from test_mutated_checkpoints import AXIAL, link, replace

    folder = link(AXIAL, tmp_path / "ckpt")
    replace(folder / "id_vocab.json", "[" * 200_000)
    with pytest.raises(UserError, match="id_vocab.json"):
        OmniFishCheckpoint.open(folder)
