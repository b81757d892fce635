"""Removes requests that are preempted or have ended, and updates all objects involved."""

from core_proc.kv.kv_cache import KVCacheManager
from core_proc.kv.swap import Swapper
from core_proc.policy import Policy
from core_proc.request import Request, RequestStatus
from core_proc.scheduling.loads import Loads
from core_proc.scheduling.partial_prefills import PartialPrefills
from core_proc.scheduling.request_queues import RequestQueues
from core_proc.scheduling.results import Failure
from core_proc.scheduling.speculation import Speculation
from core_proc.scheduling.victims import VictimChoice
from protocol.sampling import FinishReason


class Departures:
    """Takes requests out of the running queue, or of both queues; the scheduler decides which."""

    def __init__(
        self,
        *,
        kv: KVCacheManager,
        queues: RequestQueues,
        loads: Loads,
        swapper: Swapper,
        victims: VictimChoice,
        speculation: Speculation,
        partial_prefills: PartialPrefills,
        policy: Policy,
    ) -> None:
        self._kv = kv
        self._queues = queues
        self._loads = loads
        self._swapper = swapper
        self._victims = victims
        self._speculation = speculation
        self._partial_prefills = partial_prefills
        self._policy = policy
        self.preempted_req_ids: list[int] = []
        self.finished_req_ids: list[int] = []
        """Requests that have left since the last message to the worker, which must name them."""
        self.num_preemptions = 0
        self.num_ended = 0
        self._failures: list[Failure] = []

    def preempt(self, victim: Request, *, may_swap: bool = True) -> None:
        """Take the blocks of a running request; it waits again, keeping its outputs."""
        # With drafts in flight, it is not known yet which tokens its state will include.
        can_swap = self._kv.states is None or not victim.num_drafts_in_flight
        self._speculation.forget(victim)
        if may_swap and can_swap and self._victims.is_swapped(victim):
            self._swapper.take_out(victim)
        # Steps in flight still owe these tokens, which arrive while the request waits.
        victim.num_late_tokens = victim.num_pending_tokens
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._requeue(victim)
        self.preempted_req_ids.append(victim.req_id)

    def lose(self, request: Request) -> None:
        """Make a running request wait again after its worker was lost with its KV and steps."""
        self._speculation.forget(request)
        self._requeue(request)

    def _requeue(self, request: Request) -> None:
        self._kv.free(request)
        request.may_load = True
        self._partial_prefills.drop(request)
        request.num_computed_tokens = 0
        self._queues.requeue(request)

    def fail(self, failure: Failure) -> None:
        """End a request because of a failure that affects only this request."""
        self.finish(failure.request, FinishReason.ERROR)
        self._failures.append(failure)

    def take_failures(self) -> list[Failure]:
        failures, self._failures = self._failures, []
        return failures

    def finish(self, request: Request, reason: FinishReason, stop: int | None = None) -> None:
        """End a request in any state; `stop` is the stop token that ended it."""
        if request.status is RequestStatus.RUNNING:
            self.finished_req_ids.append(request.req_id)
        self._queues.finish(request, reason, stop)
        self.num_ended += 1
        if request.block_tables and request not in self._loads:
            if reason is FinishReason.ERROR:
                # Its pending computation may never complete, and its hashing may be what failed.
                self._kv.forget_uncomputed(request)
                self._kv.discard(request)
            else:
                self._kv.free(request)
        self._swapper.drop(request)
        self._loads.drop(request)
        self._partial_prefills.drop(request)
        self._speculation.ended(request)
        self._policy.left(request)

    def forget_named(self) -> None:
        """Clear the named requests: a message has named them, or the worker is gone."""
        self.preempted_req_ids, self.finished_req_ids = [], []
