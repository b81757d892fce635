"""Asks other machines which blocks they have, in a few threads that start with the first questions.

Several, because one waits as long as a machine does not answer.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable

from protocol.core_worker import BlocksFound, FindBlocks
from worker_proc.offload.priority import lower_priority
from worker_proc.offload.remote import PeerPaused, Peers

_MOST_THREADS = 4

log = logging.getLogger("troika.worker")


class Finder:
    """Questions, in the order of their arrival, and the answers to those of the present core."""

    def __init__(self, peers: Peers, on_answer: Callable[[], None]) -> None:
        """`on_answer` is called by a thread when there is an answer to take."""
        self._peers = peers
        self._on_answer = on_answer
        self._questions: queue.SimpleQueue[tuple[int, FindBlocks]] = queue.SimpleQueue()
        self._answers: deque[tuple[int, BlocksFound]] = deque()
        self._num_threads = 0
        self._core = 0
        """Counts the cores that have asked."""

    def find(self, message: FindBlocks) -> None:
        self._questions.put((self._core, message))
        if self._num_threads < _MOST_THREADS:
            self._num_threads += 1
            threading.Thread(target=self._run, name="troika-find", daemon=True).start()

    def forget(self) -> None:
        """Drop all questions: another core has not asked them."""
        self._core += 1

    def take_results(self) -> list[BlocksFound]:
        found = [self._answers.popleft() for _ in range(len(self._answers))]
        return [answer for core, answer in found if core == self._core]

    def _run(self) -> None:
        lower_priority()
        while True:
            core, message = self._questions.get()
            if core == self._core:
                self._answers.append((core, BlocksFound(message.req_id, self._ask(message))))
                self._on_answer()

    def _ask(self, message: FindBlocks) -> bytes:
        try:
            with self._peers.reader(message.source) as reader:
                return reader.find(message.keys)
        except PeerPaused:  # its silence was reported
            return b""
        except Exception as error:
            log.warning("KV blocks of another machine are computed: %s", error)
            return b""
