"""Speaking from OmniFish builds: golden codes and sound, streams, seeds, dialogues, long texts, and what is refused."""

import dataclasses
import json
import shutil
import subprocess
import sys

import numpy as np
import onnx
import pytest
import soundfile
from conftest import ROOT, run_cli
from hypothesis import given, settings
from hypothesis import strategies as st
from omnifish_builds import CASES, FOLDERS, LOCAL, arrays, built, explicit, facts, model_of, parts_of, speak_case
from test_run_threads import together

from _ref import omnifish as ref
from voxport.errors import UserError, WorkError
from voxport.manifest import Manifest
from voxport.run import omnifish_blocks, omnifish_residual, omnifish_text
from voxport.run.omnifish import Speaker
from voxport.run.omnifish_body import PlainDecoder
from voxport.run.omnifish_codec import CodecStream, decode, encode
from voxport.run.omnifish_reading import plan, read, read_stream
from voxport.run.omnifish_request import Wish
from voxport.run.omnifish_residual import make_residual

TEXT = "Zażółć gęślą jaźń, proszę."  # one that the tiny checkpoint speaks for a block and a half
HOP, RATE = 2048, 44100


@pytest.fixture(scope="module")
def speaker() -> Speaker:
    return Speaker.load(built("axial_px"), threads=1, warn=lambda message: None)


def torch_free(values):
    import torch

    return torch.from_numpy(np.asarray(values))


# Golden


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FOLDERS)
def test_the_golden_codes_come_out_of_the_graphs(name, case):
    case, golden = next(c for c in facts(name)["e2e"] if c["name"] == case), arrays(name)
    ids, blocks = speak_case(name, case)
    key = f"e2e.{case['name']}"
    assert ids == case["input_ids"]
    assert [block.speech for block in blocks] == case["frames_per_block"]
    assert np.array_equal(np.stack([block.rounds for block in blocks]), golden[f"{key}.sem_rounds"])
    assert np.array_equal(np.stack([block.semantic for block in blocks]), golden[f"{key}.sem"])
    assert np.array_equal(np.concatenate([block.codes for block in blocks], axis=1), golden[f"{key}.codes"])
    assert np.abs(np.stack([block.hidden for block in blocks]) - golden[f"{key}.h_finish"]).max() < 5e-4


@pytest.mark.parametrize("name", ["ref_mid_end", "other_mode_ids"])
def test_the_golden_codes_come_out_of_an_attention_spelt_out(name):
    case = next(c for c in facts("axial_px")["e2e"] if c["name"] == name)
    _, blocks = speak_case("axial_px", case, explicit("axial_px"))
    assert isinstance(model_of(explicit("axial_px")).decoder, PlainDecoder)
    assert np.array_equal(np.concatenate([block.codes for block in blocks], axis=1), arrays("axial_px")[f"e2e.{name}.codes"])


@pytest.mark.parametrize("case", ["mtp_p0", "mtp_p5", "mtp_short"])
@pytest.mark.parametrize("name", FOLDERS)
def test_the_golden_residual_codes_come_out_of_the_graphs(name, case):
    golden, manifest = arrays(name), parts_of(built(name)).manifest
    h, semantic = golden[f"{case}.h"], golden[f"{case}.semantic"]
    decoder = make_residual(parts_of(built(name)), manifest)
    decoder.prime(golden.get(f"{case}.prompt_h", h[:0]), golden.get(f"{case}.prompt_codes", np.empty((10, 0), np.int64)))
    starts = range(0, len(h), manifest.generation.block_size)
    greedy = lambda logits, level, step: logits.argmax(-1)
    size = manifest.generation.block_size
    codes = [decoder.decode(h[start : start + size], semantic[start : start + size], greedy) for start in starts]
    assert np.array_equal(np.concatenate(codes, axis=1), golden[f"{case}.codes"])


def codec_arrays() -> dict:
    with np.load(LOCAL / "codec/expected.npz") as expected:
        return dict(expected)


@pytest.mark.parametrize("frames", [1, 2, 7, 20])
def test_golden_codes_become_the_golden_sound_whole_and_in_chunks(frames):
    golden, parts = codec_arrays(), parts_of(built("axial_px"))
    codes, audio = golden[f"decode.{frames}.codes"][0], golden[f"decode.{frames}.audio"].ravel()
    whole = decode(parts, parts.manifest, codes)
    assert np.abs(whole - audio).max() < 5e-4
    for sizes in ([1] * frames, [3] * -(-frames // 3)):
        stream = CodecStream(parts, parts.manifest)
        chunks = [stream.decode(part) for part in np.split(codes, np.cumsum(sizes)[:-1], axis=1) if part.shape[1]]
        assert np.abs(np.concatenate(chunks) - whole).max() < 1e-4


def test_long_codes_are_decoded_a_bounded_number_of_frames_at_once(monkeypatch):
    golden, parts, sizes = codec_arrays(), parts_of(built("axial_px")), []
    whole = decode(parts, parts.manifest, golden["decode.20.codes"][0])
    pass_on = CodecStream.decode
    monkeypatch.setattr(CodecStream, "decode", lambda self, codes: sizes.append(codes.shape[1]) or pass_on(self, codes))
    monkeypatch.setattr("voxport.run.omnifish_codec.MOST_FRAMES", 8)
    assert np.abs(decode(parts, parts.manifest, golden["decode.20.codes"][0]) - whole).max() < 1e-4
    assert sizes == [8, 8, 4]


@pytest.mark.parametrize("samples", [2048, 2049, 5000, 10240, 33333])
def test_golden_sound_becomes_the_golden_codes(samples):
    golden, parts = codec_arrays(), parts_of(built("axial_px"))
    codes = encode(parts, parts.manifest, golden[f"encode.{samples}.audio"])
    assert np.array_equal(codes[None], golden[f"encode.{samples}.codes"])


def test_golden_text_becomes_the_golden_ids(speaker):
    manifest, golden = speaker.manifest, facts("axial_px")
    for case in golden["encode_text"]:
        ids = omnifish_text.encode_prompt(speaker.encode, case["text"], manifest.prompt.names, manifest.dims.text_vocab_size)
        assert ids == case["ids"], case["text"]
    for case in golden["context_text"]:
        assert omnifish_text.context_text(*case["args"]) == case["out"]
    for case in golden["dialogue_text"]:
        assert omnifish_text.dialogue_text([tuple(turn) for turn in case["turns"]]) == case["out"]


def test_whole_requests_make_the_golden_prompts(speaker):
    """What the flags of inference.py lead to, down to the ids."""
    for case in facts("axial_px")["e2e"]:
        turns = tuple(map(tuple, case["turns"] or ()))
        ref = {"ref_audio": (0.1 * np.sin(np.arange(9000)), RATE), "ref_text": case["ref_text"]} if case["ref_text"] else {}
        around = {name: case[name] for name in ("instruct", "before", "after")}
        wish = Wish(case["text"], turns, case["language"], **around, **ref)
        request = speaker._check(wish)
        assert request.prompt_text(bool(ref), request.ref_text) == case["prompt_text"]


def test_int4_builds_speak_and_differ_from_fp32_by_their_rounding_only(record_property):
    """How far the codes agree is reported; sharp random weights keep few, so no threshold is set (golden README)."""
    for name in FOLDERS:
        agreement = []
        for case in facts(name)["e2e"]:
            _, blocks = speak_case(name, case, built(name, "int4"))
            expected = arrays(name)[f"e2e.{case['name']}.sem_rounds"]
            frames = min(len(blocks[0].rounds), len(expected[0]))
            agreement.append(np.mean(blocks[0].rounds[frames - 1] == expected[0][frames - 1]))
            assert all(block.codes.shape == (10, block.speech) for block in blocks)
            assert all(0 <= block.codes.min() and block.codes.max() < 4096 for block in blocks if block.speech)
        record_property(name, float(np.mean(agreement)))


# The steps of the loop, against the reference


@given(st.integers(1, 64), st.integers(1, 32))
def test_blocks_are_revealed_as_the_reference_does(size, steps):
    for step in range(steps):
        assert omnifish_blocks.still_masked(size, step, steps) == ref.still_masked(size, step, steps)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_revealing_and_closing_are_the_reference(data):
    size, rng = data.draw(st.integers(1, 12)), np.random.default_rng(data.draw(st.integers(0, 999)))
    books = parts_of(built("axial_px")).manifest.codebooks
    ids = np.where(rng.random(size) < 0.6, ref.MASK_ID, rng.integers(0, 4096, size))
    chosen, confidence = rng.integers(0, ref.VOCAB, size), rng.integers(0, 4, size) / 4  # ties are common
    keep, threshold = data.draw(st.integers(0, size)), data.draw(st.sampled_from([None, 0.5]))
    expected = ref.reveal(*map(torch_free, (ids,)), ref.MASK_ID, *map(torch_free, (chosen, confidence)), keep, threshold)
    assert np.array_equal(omnifish_blocks.reveal(ids, ref.MASK_ID, chosen, confidence, keep, threshold), expected)
    ids = rng.choice([1, 2, 4095, ref.END_ID, *ref.PAD_IDS], size)
    closed, speech = ref.close_block(torch_free(ids))
    found, count = omnifish_blocks.close_block(ids, books)
    assert (found.tolist(), count) == (closed.tolist(), speech)


def test_draws_depend_on_seed_block_level_and_round_only():
    hot = ref_sampling(1.0)
    logits, dice = np.zeros((8, 1024), np.float32), omnifish_blocks.Dice(5, hot, hot)
    first = dice.choose(logits, 0, 0, 0)
    assert np.array_equal(dice.choose(logits[:3], 0, 0, 0), first[:3])
    others = [dice.choose(logits, *place) for place in ((1, 0, 0), (0, 1, 0), (0, 0, 1))]
    others.append(omnifish_blocks.Dice(6, hot, hot).choose(logits, 0, 0, 0))
    assert all(not np.array_equal(first, other) for other in others)


def ref_sampling(temperature: float):
    return dataclasses.replace(parts_of(built("axial_px")).manifest.sampling, temperature=temperature)


# Speaking


def test_a_stream_is_the_speech_and_comes_block_by_block(speaker):
    speech = speaker.speak(TEXT, language="pl", max_frames=60)
    stream = speaker.speak_stream(TEXT, language="pl", max_frames=60)
    chunks = list(stream)
    assert [len(chunk) for chunk in chunks] == [HOP * count for count in speech.frames_per_block]
    assert np.array_equal(stream.speech.codes, speech.codes)
    assert np.abs(np.concatenate(chunks) - speech.samples).max() < 1e-4
    assert (speech.finish_reason, speech.sample_rate, len(speech.samples)) == ("end", RATE, HOP * speech.codes.shape[1])


def test_a_seed_gives_the_same_speech_again_and_another_seed_another(speaker):
    options = {"temperature": 1.0, "residual_temperature": 1.0, "max_frames": 16}
    first, again, other = (speaker.speak(TEXT, seed=seed, **options).codes for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert first.shape != other.shape or not np.array_equal(first, other)


def test_speech_is_cut_where_it_was_asked_to_be(speaker):
    whole = speaker.speak(TEXT, language="pl", max_frames=60)
    assert whole.frames_per_block == [8, 3]
    for most, blocks in ((5, [8]), (8, [8]), (9, [8, 3])):
        speech, stream = (say(TEXT, language="pl", max_frames=most) for say in (speaker.speak, speaker.speak_stream))
        assert (speech.finish_reason, speech.frames_per_block) == ("max_frames", blocks)
        assert np.array_equal(speech.codes, whole.codes[:, :most])
        assert speech.faded()[-1] == list(stream)[-1][-1] == 0
    assert speaker.speak(TEXT, language="pl", max_frames=11).finish_reason == "end"


def test_a_reference_changes_the_speech_and_is_saved_with_the_codes(speaker, tmp_path):
    reference = (0.3 * np.sin(np.arange(5 * HOP + 1) / 30), RATE)
    speech = speaker.speak(TEXT, ref_audio=reference, ref_text="What it says.", max_frames=16)
    assert speech.reference.shape == (10, 6)
    speech.save_codes(tmp_path / "codes.npz")
    with np.load(tmp_path / "codes.npz") as saved:
        assert np.array_equal(saved["semantic"], speech.codes[0])
        assert np.array_equal(saved["codes"], speech.codes)
        assert np.array_equal(saved["reference_codes"], speech.reference)
        assert np.array_equal(saved["prompt_ids"], speech.prompt_ids)
    text_only = speaker.speak(TEXT, max_frames=16)
    assert text_only.codes.shape != speech.codes.shape or not np.array_equal(text_only.codes, speech.codes)


def test_language_speaker_quality_and_neighbours_reach_the_prompt(speaker):
    plain = speaker._check(Wish(TEXT)).prompt_text(False, None)
    assert plain == f"<|lang_start|>None<|lang_end|><|instruct_start|>None<|instruct_end|><|text_start|>{TEXT}<|text_end|>"
    for wish, part in (
        (Wish(TEXT, language="pl"), "<|lang_start|>pl<|lang_end|>"),
        (Wish(TEXT, speaker="pl_2"), "<|instruct_start|>speaker:pl_2<|instruct_end|>"),
        (Wish(TEXT, speaker="pl_2", quality="q35"), "<|instruct_start|>speaker:pl_2 quality:q35<|instruct_end|>"),
        (Wish(TEXT, quality="q35"), "<|instruct_start|>quality:q35<|instruct_end|>"),
        (Wish(TEXT, before=("One.", "Two.")), "<|object_ref_start|>One. Two.<|object_ref_end|>"),
        (Wish(TEXT, after=("Three.",)), "<|box_start|>Three.<|box_end|>"),
        (Wish(turns=(("pl_1", "Tak."), ("pl_2", "Nie."))), "pl_1<|quad_end|>Tak. <|quad_start|>pl_2<|quad_end|>Nie."),
    ):
        assert part in speaker._check(wish).prompt_text(False, None)


def test_long_text_is_read_between_its_neighbours_in_one_voice(speaker, tmp_path):
    wish = Wish("First one here. Second one there, my friend. And a third.", seed=1, temperature=0.8, max_frames=16)
    parts = plan(speaker, wish, 14)
    assert len(parts) > 2
    reading = read(speaker, wish, parts)
    stream = read_stream(speaker, wish, parts)
    joined = np.concatenate(list(stream))
    assert [speech.codes.tolist() for speech in reading.speeches] == [speech.codes.tolist() for speech in stream.speech.speeches]
    assert len(joined) == len(reading.samples)
    assert np.abs(joined - reading.samples).max() < 1e-4
    first = reading.speeches[0]
    assert all(np.array_equal(speech.reference, first.codes) for speech in reading.speeches[1:])
    assert {speech.seed for speech in reading.speeches} == {1}
    reading.save(tmp_path / "long.wav")
    assert soundfile.info(tmp_path / "long.wav").frames == len(reading.samples)
    report = json.loads(json.dumps(reading.report()))
    assert (report["text"], report["seed"], len(report["parts"])) == (wish.text, 1, len(parts))
    assert report["seconds"] == len(reading.samples) / RATE and f"in {len(parts)} parts" in reading.health_line()


def test_a_self_test_reads_every_file_and_hears_the_codec(speaker, tmp_path):
    found = speaker.selftest()
    assert found["samples"] == found["frames"] * HOP and found["peak"] > 0 and found["files"] > 10
    copy = shutil.copytree(built("axial_px"), tmp_path / "copy")
    with open(copy / "tokenizer.json", "ab") as file:
        file.write(b" ")
    with pytest.raises(UserError, match="tokenizer.json has"):
        Speaker.load(copy, threads=1).selftest()


def test_context_before_and_after_changes_the_speech(speaker):
    alone = speaker.speak(TEXT, max_frames=24).codes
    between = speaker.speak(TEXT, before=("One two three.",), after=("Four.",), max_frames=24).codes
    assert alone.shape != between.shape or not np.array_equal(alone, between)


def test_a_semantic_context_keeps_what_the_last_pass_saw():
    """Full and semantic mode differ from the second block on, and only there (the golden cases hold the codes of both)."""
    golden = {c["name"]: c for c in facts("axial_px")["e2e"]}
    case = golden["max_blocks"]
    _, blocks = speak_case("axial_px", case)
    _, other = speak_case("axial_px", case | {"context_mode": "full"})
    assert np.array_equal(blocks[0].semantic, other[0].semantic)
    assert not all(np.array_equal(a.semantic, b.semantic) for a, b in zip(blocks[1:], other[1:]))


def test_every_block_reads_its_own_frames_only(monkeypatch):
    """Work a block does not grow: each pass of the body and each step of the residual decoder is given B frames."""
    model, sizes = model_of(built("axial_px")), []
    advance, run = type(model.decoder).advance, omnifish_residual.run_all
    monkeypatch.setattr(type(model.decoder), "advance", lambda self, *a: sizes.append(a[1].shape[1]) or advance(self, *a))
    monkeypatch.setattr(omnifish_residual, "run_all", lambda graph, **feeds: sizes.append(feeds["h"].shape[1]) or run(graph, **feeds))
    case = next(c for c in facts("axial_px")["e2e"] if c["name"] == "other_mode_ids")
    ids, blocks = speak_case("axial_px", case)
    passes = model.manifest.generation.steps + 2  # and one to finish, one to commit
    spoken = sizes[sizes.index(len(ids)) :]  # before it lies the probe
    assert spoken == [len(ids)] + [8] * len(blocks) * (passes + 9)


# What is refused


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (Wish(), "one of the two"), (Wish("x", turns=(("pl_1", "y"),)), "one of the two"),
        (Wish("x", language="xx"), "no language 'xx'"), (Wish("x", speaker="pl_7"), "no speaker 'pl_7'"),
        (Wish("x", quality="q99"), "no recording 'q99'"), (Wish("x", instruct="calm", speaker="pl_1"), "one of them"),
        (Wish(turns=(("nobody", "x"),)), "no speaker 'nobody'"), (Wish("a <|text_end|> b"), "steers the model"),
        (Wish("?!"), "no letter or digit"), (Wish("x", steps=0), "--steps"), (Wish("x", threshold=2.0), "--threshold"),
        (Wish("x", temperature=-1.0), "--temperature"), (Wish("x", max_frames=0), "--max-frames"), (Wish("x", seed=-1), "--seed"),
        (Wish("x", before=("<|box_start|>",)), "steers the model"),
    ],
)  # fmt: skip
def test_wishes_that_cannot_be_met_are_refused(speaker, wish, message):
    with pytest.raises(UserError, match=message):
        speaker.grant(wish)


def test_a_text_that_ends_at_once_is_told(speaker):
    case = next(c for c in facts("axial_px")["e2e"] if c["name"] == "empty")
    wish = Wish(case["text"], tuple(map(tuple, case["turns"] or ())), case["language"], instruct=case["instruct"],
                before=case["before"], after=case["after"])  # fmt: skip
    with pytest.raises(WorkError, match="before it began; try a --temperature above 0, another text"):
        speaker.grant(wish)


def test_more_than_the_context_holds_is_refused_before_anything_is_loaded(speaker):
    manifest = dataclasses.replace(speaker.manifest, limits=dataclasses.replace(speaker.manifest.limits, context_rows=40))
    small = Speaker(speaker.folder, manifest, speaker.parts)
    with pytest.raises(UserError, match="more than the 40"):
        small.speak(TEXT, max_frames=60)


def test_a_causal_decoder_is_refused_when_it_is_loaded(tmp_path):
    folder = shutil.copytree(built("axial_px"), tmp_path / "causal")
    graph = folder / "llm_decoder.onnx"
    model = onnx.load(graph, load_external_data=False)
    for node in model.graph.node:
        for attribute in (a for a in node.attribute if a.name == "causal"):
            attribute.i = 1
    onnx.save(model, graph)
    with pytest.raises(UserError, match="changed after the build"):
        Speaker.load(folder).speak(TEXT, max_frames=8)
    record(folder, "llm_decoder")
    with pytest.raises(WorkError, match="attends to the past only"):
        Speaker.load(folder).speak(TEXT, max_frames=8)


def record(folder, part: str) -> None:
    """Let the manifest agree with a graph that was changed."""
    from voxport.manifest import record_file

    manifest = Manifest.read(folder)
    old = manifest.parts[part]
    files = {name: record_file(folder / name) for name in old.files}
    dataclasses.replace(manifest, parts=manifest.parts | {part: dataclasses.replace(old, files=files)}).write(folder)


def test_a_speaker_of_the_other_family_says_so():
    from voxport.run.higgs import Speaker as HiggsSpeaker

    with pytest.raises(UserError, match="omnifish"):
        HiggsSpeaker.load(built("axial_px"))


# The script


def test_the_script_speaks_a_dialogue_and_writes_codes_and_a_report(tmp_path):
    (tmp_path / "turns.txt").write_text("pl_1: Tak.\n\npl_2: Nie.\n", encoding="utf-8")
    done = run_cli("inference.py", "--model-path", built("axial_px"), "--dialogue", tmp_path / "turns.txt", "--max-frames", 16,
                   "--out", tmp_path / "x.wav", "--save-codes", tmp_path / "x.npz", "--json", "--threads", 1)  # fmt: skip
    assert done.returncode == 0, done.stderr
    samples, rate = soundfile.read(tmp_path / "x.wav")
    report = json.loads(done.stdout)
    with np.load(tmp_path / "x.npz") as saved:
        assert saved["codes"].shape == (10, report["frames"])
        assert np.array_equal(saved["semantic"], saved["codes"][0])
        assert (len(samples), rate) == (HOP * report["frames"], RATE)
    assert report["health"]["real_time_factor"].keys() == {"prefill", "body", "residual", "codec", "all"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--language", "xx", "--text", "hello"], "no language"), (["--speaker", "nobody", "--text", "hello"], "no speaker"),
        (["--dialogue", "missing.txt"], "does not exist"),
    ],
)  # fmt: skip
def test_the_script_refuses_in_one_line(flags, message, tmp_path):
    import inference
    from voxport.errors import BAD_INPUT

    with pytest.raises(UserError, match=message) as refused:
        inference.main(["--model-path", str(built("axial_px")), "--out", str(tmp_path / "x.wav"), *flags])
    assert refused.value.code == BAD_INPUT


def test_flags_of_this_family_are_refused_by_a_higgs_build(tiny_build, tmp_path):
    import inference

    with pytest.raises(UserError, match="--language has no use"):
        inference.main(["--model-path", str(tiny_build), "--text", "hello", "--language", "pl", "--out", str(tmp_path / "x.wav")])


@pytest.mark.parametrize(("line", "message"), [("Tak.", "line 1"), ("pl_9: Tak.", "no speaker"), ("\n", "no line to speak")])
def test_dialogues_that_cannot_be_read_are_refused(line, message, tmp_path):
    (tmp_path / "turns.txt").write_text(line, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        omnifish_text.read_dialogue(tmp_path / "turns.txt", parts_of(built("axial_px")).manifest)


def test_speaking_needs_none_of_what_building_needs(tmp_path):
    """A machine that only speaks has requirements-run.txt, and with it a dialogue in a cloned voice is spoken."""
    soundfile.write(tmp_path / "voice.wav", 0.3 * np.sin(np.arange(3 * HOP) / 30), RATE)
    (tmp_path / "turns.txt").write_text("pl_1: Tak.\npl_2: Nie.\n", encoding="utf-8")
    flags = ["--model-path", built("axial_px"), "--dialogue", tmp_path / "turns.txt", "--ref-audio", tmp_path / "voice.wav",
             "--ref-text", "Hm.", "--max-frames", 8, "--out", tmp_path / "x.wav", "--threads", 1, "--seed", 1]  # fmt: skip
    blocked = "torch", "transformers", "safetensors", "onnx", "olive", "onnxruntime_genai"
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); import inference; sys.exit(inference.main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, *map(str, flags)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.wav").is_file()


def test_a_folder_is_opened_by_the_speaker_of_its_family(tiny_build):
    from voxport.run import higgs
    from voxport.run.load import load_speaker

    assert isinstance(load_speaker(built("axial_px"), threads=1), Speaker)
    assert isinstance(load_speaker(tiny_build, threads=1), higgs.Speaker)


def test_eight_threads_that_share_a_speaker_make_the_codes_that_each_would_make_alone(speaker):
    """From the first load on; every other one is a stream, one in four has a reference."""
    voice = (np.sin(np.arange(30_000) / 9).astype(np.float32) * 0.3, RATE)

    def work(which: Speaker, number: int) -> list:
        options = {"seed": number, "temperature": 1.0, "residual_temperature": 1.0, "ref_audio": voice if number % 4 == 1 else None}
        if number % 2:
            stream = which.speak_stream(TEXT, **options)
            list(stream)
            return stream.speech.codes.tolist()
        return which.speak(TEXT, progress=False, **options).codes.tolist()

    alone = [work(speaker, number) for number in range(8)]
    shared = Speaker.load(built("axial_px"), threads=1, warn=lambda message: None)
    assert together(lambda number: work(shared, number)) == alone
    assert alone[0] != alone[2]
