"""Requests with an adapter wait until it is loaded and has its turn, and keep their places."""

import msgspec
import pytest

from core_proc.engine import EngineCore
from core_proc.kv.kv_cache import prefix_root
from core_proc.preparation.adapters import MAX_LOADS, MAX_SENT
from core_proc.recovery.adapter_trials import MAX_KNOWN, REFUSED_POINTS, AdapterTrials
from core_proc.recovery.fingerprints import fingerprint
from core_proc.recovery.quarantine import Stage
from core_proc.request import Request
from protocol.adapters import Adapter
from protocol.api_core import AddRequest, Control, ControlAction, ControlDone, ErrorCode, Refused
from protocol.config.settings import configure
from protocol.core_worker import (
    AdapterLoaded,
    GrammarCompiled,
    LoadAdapter,
    ModelRunnerOutput,
    SchedulerOutput,
    UnloadAdapter,
)
from protocol.message import pack_token_ids
from protocol.sampling import Grammar, GrammarKind, SamplingParams
from tests.core.engine_bench import CLIENT, FACTS, add, answer, scheduled

A, B, C, D = (Adapter(name, f"/adapters/{name}", name.encode() * 32) for name in "abcd")


def make_engine(max_loras: int = 1, max_cpu_loras: int | None = None, **more: object) -> EngineCore:
    config = configure(enable_lora=True, max_loras=max_loras, max_cpu_loras=max_cpu_loras, **more)
    engine = EngineCore(config)
    engine.adopt_workers(FACTS)
    return engine


def adapted(request_id: int, adapter: Adapter, **more: object) -> AddRequest:
    base = add(request_id, **more)  # type: ignore[arg-type]
    fields = {name: getattr(base, name) for name in base.__struct_fields__}
    return AddRequest(**{**fields, "adapter": adapter})


def names(step: SchedulerOutput | None) -> list[int]:
    return [] if step is None else [new.req_id for new in step.scheduled_new_reqs]


def load_all(engine: EngineCore) -> list[LoadAdapter | UnloadAdapter]:
    """Answer all loads that are sent; returns the messages."""
    messages = engine.take_adapters()
    for message in messages:
        if isinstance(message, LoadAdapter):
            engine.answered(AdapterLoaded(message.adapter.adapter_id))
    return messages


def test_a_request_runs_once_its_adapter_is_loaded_and_others_do_not_wait() -> None:
    engine = make_engine()
    engine.add(CLIENT, adapted(1, A))
    engine.add(CLIENT, add(2))
    engine.add(CLIENT, adapted(3, A))
    assert engine.take_adapters() == [LoadAdapter(A)]
    assert engine.take_adapters() == []
    step = scheduled(engine)
    assert names(step) == [2]
    engine.update(answer(engine, step))
    engine.answered(AdapterLoaded(A.adapter_id))
    step = scheduled(engine)
    assert names(step) == [1, 3]
    assert {new.adapter_id for new in step.scheduled_new_reqs} == {A.adapter_id}
    engine.update(answer(engine, step))
    engine.add(CLIENT, adapted(4, A))
    assert engine.take_adapters() == []
    assert names(scheduled(engine)) == [4]


def test_a_request_that_waits_for_its_adapter_keeps_its_place() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add(CLIENT, adapted(1, A))
    engine.add(CLIENT, add(2))
    load_all(engine)
    assert names(scheduled(engine)) == [1]


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
    assert names(scheduled(engine)) == [2]
    engine.add(CLIENT, adapted(3, A))
    engine.abort(CLIENT, [2])
    assert load_all(engine) == [UnloadAdapter(B.adapter_id), LoadAdapter(A)], "it is tried again"
    assert names(scheduled(engine)) == [3]


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
    """Also requests that came before; what the policy puts first is in the turn."""
    engine = make_engine(max_num_seqs=4, scheduling_policy=policy)
    for request_id in range(1, 21):
        request = adapted(request_id, A, max_tokens=4)
        engine.add(CLIENT, msgspec.structs.replace(request, priority=-request_id))
    load_all(engine)
    step: SchedulerOutput | None = scheduled(engine)
    first = list(range(1, 21)) if policy == "fcfs" else list(range(20, 0, -1))
    assert names(step) == first[:4]
    engine.add(CLIENT, adapted(21, B, max_tokens=4))
    begun: list[int] = []
    while step is not None:
        engine.update(answer(engine, step))
        load_all(engine)
        step = engine.schedule()
        begun += names(step)
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
    assert names(step) == [2]
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
            assert names(scheduled(engine)) == [1]
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
    assert len(names(scheduled(engine))) == 2, "one half is on trial"


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


def die(engine: EngineCore, *, is_fault: bool = True, in_step: bool = False) -> None:
    """Let the workers die, of a fault or of a signal from outside; others take their place."""
    engine.lose_workers()
    engine.attribute_death(is_fault=is_fault, in_step=in_step)
    engine.adopt_workers(FACTS)


def refusals(engine: EngineCore) -> dict[int, ErrorCode]:
    mail = [message for _, message in engine.take_outgoing() if isinstance(message, Refused)]
    return {message.request_id: message.error.code for message in mail}


def test_an_adapter_whose_load_kills_workers_is_refused_and_others_continue() -> None:
    """The first death leaves two suspects, each of which is loaded alone then."""
    engine = make_engine(max_loras=2)
    engine.add(CLIENT, adapted(1, A))
    engine.add(CLIENT, adapted(2, B))
    engine.add(CLIENT, add(3))
    engine.control(CLIENT, control(4, B))
    assert engine.take_adapters() == [LoadAdapter(A), LoadAdapter(B)]
    scheduled(engine)
    die(engine)
    assert engine.take_adapters() == [LoadAdapter(A)]
    assert engine.schedule() is None, "a death is that of the load"
    engine.answered(AdapterLoaded(A.adapter_id))
    assert names(scheduled(engine)) == [1, 3]
    assert engine.take_adapters() == [], "a step is in flight"
    assert engine.schedule() is None
    engine.update(answer_oldest(engine))
    assert engine.take_adapters() == [LoadAdapter(B)]
    assert engine.schedule() is None
    assert refusals(engine) == {}
    die(engine)
    mail = engine.take_outgoing()
    [refused] = [message for _, message in mail if isinstance(message, Refused)]
    assert (refused.request_id, refused.error.code) == (2, ErrorCode.QUARANTINED)
    assert "adapter 'b': workers died when they loaded it" in refused.error.message
    [answered] = [message for _, message in mail if isinstance(message, ControlDone)]
    assert (answered.number, answered.code) == (4, ErrorCode.QUARANTINED)
    assert engine.take_adapters() == [LoadAdapter(A)], "as always: it is not a suspect"
    engine.answered(AdapterLoaded(A.adapter_id))
    assert names(scheduled(engine)) == [1, 3]
    refused_now = engine.add(CLIENT, adapted(5, B))
    assert refused_now is not None
    assert refused_now.error.code is ErrorCode.QUARANTINED
    changed = Adapter("b", B.path, b"B" * 32)
    assert engine.add(CLIENT, adapted(6, changed)) is None, "other files are another adapter"


def answer_oldest(engine: EngineCore) -> ModelRunnerOutput:
    assert engine.running is not None
    step_id, sampling = engine.running.scheduler.in_flight[0]
    return ModelRunnerOutput(step_id, [7] * len(sampling))


def test_one_signal_from_outside_during_a_load_delays_no_other_request() -> None:
    """However often workers are killed, as long as a load ends in between."""
    engine = make_engine()
    engine.add(CLIENT, add(1, max_tokens=1000))
    for number in range(2, 12):
        engine.add(CLIENT, adapted(number, A))
        assert engine.take_adapters() == [LoadAdapter(A)]
        assert names(scheduled(engine)) == [1]
        die(engine, is_fault=False)
        load_all(engine)
        assert names(scheduled(engine)) == [1, number]
        engine.abort(CLIENT, [number])
        die(engine, is_fault=False, in_step=True)
    assert refusals(engine) == {}


@pytest.mark.parametrize(
    ("causes", "num_deaths"),
    [([True], 2), ([False], 4), ([True, False], 3), ([False, True], 3), ([False, False, True], 3)],
)
def test_deaths_during_a_load_are_bounded_whatever_their_causes(
    causes: list[bool], num_deaths: int
) -> None:
    """The last cause is that of all further deaths; innocent adapters and requests end well."""
    engine = make_engine(max_loras=2)
    engine.add(CLIENT, adapted(1, A))
    engine.add(CLIENT, adapted(2, B))
    engine.add(CLIENT, add(3))
    died = 0
    for _ in range(100):
        messages = engine.take_adapters()
        if LoadAdapter(A) in messages:
            is_alone = messages == [LoadAdapter(A)]
            die(engine, is_fault=causes[min(died, len(causes) - 1)])
            died += 1
            continue
        for message in messages:
            if isinstance(message, LoadAdapter):
                engine.answered(AdapterLoaded(message.adapter.adapter_id))
        if (step := engine.schedule()) is not None:
            engine.update(answer(engine, step))
    assert died == num_deaths
    assert is_alone, "the last one"
    assert refusals(engine) == {1: ErrorCode.QUARANTINED}
    assert not engine.has_unfinished


def kill_until_refused(engine: EngineCore, adapter: Adapter, *, is_fault: bool = False) -> int:
    """Let the workers die in each load of an adapter; returns how many did."""
    died = 0
    while LoadAdapter(adapter) in engine.take_adapters():
        die(engine, is_fault=is_fault)
        died += 1
    return died


def test_a_refused_adapter_is_tried_again_when_it_is_loaded_again() -> None:
    engine = make_engine()
    engine.add(CLIENT, adapted(1, A))
    assert kill_until_refused(engine, A) == 4
    engine.now += 1e6
    refused = engine.add(CLIENT, adapted(2, A))
    assert refused is not None
    assert refused.error.code is ErrorCode.QUARANTINED
    engine.take_outgoing()
    for number, is_fault, num_deaths in ((3, True, 1), (4, False, 2)):
        engine.control(CLIENT, control(number, A))
        assert kill_until_refused(engine, A, is_fault=is_fault) == num_deaths
        assert [(n, ok) for n, ok, _ in done(engine)] == [(number, False)]
    engine.control(CLIENT, control(5, A))
    engine.add(CLIENT, add(6))
    assert engine.take_adapters() == [LoadAdapter(A)]
    assert engine.schedule() is None, "a suspect is loaded alone"
    engine.answered(AdapterLoaded(A.adapter_id))
    assert done(engine) == [(5, True, "")]
    assert engine.add(CLIENT, adapted(7, A)) is None
    assert len(names(scheduled(engine))) == 2


def succeed(engine: EngineCore, *, is_explained: bool) -> EngineCore:
    """Let the core die, together with its workers; their death is explained to the next one."""
    records = engine.take_loads()
    engine = EngineCore(engine._config)
    engine.inherit_loads(records or [])
    if is_explained:
        engine.attribute_death(is_fault=False)
    engine.adopt_workers(FACTS)
    return engine


def test_a_successor_core_knows_suspects_and_what_is_refused() -> None:
    """Also if core and workers die together, in each load."""
    engine, died = make_engine(), 0
    for request_id in range(20):
        refused = engine.add(CLIENT, adapted(request_id, A))
        if refused is not None:
            break
        assert engine.take_adapters() == [LoadAdapter(A)]
        engine = succeed(engine, is_explained=True)
        died += 1
    assert died == 4
    assert refused is not None
    assert refused.error.code is ErrorCode.QUARANTINED
    engine = succeed(engine, is_explained=False)
    assert engine.add(CLIENT, adapted(30, A)) is not None
    engine.control(CLIENT, control(31, A))
    load_all(engine)
    assert engine.add(CLIENT, adapted(32, A)) is None


def test_cores_that_die_alone_make_no_suspect() -> None:
    engine = make_engine()
    for request_id in range(20):
        assert engine.add(CLIENT, adapted(request_id, A)) is None
        engine.add(CLIENT, add(100 + request_id))
        assert engine.take_adapters() == [LoadAdapter(A)]
        assert engine.schedule() is not None
        engine = succeed(engine, is_explained=False)


def test_a_cause_that_is_known_late_does_not_count_against_a_load_that_has_ended() -> None:
    engine = make_engine()
    engine.add(CLIENT, adapted(1, A))
    engine.add(CLIENT, add(2))
    engine.take_adapters()
    engine.lose_workers()
    engine.adopt_workers(FACTS)
    load_all(engine)
    engine.attribute_death()
    engine.lose_workers()
    engine.adopt_workers(FACTS)
    assert engine.take_adapters() == [LoadAdapter(A)]
    assert names(scheduled(engine)) == [2], "it is not a suspect"


def test_only_a_death_in_a_load_alone_refuses_an_adapter() -> None:
    """The cause of a first death is known when the next workers load both beside a step."""
    engine = make_engine(max_loras=2)
    engine.add(CLIENT, adapted(1, A))
    engine.add(CLIENT, adapted(2, B))
    engine.add(CLIENT, add(3))
    engine.take_adapters()
    engine.lose_workers()
    engine.adopt_workers(FACTS)
    assert engine.take_adapters() == [LoadAdapter(A), LoadAdapter(B)]
    assert names(scheduled(engine)) == [3]
    engine.attribute_death(in_step=False)
    die(engine)
    assert refusals(engine) == {}
    assert engine.take_adapters() == [LoadAdapter(A)]
    die(engine)
    assert refusals(engine) == {1: ErrorCode.QUARANTINED}


def test_the_number_of_adapters_that_are_remembered_is_bounded() -> None:
    trials = AdapterTrials()
    for adapter_id in range(1, MAX_KNOWN + 2):
        for _ in range(REFUSED_POINTS):
            trials.begin(adapter_id, is_alone=True)
            trials.workers_lost()
            trials.attribute_death(is_fault=False)
        assert trials.refuses(adapter_id)
    assert not trials.refuses(1), "the first one"
    records = trials.take_records()
    assert records is not None
    assert len(records) == MAX_KNOWN
    successor = AdapterTrials()
    successor.inherit(records)
    assert all(successor.refuses(adapter_id) for adapter_id in range(2, MAX_KNOWN + 2))


def test_a_request_and_not_the_adapter_that_was_loaded_meanwhile_is_found() -> None:
    """While the request is searched for, nothing is computed during a load."""
    engine = make_engine()
    engine.add(CLIENT, add(1, prompt=[6, 6, 6]))
    engine.add(CLIENT, adapted(2, A))
    deaths = 0
    for _ in range(200):
        messages = engine.take_adapters()
        step = engine.schedule()
        if step is not None and 1 in names(step):
            deaths += 1
            die(engine, in_step=True)
            continue
        for message in messages:
            if isinstance(message, LoadAdapter):
                engine.answered(AdapterLoaded(message.adapter.adapter_id))
        if step is not None:
            engine.update(answer(engine, step))
        if not engine.has_unfinished:
            break
    assert refusals(engine) == {1: ErrorCode.QUARANTINED}
    assert deaths <= 4
    assert not engine.has_unfinished


def test_no_adapter_is_loaded_during_steps_while_a_crashing_request_is_searched() -> None:
    engine = make_engine()
    for number in range(4):
        engine.add(CLIENT, add(number, prompt=[5, 6, number]))
    scheduled(engine)
    die(engine, in_step=True)
    step = scheduled(engine)
    engine.add(CLIENT, adapted(9, A))
    assert engine.take_adapters() == []
    assert engine.schedule() is None
    engine.update(answer(engine, step))
    assert engine.take_adapters() == [LoadAdapter(A)]
    assert engine.schedule() is None
    engine.answered(AdapterLoaded(A.adapter_id))
    assert engine.schedule() is not None


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


def done(engine: EngineCore) -> list[tuple[int, bool, str]]:
    mail = [message for _, message in engine.take_outgoing() if isinstance(message, ControlDone)]
    return [(message.number, message.ok, message.error) for message in mail]


def control(number: int, adapter: Adapter, action: str = "load_adapter") -> Control:
    return Control(number, ControlAction(action), adapter=adapter)


def test_a_client_may_have_an_adapter_loaded() -> None:
    engine = make_engine()
    engine.control(CLIENT, control(1, A))
    assert engine.take_adapters() == [LoadAdapter(A)]
    engine.lose_workers()
    engine.adopt_workers(FACTS)
    assert engine.take_adapters() == [LoadAdapter(A)], "the next workers answer"
    assert done(engine) == []
    engine.answered(AdapterLoaded(A.adapter_id))
    assert done(engine) == [(1, True, "")]
    engine.control(CLIENT, control(2, A))
    assert done(engine) == [(2, True, "")], "at once"
    engine.control(CLIENT, control(3, B))
    assert engine.take_adapters() == [UnloadAdapter(A.adapter_id), LoadAdapter(B)]
    engine.answered(AdapterLoaded(B.adapter_id, "wrong shapes"))
    assert done(engine) == [(3, False, "wrong shapes")]


def test_where_turns_take_all_places_an_adapter_is_only_checked() -> None:
    engine = make_engine()
    engine.add(CLIENT, adapted(1, A))
    load_all(engine)
    scheduled(engine)
    engine.control(CLIENT, control(1, B))
    assert engine.take_adapters() == [LoadAdapter(B, keeps=False)]
    engine.answered(AdapterLoaded(B.adapter_id))
    assert done(engine) == [(1, True, "")]
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
    [(number, ok, _)] = done(engine)
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
    assert done(engine) == [(1, True, "")]
    assert engine.take_adapters() == []
    assert names(scheduled(engine)) == [1]
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
    [(_, ok, error)] = done(engine)
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
    assert done(engine) == [(99, True, "")]
