"""The API process: `python -m api_proc`, started by the supervisor or by hand."""

import asyncio
import contextlib
import ctypes
import itertools
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path

import uvloop

from api_proc.app import openai_app, start_sessions
from api_proc.commands import Commands
from api_proc.http.acceptor import raise_fd_limit
from api_proc.http.access_log import AccessLogger
from api_proc.http.api_keys import read_keys
from api_proc.http.file_watch import watch_files
from api_proc.http.listener import open_listener, url_of
from api_proc.http.server import HttpServer
from api_proc.http.tls import make_context, tls_files
from api_proc.page.process_list import ProcessList
from api_proc.state import ApiState
from api_proc.text.processor import TextProcessor
from protocol.client.async_client import MAX_OPEN_TOKENS, AsyncEngineClient
from protocol.config import AccessLog, ConfigError, LogLevel
from protocol.lifecycle import Role
from protocol.process import gc_tuning
from protocol.process.child_runtime import ChildProcess
from protocol.process.failpoints import failpoint
from protocol.process.progress import ProgressReporter

_PROGRESS_INTERVAL_S = 10.0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGE_BYTES = 256 * 1024


def main() -> None:
    # The tokenizer's own thread pool would slow down the event loop; one thread is enough.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _return_memory_early()
    child = ChildProcess.from_argv("api_proc", Role.API, sys.argv[1:])
    child.progress("tokenizer")
    try:
        text = TextProcessor.load(child.config.model)
    except ConfigError as error:
        child.fatal("tokenizer", error, retry=False)
    failpoint("api.load")
    uvloop.run(_serve(child, text))


def _return_memory_early() -> None:
    """Let the C library return the memory of a large body to the system as soon as it is free."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 4 * _LARGE_BYTES)


async def _serve(child: ChildProcess, text: TextProcessor) -> None:
    api = child.config.api
    try:
        if child.listen_fd is None:
            listening = open_listener(api)
            child.log.info("listening at %s", url_of(listening, is_tls=bool(api.ssl_certfile)))
        else:
            listening = socket.socket(fileno=child.listen_fd)
        tls = make_context(api)
    except (OSError, ValueError) as error:
        place = api.uds or f"{api.host}:{api.port}"
        child.fatal(f"listening on {place}", error, retry=False)
    raise_fd_limit()
    run = child.config.run
    logger = None
    if run.access_log is not AccessLog.OFF and run.log_level in (LogLevel.DEBUG, LogLevel.INFO):
        logger = AccessLogger(run.access_log, run.log_format)
    async with _engine_client(child) as client:
        state = ApiState(client, child.config, text)
        if child.lifecycle_socket is not None:
            state.processes = ProcessList(child.ask_for_status)
        server = HttpServer(
            openai_app(state, access_logger=logger),
            slow_reader_timeout_s=api.slow_reader_timeout_s,
            on_slow_reader=state.metrics.count_slow_reader,
            tls=tls,
        )
        commands = Commands(child, state, server, logger)
        loop = asyncio.get_running_loop()
        _beat(child.reporter, loop)
        child.attach_asyncio(loop, commands.execute)
        loop.add_signal_handler(signal.SIGTERM, commands.on_sigterm)
        await start_sessions(state)
        gc_tuning.freeze()  # a collection would traverse all token ids of open requests
        tasks = [asyncio.create_task(work) for work in _background(child, client, state, server)]
        await server.serve(sockets=[listening])
        for task in tasks:
            task.cancel()
        if state.sessions is not None:
            state.sessions.close()
    if logger is not None:
        logger.flush()
    text.close()


def _background(
    child: ChildProcess, client: AsyncEngineClient, state: ApiState, server: HttpServer
) -> Iterator[Coroutine[None, None, None]]:
    """Yield what runs beside the server: the report of readiness, and reloading of files."""
    api = child.config.api
    yield _report_ready(child, client)
    if api.ssl_certfile is not None:
        yield watch_files(tls_files(api), lambda: make_context(api), server.renew_tls)
    if api.api_key_file is not None:
        file = Path(api.api_key_file)
        yield watch_files([file], lambda: read_keys(file), state.api_keys.take)


def _beat(reporter: ProgressReporter, loop: asyncio.AbstractEventLoop) -> None:
    """Report progress of the event loop: the supervisor replaces a process whose loop hangs."""
    reporter.turn()
    if reporter.tick_ms is not None:
        loop.call_later(reporter.tick_ms / 1000, _beat, reporter, loop)


def _engine_client(child: ChildProcess) -> AsyncEngineClient:
    config = child.config
    return AsyncEngineClient(
        child.core_client_address,
        max_open_requests=config.api.max_open_requests,
        max_open_tokens=max(MAX_OPEN_TOKENS, 2 * config.scheduler.max_waiting_tokens),
        stall_timeout_s=config.recovery.stall_timeout_s,
    )


async def _report_ready(child: ChildProcess, client: AsyncEngineClient) -> None:
    """Report ready once requests are served, and progress before: loading a model may take long."""
    interval_s = min(_PROGRESS_INTERVAL_S, child.config.recovery.startup_timeout_s / 3)
    for number in itertools.count():
        child.progress("wait for the model", number)  # waiting is not a failure
        child.reporter.turn()  # nor a step that takes too long
        with contextlib.suppress(TimeoutError):
            await client.wait_ready(interval_s)
            break
    child.ready()


if __name__ == "__main__":
    main()
