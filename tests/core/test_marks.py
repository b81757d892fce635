"""Marks of the requests in flight: whatever changes, the edits add up to what is in flight."""

import random

from core_proc.recovery.marks import Marks
from core_proc.recovery.quarantine import Quarantine
from core_proc.request import Request
from protocol.core_worker import ModelRunnerOutput
from protocol.process.progress_page import MarkEdits
from protocol.sampling import SamplingParams
from tests.core.harness import Harness


class Page:
    """Keeps words like a progress page: those past the total stay."""

    def __init__(self) -> None:
        self._words: dict[int, int] = {}
        self._total = 0

    def apply(self, edits: MarkEdits | None) -> int:
        """Write the edits, and return the number of words written."""
        if edits is None:
            return 0
        self._words.update(edits.marks)
        self._total = edits.total
        return len(edits.marks)

    @property
    def numbers(self) -> list[int]:
        return [self._words[place] for place in range(self._total)]


def test_edits_add_up_to_the_marks_and_are_as_few_as_the_changes() -> None:
    rng, marks, page = random.Random(5), Marks(), Page()
    expected: dict[int, int] = {}
    for req_id in range(3000):
        num_changes = rng.randrange(4)
        for number in range(num_changes):
            if expected and rng.random() < 0.45:
                gone = rng.choice(list(expected))
                del expected[gone]
                marks.discard(gone)
            else:
                expected[4 * req_id + number] = rng.getrandbits(64)
                marks.add(4 * req_id + number, expected[4 * req_id + number])
        if rng.random() < 0.01:
            marks.replace(3, expected.items())
            num_changes = len(expected) + 1
        is_computing = rng.random() < 0.9
        num_written = page.apply(marks.take_edits(is_computing=is_computing))
        if is_computing:
            assert sorted(page.numbers[1:]) == sorted(expected.values())
            assert req_id == 0 or num_written <= 4 * 30 + num_changes
        else:
            assert page.numbers == []


def test_marks_are_those_of_the_requests_that_the_worker_computes() -> None:
    bench, page, rng = Harness(seqs=4, blocks=14, depth=1), Page(), random.Random(3)
    scheduler = bench.scheduler
    quarantine = Quarantine(scheduler, 10**6)
    for req_id in range(60):
        params = SamplingParams(max_tokens=rng.randrange(1, 60))
        scheduler.add_request(Request(req_id, [req_id + 1] * rng.randrange(1, 30), params))
    num_preempted = 0
    while scheduler.has_unfinished:
        if rng.random() < 0.02:
            scheduler.abort_request(rng.choice(list(scheduler.requests)))
        step = scheduler.schedule()
        assert step is not None
        num_preempted += len(step.preempted_req_ids)
        quarantine.dispatched(step)
        page.apply(quarantine.take_marks())
        fingerprints = [request.fingerprint for request in scheduler.running]
        assert sorted(page.numbers[1:]) == sorted(filter(None, fingerprints))
        assert page.numbers[0] == 0
        _, sampling = scheduler.in_flight[0]
        scheduler.update_from_output(ModelRunnerOutput(step.step_id, [7] * len(sampling)))
    assert num_preempted
