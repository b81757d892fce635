"""`offline`: W1 to W3 through the embedded client, in the engine's own processes."""

import argparse

from scripts.bench.commands.profile import profile
from scripts.bench.load import LoadProcesses
from scripts.bench.peers import describe, started_engine
from scripts.bench.report import Record
from scripts.bench.rounds import Rounds, fitting
from scripts.bench.workloads import OFFLINE, token_ids

_SHOWN = ["tokens_per_s", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms"]


def run(arguments: argparse.Namespace, record: Record) -> None:
    """Measure, and with `--profile` compute the workloads once more with timers."""
    record.shown = _SHOWN
    model, flags = arguments.model, arguments.engine_flags
    workloads = [OFFLINE[name] for name in arguments.work]
    with started_engine(model, flags) as ours, LoadProcesses(1, arguments.timeout_s) as load:
        record.engine = describe(model, flags, ours.facts)
        ids = token_ids(arguments.vocab_size or ours.facts.vocab_size)
        workloads = fitting(record, workloads, ids, ours.facts.max_model_len)
        record.workloads = {item.name: item.title for item in workloads}
        Rounds.of(arguments).run(
            record,
            workloads,
            [ours.embedded],
            ids,
            lambda server, requests: load.run(server.target, server.model, requests).figures(),
        )
    if arguments.profile:
        record.profile = profile(model, flags, workloads, arguments.seed, ids)
