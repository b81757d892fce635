"""Loads adapters alongside the worker's steps, one at a time, in threads of low priority.

A thread reads files, computes their digest and copies matrices, all without the interpreter's lock,
while steps continue. A loaded adapter becomes available between two steps. If a file system does
not answer, its thread is abandoned, and the adapter's load fails.
"""

import contextlib
import functools
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
from protocol.process.failpoints import failpoint
from worker_proc.adapters.kept import KeptAdapters

_NICENESS = 10
LOAD_TIMEOUT_S = 100.0
"""Maximum time for reading an adapter's files, since a file system may not answer at all."""
MAX_HANGING = 4
"""Maximum number of abandoned loads that have not ended; with as many, no further load begins."""

T = TypeVar("T")

log = logging.getLogger("troika.worker")


class _Job(NamedTuple):
    """An adapter, and the adoption that has requested it."""

    adoption: int
    message: LoadAdapter


class AdapterService(Generic[T]):
    """Takes adapters and returns answers; `wake_fd` is readable while there are any."""

    def __init__(self, kept: KeptAdapters[T]) -> None:
        self._kept = kept
        self._adoption = 0
        self._claimed: set[int] = set()
        """The loaded adapters of the current core; others are dropped when room is needed."""
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._results: deque[tuple[_Job, T | None, str]] = deque()
        self._thread: threading.Thread | None = None
        self._hanging: list[_Loading[T]] = []
        """Loads that have taken too long; their results are dropped."""
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def begin_adoption(self) -> None:
        """Forget the requests of another core; its adapters stay loaded until room is needed."""
        self._adoption += 1
        self._claimed.clear()

    def load(self, message: LoadAdapter) -> AdapterLoaded | None:
        """Load an adapter; return the answer if it is loaded already."""
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
        """Drop an adapter, if it is loaded."""
        self._claimed.discard(message.adapter_id)
        self._kept.drop(message.adapter_id)

    def take_results(self) -> list[AdapterLoaded]:
        """Return the answers that are ready; their adapters can be used from now on."""
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
        while True:
            job = self._jobs.get()
            if job.adoption != self._adoption:
                continue
            loaded, error = self._load_in_time(job.message.adapter)
            self._results.append((job, loaded if job.message.keeps else None, error))
            del loaded
            os.eventfd_write(self.wake_fd, 1)

    def _load_in_time(self, adapter: Adapter) -> tuple[T | None, str]:
        """Return an adapter, or None and the reason."""
        self._hanging = [loading for loading in self._hanging if loading.is_alive()]
        if len(self._hanging) >= MAX_HANGING:
            return None, f"the files of {MAX_HANGING} other adapters are still being read"
        loading = _Loading(self._kept.read, adapter)
        loading.start()
        loading.join(LOAD_TIMEOUT_S)
        if loading.is_alive():
            self._hanging.append(loading)
            return None, f"its files could not be read within {LOAD_TIMEOUT_S:g} s"
        return loading.result


class _Loading(threading.Thread, Generic[T]):
    """Loads one adapter."""

    def __init__(self, read: Callable[[Adapter], T], adapter: Adapter) -> None:
        super().__init__(name=f"troika-adapter-{adapter.adapter_id}", daemon=True)
        self._load = functools.partial(_read, read, adapter)
        self.result: tuple[T | None, str] = (None, "")
        """The adapter, or None and the reason, once the thread has ended."""

    def run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # this thread only
        self.result = self._load()


def _read(read: Callable[[Adapter], T], adapter: Adapter) -> tuple[T | None, str]:
    """Return an adapter, or None and the reason."""
    try:
        failpoint("worker.load_adapter")
        return read(adapter), ""
    except (AdapterError, OSError, MemoryError) as problem:
        return None, str(problem) or type(problem).__name__
    except Exception as problem:
        log.exception("adapter %s could not be loaded", adapter.name)
        return None, f"{type(problem).__name__}: {problem}"


def carry_out(
    message: LoadAdapter | UnloadAdapter, kept: KeptAdapters[Any] | None
) -> AdapterLoaded | None:
    """Execute a message immediately, if nothing else waits; return the answer to it, if any."""
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
