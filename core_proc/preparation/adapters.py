"""Decides which adapters the workers hold, which adapter has a turn, and which requests wait.

Theory of operation. An adapter has a turn while requests with it may run; at most `max_loras` have
one, so a step never has more adapters than that. A request whose adapter has no turn, or is not
loaded yet, is queued as WAITING_FOR_ADAPTER and keeps its place; all others are admitted meanwhile.

* A turn begins, in the order in which adapters asked for one, as soon as there is room. It ends
  when another adapter waits and the last request of the turn has ended.
* While another adapter waits, a turn takes at most as many further requests as fit in a step, in
  the order of the scheduling policy. All others wait for the adapter's next turn, also those that
  came before another adapter waited. So every adapter gets its turn, however many requests there
  are for the others.
* Workers hold at most `max_cpu_loras` adapters. The one that was not used for the longest time
  makes room; one with a turn never does.

A lost worker takes its adapters along: their requests wait until its successor has loaded them. An
adapter that it was loading when it died may be the cause: recovery/adapter_trials.py. While such a
suspect is loaded, nothing else is computed (`holds_steps`).
Clients may ask for a load without a request (`load`), to learn whether the adapter can be used. If
all places are taken by turns, it is only checked.
"""

import enum
import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from core_proc.outputs.owners import Client
from core_proc.policy import Key
from core_proc.recovery.adapter_trials import AdapterTrials
from core_proc.request import Request, RequestStatus
from core_proc.scheduler import Scheduler
from protocol.adapters import Adapter
from protocol.api_core import ErrorCode
from protocol.core_worker import AdapterLoaded, LoadAdapter, UnloadAdapter

ADAPTER_PARAM = "model"
"""`RequestError.param` of an adapter that cannot be used: `model` names it."""
MAX_SENT = 4
"""Maximum number of adapters that were sent to the workers and are not answered: they take room in
a link's queue."""
MAX_LOADS = 64
"""Loads without a request that are not answered yet; further ones are refused."""
MAX_NAMES = 256
"""Maximum number of names of adapters in a report."""

SAME_ID = "its id is that of an adapter with other contents; change one of them"
KILLS_WORKERS = "workers died when they loaded it; it is refused until it is loaded again"

Done = Callable[[Client, int, str, ErrorCode], None]
"""Takes a client, the number of its control, and what is wrong, or nothing, with its code."""
_Row = tuple[Key, int, Request]
"""A request, after its place in the order of the policy and its id."""


class Place(enum.Enum):
    """Where an adapter is, as far as the core knows."""

    NOWHERE = enum.auto()
    CHECKED = enum.auto()
    """The workers are to check it and drop it."""
    LOADED = enum.auto()
    """The workers are to load it, and have not answered."""
    READY = enum.auto()


@dataclass(slots=True, eq=False)
class _Entry:
    """One adapter, and the requests with it."""

    adapter: Adapter
    place: Place = Place.NOWHERE
    has_turn: bool = False
    num_left: int = 0
    """Requests that its turn still takes while another adapter waits."""
    taken: set[Request] = field(default_factory=set)
    """Requests of its turn. Some of them may have ended."""
    waiting: list[_Row] = field(default_factory=list)
    """Requests for its next turn: a heap. Some of them may have ended."""
    is_cut: bool = False
    """Whether its turn was limited because another adapter waits; the requests beyond the limit
    wait for its next turn."""
    callers: list[tuple[Client, int]] = field(default_factory=list)
    """Clients that await the load, each with the number of its control."""
    used_at: int = 0
    is_unwanted: bool = False
    """Whether it is to be dropped once no request has it."""

    def forget_ended(self) -> None:
        self.taken = {request for request in self.taken if not request.is_finished}
        if any(request.is_finished for _, _, request in self.waiting):
            self.waiting = [row for row in self.waiting if not row[2].is_finished]
            heapq.heapify(self.waiting)

    @property
    def is_idle(self) -> bool:
        return not (self.taken or self.waiting or self.callers)

    @property
    def is_needed(self) -> bool:
        return bool(self.taken or self.callers)


class Adapters:
    """The adapters of a scheduler's requests, by their ids."""

    def __init__(
        self,
        scheduler: Scheduler,
        trials: AdapterTrials,
        done: Done,
        *,
        max_loras: int,
        num_kept: int,
        num_taken: int,
    ) -> None:
        """Begin without adapters.

        Args:
            scheduler: the scheduler whose requests name adapters.
            trials: the record of adapters that killed workers.
            done: is called when a control has ended.
            max_loras: maximum number of adapters whose requests run at a time.
            num_kept: maximum number of adapters that workers hold.
            num_taken: maximum number of requests in a turn for which another adapter waits.
        """
        self._scheduler = scheduler
        self._max_loras = max_loras
        self._num_kept = num_kept
        self._num_taken = num_taken
        self._done = done
        self._trials = trials
        self._entries: dict[int, _Entry] = {}
        self._with_turn: list[_Entry] = []
        self._queue: deque[_Entry] = deque()
        """Adapters that wait for a turn."""
        self._uses = 0
        self._num_ended = 0
        self._has_news = False
        """Something has changed since the last `take_messages`."""
        self._awaits_quiet = False
        """A suspect is loaded once the workers do nothing else."""

    def add(self, request: Request, adapter: Adapter) -> None:
        """Take a queued request with an adapter; it waits until that is loaded and has a turn."""
        entry = self._entry(adapter)
        entry.is_unwanted = False
        if entry.has_turn and (not self._queue or entry.num_left > 0):
            entry.num_left -= bool(self._queue)
            entry.taken.add(request)
        else:
            self._put_waiting(entry, request)
            self._ask_for_turn(entry)
        self.hold_if_unready(request)
        self._has_news = True

    def _entry(self, adapter: Adapter) -> _Entry:
        entry = self._entries.get(adapter.adapter_id)
        if entry is None:
            entry = self._entries[adapter.adapter_id] = _Entry(adapter)
        elif entry.place is Place.NOWHERE:
            entry.adapter = adapter  # the same files may be elsewhere by now
        self._uses += 1
        entry.used_at = self._uses
        return entry

    def _put_waiting(self, entry: _Entry, request: Request) -> None:
        row = self._scheduler.policy.order(request), request.req_id, request
        heapq.heappush(entry.waiting, row)

    def _ask_for_turn(self, entry: _Entry) -> None:
        if not entry.has_turn and entry not in self._queue:
            self._queue.append(entry)
            for other in self._with_turn:
                self._cut(other)

    def hold_if_unready(self, request: Request) -> bool:
        """Block a request's admission if its adapter is not ready; return whether it is blocked."""
        if request.adapter_id == 0:
            return False
        entry = self._entries[request.adapter_id]
        if entry.place is Place.READY and request in entry.taken:
            return False
        self._scheduler.hold(request, RequestStatus.WAITING_FOR_ADAPTER)
        return True

    def waits_for_others(self, request: Request) -> bool:
        """Return whether a request gets its turn only after requests of other adapters end."""
        entry = self._entries.get(request.adapter_id)
        if entry is None or request in entry.taken or request.is_finished:
            return False
        busy = [e for e in self._with_turn if any(not r.is_finished for r in e.taken)]
        return entry.has_turn or len(busy) >= self._max_loras

    def refuses(self, adapter: Adapter) -> bool:
        """Return whether workers have died of the load of an adapter."""
        return self._trials.refuses(adapter.adapter_id)

    def has_id_conflict(self, adapter: Adapter) -> bool:
        """Return whether a different adapter that is in use or loaded has the same id."""
        entry = self._entries.get(adapter.adapter_id)
        return entry is not None and entry.adapter.digest != adapter.digest

    def load(self, client: Client, number: int, adapter: Adapter) -> None:
        """Load or check an adapter without a request; the answer is passed to `done`.

        One that is refused is tried once more.
        """
        if self.has_id_conflict(adapter):
            self._done(client, number, SAME_ID, ErrorCode.INVALID)
            return
        if sum(len(entry.callers) for entry in self._entries.values()) >= MAX_LOADS:
            text = f"{MAX_LOADS} adapters are being loaded already"
            self._done(client, number, text, ErrorCode.OVERLOADED)
            return
        self._trials.allow(adapter.adapter_id)
        entry = self._entry(adapter)
        entry.is_unwanted = False
        if entry.place is Place.READY:
            self._done(client, number, "", ErrorCode.INVALID)
            return
        entry.callers.append((client, number))
        self._has_news = True

    def unload(self, adapter: Adapter) -> None:
        """Drop an adapter as soon as no request has it."""
        entry = self._entries.get(adapter.adapter_id)
        if entry is not None:
            entry.is_unwanted = True
            self._has_news = True

    def forget(self, client: Client) -> None:
        """Drop the answers for a client that is gone."""
        for entry in self._entries.values():
            entry.callers = [caller for caller in entry.callers if caller[0] != client]

    def in_use(self) -> tuple[list[str], list[str]]:
        """Return the names of the adapters of running requests, and of those that wait.

        One adapter may be in both lists, each of which has at most `MAX_NAMES`.
        """
        running, waiting = list[str](), list[str]()
        for entry in self._entries.values():
            statuses = {request.status for request in entry.taken if not request.is_finished}
            if RequestStatus.RUNNING in statuses:
                running.append(entry.adapter.name)
            has_waiting = any(not request.is_finished for _, _, request in entry.waiting)
            if has_waiting or statuses - {RequestStatus.RUNNING}:
                waiting.append(entry.adapter.name)
        return running[:MAX_NAMES], waiting[:MAX_NAMES]

    @property
    def holds_steps(self) -> bool:
        """Whether no step may be computed now, because a suspect is loading or is about to load."""
        return self._awaits_quiet or bool(self._trials.on_trial)

    def take_messages(
        self, *, is_searching: bool = False
    ) -> tuple[list[LoadAdapter | UnloadAdapter], list[Request]]:
        """Return the messages for the workers, and the requests that may be admitted now.

        `is_searching`: a request that kills workers is searched for. Meanwhile all adapters are
        loaded like suspects, so that only one of the two can be the cause of a death.
        """
        num_ended = self._scheduler.num_ended
        has_ended, self._num_ended = num_ended != self._num_ended, num_ended
        is_awaited = bool(self._queue) or any(e.is_unwanted for e in self._entries.values())
        if not self._has_news and not (has_ended and is_awaited) and not self._awaits_quiet:
            return [], []
        self._has_news = False
        for entry in self._entries.values():
            entry.forget_ended()
        unblocked = self._pass_turns()
        messages = [*self._unload_unwanted(), *self._load_needed(is_searching=is_searching)]
        self._entries = {
            adapter_id: entry
            for adapter_id, entry in self._entries.items()
            if entry.has_turn or entry.place is not Place.NOWHERE or not entry.is_idle
        }
        return messages, unblocked

    def _pass_turns(self) -> list[Request]:
        """Let turns end and begin; returns requests that may be admitted now."""
        self._queue = deque(entry for entry in self._queue if entry.waiting)
        if self._queue:
            for entry in self._with_turn:
                entry.has_turn = bool(entry.taken)
                if not entry.has_turn and entry.waiting:
                    self._queue.append(entry)
            self._with_turn = [entry for entry in self._with_turn if entry.has_turn]
        while self._queue and len(self._with_turn) < self._max_loras:
            entry = self._queue.popleft()
            entry.has_turn, entry.num_left = True, self._num_taken
            entry.is_cut = True  # it has taken nothing yet
            self._with_turn.append(entry)
        return [request for entry in self._with_turn for request in self._take_waiting(entry)]

    def _cut(self, entry: _Entry) -> None:
        """Limit a turn to some further requests, because another adapter waits."""
        if entry.is_cut:
            return
        entry.is_cut = True
        order = self._scheduler.policy.order
        others = [request for request in entry.taken if not _has_begun(request)]
        others.sort(key=lambda request: (order(request), request.req_id))
        for request in others[entry.num_left :]:
            entry.taken.remove(request)
            self._put_waiting(entry, request)
            self._scheduler.hold(request, RequestStatus.WAITING_FOR_ADAPTER)
        entry.num_left -= len(others[: entry.num_left])

    def _take_waiting(self, entry: _Entry) -> Iterable[Request]:
        """Let requests join the turn of their adapter; yields those that may be admitted now."""
        if not self._queue:
            entry.is_cut, entry.num_left = False, self._num_taken
        while entry.waiting and (not self._queue or entry.num_left > 0):
            entry.num_left -= bool(self._queue)
            _, _, request = heapq.heappop(entry.waiting)
            entry.taken.add(request)
            if entry.place is Place.READY and self._release(request):
                yield request

    def _release(self, request: Request) -> bool:
        """Unblock a request if it waits for its adapter; return whether it did."""
        if request.status is not RequestStatus.WAITING_FOR_ADAPTER:
            return False
        self._scheduler.unblock(request.req_id, RequestStatus.WAITING_FOR_ADAPTER)
        return True

    def _unload_unwanted(self) -> Iterable[UnloadAdapter]:
        for entry in self._entries.values():
            if entry.is_unwanted and entry.is_idle and entry.place is Place.READY:
                yield self._drop(entry)

    def _drop(self, entry: _Entry) -> UnloadAdapter:
        entry.place = Place.NOWHERE
        if entry.has_turn:
            entry.has_turn = False
            self._with_turn.remove(entry)
        return UnloadAdapter(entry.adapter.adapter_id)

    def _load_needed(self, *, is_searching: bool) -> Iterable[LoadAdapter | UnloadAdapter]:
        """Yield loads of adapters that have a turn, or are asked for, as far as there is room."""
        needed = [e for e in self._entries.values() if e.place is Place.NOWHERE and e.is_needed]
        suspects = [e for e in needed if self._trials.is_suspect(e.adapter.adapter_id)]
        is_alone = bool(suspects) or (is_searching and bool(needed))
        self._awaits_quiet = is_alone and self._is_busy
        if self._trials.on_trial or self._awaits_quiet:
            return
        for entry in suspects or needed:
            places = [e.place for e in self._entries.values()]
            num_sent = places.count(Place.LOADED) + places.count(Place.CHECKED)
            if num_sent >= (1 if is_alone else MAX_SENT):
                return
            messages = self._load(entry)
            if messages:
                self._trials.begin(entry.adapter.adapter_id, is_alone=is_alone)
            yield from messages

    @property
    def _is_busy(self) -> bool:
        """Whether the workers compute or load anything."""
        places = (entry.place for entry in self._entries.values())
        return bool(self._scheduler.in_flight) or any(
            place in (Place.LOADED, Place.CHECKED) for place in places
        )

    def _load(self, entry: _Entry) -> list[LoadAdapter | UnloadAdapter]:
        """Return the message that loads or checks an adapter, if that is possible now."""
        messages: list[LoadAdapter | UnloadAdapter] = []
        held = [e for e in self._entries.values() if e.place in (Place.LOADED, Place.READY)]
        if len(held) >= self._num_kept:
            # One whose requests wait for its next turn makes room, too, if no other can.
            unused = [e for e in held if e.place is Place.READY and not e.taken]
            if unused:
                unused_first = min(unused, key=lambda e: (bool(e.waiting), e.used_at))
                messages.append(self._drop(unused_first))
            elif entry.taken:
                return []  # what is being loaded without a request will be idle
            else:
                entry.place = Place.CHECKED
                return [LoadAdapter(entry.adapter, keeps=False)]
        entry.place = Place.LOADED
        return [*messages, LoadAdapter(entry.adapter)]

    def loaded(self, message: AdapterLoaded) -> list[Request]:
        """Handle the workers' answer; return the requests that may be admitted now."""
        entry = self._entries.get(message.adapter_id)
        if entry is None or entry.place not in (Place.CHECKED, Place.LOADED):
            return []
        self._has_news = True
        self._trials.answered(message.adapter_id)
        is_kept = entry.place is Place.LOADED and not message.error
        entry.place = Place.READY if is_kept else Place.NOWHERE
        self._answer(entry, message.error)
        if not is_kept:
            return []
        return [request for request in entry.taken if self._release(request)]

    def _answer(self, entry: _Entry, error: str, code: ErrorCode = ErrorCode.INVALID) -> None:
        """Answer the clients that asked for a load; an error also fails the adapter's requests."""
        callers, entry.callers = entry.callers, []
        for client, number in callers:
            self._done(client, number, error, code)
        if error:
            text = f"adapter {entry.adapter.name!r}: {error}"
            for request in (*entry.taken, *(row[2] for row in entry.waiting)):
                self._scheduler.fail_request(request.req_id, text, code, ADAPTER_PARAM)

    def attribute_death(self, *, is_fault: bool) -> None:
        """Note whether a load was the cause of the last death of workers."""
        for adapter_id in self._trials.attribute_death(is_fault=is_fault):
            entry = self._entries.get(adapter_id)
            if entry is not None:
                self._answer(entry, KILLS_WORKERS, ErrorCode.QUARANTINED)
        self._has_news = True

    def workers_lost(self) -> None:
        """Let all requests with an adapter wait until the next workers have loaded it."""
        self._has_news = True
        self._awaits_quiet = False
        self._trials.workers_lost()
        for entry in self._entries.values():
            entry.forget_ended()
            entry.place = Place.NOWHERE
            for request in entry.taken:
                self._scheduler.hold(request, RequestStatus.WAITING_FOR_ADAPTER)


def _has_begun(request: Request) -> bool:
    holds_blocks = (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KV)
    return request.is_finished or request.status in holds_blocks or request.has_begun()
