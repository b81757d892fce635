"""Ways to damage a message: in its bytes, and in one place of its content.

All draws come from the given generator, so that a seed gives the same bytes everywhere.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

encode = msgspec.msgpack.Encoder().encode

ODD_VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    2**31,
    2**53,
    2**63 - 1,
    2**64 - 1,
    -(2**63),
    float("nan"),
    float("inf"),
    -0.0,
    "",
    "x" * 300,
    "Connect",
    "\u0000",
    b"",
    b"\xff" * 40,
    [],
    {},
    {1: 2},
    {"a": []},
    [[[[[]]]]],
    [0] * 200,
    msgspec.msgpack.Ext(5, b"ext"),
]
_NUMBERS = (0, 1, 2, 3, 5, 16, 31, 127, 128, 255, 1000, 2**16, 2**31 - 1, 2**32, 2**53 - 1)
_TEXTS = ("", "a", "\0", "é", "\U0001f600", "x" * 300)


def harmed(bodies: list[bytes], rng: random.Random) -> Iterator[bytes]:
    """Yield damaged messages without end, most of them nearly valid."""
    trees = [msgspec.msgpack.decode(body) for body in bodies]
    kinds: list[Callable[[], bytes]] = [
        lambda: edited(rng.choice(bodies), rng),
        lambda: cut(rng.choice(bodies), rng),
        lambda: spliced(rng.choice(bodies), rng.choice(bodies), rng),
        lambda: encode(_regrown(rng.choice(trees), trees, rng)),
        lambda: encode(_regrown(rng.choice(trees), trees, rng)),
        lambda: encode(_tweaked(rng.choice(trees), rng)),
        lambda: rng.randbytes(rng.randint(0, 60)),
    ]
    while True:
        yield rng.choice(kinds)()


def harmed_bytes(bodies: list[bytes], rng: random.Random) -> Iterator[bytes]:
    """Yield damaged messages of another format than msgpack, without end."""
    while True:
        kind, body = int(rng.random() * 5), rng.choice(bodies)
        if kind < 2:
            yield edited(body, rng)
        elif kind == 2:
            yield cut(body, rng)
        elif kind == 3:
            yield spliced(body, rng.choice(bodies), rng)
        else:
            yield rng.randbytes(int(rng.random() * 61))


def edited(body: bytes, rng: random.Random) -> bytes:
    """Change some bytes."""
    changed = bytearray(body or b"\0")
    for _ in range(1 + int(rng.random() * 4)):
        changed[int(rng.random() * len(changed))] = int(rng.random() * 256)
    return bytes(changed)


def cut(body: bytes, rng: random.Random) -> bytes:
    """Cut off the end, or append bytes."""
    if rng.random() < 0.7:
        return body[: int(rng.random() * len(body))]
    return body + rng.randbytes(3)


def spliced(one: bytes, other: bytes, rng: random.Random) -> bytes:
    """Join the head of one message and the tail of another."""
    return one[: int(rng.random() * (len(one) + 1))] + other[int(rng.random() * (len(other) + 1)) :]


def _regrown(tree: Any, trees: list[Any], rng: random.Random) -> Any:
    """Change one place of a well-formed message: an odd value, more, less, or another branch."""
    if isinstance(tree, list) and tree and rng.random() < 0.85:
        grown = list(tree)
        place = int(rng.random() * len(grown))
        match int(rng.random() * 8):
            case 0:
                del grown[place]
            case 1:
                grown.insert(place, grown[place])
            case _:
                grown[place] = _regrown(grown[place], trees, rng)
        return grown
    if isinstance(tree, dict) and tree and rng.random() < 0.5:
        key = rng.choice(list(tree))
        return {**tree, key: rng.choice(ODD_VALUES)}
    if rng.random() < 0.2:
        branch = rng.choice(trees)
        return rng.choice(branch) if isinstance(branch, list) else branch
    return rng.choice(ODD_VALUES)


def _tweaked(tree: Any, rng: random.Random) -> Any:
    """Change one value of a well-formed message to another one of its type."""
    match tree:
        case [_, *_]:
            place = int(rng.random() * len(tree))
            return [*tree[:place], _tweaked(tree[place], rng), *tree[place + 1 :]]
        case dict() if tree:
            key = rng.choice(list(tree))
            return {**tree, key: _tweaked(tree[key], rng)}
        case bool():
            return not tree
        case int():
            return rng.choice(_NUMBERS) if rng.random() < 0.5 else abs(tree - 1)
        case float():
            return rng.choice((0.0, 0.5, -1.0, 1e300, float("nan"), float("-inf")))
        case str():
            return rng.choice(_TEXTS)
        case bytes():
            return tree[: int(rng.random() * len(tree))] if tree else b"abcd"
        case _:
            return rng.choice((None, 1, [], b""))
