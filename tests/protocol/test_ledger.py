"""The ledger: exactly once by index, whatever is repeated, missing or contradictory."""

import random

import pytest

from protocol.api_core import AddRequest, ErrorCode, RequestOutput
from protocol.ledger import REPAIR_MESSAGES_MAX, Ledger, RequestFailed
from protocol.sampling import FinishReason, SamplingParams


def ledger_with(request_id: int = 1, max_open: int = 10) -> Ledger:
    ledger = Ledger(max_open)
    ledger.accept(AddRequest(request_id, [5, 6], SamplingParams(max_tokens=99)))
    return ledger


def test_news_pass_and_are_kept() -> None:
    ledger = ledger_with()
    assert ledger.take(RequestOutput(1, 0, [10, 11])) == RequestOutput(1, 0, [10, 11])
    assert [add.output_token_ids for add in ledger.open_requests()] == [[10, 11]]


def test_repeated_tokens_are_dropped() -> None:
    ledger = ledger_with()
    ledger.take(RequestOutput(1, 0, [10, 11]))
    assert ledger.take(RequestOutput(1, 0, [10, 11])) is None
    assert ledger.num_duplicates == 2


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
    assert ledger.num_mismatches == 1
    assert 1 not in ledger


def test_gap_asks_for_the_request_again_with_what_is_known() -> None:
    ledger = ledger_with()
    ledger.take(RequestOutput(1, 0, [10]))
    again = ledger.take(RequestOutput(1, 3, [13]))
    assert isinstance(again, AddRequest)
    assert again.output_token_ids == [10]


def test_gaps_without_end_fail_the_request() -> None:
    ledger = ledger_with()
    for _ in range(REPAIR_MESSAGES_MAX):
        assert isinstance(ledger.take(RequestOutput(1, 3, [13])), AddRequest)
    with pytest.raises(RequestFailed):
        ledger.take(RequestOutput(1, 3, [13]))


def test_unknown_and_cancelled_requests_are_ignored() -> None:
    ledger = ledger_with()
    assert ledger.cancel(1) is not None
    assert ledger.cancel(1) is None
    assert ledger.take(RequestOutput(1, 0, [1])) is None


def test_bound_on_open_requests() -> None:
    ledger = ledger_with(max_open=1)
    with pytest.raises(RequestFailed) as caught:
        ledger.accept(AddRequest(2, [1], SamplingParams()))
    assert caught.value.error.code is ErrorCode.OVERLOADED


def test_any_mix_of_repetitions_and_losses_delivers_every_token_once() -> None:
    """A core that resends, forgets and repeats at random: the reader sees the true sequence."""
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
