"""Requests with a grammar wait until the workers have compiled it, and keep their places."""

from collections.abc import Iterable

import msgspec
import pytest

from core_proc.engine import EngineCore
from core_proc.preparation import grammars
from core_proc.preparation.grammars import MAX_COMPILING
from core_proc.request import Request, RequestStatus
from protocol.api_core import AddRequest, ErrorCode, Refused
from protocol.core_worker import (
    CompileGrammar,
    GrammarCompiled,
    GrammarFault,
    SchedulerOutput,
)
from protocol.sampling import FinishReason, Grammar, GrammarKind, SamplingParams
from tests.core.engine_bench import CLIENT, FACTS, add, answer, make_engine, run_all, scheduled

WORD = Grammar(GrammarKind.REGEX, "[a-z]+")
ORIGIN = f"client {CLIENT.hex()}"
"""The client itself: its requests state no origin."""
EOS = FACTS.eos_token_ids[0]


def constrained(request_id: int, grammar: Grammar = WORD, **more: object) -> AddRequest:
    return add(request_id, grammar=grammar, **more)  # type: ignore[arg-type]


def sent(engine: EngineCore) -> list[Grammar]:
    return [message.grammar for message in engine.take_grammars()]


def grammars_of(name: str, number: int) -> list[Grammar]:
    return [Grammar(GrammarKind.REGEX, f"{name}{{{i}}}") for i in range(number)]


def names(step: SchedulerOutput) -> list[int]:
    return [new.req_id for new in step.scheduled_new_reqs]


def refusals(engine: EngineCore) -> list[Refused]:
    return [message for _, message in engine.take_outgoing() if isinstance(message, Refused)]


def requests(engine: EngineCore) -> Iterable[Request]:
    return engine.scheduler.requests.values()


def test_the_workers_get_a_grammar_once_and_its_requests_run_when_it_is_ready() -> None:
    engine = make_engine()
    engine.add(CLIENT, constrained(1))
    engine.add(CLIENT, add(2))
    engine.add(CLIENT, constrained(3))
    [message] = engine.take_grammars()
    assert message == CompileGrammar(message.grammar_id, WORD, origin=ORIGIN)
    assert engine.take_grammars() == []
    step = scheduled(engine)
    assert names(step) == [2], "others do not wait for it"
    engine.update(answer(engine, step))
    engine.answered(GrammarCompiled(message.grammar_id))
    step = scheduled(engine)
    assert names(step) == [1, 3]
    assert [new.sampling_params.grammar for new in step.scheduled_new_reqs] == [WORD] * 2
    engine.update(answer(engine, step))
    engine.add(CLIENT, constrained(4))
    assert engine.take_grammars() == []
    assert names(scheduled(engine)) == [4]


def test_a_request_that_waits_for_its_grammar_keeps_its_place() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add(CLIENT, constrained(1))
    engine.add(CLIENT, add(2))
    [message] = engine.take_grammars()
    engine.answered(GrammarCompiled(message.grammar_id))
    assert names(scheduled(engine)) == [1]


def test_a_grammar_that_cannot_be_used_fails_its_requests_alone() -> None:
    engine = make_engine()
    engine.add(CLIENT, constrained(1))
    engine.add(CLIENT, constrained(2))
    engine.add(CLIENT, add(3, max_tokens=1))
    [message] = engine.take_grammars()
    engine.answered(GrammarCompiled(message.grammar_id, "no such rule"))
    found = [(refused.request_id, refused.error) for refused in refusals(engine)]
    assert [request_id for request_id, _ in found] == [1, 2]
    for _, error in found:
        assert (error.code, error.param) == (ErrorCode.INVALID, "grammar")
        assert error.message == "no such rule"
    assert [row.request_id for _, row in run_all(engine)] == [3]
    engine.add(CLIENT, constrained(4))
    assert sent(engine) == [WORD], "it is tried again"


def test_the_next_workers_compile_the_grammars_of_all_requests_again() -> None:
    engine = make_engine(max_num_seqs=2)
    engine.add(CLIENT, constrained(1))
    [message] = engine.take_grammars()
    engine.answered(GrammarCompiled(message.grammar_id))
    engine.update(answer(engine, scheduled(engine)))
    scheduled(engine)
    engine.add(CLIENT, add(2))
    engine.lose_workers()
    assert engine.take_grammars() == []
    engine.adopt_workers(FACTS)
    expected = CompileGrammar(message.grammar_id, WORD, is_proven=True, origin=ORIGIN)
    assert engine.take_grammars() == [expected]
    step = scheduled(engine)
    assert names(step) == [2]
    engine.answered(GrammarCompiled(message.grammar_id))
    engine.update(answer(engine, step))
    step = scheduled(engine)
    [new] = step.scheduled_new_reqs
    assert new.req_id == 1
    assert len(new.token_ids) // 4 == 4, "its first output is kept"


def test_the_grammar_of_a_request_that_has_run_is_not_proven_again() -> None:
    engine = make_engine()
    engine.add(CLIENT, constrained(1, outputs=[7], resent=True))
    [message] = engine.take_grammars()
    assert message.is_proven


def test_grammars_that_no_request_waits_for_are_not_sent() -> None:
    engine = make_engine()
    engine.add(CLIENT, constrained(1))
    engine.abort(CLIENT, [1])
    assert engine.take_grammars() == []
    engine.add(CLIENT, constrained(2))
    [message] = engine.take_grammars()
    engine.abort(CLIENT, [2])
    engine.answered(GrammarCompiled(message.grammar_id))
    engine.answered(GrammarCompiled(99))
    assert not engine.has_unfinished


def test_few_are_under_way_and_past_a_bound_requests_are_refused() -> None:
    engine = make_engine(max_num_waiting=10_000)
    many = grammars_of("a", 100)
    share, window = -(-MAX_COMPILING // 3), -(-grammars._MAX_SENT // 3)
    for i, grammar in enumerate(many[:share]):
        assert engine.add(CLIENT, constrained(i, grammar)) is None
    refused = engine.add(CLIENT, constrained(99, many[-1]))
    assert refused is not None
    assert refused.error.code is ErrorCode.OVERLOADED
    assert engine.add(CLIENT, constrained(100, many[0])) is None, "known ones are accepted"
    assert engine.add(CLIENT, constrained(101, many[-1], resent=True)) is None
    first = engine.take_grammars()
    assert len(first) == window
    assert engine.take_grammars() == []
    engine.answered(GrammarCompiled(first[0].grammar_id))
    assert len(engine.take_grammars()) == 1


def test_a_client_with_many_grammars_leaves_room_for_others_and_their_turns() -> None:
    engine = make_engine(max_num_waiting=10_000)
    mine, others = grammars_of("a", 200), grammars_of("b", 4)

    def add_as(origin: str, tenant: str, request_id: int, grammar: Grammar) -> Refused | None:
        options = {"origin": origin, "tenant": tenant}
        request = msgspec.structs.replace(constrained(request_id, grammar), **options)
        return engine.add(CLIENT, request)

    refused = [add_as("a", str(i % 50), i, grammar) for i, grammar in enumerate(mine)]
    num_taken = refused.count(None)
    assert 0 < num_taken <= MAX_COMPILING // 2, "its tenants share what it has"
    assert sent(engine) == mine[: grammars._MAX_SENT // 2]
    assert [add_as("b", "", 1000 + i, grammar) for i, grammar in enumerate(others)] == [None] * 4
    assert sent(engine) == others, "they are sent before those that came first"
    assert add_as("c", "", 2000, mine[num_taken - 1]) is None
    assert sent(engine) == [mine[num_taken - 1]], "it is compiled in the turn of the second client"


def constrained_of(origin: str, request_id: int) -> AddRequest:
    return msgspec.structs.replace(constrained(request_id), origin=origin, tenant=origin)


def busy(engine: EngineCore, message: CompileGrammar) -> list[int | None]:
    """Answer that the share of the grammar's client is used up; the requests that this refuses."""
    engine.answered(GrammarCompiled(message.grammar_id, "used up", GrammarFault.BUSY))
    return [refused.request_id for refused in refusals(engine)]


def test_a_client_whose_share_is_used_up_has_no_request_of_another_refused() -> None:
    """They wait for the same grammar, which is sent again in the turn of the other one."""
    engine = make_engine()
    for request_id, origin in enumerate("aab"):
        engine.add(CLIENT, constrained_of(origin, request_id))
    [first] = engine.take_grammars()
    assert first.origin == "a"
    engine.add(CLIENT, constrained_of("c", 3))
    assert busy(engine, first) == [0, 1]
    [second] = engine.take_grammars()
    assert second.grammar == WORD
    assert busy(engine, second) == [{"b": 2, "c": 3}[second.origin]]
    [third] = engine.take_grammars()
    assert {second.origin, third.origin} == {"b", "c"}
    engine.answered(GrammarCompiled(third.grammar_id))
    assert engine.take_grammars() == []
    step = scheduled(engine)
    assert len(names(step)) == 1
    engine.update(answer(engine, step))
    places = engine.grammars._unproven
    assert places._num_taken == 0
    engine.add(CLIENT, constrained_of("a", 4))
    assert len(names(scheduled(engine))) == 1, "it is ready"


def test_tenants_of_one_client_do_not_take_all_turns_of_a_grammar_of_others() -> None:
    """The first client has as many grammars under way as it may, so its turns bring it nothing."""
    engine = make_engine(max_num_waiting=10_000)

    def add_as(origin: str, tenant: str, request_id: int, grammar: Grammar) -> None:
        options = {"origin": origin, "tenant": tenant}
        request = msgspec.structs.replace(constrained(request_id, grammar), **options)
        assert engine.add(CLIENT, request) is None

    for i, grammar in enumerate(grammars_of("a", grammars._MAX_SENT)):
        add_as("a", str(i), i, grammar)
    assert len(sent(engine)) == grammars._MAX_SENT // 2
    for i in range(2 * grammars._MAX_WAITING):
        add_as("a", f"many {i}", 1000 + i, WORD)
    assert sent(engine) == []
    add_as("b", "", 2000, WORD)
    assert sent(engine) == [WORD]


def test_a_grammar_without_requests_of_others_is_forgotten_with_its_refusal() -> None:
    engine = make_engine()
    engine.add(CLIENT, constrained_of("a", 1))
    engine.add(CLIENT, constrained_of("b", 2))
    [message] = engine.take_grammars()
    engine.abort(CLIENT, [2])
    assert busy(engine, message) == [1]
    assert engine.take_grammars() == []
    assert not engine.grammars._entries
    assert engine.grammars._unproven._num_taken == 0


def test_grammars_that_were_proven_take_no_places_of_new_ones() -> None:
    engine = make_engine(max_num_waiting=10_000, max_num_seqs=256)
    old, new = grammars_of("a", 200), grammars_of("b", 1)
    for i, grammar in enumerate(old):
        engine.add(CLIENT, constrained(i, grammar))
        [message] = engine.take_grammars()
        engine.answered(GrammarCompiled(message.grammar_id))
    engine.lose_workers()
    engine.adopt_workers(FACTS)
    assert engine.add(CLIENT, constrained(1000, new[0])) is None


def test_grammars_that_end_unsent_give_their_places_back() -> None:
    engine = make_engine(max_num_waiting=10_000)
    for i, grammar in enumerate(grammars_of("a", 1000)):
        assert engine.add(CLIENT, constrained(i, grammar)) is None
        engine.abort(CLIENT, [i])
    assert len(engine.grammars._entries) <= MAX_COMPILING


def test_idle_grammars_are_forgotten() -> None:
    engine = make_engine()
    for i in range(1000):
        engine.add(CLIENT, constrained(i, Grammar(GrammarKind.REGEX, f"a{{{i}}}")))
        [message] = engine.take_grammars()
        engine.answered(GrammarCompiled(message.grammar_id))
        engine.abort(CLIENT, [i])
    known = engine.grammars
    assert len(known._entries) == len(known._by_id) <= 2 * grammars.MAX_IDLE + 1


def test_the_end_of_a_grammar_ends_a_request_that_ignores_eos() -> None:
    engine = make_engine()
    engine.add(CLIENT, constrained(1, ignore_eos=True))
    [message] = engine.take_grammars()
    engine.answered(GrammarCompiled(message.grammar_id))
    outputs = engine.update(answer(engine, scheduled(engine), EOS))
    [row] = outputs[CLIENT].outputs
    assert (row.finish_reason, row.stop_token_id) == (FinishReason.STOP, None)


def test_a_suspect_that_waited_for_its_grammar_waits_for_its_trial() -> None:
    engine = make_engine()
    for i in range(4):
        engine.add(CLIENT, constrained(i, prompt=[5, 6, i]))
    [message] = engine.take_grammars()
    engine.answered(GrammarCompiled(message.grammar_id))
    engine.update(answer(engine, scheduled(engine)))
    scheduled(engine)
    engine.lose_workers()
    engine.attribute_death()
    engine.adopt_workers(FACTS)
    [message] = engine.take_grammars()
    engine.answered(GrammarCompiled(message.grammar_id))
    assert len(names(scheduled(engine))) == 2, "one half is on trial"
    held = [r for r in requests(engine) if r.status is RequestStatus.WAITING_FOR_TRIAL]
    assert len(held) == 2


def test_a_request_on_hold_waits_for_its_grammar_after_the_next_death() -> None:
    """Its trial may be over before the second successor has compiled the grammar."""
    engine = make_engine()
    for i in range(4):
        engine.add(CLIENT, constrained(i, prompt=[5, 6, i]))
    [message] = engine.take_grammars()
    ready = GrammarCompiled(message.grammar_id)
    engine.answered(ready)
    engine.update(answer(engine, scheduled(engine)))
    scheduled(engine)
    engine.lose_workers()
    engine.attribute_death()
    engine.adopt_workers(FACTS)
    assert len(engine.take_grammars()) == 1
    engine.answered(ready)
    scheduled(engine)
    engine.lose_workers()  # by a signal from outside: the search goes on
    engine.adopt_workers(FACTS)
    assert len(engine.take_grammars()) == 1
    assert {r.status for r in requests(engine)} == {RequestStatus.WAITING_FOR_GRAMMAR}
    assert engine.schedule() is None
    engine.answered(ready)
    step = scheduled(engine)
    assert len(names(step)) == 2, "the same half is on trial"
    outputs = engine.update(answer(engine, step))
    rows = [*outputs[CLIENT].outputs, *(row for _, row in run_all(engine))]
    assert {row.request_id for row in rows if row.finish_reason} == set(range(4))


def test_grammars_of_one_step_fit_into_a_frame() -> None:
    engine = make_engine(max_num_seqs=256)
    large = Grammar(GrammarKind.REGEX, "\N{SNOWMAN}" * 200_000)
    for i in range(64):
        engine.add(CLIENT, constrained(i, large))
    [message] = engine.take_grammars()
    engine.answered(GrammarCompiled(message.grammar_id))
    assert 1 <= len(names(scheduled(engine))) <= 16 * 2**20 // 600_000


def test_params_with_a_grammar_are_hashable_and_equal_by_value() -> None:
    assert SamplingParams(grammar=WORD) == SamplingParams(
        grammar=Grammar(GrammarKind.REGEX, "[a-z]+")
    )
    assert len({WORD, Grammar(GrammarKind.REGEX, "[a-z]+")}) == 1


@pytest.mark.parametrize(
    ("fault", "code", "param"),
    [
        (GrammarFault.WRONG, ErrorCode.INVALID, "grammar"),
        (GrammarFault.BUSY, ErrorCode.OVERLOADED, None),
        (GrammarFault.BROKEN, ErrorCode.ENGINE_FAILED, None),
    ],
)
def test_only_the_fault_of_a_grammar_is_an_error_of_its_request(
    fault: GrammarFault, code: ErrorCode, param: str | None
) -> None:
    """The others may be over when the request is sent again."""
    engine = make_engine()
    engine.add(CLIENT, constrained(1))
    [message] = engine.take_grammars()
    engine.answered(GrammarCompiled(message.grammar_id, "no", fault))
    [refused] = refusals(engine)
    assert (refused.error.code, refused.error.param) == (code, param)
