"""The API process: `python -m api_proc`, started by the supervisor or by hand."""

import asyncio
import contextlib
import os
import signal
import sys

import uvloop

from api_proc.acceptor import raise_fd_limit
from api_proc.app import openai_app, start_sessions
from api_proc.server import HttpServer, adopt, listen, url_of
from api_proc.state import ApiState
from api_proc.text import TextProcessor
from protocol.client import MAX_OPEN_TOKENS, AsyncEngineClient
from protocol.config import ConfigError
from protocol.errors import RequestFailed
from protocol.failpoints import reach
from protocol.lifecycle import Drain, Health, Role, Stop
from protocol.process import ChildProcess

_PROGRESS_INTERVAL_S = 10.0


def main() -> None:
    """Serve until the supervisor or a signal ends the process."""
    # One prompt at a time is tokenized, beside everything else; a pool of threads would disturb it.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    child = ChildProcess.from_argv("api_proc", Role.API, sys.argv[1:])
    child.progress("tokenizer")
    try:
        text = TextProcessor.load(child.config.model)
    except ConfigError as error:
        child.fatal("tokenizer", error, retry=False)
    reach("api.load")
    uvloop.run(_serve(child, text))


async def _serve(child: ChildProcess, text: TextProcessor) -> None:
    api = child.config.api
    try:
        listening = (
            listen(api.host, api.port) if child.listen_fd is None else adopt(child.listen_fd)
        )
    except OSError as error:
        child.fatal(f"listening on {api.host}:{api.port}", error, retry=False)
    if child.listen_fd is None:
        child.log.info("listening at %s", url_of(listening))
    raise_fd_limit()
    async with _engine_client(child) as client:
        state = ApiState(client, child.config, text)
        start_sessions(state)
        server = HttpServer(
            openai_app(state),
            slow_reader_timeout_s=api.slow_reader_timeout_s,
            on_slow_reader=state.metrics.count_slow_reader,
        )
        shutdown_timeout_s = child.config.recovery.shutdown_timeout_s
        tasks: list[asyncio.Task[None]] = []

        def on_message(message: Drain | Stop | Health) -> None:
            if isinstance(message, Health):
                state.degraded_retry_after_s = (
                    message.retry_after_s if message.is_degraded else None
                )
                return
            if isinstance(message, Stop):
                if state.sessions is not None:
                    state.sessions.close()
                sys.stderr.flush()
                os._exit(0)
            if message.is_replaced:
                tasks.append(asyncio.create_task(server.retire(shutdown_timeout_s)))
                return
            state.drain()
            tasks.append(asyncio.create_task(_report_drained(child, state)))

        def on_sigterm() -> None:
            if not child.ask_for_restart():
                on_message(Drain(is_replaced=True))

        loop = asyncio.get_running_loop()
        child.attach_asyncio(loop, on_message)
        loop.add_signal_handler(signal.SIGTERM, on_sigterm)
        reporting = asyncio.create_task(_report_ready(child, client))
        await server.serve(sockets=[listening])
        reporting.cancel()
        if state.sessions is not None:
            state.sessions.close()
    text.close()


def _engine_client(child: ChildProcess) -> AsyncEngineClient:
    config = child.config
    return AsyncEngineClient(
        child.core_client_address,
        max_open_requests=config.api.max_open_requests,
        max_open_tokens=max(MAX_OPEN_TOKENS, 2 * config.scheduler.max_waiting_tokens),
        stall_timeout_s=config.recovery.stall_timeout_s,
    )


async def _report_ready(child: ChildProcess, client: AsyncEngineClient) -> None:
    """Ready means that requests are served; loading a model may take longer than any deadline."""
    interval_s = min(_PROGRESS_INTERVAL_S, child.config.recovery.startup_timeout_s / 3)
    while True:
        child.progress("wait for the model")
        with contextlib.suppress(TimeoutError):
            await client.wait_ready(interval_s)
            break
    child.ready()


async def _report_drained(child: ChildProcess, state: ApiState) -> None:
    """The supervisor waits for this, and holds the deadline.

    What was accepted is to be finished, and the core is told to drain only after this process: so
    it is this process that ends a pause.
    """
    resuming = asyncio.create_task(_end_pause(state.client))
    await state.wait_idle()
    resuming.cancel()
    child.drained()


async def _end_pause(client: AsyncEngineClient) -> None:
    with contextlib.suppress(TimeoutError, RequestFailed):
        await client.resume()


if __name__ == "__main__":
    main()
