"""The API process: `python -m api_proc`, started by the supervisor or by hand."""

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import sys

import uvloop

from api_proc.app import openai_app, start_sessions
from api_proc.http.acceptor import raise_fd_limit
from api_proc.http.access_log import AccessLogger
from api_proc.http.listener import open_listener, url_of
from api_proc.http.server import HttpServer
from api_proc.http.tls import make_context
from api_proc.page.process_list import ProcessList
from api_proc.peers.peers import Peers
from api_proc.peers.shared_counters import SharedCounters
from api_proc.process import background
from api_proc.process.commands import Commands
from api_proc.process.engine_client import make_client, watched_addresses
from api_proc.process.peer_server import join_peers, num_client_connections
from api_proc.process.readiness import name_adapters, report_ready
from api_proc.state import ApiState
from api_proc.text.processor import TextProcessor
from protocol.config import AccessLog, ConfigError
from protocol.lifecycle import Role
from protocol.process import gc_tuning
from protocol.process.child_runtime import ChildProcess
from protocol.process.failpoints import failpoint
from protocol.process.logs import log_label
from protocol.process.malloc import return_memory_early

_PEERS_END_S = 2.0
"""Longest wait for requests of other API processes after the last one of a client."""


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
    logger = _access_logger(child)
    async with make_client(child) as client:
        state = ApiState(
            client,
            child.config,
            text,
            index=child.rank,
            counters=_shared_counters(child),
            run_dir=child.run_dir,
        )
        named = await name_adapters(child, state)
        if child.lifecycle_socket is not None:
            state.processes = ProcessList(child.ask_for_status)
        server = HttpServer(
            openai_app(state, access_logger=logger),
            slow_reader_timeout_s=api.slow_reader_timeout_s,
            on_slow_reader=state.metrics.count_slow_reader,
            tls=tls,
            is_shared=api.api_server_count > 1,
            limit=num_client_connections(api),
        )
        peer_server = join_peers(child, state)
        commands = Commands(child, state, server, logger, peer_server)
        loop = asyncio.get_running_loop()
        background.beat(child.reporter, loop)
        child.attach_asyncio(loop, commands.execute)
        loop.add_signal_handler(signal.SIGTERM, commands.on_sigterm)
        await start_sessions(state)
        gc_tuning.freeze()  # a collection would traverse all token ids of open requests
        jobs = (
            report_ready(child, client, state, named),
            background.report_other_models(child, state),
            *watched_addresses(child, client),
            *background.watched_files(child, state, server),
            background.keep_run_dir(state, peer_server),
        )
        tasks = [background.begin(child, job) for job in jobs]
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


def _access_logger(child: ChildProcess) -> AccessLogger | None:
    run = child.config.run
    if run.access_log is AccessLog.OFF or not run.log_level.shows_facts:
        return None
    label = log_label(child.role, child.rank, child.config)
    return AccessLogger(run.access_log, run.log_format, label=label)


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


if __name__ == "__main__":
    main()
