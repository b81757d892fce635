"""What the scheduler costs: per step, admission, waiting request and departure.

The real scheduler, KV manager and prefix cache run without sockets and without a worker: every step
is answered at once, outside the clock, with a token for each request that sampled.
"""

import contextlib
import gc
import os
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from core_proc.engine import EngineCore
from core_proc.options import SchedulerOptions
from core_proc.recovery.quarantine import Quarantine
from core_proc.request import Request
from core_proc.scheduler import Scheduler
from protocol.api_core import AddRequest, PauseMode, decode_from_client
from protocol.config.settings import configure
from protocol.core_worker import ModelRunnerOutput
from protocol.message import encode
from protocol.model_facts import KVGroup, ModelFacts
from protocol.process import gc_tuning
from protocol.process.progress_page import ProgressPage
from protocol.sampling import SamplingParams
from scripts.bench.scheduler_figures import (
    BLOCK_SIZE,
    Admission,
    Departure,
    FrontCost,
    MarksCost,
    Plan,
    SteadyDecode,
    WaitingCost,
    WaitingMemory,
)

PROMPT_TOKENS = 512
ADMITTED_TOKENS = 1000
VOCAB_SIZE = 32_000
VLLM_STEADY_US = {16: 212.0, 64: 732.0, 256: 2807.0, 1024: 13125.0}
"""vLLM 0.32 on a machine of the same size: schedule and update, by running requests."""
VLLM_ADMISSION_US = {"caching_off": 95.0, "miss": 271.0, "full_hit": 255.0}

_BYTES_PER_TOKEN = 4
_WARM_UP_BUDGET = 65_536
"""The budget does not matter for steady decode; a large one shortens the way there."""
_WINDOWED = (KVGroup(), KVGroup(window=1024, max_blocks=1024))
_FRONT_RUNNING = 32
_FRONT_TOKENS = 120_000


@contextlib.contextmanager
def production_gc() -> Iterator[None]:
    """Treat the garbage collector as the core does before its first request; then it stays on."""
    thresholds = gc.get_threshold()
    gc_tuning.freeze()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def _prompt(req_id: int, num_tokens: int) -> list[int]:
    """Return ids that no other request begins with."""
    return [(req_id * 7919 + i * 31) % VOCAB_SIZE for i in range(num_tokens - 2)] + [
        req_id % VOCAB_SIZE,
        req_id // VOCAB_SIZE,
    ]


class _Decoder:
    """Requests that all decode, with the clock around each half of a step."""

    def __init__(
        self, num_running: int, num_steps: int, steps_in_flight: int, **options: Any
    ) -> None:
        """Admit all and step until all prompts are computed."""
        self._num_running = num_running
        num_admitting = num_running * 2 * PROMPT_TOKENS // _WARM_UP_BUDGET
        max_tokens = num_steps + num_admitting + 4 * BLOCK_SIZE
        longest = PROMPT_TOKENS + BLOCK_SIZE + max_tokens
        settings = {
            "num_blocks": 1 + num_running * -(-longest // BLOCK_SIZE),
            "max_model_len": longest + 1,
            "max_num_seqs": num_running,
        }
        self.scheduler = Scheduler(
            SchedulerOptions(
                block_size=BLOCK_SIZE,
                max_num_batched_tokens=_WARM_UP_BUDGET,
                max_steps_in_flight=steps_in_flight,
                **settings | options,
            )
        )
        params = SamplingParams(max_tokens=max_tokens)
        for req_id in range(num_running):
            # In every step the same number of requests reach the end of a block.
            num_tokens = PROMPT_TOKENS - BLOCK_SIZE // 2 + req_id % BLOCK_SIZE
            prompt, priority = _prompt(req_id, num_tokens), 2 * (req_id % 2)
            self.scheduler.add_request(Request(req_id, prompt, params, priority=priority))
        self._answer_all = [7] * num_running
        self._warm_up(steps_in_flight)

    def _warm_up(self, steps_in_flight: int) -> None:
        in_flight, num_sampling = self.scheduler.in_flight, 0
        while num_sampling < self._num_running:
            self.scheduler.schedule()
            if len(in_flight) == steps_in_flight:
                step_id, sampling = in_flight[0]
                num_sampling = len(sampling)
                tokens = self._answer_all[:num_sampling]
                self.scheduler.update_from_output(ModelRunnerOutput(step_id, tokens))
        self.measure(2 * BLOCK_SIZE)

    def measure(self, num_steps: int) -> tuple[float, float]:
        """Return the mean microseconds of `schedule` and of `update_from_output`."""
        clock, scheduler, tokens = time.perf_counter_ns, self.scheduler, self._answer_all
        schedule_ns = update_ns = 0
        for _ in range(num_steps):
            start = clock()
            step = scheduler.schedule()
            end = clock()
            schedule_ns += end - start
            assert step is not None
            assert step.total_num_scheduled_tokens == self._num_running
            output = ModelRunnerOutput(scheduler.in_flight[0][0], tokens)
            start = clock()
            scheduler.update_from_output(output)
            update_ns += clock() - start
        return schedule_ns / num_steps / 1000, update_ns / num_steps / 1000


def measure_steady_decode(num_running: int, plan: Plan) -> SteadyDecode:
    """Return the medians over the repeats of the mean step."""
    with production_gc():
        decoder = _Decoder(num_running, plan.repeats * plan.steps, plan.steps_in_flight)
        runs = [decoder.measure(plan.steps) for _ in range(plan.repeats)]
    schedule_us, update_us = (statistics.median(column) for column in zip(*runs, strict=True))
    total_us = statistics.median(map(sum, runs))
    vllm_us = VLLM_STEADY_US.get(num_running)
    return SteadyDecode(num_running, schedule_us, update_us, total_us, vllm_us)


def measure_admissions(plan: Plan) -> list[Admission]:
    """Return the medians over the repeats of the mean admission; cases take turns.

    A miss takes blocks that still hold other prompts, as in a server that has run for a while.
    """
    runs: dict[str, list[tuple[float, ...]]] = {case: [] for case in VLLM_ADMISSION_US}
    schedulers = {
        case: Scheduler(SchedulerOptions(enable_prefix_caching=case != "caching_off"))
        for case in runs
    }
    first = 0
    with production_gc():
        for _ in range(plan.repeats + 1):
            for case, scheduler in schedulers.items():
                runs[case].append(_admit(scheduler, range(first, first + plan.admissions), case))
            first += plan.admissions
    return [_admission(case, rows[1:]) for case, rows in runs.items()]


def _admission(case: str, runs: Sequence[tuple[float, ...]]) -> Admission:
    create_us, add_us, schedule_us, update_us = map(statistics.median, zip(*runs, strict=True))
    total_us, vllm_us = statistics.median(sum(run[1:]) for run in runs), VLLM_ADMISSION_US[case]
    return Admission(case, create_us, add_us, schedule_us, update_us, total_us, vllm_us)


def _admit(scheduler: Scheduler, req_ids: Sequence[int], case: str) -> tuple[float, ...]:
    """Return the mean microseconds of creation, `add_request`, `schedule` and update."""
    clock, params = time.perf_counter_ns, SamplingParams(max_tokens=1)
    sums = [0, 0, 0, 0]
    for req_id in req_ids:
        prompt = _prompt(0 if case == "full_hit" else req_id, ADMITTED_TOKENS)
        times = [clock()]
        request = Request(req_id, prompt, params)
        times.append(clock())
        scheduler.add_request(request)
        times.append(clock())
        step = scheduler.schedule()
        times.append(clock())
        assert step is not None
        scheduler.update_from_output(ModelRunnerOutput(step.step_id, [7]))
        times.append(clock())
        assert request.is_finished
        for part in range(4):
            sums[part] += times[part + 1] - times[part]
    return tuple(total / len(req_ids) / 1000 for total in sums)


def measure_marks(num_running: int, plan: Plan) -> MarksCost:
    """Return the median of the marks in steps that each admit one request and end another."""
    page, fd = ProgressPage.create("bench")
    os.close(fd)
    scheduler, clock = _Decoder(num_running, plan.admissions, 1).scheduler, time.perf_counter_ns
    quarantine = Quarantine(scheduler, VOCAB_SIZE**3)
    params = SamplingParams(max_tokens=plan.admissions + 1)
    times = []
    with production_gc():
        for number in range(plan.admissions):
            scheduler.abort_request(scheduler.running[number % num_running].req_id)
            req_id = num_running + number
            scheduler.add_request(Request(req_id, _prompt(req_id, PROMPT_TOKENS), params))
            step = scheduler.schedule()
            assert step is not None
            start = clock()
            quarantine.dispatched(step)
            edits = quarantine.take_marks()
            assert edits is not None
            page.write_marks(1, edits)
            times.append(clock() - start)
            step_id, sampling = scheduler.in_flight[0]
            scheduler.update_from_output(ModelRunnerOutput(step_id, [7] * len(sampling)))
    page.close()
    return MarksCost(num_running, statistics.median(times) / 1000)


def measure_waiting_cost(plan: Plan) -> WaitingCost:
    """Compare the same running requests with and without others behind them, in turn."""
    num_running = plan.waiting_behind
    req_ids = range(num_running, num_running + plan.waiting)
    prompt, params = _prompt(num_running, PROMPT_TOKENS), SamplingParams(max_tokens=8)
    without_us, with_us = [], []
    with production_gc():
        num_steps = plan.repeats * (2 * plan.steps + BLOCK_SIZE)
        decoder = _Decoder(num_running, num_steps, plan.steps_in_flight)
        scheduler = decoder.scheduler
        for _ in range(plan.repeats):
            without_us.append(sum(decoder.measure(plan.steps)))
            for req_id in req_ids:
                scheduler.add_request(Request(req_id, prompt, params))
            decoder.measure(BLOCK_SIZE)
            with_us.append(sum(decoder.measure(plan.steps)))
            assert scheduler.num_waiting == plan.waiting
            for req_id in req_ids:
                scheduler.abort_request(req_id)
    extra_us = statistics.median(b - a for a, b in zip(without_us, with_us, strict=True))
    medians = statistics.median(without_us), statistics.median(with_us)
    return WaitingCost(num_running, plan.waiting, *medians, extra_us)


def measure_front_cost(plan: Plan) -> list[FrontCost]:
    """Compare steps with and without requests in front that cannot be admitted, case by case.

    The prompt in front is longer than the free blocks. With priorities, half of the requests that
    run are less important, and to preempt all of them would not be enough. Under a pause, new
    requests wait.
    """
    prompt_blocks = _FRONT_TOKENS // BLOCK_SIZE
    refused = {
        "num_blocks": prompt_blocks + 400,
        "max_num_seqs": _FRONT_RUNNING + 1,
        "max_model_len": _FRONT_TOKENS + 1000,
    }
    windowed = {"kv_groups": _WINDOWED, "num_blocks": prompt_blocks + 1200}
    by_priority = {"policy": "priority", "preempt_for_priority": True}
    return [
        _front_cost("refused", plan, refused),
        _front_cost("refused_windowed", plan, refused | windowed),
        _front_cost("refused_by_priority", plan, refused | by_priority),
        _front_cost("paused", plan, {"max_num_seqs": _FRONT_RUNNING + 1}, is_paused=True),
    ]


def _front_cost(
    case: str, plan: Plan, options: Mapping[str, Any], *, is_paused: bool = False
) -> FrontCost:
    num_waiting = plan.waiting if is_paused else 1
    prompt = _prompt(_FRONT_RUNNING, PROMPT_TOKENS if is_paused else _FRONT_TOKENS)
    params = SamplingParams(max_tokens=8)
    without_us, with_us = [], []
    with production_gc():
        for _ in range(plan.repeats):
            num_steps = 2 * plan.steps + BLOCK_SIZE
            decoder = _Decoder(_FRONT_RUNNING, num_steps, plan.steps_in_flight, **options)
            without_us.append(sum(decoder.measure(plan.steps)))
            if is_paused:
                decoder.scheduler.pause(PauseMode.PAUSED_NEW)
            for req_id in range(_FRONT_RUNNING, _FRONT_RUNNING + num_waiting):
                decoder.scheduler.add_request(Request(req_id, prompt, params, priority=1))
            decoder.measure(BLOCK_SIZE)
            with_us.append(sum(decoder.measure(plan.steps)))
            assert decoder.scheduler.num_waiting == num_waiting
    extra_us = statistics.median(b - a for a, b in zip(without_us, with_us, strict=True))
    return FrontCost(case, statistics.median(without_us), statistics.median(with_us), extra_us)


def measure_departure(plan: Plan) -> Departure:
    """Time `drop_client` in an engine in which all of the client's requests run."""
    prompt, params, totals = list(range(BLOCK_SIZE)), SamplingParams(max_tokens=64), []
    engine = _engine(plan.leaving, num_gpu_blocks=1 + 2 * plan.leaving)
    for repeat in range(plan.repeats):
        for index in range(plan.leaving):
            refused = engine.add(b"client", AddRequest(index, prompt, params))
            assert refused is None, refused
        step = engine.schedule()
        assert step is not None
        assert len(step.scheduled_new_reqs) == plan.leaving
        with production_gc():
            start = time.perf_counter()
            assert engine.drop_client(b"client") == plan.leaving
            totals.append((time.perf_counter() - start) * 1000)
        engine.update(ModelRunnerOutput(step.step_id, [7] * plan.leaving))
        assert not engine.has_unfinished, repeat
    total_ms = statistics.median(totals)
    return Departure(plan.leaving, total_ms, total_ms * 1000 / plan.leaving)


def measure_waiting_memory(plan: Plan) -> WaitingMemory:
    """Trace what is allocated, and still held, while requests queue up."""
    scheduler = Scheduler(SchedulerOptions())
    params = SamplingParams()
    prompt = list(range(PROMPT_TOKENS))

    def add_bare(req_id: int) -> None:
        scheduler.add_request(Request(req_id, prompt, params))

    engine = _engine(plan.waiting)
    bodies = [encode(AddRequest(i, prompt, SamplingParams(seed=i))) for i in range(plan.waiting)]

    def add_from_wire(index: int) -> None:
        message = decode_from_client(bodies[index])
        assert isinstance(message, AddRequest)
        refused = engine.add(b"client", message)
        assert refused is None, refused

    bare_bytes = _held_bytes(add_bare, plan.waiting)
    return WaitingMemory(plan.waiting, bare_bytes, _held_bytes(add_from_wire, plan.waiting))


def _engine(num_requests: int, num_gpu_blocks: int = 1024) -> EngineCore:
    engine = EngineCore(
        configure(
            max_num_waiting=num_requests,
            max_waiting_tokens=2**31,
            max_num_seqs=num_requests,
            max_num_batched_tokens=2**20,
        )
    )
    facts = ModelFacts(
        model="bench",
        vocab_size=VOCAB_SIZE,
        max_model_len=4096,
        block_size=BLOCK_SIZE,
        num_gpu_blocks=num_gpu_blocks,
        eos_token_ids=[],
    )
    engine.adopt_workers(facts)
    return engine


def _held_bytes(add: Callable[[int], None], count: int) -> float:
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for index in range(count):
        add(index)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / count - _BYTES_PER_TOKEN * PROMPT_TOKENS
