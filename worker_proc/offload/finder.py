"""Asks other machines which blocks they have, in a few threads that start on demand.

There are several threads, since each waits for as long as its machine does not answer. A question
without an answer in time gets an empty answer, so that its request is computed.
"""

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from protocol.core_worker import BlocksFound, FindBlocks
from worker_proc.offload.peers import Peers
from worker_proc.offload.priority import lower_priority

_MAX_THREADS = 4
_TIMEOUT_S = 3.0
"""Time from a question to its answer. A running server answers in milliseconds."""

log = logging.getLogger("troika.worker")


class _Question(NamedTuple):
    message: FindBlocks
    deadline: float


class Finder:
    """Questions, in order of arrival, and the answers to those of the current core."""

    def __init__(self, peers: Peers, on_answer: Callable[[], None]) -> None:
        """`on_answer` is called by a thread when an answer is available."""
        self._peers = peers
        self._on_answer = on_answer
        self._numbers = itertools.count()
        self._waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Numbers of questions; those that are no longer open are skipped."""
        self._lock = threading.Lock()
        self._open: dict[int, _Question] = {}
        """Questions without an answer, the oldest first. Guarded by the lock, like the answers."""
        self._answers: list[BlocksFound] = []
        self._num_threads = 0

    def find(self, message: FindBlocks) -> None:
        """Ask, and make the answer available to `take_results` by the deadline."""
        number = next(self._numbers)
        with self._lock:
            self._open[number] = _Question(message, time.monotonic() + _TIMEOUT_S)
        self._waiting.put(number)
        if self._num_threads < _MAX_THREADS:
            self._num_threads += 1
            threading.Thread(target=self._run, name="troika-find", daemon=True).start()

    def forget(self) -> None:
        """Drop all questions, since a new core has not asked them."""
        with self._lock:
            self._open.clear()
            self._answers.clear()

    @property
    def deadline(self) -> float | None:
        """The latest time to call `take_results`, in seconds of `time.monotonic`."""
        with self._lock:
            return next((question.deadline for question in self._open.values()), None)

    def take_results(self) -> list[BlocksFound]:
        """Return the answers since the last call, and empty ones to overdue questions."""
        now = time.monotonic()
        with self._lock:
            answers, self._answers = self._answers, []
            late = [number for number, each in self._open.items() if each.deadline <= now]
            questions = [self._open.pop(number).message for number in late]
        return [*answers, *(BlocksFound(question.req_id, b"") for question in questions)]

    def _run(self) -> None:
        lower_priority()
        while True:
            number = self._waiting.get()
            with self._lock:
                question = self._open.get(number)
            if question is None:
                continue
            answer = BlocksFound(question.message.req_id, self._ask(question.message))
            with self._lock:
                if self._open.pop(number, None) is None:
                    continue
                self._answers.append(answer)
            self._on_answer()

    def _ask(self, message: FindBlocks) -> bytes:
        try:
            with self._peers.reader(message.source) as reader:
                return reader.find(message.keys)
        except OSError:  # already logged
            return b""
        except Exception:
            log.exception("KV blocks of %s are computed", message.source)
            return b""
