"""The client of an API process: the replicas that it reaches, and the bounds of its requests."""

import dataclasses
from collections.abc import Coroutine, Iterator

from protocol.client import ReplicatedClient, ReplicatedOptions
from protocol.process.child_runtime import ChildProcess
from protocol.process.file_watch import watch_files
from protocol.process.machines import (
    address_files,
    client_keys,
    own_model_files,
    read_addresses,
)
from protocol.process.run_dir import core_addresses


def make_client(child: ChildProcess) -> ReplicatedClient:
    """Return a client of all replicas, which is not connected yet."""
    config = child.config
    files = address_files(config, child.run_dir)
    try:
        changing = read_addresses(files)
    except ValueError as error:  # it is read again when it changes
        child.log.error("%s", error)
        changing = []
    options = ReplicatedOptions.of(config)
    max_open_tokens = max(options.max_open_tokens, 2 * config.scheduler.max_waiting_tokens)
    return ReplicatedClient(
        [*_fixed_addresses(child), *changing],
        dataclasses.replace(
            options, max_open_requests=config.api.max_open_requests, max_open_tokens=max_open_tokens
        ),
        may_change=bool(files),
        keys=client_keys(config),
        files=own_model_files(config),
    )


def watched_addresses(
    child: ChildProcess, client: ReplicatedClient
) -> Iterator[Coroutine[None, None, None]]:
    """Yield the work that reads the addresses of replicas again when their files change."""
    if files := address_files(child.config, child.run_dir):
        fixed = _fixed_addresses(child)
        yield watch_files(
            files,
            lambda: read_addresses(files),
            lambda addresses: client.set_addresses([*fixed, *addresses]),
        )


def _fixed_addresses(child: ChildProcess) -> list[str]:
    """Return the addresses of the replicas that do not change: those here, and named ones."""
    parallel = child.config.parallel
    return [
        *core_addresses(child.run_dir, parallel.data_parallel_size),
        *parallel.replica_addresses,
    ]
