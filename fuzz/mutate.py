"""Damage: random changes to bytes, to JSON and to text, all drawn from one seeded generator."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable

NUMBERS = (0, 1, 2, 3, 7, 8, 255, 256, 1023, 1024, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
# Values that stand where another is expected
STRANGERS = (
    None, True, False, 0, 1, -1, 2, 3, 2**31, 2**63, 10**30, -(10**30), 0.5, -0.5, 1e308, 1e-320, float("nan"), float("inf"), "", "0",
    "x", "..", "../secret", "/etc/passwd", "a\\b", "C:x", "a\0b", "\ud800", "{}", "{0.__class__}", "{spk!r:>9999999}", "é" * 300,
    [], {}, [None], [[]], {"a": None}, [0, 0], [-1, 5], {"": ""},
)  # fmt: skip
TOKEN = "\x00HERE\x00"  # stands in a JSON value for what json.dumps would never write


def mutate_bytes(rng: random.Random, data: bytes, head: int | None = None) -> bytes:
    """One to four changes, in the first `head` bytes for the most part."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        change = rng.choice((_flip, _overwrite, _overwrite, _overwrite, _insert, _delete, _truncate, _double))
        reach = len(changed) if head is None or rng.random() < 0.2 else min(head, len(changed))
        change(rng, changed, rng.randrange(reach) if reach else 0)
    return bytes(changed)


def _flip(rng: random.Random, data: bytearray, place: int) -> None:
    if data:
        data[place] ^= 1 << rng.randrange(8)


def _overwrite(rng: random.Random, data: bytearray, place: int) -> None:
    """A number that is an edge of its type over one to eight bytes, often on an even place as fields are."""
    size = rng.choice((1, 2, 4, 8))
    place -= place % rng.choice((1, 2, 4)) if rng.random() < 0.7 else 0
    number = rng.choice(NUMBERS) if rng.random() < 0.8 else rng.getrandbits(64)
    data[place : place + size] = (number % 2 ** (8 * size)).to_bytes(size, rng.choice(("little", "big")))


def _insert(rng: random.Random, data: bytearray, place: int) -> None:
    data[place:place] = rng.randbytes(rng.randint(1, 16))


def _delete(rng: random.Random, data: bytearray, place: int) -> None:
    del data[place : place + rng.randint(1, 16)]


def _truncate(rng: random.Random, data: bytearray, place: int) -> None:
    del data[rng.randrange(len(data) + 1) if rng.random() < 0.5 else place :]


def _double(rng: random.Random, data: bytearray, place: int) -> None:
    data[place:place] = data[place : place + rng.randint(1, 64)]


def mutate_json(rng: random.Random, value: dict | list, within: tuple = ()) -> bytes:
    """A JSON document with one to three changes below the path `within`, in its structure or in its spelling."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        root = value
        for key in within:
            root = root[key]
        change_somewhere(rng, root)
    if rng.random() < 0.8:
        return dump(value)
    return _respell(rng, value)


def dump(value) -> bytes:
    """JSON as Python writes it: NaN, Infinity and lone surrogates included."""
    return json.dumps(value).encode("utf-8")


def change_somewhere(rng: random.Random, value: dict | list) -> None:
    """Remove, rename, double, swap or replace one entry somewhere in nested dictionaries and lists."""
    holder, key = _pick(rng, value)
    if holder is None:
        return
    change = rng.choice((_remove, _rename, _replace, _replace, _replace, _nudge, _nudge, _grow, _swap))
    change(rng, holder, key)


def _pick(rng: random.Random, value: dict | list) -> tuple:
    """A container and one of its keys. Small containers are as likely as large ones, so that no table hides the rest."""
    containers, todo = [], [value]
    while todo:
        found = todo.pop()
        items = found.values() if isinstance(found, dict) else found
        if found:
            containers.append(found)
        todo += [item for item in items if isinstance(item, (dict, list))]
    if not containers:
        return None, None
    holder = rng.choice(containers)
    return holder, rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))


def _remove(rng: random.Random, holder, key) -> None:
    del holder[key]


def _rename(rng: random.Random, holder, key) -> None:
    if isinstance(holder, dict):
        holder[rng.choice((f"{key}_", str(key).upper(), "", "..", "a/b", "extra"))] = holder.pop(key)
    else:
        holder.insert(key, holder[key])


def _replace(rng: random.Random, holder, key) -> None:
    holder[key] = copy.deepcopy(rng.choice(STRANGERS))


def _nudge(rng: random.Random, holder, key) -> None:
    """Another value of the same type."""
    old = holder[key]
    if isinstance(old, bool) or old is None:
        holder[key] = not old
    elif isinstance(old, (int, float)):
        holder[key] = rng.choice((old + 1, old - 1, -old, old * 2, old * 1000, old * 10**9, type(old)(rng.choice(NUMBERS))))
    elif isinstance(old, str):
        holder[key] = rng.choice((old + "x", old[:-1], old[::-1], old.upper(), old + "/../x", rng.choice(("", " ", "\n")) + old))
    else:
        _replace(rng, holder, key)


def _grow(rng: random.Random, holder, key) -> None:
    """Wrap a value."""
    holder[key] = rng.choice(([holder[key]], {"x": holder[key]}, [holder[key], copy.deepcopy(holder[key])]))


def _swap(rng: random.Random, holder, key) -> None:
    other = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    holder[key], holder[other] = holder[other], holder[key]


def _respell(rng: random.Random, value) -> bytes:
    """Damage below the structure: numbers and nesting that no dump writes, doubled keys, wrong bytes."""
    holder, key = _pick(rng, value)
    if holder is not None and rng.random() < 0.6:
        holder[key] = TOKEN
        depth = rng.choice((100, 3000, 200_000))
        odd = rng.choice(
            ("9" * 5000, "1e999", "-1e999", "NaN", "-Infinity", "1.", "[" * depth + "]" * depth, '{"a":' * depth, "'a'", "\ufeff")
        )
        return json.dumps(value).replace(json.dumps(TOKEN), odd).encode("utf-8")
    text = json.dumps(value)
    spelling: Callable[[], bytes] = rng.choice((
        lambda: _double_key(rng, text),
        lambda: b"\xef\xbb\xbf" + text.encode(),
        lambda: text.encode("utf-16"),
        lambda: text.encode() + rng.randbytes(3),
        lambda: text.encode()[: rng.randrange(len(text))],
        lambda: mutate_bytes(rng, text.encode()),
    ))  # fmt: skip
    return spelling()


def _double_key(rng: random.Random, text: str) -> bytes:
    """A key that is there gets a second, strange value."""
    names = [piece for piece in text.split('"')[1::2] if piece] or ["x"]
    place = rng.choice([i for i, letter in enumerate(text) if letter == "{"] or [0])
    return (text[: place + 1] + f"{json.dumps(rng.choice(names))}: {json.dumps(rng.choice(STRANGERS))}, " + text[place + 1 :]).encode()


def mutate_safetensors(rng: random.Random, data: bytes) -> bytes:
    """A safetensors file with changes to its header: as JSON with a length that fits, or as bytes."""
    length = struct.unpack("<Q", data[:8])[0]
    if rng.random() < 0.25:
        return mutate_bytes(rng, data, 8 + length)
    header = mutate_json(rng, json.loads(data[8 : 8 + length]))
    said = len(header) if rng.random() < 0.9 else rng.choice(NUMBERS)
    return struct.pack("<Q", said) + header + data[8 + length :]


LETTERS = "aB3 .,!?:;—\n\t…。！，你好łéß\u0301\u200b\u202e\ufeff\x00\x07\ud800\U0001f642<|>\"'«»()[]{}"


def random_text(rng: random.Random, tokens: tuple[str, ...], longest: int = 60) -> str:
    """Words, marks, tokens whole and broken, letters of many scripts, and what is no letter."""
    pieces = []
    for _ in range(rng.randrange(longest)):
        kind = rng.random()
        if kind < 0.5:
            pieces.append(
                rng.choice(("Hello", "you", "end.", "Mr.", "3.14", "1,000", "https://a.b/c?d=e.f", "z.B.", '"Go!"', "x" * 40, "\n\n"))
            )
        elif kind < 0.7:
            token = rng.choice(tokens)
            pieces.append(token if rng.random() < 0.7 else token[: rng.randrange(len(token))] + rng.choice(("", token)))
        else:
            pieces.append("".join(rng.choice(LETTERS[:36] if rng.random() < 0.9 else LETTERS) for _ in range(rng.randrange(12))))
        pieces.append(rng.choice((" ", " ", " ", "", "\n")))
    return "".join(pieces)
