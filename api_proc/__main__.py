"""The API process: `python -m api_proc`, started by the supervisor or by hand."""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import signal
import socket
import ssl
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path

import uvloop

from api_proc.adapters.registry import NamedAdapter, NamesLocked
from api_proc.app import openai_app, peer_app, start_sessions
from api_proc.commands import Commands
from api_proc.http.acceptor import max_connections, raise_fd_limit
from api_proc.http.access_log import AccessLogger
from api_proc.http.api_keys import read_keys
from api_proc.http.listener import open_listener, url_of
from api_proc.http.server import HttpServer
from api_proc.http.tls import make_context, tls_files
from api_proc.page.process_list import ProcessList
from api_proc.peers.directory import Directory
from api_proc.peers.peers import MAX_ASKED, MAX_FORWARDED, Peers
from api_proc.peers.shared_counters import SharedCounters
from api_proc.state import ApiState
from api_proc.text.processor import TextProcessor
from protocol.adapters import Adapter, AdapterError
from protocol.client import ReplicatedClient, ReplicatedOptions
from protocol.client.errors import RequestFailed, RequestQuarantined
from protocol.config import AccessLog, ApiConfig, ConfigError
from protocol.lifecycle import Role
from protocol.process import gc_tuning
from protocol.process.child_runtime import ChildProcess
from protocol.process.failpoints import failpoint
from protocol.process.file_watch import watch_files
from protocol.process.logs import log_label
from protocol.process.machines import (
    address_files,
    client_keys,
    own_model_files,
    read_addresses,
)
from protocol.process.malloc import return_memory_early
from protocol.process.progress import ProgressReporter
from protocol.process.run_dir import core_addresses

_PROGRESS_INTERVAL_S = 10.0
_PAUSE_S = 1.0
"""Between two checks of an adapter of the settings, or of the run directory."""
_PEERS_END_S = 2.0
"""Longest wait for requests of other API processes after the last one of a client."""
_SUCCESSOR_START_S = 15.0
"""Time in which the successor of a dead API process is expected to serve."""


def main() -> None:
    # The tokenizer's own thread pool would slow down the event loop; one thread is enough.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return_memory_early()
    child = ChildProcess.from_argv("api_proc", Role.API, sys.argv[1:])
    child.progress("tokenizer")
    try:
        text = TextProcessor.load(child.config.model, child.config.api.tokenizer_pool_size)
    except ConfigError as error:
        child.fatal("tokenizer", error, retry=False)
    failpoint("api.load")
    uvloop.run(_serve(child, text))


async def _serve(child: ChildProcess, text: TextProcessor) -> None:
    api = child.config.api
    listening, tls = _listen(child)
    raise_fd_limit()
    run = child.config.run
    logger = None
    if run.access_log is not AccessLog.OFF and run.log_level.shows_facts:
        label = log_label(child.role, child.rank, child.config)
        logger = AccessLogger(run.access_log, run.log_format, label=label)
    async with _engine_client(child) as client:
        counters = _shared_counters(child)
        state = ApiState(
            client,
            child.config,
            text,
            index=child.rank,
            counters=counters,
            run_dir=child.run_dir,
        )
        named = await _name_adapters(child, state)
        if child.lifecycle_socket is not None:
            state.processes = ProcessList(child.ask_for_status)
        server = HttpServer(
            openai_app(state, access_logger=logger),
            slow_reader_timeout_s=api.slow_reader_timeout_s,
            on_slow_reader=state.metrics.count_slow_reader,
            tls=tls,
            is_shared=api.api_server_count > 1,
            limit=max_connections() - _num_forwarded(api) - _num_peer_connections(api),
        )
        peer_server = _join_peers(child, state)
        commands = Commands(child, state, server, logger, peer_server)
        loop = asyncio.get_running_loop()
        _beat(child.reporter, loop)
        child.attach_asyncio(loop, commands.execute)
        loop.add_signal_handler(signal.SIGTERM, commands.on_sigterm)
        await start_sessions(state)
        gc_tuning.freeze()  # a collection would traverse all token ids of open requests
        background = _background(child, client, state, server, named)
        tasks = [_begin(child, work) for work in (*background, _keep_run_dir(state, peer_server))]
        await _serve_until_stopped(server, listening, state.peers, peer_server)
        for task in tasks:
            task.cancel()
        if state.sessions is not None:
            state.sessions.close()
    if logger is not None:
        logger.flush()
    text.close()


def _listen(child: ChildProcess) -> tuple[socket.socket, ssl.SSLContext | None]:
    """Return the listening socket, which the supervisor may have passed on, and what TLS needs."""
    api = child.config.api
    try:
        if child.listen_fd is None:
            listening = open_listener(api)
            child.log.info("listening at %s", url_of(listening, is_tls=bool(api.ssl_certfile)))
        else:
            listening = socket.socket(fileno=child.listen_fd)
        return listening, make_context(api)
    except (OSError, ValueError) as error:
        place = api.uds or f"{api.host}:{api.port}"
        child.fatal(f"listening on {place}", error, retry=False)


async def _serve_until_stopped(
    server: HttpServer,
    listening: socket.socket,
    peers: Peers | None,
    peer_server: HttpServer | None,
) -> None:
    """Serve clients, and alongside them the other API processes, if there are any."""
    if peers is None or peer_server is None:
        await server.serve(sockets=[listening])
        return
    serving_peers = asyncio.create_task(peer_server.serve(sockets=[peers.directory.listen()]))
    await server.serve(sockets=[listening])
    peers.directory.leave()
    peer_server.stop()
    with contextlib.suppress(TimeoutError):  # what is left resumes at the successor
        await asyncio.wait_for(serving_peers, _PEERS_END_S)


def _shared_counters(child: ChildProcess) -> SharedCounters | None:
    """Map the counters of all API processes, if there are several and the file can be used."""
    count = child.config.api.api_server_count
    if count == 1:
        return None
    try:
        return SharedCounters(child.run_dir, child.rank, count)
    except OSError as error:
        child.log.error("counters are lost with this process: %s", error)
        return None


def _join_peers(child: ChildProcess, state: ApiState) -> HttpServer | None:
    """Return the server that the other API processes reach; None: there are no others."""
    if child.config.api.api_server_count == 1:
        return None
    directory = Directory(child.run_dir, child.rank, child.epoch)
    owner_timeout_s = child.config.recovery.shutdown_timeout_s + _SUCCESSOR_START_S
    api = child.config.api
    state.peers = Peers(directory, state.ids, owner_timeout_s, _num_forwarded(api))
    return HttpServer(
        peer_app(state),
        slow_reader_timeout_s=api.slow_reader_timeout_s,
        on_slow_reader=state.metrics.count_slow_reader,
        limit=_num_peer_connections(api),
    )


def _num_forwarded(api: ApiConfig) -> int:
    """Return how many requests this process may forward at a time."""
    num_others = api.api_server_count - 1
    return min(MAX_FORWARDED, max_connections() // 4) // num_others if num_others else 0


def _num_peer_connections(api: ApiConfig) -> int:
    """Return how many connections all other processes together may have to this one."""
    return (api.api_server_count - 1) * (_num_forwarded(api) + MAX_ASKED)


async def _name_adapters(child: ChildProcess, state: ApiState) -> list[NamedAdapter]:
    """Name the adapters of the settings at the engine's start; one in error ends the engine."""
    if child.config.lora.lora_modules:
        child.progress("adapters")
    try:
        return await asyncio.to_thread(state.adapters.begin)
    except AdapterError as error:
        child.fatal("lora_modules", error, retry=False)


def _background(
    child: ChildProcess,
    client: ReplicatedClient,
    state: ApiState,
    server: HttpServer,
    named: list[NamedAdapter],
) -> Iterator[Coroutine[None, None, None]]:
    """Yield what runs alongside the server: the report of readiness, and reloading of files."""
    api = child.config.api
    yield _report_ready(child, client, state, named)
    yield _report_other_models(child, state)
    if files := address_files(child.config, child.run_dir):
        fixed = _fixed_addresses(child)
        yield watch_files(
            files,
            lambda: read_addresses(files),
            lambda addresses: client.set_addresses([*fixed, *addresses]),
        )
    if api.ssl_certfile is not None:
        yield watch_files(tls_files(api), lambda: make_context(api), server.renew_tls)
    if api.api_key_file is not None:
        file = Path(api.api_key_file)
        yield watch_files([file], lambda: read_keys(file), state.api_keys.take)


def _begin(child: ChildProcess, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
    """Run work alongside the server; its failure ends the process, whose successor continues.

    Without it, files such as that of the API keys would never be read again.
    """

    def on_done(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            child.fatal("running", error)

    task = asyncio.create_task(work)
    task.add_done_callback(on_done)
    return task


def _beat(reporter: ProgressReporter, loop: asyncio.AbstractEventLoop) -> None:
    """Report progress of the event loop: the supervisor replaces a process whose loop hangs."""
    reporter.turn()
    if reporter.tick_ms is not None:
        loop.call_later(reporter.tick_ms / 1000, _beat, reporter, loop)


def _fixed_addresses(child: ChildProcess) -> list[str]:
    """Return the addresses of the replicas that do not change: those here, and named ones."""
    parallel = child.config.parallel
    return [
        *core_addresses(child.run_dir, parallel.data_parallel_size),
        *parallel.replica_addresses,
    ]


def _engine_client(child: ChildProcess) -> ReplicatedClient:
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


async def _keep_run_dir(state: ApiState, peer_server: HttpServer | None) -> None:
    """Restore what this process has in the run directory, whenever it was removed.

    The supervisor restores the directory first.
    """
    while state.peers is not None or state.adapters.config.enable_lora:
        await asyncio.sleep(_PAUSE_S)
        with contextlib.suppress(OSError, ValueError, NamesLocked):  # it is tried again
            await asyncio.to_thread(state.adapters.restore)
            if state.peers is None or peer_server is None:
                continue
            if state.peers.directory.was_removed:
                peer_server.accept_from(state.peers.directory.listen())


async def _report_ready(
    child: ChildProcess, client: ReplicatedClient, state: ApiState, named: list[NamedAdapter]
) -> None:
    """Report ready once requests are served, and progress before: loading a model may take long.

    The adapters of the settings are loaded, or checked, before; then they are named. If this
    process dies in between, its successor checks them.
    """
    interval_s = min(_PROGRESS_INTERVAL_S, child.config.recovery.startup_timeout_s / 3)
    for number in itertools.count():
        child.progress("wait for the model", number)  # waiting is not a failure
        child.reporter.turn()  # nor a step that takes too long
        with contextlib.suppress(TimeoutError):
            await client.wait_ready(interval_s)
            break
    for number, one in enumerate(named):
        child.progress("adapters", number, len(named))
        child.reporter.turn()
        if error := await _check_adapter(child, client, one.adapter):
            text = f"{one.adapter.name} ({one.adapter.path}): {error}"
            child.fatal("lora_modules", AdapterError(text), retry=False)
    try:
        await asyncio.to_thread(state.adapters.settle, named)
    except (NamesLocked, OSError) as error:
        child.fatal("lora_modules", error)
    child.ready()


async def _report_other_models(child: ChildProcess, state: ApiState) -> None:
    """Report engines with another model for the status, whenever they change."""
    reported: list[str] = []
    while True:
        await asyncio.sleep(_PAUSE_S)
        lines = state.other_models()
        if lines != reported:
            child.remark(lines)
        reported = lines


async def _check_adapter(child: ChildProcess, client: ReplicatedClient, adapter: Adapter) -> str:
    """Return what is wrong with an adapter, or nothing.

    A check that no worker could make is repeated. The supervisor ends this process if that takes
    longer than a start may take.
    """
    while True:
        try:
            return await client.load_adapter(adapter)
        except RequestQuarantined as failure:
            return failure.error.message
        except (TimeoutError, RequestFailed) as failure:
            child.log.warning("adapter %s is not checked yet: %s", adapter.name, failure)
            await asyncio.sleep(_PAUSE_S)
            child.reporter.turn()


if __name__ == "__main__":
    main()
