"""An event loop in a background thread, for programs without one; usable from any thread."""

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from protocol.api_core import ErrorCode, RequestError
from protocol.client.errors import RequestFailed, failure_of

_CLOSE_TIMEOUT_S = 3.0
_JOIN_TIMEOUT_S = 1.0
"""The sum of both timeouts is less than the 5 s in which everything closes."""

T = TypeVar("T")


class LoopThread:
    """The loop runs until `close`; work after that fails with `RequestFailed`."""

    def __init__(self, name: str) -> None:
        """Start the thread; RuntimeError if the system cannot create one."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._lock = threading.Lock()
        self._is_open = True
        self._owner_pid = os.getpid()
        try:
            self._thread.start()
        except RuntimeError:
            self._loop.close()
            raise

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        """Run a coroutine in the loop; cancel it after `timeout_s` or at an interrupt."""
        with self._lock:  # the loop's shutdown cancels work that enters before it
            if not self._is_open:
                work.close()
                raise _failure("the client is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError:
            raise _failure("the client was closed") from None
        except TimeoutError:
            if future.cancel() and timeout_s is not None:  # the work itself has raised no error
                raise TimeoutError(f"no result within {timeout_s:g} s") from None
            raise
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], None]) -> None:
        """Have the loop call a function soon; does nothing after `close`."""
        with self._lock:
            if self._is_open:
                self._loop.call_soon_threadsafe(function)

    def close(self, last: Callable[[], Awaitable[None]]) -> None:
        """Await `last` in the loop, cancel everything else in it, and end the thread. Idempotent.

        TimeoutError: the loop is blocked; its thread ends later. Does nothing in a fork, which does
        not have the thread.
        """
        with self._lock:
            if not self._is_open or os.getpid() != self._owner_pid:
                return
            self._is_open = False
            closing = asyncio.run_coroutine_threadsafe(_shut_down(last), self._loop)
            closing.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        closing.result(_CLOSE_TIMEOUT_S)
        self._thread.join(_JOIN_TIMEOUT_S)

    def _work(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


async def _shut_down(last: Callable[[], Awaitable[None]]) -> None:
    await last()
    # Tasks that read streams end by themselves now; all others are cancelled.
    await asyncio.sleep(0)
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _failure(message: str) -> RequestFailed:
    return failure_of(RequestError(ErrorCode.ABORTED, message))
