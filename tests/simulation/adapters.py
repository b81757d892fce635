"""Adapters in virtual time: loads that take time, are in error or kill their worker, and turns.

The worker's real `AdapterService` takes loads and answers them; only its threads are replaced. What
the core sends and learns, and which workers die, is observed from outside of both.
"""

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from core_proc.preparation.adapter_turns import AdapterTurns
from core_proc.request import Request
from protocol.adapters import Adapter
from protocol.client import AsyncEngineClient
from protocol.client.errors import RequestFailed, RequestQuarantined
from protocol.core_worker import AdapterLoaded, LoadAdapter, SchedulerOutput
from tests.simulation.world import Process, Violation, World
from worker_proc.adapters.kept import KeptAdapters
from worker_proc.adapters.service import AdapterService, _Job

WRONG_TEXT = "lora_A has other shapes"
MAX_POINTS = 4
"""An adapter is refused at this number, as `core_proc.recovery.adapter_trials` states."""
_QUICK_S = (0.0002, 0.02)
_SLOW_S = (0.05, 0.8)
_SLOW_RATE = 0.3


def make_adapters(number: int) -> list[Adapter]:
    return [Adapter(f"a{i}", f"/a{i}", bytes([i + 1]) * 32) for i in range(number)]


@dataclass
class AdapterPlan:
    """The adapters of a run, and how their loads end."""

    adapters: list[Adapter]
    wrong: set[int] = field(default_factory=set)
    """Ids of those whose files are in error."""
    deadly: dict[int, tuple[float, int]] = field(default_factory=dict)
    """The probability that a load kills its worker, and the signal, by the adapter's id."""
    loads: list[tuple[float, Adapter]] = field(default_factory=list)
    """Loads by an operator, at times in seconds."""

    def is_unusable(self, adapter: Adapter | None) -> bool:
        """Return whether no load of an adapter ends well."""
        if adapter is None:
            return False
        probability, _ = self.deadly.get(adapter.adapter_id, (0.0, 0))
        return adapter.adapter_id in self.wrong or probability >= 1.0


class LoadWatch:
    """Follows the loads of all cores and workers, and how many deaths there were in them.

    A core may know of fewer deaths than there were, and never of more.
    """

    def __init__(self, world: World, plan: AdapterPlan) -> None:
        self._world = world
        self.plan = plan
        self._loading: set[int] = set()
        """What the core has sent, and the workers have not answered."""
        self._points: Counter[int] = Counter()
        self._killed: Counter[int] = Counter()
        """Workers that loads of a deadly adapter have killed since one has ended."""
        self._allowed = dict.fromkeys((a.adapter_id for a in plan.adapters), MAX_POINTS)

    def adopted(self) -> None:
        """A core begins anew with workers."""
        self._loading.clear()

    def sent(self, adapter_id: int) -> None:
        self._loading.add(adapter_id)

    def answered(self, adapter_id: int) -> None:
        self._loading.discard(adapter_id)
        self._points[adapter_id] = self._killed[adapter_id] = 0

    def worker_died(self, status: int | None) -> None:
        """Count a death: twice, unless it can only have been a signal from outside."""
        is_outside = status == -signal.SIGKILL and self._world.excuse is None
        for adapter_id in self._loading:
            self._points[adapter_id] += 1 if is_outside else 2

    def core_died(self) -> None:
        """Allow one more death, of which no core has learned, and those of repeated loads."""
        for adapter_id in self._allowed:
            self._allowed[adapter_id] += 3 if self.plan.loads else 1

    def asked(self, adapter: Adapter) -> None:
        """An operator loads an adapter again."""
        self._allowed[adapter.adapter_id] += 2

    def killed(self, adapter_id: int) -> None:
        """A load has killed its worker.

        Raises:
            Violation: too many have done so in a row.
        """
        self._killed[adapter_id] += 1
        num_killed, most = self._killed[adapter_id], self._allowed[adapter_id]
        if num_killed > most and self._world.excuse is None:
            raise Violation(f"endless: loads of an adapter have killed {num_killed} workers")

    def may_refuse(self, adapter: Adapter) -> bool:
        """Return whether enough workers have died while they loaded an adapter."""
        return self._points[adapter.adapter_id] >= MAX_POINTS

    async def load(self, engine: AsyncEngineClient, adapter: Adapter) -> None:
        """Load an adapter as an operator does, and check the answer.

        Raises:
            Violation: it is not that of the adapter.
        """
        self.asked(adapter)
        try:
            error = await engine.load_adapter(adapter)
        except RequestQuarantined as failure:
            if not self.may_refuse(adapter):
                raise Violation(f"mismatched: {failure.error.message}") from failure
        except (TimeoutError, RequestFailed):
            return
        else:
            self._world.counts["adapter loaded again"] += 1
            if bool(error) != self.plan.is_unusable(adapter):
                raise Violation(f"mismatched: the load of {adapter.name} ends with {error!r}")


class SimulatedAdapterService(AdapterService[Adapter]):
    """The worker's service, whose loads take virtual time, one after the other."""

    def __init__(self, process: Process, kept: KeptAdapters[Adapter], watch: LoadWatch) -> None:
        super().__init__(kept)
        self._thread = threading.Thread()  # is never started
        self._process, self._world = process, process.world
        self._watch = watch
        self._is_loading = False
        process.on_death.append(self._release)

    def load(self, message: LoadAdapter) -> AdapterLoaded | None:
        answer = super().load(message)
        if answer is None and not self._is_loading:
            self._begin_next()
        return answer

    def _begin_next(self) -> None:
        job = next(self._waiting_jobs(), None)
        self._is_loading = job is not None
        if job is None:
            return
        world, adapter_id = self._world, job.message.adapter.adapter_id
        is_slow = world.random() < _SLOW_RATE
        world.counts["adapter slow" if is_slow else "adapter"] += 1
        took = world.between(*(_SLOW_S if is_slow else _QUICK_S))
        world.at(world.local_time + took, self._end, job)
        probability, number = self._watch.plan.deadly.get(adapter_id, (0.0, 0))
        if world.random() < probability:
            world.at(world.local_time + took // 2, self._kill, adapter_id, number)

    def _waiting_jobs(self) -> Iterator[_Job]:
        while not self._jobs.empty():
            job = self._jobs.get()
            if job.adoption == self._adoption:
                yield job

    def _end(self, job: _Job) -> None:
        if not self._process.is_alive:
            return
        adapter = job.message.adapter
        error = WRONG_TEXT if adapter.adapter_id in self._watch.plan.wrong else ""
        kept = adapter if job.message.keeps and not error else None
        self._results.append((job, kept, error))
        self._world.readable_fds.add(self.wake_fd)
        self._process.wake()
        self._begin_next()

    def _kill(self, adapter_id: int, number: int) -> None:
        if self._process.is_alive:
            self._world.counts["killed by a load"] += 1
            self._process.die(-number)
            self._watch.killed(adapter_id)

    def take_results(self) -> list[AdapterLoaded]:
        answers = super().take_results()
        self._world.readable_fds.discard(self.wake_fd)
        if len(self._kept) > self._kept.num_kept:
            raise Violation(f"leak: a worker keeps {len(self._kept)} adapters")
        return answers

    def _release(self) -> None:
        self._world.readable_fds.discard(self.wake_fd)
        os.close(self.wake_fd)


@dataclass
class _Wait:
    """An adapter waits for its turn."""

    requests: set[Request]
    """Those that waited at first. Once all have ended, as at a client that comes back, others may
    have asked for the turn after an adapter that had it was given more requests."""
    num_left: int
    """Requests of other adapters that may begin before its turn."""


class TurnWatch:
    """Checks that an adapter gets its turn, however many requests others have.

    While it waits, each adapter that has a turn, or has waited for longer, may begin at most as
    many requests as fit in a step.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._begun: set[int] = set()
        self._waits: dict[int, _Wait] = {}

    def scheduled(self, turns: AdapterTurns, step: SchedulerOutput) -> None:
        """Follow a step.

        Raises:
            Violation: an adapter is passed over.
        """
        waits = {}
        for place, queued in enumerate(turns._queue, len(turns._with_turn)):
            adapter_id = queued.waiting[0][2].adapter_id
            requests = {row[2] for row in queued.waiting if not row[2].is_finished}
            wait = self._waits.get(adapter_id)
            if wait is None or not wait.requests & requests:
                wait = _Wait(requests, place * self._max_num_seqs)
            waits[adapter_id] = wait
        self._waits = waits
        for new in step.scheduled_new_reqs:
            is_resumed = len(new.token_ids) > 4 * new.num_prompt_tokens
            if new.adapter_id and new.req_id not in self._begun and not is_resumed:
                self._pass_over(new.adapter_id)
            self._begun.add(new.req_id)

    def _pass_over(self, begun_id: int) -> None:
        for adapter_id, wait in self._waits.items():
            wait.num_left -= adapter_id != begun_id
            if wait.num_left < 0:
                raise Violation("unfair: an adapter waits for its turn for too long")
