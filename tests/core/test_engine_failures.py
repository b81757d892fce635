"""An error of one request ends that request with an error to its client; others go on."""

import logging

import msgspec
import pytest

from core_proc import engine as engine_module
from core_proc.engine import EngineCore
from core_proc.kv.kv_cache import KVCacheManager
from core_proc.options import SchedulerOptions
from core_proc.outputs.check import InvalidWorkerOutput
from core_proc.outputs.owners import Owner
from core_proc.recovery.quarantine import Quarantine
from core_proc.request import Request
from core_proc.scheduling.results import StepResult
from protocol.api_core import ErrorCode, Refused, RequestOutput
from protocol.config.settings import configure
from protocol.core_worker import ModelRunnerOutput, PromptLogprobs
from protocol.model_facts import KVGroup, ModelFacts
from tests.core.engine_bench import (
    CLIENT,
    FACTS,
    OTHER,
    add,
    answer,
    make_engine,
    run_all,
    scheduled,
)


def refusals(engine: EngineCore) -> list[tuple[bytes, int | None, ErrorCode]]:
    return [
        (client, message.request_id, message.error.code)
        for client, message in engine.take_outgoing()
        if isinstance(message, Refused)
    ]


def test_a_scheduler_error_for_one_request_is_sent_to_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = KVCacheManager.find_cached_prefix

    def find(kv: KVCacheManager, request: Request) -> list[list[int]]:
        if request.num_prompt_tokens == 13:
            raise RuntimeError("a bug")
        return real(kv, request)

    monkeypatch.setattr(KVCacheManager, "find_cached_prefix", find)
    engine = make_engine()
    engine.add(OTHER, add(1, max_tokens=2))
    engine.add(CLIENT, add(1, [5] * 13))
    engine.add(OTHER, add(2, max_tokens=2))
    ended = {(client, row.request_id) for client, row in run_all(engine) if row.finish_reason}
    assert ended == {(OTHER, 1), (OTHER, 2)}
    assert refusals(engine) == [(CLIENT, 1, ErrorCode.INTERNAL)]
    assert engine.stats().kv_cache_usage == 0.0
    assert engine.add(CLIENT, add(1, max_tokens=1)) is None, "the id is free again"


def test_an_error_in_one_requests_output_ends_that_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    real = engine_module.output_row

    def row(result: StepResult, owner: Owner, output: ModelRunnerOutput) -> RequestOutput:
        if result.request.num_prompt_tokens == 13 and result.request.num_output_tokens == 2:
            raise RuntimeError("a bug")
        return real(result, owner, output)

    monkeypatch.setattr(engine_module, "output_row", row)
    engine = make_engine()
    engine.add(CLIENT, add(1, [5] * 13))
    engine.add(CLIENT, add(2, max_tokens=3))
    rows = [(row.request_id, row.first_index) for _, row in run_all(engine)]
    assert rows == [(1, 0), (2, 0), (2, 1), (2, 2)]
    assert refusals(engine) == [(CLIENT, 1, ErrorCode.INTERNAL)]
    assert "a bug" in caplog.text
    assert engine.stats().kv_cache_usage == 0.0


def test_an_error_in_the_last_output_of_a_request_is_sent_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def row(result: StepResult, owner: Owner, output: ModelRunnerOutput) -> RequestOutput:
        raise RuntimeError("a bug")

    monkeypatch.setattr(engine_module, "output_row", row)
    engine = make_engine()
    engine.add(CLIENT, add(1, max_tokens=1))
    assert list(run_all(engine)) == []
    assert refusals(engine) == [(CLIENT, 1, ErrorCode.INTERNAL)]


def test_an_error_in_prompt_logprobs_ends_that_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(request: Request, part: PromptLogprobs) -> list[RequestOutput]:
        raise RuntimeError("a bug")

    monkeypatch.setattr(engine_module, "prompt_rows", rows)
    engine = make_engine()
    engine.add(CLIENT, add(1, prompt_logprobs=0))
    engine.add(CLIENT, add(2))
    step = scheduled(engine)
    output = answer(engine, step)
    req_id = min(engine.scheduler.requests)
    parts = [PromptLogprobs(req_id, 1, [])]
    outputs = engine.update(
        ModelRunnerOutput(step.step_id, output.sampled_token_ids, prompt_logprobs=parts)
    )
    assert [row.request_id for row in outputs[CLIENT].outputs] == [2]
    assert refusals(engine) == [(CLIENT, 1, ErrorCode.INTERNAL)]


def test_a_request_whose_logits_are_not_finite_ends_alone() -> None:
    """Its token is not an output, and the others go on."""
    engine = make_engine()
    for request_id in (1, 2, 3):
        engine.add(CLIENT, add(request_id))
    step = scheduled(engine)
    requests = engine.scheduler.requests
    bad = sorted(requests)[1]
    output = answer(engine, step)
    failed = msgspec.structs.replace(output, request_errors={bad: "not finite"})
    outputs = engine.update(failed)
    assert [row.request_id for row in outputs[CLIENT].outputs] == [1, 3]
    assert refusals(engine) == [(CLIENT, 2, ErrorCode.COMPUTATION_FAILED)]
    assert bad not in requests
    following = scheduled(engine)
    assert following.finished_req_ids == [bad]
    assert engine.update(answer(engine, following))[CLIENT].outputs


def test_an_error_for_a_request_that_did_not_sample_is_the_workers_fault() -> None:
    engine = make_engine()
    engine.add(CLIENT, add(1))
    output = answer(engine, scheduled(engine))
    with pytest.raises(InvalidWorkerOutput, match="request_errors names 77"):
        engine.update(msgspec.structs.replace(output, request_errors={77: "not finite"}))


def test_a_request_aborted_in_time_gets_no_failure() -> None:
    engine = make_engine()
    engine.add(CLIENT, add(1))
    [req_id] = engine.scheduler.requests
    engine.scheduler.fail_request(req_id, "x" * 10_000)
    engine.abort(CLIENT, [1])
    engine.schedule()
    assert refusals(engine) == []


def test_a_long_reason_is_cut_to_what_the_wire_takes() -> None:
    engine = make_engine()
    engine.add(CLIENT, add(1))
    [req_id] = engine.scheduler.requests
    engine.scheduler.fail_request(req_id, "x" * 10_000)
    engine.schedule()
    [(_, refused)] = engine.take_outgoing()
    assert isinstance(refused, Refused)
    assert len(refused.error.message) == 4096


def test_every_scheduler_setting_and_fact_reaches_the_scheduler() -> None:
    """Each option with a setting or a fact of its name has that value."""
    settings = {
        "max_num_seqs": 7,
        "max_num_batched_tokens": 300,
        "max_num_scheduled_tokens": 200,
        "max_steps_in_flight": 3,
        "num_speculative_tokens": 2,
        "enable_chunked_prefill": False,
        "long_prefill_token_threshold": 50,
        "long_prefill_token_threshold_adaptive": True,
        "max_num_partial_prefills": 4,
        "max_long_partial_prefills": 2,
        "elastic_token_budget": True,
        "scheduling_policy": "priority",
        "preempt_for_priority": True,
        "victim_choice": "cheapest",
        "enable_prefix_caching": False,
        "enable_kv_events": False,
        "adaptive_speculation": False,
        "scheduler_reserve_full_isl": False,
        "watermark": 0.25,
    }
    groups = [KVGroup(), KVGroup(64, 9)]
    facts = ModelFacts("fake", 1000, 512, 16, 100, [2], kv_groups=groups, num_host_blocks=11)
    engine = EngineCore(configure(model="null", **settings))
    engine.adopt_workers(facts, 1.5)
    options = engine.scheduler.options
    expected = settings | {
        "computes_whole_prompts": False,
        "policy": "priority",
        "pipeline_parallel_size": 1,
        "has_draft_model": False,
        "num_blocks": 100,
        "block_size": 16,
        "kv_groups": tuple(groups),
        "num_host_blocks": 11,
        "swap_cost_tokens": 1.5,
        "max_model_len": 512,
        "eos_token_ids": (2,),
    }
    of_states = {"num_state_blocks": 7, "num_host_state_blocks": 3, "state_swap_blocks": 1.5}
    unset = {"tenant_weights", "target_itl_ms", "mamba_block_size", *of_states}
    names = set(SchedulerOptions.__struct_fields__) - unset
    assert {name: getattr(options, name) for name in names} == {n: expected[n] for n in names}
    others = {"tenant_weights": "gold=4", "enable_kv_events": True}
    others["target_itl_ms"] = 30.0
    others["mamba_block_size"] = 96
    fair = EngineCore(configure(model="null", scheduling_policy="fair", **others))
    recurrent = [KVGroup(), KVGroup(is_state=True)]
    fair.adopt_workers(msgspec.structs.replace(FACTS, kv_groups=recurrent, **of_states))
    assert fair.scheduler.options.tenant_weights == {"gold": 4.0}
    assert fair.scheduler.options.enable_kv_events
    assert fair.scheduler.options.target_itl_ms == 30.0
    assert fair.scheduler.options.mamba_block_size == 96
    options = fair.scheduler.options
    assert {name: getattr(options, name) for name in of_states} == of_states
    staged = EngineCore(configure(model="null", pipeline_parallel_size=4))
    staged.adopt_workers(FACTS)
    options = staged.scheduler.options
    assert options.pipeline_parallel_size == options.max_steps_in_flight == 4


def test_the_tenant_of_a_request_reaches_the_scheduler() -> None:
    engine = make_engine(scheduling_policy="fair")
    request = add(1)
    engine.add(CLIENT, type(request)(1, [5], request.sampling_params, tenant="gold"))
    assert [r.tenant for r in engine.scheduler.requests.values()] == ["gold"]


def test_a_request_is_refused_if_all_kv_groups_together_cannot_hold_it() -> None:
    facts = ModelFacts("fake", 1000, 512, 16, 11, [2], kv_groups=[KVGroup(), KVGroup()])
    engine = EngineCore(configure(model="null"))
    engine.adopt_workers(facts)
    refused = engine.add(CLIENT, add(1, [5] * 73, max_tokens=9))
    assert refused is not None
    assert refused.error.code is ErrorCode.UNSERVABLE
    assert engine.add(CLIENT, add(1, [5] * 73, max_tokens=8)) is None


def test_an_error_after_a_request_was_queued_ends_that_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def added(quarantine: Quarantine, request: Request) -> None:
        raise RuntimeError("a bug")

    engine = make_engine()
    with monkeypatch.context() as patch:
        patch.setattr(Quarantine, "added", added)
        with pytest.raises(RuntimeError):
            engine.add(CLIENT, add(1))
    engine.abort(CLIENT, [1])  # as the link does
    assert not engine.has_unfinished
    assert engine.add(CLIENT, add(2)) is None
    assert {row.request_id for _, row in run_all(engine)} == {2}


@pytest.mark.parametrize(("num_states", "is_logged"), [(3, True), (64, False), (0, False)])
def test_fewer_state_blocks_than_slots_are_announced(
    num_states: int, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    groups = [KVGroup(), *[KVGroup(is_state=True)] * (num_states > 0)]
    num_blocks = num_states + 1 if num_states else 0
    facts = msgspec.structs.replace(FACTS, kv_groups=groups, num_state_blocks=num_blocks)
    with caplog.at_level(logging.INFO):
        EngineCore(configure(model="null")).adopt_workers(facts)
    text = "max_num_seqs is 64, but there are state blocks for 3 requests at a time"
    assert (text in caplog.text) == is_logged
