"""Benchmark OpenAI-compatible servers, in turn, with the workloads of docs/benchmarks.md.

    python -m scripts.bench.http --model bench-135m --reps 5 \\
        troika=http://127.0.0.1:8000/v1 vllm=http://127.0.0.1:8300/v1

Every repetition sends new prompts of token ids, the same to each server: greedy, ignore_eos,
streamed. The order of the servers alternates between repetitions. Time runs from the first request
to the last token. Only the standard library is used.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

LOWEST_ID, HIGHEST_ID = 100, 16_000
"""Prompts are drawn from [lowest, highest): above special tokens, below every vocabulary used."""
PAUSE_S = 2.0
TIMEOUT_S = 600.0

Request = tuple[list[int], int]
"""Prompt ids and number of tokens to generate."""


class Figures(NamedTuple):
    """What one run of a workload gave."""

    tokens_per_s: float
    ttft_ms: float
    itl_ms: float


def prompt(rng: random.Random, num_tokens: int) -> list[int]:
    """Random ids."""
    return [rng.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(num_tokens)]


def w1(rng: random.Random) -> list[Request]:
    """64 requests at once, prompts of 32 to 256 tokens, outputs of 32 to 128."""
    return [(prompt(rng, rng.randint(32, 256)), rng.randint(32, 128)) for _ in range(64)]


def w2(rng: random.Random) -> list[Request]:
    """One request, 128 tokens in, 128 out."""
    return [(prompt(rng, 128), 128)]


def w3(rng: random.Random) -> list[Request]:
    """64 requests at once that share 512 tokens, 32 of their own, 32 out."""
    shared = prompt(rng, 512)
    return [(shared + prompt(rng, 32), 32) for _ in range(64)]


WORKLOADS: dict[str, Callable[[random.Random], list[Request]]] = {"w1": w1, "w2": w2, "w3": w3}


async def stream(url: SplitResult, model: str, request: Request) -> list[float]:
    """Send one request; returns the time of each chunk with tokens."""
    prompt_ids, max_tokens = request
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt_ids,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = (
        f"POST {url.path}/completions HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(head.encode() + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{url.netloc}: {status.decode().strip()}: {await reader.read(500)!r}")
    times = []
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
    writer.close()
    return times


async def run(url: SplitResult, model: str, requests: list[Request]) -> Figures:
    """Send all requests of a workload at once."""
    began = time.perf_counter()
    async with asyncio.timeout(TIMEOUT_S):
        streams = await asyncio.gather(*[stream(url, model, request) for request in requests])
    seconds = max(times[-1] for times in streams) - began
    gaps = [after - before for times in streams for before, after in pairwise(times)]
    return Figures(
        sum(num_tokens for _, num_tokens in requests) / seconds,
        1000 * statistics.median(times[0] - began for times in streams),
        1000 * statistics.median(gaps),
    )


def main() -> None:
    """Warm up, run in turn, print every run, then medians with their ranges."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--model", required=True)
    parser.add_argument("--work", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--reps", type=int, default=5)
    arguments = parser.parse_args()
    servers = {
        name: urlsplit(url) for name, url in (item.split("=", 1) for item in arguments.servers)
    }
    results: dict[tuple[str, str], list[Figures]] = {}
    for rep in range(-1, arguments.reps):  # the first round warms up
        # A run may profit or suffer from the one before, so the order changes.
        order = list(servers.items())[:: -1 if rep % 2 else 1]
        for work in arguments.work:
            for name, url in order:
                requests = WORKLOADS[work](random.Random(f"{work}-{rep}"))
                figures = asyncio.run(run(url, arguments.model, requests))
                if rep >= 0:
                    results.setdefault((work, name), []).append(figures)
                    print(f"{work} {name}: {figures.tokens_per_s:.0f} tok/s", flush=True)
                time.sleep(PAUSE_S)
    report(results)


def report(results: dict[tuple[str, str], list[Figures]]) -> None:
    """Print medians with their ranges, and rates relative to those of the first server."""
    print(f"{'work':5}{'server':10}{'output tok/s':>22}{'TTFT ms':>10}{'ITL ms':>9}  relative rate")
    for (work, name), runs in results.items():
        rates = [figures.tokens_per_s for figures in runs]
        spread = f"{statistics.median(rates):.0f} [{min(rates):.0f}-{max(rates):.0f}]"
        ttft = statistics.median(figures.ttft_ms for figures in runs)
        itl = statistics.median(figures.itl_ms for figures in runs)
        first = next(figures for (its_work, _), figures in results.items() if its_work == work)
        relative = [
            figures.tokens_per_s / base.tokens_per_s
            for figures, base in zip(runs, first, strict=True)
        ]
        print(
            f"{work:5}{name:10}{spread:>22}{ttft:>10.0f}{itl:>9.1f}  "
            f"{statistics.median(relative):.3f} [{min(relative):.3f}-{max(relative):.3f}]"
        )


if __name__ == "__main__":
    main()
