"""`prefill`: chats alongside long prompts, with and without replicas that compute only prompts.

The replicas are null models whose steps take a time that grows with their tokens, and no processor,
so that they do not slow each other down. Their blocks are a few bytes: reading one costs nothing.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import NamedTuple

from protocol.client import ReplicatedClient, ReplicatedOptions
from protocol.config.settings import configure
from protocol.process.launch import EngineProcesses
from protocol.sampling import SamplingParams
from scripts.bench.client import BenchError
from scripts.bench.load import itl_figures, percentile
from scripts.bench.report import Record, RunRecord
from scripts.bench.rounds import add
from scripts.bench.workloads import token_ids
from worker_proc.startup.start import NULL_VOCAB_SIZE

_READY_TIMEOUT_S = 60.0
_STORE_BYTES = 2**30
CHAT_TOKENS = (32, 128)
CHAT_OUTPUT = (64, 192)
LONG_TOKENS = (2000, 6000)
LONG_OUTPUT = (16, 64)


class Arrival(NamedTuple):
    """A request, when it is sent, and its kind."""

    at_s: float
    is_long: bool
    prompt: list[int]
    num_tokens: int


class Times(NamedTuple):
    """When the tokens of a request came, on the monotonic clock."""

    is_long: bool
    due: float
    tokens: list[float]


def run(arguments: argparse.Namespace, record: Record) -> None:
    """Send the same requests to the same engine, each time to other roles of its replicas."""
    roles = {_name(count): count for count in (0, *arguments.prefill_replicas)}
    record.servers = dict.fromkeys(roles, "started by the tool")
    record.peers = list(roles)[1:]
    record.engine = {"model": "null", "flags": []}
    name = f"{arguments.replicas} replicas"
    rates = f"{arguments.chats_per_s:g} chats and {arguments.long_per_s:g} long prompts a second"
    record.workloads[name] = f"{name}, {rates}"
    config = configure(
        model="null",
        data_parallel_size=arguments.replicas,
        null_step_ms=arguments.step_ms,
        null_token_ms=arguments.token_ms,
        kv_offload_bytes=_STORE_BYTES,
        log_level="error",
    )
    with EngineProcesses.start(config) as engine:
        for repeat in range(arguments.repeats):
            seed = arguments.seed + repeat
            for role, count in roles.items():
                arrivals = _arrivals(arguments, seed, count)
                figures = asyncio.run(_measure(engine, arrivals, count, arguments.timeout_s))
                add(record, RunRecord(name, role, repeat, seed, figures))


def _name(count: int) -> str:
    return f"{count} for prompts" if count else "all alike"


def _arrivals(arguments: argparse.Namespace, seed: int, role: int) -> list[Arrival]:
    """Draw the requests of a run, in their order; roles differ in the tokens of prompts alone."""
    random, tokens = Random(f"prefill-{seed}"), Random(f"prefill-{seed}-{role}")
    ids = token_ids(NULL_VOCAB_SIZE)

    def draw(rate: float, is_long: bool) -> list[Arrival]:
        drawn, at_s = [], random.expovariate(rate)
        while at_s < arguments.seconds:
            length = random.randint(*(LONG_TOKENS if is_long else CHAT_TOKENS))
            num_tokens = random.randint(*(LONG_OUTPUT if is_long else CHAT_OUTPUT))
            prompt = tokens.choices(ids, k=length)
            drawn.append(Arrival(at_s, is_long, prompt, num_tokens))
            at_s += random.expovariate(rate)
        return drawn

    return sorted(draw(arguments.chats_per_s, False) + draw(arguments.long_per_s, True))


async def _measure(
    engine: EngineProcesses, arrivals: Sequence[Arrival], prefill_replicas: int, timeout_s: float
) -> dict[str, float]:
    options = ReplicatedOptions(prefill_replicas=prefill_replicas)
    async with ReplicatedClient(engine.addresses, options) as client:
        for each in client.clients:
            await each.wait_ready(_READY_TIMEOUT_S)
        began = time.monotonic()
        times = await asyncio.gather(*(_send(client, one, began, timeout_s) for one in arrivals))
        num_handed_over = client.num_handed_over
    first = {
        is_long: [each.tokens[0] - each.due for each in times if each.is_long is is_long]
        for is_long in (False, True)
    }
    return itl_figures(each.tokens for each in times) | {
        "longest_gap_p90_ms": 1000 * percentile(list(map(_longest_gap, times)), 90),
        "chat_ttft_p50_ms": 1000 * percentile(first[False], 50),
        "chat_ttft_p99_ms": 1000 * percentile(first[False], 99),
        "long_ttft_p50_ms": 1000 * percentile(first[True], 50),
        "long_ttft_p99_ms": 1000 * percentile(first[True], 99),
        "handed_over": float(num_handed_over),
    }


def _longest_gap(times: Times) -> float:
    return max((after - before for before, after in pairwise(times.tokens)), default=0.0)


async def _send(
    client: ReplicatedClient, arrival: Arrival, began: float, timeout_s: float
) -> Times:
    due = began + arrival.at_s
    await asyncio.sleep(due - time.monotonic())
    params = SamplingParams(max_tokens=arrival.num_tokens, temperature=0.0, ignore_eos=True)
    tokens: list[float] = []
    try:
        async with asyncio.timeout(timeout_s):
            async for output in client.submit(arrival.prompt, params):
                if output.token_ids:
                    tokens.append(time.monotonic())
    except TimeoutError as error:
        raise BenchError(f"a request was not at its end after {timeout_s:g} s") from error
    if not tokens:
        raise BenchError("a request ended without a token")
    return Times(arrival.is_long, due, tokens)
