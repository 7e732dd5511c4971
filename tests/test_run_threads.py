"""Threads that share one speaker: each hears what it would hear alone, and none disturbs what the process has in common."""

import os
import threading

import numpy as np
import pytest
from conftest import DEMO

from voxport.files import atomic_path
from voxport.run import trust
from voxport.run.higgs import Speaker
from voxport.run.request import Wish

THREADS = 8
VOICE = DEMO.parent / "voices" / "female.wav"


def wish(number: int) -> Wish:
    """Seeds differ; every third is a clone."""
    reference = {"ref_audio": VOICE, "ref_text": "Hello"} if number % 3 == 1 else {}
    return Wish(f"Hello number {number}", seed=number, max_frames=6 + number, **reference)


def speak(speaker: Speaker, number: int) -> np.ndarray:
    """Codes of one wish, spoken at once, as a stream or in a batch with a longer one."""
    if number % 4 == 2:
        stream = speaker.stream(wish(number))
        list(stream)
        return stream.speech.codes
    if number % 4 == 3:
        return dict(speaker.speak_many([wish(number), wish(number + 10)]))[0].codes
    return speaker.grant(wish(number), progress=False).codes


def together(work, count: int = THREADS) -> list:
    """Results of work(0), work(1), ..., each on a thread of its own, all begun at once."""
    results, gate = [None] * count, threading.Barrier(count)

    def run(number: int) -> None:
        gate.wait(30)
        try:
            results[number] = work(number)
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


@pytest.mark.parametrize("num_threads", [1, 2])
def test_eight_threads_make_the_codes_that_each_would_make_alone(num_threads, tiny_int4, tmp_path, monkeypatch):
    """From the first load on: nothing is loaded or proved when they begin."""
    alone = [speak(Speaker.load(tiny_int4, threads=num_threads), number) for number in range(THREADS)]
    monkeypatch.setenv("VOXPORT_CACHE", str(tmp_path))
    replays = []
    monkeypatch.setattr(trust, "replay", lambda *a, real=trust.replay: replays.append(a[3]) or real(*a))
    shared = Speaker.load(tiny_int4, threads=num_threads)
    for number, codes in enumerate(together(lambda number: speak(shared, number))):
        assert not isinstance(codes, BaseException), repr(codes)
        assert codes.tolist() == alone[number].tolist(), number
    asked = [name for names in replays for name in names]
    assert len(asked) == len(set(asked)) and set(asked) == set(shared.manifest.parts)  # each part gave its proof once


def test_threads_that_write_files_leave_the_umask_and_obey_it(tmp_path):
    before = os.umask(0o027)
    try:

        def write(number: int) -> int:
            for i in range(50):
                with atomic_path(tmp_path / f"{number}-{i}.txt") as path:
                    path.write_text("x", encoding="utf-8")
            return 50

        assert together(write) == [50] * THREADS
        left = os.umask(0o027)
    finally:
        os.umask(before)
    assert left == 0o027
    assert len(list(tmp_path.iterdir())) == 50 * THREADS
    if os.name == "posix":
        assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}
