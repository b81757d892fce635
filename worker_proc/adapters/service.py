"""Loads adapters beside the worker's steps, one after the other, in a thread of low priority.

The thread reads files, computes their digest and copies matrices, all without the interpreter's
lock; steps go on meanwhile. What it has loaded is taken over between two steps.
"""

import contextlib
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from protocol.adapters import Adapter, AdapterError
from protocol.core_worker import AdapterLoaded, LoadAdapter, UnloadAdapter
from protocol.message import MAX_TEXT
from worker_proc.adapters.kept import KeptAdapters

_NICENESS = 10

T = TypeVar("T")

log = logging.getLogger("troika.worker")


class _Job(NamedTuple):
    """An adapter, and the adoption that has brought it."""

    adoption: int
    message: LoadAdapter


class AdapterService(Generic[T]):
    """Takes adapters and returns answers; `wake_fd` is readable while there are any."""

    def __init__(self, kept: KeptAdapters[T]) -> None:
        self._kept = kept
        self._adoption = 0
        self._claimed: set[int] = set()
        """What the present core knows to be loaded. Others make room when it is needed."""
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._results: deque[tuple[_Job, T | None, str]] = deque()
        self._thread: threading.Thread | None = None
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def begin_adoption(self) -> None:
        """Forget what another core has sent; adapters stay loaded until their room is needed."""
        self._adoption += 1
        self._claimed.clear()

    def load(self, message: LoadAdapter) -> AdapterLoaded | None:
        """Take an adapter; returns the answer if it is loaded already."""
        adapter_id = message.adapter.adapter_id
        if self._kept.holds(message.adapter):
            if message.keeps:
                self._claimed.add(adapter_id)
            return AdapterLoaded(adapter_id)
        self._jobs.put(_Job(self._adoption, message))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="troika-adapters", daemon=True)
            self._thread.start()
        return None

    def unload(self, message: UnloadAdapter) -> None:
        """Drop an adapter, if it is there."""
        self._claimed.discard(message.adapter_id)
        self._kept.drop(message.adapter_id)

    def take_results(self) -> list[AdapterLoaded]:
        """Return the answers that have become ready; what was loaded can be used from now on."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)
        answers = []
        while self._results:
            job, loaded, error = self._results.popleft()
            if job.adoption != self._adoption:
                continue
            adapter_id = job.message.adapter.adapter_id
            if not error and job.message.keeps:
                assert loaded is not None
                self._kept.drop_all_but(self._claimed)
                self._kept.put(job.message.adapter, loaded)
                self._claimed.add(adapter_id)
            answers.append(AdapterLoaded(adapter_id, error[:MAX_TEXT]))
        return answers

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # of this thread
        while True:
            job = self._jobs.get()
            if job.adoption != self._adoption:
                continue
            loaded, error = _read(self._kept.read, job.message.adapter)
            self._results.append((job, loaded if job.message.keeps else None, error))
            del loaded
            os.eventfd_write(self.wake_fd, 1)


def _read(read: Callable[[Adapter], T], adapter: Adapter) -> tuple[T | None, str]:
    """Return an adapter, or what is wrong with it."""
    try:
        return read(adapter), ""
    except (AdapterError, OSError, MemoryError) as problem:
        return None, str(problem) or type(problem).__name__
    except Exception as problem:
        log.exception("adapter %s could not be loaded", adapter.name)
        return None, f"{type(problem).__name__}: {problem}"


def carry_out(
    message: LoadAdapter | UnloadAdapter, kept: KeptAdapters[Any] | None
) -> AdapterLoaded | None:
    """Carry out a message at once, where nothing else waits; returns the answer to it, if any."""
    if kept is None:
        assert isinstance(message, LoadAdapter)
        return AdapterLoaded(message.adapter.adapter_id, "this worker takes no adapters")
    if isinstance(message, UnloadAdapter):
        kept.drop(message.adapter_id)
        return None
    loaded, error = _read(kept.read, message.adapter)
    if not error and message.keeps:
        kept.put(message.adapter, loaded)
    return AdapterLoaded(message.adapter.adapter_id, error[:MAX_TEXT])
