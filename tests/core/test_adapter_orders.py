"""Adapters under requests, aborts, loads, lost workers and late answers in any order."""

import random

import pytest

from protocol.adapters import Adapter
from protocol.api_core import ErrorCode, Refused, StepOutputs
from protocol.core_worker import AdapterLoaded, UnloadAdapter
from tests.core.adapter_engine import adapted, control, make_engine
from tests.core.engine_bench import CLIENT, FACTS, add, answer

ADAPTERS = [Adapter(str(number), f"/{number}", bytes([number + 1]) * 32) for number in range(6)]
NUM_EVENTS = 400
MAX_STEPS = 5000


class Disorder:
    """An engine, what its workers hold, and the requests that are open."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._max_loras = self._rng.randint(1, 3)
        self._num_kept = self._max_loras + self._rng.randint(0, 2)
        slots = self._rng.choice([2, 8])
        self.engine = make_engine(self._max_loras, self._num_kept, max_num_seqs=slots)
        self.open_ids: set[int] = set()
        self.num_refused = 0
        self._held: set[int] = set()
        self._unanswered: list[int] = []
        self._running: dict[int, int] = {}
        """The adapters of the requests that the workers mirror."""

    def happen(self, number: int) -> None:
        """Let something happen, or nothing."""
        rng, event = self._rng, self._rng.random()
        if event < 0.3:
            adapter = rng.choice([None, *ADAPTERS])
            length = rng.randint(1, 6)
            base = add(number, max_tokens=length)
            request = base if adapter is None else adapted(number, adapter, max_tokens=length)
            refused = self.engine.add(CLIENT, request)
            if refused is None:
                self.open_ids.add(number)
            else:
                assert refused.error.code is ErrorCode.QUARANTINED
        elif event < 0.35 and self.open_ids:
            aborted = rng.choice(sorted(self.open_ids))
            self.engine.abort(CLIENT, [aborted])
            self.open_ids.remove(aborted)
        elif event < 0.4:
            action = rng.choice(["load_adapter", "unload_adapter"])
            self.engine.control(CLIENT, control(number, rng.choice(ADAPTERS), action))
        elif event < 0.44:
            self.lose_workers()
        elif event < 0.6:
            self.answer_one()
        self.prepare()
        if rng.random() < 0.5:
            self.compute()

    def lose_workers(self) -> None:
        """Let the workers die; the cause is known before or after their successors come."""
        loading, self._unanswered = self._unanswered, []
        self.engine.lose_workers()
        is_late, is_fault = self._rng.random() < 0.5, self._rng.random() < 0.3
        if is_late:
            self.engine.adopt_workers(FACTS)
        self.engine.attribute_death(is_fault=is_fault, in_step=False)
        if not is_late:
            self.engine.adopt_workers(FACTS)
        self._held.clear()
        self._running.clear()
        mail = [message for _, message in self.engine.take_outgoing()]
        refused = {message.request_id for message in mail if isinstance(message, Refused)}
        assert not refused or len(loading) == 1, "what is refused was loaded alone"
        self.num_refused += len(refused)
        self.open_ids -= refused

    def answer_one(self) -> bool:
        """Answer the oldest load; returns whether there was one."""
        if not self._unanswered:
            return False
        self.engine.answered(AdapterLoaded(self._unanswered.pop(0)))
        return True

    def prepare(self) -> None:
        """Carry out what the workers are sent about adapters."""
        for message in self.engine.take_adapters():
            if isinstance(message, UnloadAdapter):
                self._held.remove(message.adapter_id)
                continue
            self._unanswered.append(message.adapter.adapter_id)
            if message.keeps:
                self._held.add(message.adapter.adapter_id)
        assert len(self._held) <= self._num_kept

    def compute(self) -> None:
        """Compute a step, if there is one, with adapters that are loaded and not too many."""
        step = self.engine.schedule()
        if step is None:
            return
        for req_id in (*step.finished_req_ids, *step.preempted_req_ids):
            self._running.pop(req_id)
        self._running |= {new.req_id: new.adapter_id for new in step.scheduled_new_reqs}
        used = set(self._running.values()) - {0}
        assert len(used) <= self._max_loras
        assert used <= self._held - set(self._unanswered)
        outputs = self.engine.update(answer(self.engine, step)).get(CLIENT, StepOutputs([]))
        ended = {row.request_id for row in outputs.outputs if row.finish_reason is not None}
        self.open_ids -= ended


@pytest.mark.parametrize("seed", range(20))
def test_all_requests_end_and_no_step_exceeds_the_bounds(seed: int) -> None:
    disorder = Disorder(seed)
    for number in range(NUM_EVENTS):
        disorder.happen(number)
    for _ in range(MAX_STEPS):
        if not disorder.engine.has_unfinished:
            break
        disorder.prepare()
        while disorder.answer_one():
            disorder.prepare()
        disorder.compute()
    assert not disorder.engine.has_unfinished
    assert not disorder.open_ids
