"""`serving`: W1 to W4 and W6 over HTTP, streamed, for this engine and its peers."""

import argparse
import contextlib

from protocol.model_facts import ModelFacts
from scripts.bench.load import LoadProcesses
from scripts.bench.peers import BASE, describe, running_server, started_engine
from scripts.bench.report import Record
from scripts.bench.rounds import Rounds, fitting
from scripts.bench.workloads import (
    HIGHEST_ID,
    OFFLINE,
    Workload,
    long_prompt,
    poisson,
    token_ids,
)

WORK = (*OFFLINE, "w4", "w6")
_SHOWN = ["tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms"]


def run(arguments: argparse.Namespace, record: Record) -> None:
    """Measure the engine, or the server of `--base`, and each peer."""
    record.shown = _SHOWN
    facts: ModelFacts | None = None
    with contextlib.ExitStack() as stack:
        if arguments.base is None:
            model, flags = arguments.model, arguments.engine_flags
            ours = stack.enter_context(started_engine(model, flags))
            facts, first = ours.facts, ours.http
        else:
            first = running_server(BASE, arguments.base)
            model, flags = first.model, []
        record.engine = describe(model, flags, facts)
        peers = [running_server(name, url) for name, url in arguments.against]
        record.peers = [peer.name for peer in peers]
        returns_ids = arguments.return_token_ids
        if returns_ids:
            record.notes.append("Requests ask for the ids of tokens, those of the prompt included.")
        load = stack.enter_context(
            LoadProcesses(
                arguments.load_processes, arguments.timeout_s, return_token_ids=returns_ids
            )
        )
        default_size = HIGHEST_ID if facts is None else facts.vocab_size
        ids = token_ids(arguments.vocab_size or default_size)
        workloads = _workloads(arguments)
        if facts is not None:
            workloads = fitting(record, workloads, ids, facts.max_model_len)
        record.workloads = {item.name: item.title for item in workloads}
        Rounds.of(arguments).run(
            record,
            workloads,
            [first, *peers],
            ids,
            lambda server, requests: load.run(server.target, server.model, requests).figures(),
        )


def _workloads(arguments: argparse.Namespace) -> list[Workload]:
    made = []
    for name in arguments.work:
        if name == "w4":
            made.append(poisson(arguments.rate, arguments.requests))
        elif name == "w6":
            made += [long_prompt(length) for length in arguments.lengths]
        else:
            made.append(OFFLINE[name])
    return made
