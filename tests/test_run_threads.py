"""Threads that share one speaker: each hears what it would hear alone, and nothing that the process has in common is disturbed."""

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


def test_files_obey_the_umask_and_writing_one_never_touches_it(tmp_path, monkeypatch):
    """It can only be read by changing it, for all threads: two that did so at once could leave it changed for good."""
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patch, atomic_path(tmp_path / "x.txt") as path:
            patch.setattr(os, "umask", lambda mask: pytest.fail("the umask was changed"))
            path.write_text("x", encoding="utf-8")
    finally:
        left = os.umask(before)
    assert left == 0o027 and (tmp_path / "x.txt").read_text(encoding="utf-8") == "x"
    if os.name == "posix":
        assert (tmp_path / "x.txt").stat().st_mode & 0o777 == 0o640
