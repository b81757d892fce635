"""The API process: `python -m api_proc`, started by the supervisor or by hand."""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys

import uvloop

from api_proc.app import openai_app, start_sessions
from api_proc.commands import Commands
from api_proc.http.acceptor import raise_fd_limit
from api_proc.http.server import HttpServer, listen, url_of
from api_proc.state import ApiState
from api_proc.text.processor import TextProcessor
from protocol.client.async_client import MAX_OPEN_TOKENS, AsyncEngineClient
from protocol.config import ConfigError
from protocol.lifecycle import Role
from protocol.process.child_runtime import ChildProcess
from protocol.process.failpoints import failpoint
from protocol.process.progress import ProgressReporter

_PROGRESS_INTERVAL_S = 10.0


def main() -> None:
    # The tokenizer's own thread pool would slow down the event loop; one thread is enough.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    child = ChildProcess.from_argv("api_proc", Role.API, sys.argv[1:])
    child.progress("tokenizer")
    try:
        text = TextProcessor.load(child.config.model)
    except ConfigError as error:
        child.fatal("tokenizer", error, retry=False)
    failpoint("api.load")
    uvloop.run(_serve(child, text))


async def _serve(child: ChildProcess, text: TextProcessor) -> None:
    api = child.config.api
    try:
        if child.listen_fd is None:
            listening = listen(api.host, api.port)
            child.log.info("listening at %s", url_of(listening))
        else:
            listening = socket.socket(fileno=child.listen_fd)
    except OSError as error:
        child.fatal(f"listening on {api.host}:{api.port}", error, retry=False)
    raise_fd_limit()
    async with _engine_client(child) as client:
        state = ApiState(client, child.config, text)
        server = HttpServer(
            openai_app(state),
            slow_reader_timeout_s=api.slow_reader_timeout_s,
            on_slow_reader=state.metrics.count_slow_reader,
        )
        commands = Commands(child, state, server)
        loop = asyncio.get_running_loop()
        _beat(child.reporter, loop)
        child.attach_asyncio(loop, commands.execute)
        loop.add_signal_handler(signal.SIGTERM, commands.on_sigterm)
        await start_sessions(state)
        reporting = asyncio.create_task(_report_ready(child, client))
        await server.serve(sockets=[listening])
        reporting.cancel()
        if state.sessions is not None:
            state.sessions.close()
    text.close()


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
