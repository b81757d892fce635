"""Work alongside the server: files that are read again, the run directory, and reports."""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from pathlib import Path

from api_proc.adapters.registry import NamesLocked
from api_proc.http.api_keys import read_keys
from api_proc.http.server import HttpServer
from api_proc.http.tls import make_context, tls_files
from api_proc.state import ApiState
from protocol.process.child_runtime import ChildProcess
from protocol.process.file_watch import watch_files
from protocol.process.progress import ProgressReporter

_INTERVAL_S = 1.0
"""The time between two looks at the run directory, or at the replicas."""


def begin(child: ChildProcess, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
    """Run work alongside the server; its failure ends the process, whose successor continues.

    Without it, files such as that of the API keys would never be read again.
    """

    def on_done(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            child.fatal("running", error)

    task = asyncio.create_task(work)
    task.add_done_callback(on_done)
    return task


def beat(reporter: ProgressReporter, loop: asyncio.AbstractEventLoop) -> None:
    """Report progress of the event loop: the supervisor replaces a process whose loop hangs."""
    reporter.turn()
    if reporter.tick_ms is not None:
        loop.call_later(reporter.tick_ms / 1000, beat, reporter, loop)


def watched_files(
    child: ChildProcess, state: ApiState, server: HttpServer
) -> Iterator[Coroutine[None, None, None]]:
    """Yield the work that reads certificates and API keys again when their files change."""
    api = child.config.api
    if api.ssl_certfile is not None:
        yield watch_files(tls_files(api), lambda: make_context(api), server.renew_tls)
    if api.api_key_file is not None:
        file = Path(api.api_key_file)
        yield watch_files([file], lambda: read_keys(file), state.api_keys.take)


async def keep_run_dir(state: ApiState, peer_server: HttpServer | None) -> None:
    """Restore what this process has in the run directory, whenever it was removed.

    The supervisor restores the directory first.
    """
    while state.peers is not None or state.adapters.config.enable_lora:
        await asyncio.sleep(_INTERVAL_S)
        with contextlib.suppress(OSError, ValueError, NamesLocked):  # it is tried again
            await asyncio.to_thread(state.adapters.restore)
            if state.peers is None or peer_server is None:
                continue
            if state.peers.directory.was_removed:
                peer_server.accept_from(state.peers.directory.listen())


async def report_other_models(child: ChildProcess, state: ApiState) -> None:
    """Report engines with another model for the status, whenever they change."""
    reported: list[str] = []
    while True:
        await asyncio.sleep(_INTERVAL_S)
        lines = state.other_models()
        if lines != reported:
            child.remark(lines)
        reported = lines
