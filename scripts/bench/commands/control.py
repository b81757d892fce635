"""`control`: W5, what everything around the model costs, in tokens per second and processor time.

The same requests go through the embedded client and over HTTP. The processor time of the engine's
processes is read before and after each run, without their start.
"""

import argparse
from collections.abc import Sequence

from protocol.lifecycle import Role
from protocol.process.cpu_clock import cpu_seconds
from scripts.bench.client import BenchError
from scripts.bench.load import LoadProcesses
from scripts.bench.peers import Server, describe, running_server, started_engine
from scripts.bench.report import Record
from scripts.bench.rounds import Rounds, fitting
from scripts.bench.workloads import Request, concurrent, token_ids
from scripts.testing import Engine

_SHOWN = [
    *("tokens_per_s", "api_us", "core_us", "worker_us", "other_us"),
    *("load_us", "load_busy_percent", "core_tokens_per_s"),
]
_NAMED = (Role.API, Role.CORE, Role.WORKER)


def run(arguments: argparse.Namespace, record: Record) -> None:
    """Measure each number of sequences, over HTTP, on the peers, and embedded."""
    record.shown = _SHOWN
    model, flags = arguments.model, arguments.engine_flags
    with (
        started_engine(model, flags) as ours,
        LoadProcesses(arguments.load_processes, arguments.timeout_s) as load,
    ):
        record.engine = describe(model, flags, ours.facts)
        peers = [running_server(name, url) for name, url in arguments.against]
        record.peers = [peer.name for peer in peers]
        ids = token_ids(arguments.vocab_size or ours.facts.vocab_size)
        workloads = [concurrent(count) for count in arguments.sequences]
        workloads = fitting(record, workloads, ids, ours.facts.max_model_len)
        record.workloads = {item.name: item.title for item in workloads}

        def measure(server: Server, requests: Sequence[Request]) -> dict[str, float]:
            if server in peers:
                return load.run(server.target, server.model, requests).figures()
            before = processor_time(ours.engine)
            figures = load.run(server.target, server.model, requests).figures()
            after = processor_time(ours.engine)
            costs = {
                f"{name}_us": 1e6 * (after[name] - before[name]) / figures["output_tokens"]
                for name in before
            }
            # A core with a separate processor would reach this rate if it never had to wait.
            costs["core_tokens_per_s"] = 1e6 / costs["core_us"] if costs["core_us"] else 0.0
            return figures | costs

        servers = [ours.http, *peers, ours.embedded]
        Rounds.of(arguments).run(record, workloads, servers, ids, measure)


def processor_time(engine: Engine) -> dict[str, float]:
    """Return the seconds that the engine's processes have used, by role; others are added up."""
    status = engine.status()
    if status is None:
        raise BenchError("the supervisor does not answer")
    seconds = dict.fromkeys([str(role) for role in _NAMED] + ["other"], 0.0)
    for row in status.processes:
        if row.pid is not None:
            name = str(row.role) if row.role in _NAMED else "other"
            seconds[name] += cpu_seconds(row.pid)
    return seconds
