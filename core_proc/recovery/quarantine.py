"""Quarantine: finds the request that makes workers crash, and rejects it.

Theory of operation. When a worker dies of what it computed (`attribute_crash`; never after a signal
from outside), the requests that ran are suspects. They are tried in groups: one group computes, the
other suspects are held in the queue, and requests that are not suspected continue.

    QUIET    no search. A crash starts one, with the requests that ran in two halves.
    GROUP    several suspects compute. A crash splits the group in halves; requests that arrived
             meanwhile and ran along become another group, to be tried last.
    ALONE    one suspect computes, and nothing else. A crash leads to CANARY.
    CANARY   a request of the quarantine's own, known to be harmless, computes alone. A crash proves
             that the fault is not in requests: all are cleared, and for a while no crash is
             attributed. If it runs to its end, RETRIAL follows.
    RETRIAL  the suspect computes alone again. A crash proves that it is the culprit (`reject`).

A request on trial is cleared once it has more tokens than it could have had at the crash. When all
on trial are cleared or gone, the next group is tried; after the last one all held requests are
released. So one culprit among n requests is found within 2 + log2(n) crashes. A rejected request
ends with an error, and the same prompt with the same parameters is refused for a while.

Order of calls: `workers_lost` before the scheduler takes back its steps, `attribute_crash` when the
cause of the death is known, `advance` before each `Scheduler.schedule`, `dispatched` after it,
`computed` after each step's results. A core may die of a request, too. Therefore `take_marks`
returns the stage and the suspects in flight, which the link writes to the progress page before it
sends a step; the next core passes them to `inherit`, and `added` finds them again as their clients
send them. Invariants: requests in `_on_trial` and in `_groups` are disjoint; a held request is in
`_held` until it is released or has ended; in QUIET nothing is on trial, cleared or held.
"""

import enum
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from core_proc.recovery.fingerprints import fingerprint, fingerprint_of
from core_proc.recovery.marks import Marks
from core_proc.recovery.rejections import Rejections
from core_proc.request import Request, RequestStatus
from core_proc.scheduler import Scheduler
from protocol.api_core import PauseMode
from protocol.core_worker import SchedulerOutput
from protocol.message import pack_token_ids
from protocol.process.progress_page import MarkEdits
from protocol.sampling import FinishReason, SamplingParams

MAX_REJECTED_IN_A_ROW = 4
"""Rejections without a cleared request between them; then the fault is not in requests."""
SYSTEMIC_FOR_S = 30.0
"""Time without attribution of crashes after it was found that the fault is not in requests."""
INHERITED_FOR_S = 120.0
"""Time in which clients send the suspects of a dead core again: they themselves wait no longer."""
_CANARY_TRIALS = 4
"""Length of the canary in trials, as some workers crash only some steps after their start."""

log = logging.getLogger("troika.core")


class Stage(enum.IntEnum):
    """The state of the search; the numbers are written to the progress page."""

    QUIET = 0
    GROUP = 1
    ALONE = 2
    CANARY = 3
    RETRIAL = 4


_LONELY = frozenset({Stage.ALONE, Stage.CANARY, Stage.RETRIAL})


class Quarantine:
    """The search for one culprit at a time; it holds and releases requests of a scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        canary_id: int,
        waits_for_others: Callable[[Request], bool] = lambda request: False,
    ) -> None:
        """`waits_for_others`: whether a request cannot run before some others have ended."""
        self._scheduler = scheduler
        self._waits_for_others = waits_for_others
        self._canary_id = canary_id
        self._canary = Request(canary_id, [0], SamplingParams())
        self._stage = Stage.QUIET
        self._groups: deque[list[Request]] = deque()
        self._on_trial: dict[Request, int] = {}
        """Suspects that compute, and the number of tokens at which each is cleared."""
        self._cleared: set[Request] = set()
        self._held: set[Request] = set()
        self._must_drain = False
        """A lonely trial begins only when no step with other requests is in flight."""
        self._ran: list[Request] = []
        """Requests that were running when the workers were lost."""
        self.rejections = Rejections()
        self._in_a_row: list[int] = []
        """Fingerprints rejected since a request was cleared."""
        self._systemic_until = 0.0
        self._inherited: set[int] = set()
        """Fingerprints of suspects of a dead core that were not sent again yet."""
        self._inherited_stage = Stage.QUIET
        self._inherited_until = 0.0
        self._returned: list[Request] = []
        """Inherited suspects that were sent again since the last step."""
        self._num_trials = 0
        self._marks = Marks()
        self._marked_search: tuple[int, ...] | None = None
        """State of the search for which the marks were made; None: they follow the steps."""

    def is_canary(self, request: Request) -> bool:
        """Return whether this is the quarantine's own request, which has no client."""
        return request.req_id == self._canary_id

    @property
    def is_searching(self) -> bool:
        return self._stage is not Stage.QUIET

    def workers_lost(self) -> None:
        """Note the running requests; they are about to be taken back."""
        self._ran = list(self._scheduler.running) if self._scheduler.in_flight else []
        self._marks.replace(self._stage, ())

    def attribute_crash(self, now: float) -> Request | None:
        """Continue the search after a death caused by computation; return a culprit if found."""
        ran, self._ran = self._ran, []
        if not ran or now < self._systemic_until:
            return None
        if self._stage is Stage.CANARY:
            self._clear_all(now, "a worker died of a harmless request")
            return None
        tried = [request for request in ran if request in self._on_trial]
        if self._stage is Stage.RETRIAL and ran == tried:
            return tried[0]
        # Requests on trial that had no slot yet are tried later.
        has_run = set(ran)
        self._groups.appendleft([request for request in self._on_trial if request not in has_run])
        if len(ran) == 1:
            self._begin_canary(ran[0])
            return None
        known = self._cleared.union(tried)
        others = [request for request in ran if request not in known]
        if tried:
            self._groups.extendleft(reversed(_halves(tried)))
            self._groups.append(others)
        else:  # a new search; or a request was cleared too early, and the search begins again
            self._cleared.clear()
            self._groups.extend(_halves(others or ran))
        self._next_trial()
        return None

    def reject(self, request: Request, now: float) -> list[Request]:
        """Go on without the culprit; returns all requests like it, which are to be ended."""
        log.error("request %d has killed its worker alone, twice: quarantined", request.req_id)
        key = fingerprint_of(request)
        same = [r for r in self._scheduler.requests.values() if fingerprint_of(r) == key]
        self.rejections.add(key, now)
        self._in_a_row.append(key)
        self._on_trial = {}
        if len(self._in_a_row) >= MAX_REJECTED_IN_A_ROW:
            self.rejections.withdraw(self._in_a_row)
            self._clear_all(now, "one request after the other kills its worker")
        else:
            self._next_trial()
        return same

    def _clear_all(self, now: float, why: str) -> None:
        log.error("%s: the fault is not in the requests", why)
        self._systemic_until = now + SYSTEMIC_FOR_S
        self._scheduler.abort_request(self._canary_id)
        self._groups.clear()
        self._next_trial()

    def refuses(
        self,
        prompt: Sequence[int] | bytes,
        params: SamplingParams,
        now: float,
        adapter_id: int = 0,
    ) -> bool:
        """Return whether the same request, with a prompt of ids or packed ids, was rejected."""
        self.rejections.expire(now)
        if now > self._inherited_until:
            self._inherited.clear()
        if not self.rejections and not self._inherited:
            return False
        packed = prompt if isinstance(prompt, bytes) else pack_token_ids(prompt)
        key = fingerprint(packed, params, adapter_id)
        if key in self._inherited and self._inherited_stage is Stage.RETRIAL:
            self._inherited.remove(key)
            self.rejections.add(key, now)
        return key in self.rejections

    def added(self, request: Request) -> None:
        """Note an accepted request, which may have been a suspect of a dead core."""
        if self._stage in _LONELY:
            self._hold(request)
        if self._inherited and fingerprint_of(request) in self._inherited:
            self._inherited.remove(fingerprint_of(request))
            self._returned.append(request)
            self._hold(request)

    def unblocked(self, request: Request) -> None:
        """Note that a request may be admitted; while it is not its turn, it waits on."""
        is_suspect = any(request in group for group in self._groups)
        if is_suspect or (self._stage in _LONELY and request not in self._on_trial):
            self._hold(request)

    def dispatched(self, step: SchedulerOutput) -> None:
        """Follow a step: outside of a search all requests that the workers mirror are marked."""
        if self._stage is not Stage.QUIET or self._marked_search is not None:
            return
        for req_id in step.preempted_req_ids:
            self._marks.discard(req_id)
        for req_id in step.finished_req_ids:
            self._marks.discard(req_id)
        for new in step.scheduled_new_reqs:
            request = self._scheduler.requests[new.req_id]
            self._marks.add(new.req_id, fingerprint_of(request))

    def take_marks(self) -> MarkEdits | None:
        """Return changes of the marks: the stage and the suspects in flight (no search: all)."""
        search = None
        running = self._scheduler.running
        if self._stage is not Stage.QUIET:
            last = running[-1].admission_index if running else -1
            search = (len(running), last, self._num_trials, len(self._on_trial))
        if search != self._marked_search:  # only during searches, which are rare
            self._marked_search = search
            suspects = [r for r in running if r in self._on_trial]
            suspects = suspects or [r for r in running if r not in self._cleared]
            marks = [(request.req_id, fingerprint_of(request)) for request in suspects]
            self._marks.replace(self._stage, marks)
        return self._marks.take_edits(is_computing=bool(self._scheduler.in_flight))

    def inherit(self, marks: Sequence[int], now: float) -> None:
        """Take over the marks of a core that died of what it was doing."""
        if not marks:
            return
        self._inherited_stage = Stage(marks[0] % len(Stage))
        if self._inherited_stage is Stage.CANARY:
            self._systemic_until = now + SYSTEMIC_FOR_S
            return
        self._inherited = set(marks[1:])
        self._inherited_until = now + INHERITED_FOR_S
        if len(self._inherited) == 1 and self._inherited_stage is not Stage.RETRIAL:
            self._inherited_stage = Stage.ALONE

    def _resume_search(self) -> None:
        """Try inherited suspects that were sent again like suspects of this core."""
        returned, self._returned = self._returned, []
        suspects = [request for request in returned if not request.is_finished]
        if self._stage is not Stage.QUIET:
            self._groups.append(suspects)
        elif len(suspects) == 1 and self._inherited_stage is Stage.ALONE:
            self._begin_canary(suspects[0])
        else:
            self._groups.extend(_halves(suspects))
            self._next_trial()

    def computed(self, requests: Iterable[Request]) -> None:
        """Clear the requests on trial that have got far enough with these results."""
        self._systemic_until = 0.0
        if self._on_trial:
            for request in requests:
                if request.num_tokens >= self._on_trial.get(request, request.num_tokens + 1):
                    self._clear(request)

    def _clear(self, request: Request) -> None:
        del self._on_trial[request]
        if not self.is_canary(request):
            self._cleared.add(request)
            self._in_a_row.clear()

    def advance(self) -> None:
        """Go on with the search; called before each step."""
        if self._returned:
            self._resume_search()
        if self._stage is Stage.QUIET:
            return
        if self._must_drain and not self._scheduler.in_flight:
            self._must_drain = False
            self._release(set(self._on_trial))
        for request in [r for r in self._on_trial if r.is_finished or self._is_kept_out(r)]:
            del self._on_trial[request]
        if not self._on_trial:
            self._end_trial()
        if self._stage in _LONELY:  # requests that were unblocked meanwhile wait, too
            while (front := self._scheduler.waiting.front()) and front not in self._on_trial:
                self._hold(front)

    def _is_kept_out(self, request: Request) -> bool:
        """Return whether the trial of a request is prevented, so that others must not wait.

        A pause does it, or other adapters, whose requests would be held and keep their turns.
        """
        is_paused = self._scheduler.pause_mode is PauseMode.PAUSED_NEW and not request.has_begun()
        return is_paused or self._waits_for_others(request)

    def _end_trial(self) -> None:
        if self._stage is not Stage.CANARY:
            self._next_trial()
            return
        group = self._groups.popleft()
        if self._canary.finish_reason is FinishReason.LENGTH:
            self._try(group, Stage.RETRIAL)
        else:  # something else ended the canary, so it proves nothing
            self._begin_canary(group[0])

    def _next_trial(self) -> None:
        while self._groups:
            group = [request for request in self._groups.popleft() if not request.is_finished]
            if group:
                self._try(group, Stage.ALONE if len(group) == 1 else Stage.GROUP)
                return
        self._stage = Stage.QUIET
        self._num_trials += 1
        self._on_trial = {}
        self._cleared.clear()
        self._in_a_row.clear()
        self._release(self._held.copy())

    def _begin_canary(self, suspect: Request) -> None:
        """Run the shortest prompt there is, for longer than a suspect is tried."""
        self._groups.appendleft([suspect])
        max_tokens = self._scheduler.options.max_model_len - 1
        num_tokens = min(_CANARY_TRIALS * self._num_ahead, max_tokens)
        while not self._scheduler.kv.can_ever_fit(num_tokens):  # all but its last token
            num_tokens -= 1
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        # With an output it counts as begun, and a pause of new requests does not keep it out.
        outputs = [0] if params.max_tokens > 1 else []
        self._canary = Request(self._canary_id, [0], params, outputs=outputs)
        self._scheduler.add_request(self._canary)
        self._try([self._canary], Stage.CANARY)

    @property
    def _num_ahead(self) -> int:
        """Tokens after which a request is further than it can have been at the crash.

        The tokens that the steps in flight had sampled by then are not known here.
        """
        options = self._scheduler.options
        return 1 + options.max_steps_in_flight * (1 + options.num_speculative_tokens)

    def _try(self, group: list[Request], stage: Stage) -> None:
        what = stage.name.lower()
        log.warning("looking for a request that kills workers: %s of %d", what, len(group))
        self._stage = stage
        self._num_trials += 1
        ends = {r: min(r.num_tokens + self._num_ahead, r.max_num_tokens) for r in group}
        if stage is Stage.CANARY:  # it proves most by running to its end
            ends = {self._canary: self._canary.max_num_tokens}
        self._on_trial = ends
        requests = list(self._scheduler.requests.values())
        suspects = {request for group in self._groups for request in group}
        self._must_drain = stage in _LONELY and bool(self._scheduler.in_flight)
        to_hold = set(requests) if stage in _LONELY else suspects
        to_hold = to_hold if self._must_drain else to_hold - ends.keys()
        self._release(self._held - to_hold)
        for request in requests:
            if request in to_hold:
                self._hold(request)

    def _hold(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self._scheduler.preempt(request)
        if self._scheduler.hold(request):
            self._held.add(request)

    def _release(self, requests: set[Request]) -> None:
        """Release those of these requests that are held, in order of arrival."""
        chosen = requests & self._held
        released = [r for r in self._scheduler.requests.values() if r in chosen]
        self._held -= requests
        for request in released:
            self._scheduler.unblock(request.req_id, RequestStatus.WAITING_FOR_TRIAL)


def _halves(requests: list[Request]) -> list[list[Request]]:
    half = (len(requests) + 1) // 2
    return [requests[:half], requests[half:]]
