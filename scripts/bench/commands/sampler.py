"""`sampler`: the choice of tokens alone, over random logits of a step.

Half of the rows are flat: top_p keeps a large part of the vocabulary, as from a model that
knows little. The others are peaked: a few hundred tokens stand out.
"""

import argparse
import time
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from protocol.sampling import SamplingParams
from scripts.bench.client import BenchError
from scripts.bench.report import Record, RunRecord
from scripts.bench.rounds import add
from worker_proc.request import MirroredRequest

if TYPE_CHECKING:
    from torch import Tensor

WORK: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("greedy", {"temperature": 0.0}),
    "full": ("temperature 0.8", {}),
    "top-p": ("temperature 0.8, top_p 0.95", {"top_p": 0.95}),
    "top-k": ("temperature 0.8, top_k 50, top_p 0.95", {"top_k": 50, "top_p": 0.95}),
    "min-p": ("temperature 0.8, min_p 0.05", {"min_p": 0.05}),
    "penalties": (
        "temperature 0.8, top_p 0.95, repetition_penalty 1.1",
        {"top_p": 0.95, "repetition_penalty": 1.1},
    ),
    "greedy-penalties": (
        "greedy, frequency_penalty 0.2",
        {"temperature": 0.0, "frequency_penalty": 0.2},
    ),
}
_TEMPERATURE = 0.8
_CONTEXT, _PROMPT = 1000, 500
_SPREAD = 2.0
_PEAK = (22.0, 8.0)
"""Scores of the tokens that stand out, the best and the least."""
_NUM_PEAKS = 200


def run(arguments: argparse.Namespace, record: Record) -> None:
    """Sample the same logits with every set of parameters, in turn."""
    import torch

    from worker_proc.loading.host_limits import available_cpus
    from worker_proc.native.kernels import load_library
    from worker_proc.sampling.sampler import Sampler

    torch.set_num_threads(available_cpus())
    library = load_library()
    if library is None:
        raise BenchError("the kernels are not compiled: python -m worker_proc.native.build")
    num_rows, vocab_size = arguments.rows, arguments.vocab_size
    logits = _logits(num_rows, vocab_size, arguments.seed)
    cpu = torch.device("cpu")
    servers: dict[str, Callable[[list[MirroredRequest]], object]] = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        servers[f"native, {name}"] = _choosing(Sampler(vocab_size, (), cpu, library), logits, dtype)
    if arguments.torch:
        servers["torch, bf16"] = _choosing(Sampler(vocab_size, (), cpu), logits, torch.bfloat16)
    record.servers = dict.fromkeys(servers, "in this process")
    record.workloads = {name: WORK[name][0] for name in arguments.work}
    record.notes.append(f"{num_rows} rows, a vocabulary of {vocab_size:,}.")
    for repeat in range(-1, arguments.repeats):
        for name in arguments.work:
            rows = _rows(num_rows, vocab_size, WORK[name][1], arguments.seed + repeat)
            for server, choose in servers.items():
                began, cpu_began = time.perf_counter(), time.process_time()
                choose(rows)
                figures = {
                    "choice_ms": 1e3 * (time.perf_counter() - began),
                    "choice_cpu_ms": 1e3 * (time.process_time() - cpu_began),
                }
                if repeat >= 0:
                    add(record, RunRecord(name, server, repeat, arguments.seed, figures))


def _choosing(
    sampler: Any, logits: "Tensor", dtype: Any
) -> Callable[[list[MirroredRequest]], object]:
    part = logits.to(dtype)
    return lambda rows: sampler.sample(part, rows)


def _logits(num_rows: int, vocab_size: int, seed: int) -> "Tensor":
    import torch

    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator).mul_(_SPREAD)
    peaks = torch.linspace(*_PEAK, min(_NUM_PEAKS, vocab_size))
    for row in logits[1::2]:
        row[torch.randperm(vocab_size, generator=generator)[: len(peaks)]] = peaks
    return logits


def _rows(
    num_rows: int, vocab_size: int, fields: dict[str, Any], seed: int
) -> list[MirroredRequest]:
    random = Random(seed)
    rows = []
    for row in range(num_rows):
        params = SamplingParams(**{"temperature": _TEMPERATURE, "seed": row, **fields})
        ids = [random.randrange(vocab_size) for _ in range(_CONTEXT)]
        rows.append(MirroredRequest(row, ids, _PROMPT, params, [], 0, 0))
    return rows
