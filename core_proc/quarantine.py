"""Finds the request that kills workers, and refuses it: so that one cannot take all others down.

When a worker dies of what it computed (never: of a signal from outside), those that ran are
suspects. They are tried in groups, while the other suspects wait and all whom nobody suspects go
on. Who comes further than the death can have been is free. If another worker dies, the group is
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
from protocol.message import pack_token_ids
from protocol.sampling import SamplingParams

REFUSED_FOR_S = 600.0
MAX_REFUSED = 1024
"""Texts that are remembered; the oldest is forgotten first."""

log = logging.getLogger("troika.core")


class Stage(enum.Enum):
    """How far the search is."""

    QUIET = "quiet"
    GROUP = "group"
    """Some suspects compute; the others wait."""
    ALONE = "alone"
    """One suspect computes, and nobody else."""
    CANARY = "canary"
    """A harmless request computes alone, to see whether workers live at all."""
    RETRIAL = "retrial"
    """Workers live; the suspect computes alone again."""


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
        """Tokens at which each is free; 0: it is."""
        self._free: set[Request] = set()
        """Whoever has passed a trial of this search."""
        self._held: set[Request] = set()
        self._ran: list[Request] = []
        """Who was running when the workers were lost."""
        self._refused: dict[int, float] = {}
        """By fingerprint: until when."""
        self._inherited: set[int] = set()
        """Fingerprints of suspects of a core that died, who have not come back yet."""
        self._inherited_stage = Stage.QUIET
        """How they were tried when it died."""
        self._returned: list[Request] = []
        """Those who have come back since the last step."""
        self._num_trials = 0
        self.num_convicted = 0
        self.is_systemic = False
        """Workers die whatever they compute; until one has computed something."""

    def is_canary(self, request: Request) -> bool:
        """Whether this is our own request, of which no client is to hear."""
        return request.req_id == self._canary_id

    # Events -------------------------------------------------------------------------------------

    def workers_lost(self) -> None:
        """All that runs is about to be taken back; if that was somebody's fault, `charge` says."""
        self._ran = list(self._scheduler.running) if self._scheduler.in_flight else []

    def charge(self) -> Request | None:
        """The workers that were lost last died of what they computed; ask for it once.

        Returns:
            The request that has been found guilty, if that is the last thing that was missing: it
            is to be ended.
        """
        ran, self._ran = self._ran, []
        if not ran or self.is_systemic:
            return None
        if self._stage is Stage.CANARY:
            self._acquit_all()
            return None
        tried = [request for request in ran if self._on_trial.get(request)]
        if len(ran) == 1 and tried == ran and self._stage is Stage.RETRIAL:
            return tried[0]
        known = self._free.union(tried)
        others = [request for request in ran if request not in known]
        if not tried and not others:  # somebody was set free too early: all over again
            self._free.clear()
            others = ran
        known.update(ran)
        self._groups.appendleft([request for request in self._on_trial if request not in known])
        if len(ran) == 1:
            self._begin_canary(ran[0])
            return None
        self._groups.extendleft(reversed(_halves(tried)))
        self._groups.extend(_halves(others) if not tried else [others])
        self._next_trial()
        return None

    def convict(self, request: Request, now: float) -> None:
        """Go on with the search: this request is guilty, and has been ended."""
        log.error("request %d has killed its worker alone, twice: quarantined", request.req_id)
        self._refuse(_fingerprint_of(request), now)
        self._on_trial = {}
        self._next_trial()

    def _refuse(self, key: int, now: float) -> None:
        self.num_convicted += 1
        self._refused.pop(key, None)
        self._refused[key] = now + REFUSED_FOR_S
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def refuses(self, prompt: Sequence[int], params: SamplingParams, now: float) -> bool:
        """Whether the same request was convicted not long ago."""
        if not self._refused and not self._inherited:
            return False
        key = fingerprint(pack_token_ids(prompt), params)
        if key in self._inherited and self._inherited_stage is Stage.RETRIAL:
            self._inherited.remove(key)
            self._refuse(key, now)
        return self._refused.get(key, now) > now

    # A core's own death -------------------------------------------------------------------------

    def marks(self) -> list[int]:
        """What a successor must know if this core dies too: the stage, and the suspects that run.

        While nobody is on trial, all who run would be suspects. To be kept outside this process
        before a step is dispatched; it changes only with who runs and with the search.
        """
        running = self._scheduler.running
        suspects = [r for r in running if self._on_trial.get(r)]
        suspects = suspects or [r for r in running if r not in self._free]
        keys = [r.fingerprint or _fingerprint_of(r) for r in suspects]
        return [list(Stage).index(self._stage), *keys]

    @property
    def progress(self) -> tuple[int, ...]:
        """Differs whenever `marks` does."""
        running = self._scheduler.running
        last = running[-1].admission_index if running else -1
        return len(running), last, self._num_trials, sum(map(bool, self._on_trial.values()))

    def inherit(self, marks: Sequence[int]) -> None:
        """A core has died of what it was doing, and left these marks."""
        if not marks:
            return
        stage = list(Stage)[marks[0] % len(Stage)]
        if stage is Stage.CANARY:
            self.is_systemic = True
            return
        self._inherited = set(marks[1:])
        self._inherited_stage = stage
        if len(self._inherited) == 1 and stage is not Stage.RETRIAL:
            self._inherited_stage = Stage.ALONE

    def added(self, request: Request) -> None:
        """A request has come; if it was a suspect before the core died, it still is."""
        if not self._inherited:
            return
        key = _fingerprint_of(request)
        if key in self._inherited:
            self._inherited.remove(key)
            self._returned.append(request)
            self._hold(request)

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

    def computed(self, requests: Iterable[Request]) -> None:
        """These have got tokens: who has come far enough is free."""
        self.is_systemic = False
        if self._stage is Stage.QUIET:
            return
        for request in requests:
            if request.num_tokens >= self._on_trial.get(request, request.num_tokens + 1):
                self._on_trial[request] = 0

    def settle(self) -> None:
        """Go on with the search if all on trial are free; to be called before each step."""
        if self._returned:
            self._resume_search()
        if self._stage is Stage.QUIET:
            return
        if all(r.is_finished or not tokens for r, tokens in self._on_trial.items()):
            self._pass()
        if self._stage in _LONELY:  # whoever has come meanwhile waits too
            for request in self._scheduler.requests.values():
                if request not in self._on_trial:
                    self._hold(request)

    # Trials -------------------------------------------------------------------------------------

    def _pass(self) -> None:
        """Nobody died: whoever was on trial is free, or was the canary."""
        if self._stage is Stage.CANARY:
            self._try(self._groups.popleft(), Stage.RETRIAL)
            return
        self._free.update(request for request in self._on_trial if not request.is_finished)
        self._next_trial()

    def _next_trial(self) -> None:
        while self._groups:
            group = [request for request in self._groups.popleft() if not request.is_finished]
            if group:
                self._try(group, Stage.ALONE if len(group) == 1 else Stage.GROUP)
                return
        self._stage = Stage.QUIET
        self._num_trials += 1
        self._on_trial = {}
        self._free.clear()
        self._release(set())

    def _begin_canary(self, suspect: Request) -> None:
        """Run the shortest prompt that there is, before the suspect runs again."""
        self._groups.appendleft([suspect])
        canary = Request(self._canary_id, [0], SamplingParams(max_tokens=1, ignore_eos=True))
        self._scheduler.add_request(canary)
        self._try([canary], Stage.CANARY)

    def _try(self, group: list[Request], stage: Stage) -> None:
        """Let these compute until they are further than anybody can have been.

        What was sampled by the steps in flight at the death is not known here; so a request is
        free when it has got as many tokens as they can have brought, and one more.
        """
        log.warning("looking for a request that kills workers: %s of %d", stage.value, len(group))
        self._stage = stage
        self._num_trials += 1
        options = self._scheduler.options
        ahead = 1 + options.max_steps_in_flight * (1 + options.num_speculative_tokens)
        self._on_trial = {r: min(r.num_tokens + ahead, r.max_num_tokens) for r in group}
        everybody = list(self._scheduler.requests.values())
        suspects = {request for group in self._groups for request in group}
        others = everybody if stage in _LONELY else suspects
        waits = {request for request in others if request not in self._on_trial}
        self._release(waits)
        for request in everybody:
            if request in waits:
                self._hold(request)

    def _acquit_all(self) -> None:
        log.error("a worker died of a harmless request: the fault is not in the requests")
        self.is_systemic = True
        self._scheduler.abort_request(self._canary_id)
        self._groups.clear()
        self._next_trial()

    def _hold(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self._scheduler.preempt(request)
        if self._scheduler.hold(request):
            self._held.add(request)

    def _release(self, waits: set[Request]) -> None:
        """Let go of everybody who is held, but for these."""
        free = self._held - waits
        released = [r for r in self._scheduler.requests.values() if r in free]
        self._held &= waits
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
