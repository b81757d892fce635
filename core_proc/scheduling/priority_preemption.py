"""Chooses running requests to preempt so that a more important request can be admitted.

Nothing is preempted unless preempting all less important requests would make enough room. An
attempt that would have failed is not repeated until something has changed.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from core_proc.kv.kv_cache import KVCacheManager
from core_proc.request import Request
from core_proc.scheduling.admission import Admission, Candidate, Capacity
from core_proc.scheduling.loads import Loads
from core_proc.scheduling.request_queues import RequestQueues
from core_proc.scheduling.step import ScheduledStep
from core_proc.scheduling.victims import VictimChoice


class _Futile(NamedTuple):
    """An attempt that would have failed, with the counts at that time."""

    request: Request
    num_moves: int
    num_freed: int
    num_lacking: float
    """Number of missing blocks; infinite if no running request is less important."""


class PriorityPreemption:
    """Decides for the front of the waiting queue, which was not admitted; preempts nothing."""

    def __init__(
        self,
        kv: KVCacheManager,
        queues: RequestQueues,
        loads: Loads,
        admission: Admission,
        victims: VictimChoice,
    ) -> None:
        self._kv = kv
        self._queues = queues
        self._loads = loads
        self._admission = admission
        self._victims = victims
        self._futile: _Futile | None = None

    def choose_victims(self, request: Request, step: ScheduledStep) -> Iterator[Request]:
        """Yield the requests to preempt; each must be preempted before the next one is chosen."""
        if step.new_reqs or self._is_futile(request):
            return
        lesser = self._victims.less_important(request, self._queues.running)
        if not lesser:
            self._keep_futile(request, math.inf)
            return
        candidate = self._admission.candidate(request)
        if not self._would_suffice(candidate, lesser, step):
            return
        while lesser:
            capacity = Capacity(step.budget, self._loads.num_in_slots)
            num_lacking = self._admission.num_lacking(candidate, step, capacity)
            if num_lacking is not None and num_lacking <= 0:
                return
            victim = self._victims.choose(lesser)
            lesser.remove(victim)
            yield victim

    def _would_suffice(
        self, candidate: Candidate, lesser: list[Request], step: ScheduledStep
    ) -> bool:
        """Return whether the candidate could be admitted if no less important request ran."""
        without_them = Capacity(
            step.budget + step.num_granted_to(lesser),
            self._loads.num_in_slots - len(lesser),
            self._kv.num_blocks_gained(lesser, candidate.hits),
        )
        num_lacking = self._admission.num_lacking(candidate, step, without_them)
        if num_lacking is not None and num_lacking <= 0:
            return True
        self._admission.refuse(candidate)
        if num_lacking is not None:
            self._keep_futile(candidate.request, num_lacking)
        return False

    def _keep_futile(self, request: Request, num_lacking: float) -> None:
        freed = self._kv.pool.num_freed
        self._futile = _Futile(request, self._queues.num_moves, freed, num_lacking)

    def _is_futile(self, request: Request) -> bool:
        """Return whether nothing has changed that would make preemptions sufficient."""
        futile = self._futile
        if futile is None or futile[:2] != (request, self._queues.num_moves):
            return False
        if futile.num_lacking == math.inf:
            return True
        is_known = self._admission.knows(request)
        return is_known and self._kv.pool.num_freed - futile.num_freed < futile.num_lacking
