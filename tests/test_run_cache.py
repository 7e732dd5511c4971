"""The cache that the decoder writes in place: it equals one that grows, rows do not touch each other, nothing is cut off."""

import numpy as np
import onnxruntime as ort
import pytest
from run_fakes import D, decoder_session, make_manifest

from voxport.run.cache import GROWTH, Cache, Store
from voxport.run.decoder import Decoder
from voxport.run.higgs import Speaker
from voxport.run.session import Graph

MANIFEST = make_manifest()


@pytest.fixture(scope="module")
def decoder(tiny_build):
    return Speaker.load(tiny_build, threads=1).decoder


@pytest.fixture
def stand_in():
    return Decoder(Graph(decoder_session(), "llm_decoder"), MANIFEST.kv_cache, MANIFEST.dims)


def noise(decoder, *shape, seed=0):
    return np.random.default_rng(seed).normal(size=(*shape, decoder.dims.hidden_size)).astype(np.float32)


def grow(decoder, chunks):
    """The plain way: past goes in, a longer present comes out."""
    session, dims = decoder.graph.session, decoder.dims
    past = {name: np.zeros((1, dims.num_kv_heads, 0, dims.head_dim), np.float32) for name in decoder.past_names}
    total, made = 0, []
    for chunk in chunks:
        total += chunk.shape[1]
        feeds = {"inputs_embeds": chunk, "attention_mask": np.ones((1, total), np.int64)}
        hidden, *present = session.run(["hidden_states", *decoder.present_names], feeds | past)
        past = dict(zip(decoder.past_names, present, strict=True))
        made.append(hidden)
    return made


def test_a_cache_written_in_place_gives_the_bits_of_one_that_grows(decoder):
    chunks = [noise(decoder, 1, n, seed=n) for n in (11, 7, 1, 1, 1)]
    cache, made = decoder.empty_cache(), []
    for chunk in chunks:
        hidden, cache = decoder.advance(cache, chunk)
        made.append(hidden)
    assert all((a == b).all() for a, b in zip(made, grow(decoder, chunks), strict=True))
    assert cache.lengths == (21,)


def test_steps_write_into_the_same_memory_until_it_is_full(decoder):
    cache = decoder.empty_cache()
    moves, places = 0, set()
    for i in range(GROWTH + 2):
        _, cache = decoder.step(cache, noise(decoder, 1, 1, seed=i))
        places.add(cache.store._tensors[0].ctypes.data)
        moves = len(places)
        assert cache.store.capacity >= cache.length
    assert moves == 2 and cache.store.capacity == 2 * GROWTH


def test_what_was_heard_survives_growth(decoder):
    long = noise(decoder, 1, GROWTH - 1)
    tail = [noise(decoder, 1, 1, seed=i) for i in range(3)]
    _, cache = decoder.advance(decoder.empty_cache(), long)
    for step, expected in zip(tail, grow(decoder, [long, *tail])[1:], strict=True):
        hidden, cache = decoder.step(cache, step)
        assert (hidden == expected).all()


def batch_of(decoder, prompts):
    """Each prompt read into its own row."""
    cache, lengths = decoder.empty_cache(len(prompts)), []
    for row, prompt in enumerate(prompts):
        _, own = decoder.prefill(prompt, Cache(cache.store, (0,), row))
        lengths += own.lengths
    return Cache(cache.store, tuple(lengths))


def test_rows_of_unequal_length_step_together_as_each_would_alone(decoder):
    prompts = [noise(decoder, 1, n, seed=n) for n in (11, 3, 20)]
    steps = [noise(decoder, 3, 1, seed=90 + i) for i in range(4)]
    cache = batch_of(decoder, prompts)
    made = []
    for step in steps:
        hidden, cache = decoder.step(cache, step)
        made.append(hidden)
    for row, prompt in enumerate(prompts):
        alone = grow(decoder, [prompt, *(step[row : row + 1] for step in steps)])[1:]
        for together, expected in zip(made, alone, strict=True):
            np.testing.assert_allclose(together[row], expected[0], atol=1e-5)


def test_a_row_that_is_moved_goes_on_where_it_was(decoder):
    prompts = [noise(decoder, 1, n, seed=n) for n in (4, 9)]
    step = noise(decoder, 1, 1, seed=50)
    cache = batch_of(decoder, prompts)
    cache.store.move(1, 0, 9)
    hidden, _ = decoder.step(Cache(cache.store, (9,)), step)
    assert (hidden == grow(decoder, [prompts[1], step])[1]).all()


def test_a_prefix_that_was_read_out_can_begin_another_cache(decoder):
    prefix, rest = noise(decoder, 1, 12, seed=1), noise(decoder, 1, 5, seed=2)
    _, first = decoder.prefill(prefix)
    pieces = first.read()
    dims = decoder.dims
    assert {piece.shape for piece in pieces} == {(dims.num_kv_heads, 12, dims.head_dim)}
    again = Cache(decoder.empty_cache(3).store, (0,), 2).write(pieces)
    hidden, again = decoder.advance(again, rest)
    assert (hidden == grow(decoder, [prefix, rest])[1]).all() and again.lengths == (17,)


@pytest.mark.parametrize("position_ids", [False, True])
def test_masks_and_positions_follow_each_row(position_ids):
    session = decoder_session(position_ids)
    decoder = Decoder(Graph(session, "llm_decoder"), MANIFEST.kv_cache, MANIFEST.dims)
    cache = batch_of(decoder, [np.ones((1, n, D), np.float32) for n in (2, 5)])
    hidden, cache = decoder.step(cache, np.ones((2, 1, D), np.float32))
    assert hidden[:, 0, 0].tolist() == [3, 6] and cache.lengths == (3, 6)
    assert session.seen[-1]["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]]


def test_one_row_advances_without_touching_its_neighbours(stand_in):
    cache = batch_of(stand_in, [np.full((1, 3, D), value, np.float32) for value in (1, 2, 3)])
    before = cache.store.read(0, 3), cache.store.read(2, 3)
    hidden, own = stand_in.step(Cache(cache.store, (3,), 1), np.full((1, 1, D), 7, np.float32))
    assert hidden[0, 0, 0] == 13 and own.lengths == (4,)
    for row, kept in zip((0, 2), before, strict=True):
        assert all((a == b).all() for a, b in zip(cache.store.read(row, 3), kept, strict=True))


class OnDevice:
    """Stands in for memory that NumPy cannot see: it is read and made as a whole."""

    def __init__(self, array):
        self.array = np.ascontiguousarray(array)

    def data_ptr(self):
        return self.array.ctypes.data

    def numpy(self):
        return self.array.copy()


def test_memory_of_a_device_is_read_written_and_moved_through_the_host(monkeypatch):
    monkeypatch.setattr(ort.OrtValue, "ortvalue_from_numpy", staticmethod(lambda array, memory, device: OnDevice(array)))
    store = Store(2, (3, 1, 4), np.float16, "cuda")
    pieces = [np.full((1, 5, 4), value, np.float16) for value in (1, 2)]
    store.write(1, pieces)
    store.bindings["kept"] = None
    store.move(1, 2, 5)
    assert not store.bindings  # the memory lies elsewhere now
    assert all((a == b).all() for a, b in zip(store.read(2, 5), pieces, strict=True))
    assert not any(piece.any() for piece in store.read(0, 5))
    store.reserve(GROWTH + 1)
    assert all((a == b).all() for a, b in zip(store.read(1, 5), pieces, strict=True))


def test_growth_touches_no_row_that_was_never_used(monkeypatch):
    store = Store(1, (4, 1, 8), np.float32, "cpu")
    store.write(1, [np.ones((1, 3, 8), np.float32)])
    assert store.used == 2
    store._tensors[0][2:] = 7  # would be carried along if it were read
    store.reserve(GROWTH + 1)
    assert not store._tensors[0][2:].any() and store.read(1, 3)[0].tolist() == np.ones((1, 3, 8)).tolist()


def test_the_size_of_a_store_is_what_its_tensors_take():
    store = Store(4, (2, 3, 8), np.float32, "cpu")
    assert store.nbytes == 0
    store.reserve(1)
    assert store.capacity == GROWTH and store.nbytes == 4 * 2 * 3 * GROWTH * 8 * 4
