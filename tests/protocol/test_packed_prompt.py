"""Prompts that are packed in slices are submitted like lists of ids."""

import msgspec
import pytest

from protocol.api_core import PACKED_FROM_TOKENS, AddRequest, ErrorCode
from protocol.client.errors import RequestFailed
from protocol.client.ledger import Ledger, OpenLimits, check_request
from protocol.client.packed_prompt import PackedPrompt, PromptIds, PromptPacking, extended
from protocol.message import MAX_TOKEN_IDS, unpack_token_ids
from protocol.model_facts import ModelFacts
from protocol.sampling import SamplingParams

FACTS = ModelFacts("null", 1000, 2**21, 16, 2**18, [2])
ADD = AddRequest(1, [], SamplingParams(max_tokens=1))
MANY = [i % 900 for i in range(100_000)]


def pack(token_ids: list[int]) -> tuple[PackedPrompt, int]:
    """Return the prompt, and how often the work on it can be interrupted."""
    packing = PromptPacking(token_ids, FACTS)
    num_pauses = sum(1 for _ in packing.steps())
    return packing.prompt, num_pauses


@pytest.mark.parametrize("num_tokens", [PACKED_FROM_TOKENS, 2**15, 2**15 + 1, len(MANY)])
def test_a_packed_prompt_makes_the_same_request(num_tokens: int) -> None:
    token_ids = MANY[:num_tokens]
    prompt, num_pauses = pack(token_ids)
    assert num_pauses == (num_tokens - 1) // 2**15 + 1
    assert check_request(ADD, FACTS, prompt) == check_request(ADD, FACTS, token_ids)


def test_an_id_outside_the_vocabulary_is_found_in_any_slice() -> None:
    for place in (0, 2**15, len(MANY) - 1):
        wrong = [*MANY[:place], 1000 + place, *MANY[place + 1 :]]
        errors = []
        for work in (lambda: pack(wrong), lambda: check_request(ADD, FACTS, wrong)):  # noqa: B023
            with pytest.raises(RequestFailed) as caught:
                work()
            errors.append(caught.value.error)
        assert errors[0] == errors[1]
        assert (errors[0].code, errors[0].param) == (ErrorCode.INVALID, "prompt")


def test_another_vocabulary_is_checked_again() -> None:
    """The model may have been replaced since the prompt was packed."""
    prompt, _ = pack(MANY)
    check_request(ADD, msgspec.structs.replace(FACTS, vocab_size=2000), prompt)
    with pytest.raises(RequestFailed, match="899 is outside the vocabulary of 899"):
        check_request(ADD, msgspec.structs.replace(FACTS, vocab_size=899), prompt)


def test_what_is_too_long_for_a_message_is_an_error_of_the_prompt() -> None:
    token_ids = [1] * (MAX_TOKEN_IDS + 1)
    assert not PromptPacking.is_due(token_ids)
    prompts: list[PromptIds] = [token_ids, pack(token_ids)[0], PackedPrompt(b"", 1), []]
    for prompt in prompts:
        with pytest.raises(RequestFailed) as caught:
            check_request(ADD, FACTS, prompt)
        assert caught.value.error.param == "prompt"


def test_a_prompt_is_extended_in_either_form() -> None:
    prompt, _ = pack(MANY)
    longer = extended(prompt, [7, 1001])
    assert isinstance(longer, PackedPrompt)
    assert unpack_token_ids(longer.packed) == extended(MANY, [7, 1001]) == [*MANY, 7, 1001]
    with pytest.raises(RequestFailed, match="1001 is outside"):
        check_request(ADD, FACTS, longer)


def test_the_ledger_counts_the_tokens_of_both_forms() -> None:
    ledger = Ledger(OpenLimits(9))
    for request_id, prompt in enumerate((MANY, pack(MANY)[0], [5, 6])):
        add = msgspec.structs.replace(ADD, request_id=request_id)
        ledger.accept(check_request(add, FACTS, prompt)[0])
    assert ledger.limits.num_prompt_tokens == 2 * len(MANY) + 2
    for request_id in range(3):
        assert ledger.fail(request_id)
    assert ledger.limits.num_prompt_tokens == 0
