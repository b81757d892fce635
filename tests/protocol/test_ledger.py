"""The ledger delivers exactly once by index, if outputs are repeated, missing or contradictory."""

import random

import msgspec
import pytest

from protocol.api_core import (
    PACKED_FROM_TOKENS,
    AddRequest,
    ErrorCode,
    RequestOutput,
    encode_add,
)
from protocol.client.errors import RequestFailed
from protocol.client.ledger import REPAIR_MESSAGES_MAX, Ledger, OpenLimits, check_request
from protocol.core_worker import PromptLogprobs, TokenLogprobs
from protocol.message import MAX_TOKEN_IDS
from protocol.model_facts import ModelFacts
from protocol.sampling import FinishReason, SamplingParams


def ledger_with(request_id: int = 1, max_open: int = 10) -> Ledger:
    ledger = Ledger(OpenLimits(max_open))
    ledger.accept(AddRequest(request_id, [5, 6], SamplingParams(max_tokens=99)))
    return ledger


def resumed(ledger: Ledger) -> list[AddRequest]:
    """Return what a new core is sent."""
    entries = [ledger.get(request_id) for request_id in ledger]
    return [entry.resumed(ledger.clock()) for entry in entries if entry is not None]


def test_new_tokens_are_delivered_and_kept() -> None:
    ledger = ledger_with()
    assert ledger.take(RequestOutput(1, 0, [10, 11])) == RequestOutput(1, 0, [10, 11])
    assert [add.output_token_ids for add in resumed(ledger)] == [[10, 11]]


def test_repeated_tokens_are_dropped() -> None:
    ledger = ledger_with()
    ledger.take(RequestOutput(1, 0, [10, 11]))
    assert ledger.take(RequestOutput(1, 0, [10, 11])) is None
    assert [add.output_token_ids for add in resumed(ledger)] == [[10, 11]]


def test_new_part_of_an_overlapping_output_passes() -> None:
    ledger = ledger_with()
    ledger.take(RequestOutput(1, 0, [10, 11]))
    news = ledger.take(RequestOutput(1, 1, [11, 12], FinishReason.LENGTH))
    assert news == RequestOutput(1, 2, [12], FinishReason.LENGTH)
    assert len(ledger) == 0


def test_finish_that_repeats_all_tokens_still_finishes() -> None:
    ledger = ledger_with()
    ledger.take(RequestOutput(1, 0, [10, 11]))
    news = ledger.take(RequestOutput(1, 0, [10, 11], FinishReason.STOP))
    assert news == RequestOutput(1, 2, [], FinishReason.STOP)


def test_contradicting_repetition_fails_the_request_and_emits_nothing() -> None:
    ledger = ledger_with()
    ledger.take(RequestOutput(1, 0, [10, 11]))
    with pytest.raises(RequestFailed, match="other tokens"):
        ledger.take(RequestOutput(1, 1, [99]))
    assert 1 not in ledger


def test_gap_asks_for_the_request_again_with_what_is_known() -> None:
    ledger = ledger_with()
    ledger.take(RequestOutput(1, 0, [10]))
    again = ledger.take(RequestOutput(1, 3, [13]))
    assert isinstance(again, AddRequest)
    assert again.output_token_ids == [10]
    assert again.resent


def test_outputs_already_in_flight_after_a_gap_are_not_further_gaps() -> None:
    ledger = ledger_with()
    assert isinstance(ledger.take(RequestOutput(1, 1, [11])), AddRequest)
    for index in range(2, 20):
        assert ledger.take(RequestOutput(1, index, [10 + index])) is None
    assert ledger.take(RequestOutput(1, 0, [10])) == RequestOutput(1, 0, [10])


def test_gap_that_stays_is_asked_for_again_and_then_fails_the_request() -> None:
    ledger = ledger_with()
    for _ in range(REPAIR_MESSAGES_MAX):
        assert isinstance(ledger.take(RequestOutput(1, 3, [13])), AddRequest)
        assert ledger.take(RequestOutput(1, 4, [14])) is None
        ledger.allow_repairs()
    with pytest.raises(RequestFailed):
        ledger.take(RequestOutput(1, 3, [13]))
    assert 1 not in ledger


def test_repairs_that_help_are_not_counted() -> None:
    """After progress the next gap counts as the first, without waiting for `allow_repairs`."""
    ledger = ledger_with()
    for known in range(3 * REPAIR_MESSAGES_MAX):
        assert isinstance(ledger.take(RequestOutput(1, known + 1, [0])), AddRequest)
        assert ledger.take(RequestOutput(1, known, [known])) is not None


def prompt_output(first: int, end: int, token_ids: list[int]) -> RequestOutput:
    entries = [TokenLogprobs(position, -0.5, 1, [], []) for position in range(first, end)]
    return RequestOutput(1, 0, token_ids, prompt_logprobs=[PromptLogprobs(1, first, entries)])


def test_prompt_logprobs_come_once_by_position_though_the_prompt_is_computed_again() -> None:
    ledger = ledger_with()
    seen: list[int] = []
    for output in (
        prompt_output(1, 5, []),
        prompt_output(1, 4, []),
        prompt_output(4, 9, []),
        prompt_output(5, 9, []),
        prompt_output(1, 10, [20]),
    ):
        news = ledger.take(output)
        if isinstance(news, RequestOutput):
            for part in news.prompt_logprobs or []:
                assert part.first_position == part.entries[0].token_id
                seen += [entry.token_id for entry in part.entries]
    assert seen == list(range(1, 10))
    assert [add.output_token_ids for add in resumed(ledger)] == [[20]]


def test_output_with_only_known_prompt_logprobs_is_dropped() -> None:
    ledger = ledger_with()
    assert ledger.take(prompt_output(1, 5, [])) is not None
    assert ledger.take(prompt_output(1, 5, [])) is None


def test_unknown_and_cancelled_requests_are_ignored() -> None:
    ledger = ledger_with()
    assert ledger.fail(1)
    assert not ledger.fail(1)
    assert ledger.take(RequestOutput(1, 0, [1])) is None


def test_more_open_requests_than_the_bound_are_refused() -> None:
    ledger = ledger_with(max_open=1)
    with pytest.raises(RequestFailed) as caught:
        ledger.accept(AddRequest(2, [1], SamplingParams()))
    assert caught.value.error.code is ErrorCode.OVERLOADED


def test_any_mix_of_repetitions_and_losses_delivers_every_token_once() -> None:
    """A core resends, forgets and repeats at random, and the reader gets the true sequence."""
    rng = random.Random(1)
    for _ in range(300):
        truth = [rng.randrange(1000) for _ in range(rng.randint(1, 30))]
        ledger, seen, position, finished = ledger_with(), [], 0, False
        while not finished:
            start = max(0, position - rng.randint(0, 3))
            end = min(len(truth), start + rng.randint(0, 5))
            reason = FinishReason.LENGTH if end == len(truth) else None
            news = ledger.take(RequestOutput(1, start, truth[start:end], reason))
            if isinstance(news, RequestOutput):
                assert news.first_index == len(seen)
                seen += news.token_ids
                finished = news.finish_reason is not None
            position = len(seen)
        assert seen == truth


FACTS = ModelFacts("fake", 1000, 4096, 16, 1000, [2])


def test_checked_request_is_the_one_on_the_wire_and_shares_nothing() -> None:
    prompt = [1, 2, 3]
    add = AddRequest(1, prompt, SamplingParams(stop_token_ids=[7]))
    checked, body = check_request(add, FACTS)
    assert checked == add
    assert checked.prompt_token_ids is not prompt
    assert check_request(checked, FACTS) == (checked, body)


def test_a_long_prompt_is_checked_as_a_short_one() -> None:
    """It is packed first; whatever cannot be packed is an error that names the prompt."""
    facts = msgspec.structs.replace(FACTS, max_model_len=10**5, num_gpu_blocks=10**5)
    prompt = [i % 900 for i in range(PACKED_FROM_TOKENS)]
    add = AddRequest(1, prompt, SamplingParams(max_tokens=1))
    checked, body = check_request(add, facts)
    assert (checked.prompt_token_ids, checked.unpacked_prompt) == ([], prompt)
    assert body == encode_add(add) == encode_add(checked)
    for bad in (1000, 2**31, 2**32, -1, 0.5, "1", None):
        wrong = msgspec.structs.replace(add, prompt_token_ids=[*prompt, bad])
        with pytest.raises(RequestFailed) as caught:
            check_request(wrong, facts)
        assert (caught.value.error.code, caught.value.error.param) == (ErrorCode.INVALID, "prompt")
    long = AddRequest(1, [1] * (MAX_TOKEN_IDS + 1), SamplingParams(max_tokens=1))
    with pytest.raises(RequestFailed) as caught:
        check_request(long, facts)
    assert caught.value.error.param == "prompt"


def test_check_covers_the_model_and_the_fields_of_the_request_itself() -> None:
    for add, param in (
        (AddRequest(1, [1000], SamplingParams()), "prompt"),
        (AddRequest(1, [1], SamplingParams(), priority=2**40), "priority"),
        (AddRequest(1, [1], SamplingParams(min_tokens=17)), "min_tokens"),
    ):
        with pytest.raises(RequestFailed) as caught:
            check_request(add, FACTS)
        assert (caught.value.error.code, caught.value.error.param) == (ErrorCode.INVALID, param)


def test_a_request_that_exceeds_a_frame_is_refused() -> None:
    facts = msgspec.structs.replace(FACTS, vocab_size=2**30, max_model_len=2**30)
    facts = msgspec.structs.replace(facts, num_gpu_blocks=2**30)
    outputs = [2**29] * (MAX_TOKEN_IDS - 1)
    prompt = [5] * MAX_TOKEN_IDS
    params = SamplingParams(max_tokens=MAX_TOKEN_IDS)
    check_request(AddRequest(1, prompt, params), facts)
    with pytest.raises(RequestFailed, match="of a frame") as caught:
        check_request(AddRequest(1, prompt, params, outputs), facts)
    error = caught.value.error
    assert (error.code, error.param) == (ErrorCode.TOO_LONG, "output_token_ids")


def test_cached_tokens_do_not_wait_to_be_computed() -> None:
    ledger = Ledger(OpenLimits(9))
    for request_id in (1, 2):
        ledger.accept(AddRequest(request_id, [5] * 100, SamplingParams()))
    ledger.expect_cached(1, 64)
    ledger.expect_cached(2, 1000)
    assert ledger.num_unstarted_tokens == 36
    ledger.take(RequestOutput(1, 0, [7]))
    assert ledger.num_unstarted_tokens == 0
    ledger.fail(2)
    assert ledger.num_unstarted_tokens == 0
