"""Who waits, who runs and who holds what: the moves of requests between these states.

Each move keeps together what belongs together: status, queue, blocks, host copies, limits and the
notices that the worker must get. When a move is due is the scheduler's business.
"""

from itertools import count

from core_proc.kv_cache import KVCacheManager, Tables
from core_proc.options import SchedulerOptions
from core_proc.partial_prefills import PartialPrefills
from core_proc.policy import make_policy
from core_proc.request import BLOCKED, Request, RequestStatus
from core_proc.results import Failure
from core_proc.speculation import forget_drafts
from core_proc.step import longest_sequence
from core_proc.step_calendar import StepCalendar
from core_proc.swap import Swapper
from core_proc.victims import VictimChoice
from core_proc.waiting import WaitingQueue
from protocol.api_core import ErrorCode
from protocol.sampling import FinishReason


class Roster:
    """All unfinished requests, and the KV cache that they share."""

    def __init__(self, options: SchedulerOptions) -> None:
        """Whatever `max_model_len` says, no request outgrows what one step can introduce.

        Raises:
            ValueError: there is no policy of that name.
        """
        longest = longest_sequence(options.block_size, len(options.kv_groups))
        self._max_model_len = min(options.max_model_len, longest)
        self._eos_token_ids = frozenset(options.eos_token_ids)
        self.policy = make_policy(options)
        self.kv = KVCacheManager(options)
        self.swapper = Swapper(options)
        self.victims = VictimChoice(options, self.policy, self.kv, self.swapper)
        self.partial_prefills = PartialPrefills(options)
        self.requests: dict[int, Request] = {}
        """Every unfinished request by id."""
        self.waiting = WaitingQueue(self.policy, self.partial_prefills.is_long)
        self.running: list[Request] = []
        """In admission order. Whoever leaves early leaves by a new list: a pass of the scheduler
        may be on its way through the old one."""
        self.calendar = StepCalendar()
        self._finished_req_ids: list[int] = []
        self._preempted_req_ids: list[int] = []
        self._arrivals = count()
        self._admissions = count()
        self._loading: dict[int, Request] = {}
        """Whose blocks somebody else is writing to, though the request may have ended."""
        self._failures: list[Failure] = []
        self.num_accepted = 0
        self.num_ended = 0
        """Requests, so far: whoever was accepted and has not ended is in `requests`."""
        self.num_preemptions = 0
        self.num_scheduled_tokens = 0
        """Granted so far; the clock by which requests age."""
        self.largest_step = 0
        """Most tokens that one step has granted."""
        self.num_generation_tokens = 0
        self.num_prompt_tokens = 0
        """Of all requests admitted so far."""
        self.num_prefix_queries = 0
        """Tokens looked up in the prefix cache by requests when they were first admitted."""
        self.num_prefix_hits = 0
        """Tokens found there."""

    # Coming and going ---------------------------------------------------------------------------

    def add_request(self, request: Request, blocked: RequestStatus | None = None) -> None:
        """Queue a request; with outputs (of an earlier life) it continues after them.

        Args:
            request: New here.
            blocked: WAITING_FOR_GRAMMAR lets it keep a place without being admitted, until
                `unblock`.

        Raises:
            ValueError: it could never be scheduled, or its id is taken. The text names the field.
        """
        if request.req_id in self.requests:
            raise ValueError(f"req_id {request.req_id} is in use")
        request.set_limits(self._max_model_len, self._eos_token_ids)
        # The last token is delivered and never computed, so it needs no slot.
        if not self.kv.can_ever_fit(request.max_num_tokens - 1):
            raise ValueError(f"max_tokens lets request {request.req_id} outgrow the whole KV cache")
        if blocked is not None:
            assert blocked is RequestStatus.WAITING_FOR_GRAMMAR
            request.status = blocked
        request.arrival_index = next(self._arrivals)
        request.arrival_clock = self.num_scheduled_tokens
        self.policy.arrived(request)
        self.waiting.push(request)
        self.requests[request.req_id] = request
        self.num_accepted += 1

    def unblock(self, req_id: int) -> None:
        """Let a blocked request wait at its old place; unknown and other ones are left alone."""
        request = self.requests.get(req_id)
        if request is not None and request.status in BLOCKED:
            self.waiting.remove(request)
            has_run = request.num_cached_tokens is not None
            request.become(RequestStatus.PREEMPTED if has_run else RequestStatus.WAITING)
            self.waiting.push(request)

    def hold(self, request: Request) -> bool:
        """Keep a waiting request from being admitted until `unblock`; False if it does not wait."""
        if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            return False
        self.waiting.remove(request)
        request.become(RequestStatus.WAITING_FOR_TRIAL)
        self.waiting.push(request)
        return True

    def begin_remote_load(self, req_id: int, num_tokens: int) -> Tables | None:
        """Give a waiting request blocks for KV that somebody else brings; it is blocked meanwhile.

        Args:
            req_id: Of a request that waits and has never run.
            num_tokens: Its first so many tokens, whole blocks.

        Returns:
            Where to write, one table per KV group; None, and nothing has changed, without room.
            Steps in flight may still write there too, for an earlier owner: the load comes after.
        """
        request = self.requests[req_id]
        assert request.status is RequestStatus.WAITING
        assert self.kv.enable_prefix_caching, "loaded KV lands in the prefix cache"
        assert num_tokens % self.kv.block_size == 0
        assert 0 < num_tokens <= request.num_tokens
        if not self.kv.hold(request, num_tokens):
            return None
        self.waiting.remove(request)
        request.become(RequestStatus.WAITING_FOR_REMOTE_KV)
        self.waiting.push(request)
        self._loading[req_id] = request
        return request.block_tables

    def end_remote_load(self, req_id: int, num_tokens: int) -> None:
        """The KV of the first `num_tokens` has arrived (0: none): it is in the prefix cache now.

        Until then the blocks are held, even if the request has ended meanwhile: somebody writes
        there. A load that is not under way, as the worker was lost, is ignored.
        """
        request = self._loading.pop(req_id, None)
        if request is None:
            return
        request.num_computed_tokens = num_tokens
        self.kv.free(request)
        request.num_computed_tokens = 0
        self.unblock(req_id)

    def finish(self, request: Request, reason: FinishReason, stop: int | None = None) -> None:
        """End a request in whatever state, with all that it holds."""
        if request.status is RequestStatus.RUNNING:
            self._finished_req_ids.append(request.req_id)
        else:
            self.waiting.remove(request)
        request.finish(reason, stop)
        del self.requests[request.req_id]
        self.num_ended += 1
        if request.block_tables and request.req_id not in self._loading:
            self._give_back(request, reason)
        request.stand_still()
        self.swapper.drop(request)
        self.partial_prefills.drop(request)
        self.policy.left(request)

    def _give_back(self, request: Request, reason: FinishReason) -> None:
        if reason is not FinishReason.ERROR:
            self.kv.free(request)
            return
        # What it was to compute may not come, and its hashing may be what has failed.
        self.kv.forget_uncomputed(request)
        self.kv.discard(request)

    def abort_request(self, req_id: int) -> Request | None:
        """End a request in whatever state; its blocks are free at once, late tokens are ignored.

        Returns:
            The request; None if the id is unknown, which includes finished requests.
        """
        return self._end(req_id, FinishReason.ABORT)

    def fail_request(self, req_id: int, error: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        """End a request because something that it alone needs has failed."""
        request = self._end(req_id, FinishReason.ERROR)
        if request is not None:
            self._failures.append(Failure(request, error, code))

    def take_failures(self) -> list[Failure]:
        """Return the requests that failed since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def _end(self, req_id: int, reason: FinishReason) -> Request | None:
        request = self.requests.get(req_id)
        if request is not None:
            if request.status is RequestStatus.RUNNING:
                self._leave_running(request)
            self.finish(request, reason)
        return request

    def _leave_running(self, request: Request) -> None:
        self.running = [other for other in self.running if other is not request]

    # Running and waiting ------------------------------------------------------------------------

    def start(self, request: Request, num_computed: int) -> None:
        """Move a waiting request, which holds its first blocks by now, to those that run."""
        self.waiting.remove(request)
        request.become(RequestStatus.RUNNING)
        request.admission_index = next(self._admissions)
        self.running.append(request)
        request.num_computed_tokens = num_computed
        request.follow(self.calendar.clock)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(num_computed, request.num_prompt_tokens)
            self.num_prompt_tokens += request.num_prompt_tokens
            if self.kv.may_read_cache(request):
                self.num_prefix_queries += request.num_tokens
                self.num_prefix_hits += num_computed

    def preempt(self, victim: Request) -> None:
        """Take the blocks of a running request; it waits again, with its outputs kept."""
        self._leave_running(victim)
        forget_drafts(victim)
        if self.victims.is_swapped(victim):
            self.swapper.take_out(victim)
        self._evict(victim)

    def preempt_all(self) -> None:
        """Take the blocks of all that run, as all KV is to be forgotten; their order stays."""
        victims, self.running = self.running, []
        for victim in victims:
            forget_drafts(victim)
            self._evict(victim)

    def _evict(self, victim: Request) -> None:
        # Steps in flight still owe it these: they come while it waits.
        victim.num_late_tokens = victim.num_pending_tokens
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._requeue(victim)
        self._preempted_req_ids.append(victim.req_id)

    def _requeue(self, request: Request) -> None:
        self.kv.free(request)
        self.partial_prefills.drop(request)
        request.become(RequestStatus.PREEMPTED)
        request.stand_still()
        request.num_computed_tokens = 0
        self.waiting.push(request)

    # The KV is lost -----------------------------------------------------------------------------

    def forget_worker(self) -> None:
        """The worker is gone, with all KV and everything that it was to be told."""
        for request in self.running:
            forget_drafts(request)
            self._requeue(request)
        self.running = []
        for request in self.requests.values():
            request.num_late_tokens = 0
        for req_id in list(self._loading):
            self.end_remote_load(req_id, 0)
        self._finished_req_ids, self._preempted_req_ids = [], []
        self._lose_kv()

    def _lose_kv(self) -> None:
        """The pool and the host's memory hold nothing any more; nobody runs."""
        self.swapper.forget()
        for request in self.requests.values():
            request.swapped_out = None
        emptied = self.kv.reset_prefix_cache()
        assert emptied, "nobody runs, yet blocks are held"

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached contents, as after a change of the weights.

        Args:
            reset_running_requests: Preempt whoever runs; they keep their order and their outputs.

        Returns:
            Whether it was done: not while any block is held, or is being loaded.
        """
        if self._loading:
            return False
        if reset_running_requests:
            self.preempt_all()
        if self.running:
            return False
        self._lose_kv()
        return True

    def take_notices(self) -> tuple[list[int], list[int]]:
        """Return who was preempted and who finished since the worker was last told."""
        notices = self._preempted_req_ids, self._finished_req_ids
        self._preempted_req_ids, self._finished_req_ids = [], []
        return notices

    @property
    def has_notices(self) -> bool:
        """Whether the worker must be told of anybody who left."""
        return bool(self._preempted_req_ids or self._finished_req_ids)

    # Reports ------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.requests)

    @property
    def num_running(self) -> int:
        """Requests that hold a sequence slot."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, blocked and preempted ones included."""
        return len(self.waiting)

    @property
    def kv_cache_usage(self) -> float:
        """Held share of the KV blocks, 0 to 1."""
        return self.kv.usage

    def num_common_prefix_blocks(self) -> int:
        """Leading blocks that all running requests share, for cascade attention."""
        return self.kv.num_common_prefix_blocks(self.running)

    def holders(self) -> list[Request]:
        """List all requests that hold blocks."""
        return [*self.running, *self._loading.values()]
