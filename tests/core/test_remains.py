"""A request that ends in any state leaves nothing behind in the core.

In each case many requests reach the same state, one after the other, and are aborted there. The
number of objects that can be reached from the engine must not grow with their number.
"""

import gc
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, ModuleType
from typing import NamedTuple

import msgspec
import pytest

from core_proc.engine import EngineCore
from core_proc.invariants import check_invariants
from core_proc.kv.offload import MAX_LOADS, Offload
from core_proc.options import SchedulerOptions
from core_proc.request import Request, RequestStatus
from core_proc.scheduler import Scheduler
from protocol.api_core import AddRequest
from protocol.config.settings import configure
from protocol.core_worker import (
    BlocksFound,
    BlocksLoaded,
    FindBlocks,
    GrammarCompiled,
    LoadBlocks,
    ModelRunnerOutput,
    StoreBlocks,
)
from protocol.model_facts import KVGroup, ModelFacts
from protocol.sampling import Grammar, GrammarKind, Pooling, SamplingParams, pooling_params
from tests.core.adapter_engine import A, adapted, load_all
from tests.core.adapter_engine import make_engine as make_adapter_engine
from tests.core.engine_bench import CLIENT, add, make_engine, run_step, scheduled

NUM_FIRST, NUM_LATER = 50, 150
"""Requests before the objects are counted, which fill all caches, and those in between."""
BLOCK = 16
PROMPT = [100 + i for i in range(4 * BLOCK + 1)]
WORD = Grammar(GrammarKind.REGEX, "[a-z]+")
THERE = "tcp://10.0.0.2:7300"
_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, CodeType, MappingProxyType)


class Bench(NamedTuple):
    """What may grow, and a function that brings the request of a number to its state and end."""

    root: object
    scheduler: Scheduler
    live: Callable[[int], None]


def num_reachable(root: object) -> int:
    """Count the objects that can be reached from one, except code."""
    seen: dict[int, object] = {}
    found = [root]
    while found:
        one = found.pop()
        if id(one) in seen or isinstance(one, _CODE):
            continue
        seen[id(one)] = one
        found += gc.get_referents(one)
        if isinstance(one, msgspec.Struct):  # some are unknown to the collector
            found += [getattr(one, name) for name in one.__struct_fields__]
    return len(seen)


# Engines ------------------------------------------------------------------------------------------


def ends_after(
    engine: EngineCore,
    make: Callable[[int], AddRequest],
    *steps: Callable[[EngineCore], object],
) -> Bench:
    """Return a bench whose requests are aborted after these steps; then one step is computed."""

    def live(number: int) -> None:
        assert engine.add(CLIENT, make(number)) is None
        for step in steps:
            step(engine)
        engine.abort(CLIENT, [number])
        engine.take_adapters()
        while engine.scheduler.in_flight:
            answer_oldest(engine)
        if engine.schedule() is not None:
            answer_oldest(engine)
        engine.take_outgoing()

    return Bench(engine, engine.scheduler, live)


def answer_oldest(engine: EngineCore) -> None:
    step_id, sampling = engine.scheduler.in_flight[0]
    engine.update(ModelRunnerOutput(step_id, [7] * len(sampling)))


def compile_all(engine: EngineCore) -> None:
    for message in engine.take_grammars():
        engine.answered(GrammarCompiled(message.grammar_id))


def preempt(engine: EngineCore) -> None:
    [request] = engine.scheduler.running
    engine.scheduler.preempt(request)


def lose_workers(engine: EngineCore) -> None:
    facts = engine.facts
    assert facts is not None
    engine.lose_workers()
    engine.adopt_workers(facts)


def kill_workers(engine: EngineCore) -> None:
    """The workers die of a step, and a search for the cause begins."""
    facts = engine.facts
    assert facts is not None
    engine.lose_workers()
    engine.attribute_death()
    engine.adopt_workers(facts)
    engine.schedule()


def waits() -> Bench:
    engine = make_engine(max_num_seqs=1)
    engine.add(CLIENT, add(2**40, max_tokens=500))
    run_step(engine)
    return ends_after(engine, add)


def waits_for_a_grammar() -> Bench:
    return ends_after(make_engine(), lambda number: add(number, grammar=WORD))


def waits_for_a_grammar_that_was_sent() -> Bench:
    engine = make_engine()
    bench = ends_after(
        engine, lambda number: add(number, grammar=WORD), lambda engine: engine.take_grammars()
    )

    def live(number: int) -> None:
        bench.live(number)
        for grammar_id in list(engine.grammars._sent):
            engine.answered(GrammarCompiled(grammar_id))

    return Bench(engine, engine.scheduler, live)


def runs_with_a_grammar() -> Bench:
    return ends_after(
        make_engine(), lambda number: add(number, grammar=WORD), compile_all, run_step, scheduled
    )


def waits_for_an_adapter() -> Bench:
    return ends_after(make_adapter_engine(), lambda number: adapted(number, A))


def runs_with_an_adapter() -> Bench:
    return ends_after(
        make_adapter_engine(), lambda number: adapted(number, A), load_all, run_step, scheduled
    )


def computes_its_prompt() -> Bench:
    engine = make_engine(max_num_batched_tokens=BLOCK, max_num_seqs=BLOCK)
    return ends_after(engine, lambda number: add(number, [5] * 40), run_step, scheduled)


def reports_its_progress() -> Bench:
    engine = make_engine(max_num_batched_tokens=BLOCK, max_num_seqs=BLOCK)
    params = SamplingParams(return_progress=True)
    return ends_after(
        engine, lambda number: AddRequest(number, [5] * 40, params), run_step, scheduled
    )


def decodes() -> Bench:
    return ends_after(make_engine(), add, run_step, run_step)


def has_tokens_in_flight() -> Bench:
    return ends_after(make_engine(), add, run_step, scheduled, scheduled)


def is_about_to_end() -> Bench:
    """Return requests whose last tokens are in flight, or have arrived."""
    engine = make_engine()
    return ends_after(engine, lambda number: add(number, max_tokens=1 + number % 2), run_step)


def is_preempted() -> Bench:
    return ends_after(make_engine(), add, run_step, run_step, preempt)


def is_preempted_with_tokens_in_flight() -> Bench:
    return ends_after(make_engine(), add, run_step, scheduled, scheduled, preempt)


def waits_on_another_worker() -> Bench:
    return ends_after(make_engine(), add, run_step, scheduled, lose_workers)


def is_on_trial() -> Bench:
    return ends_after(make_engine(), add, run_step, scheduled, kill_workers)


def is_for_a_vector() -> Bench:
    params = pooling_params(Pooling())
    facts = ModelFacts("fake", 1000, 512, BLOCK, 100, [2], embedding_size=8)
    engine = EngineCore(configure(model="null"))
    engine.adopt_workers(facts)
    return ends_after(engine, lambda number: AddRequest(number, PROMPT, params), scheduled)


# Schedulers ---------------------------------------------------------------------------------------


def scheduler_bench(
    steps: Callable[[Scheduler, Request], None],
    *,
    offload: Offload | None = None,
    before: Sequence[Request] = (),
    after: Callable[[Scheduler], None] = lambda _: None,
    **options: object,
) -> Bench:
    """Return a bench of a scheduler with 40 blocks: each request is aborted after `steps`.

    The requests in `before` come before all others, and stay.
    """
    given: dict[str, object] = {"num_blocks": 41, "max_steps_in_flight": 2}
    scheduler = Scheduler(SchedulerOptions(**given | options), offload)  # type: ignore[arg-type]
    for request in before:
        scheduler.add_request(request)

    def live(number: int) -> None:
        request = Request(
            number, PROMPT, SamplingParams(max_tokens=20), blocks_at=THERE, tenant="tenant"
        )
        scheduler.add_request(request)
        steps(scheduler, request)
        assert not request.is_finished
        scheduler.abort_request(number)
        while scheduler.in_flight:
            update(scheduler)
        after(scheduler)
        if scheduler.schedule() is not None:
            update(scheduler)

    return Bench(scheduler, scheduler, live)


def update(scheduler: Scheduler) -> None:
    step_id, sampling = scheduler.in_flight[0]
    counts = [1] * len(sampling)
    drafts = [2] * len(sampling) if scheduler.speculation.is_on else []
    scheduler.update_from_output(ModelRunnerOutput(step_id, [7] * len(sampling), counts, drafts))


def runs(scheduler: Scheduler, request: Request) -> None:
    for _ in range(3):
        scheduler.schedule()
        update(scheduler)
    scheduler.schedule()
    assert request.status is RequestStatus.RUNNING


def is_swapped_out(scheduler: Scheduler, request: Request) -> None:
    runs(scheduler, request)
    scheduler.preempt(request)
    assert request.swapped_out is not None


def has_drafts() -> Bench:
    return scheduler_bench(runs, num_speculative_tokens=4, adaptive_speculation=True)


def has_a_state() -> Bench:
    groups = (KVGroup(), KVGroup(is_state=True))
    return scheduler_bench(runs, kv_groups=groups, num_state_blocks=8, mamba_block_size=2 * BLOCK)


def is_on_the_host() -> Bench:
    return scheduler_bench(is_swapped_out, num_host_blocks=10)


def has_a_state_on_the_host() -> Bench:
    groups = (KVGroup(), KVGroup(is_state=True))
    return scheduler_bench(
        is_swapped_out,
        kv_groups=groups,
        num_state_blocks=8,
        num_host_blocks=10,
        num_host_state_blocks=2,
    )


def is_held(scheduler: Scheduler, request: Request) -> None:
    assert scheduler.hold(request)


def stored(*, is_here: bool) -> Offload:
    """Return a store, of this machine or of another one, which has the blocks of PROMPT."""
    scheduler = Scheduler(SchedulerOptions(), Offload([set()]))
    scheduler.add_request(Request(1, PROMPT, SamplingParams(max_tokens=1)))
    scheduler.schedule()
    [written] = [m for m in scheduler.take_transfers() if isinstance(m, StoreBlocks)]
    index = set(written.keys) if is_here else set()
    return Offload([index], min_load_tokens=1, reads_machines=not is_here)


def loads(answers: bool) -> Bench:
    """Each request is aborted while its blocks are loaded; then the load ends, or is lost."""
    sent: list[LoadBlocks] = []

    def begin(scheduler: Scheduler, request: Request) -> None:
        scheduler.kv.reset_prefix_cache()
        assert scheduler.schedule() is None
        sent.extend(m for m in scheduler.take_transfers() if isinstance(m, LoadBlocks))
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KV

    def end(scheduler: Scheduler) -> None:
        if not answers:
            scheduler.recompute_all()
        for load in sent:
            scheduler.blocks_loaded(BlocksLoaded(load.req_id, len(load.block_ids), 1000))
        sent.clear()

    return scheduler_bench(begin, offload=stored(is_here=True), after=end)


def is_set_aside() -> Bench:
    """Other requests take all places for loads; their workers are lost, and they begin again."""
    params = SamplingParams(max_tokens=2)
    others = [Request(10**6 + number, PROMPT, params) for number in range(MAX_LOADS)]

    def begin(scheduler: Scheduler, request: Request) -> None:
        assert scheduler.schedule() is None
        scheduler.take_transfers()
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KV
        assert request not in scheduler.loads

    return scheduler_bench(
        begin,
        offload=stored(is_here=True),
        before=others,
        after=lambda scheduler: scheduler.recompute_all(),
    )


def asks(answers: bool) -> Bench:
    """Each request is aborted after its machine was asked; the answer comes then, or before."""
    sent: list[FindBlocks] = []

    def answer(scheduler: Scheduler) -> None:
        for question in sent:
            answer = BlocksFound(question.req_id, bytes([1]) * len(question.keys))
            scheduler.blocks_found(answer)
        sent.clear()

    def begin(scheduler: Scheduler, request: Request) -> None:
        scheduler.kv.reset_prefix_cache()
        assert scheduler.schedule() is None
        sent.extend(m for m in scheduler.take_transfers() if isinstance(m, FindBlocks))
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KV
        if answers:
            answer(scheduler)

    return scheduler_bench(begin, offload=stored(is_here=False), after=answer)


BENCHES: dict[str, Callable[[], Bench]] = {
    bench.__name__: bench
    for bench in (
        *(waits, waits_for_a_grammar, waits_for_a_grammar_that_was_sent, runs_with_a_grammar),
        *(waits_for_an_adapter, runs_with_an_adapter, computes_its_prompt, reports_its_progress),
        *(decodes, has_tokens_in_flight, is_about_to_end, is_preempted),
        *(is_preempted_with_tokens_in_flight, waits_on_another_worker, is_on_trial),
        *(is_for_a_vector, has_drafts, has_a_state, is_on_the_host, has_a_state_on_the_host),
        is_set_aside,
    )
} | {
    "is_held": lambda: scheduler_bench(is_held, policy="fair"),
    "loads": lambda: loads(answers=True),
    "loads_from_a_lost_worker": lambda: loads(answers=False),
    "asks": lambda: asks(answers=False),
    "has_an_answer": lambda: asks(answers=True),
}


@pytest.mark.parametrize("state", BENCHES)
def test_requests_that_end_in_a_state_leave_nothing(state: str) -> None:
    bench = BENCHES[state]()

    def count_after(numbers: range) -> int:
        for number in numbers:
            bench.live(number)
        bench.scheduler.waiting.front()  # removes the rows of those that have ended
        check_invariants(bench.scheduler)
        return num_reachable(bench.root)

    num_before = count_after(range(NUM_FIRST))
    num_more = count_after(range(NUM_FIRST, NUM_FIRST + NUM_LATER)) - num_before
    assert num_more < NUM_LATER / 2, f"{num_more} objects are left by {NUM_LATER} requests"
