"""Readers that do what the fuzzer must notice: one fault each, in their second case."""

import os
from pathlib import Path

from voxport.errors import UserError


class Faulty:
    """Accepts case 0, refuses case 2; case 1 is `fault`."""

    weight = 1

    def __init__(self, name, fault):
        self.name, self.fault, self.case = name, fault, -1

    def prepare(self):
        pass

    def run(self, rng, folder: Path):
        number = int(rng.random() * 0) + self.next_case()
        if number == 1:
            self.fault(folder)
        if number == 2:
            raise UserError("no")

    def next_case(self):
        self.case += 1
        return max(0, self.case - 1)  # the first run is the warm-up


def spin(folder):
    while True:
        pass


def litter(folder):
    import ctypes

    libc = ctypes.CDLL(None)  # unseen by Python's audit
    libc.close(libc.creat(os.fsencode(folder.parent / "litter"), 0o600))


READERS = [
    Faulty("raises", lambda folder: {}["x"]),
    Faulty("asserts", lambda folder: [][0]),
    Faulty("dies", lambda folder: os._exit(7)),
    Faulty("spins", spin),
    Faulty("eats", lambda folder: len(bytearray(1 << 30))),
    Faulty("peeks", lambda folder: open("/etc/hostname", encoding="utf-8").close()),
    Faulty("strays", lambda folder: (folder.parent / "x").write_text("x", encoding="utf-8")),
    Faulty("litters", litter),
]
