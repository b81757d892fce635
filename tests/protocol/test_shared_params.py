"""Equal large values of sampling parameters are one object, and no parameter changes."""

from typing import Any

import pytest

from protocol.api_core import AddRequest, decode_from_client
from protocol.message import encode
from protocol.sampling import Grammar, GrammarKind, SamplingParams, ThinkingBudget
from protocol.shared_params import SharedParams

VALUES: dict[str, Any] = {
    "grammar": Grammar(GrammarKind.REGEX, "a+"),
    "logit_bias": {7: 1.5, 8: -2.0},
    "allowed_token_ids": [300, 301, 302],
    "bad_words": [[300], [301, 302]],
    "stop_token_ids": [300],
    "logprob_token_ids": [300, 301],
    "thinking_budget": ThinkingBudget(3, [300], [301]),
}


def decoded(**params: Any) -> SamplingParams:
    """Return parameters as they come from the wire: no object is another request's."""
    add = decode_from_client(encode(AddRequest(1, [5], SamplingParams(**params))))
    assert isinstance(add, AddRequest)
    return add.sampling_params


@pytest.mark.parametrize("name", VALUES)
def test_sequences_of_one_request_share_each_large_value(name: str) -> None:
    shared = SharedParams()
    sequences = [decoded(seed=seed, **{name: VALUES[name]}) for seed in range(3)]
    kept = [shared.shared(params) for params in sequences]
    assert kept == sequences
    assert len({id(getattr(params, name)) for params in kept}) == 1
    other = decoded(
        seed=3, **{"allowed_token_ids": [9] * 4, "logit_bias": {9: 1.0}, name: VALUES[name]}
    )
    assert shared.shared(other) == other


def test_requests_in_turns_share_with_their_own() -> None:
    shared = SharedParams()
    requests = [[300 + i, 301 + i] for i in range(4)]
    first = [shared.shared(decoded(allowed_token_ids=ids)) for ids in requests]
    again = [shared.shared(decoded(allowed_token_ids=ids)) for ids in requests]
    assert again == first
    for one, other in zip(first, again, strict=True):
        assert one.allowed_token_ids is other.allowed_token_ids


def test_only_a_few_requests_are_remembered() -> None:
    shared = SharedParams()
    first = shared.shared(decoded(allowed_token_ids=[300]))
    for i in range(10):
        shared.shared(decoded(allowed_token_ids=[301 + i]))
    again = shared.shared(decoded(allowed_token_ids=[300]))
    assert again == first
    assert again.allowed_token_ids is not first.allowed_token_ids
    plain = decoded()
    assert shared.shared(plain) is plain
