"""Moves open requests between replicas.

Requests leave a replica whose core is gone for `failover_s`, or which has had no workers for much
longer, and one that retires. A request also leaves a replica that cannot continue it exactly, or
that has computed its prompt for others (`prefill`). It continues from the ledger: its outputs
continue at the next token.
"""

import asyncio
import logging
from collections.abc import Iterable

from protocol.client.block_sources import blocks_for, reaches_blocks
from protocol.client.ledger import Entry
from protocol.client.placement import Placement, continues, holds
from protocol.client.prefill import Begun, Prefill
from protocol.client.replica import Replica
from protocol.transport.runtime import Clock

_SLICE_S = 0.002
"""Longest time for which moving requests blocks the host's event loop."""

log = logging.getLogger("troika.client")


class RequestMover:
    """Finds the requests that must continue elsewhere, and a replica for each of them."""

    def __init__(
        self,
        replicas: list[Replica],
        placement: Placement,
        prefill: Prefill,
        clock: Clock,
        *,
        failover_s: float,
        allow_inexact: bool,
    ) -> None:
        """Move requests between `replicas`, a list that its owner may change.

        Args:
            failover_s: seconds without a core after which the requests of a replica are moved.
            allow_inexact: any other replica may continue a request if none can do so exactly.
        """
        self._replicas = replicas
        self._placement = placement
        self._prefill = prefill
        self._clock = clock
        self._failover_s = failover_s
        self._allow_inexact = allow_inexact
        self.num_moved = 0
        """Requests that were continued by another replica."""
        self.num_handed_over = 0
        """Requests that moved from a prefill replica to one that decodes."""

    def tick(self) -> None:
        """Move the requests that must move, for a slice of time; the rest follow soon.

        Called every `TICK_S` in the event loop.
        """
        if not any(replica.serves for replica in self._replicas):
            return
        self._hand_over_some()
        for replica in self._replicas:
            if not replica.leaving and not replica.is_resting:
                replica.leaving.extend(replica.ids_to_move(self._failover_s))
                if replica.leaving:
                    self._move_some(replica, self.num_moved)

    # From replicas that compute prompts ---------------------------------------------------------

    def _hand_over_some(self) -> None:
        """Move requests with a first token to replicas that decode, for a slice of time."""
        deadline = self._clock.monotonic() + _SLICE_S
        self._prefill.tick()
        for request in self._prefill.due():
            self._hand_over(request)
            if self._clock.monotonic() >= deadline:
                return

    def _hand_over(self, request: Begun) -> None:
        """Move a request to a replica that decodes and can read its blocks, if there is one."""
        request_id, replica, names, affinity, _ = request
        entry, facts = replica.requests.entry(request_id), replica.engine.facts
        if entry is None or facts is None:
            return

        def takes(number: int) -> bool:
            other = self._replicas[number]
            return (
                not self._prefill.computes_prompts(number)
                and reaches_blocks(other, replica)
                and continues(other, entry, facts.max_model_len)
            )

        chosen = self._placement.preferred(names, affinity, takes)
        if chosen is not None:
            target = self._replicas[chosen.number]
            blocks_at = blocks_for(target, replica)
            if replica.client.move(request_id, target.client, blocks_at=blocks_at):
                self.num_handed_over += 1
                self._placement.enter(target, request_id, names, chosen.num_cached_tokens)

    # From replicas that cannot finish them ------------------------------------------------------

    def _move_some(self, lost: Replica, num_before: int) -> None:
        """Move requests for a slice of time, oldest first; `num_before` were moved earlier."""
        deadline = self._clock.monotonic() + _SLICE_S
        while lost.leaving and self._clock.monotonic() < deadline:
            self._move(lost.leaving.popleft(), lost)
        if lost.leaving:
            asyncio.get_running_loop().call_soon(self._move_some, lost, num_before)
        elif self.num_moved > num_before:
            num_moved = self.num_moved - num_before
            log.warning("replica %d: %d requests continue at others", lost.number, num_moved)
        else:
            lost.rest()

    def _move(self, request_id: int, lost: Replica) -> None:
        """Move a request to the least loaded suitable replica, if there is one."""
        entry = lost.requests.entry(request_id)
        if entry is None:
            return
        others = [each for each in self._replicas if each is not lost and each.serves]
        if (target := self._exact_target(entry, lost, others)) is not None:
            self._move_to(target, request_id, lost, is_exact=True)
        elif self._may_be_inexact(entry, lost):
            others += [lost] if lost.serves else []
            target = _least([each for each in others if holds(each.engine.facts, entry.num_tokens)])
            if target is lost:
                lost.requests.release(request_id)
            elif target is not None:
                self._move_to(target, request_id, lost, is_exact=False)

    def _exact_target(self, entry: Entry, lost: Replica, others: list[Replica]) -> Replica | None:
        facts = lost.engine.facts
        longest = 0 if facts is None else facts.max_model_len
        fitting = [each for each in others if continues(each, entry, longest)]
        decoding = [each for each in fitting if not self._prefill.computes_prompts(each.number)]
        return _least(decoding or fitting)

    def _may_be_inexact(self, entry: Entry, lost: Replica) -> bool:
        # A core that drains still computes its requests, exactly.
        computes = lost.is_draining and lost.client.connected
        return self._allow_inexact and entry.has_begun and not computes

    def _move_to(self, target: Replica, request_id: int, lost: Replica, *, is_exact: bool) -> None:
        blocks_at = blocks_for(target, lost)
        self.num_moved += lost.client.move(
            request_id, target.client, is_exact=is_exact, blocks_at=blocks_at
        )


def _least(replicas: Iterable[Replica]) -> Replica | None:
    """Return the least loaded replica."""
    return min(replicas, key=lambda replica: replica.load().num_tokens, default=None)
