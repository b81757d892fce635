"""Finds the request that kills workers, and refuses it: so that one cannot take all others down.

When a worker dies of what it computed (never: of a signal from outside), those that ran are
suspects. They are tried in groups, while the other suspects wait and all whom nobody suspects go
on. Who comes further than the death can have been is cleared. If another worker dies, the group is
split in halves; newcomers that ran along become a group of their own. A group of one is tried
alone, with nobody else running. If a worker dies of it, a request of our own, known to be harmless,
is run alone: if the next one dies of that too, the fault is not in requests and nobody is charged.
If not, the suspect has one more try, and is convicted by another death. Of n requests one culprit
is found within 2 + log2(n) deaths, and so is the next one.

A convicted request ends with an error, and whoever sends the same again is refused for a while.
"""

import enum
import hashlib
import logging
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from core_proc.request import Request, RequestStatus
from core_proc.scheduler import Scheduler
from protocol.api_core import PauseMode
from protocol.message import pack_token_ids
from protocol.sampling import FinishReason, SamplingParams

REFUSED_FOR_S = 600.0
MAX_REFUSED = 1024
"""Fingerprints that are remembered; the oldest is forgotten first."""
MAX_CONVICTED_IN_A_ROW = 4
"""Without anybody cleared between them; then it is not the requests."""
SYSTEMIC_FOR_S = 30.0
"""So long nobody is charged after it was found that the fault is not in requests."""
INHERITED_FOR_S = 120.0
"""So long the suspects of a core that died may take to come back; clients wait no longer."""

log = logging.getLogger("troika.core")


class Stage(enum.IntEnum):
    """How far the search is; the number is the first of the marks."""

    QUIET = 0
    GROUP = 1
    """Some suspects compute; the others wait."""
    ALONE = 2
    """One suspect computes, and nobody else."""
    CANARY = 3
    """A harmless request computes alone, to see whether workers live at all."""
    RETRIAL = 4
    """Workers live; the suspect computes alone again."""


_CANARY_TRIALS = 4
"""So that workers which die some steps after their start are not taken for victims."""
_LONELY = frozenset({Stage.ALONE, Stage.CANARY, Stage.RETRIAL})


class Quarantine:
    """Suspects, and whose turn it is to be tried; holds and releases requests of a scheduler."""

    def __init__(self, scheduler: Scheduler, canary_id: int) -> None:
        """`canary_id` is a request id that nobody else uses."""
        self._scheduler = scheduler
        self._canary_id = canary_id
        self._stage = Stage.QUIET
        self._groups: deque[list[Request]] = deque()
        """Suspects that are still to be tried, the next ones in front."""
        self._on_trial: dict[Request, int] = {}
        """Whoever is tried and not cleared yet: tokens at which it will be."""
        self._cleared: set[Request] = set()
        """Whoever has passed a trial of this search."""
        self._held: set[Request] = set()
        self._must_drain = False
        """A lonely trial begins only when no step with others is under way."""
        self._ran: list[Request] = []
        """Who was running when the workers were lost."""
        self._refused: dict[int, float] = {}
        """By fingerprint: until when; the first to end in front."""
        self._in_a_row: list[int] = []
        """Fingerprints convicted since somebody was cleared."""
        self._systemic_until = 0.0
        self._inherited: set[int] = set()
        """Fingerprints of suspects of a core that died, who have not come back yet."""
        self._inherited_stage = Stage.QUIET
        """How they were tried when it died."""
        self._inherited_until = 0.0
        self._returned: list[Request] = []
        """Those who have come back since the last step."""
        self._canary = Request(canary_id, [0], SamplingParams())
        self._num_trials = 0
        self._told: tuple[int, ...] = ()
        """Changes whenever the marks do."""
        self.num_convicted = 0

    def is_canary(self, request: Request) -> bool:
        """Whether this is our own request, of which no client is to hear."""
        return request.req_id == self._canary_id

    # Deaths -------------------------------------------------------------------------------------

    def workers_lost(self) -> None:
        """All that runs is about to be taken back; if that was somebody's fault, `charge` says."""
        self._ran = list(self._scheduler.running) if self._scheduler.in_flight else []

    def charge(self, now: float) -> Request | None:
        """The workers that were lost last died of what they computed.

        Returns:
            The request that is guilty, if that is certain now: it is to be convicted.
        """
        ran, self._ran = self._ran, []
        if not ran or now < self._systemic_until:
            return None
        if self._stage is Stage.CANARY:
            self._acquit_all(now, "a worker died of a harmless request")
            return None
        tried = [request for request in ran if request in self._on_trial]
        if self._stage is Stage.RETRIAL and ran == tried:
            return tried[0]
        # Whoever was to be tried and had no slot yet is tried later.
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
        else:  # a new search; or somebody was cleared too early, and it begins again
            self._cleared.clear()
            self._groups.extend(_halves(others or ran))
        self._next_trial()
        return None

    def convict(self, request: Request, now: float) -> list[Request]:
        """This request is guilty: go on without it.

        Returns:
            It and all others that are the same; they are to be ended.
        """
        log.error("request %d has killed its worker alone, twice: quarantined", request.req_id)
        key = _fingerprint_of(request)
        same = [r for r in self._scheduler.requests.values() if _fingerprint_of(r) == key]
        self._refuse(key, now)
        self._in_a_row.append(key)
        self._on_trial = {}
        if len(self._in_a_row) >= MAX_CONVICTED_IN_A_ROW:
            for innocent in self._in_a_row:
                self._refused.pop(innocent, None)
            self._acquit_all(now, "one request after the other kills its worker")
        else:
            self._next_trial()
        return same

    def _refuse(self, key: int, now: float) -> None:
        self.num_convicted += 1
        self._refused.pop(key, None)
        self._refused[key] = now + REFUSED_FOR_S
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def _acquit_all(self, now: float, why: str) -> None:
        log.error("%s: the fault is not in the requests", why)
        self._systemic_until = now + SYSTEMIC_FOR_S
        self._scheduler.abort_request(self._canary_id)
        self._groups.clear()
        self._next_trial()

    # Arrivals -----------------------------------------------------------------------------------

    def refuses(self, prompt: Sequence[int], params: SamplingParams, now: float) -> bool:
        """Whether the same request was convicted not long ago."""
        while self._refused and next(iter(self._refused.values())) <= now:
            del self._refused[next(iter(self._refused))]
        if now > self._inherited_until:
            self._inherited.clear()
        if not self._refused and not self._inherited:
            return False
        key = fingerprint(pack_token_ids(prompt), params)
        if key in self._inherited and self._inherited_stage is Stage.RETRIAL:
            self._inherited.remove(key)
            self._refuse(key, now)
        return key in self._refused

    def added(self, request: Request) -> None:
        """A request has come; if it was a suspect before the core died, it still is."""
        if self._stage in _LONELY:
            self._hold(request)
        if self._inherited and _fingerprint_of(request) in self._inherited:
            self._inherited.remove(_fingerprint_of(request))
            self._returned.append(request)
            self._hold(request)

    # A core's own death -------------------------------------------------------------------------

    def take_marks(self) -> list[int] | None:
        """What a successor must know if this core dies too: the stage, and the suspects that run.

        While nobody is on trial, all who run would be suspects. To be kept outside this process
        before a step is dispatched, and when none is under way any more.

        Returns:
            The stage's number and fingerprints, or nothing; None if they are what they were.
        """
        running = self._scheduler.running
        state: tuple[int, ...] = ()
        if self._scheduler.in_flight:
            last = running[-1].admission_index if running else -1
            state = (len(running), last, self._num_trials, len(self._on_trial))
        if state == self._told:
            return None
        self._told = state
        if not state:
            return []
        suspects = [r for r in running if r in self._on_trial]
        suspects = suspects or [r for r in running if r not in self._cleared]
        return [self._stage, *map(_fingerprint_of, suspects)]

    def inherit(self, marks: Sequence[int], now: float) -> None:
        """A core has died of what it was doing, and left these marks."""
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
        """Those who have come back are tried like suspects of this core's time."""
        returned, self._returned = self._returned, []
        suspects = [request for request in returned if not request.is_finished]
        if self._stage is not Stage.QUIET:
            self._groups.append(suspects)
        elif len(suspects) == 1 and self._inherited_stage is Stage.ALONE:
            self._begin_canary(suspects[0])
        else:
            self._groups.extend(_halves(suspects))
            self._next_trial()

    # Trials -------------------------------------------------------------------------------------

    def computed(self, requests: Iterable[Request]) -> None:
        """These have got tokens: who has come far enough is cleared."""
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

    def settle(self) -> None:
        """Go on with the search; to be called before each step."""
        if self._returned:
            self._resume_search()
        if self._stage is Stage.QUIET:
            return
        if self._must_drain and not self._scheduler.in_flight:
            self._must_drain = False
            self._let_run(set(self._on_trial))
        for request in [r for r in self._on_trial if r.is_finished or self._is_kept_out(r)]:
            del self._on_trial[request]
        if not self._on_trial:
            self._pass()
        if self._stage in _LONELY:  # whoever was unblocked meanwhile waits too
            while (front := self._scheduler.waiting.front()) and front not in self._on_trial:
                self._hold(front)

    def _is_kept_out(self, request: Request) -> bool:
        """Whether a pause keeps it from being tried: no reason for others to wait."""
        return self._scheduler.pause_mode is PauseMode.PAUSED_NEW and not request.has_begun()

    def _pass(self) -> None:
        """Nobody died."""
        if self._stage is not Stage.CANARY:
            self._next_trial()
            return
        group = self._groups.popleft()
        if self._canary.finish_reason is FinishReason.LENGTH:
            self._try(group, Stage.RETRIAL)
        else:  # it was ended by something else, and proves nothing
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
        self._let_run(self._held.copy())

    def _begin_canary(self, suspect: Request) -> None:
        """Run the shortest text that there is, for longer than a suspect is tried."""
        self._groups.appendleft([suspect])
        most = self._scheduler.options.max_model_len - 1
        num_tokens = min(_CANARY_TRIALS * self._num_ahead, most)
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        # With an output it is nobody new, so that no pause keeps it out that lets others go on.
        outputs = [0] if params.max_tokens > 1 else []
        self._canary = Request(self._canary_id, [0], params, output_token_ids=outputs)
        self._scheduler.add_request(self._canary)
        self._try([self._canary], Stage.CANARY)

    @property
    def _num_ahead(self) -> int:
        """Tokens after which a request is further than anybody can have been at the death.

        What the steps in flight had sampled then is not known here.
        """
        options = self._scheduler.options
        return 1 + options.max_steps_in_flight * (1 + options.num_speculative_tokens)

    def _try(self, group: list[Request], stage: Stage) -> None:
        log.warning(
            "looking for a request that kills workers: %s of %d", stage.name.lower(), len(group)
        )
        self._stage = stage
        self._num_trials += 1
        ends = {r: min(r.num_tokens + self._num_ahead, r.max_num_tokens) for r in group}
        if stage is Stage.CANARY:  # it proves most by running to its end
            ends = {self._canary: self._canary.max_num_tokens}
        self._on_trial = ends
        everybody = list(self._scheduler.requests.values())
        suspects = {request for group in self._groups for request in group}
        self._must_drain = stage in _LONELY and bool(self._scheduler.in_flight)
        waits = set(everybody) if stage in _LONELY else suspects
        waits = waits if self._must_drain else waits - ends.keys()
        self._let_run(self._held - waits)
        for request in everybody:
            if request in waits:
                self._hold(request)

    def _hold(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self._scheduler.preempt(request)
        if self._scheduler.hold(request):
            self._held.add(request)

    def _let_run(self, requests: set[Request]) -> None:
        """Release whoever of these is held, in order of arrival."""
        chosen = requests & self._held
        released = [r for r in self._scheduler.requests.values() if r in chosen]
        self._held -= requests
        for request in released:
            self._scheduler.unblock(request.req_id)


def _halves(requests: list[Request]) -> list[list[Request]]:
    half = (len(requests) + 1) // 2
    return [requests[:half], requests[half:]]


def _fingerprint_of(request: Request) -> int:
    if request.fingerprint is None:
        prompt = request.token_ids[: request.num_prompt_tokens].tobytes()
        request.fingerprint = fingerprint(prompt, request.sampling_params)
    return request.fingerprint


def fingerprint(prompt: bytes, params: SamplingParams) -> int:
    """64 bits of what makes two requests the same: packed prompts and parameters, seeds aside."""
    digest = hashlib.sha256(prompt)
    digest.update(msgspec.msgpack.encode(msgspec.structs.replace(params, seed=0)))
    return int.from_bytes(digest.digest()[:8], "little")
