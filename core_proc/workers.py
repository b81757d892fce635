"""The group of workers as the core sees it: who is there, and under which epoch. No sockets.

The link's epoch is the greatest of the core's own and of all its workers'. Every incarnation of
either side gets a greater one from the supervisor, so any replacement raises the link's epoch, and
frames sent before it are told from those after.
"""

from protocol.core_worker import ModelFacts, WorkerHello


class _Worker:
    __slots__ = ("epoch", "facts", "peer", "pid")

    def __init__(self, peer: bytes, epoch: int, hello: WorkerHello) -> None:
        self.peer = peer
        self.epoch = epoch
        self.pid = hello.pid
        self.facts = hello.facts


class WorkerGroup:
    """Ranks 0 to size - 1, complete or not."""

    def __init__(self, size: int, core_epoch: int) -> None:
        self._size = size
        self._core_epoch = core_epoch
        self._workers: dict[int, _Worker] = {}

    @property
    def complete(self) -> bool:
        """Whether every rank is there."""
        return len(self._workers) == self._size

    @property
    def peers(self) -> list[bytes]:
        """Connections of the ranks that are there."""
        return [worker.peer for worker in self._workers.values()]

    @property
    def link_epoch(self) -> int:
        """What every frame between the core and this group carries."""
        return max([self._core_epoch, *(worker.epoch for worker in self._workers.values())])

    @property
    def facts(self) -> ModelFacts:
        """Of rank 0, which speaks for all."""
        return self._workers[0].facts

    def is_leader(self, peer: bytes) -> bool:
        """Whether this is the connection of rank 0."""
        return 0 in self._workers and self._workers[0].peer == peer

    def enter(self, peer: bytes, epoch: int, hello: WorkerHello) -> bool:
        """A worker reports. Returns False for a rank out of range or an older incarnation."""
        known = self._workers.get(hello.rank)
        if hello.rank >= self._size or (known is not None and epoch < known.epoch):
            return False
        self._workers[hello.rank] = _Worker(peer, epoch, hello)
        return True

    def leave(self, peer: bytes) -> bool:
        """A connection is gone. Returns whether it belonged to a rank."""
        for rank, worker in self._workers.items():
            if worker.peer == peer:
                del self._workers[rank]
                return True
        return False
