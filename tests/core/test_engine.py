"""EngineCore without sockets: messages in, messages out."""

import msgspec
import pytest

from core_proc.engine import EngineCore, FactsChanged
from core_proc.outputs.check import InvalidWorkerOutput
from protocol.api_core import (
    LOOP_BUCKETS_S,
    STEP_TOKENS_BUCKETS,
    AddRequest,
    EngineState,
    EngineStats,
    ErrorCode,
    RequestOutput,
    StepOutputs,
)
from protocol.config.settings import configure
from protocol.core_worker import (
    GrammarCompiled,
    ModelRunnerOutput,
    PromptLogprobs,
    SchedulerOutput,
    TokenLogprobs,
)
from protocol.model_facts import ModelFacts
from protocol.sampling import FinishReason, ThinkingBudget
from tests.core.engine_bench import (
    CLIENT,
    FACTS,
    OTHER,
    add,
    answer,
    make_engine,
    run_all,
    run_step,
    scheduled,
)

Parts = list[PromptLogprobs]
BEHIND_SPACES = ThinkingBudget(1, [], [7], space_token_ids=[1000])


def row_of(logprob: float) -> TokenLogprobs:
    return TokenLogprobs(7, logprob, 1, [], [])


def test_steps_are_counted_by_their_tokens() -> None:
    """Steps without tokens are not counted."""
    engine = make_engine()
    engine.add(CLIENT, add(1, [*range(20)], max_tokens=3))
    engine.add(CLIENT, add(2, [*range(5)], max_tokens=1))
    list(run_all(engine))
    stats = engine.stats()
    counts = dict(zip(STEP_TOKENS_BUCKETS, stats.step_tokens_buckets, strict=False))
    assert {bound: count for bound, count in counts.items() if count} == {1: 2, 32: 1}
    assert stats.step_tokens_sum == 25 + 1 + 1


def test_each_client_gets_its_own_outputs_under_its_own_numbers() -> None:
    engine = make_engine()
    assert engine.add(CLIENT, add(1, max_tokens=2)) is None
    assert engine.add(OTHER, add(1, max_tokens=1)) is None
    assert list(run_all(engine)) == [
        (CLIENT, RequestOutput(1, 0, [7], num_cached_tokens=0, queue_time_s=0.0)),
        (
            OTHER,
            RequestOutput(1, 0, [7], FinishReason.LENGTH, num_cached_tokens=0, queue_time_s=0.0),
        ),
        (CLIENT, RequestOutput(1, 1, [7], FinishReason.LENGTH)),
    ]


def test_sequences_of_a_request_hold_one_copy_of_its_token_lists() -> None:
    """Up to 2,048 sequences have the same lists, of up to 4,096 ids."""
    engine = make_engine()
    for number in range(1, 4):
        refused = engine.add(CLIENT, add(number, allowed_token_ids=[7, 8, 9], seed=number))
        assert refused is None
    params = [request.sampling_params for request in engine.scheduler.requests.values()]
    assert [one.seed for one in params] == [1, 2, 3]
    assert len({id(one.allowed_token_ids) for one in params}) == 1


def test_programs_that_state_no_origin_are_clients_of_their_own() -> None:
    engine = make_engine(scheduling_policy="fair", max_num_seqs=1)
    for number in range(5):
        assert engine.add(CLIENT, add(number, max_tokens=1)) is None
    assert engine.add(OTHER, add(1, max_tokens=1)) is None
    assert [client for client, _ in run_all(engine)].index(OTHER) == 1


@pytest.mark.parametrize(
    ("bad", "code", "param"),
    [
        (add(1, [1000]), ErrorCode.INVALID, "prompt"),
        (add(1, [1] * 512), ErrorCode.TOO_LONG, "prompt"),
        (add(1, max_tokens=2, min_tokens=3), ErrorCode.INVALID, "min_tokens"),
        (add(1, max_tokens=2, outputs=[7, 7]), ErrorCode.INVALID, "output_token_ids"),
        (add(1, thinking_budget=BEHIND_SPACES), ErrorCode.INVALID, "thinking_token_budget"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_field(
    bad: AddRequest, code: ErrorCode, param: str | None
) -> None:
    engine = make_engine()
    refused = engine.add(CLIENT, bad)
    assert refused is not None
    assert (refused.request_id, refused.error.code, refused.error.param) == (1, code, param)
    assert not engine.has_unfinished


def test_workers_may_come_back_more_exact_than_they_were() -> None:
    engine = make_engine()
    engine.lose_workers()
    better = msgspec.structs.replace(FACTS, exact_resume=True, decoder="native")
    engine.adopt_workers(better)
    facts = engine.status().facts
    assert facts is not None
    assert facts.exact_resume
    engine.lose_workers()
    with pytest.raises(FactsChanged):  # other bits would continue what was promised to be exact
        engine.adopt_workers(msgspec.structs.replace(better, decoder="modules"))


@pytest.mark.parametrize("is_exact", [False, True])
def test_workers_of_another_build_do_not_continue_unnoticed(is_exact: bool) -> None:
    """If results are not exact, other kernels of the same build may: they promise nothing."""
    engine = make_engine()
    facts = msgspec.structs.replace(FACTS, exact_resume=is_exact, build="1.0", kernels="a")
    engine.lose_workers()
    with pytest.raises(FactsChanged):
        engine.adopt_workers(facts)
    assert not facts.can_replace(msgspec.structs.replace(facts, build="1.1"))
    assert not msgspec.structs.replace(facts, exact_resume=False).can_replace(
        msgspec.structs.replace(facts, build="1.1")
    )
    assert facts.can_replace(msgspec.structs.replace(facts, kernels="b")) != is_exact


def test_without_workers_ever_requests_are_refused() -> None:
    engine = EngineCore(configure(model="null"))
    refused = engine.add(CLIENT, add(1))
    assert refused is not None
    assert refused.error.code is ErrorCode.STARTING
    assert engine.state is EngineState.STARTING
    assert engine.schedule() is None


def test_before_the_first_workers_there_is_nothing_to_lose_or_to_report() -> None:
    engine = EngineCore(configure(model="null"))
    with pytest.raises(InvalidWorkerOutput, match="before any step"):
        engine.update(ModelRunnerOutput(1, []))
    with pytest.raises(InvalidWorkerOutput, match="before anything"):
        engine.answered(GrammarCompiled(1))
    engine.lose_workers()
    engine.attribute_death()
    engine.abort(CLIENT, [1])
    assert engine.drop_client(CLIENT) == 0
    assert engine.take_marks() is None
    assert (engine.take_outgoing(), list(engine.snapshot_kv_events())) == ([], [])
    loops, steps = ([0] * (len(bounds) + 1) for bounds in (LOOP_BUCKETS_S, STEP_TOKENS_BUCKETS))
    assert engine.stats() == EngineStats(loop_seconds_buckets=loops, step_tokens_buckets=steps)
    assert engine.state is EngineState.STARTING


def test_a_drain_before_the_first_workers_continues_after_their_adoption() -> None:
    engine = EngineCore(configure(model="null"))
    engine.drain()
    assert engine.state is EngineState.STARTING
    engine.adopt_workers(FACTS)
    assert engine.state is EngineState.DRAINING
    refused = engine.add(CLIENT, add(1))
    assert refused is not None
    assert refused.error.code is ErrorCode.DRAINING
    assert engine.add(CLIENT, add(2, resent=True)) is None
    assert not engine.is_drained
    assert list(run_all(engine))
    assert engine.is_drained


def test_an_open_request_is_replaced_and_continues_after_the_tokens_given() -> None:
    engine = make_engine()
    engine.add(CLIENT, add(1))
    run_step(engine)
    assert engine.add(CLIENT, add(1, outputs=[9, 9, 9])) is None
    assert engine.stats().num_running_reqs + engine.stats().num_waiting_reqs == 1
    rows = [row for _, row in run_all(engine)]
    assert [row.first_index for row in rows] == [3, 4, 5, 6, 7]


def test_a_full_queue_refuses_new_requests_and_no_accepted_ones() -> None:
    engine = make_engine(max_num_waiting=1)
    assert engine.add(CLIENT, add(1)) is None
    refused = engine.add(CLIENT, add(2))
    assert refused is not None
    assert refused.error.code is ErrorCode.OVERLOADED
    assert engine.add(CLIENT, add(3, resent=True)) is None
    assert engine.add(CLIENT, add(1, outputs=[9])) is None, "it replaces an open one"


def test_a_queue_full_of_tokens_refuses_new_requests_and_no_accepted_ones() -> None:
    """The first is accepted whatever its length; capacity is free again when a request leaves."""
    engine = make_engine(max_waiting_tokens=4)
    assert engine.add(CLIENT, add(1, prompt=[7] * 5)) is None
    refused = engine.add(CLIENT, add(2, prompt=[7]))
    assert refused is not None
    assert refused.error.code is ErrorCode.OVERLOADED
    assert engine.add(CLIENT, add(3, prompt=[7], resent=True)) is None
    engine.abort(CLIENT, [1])
    assert engine.add(CLIENT, add(4, prompt=[7] * 3)) is None
    assert engine.add(CLIENT, add(5, prompt=[7])) is not None


@pytest.mark.parametrize("setting", ["max_num_waiting", "max_waiting_tokens"])
def test_one_client_leaves_a_ninth_of_the_queue_to_others(setting: str) -> None:
    """A program that states no origin has all of it, and accepted requests are not refused."""
    prompt = [7] * (10 if setting == "max_waiting_tokens" else 1)
    engine = make_engine(**{setting: 9 * len(prompt)})

    def is_taken(number: int, origin: str, *, resent: bool = False) -> bool:
        request = msgspec.structs.replace(add(number, prompt, resent=resent), origin=origin)
        return engine.add(CLIENT, request) is None

    assert [is_taken(number, "a") for number in range(1, 10)] == [True] * 8 + [False]
    assert [is_taken(number, "b") for number in (11, 12)] == [True, False]
    assert is_taken(20, "a", resent=True)
    engine.abort(CLIENT, [1, 2, 11, 20])
    assert [is_taken(number, "a") for number in range(21, 24)] == [True, True, False]
    engine.abort(CLIENT, [*range(3, 10), *range(21, 24)])
    assert [is_taken(number, "a") for number in range(31, 38)] == [True] * 7
    engine = make_engine(**{setting: 9 * len(prompt)})
    assert all(is_taken(number, "") for number in range(1, 10))


def test_outputs_alone_do_not_prove_that_a_request_was_accepted() -> None:
    engine = make_engine(max_num_waiting=1)
    engine.add(CLIENT, add(1))
    refused = engine.add(CLIENT, add(2, outputs=[9]))
    assert refused is not None
    assert refused.error.code is ErrorCode.OVERLOADED


def test_draining_refuses_new_requests_and_finishes_accepted_ones() -> None:
    engine = make_engine()
    engine.add(CLIENT, add(1, max_tokens=2))
    engine.drain()
    assert engine.state is EngineState.DRAINING
    refused = engine.add(CLIENT, add(2))
    assert refused is not None
    assert refused.error.code is ErrorCode.DRAINING
    assert engine.add(CLIENT, add(3, max_tokens=2, outputs=[9], resent=True)) is None
    assert not engine.is_drained
    finished = {row.request_id for _, row in run_all(engine) if row.finish_reason}
    assert finished == {1, 3}
    assert engine.is_drained


def test_a_core_that_never_had_workers_is_drained_at_once() -> None:
    engine = EngineCore(configure(model="null"))
    engine.drain()
    assert engine.is_drained


def test_a_refused_replacement_ends_the_open_request() -> None:
    """After Refused nothing else is sent for this id."""
    engine = make_engine()
    engine.add(CLIENT, add(1))
    assert engine.add(CLIENT, add(1, [1000])) is not None
    assert not engine.has_unfinished


def test_aborts_reach_only_the_own_requests() -> None:
    engine = make_engine()
    engine.add(CLIENT, add(1))
    engine.add(OTHER, add(2))
    engine.abort(CLIENT, [2, 3])
    assert engine.stats().num_waiting_reqs == 2
    engine.abort(CLIENT, [1])
    assert engine.stats().num_waiting_reqs == 1


def test_a_client_that_is_gone_takes_its_requests_along() -> None:
    engine = make_engine()
    for request_id in range(3):
        engine.add(CLIENT, add(request_id))
    engine.add(OTHER, add(0, max_tokens=1))
    step = scheduled(engine)
    assert engine.drop_client(CLIENT) == 3
    assert engine.drop_client(CLIENT) == 0
    assert list(engine.update(answer(engine, step))) == [OTHER]
    assert engine.stats().kv_cache_usage == 0.0


def test_requests_survive_the_loss_of_workers() -> None:
    engine = make_engine()
    engine.add(CLIENT, add(1, max_tokens=3))
    first = run_step(engine)[CLIENT].outputs
    lost = scheduled(engine)
    engine.lose_workers()
    assert engine.state is EngineState.RECOVERING
    assert engine.schedule() is None
    assert engine.adopt_workers(FACTS) > lost.step_id
    rows = first + [row for _, row in run_all(engine)]
    assert [row.first_index for row in rows] == [0, 1, 2]
    assert engine.stats().worker_restarts == 1


def test_other_facts_end_the_core() -> None:
    engine = make_engine()
    engine.lose_workers()
    with pytest.raises(FactsChanged, match="with model 'other' instead of"):
        engine.adopt_workers(msgspec.structs.replace(FACTS, model="other"))


@pytest.mark.parametrize(
    ("output", "what"),
    [
        (ModelRunnerOutput(5, [7]), "step 5 came, and step 0 is due"),
        (ModelRunnerOutput(0, []), "0 tokens for 1"),
        (ModelRunnerOutput(0, [7, 7]), "2 tokens for 1"),
        (ModelRunnerOutput(0, [1000]), "token id 1000"),
        (ModelRunnerOutput(0, [7, 7], [2]), "2 tokens at once"),
        (ModelRunnerOutput(0, [7], [1, 1]), "1 tokens for 1 that sampled"),
        (ModelRunnerOutput(0, [7], [], [1]), "1 draft tokens for a request, more than 0"),
        (ModelRunnerOutput(0, [7], [], [0, 0]), "num_draft_tokens has 2 numbers for 1"),
        (ModelRunnerOutput(0, [7], logprobs={99: [row_of(-1.0)]}), "1 logprobs for 0 tokens"),
        (ModelRunnerOutput(0, [7], logprobs={1: []}), "0 logprobs for 1 tokens"),
        (ModelRunnerOutput(0, [7], logprobs={1: [row_of(float("nan"))]}), "is not a number"),
    ],
)
def test_an_answer_that_is_not_due_changes_nothing(output: ModelRunnerOutput, what: str) -> None:
    engine = make_engine()
    engine.add(CLIENT, add(1))
    step = scheduled(engine)
    with pytest.raises(InvalidWorkerOutput, match=what):
        engine.update(output)
    [row] = engine.update(answer(engine, step))[CLIENT].outputs
    assert row.token_ids == [7]


def test_an_answer_to_nothing_is_misbehaviour() -> None:
    with pytest.raises(InvalidWorkerOutput, match="none is due"):
        make_engine().update(ModelRunnerOutput(0, []))


# Prompt logprobs -----------------------------------------------------------------------------


def entries(first: int, end: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(position, 0.0, 1, [], []) for position in range(first, end)]


def answer_scored(engine: EngineCore, step: SchedulerOutput, first: int, end: int) -> list[int]:
    """Answer with prompt logprobs of [first, end); return the positions sent to the client.

    Every row but those with tokens must be one piece of the prompt.
    """
    output = answer(engine, step)
    req_id = next(iter(engine.scheduler.requests))
    parts = [PromptLogprobs(req_id, first, entries(first, end))]
    output = ModelRunnerOutput(output.step_id, output.sampled_token_ids, prompt_logprobs=parts)
    positions: list[int] = []
    for row in engine.update(output).get(CLIENT, StepOutputs([])).outputs:
        if row.token_ids:
            assert row.prompt_logprobs is None
            continue
        assert row.first_index == 0
        assert row.prompt_logprobs is not None
        [part] = row.prompt_logprobs
        assert len(part.entries) <= 4096
        assert [entry.token_id for entry in part.entries] == list(
            range(part.first_position, part.first_position + len(part.entries))
        )
        positions += [entry.token_id for entry in part.entries]
    return positions


def scored_engine(prompt_len: int, budget: int) -> EngineCore:
    engine = EngineCore(
        configure(
            model="null", max_num_batched_tokens=budget, max_num_seqs=1, max_steps_in_flight=1
        )
    )
    engine.adopt_workers(ModelFacts("fake", 1000, 65536, 16, 8192, [2]))
    assert engine.add(CLIENT, add(1, [5] * prompt_len, 3, prompt_logprobs=0)) is None
    return engine


def test_prompt_logprobs_are_sent_step_by_step_before_the_first_token() -> None:
    engine = scored_engine(20, 8)
    assert answer_scored(engine, scheduled(engine), 1, 9) == list(range(1, 9))
    assert answer_scored(engine, scheduled(engine), 9, 17) == list(range(9, 17))
    assert answer_scored(engine, scheduled(engine), 17, 20) == [17, 18, 19]


def test_many_prompt_logprobs_are_cut_into_pieces_that_a_frame_holds() -> None:
    engine = scored_engine(10_000, 16_384)
    assert answer_scored(engine, scheduled(engine), 1, 10_000) == list(range(1, 10_000))


def test_prompt_logprobs_of_a_prompt_computed_again_are_sent_once() -> None:
    engine = scored_engine(20, 8)
    assert answer_scored(engine, scheduled(engine), 1, 9) == list(range(1, 9))
    engine.lose_workers()
    engine.adopt_workers(ModelFacts("fake", 1000, 65536, 16, 8192, [2]))
    assert answer_scored(engine, scheduled(engine), 1, 9) == []
    assert answer_scored(engine, scheduled(engine), 9, 17) == list(range(9, 17))
    assert answer_scored(engine, scheduled(engine), 16, 20) == [17, 18, 19]


def test_a_request_that_has_tokens_has_had_its_prompt_logprobs() -> None:
    engine = scored_engine(20, 64)
    engine.add(CLIENT, add(1, [5] * 20, 3, outputs=[7], prompt_logprobs=0))
    assert answer_scored(engine, scheduled(engine), 1, 20) == []


def test_prompt_logprobs_of_an_aborted_request_are_dropped() -> None:
    engine = scored_engine(20, 64)
    step = scheduled(engine)
    parts: Parts = [PromptLogprobs(1, 1, entries(1, 20))]
    output = ModelRunnerOutput(step.step_id, [7], prompt_logprobs=parts)
    engine.abort(CLIENT, [1])
    assert engine.update(output) == {}
