"""`growth`: the time of a step against the requests that run, their context, and those that wait.

The core and the worker's runner take turns in this process, so the times of a step's parts add up.
All measured steps decode.
"""

import argparse
import time
from collections.abc import Sequence
from random import Random

from scripts.bench.client import BenchError
from scripts.bench.commands.steps import SteppedEngine
from scripts.bench.peers import OURS, describe
from scripts.bench.report import Record, RunRecord
from scripts.bench.rounds import add
from scripts.bench.workloads import Request, token_ids

PROMPT_TOKENS = 32
_PARTS = ("schedule", "worker", "output", "client")
_BLOCK_TOKENS = 16
_MARGIN = 64
"""Steps besides the measured ones."""
_MAX_STEPS = 100_000
"""The largest number of steps in which all requests of a point are admitted."""


def run(arguments: argparse.Namespace, record: Record) -> None:
    """Measure each point of each section."""
    record.servers = {OURS: "in this process"}
    if arguments.processor_time:
        record.notes.append("Processor time of all threads, not wall clock.")
    num_tokens = arguments.repeats * arguments.steps + _MARGIN
    largest = max([1, *arguments.running])
    longest = max([PROMPT_TOKENS, *arguments.context]) + num_tokens
    if arguments.running or arguments.context:
        flags = ["--max-num-seqs", str(largest), *_null_flags(arguments, largest, longest)]
        points = Points(arguments, record, flags, num_tokens)
        for count in arguments.running:
            points.measure("running", count, f"{count:,} running", [PROMPT_TOKENS] * count)
        for length in arguments.context:
            points.measure("context", length, f"context of {length:,}", [length])
    if arguments.waiting:
        behind = arguments.behind
        flags = ["--max-num-seqs", str(behind), *_null_flags(arguments, behind, longest)]
        flags += ["--max-num-waiting", str(max([behind, *arguments.waiting]))]
        points = Points(arguments, record, flags, num_tokens)
        for count in arguments.waiting:
            title = f"{behind:,} running, {count:,} waiting"
            points.measure("waiting", count, title, [PROMPT_TOKENS] * behind, count)


def _null_flags(arguments: argparse.Namespace, running: int, longest: int) -> list[str]:
    """Return the sizes that a checkpoint brings with it, for the null model."""
    if arguments.model != "null":
        return []
    short = PROMPT_TOKENS + arguments.repeats * arguments.steps + _MARGIN
    num_blocks = 2 + (running * (short + _BLOCK_TOKENS) + longest) // _BLOCK_TOKENS
    return ["--max-model-len", str(longest), "--num-gpu-blocks-override", str(num_blocks)]


class Points:
    """Measures points with one engine."""

    def __init__(
        self, arguments: argparse.Namespace, record: Record, flags: Sequence[str], num_tokens: int
    ) -> None:
        """Start it; each request generates up to `num_tokens` tokens."""
        self._arguments = arguments
        self._record = record
        self._num_tokens = num_tokens
        flags = [*flags, *arguments.engine_flags]
        clock = time.process_time_ns if arguments.processor_time else time.perf_counter_ns
        self._engine = SteppedEngine(arguments.model, flags, clock)
        self._ids = token_ids(arguments.vocab_size or self._engine.facts.vocab_size)
        record.engine = describe(arguments.model, arguments.engine_flags, self._engine.facts)

    def measure(
        self, section: str, place: int, title: str, prompts: Sequence[int], num_waiting: int = 0
    ) -> None:
        """Add one point: requests with prompts of these lengths, and others behind them."""
        engine, record = self._engine, self._record
        if max(prompts) + self._num_tokens > engine.facts.max_model_len:
            text = f"Left out: {title}, as max_model_len is {engine.facts.max_model_len}."
            record.notes.append(text)
            return
        name = f"{section}-{place}"
        random = Random(f"{name}-{self._arguments.seed}")
        request_ids = [self._submit(random, length) for length in prompts]
        self._begin(title, request_ids)
        request_ids += [self._submit(random, PROMPT_TOKENS) for _ in range(num_waiting)]
        record.workloads[name] = title
        with engine.timing():
            for repeat in range(self._arguments.repeats):
                figures = self._steps()
                add(record, RunRecord(name, OURS, repeat, self._arguments.seed, figures))
        if (engine.num_running, engine.num_waiting) != (len(prompts), num_waiting):
            raise BenchError(f"{title}: the KV cache is too small to let all of them run")
        engine.cancel(request_ids)

    def _submit(self, random: Random, length: int) -> int:
        prompt = [random.randrange(self._ids.start, self._ids.stop) for _ in range(length)]
        return self._engine.submit(Request(prompt, self._num_tokens))

    def _begin(self, title: str, request_ids: Sequence[int]) -> None:
        """Step until all of these have a token."""
        missing = set(request_ids)
        for _ in range(_MAX_STEPS):
            missing -= self._engine.step().keys()
            if not missing:
                return
        raise BenchError(f"{title}: not all requests run after {_MAX_STEPS} steps")

    def _steps(self) -> dict[str, float]:
        """Return the means over some steps, of the whole and of its parts.

        Steps in which requests take a new block cost more, so a median would leave them out.
        """
        engine, num_steps = self._engine, self._arguments.steps
        engine.parts.take()
        for _ in range(num_steps):
            engine.step()
        means = {name: total / num_steps for name, total in engine.parts.take().items()}
        return {"step_us": sum(means.values())} | {f"{name}, µs": means[name] for name in _PARTS}
