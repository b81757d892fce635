"""The workloads: prompts of random token ids, and how many tokens each request generates.

All requests are greedy and ignore the end of text, so that every server computes the same number of
tokens. The number of a repetition is the seed, so no prompt is sent twice to a server.
"""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import NamedTuple

import msgspec

LOWEST_ID, HIGHEST_ID = 100, 16_000
"""Prompts are drawn from [lowest, highest): above special tokens, below most vocabularies."""
WARM_UP_REQUESTS = 16
LONG_OUTPUT = 64
EN_DASH = "\N{EN DASH}"
"""Between the ends of a range, in titles and tables."""


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One prompt."""

    prompt: list[int]
    num_tokens: int
    """The number of tokens to generate."""
    at_s: float = 0.0
    """When it is sent, after the start of the run."""


class Workload(NamedTuple):
    """A kind of load, made anew for each seed."""

    name: str
    title: str
    make: Callable[[Random, range], list[Request]]
    """Takes the ids that prompts may have."""

    def requests(self, seed: int, ids: range) -> list[Request]:
        """Return the requests of one repetition."""
        return self.make(Random(f"{self.name}-{seed}"), ids)


def token_ids(vocab_size: int) -> range:
    """Return the ids that prompts may have for a vocabulary of this size."""
    highest = min(HIGHEST_ID, vocab_size)
    return range(min(LOWEST_ID, highest - 1), highest)


def _prompt(random: Random, ids: range, num_tokens: int) -> list[int]:
    return [random.randrange(ids.start, ids.stop) for _ in range(num_tokens)]


def _mixed(random: Random, ids: range) -> Request:
    return Request(_prompt(random, ids, random.randint(32, 256)), random.randint(32, 128))


def _same_size(
    count: int, prompt_tokens: int, num_tokens: int, random: Random, ids: range
) -> list[Request]:
    return [Request(_prompt(random, ids, prompt_tokens), num_tokens) for _ in range(count)]


def _shared_prefix(random: Random, ids: range) -> list[Request]:
    prefix = _prompt(random, ids, 512)
    return [Request(prefix + _prompt(random, ids, 32), 32) for _ in range(64)]


def _arrivals(rate: float, count: int, random: Random, ids: range) -> list[Request]:
    requests, at_s = [], 0.0
    for _ in range(count):
        at_s += random.expovariate(rate)
        requests.append(msgspec.structs.replace(_mixed(random, ids), at_s=at_s))
    return requests


W1 = Workload(
    "w1",
    f"W1: 64 requests at once, 32{EN_DASH}256 in, 32{EN_DASH}128 out",
    lambda random, ids: [_mixed(random, ids) for _ in range(64)],
)
W2 = Workload("w2", "W2: one request, 128 in, 128 out", partial(_same_size, 1, 128, 128))
W3 = Workload("w3", "W3: 64 requests sharing 512 tokens, 32 own, 32 out", _shared_prefix)
WN = Workload(
    "wn",
    f"WN: 256 requests at once, 100{EN_DASH}1,024 in, 100{EN_DASH}1,024 out",
    lambda random, ids: [
        Request(_prompt(random, ids, random.randint(100, 1024)), random.randint(100, 1024))
        for _ in range(256)
    ],
)
OFFLINE = {workload.name: workload for workload in (W1, W2, W3, WN)}
"""The workloads that need no server."""
DEFAULT_OFFLINE = ("w1", "w2", "w3")
"""WN takes a GPU, or hours."""


def poisson(rate: float, count: int) -> Workload:
    """W4: requests like those of W1 that arrive at random times."""
    title = f"W4: {count} requests of W1's sizes, Poisson arrivals at {rate:g}/s"
    return Workload("w4", title, partial(_arrivals, rate, count))


def concurrent(count: int) -> Workload:
    """W5: equal requests, for the cost of everything around the model."""
    title = f"W5-{count}: {count} requests at once, 32 in, 128 out"
    return Workload(f"w5-{count}", title, partial(_same_size, count, 32, 128))


def long_prompt(prompt_tokens: int) -> Workload:
    """W6: one long prompt alone."""
    title = f"W6: one request, {prompt_tokens:,} in, {LONG_OUTPUT} out"
    make = partial(_same_size, 1, prompt_tokens, LONG_OUTPUT)
    return Workload(f"w6-{prompt_tokens}", title, make)


def longest(workload: Workload, ids: range) -> int:
    """Return the context of a workload's longest request, in tokens."""
    return max(len(item.prompt) + item.num_tokens for item in workload.requests(0, ids))
