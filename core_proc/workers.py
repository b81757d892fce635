"""The group of workers as the core sees it: who is there, and under which epoch. No sockets.

Every incarnation of the core and of a worker has a greater epoch than those before it, issued by
the supervisor. The link's epoch is at least the greatest of both sides', and rises with every
adoption: what was sent before one is told from what comes after, replaced or not.
"""

from protocol.core_worker import ModelFacts, WorkerHello

_EPOCH_LIMIT = 2**31
"""Headers have room for twice as much, so the link's epoch can rise from here for ever."""


class _Worker:
    __slots__ = ("epoch", "facts", "peer")

    def __init__(self, peer: bytes, epoch: int, hello: WorkerHello) -> None:
        self.peer = peer
        self.epoch = epoch
        self.facts = hello.facts


class WorkerGroup:
    """Ranks 0 to size - 1, complete or not."""

    def __init__(self, size: int, core_epoch: int) -> None:
        self._size = size
        self._core_epoch = core_epoch
        self._workers: dict[int, _Worker] = {}
        self._link_epoch = 0

    @property
    def complete(self) -> bool:
        """Whether every rank is there."""
        return len(self._workers) == self._size

    @property
    def peers(self) -> list[bytes]:
        """Connections of the ranks that are there."""
        return [worker.peer for worker in self._workers.values()]

    @property
    def epochs(self) -> set[int]:
        """The workers' own."""
        return {worker.epoch for worker in self._workers.values()}

    @property
    def facts(self) -> ModelFacts:
        """Of rank 0, which speaks for all."""
        return self._workers[0].facts

    def is_leader(self, peer: bytes) -> bool:
        """Whether this is the connection of rank 0."""
        return 0 in self._workers and self._workers[0].peer == peer

    def enter(self, peer: bytes, epoch: int, hello: WorkerHello) -> bool:
        """A worker reports. False for a rank or epoch out of range, or an older incarnation.

        An incarnation has one connection, and keeps its identity when it connects anew: another one
        that claims to be it, while it is there, is not believed.
        """
        known = self._workers.get(hello.rank)
        if hello.rank >= self._size or epoch >= _EPOCH_LIMIT:
            return False
        is_here = known is not None and known.peer == peer
        if known is not None and (epoch < known.epoch or (epoch == known.epoch and not is_here)):
            return False
        self.leave(peer)  # one connection is one worker
        self._workers[hello.rank] = _Worker(peer, epoch, hello)
        return True

    def peer_of(self, epoch: int) -> bytes | None:
        """The connection of the worker of that epoch, if it is there."""
        return next((w.peer for w in self._workers.values() if w.epoch == epoch), None)

    def leave(self, peer: bytes) -> bool:
        """A connection is gone. Returns whether it belonged to a rank."""
        for rank, worker in self._workers.items():
            if worker.peer == peer:
                del self._workers[rank]
                return True
        return False

    def begin_epoch(self) -> int:
        """The whole group is adopted, perhaps not for the first time.

        Returns:
            What every frame of the link carries from here on.
        """
        assert self.complete
        epochs = (worker.epoch for worker in self._workers.values())
        self._link_epoch = max(self._link_epoch + 1, self._core_epoch, *epochs)
        return self._link_epoch
