"""The load of one run, spread over load processes, and the figures that it gives."""

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from types import TracebackType
from typing import NamedTuple

import msgspec

from scripts.bench.client import READY, BenchError, Job, Outcome, Results
from scripts.bench.workloads import Request

_START_TIMEOUT_S = 60.0
_MARGIN_S = 60.0
"""The time that a process has to decode its replies after the last of them."""
_CLOSE_TIMEOUT_S = 5.0
_READ_BYTES = 1 << 20


class Run(NamedTuple):
    """What a workload gave."""

    requests: Sequence[Request]
    outcomes: list[Outcome]
    """In the order of the requests."""
    began: float
    """The time of the start, on the monotonic clock."""
    cpu_s: list[float]
    """Processor time of each load process."""

    @property
    def seconds(self) -> float:
        """The time from the start to the last token."""
        return max(outcome.times[-1] for outcome in self.outcomes) - self.began

    def figures(self) -> dict[str, float]:
        """Return the figures of the run by name, as report.py describes them.

        TTFT runs from the time at which a request was to be sent.
        """
        first = [
            outcome.times[0] - self.began - request.at_s
            for request, outcome in zip(self.requests, self.outcomes, strict=True)
        ]
        num_tokens = sum(request.num_tokens for request in self.requests)
        figures = {
            "seconds": self.seconds,
            "requests": float(len(self.requests)),
            "prompt_tokens": float(sum(len(request.prompt) for request in self.requests)),
            "output_tokens": float(num_tokens),
            "tokens_per_s": num_tokens / self.seconds,
            "requests_per_s": len(self.requests) / self.seconds,
            "ttft_p50_ms": 1000 * percentile(first, 50),
            "ttft_p99_ms": 1000 * percentile(first, 99),
            "load_us": sum(self.cpu_s) * 1e6 / num_tokens,
            "load_busy_percent": 100 * max(self.cpu_s) / self.seconds,
        }
        if any(request.num_tokens > 1 for request in self.requests):
            figures |= itl_figures(outcome.times for outcome in self.outcomes)
        return figures


def itl_figures(times: Iterable[Sequence[float]]) -> dict[str, float]:
    """Return the figures of the gaps between the pieces of each stream.

    They are 0 if all tokens of every stream have come in one piece: which figures a run has does
    not depend on how a server or the network joins tokens.
    """
    gaps = [after - before for each in times for before, after in pairwise(each)] or [0.0]
    return {f"itl_p{percent}_ms": 1000 * percentile(gaps, percent) for percent in (50, 99)}


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value at this rank, without interpolation."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(percent / 100 * len(ordered)))]


class _Process:
    """A load process and its pipes."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "scripts.bench.client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._unread = bytearray()

    def write(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # the next read reports its end
            self._input.write(line)
            self._input.flush()

    def read(self, deadline: float) -> bytes:
        """Return the next line; BenchError: it has ended, or the deadline has passed."""
        poller = select.poll()
        poller.register(self._output, select.POLLIN)
        while (end := self._unread.find(b"\n")) < 0:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not poller.poll(remaining_s * 1000):
                raise BenchError("a load process does not answer")
            piece = os.read(self._output.fileno(), _READ_BYTES)
            if not piece:
                raise BenchError("a load process has ended")
            self._unread += piece
        line = bytes(self._unread[: end + 1])
        del self._unread[: end + 1]
        return line

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_CLOSE_TIMEOUT_S)
        self._output.close()


class LoadProcesses:
    """Processes that share the requests of each run evenly."""

    def __init__(self, count: int, timeout_s: float, *, return_token_ids: bool = False) -> None:
        """Start them; `timeout_s` bounds every request, and `return_token_ids` asks for ids."""
        self._timeout_s = timeout_s
        self._return_token_ids = return_token_ids
        self._processes = [_Process() for _ in range(count)]

    def __enter__(self) -> "LoadProcesses":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.close()

    def run(self, target: str, model: str, requests: Sequence[Request]) -> Run:
        """Send all requests; BenchError: one has failed, or gave a wrong number of tokens."""
        count = min(len(self._processes), len(requests))
        used = self._processes[:count]
        for index, process in enumerate(used):
            part = list(requests[index::count])
            job = Job(target, model, part, self._timeout_s, self._return_token_ids)
            process.write(msgspec.json.encode(job) + b"\n")
        deadline = time.monotonic() + max(_START_TIMEOUT_S, self._timeout_s)
        for process in used:
            if process.read(deadline) != READY:
                raise BenchError("a load process gave an unknown answer")
        began = time.monotonic()
        for process in used:
            process.write(f"{began!r}\n".encode())
        last_s = max(request.at_s for request in requests)
        deadline = began + last_s + self._timeout_s + _MARGIN_S
        outcomes: list[Outcome] = [Outcome()] * len(requests)
        cpu_s = []
        for index, process in enumerate(used):
            results = msgspec.json.decode(process.read(deadline), type=Results)
            outcomes[index::count] = results.outcomes
            cpu_s.append(results.cpu_s)
        for request, outcome in zip(requests, outcomes, strict=True):
            _check(request, outcome)
        return Run(requests, outcomes, began, cpu_s)


def _check(request: Request, outcome: Outcome) -> None:
    if outcome.error:
        raise BenchError(outcome.error)
    if outcome.num_tokens != request.num_tokens or not outcome.times:
        raise BenchError(
            f"a request for {request.num_tokens} tokens ended after {outcome.num_tokens},"
            f" in {len(outcome.times)} pieces"
        )
