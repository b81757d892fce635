"""The group of workers: which ranks are connected, and under which epoch. No sockets.

The supervisor gives every incarnation of the core and of a worker a greater epoch than all before.
The epoch of the link is at least as great as those of both sides, and rises with every adoption,
also by another core, so that a frame sent before an adoption is never taken for one sent after it.

The ranks of one incarnation of the group have consecutive epochs, in their order. Ranks of two
incarnations would wait for each other in steps that the other one does not get, so they are never
adopted together.
"""

from typing import NamedTuple

import msgspec

from protocol.core_worker import WorkerHello
from protocol.model_facts import STAGE_SEPARATOR, ModelFacts

_EPOCH_LIMIT = 2**31
"""Half of what headers have room for, so that the epoch of the link can always rise from here."""


_SIZES = (
    *("num_gpu_blocks", "num_host_blocks", "num_state_blocks", "num_host_state_blocks"),
    "max_model_len",
)
"""Fields of `ModelFacts` that depend on the memory that a rank has found."""
_OF_STAGE = ("decoder", "kv_layout", "state_swap_blocks")
"""Fields that depend on the layers of a rank's stage, if there are several."""


class _Worker(NamedTuple):
    peer: bytes
    epoch: int
    hello: WorkerHello

    @property
    def group(self) -> int:
        """Which incarnation of the group it belongs to: the epoch of that group's rank 0."""
        return self.epoch - self.hello.rank


def _of_stages(texts: list[str]) -> str:
    """Return the text of all stages, or where they differ, those of each in turn."""
    return texts[0] if len(set(texts)) == 1 else STAGE_SEPARATOR.join(texts)


class WorkerGroup:
    """Ranks 0 to size - 1, complete or not."""

    def __init__(self, size: int, core_epoch: int, answering_rank: int = 0) -> None:
        """`answering_rank`: the one whose outputs count for the group."""
        self.size = size
        self.answering_rank = answering_rank
        self._core_epoch = core_epoch
        self._workers: dict[int, _Worker] = {}
        self._link_epoch = 0

    @property
    def complete(self) -> bool:
        return len(self._workers) == self.size

    @property
    def peers(self) -> list[bytes]:
        return [worker.peer for worker in self._workers.values()]

    @property
    def epochs(self) -> set[int]:
        return {worker.epoch for worker in self._workers.values()}

    @property
    def facts(self) -> ModelFacts:
        """The facts of a group that agrees; it resumes exactly only if all ranks do.

        The group has as many blocks, and contexts as long, as the rank with the least memory. Its
        decoders and layouts of blocks are those of all stages. A state costs as many copies of
        blocks as in the stage where it costs most.
        """
        all_facts = [self._workers[rank].hello.facts for rank in range(self.size)]
        facts = next((facts for facts in all_facts if not facts.exact_resume), all_facts[0])
        min_sizes = {name: min(getattr(facts, name) for facts in all_facts) for name in _SIZES}
        stages = all_facts[:: self._ranks_per_stage]
        return msgspec.structs.replace(
            facts,
            decoder=_of_stages([stage.decoder for stage in stages]),
            kv_layout=_of_stages([stage.kv_layout for stage in stages]),
            state_swap_blocks=max(facts.state_swap_blocks for facts in all_facts),
            **min_sizes,
        )

    @property
    def _ranks_per_stage(self) -> int:
        return self.size - self.answering_rank  # which is the first rank of the last stage

    @property
    def swap_cost_tokens(self) -> float:
        """The greatest cost of all ranks: a step ends with the slowest of them."""
        return max(worker.hello.swap_cost_tokens for worker in self._workers.values())

    def find_disagreement(self) -> tuple[bytes, str] | None:
        """Return a rank whose facts differ from rank 0's, and the fields that differ; else None.

        What depends on the layers is compared with the first rank of its stage.
        """
        sizes = {name: getattr(self._workers[0].hello.facts, name) for name in _SIZES}
        for rank, worker in self._workers.items():
            first = self._workers[rank - rank % self._ranks_per_stage].hello.facts
            of_stage = {name: getattr(first, name) for name in _OF_STAGE}
            expected = msgspec.structs.replace(self._workers[0].hello.facts, **of_stage)
            facts = msgspec.structs.replace(worker.hello.facts, **sizes)
            if not facts.can_replace(expected):
                ours, theirs = msgspec.structs.asdict(expected), msgspec.structs.asdict(facts)
                fields = [
                    f"{name} {theirs[name]!r} instead of {ours[name]!r}"
                    for name in ours
                    if theirs[name] != ours[name] and not name.startswith("exact_resume")
                ]
                return worker.peer, f"rank {rank} has {', '.join(fields)} of rank 0"
        return None

    def rank_of(self, peer: bytes) -> int | None:
        return next((rank for rank, w in self._workers.items() if w.peer == peer), None)

    def enter(self, peer: bytes, epoch: int, hello: WorkerHello) -> bool:
        """Add a worker. False for a rank or epoch out of range, or an older incarnation.

        Ranks of older incarnations of the group leave. An incarnation has one connection, and keeps
        its identity when it connects again. While it is connected, another connection with the same
        epoch is refused.
        """
        worker, known = _Worker(peer, epoch, hello), self._workers.get(hello.rank)
        if hello.rank >= self.size or epoch >= _EPOCH_LIMIT:
            return False
        if known is not None and known.group == worker.group and known.peer != peer:
            return False
        if any(other.group > worker.group for other in self._workers.values()):
            return False
        self._workers = {r: w for r, w in self._workers.items() if w.group == worker.group}
        self.leave(peer)  # one connection is one worker
        self._workers[hello.rank] = worker
        return True

    def peer_of(self, epoch: int) -> bytes | None:
        return next((w.peer for w in self._workers.values() if w.epoch == epoch), None)

    def leave(self, peer: bytes) -> bool:
        """Remove the worker of a connection; returns whether there was one."""
        rank = self.rank_of(peer)
        if rank is None:
            return False
        del self._workers[rank]
        return True

    def begin_epoch(self) -> int:
        """Return the epoch for every frame of the link after this adoption."""
        assert self.complete
        last = max(worker.hello.last_link_epoch for worker in self._workers.values())
        before = max(self._link_epoch, last)
        self._link_epoch = max(before + 1, self._core_epoch, *self.epochs)
        return self._link_epoch
