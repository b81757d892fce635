"""Decides which adapters the workers hold, and which requests wait for one.

A request whose adapter is not loaded, or has no turn (adapter_turns.py), is queued as
WAITING_FOR_ADAPTER and keeps its place; all others are admitted meanwhile.

Workers hold at most `max_cpu_loras` adapters. The one that was not used for the longest time makes
room; one with requests in its turn never does. A lost worker takes its adapters along: their
requests wait until its successor has loaded them. An adapter that it was loading when it died may
be the cause: recovery/adapter_trials.py. While such a suspect is loaded, nothing else is computed
(`holds_steps`).

Clients may ask for a load without a request (`load`), to learn whether the adapter can be used. If
all places are taken by turns, it is only checked.
"""

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from core_proc.outputs.owners import Client
from core_proc.preparation.adapter_turns import AdapterRequests, AdapterTurns
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


class Place(enum.Enum):
    """Where an adapter is, as far as the core knows."""

    NOWHERE = enum.auto()
    CHECKING = enum.auto()
    """The workers are to check it and drop it."""
    LOADING = enum.auto()
    """The workers are to load it, and have not answered."""
    READY = enum.auto()


@dataclass(slots=True, eq=False)
class _Entry:
    """One adapter, and the requests with it."""

    adapter: Adapter
    requests: AdapterRequests = field(default_factory=AdapterRequests)
    place: Place = Place.NOWHERE
    callers: list[tuple[Client, int]] = field(default_factory=list)
    """Clients that await the load, each with the number of its control."""
    used_at: int = 0
    is_unwanted: bool = False
    """Whether it is to be dropped once no request has it."""

    @property
    def is_idle(self) -> bool:
        return self.requests.is_empty and not self.callers

    @property
    def is_needed(self) -> bool:
        return bool(self.requests.taken or self.callers)


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
        self._turns = AdapterTurns(scheduler, max_loras=max_loras, num_taken=num_taken)
        self._num_kept = num_kept
        self._done = done
        self._trials = trials
        self._entries: dict[int, _Entry] = {}
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
        self._turns.add(entry.requests, request)
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

    def hold_if_unready(self, request: Request) -> bool:
        """Block a request's admission if its adapter is not ready; return whether it is blocked."""
        if request.adapter_id == 0:
            return False
        entry = self._entries[request.adapter_id]
        if entry.place is Place.READY and request in entry.requests.taken:
            return False
        self._scheduler.hold(request, RequestStatus.WAITING_FOR_ADAPTER)
        return True

    def waits_for_others(self, request: Request) -> bool:
        """Return whether a request gets its turn only after requests of other adapters end."""
        entry = self._entries.get(request.adapter_id)
        return entry is not None and self._turns.waits_for_others(entry.requests, request)

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
            requests = entry.requests
            statuses = {request.status for request in requests.taken if not request.is_finished}
            if RequestStatus.RUNNING in statuses:
                running.append(entry.adapter.name)
            has_waiting = any(not request.is_finished for _, _, request in requests.waiting)
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
        is_unwanted = any(entry.is_unwanted for entry in self._entries.values())
        is_awaited = self._turns.are_awaited or is_unwanted
        if not self._has_news and not (has_ended and is_awaited) and not self._awaits_quiet:
            return [], []
        self._has_news = False
        for entry in self._entries.values():
            entry.requests.forget_ended()
        joined = self._turns.pass_on()
        unblocked = [request for request in joined if self._release_if_ready(request)]
        messages = [*self._unload_unwanted(), *self._load_needed(is_searching=is_searching)]
        self._entries = {
            adapter_id: entry
            for adapter_id, entry in self._entries.items()
            if entry.requests.has_turn or entry.place is not Place.NOWHERE or not entry.is_idle
        }
        return messages, unblocked

    def _release_if_ready(self, request: Request) -> bool:
        """Unblock a request in its adapter's turn if it waits for a loaded adapter."""
        is_ready = self._entries[request.adapter_id].place is Place.READY
        return is_ready and self._release(request)

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
        self._turns.end(entry.requests)
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
            num_sent = places.count(Place.LOADING) + places.count(Place.CHECKING)
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
            place in (Place.LOADING, Place.CHECKING) for place in places
        )

    def _load(self, entry: _Entry) -> list[LoadAdapter | UnloadAdapter]:
        """Return the message that loads or checks an adapter, if that is possible now."""
        messages: list[LoadAdapter | UnloadAdapter] = []
        held = [e for e in self._entries.values() if e.place in (Place.LOADING, Place.READY)]
        if len(held) >= self._num_kept:
            # One whose requests wait for its next turn makes room, too, if no other can.
            unused = [e for e in held if e.place is Place.READY and not e.requests.taken]
            if unused:
                unused_first = min(unused, key=lambda e: (bool(e.requests.waiting), e.used_at))
                messages.append(self._drop(unused_first))
            elif entry.requests.taken:
                return []  # what is being loaded without a request will be idle
            else:
                entry.place = Place.CHECKING
                return [LoadAdapter(entry.adapter, keeps=False)]
        entry.place = Place.LOADING
        return [*messages, LoadAdapter(entry.adapter)]

    def loaded(self, message: AdapterLoaded) -> list[Request]:
        """Handle the workers' answer; return the requests that may be admitted now."""
        entry = self._entries.get(message.adapter_id)
        if entry is None or entry.place not in (Place.CHECKING, Place.LOADING):
            return []
        self._has_news = True
        self._trials.answered(message.adapter_id)
        is_kept = entry.place is Place.LOADING and not message.error
        entry.place = Place.READY if is_kept else Place.NOWHERE
        self._answer(entry, message.error)
        if not is_kept:
            return []
        return [request for request in entry.requests.taken if self._release(request)]

    def _answer(self, entry: _Entry, error: str, code: ErrorCode = ErrorCode.INVALID) -> None:
        """Answer the clients that asked for a load; an error also fails the adapter's requests."""
        callers, entry.callers = entry.callers, []
        for client, number in callers:
            self._done(client, number, error, code)
        if error:
            text = f"adapter {entry.adapter.name!r}: {error}"
            for request in entry.requests.all():
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
            entry.requests.forget_ended()
            entry.place = Place.NOWHERE
            for request in entry.requests.taken:
                self._scheduler.hold(request, RequestStatus.WAITING_FOR_ADAPTER)
