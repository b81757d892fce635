"""A request that kills workers is found and refused; all others get every token exactly."""

from collections import deque
from collections.abc import Callable
from itertools import product

import msgspec
import pytest

from core_proc.engine import CANARY_ID, EngineCore
from core_proc.recovery.fingerprints import fingerprint
from core_proc.recovery.rejections import MAX_REFUSED, REFUSED_FOR_S
from protocol.api_core import AddRequest, ErrorCode, PauseMode, Refused
from protocol.config.settings import configure
from protocol.core_worker import ModelRunnerOutput, SchedulerOutput
from protocol.model_facts import ModelFacts
from protocol.process.progress_page import MarkEdits
from protocol.sampling import SamplingParams
from tests.combinations import in_turn
from tests.core.fake_worker import FakeWorker

CLIENT = b"client"
FACTS = ModelFacts("fake", 100_000, 128, 16, 200, [2])
"""There is room for all requests; each step checks every block."""
NUM_TOKENS = 12
POISON = 9_999
"""The first token of prompts that kill."""


def sample(req_id: int, position: int) -> int:
    return 100 + (31 * req_id + 7 * position) % 1000


class Patient:
    """An engine whose workers die in steps for which `kills` is true.

    It gets the (request id, length) of each request of the step. At the first death the results of
    the last `num_late` steps are still on their way, and are lost with the worker.
    """

    def __init__(
        self,
        kills: Callable[[list[tuple[int, int]]], bool],
        depth: int = 2,
        num_late: int = 0,
        facts: ModelFacts = FACTS,
        **settings: object,
    ) -> None:
        self.outputs: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self.refused: dict[int, ErrorCode] = {}
        self.num_deaths = 0
        self.kills_core = False
        """Whether the core dies too, with all its state."""
        self._facts = facts
        self._settings = settings | {"max_steps_in_flight": depth}
        self._kills = kills
        self._marks: list[int] = []
        self._page: dict[int, int] = {}
        self._open: dict[int, AddRequest] = {}
        self._pipe: deque[SchedulerOutput] = deque()
        self._num_late = num_late
        self._results: deque[ModelRunnerOutput] = deque()
        self.begin_core()

    def begin_core(self) -> None:
        self.engine = EngineCore(
            configure(model="null", max_num_seqs=64, check_invariants=True, **self._settings)
        )
        self.engine.inherit_marks(self._marks)
        self.begin_worker()
        for request_id, add in self._open.items():
            if request_id in self.ended or request_id in self.refused:
                continue
            outputs = self.outputs.get(request_id, [])
            resent = msgspec.structs.replace(add, output_token_ids=outputs, resent=True)
            refused = self.engine.add(CLIENT, resent)
            if refused is not None:
                self.refused[request_id] = refused.error.code

    def begin_worker(self) -> None:
        self._pipe.clear()
        self._results.clear()
        self._worker = FakeWorker(self._facts.block_size, self._facts.num_gpu_blocks, self._sample)
        self.engine.adopt_workers(self._facts)

    def _client_id(self, req_id: int) -> int:
        """Map the core's ids, which restart with each core, to requests by their prompts."""
        token_ids = self._worker.mirror[req_id].token_ids
        return token_ids[1] if token_ids[0] in (1, POISON) else CANARY_ID

    def _sample(self, req_id: int, position: int) -> int:
        return sample(self._client_id(req_id), position)

    def add(self, request_id: int, *, poison: bool = False, length: int = 20) -> Refused | None:
        prompt = [POISON if poison else 1, *range(request_id, request_id + length)]
        params = SamplingParams(max_tokens=NUM_TOKENS, seed=request_id)
        add = AddRequest(request_id, prompt, params)
        refused = self.engine.add(CLIENT, add)
        if refused is None:
            self._open[request_id] = add
        return refused

    def die(self, *, is_blamed: bool = True) -> None:
        self.num_deaths += 1
        self._num_late = 0
        if self.kills_core:
            if not is_blamed:
                self._marks = []
            self.begin_core()
            return
        self.engine.lose_workers()
        if is_blamed:
            self.engine.attribute_death()
        self.begin_worker()

    def _keep_marks(self) -> None:
        """Write the marks as a progress page does."""
        edits = self.engine.take_marks()
        if edits is not None:
            for place, number in edits.marks.items():
                self._page[place] = number
            self._marks = [self._page[place] for place in range(edits.total)]

    def turn(self) -> None:
        while (step := self.engine.schedule()) is not None:
            self._keep_marks()
            self._pipe.append(step)
        if self._pipe:
            self._execute(self._pipe.popleft())
        if len(self._results) > self._num_late or (self._results and not self._pipe):
            self._deliver(self._results.popleft())
        for _, message in self.engine.take_outgoing():
            if isinstance(message, Refused) and message.request_id is not None:
                self.refused[message.request_id] = message.error.code

    def _execute(self, step: SchedulerOutput) -> None:
        before = {i: r.num_computed_tokens for i, r in self._worker.mirror.items()}
        output = self._worker.execute(step)
        computing = [
            (self._client_id(i), r.num_computed_tokens)
            for i, r in self._worker.mirror.items()
            if r.num_computed_tokens != before.get(i)
        ]
        if self._kills(computing):
            self.die()
            return
        self._results.append(output)

    def _deliver(self, output: ModelRunnerOutput) -> None:
        for client, outputs in self.engine.update(output).items():
            assert client == CLIENT
            for row in outputs.outputs:
                tokens = self.outputs.setdefault(row.request_id, [])
                assert row.first_index == len(tokens)
                tokens += row.token_ids
                if row.finish_reason is not None:
                    self.ended.add(row.request_id)

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not (self.engine.has_unfinished or self._pipe or self._results):
                return
            self.turn()
        raise AssertionError(f"not done after {limit} turns and {self.num_deaths} deaths")

    def check_innocents(self, num: int, guilty: set[int]) -> None:
        """Engine ids and client ids both begin at 1."""
        assert set(self.refused) == guilty
        assert set(self.refused.values()) <= {ErrorCode.QUARANTINED}
        assert self.ended == set(range(1, num + 1)) - guilty
        for request_id in self.ended:
            expected = [sample(request_id, position) for position in range(NUM_TOKENS)]
            assert self.outputs[request_id] == expected


def poisoned(*culprits: int, at: int = 1) -> Callable[[list[tuple[int, int]]], bool]:
    """Return a predicate for steps that compute one of these requests past a number of tokens."""
    return lambda computing: any(i in culprits and length >= at for i, length in computing)


@pytest.mark.parametrize(
    ("culprit_and_at", "depth"), in_turn(product([1, 7, 32], [1, 22, 27, 30]), [1, 2, 4])
)
def test_one_of_32_is_found_within_seven_deaths(
    culprit_and_at: tuple[int, int], depth: int
) -> None:
    culprit, at = culprit_and_at
    patient = Patient(poisoned(culprit, at=at), depth)
    for request_id in range(1, 33):
        patient.add(request_id)
    patient.run()
    patient.check_innocents(32, {culprit})
    assert patient.num_deaths <= 7


@pytest.mark.parametrize(("depth", "num_late"), [(2, 1), (4, 3)])
@pytest.mark.parametrize("at", [22, 24, 27])
def test_a_culprit_whose_last_tokens_were_lost_is_found(at: int, depth: int, num_late: int) -> None:
    """It computes those tokens again before it kills: it is not cleared by the first of them."""
    patient = Patient(poisoned(7, at=at), depth, num_late)
    for request_id in range(1, 33):
        patient.add(request_id)
    patient.run()
    patient.check_innocents(32, {7})
    assert patient.num_deaths <= 7


@pytest.mark.parametrize("at", [1, 27])
@pytest.mark.parametrize("culprit", [1, 7, 32])
def test_a_core_that_dies_too_leaves_its_suspects_to_the_next(culprit: int, at: int) -> None:
    patient = Patient(poisoned(culprit, at=at))
    patient.kills_core = True
    for request_id in range(1, 33):
        patient.add(request_id)
    patient.run()
    patient.check_innocents(32, {culprit})
    assert patient.num_deaths <= 7


def test_one_that_runs_alone_has_two_tries() -> None:
    patient = Patient(poisoned(1))
    patient.add(1)
    patient.run()
    patient.check_innocents(1, {1})
    assert patient.num_deaths == 2


def test_three_at_once_are_found_one_after_the_other() -> None:
    patient = Patient(poisoned(3, 17, 30, at=25))
    for request_id in range(1, 33):
        patient.add(request_id)
    patient.run()
    patient.check_innocents(32, {3, 17, 30})
    assert patient.num_deaths <= 21


def test_the_same_request_is_refused_for_ten_minutes() -> None:
    patient = Patient(poisoned(1))
    patient.add(1)
    patient.run()
    refused = patient.add(1)
    assert refused is not None
    assert refused.error.code is ErrorCode.QUARANTINED
    assert patient.add(2) is None
    patient.run()
    patient.engine.now += REFUSED_FOR_S
    assert patient.add(1) is None


def test_a_request_that_arrives_during_a_search_is_served_too() -> None:
    patient = Patient(poisoned(5))
    for request_id in range(1, 9):
        patient.add(request_id)
    num_added = 8
    while patient.engine.has_unfinished and num_added < 40:
        patient.turn()
        num_added += 1
        patient.add(num_added)
    patient.run()
    patient.check_innocents(num_added, {5})
    assert patient.num_deaths <= 8


def test_a_death_from_outside_is_attributed_to_no_request() -> None:
    patient = Patient(lambda computing: False)
    for request_id in range(1, 9):
        patient.add(request_id)
    for _ in range(10):
        patient.turn()
        patient.die(is_blamed=False)
    patient.run()
    patient.check_innocents(8, set())


def test_a_death_from_outside_does_not_disturb_a_search() -> None:
    patient = Patient(poisoned(6))
    for request_id in range(1, 17):
        patient.add(request_id)
    for turn in range(400):
        patient.turn()
        if turn % 5 == 4 and turn < 100:
            patient.die(is_blamed=False)
            patient.num_deaths -= 1
    patient.run()
    patient.check_innocents(16, {6})
    assert patient.num_deaths <= 7


@pytest.mark.parametrize("in_step", [1, 2, 3, 5])
def test_a_fault_of_the_workers_is_attributed_to_no_request(in_step: int) -> None:
    """They die in their first step or later, whatever they compute then."""
    is_broken, num_steps = [True], [0, 0]

    def kills(computing: list[tuple[int, int]]) -> bool:
        if num_steps[0] != patient.num_deaths:
            num_steps[:] = patient.num_deaths, 0
        num_steps[1] += bool(computing)
        return is_broken[0] and num_steps[1] == in_step

    patient = Patient(kills)
    for request_id in range(1, 9):
        patient.add(request_id)
    for _ in range(300):
        patient.turn()
    is_broken[0] = False
    patient.run()
    patient.check_innocents(8, set())


def test_a_search_begins_again_after_a_fault_of_the_workers() -> None:
    """A chance death while the canary runs must not protect the poison request for ever."""
    num_canary_deaths = [0]

    def kills(computing: list[tuple[int, int]]) -> bool:
        if any(i == CANARY_ID for i, _ in computing) and not num_canary_deaths[0]:
            num_canary_deaths[0] = 1
            return True
        return any(i == 3 for i, _ in computing)

    patient = Patient(kills)
    for request_id in range(1, 9):
        patient.add(request_id)
    for _ in range(100):
        patient.turn()
    assert num_canary_deaths == [1]
    patient.engine.now += 60
    patient.run()
    patient.check_innocents(8, {3})


def test_a_pause_of_new_requests_does_not_hold_those_that_run() -> None:
    patient = Patient(poisoned(1, at=25))
    for request_id in range(1, 3):
        patient.add(request_id)
    while patient.num_deaths < 2:
        patient.turn()
    patient.engine.scheduler.pause(PauseMode.PAUSED_NEW)
    patient.run()
    patient.check_innocents(2, {1})


def test_late_tokens_may_end_a_held_request() -> None:
    """It is held while its last token is in flight, and released before the token arrives."""
    for num_turns in range(40):
        patient = Patient(poisoned(1, at=27))
        for request_id in range(1, 5):
            patient.add(request_id)
        while patient.num_deaths < 2:
            patient.turn()
        for _ in range(num_turns):
            patient.turn()
        patient.engine.abort(CLIENT, [1])
        patient.run()
        assert patient.ended | set(patient.refused) | {1} == {1, 2, 3, 4}


def test_the_same_request_many_times_is_rejected_at_once() -> None:
    patient = Patient(lambda computing: any(i == 50 for i, _ in computing))
    for request_id in range(1, 9):
        add = AddRequest(request_id, [1, 50, 51], SamplingParams(max_tokens=NUM_TOKENS, seed=1))
        assert patient.engine.add(CLIENT, add) is None
    patient.run()
    assert set(patient.refused) == set(range(1, 9))
    assert patient.num_deaths <= 6


def test_marks_end_with_the_steps_that_they_are_about() -> None:
    patient = Patient(lambda computing: False)
    patient.add(1)
    patient.run()
    assert patient.engine.take_marks() == MarkEdits(0, {})
    assert patient.engine.take_marks() is None


def test_a_suspect_that_is_aborted_ends_its_trial() -> None:
    patient = Patient(poisoned(2))
    for request_id in range(1, 5):
        patient.add(request_id)
    while patient.num_deaths < 3:
        patient.turn()
    patient.engine.abort(CLIENT, [2])
    patient.run()
    assert patient.ended == {1, 3, 4}


def test_all_suspects_wait_or_run_and_none_is_forgotten() -> None:
    """All requests end in any order of deaths: here every third step kills, for a while."""
    num_steps = [0]

    def kills(computing: list[tuple[int, int]]) -> bool:
        num_steps[0] += 1
        return num_steps[0] % 3 == 0 and num_steps[0] < 60

    patient = Patient(kills)
    for request_id in range(1, 13):
        patient.add(request_id)
    patient.run()
    assert patient.ended | set(patient.refused) == set(range(1, 13))


def test_no_client_receives_the_canarys_outputs() -> None:
    seen: list[int] = []

    def kills(computing: list[tuple[int, int]]) -> bool:
        seen.extend(i for i, _ in computing)
        return any(i == 1 for i, _ in computing)

    patient = Patient(kills)
    patient.add(1)
    patient.run()
    assert CANARY_ID in seen
    assert patient.outputs == {}


def test_the_canary_fits_in_a_cache_that_is_shorter_than_the_models_context() -> None:
    small = msgspec.structs.replace(FACTS, num_gpu_blocks=3)
    patient = Patient(poisoned(1), depth=8, facts=small)
    patient.add(1)
    patient.add(2)
    patient.run()
    patient.check_innocents(2, {1})


def test_a_fingerprint_is_of_the_prompt_and_the_parameters_but_not_of_the_seed() -> None:
    params = SamplingParams(max_tokens=5, seed=1)
    same = fingerprint(b"12", SamplingParams(max_tokens=5, seed=2))
    assert fingerprint(b"12", params) == same
    assert fingerprint(b"13", params) != same
    assert fingerprint(b"12", SamplingParams(max_tokens=6, seed=1)) != same


def test_what_is_refused_is_bounded() -> None:
    patient = Patient(lambda computing: False)
    quarantine = patient.engine.quarantine
    for request_id in range(1, MAX_REFUSED + 11):
        patient.add(request_id)
        request = patient.engine.scheduler.requests[request_id]
        quarantine.reject(request, 0.0)
        patient.engine.abort(CLIENT, [request_id])
    assert len(quarantine.rejections) == MAX_REFUSED
