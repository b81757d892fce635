"""What constrained requests cost the others in their batch: gaps between tokens, with and without.

`python -m tests.system.constrained_gaps` prints the figures of docs/structured_output.md. Rounds
without and with constraints take turns, in batches of the same size. Companions of the measured
requests are replaced as they end, after equally many tokens in both kinds of round. With `--cpu` it
prints the processor time of the model's thread in a step, which a busy machine falsifies less.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from core_proc.request import Request
from protocol.client import AsyncEngineClient
from protocol.config import EngineConfig
from protocol.config.settings import configure
from protocol.process.launch import EngineProcesses
from protocol.sampling import Grammar, GrammarKind, SamplingParams
from tests.paths import DEMO_MODEL
from tests.worker.driving import make_scheduler
from worker_proc.model_runner import ModelRunner
from worker_proc.startup.load_runner import load_model_runner

NUM_FREE = 16
FREE_TOKENS = 200
COMPANION_TOKENS = 120
PROMPT_TOKENS = 24
_START_S = 120.0
_ROW = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{3,12}$"},
        "size": {"type": "integer", "minimum": 0, "maximum": 5000},
        "kind": {"enum": ["red", "green", "blue"]},
        "more": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "number"}}]},
    },
    "required": ["name", "size", "kind", "more"],
    "additionalProperties": False,
}
NUM_SCHEMAS = 8


def grammar(number: int) -> Grammar:
    """Return a schema whose values are longer than a companion's output."""
    schema = {"type": "array", "items": _ROW, "minItems": 300 + number}
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


class Gaps(NamedTuple):
    """Milliseconds between tokens of the measured requests."""

    p50: float
    p99: float


def gaps_of(times: Sequence[Sequence[float]]) -> Gaps:
    gaps = [1000 * (b - a) for row in times for a, b in pairwise(row)]
    quantiles = statistics.quantiles(gaps, n=100)
    return Gaps(quantiles[49], quantiles[98])


class Round:
    """One batch: measured requests without constraints, and their companions."""

    def __init__(self, client: AsyncEngineClient, seed: int, *, is_constrained: bool) -> None:
        self._client = client
        self._random = random.Random(seed)
        self._is_constrained = is_constrained

    async def run(self, num_companions: int) -> Gaps:
        companions = [asyncio.create_task(self._accompany(n)) for n in range(num_companions)]
        try:
            return gaps_of(await asyncio.gather(*(self._measure() for _ in range(NUM_FREE))))
        finally:
            for task in companions:
                task.cancel()
            await asyncio.gather(*companions, return_exceptions=True)

    def _prompt(self) -> list[int]:
        return [self._random.randrange(300, 4000) for _ in range(PROMPT_TOKENS)]

    def _params(self, max_tokens: int, confined_to: Grammar | None = None) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            seed=self._random.getrandbits(40),
            ignore_eos=True,
            grammar=confined_to,
        )

    async def _measure(self) -> list[float]:
        stream = self._client.submit(self._prompt(), self._params(FREE_TOKENS))
        return [time.perf_counter() async for _ in stream]

    async def _accompany(self, number: int) -> None:
        confined_to = grammar(number % NUM_SCHEMAS) if self._is_constrained else None
        while True:
            params = self._params(COMPANION_TOKENS, confined_to)
            stream = self._client.submit(self._prompt(), params)
            try:
                async for _ in stream:
                    pass
            finally:
                stream.cancel()


def demo_config() -> EngineConfig:
    return configure(
        model=str(DEMO_MODEL),
        num_threads=1,
        num_gpu_blocks_override=1500,
        max_num_seqs=64,
        log_level="error",
    )


class Growth(NamedTuple):
    """Medians over the rounds."""

    plain: Gaps
    constrained: Gaps

    @property
    def p99(self) -> float:
        """Growth of the 99th percentile, as a factor."""
        return self.constrained.p99 / self.plain.p99


async def measure(num_companions: int, num_rounds: int) -> Growth:
    """Start an engine and measure; the first round of each kind warms it up."""
    found: dict[bool, list[Gaps]] = {False: [], True: []}
    with EngineProcesses(demo_config()) as processes:
        async with AsyncEngineClient(processes.address) as client:
            await client.wait_ready(_START_S)
            for number in range(num_rounds + 1):
                for is_constrained in (False, True):
                    current = Round(client, number, is_constrained=is_constrained)
                    found[is_constrained].append(await current.run(num_companions))
    plain, constrained = (
        Gaps(*(statistics.median(column) for column in zip(*found[kind][1:], strict=True)))
        for kind in (False, True)
    )
    return Growth(plain, constrained)


def step_times(runner: ModelRunner, num_companions: int, *, is_constrained: bool) -> Gaps:
    """Return the processor time of the model's thread in steady steps, in ms.

    It does not contain the time in which other processes have the processor.
    """
    scheduler = make_scheduler(runner.facts, max_num_seqs=64)
    chance = random.Random(7)
    for number in range(NUM_FREE + num_companions):
        is_free = number < NUM_FREE or not is_constrained
        params = SamplingParams(
            max_tokens=FREE_TOKENS,
            seed=number,
            ignore_eos=True,
            grammar=None if is_free else grammar(number % NUM_SCHEMAS),
        )
        prompt = [chance.randrange(300, 4000) for _ in range(PROMPT_TOKENS)]
        scheduler.add_request(Request(number, prompt, params))
    runner.reset()
    times = []
    while (step := scheduler.schedule()) is not None:
        began = time.thread_time()
        output = runner.execute(step)
        if step.total_num_scheduled_tokens == NUM_FREE + num_companions:
            times.append(1000 * (time.thread_time() - began))
        scheduler.update_from_output(output)
    quantiles = statistics.quantiles(times, n=100)
    return Gaps(quantiles[49], quantiles[98])


def print_step_times(counts: Sequence[int], num_rounds: int) -> None:
    torch.set_num_threads(1)
    runner = load_model_runner(demo_config(), lambda *_: None)
    for count in counts:
        found: dict[bool, list[Gaps]] = {False: [], True: []}
        for _ in range(num_rounds + 1):
            for is_constrained in (False, True):
                times = step_times(runner, count, is_constrained=is_constrained)
                found[is_constrained].append(times)
        plain, constrained = (
            Gaps(*(statistics.median(column) for column in zip(*found[kind][1:], strict=True)))
            for kind in (False, True)
        )
        print(f"{count} companions, processor time of a step, p50 / p99 in ms:", end=" ")
        print(f"{plain.p50:.1f} / {plain.p99:.1f} without,", end=" ")
        print(f"{constrained.p50:.1f} / {constrained.p99:.1f} with", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="processor time of steps, no engine")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--companions", type=int, nargs="+", default=[8, 16])
    options = parser.parse_args()
    if options.cpu:
        print_step_times(options.companions, options.rounds)
        return
    print(f"{NUM_FREE} requests without constraints; gaps in ms, p50 / p99")
    for count in options.companions:
        growth = asyncio.run(measure(count, options.rounds))
        plain, constrained = (f"{gaps.p50:.1f} / {gaps.p99:.1f}" for gaps in growth)
        change = 100 * (growth.p99 - 1)
        print(f"{count} companions: {plain} without, {constrained} with, p99 {change:+.1f} %")


if __name__ == "__main__":
    main()
