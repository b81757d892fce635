"""Requests with an adapter wait until it is loaded and has its turn, and keep their places."""

import msgspec
import pytest

from core_proc.engine import EngineCore
from core_proc.kv.kv_cache import prefix_root
from core_proc.preparation.adapters import MAX_LOADS, MAX_SENT
from core_proc.recovery.fingerprints import fingerprint
from core_proc.recovery.quarantine import Stage
from core_proc.request import Request
from protocol.adapters import Adapter
from protocol.api_core import ControlDone, ErrorCode, Refused
from protocol.config.settings import configure
from protocol.core_worker import (
    AdapterLoaded,
    GrammarCompiled,
    LoadAdapter,
    SchedulerOutput,
    UnloadAdapter,
)
from protocol.message import pack_token_ids
from protocol.sampling import Grammar, GrammarKind, SamplingParams
from tests.core.adapter_engine import (
    A,
    B,
    C,
    D,
    adapted,
    control,
    ended_controls,
    load_all,
    make_engine,
    new_ids,
    refusals,
)
from tests.core.engine_bench import CLIENT, FACTS, add, answer, scheduled


def test_a_request_runs_once_its_adapter_is_loaded_and_others_do_not_wait() -> None:
    engine = make_engine()
    engine.add(CLIENT, adapted(1, A))
    engine.add(CLIENT, add(2))
    engine.add(CLIENT, adapted(3, A))
    assert engine.take_adapters() == [LoadAdapter(A)]
    assert engine.take_adapters() == []
    step = scheduled(engine)
    assert new_ids(step) == [2]
    engine.update(answer(engine, step))
    engine.answered(AdapterLoaded(A.adapter_id))
    step = scheduled(engine)
    assert new_ids(step) == [1, 3]
    assert {new.adapter_id for new in step.scheduled_new_reqs} == {A.adapter_id}
    engine.update(answer(engine, step))
    engine.add(CLIENT, adapted(4, A))
    assert engine.take_adapters() == []
    assert new_ids(scheduled(engine)) == [4]


def test_the_statistics_name_the_adapters_of_running_and_of_waiting_requests() -> None:
    engine = make_engine()
    for number, adapter in enumerate((A, B, A), start=1):
        engine.add(CLIENT, adapted(number, adapter, max_tokens=2))
    load_all(engine)

    def names() -> tuple[list[str], list[str]]:
        stats = engine.stats()
        return stats.running_lora_adapters, stats.waiting_lora_adapters

    assert names() == ([], ["a", "b"])
    for _ in range(2):
        step = scheduled(engine)
        assert names() == (["a"], ["b"])
        engine.update(answer(engine, step))
    load_all(engine)
    scheduled(engine)
    assert names() == (["b"], [])


def test_a_request_that_waits_for_its_adapter_keeps_its_place() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add(CLIENT, adapted(1, A))
    engine.add(CLIENT, add(2))
    load_all(engine)
    assert new_ids(scheduled(engine)) == [1]


def test_an_adapter_that_cannot_be_used_fails_its_requests_alone() -> None:
    engine = make_engine()
    engine.add(CLIENT, adapted(1, A))
    engine.add(CLIENT, adapted(2, B))
    engine.take_adapters()
    engine.answered(AdapterLoaded(A.adapter_id, "r 64 is too large"))
    [refused] = [m for _, m in engine.take_outgoing() if isinstance(m, Refused)]
    assert refused.request_id == 1
    assert (refused.error.code, refused.error.param) == (ErrorCode.INVALID, "model")
    assert refused.error.message == "adapter 'a': r 64 is too large"
    assert load_all(engine) == [LoadAdapter(B)], "its turn is over"
    assert new_ids(scheduled(engine)) == [2]
    engine.add(CLIENT, adapted(3, A))
    engine.abort(CLIENT, [2])
    assert load_all(engine) == [UnloadAdapter(B.adapter_id), LoadAdapter(A)], "it is tried again"
    assert new_ids(scheduled(engine)) == [3]


def test_requests_are_refused_in_the_order_in_which_they_came() -> None:
    """No order depends on where objects are in memory: a simulated seed would not be reproduced."""
    engine = make_engine()
    for request_id in range(1, 17):
        assert engine.add(CLIENT, adapted(request_id, A)) is None
    engine.take_adapters()
    engine.answered(AdapterLoaded(A.adapter_id, "r 64 is too large"))
    assert list(refusals(engine)) == list(range(1, 17))


def test_no_more_than_max_loras_adapters_are_in_a_step() -> None:
    engine = make_engine(max_loras=2)
    for request_id, adapter in enumerate((A, B, C, A)):
        engine.add(CLIENT, adapted(request_id, adapter))
    assert load_all(engine) == [LoadAdapter(A), LoadAdapter(B)]
    step = scheduled(engine)
    assert {new.adapter_id for new in step.scheduled_new_reqs} == {A.adapter_id, B.adapter_id}
    assert load_all(engine) == []
    engine.update(answer(engine, step))
    engine.abort(CLIENT, [1])  # the only one of B
    assert load_all(engine) == [UnloadAdapter(B.adapter_id), LoadAdapter(C)]
    step = scheduled(engine)
    assert [new.adapter_id for new in step.scheduled_new_reqs] == [C.adapter_id]


def test_an_adapter_gets_its_turn_however_many_requests_come_for_another() -> None:
    engine = make_engine(max_num_seqs=4)
    engine.add(CLIENT, adapted(0, A, max_tokens=4))
    load_all(engine)
    engine.add(CLIENT, adapted(1, B, max_tokens=4))
    begun: list[int] = []
    for request_id in range(2, 40):  # one of A in every step, so that some always run
        engine.add(CLIENT, adapted(request_id, A, max_tokens=4))
        load_all(engine)
        if (step := engine.schedule()) is not None:
            begun += [new.adapter_id for new in step.scheduled_new_reqs]
            engine.update(answer(engine, step))
    assert begun.index(B.adapter_id) == 4, "four requests of A are taken"
    assert A.adapter_id in begun[6:], "it gets another turn"


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_turn_leaves_its_backlog_to_the_next_one_once_another_adapter_waits(policy: str) -> None:
    """It leaves requests that came before, too; what the policy puts first stays in the turn."""
    engine = make_engine(max_num_seqs=4, scheduling_policy=policy)
    for request_id in range(1, 21):
        request = adapted(request_id, A, max_tokens=4)
        engine.add(CLIENT, msgspec.structs.replace(request, priority=-request_id))
    load_all(engine)
    step: SchedulerOutput | None = scheduled(engine)
    first = list(range(1, 21)) if policy == "fcfs" else list(range(20, 0, -1))
    assert new_ids(step) == first[:4]
    engine.add(CLIENT, adapted(21, B, max_tokens=4))
    begun: list[int] = []
    while step is not None:
        engine.update(answer(engine, step))
        load_all(engine)
        step = engine.schedule()
        begun += new_ids(step)
    assert not engine.has_unfinished
    assert begun == [*first[4:8], 21, *first[8:]], "it gets its turn after four more requests"


def test_adapters_that_are_not_used_make_room_and_the_oldest_first() -> None:
    engine = make_engine(max_loras=1, max_cpu_loras=2)
    for request_id, adapter in enumerate((A, B, A, C)):
        engine.add(CLIENT, adapted(request_id, adapter, max_tokens=1))
        messages = load_all(engine)
        if adapter is C:
            assert messages == [UnloadAdapter(B.adapter_id), LoadAdapter(C)]
        engine.update(answer(engine, scheduled(engine)))


def test_the_next_workers_load_the_adapters_of_all_requests_again() -> None:
    engine = make_engine(max_loras=2)
    engine.add(CLIENT, adapted(1, A))
    load_all(engine)
    engine.update(answer(engine, scheduled(engine)))
    scheduled(engine)
    engine.add(CLIENT, add(2))
    engine.lose_workers()
    assert engine.take_adapters() == []
    engine.adopt_workers(FACTS)
    assert engine.take_adapters() == [LoadAdapter(A)]
    step = scheduled(engine)
    assert new_ids(step) == [2]
    engine.answered(AdapterLoaded(A.adapter_id))
    engine.update(answer(engine, step))
    [new] = scheduled(engine).scheduled_new_reqs
    assert new.req_id == 1
    assert len(new.token_ids) // 4 == 4, "its first output is kept"


def test_a_request_waits_for_both_its_grammar_and_its_adapter() -> None:
    word = Grammar(GrammarKind.REGEX, "[a-z]+")
    for is_grammar_first in (True, False):
        engine = make_engine()
        engine.add(CLIENT, adapted(1, A, grammar=word))
        for _ in range(2):  # the second time with new workers
            [grammar] = engine.take_grammars()
            engine.take_adapters()
            answers = [
                lambda e=engine, g=grammar: e.answered(GrammarCompiled(g.grammar_id)),
                lambda e=engine: e.answered(AdapterLoaded(A.adapter_id)),
            ]
            first, second = answers if is_grammar_first else answers[::-1]
            first()
            assert engine.schedule() is None
            second()
            assert new_ids(scheduled(engine)) == [1]
            engine.lose_workers()
            engine.adopt_workers(FACTS)


def test_a_suspect_that_waited_for_its_adapter_waits_for_its_trial() -> None:
    engine = make_engine()
    for i in range(4):
        engine.add(CLIENT, adapted(i, A, prompt=[5, 6, i]))
    load_all(engine)
    engine.update(answer(engine, scheduled(engine)))
    scheduled(engine)
    engine.lose_workers()
    engine.attribute_death()
    engine.adopt_workers(FACTS)
    load_all(engine)
    assert len(new_ids(scheduled(engine))) == 2, "one half is on trial"


@pytest.mark.parametrize("max_loras", [1, 2])
def test_a_suspect_that_waits_for_its_turn_holds_nothing_back(max_loras: int) -> None:
    """Its trial would hold the requests of the turns before its own, which would never end."""
    config = configure(enable_lora=True, max_loras=max_loras)
    engine = EngineCore(config)
    suspect = adapted(9, A, prompt=[5, 6, 9])
    marked = fingerprint(pack_token_ids([5, 6, 9]), suspect.sampling_params, A.adapter_id)
    engine.inherit_marks([Stage.ALONE, marked])
    engine.adopt_workers(FACTS)
    for number, adapter in enumerate((B, C)[:max_loras]):
        engine.add(CLIENT, adapted(number, adapter))
    load_all(engine)
    engine.add(CLIENT, suspect)
    for _ in range(100):
        load_all(engine)
        step = engine.schedule()
        if step is not None:
            engine.update(answer(engine, step))
        if not engine.has_unfinished:
            return
    raise AssertionError("requests wait for each other")


def test_no_more_loads_are_sent_than_a_link_may_queue() -> None:
    engine = make_engine(max_loras=10)
    adapters = [Adapter(str(i), f"/{i}", bytes([i + 1]) * 32) for i in range(10)]
    for number, adapter in enumerate(adapters):
        engine.add(CLIENT, adapted(number, adapter))
    sent = engine.take_adapters()
    for adapter in adapters:
        assert sent.pop(0) == LoadAdapter(adapter)
        assert len(sent) < MAX_SENT
        engine.answered(AdapterLoaded(adapter.adapter_id))
        sent += engine.take_adapters()


def test_a_client_may_have_an_adapter_loaded() -> None:
    engine = make_engine()
    engine.control(CLIENT, control(1, A))
    assert engine.take_adapters() == [LoadAdapter(A)]
    engine.lose_workers()
    engine.adopt_workers(FACTS)
    assert engine.take_adapters() == [LoadAdapter(A)], "the next workers answer"
    assert ended_controls(engine) == []
    engine.answered(AdapterLoaded(A.adapter_id))
    assert ended_controls(engine) == [(1, True, "")]
    engine.control(CLIENT, control(2, A))
    assert ended_controls(engine) == [(2, True, "")], "at once"
    engine.control(CLIENT, control(3, B))
    assert engine.take_adapters() == [UnloadAdapter(A.adapter_id), LoadAdapter(B)]
    engine.answered(AdapterLoaded(B.adapter_id, "wrong shapes"))
    assert ended_controls(engine) == [(3, False, "wrong shapes")]


def test_where_turns_take_all_places_an_adapter_is_only_checked() -> None:
    engine = make_engine()
    engine.add(CLIENT, adapted(1, A))
    load_all(engine)
    scheduled(engine)
    engine.control(CLIENT, control(1, B))
    assert engine.take_adapters() == [LoadAdapter(B, keeps=False)]
    engine.answered(AdapterLoaded(B.adapter_id))
    assert ended_controls(engine) == [(1, True, "")]
    engine.abort(CLIENT, [1])
    engine.add(CLIENT, adapted(2, B))
    assert load_all(engine) == [UnloadAdapter(A.adapter_id), LoadAdapter(B)]


def test_adapters_whose_ids_are_equal_are_not_taken_for_each_other() -> None:
    """An id has 53 bits of the digest, of which a pair of files with equal ones can be made."""
    engine = make_engine()
    other = Adapter("other", "/other", A.digest[:8] + b"z" * 24)
    assert other.adapter_id == A.adapter_id
    engine.add(CLIENT, adapted(1, A))
    refused = engine.add(CLIENT, adapted(2, other))
    assert refused is not None
    assert "its id is that of an adapter with other contents" in refused.error.message
    engine.control(CLIENT, control(3, other))
    [(number, ok, _)] = ended_controls(engine)
    assert (number, ok) == (3, False)
    roots = {
        prefix_root(
            Request(
                1,
                [5],
                SamplingParams(),
                adapter_id=adapter.adapter_id,
                adapter_digest=adapter.digest,
            )
        )
        for adapter in (A, other)
    }
    assert len(roots) == 2, "cached prefixes, which outlive the adapter, differ"


def test_an_unloaded_adapter_stays_while_requests_have_it() -> None:
    engine = make_engine()
    engine.add(CLIENT, adapted(1, A))
    load_all(engine)
    engine.control(CLIENT, control(1, A, "unload_adapter"))
    assert ended_controls(engine) == [(1, True, "")]
    assert engine.take_adapters() == []
    assert new_ids(scheduled(engine)) == [1]
    engine.abort(CLIENT, [1])
    assert engine.take_adapters() == [UnloadAdapter(A.adapter_id)]


def test_an_engine_without_adapters_refuses_them() -> None:
    engine = EngineCore(configure())
    engine.adopt_workers(FACTS)
    refused = engine.add(CLIENT, adapted(1, A))
    assert refused is not None
    assert refused.error.param == "model"
    assert "enable_lora" in refused.error.message
    engine.control(CLIENT, control(1, A))
    [(_, ok, error)] = ended_controls(engine)
    assert not ok
    assert "enable_lora" in error


def test_loads_without_requests_are_bounded_and_forgotten_with_their_client() -> None:
    engine = make_engine()
    for number in range(MAX_LOADS + 1):
        digest = number.to_bytes(2, "little") * 16
        engine.control(CLIENT, control(number, Adapter("x", "/x", digest)))
    [refused] = [
        message for _, message in engine.take_outgoing() if isinstance(message, ControlDone)
    ]
    assert (refused.number, refused.ok, refused.code) == (MAX_LOADS, False, ErrorCode.OVERLOADED)
    engine.drop_client(CLIENT)
    engine.control(CLIENT, control(99, D))
    for _ in range(3):
        load_all(engine)
    assert ended_controls(engine) == [(99, True, "")]
