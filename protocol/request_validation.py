"""Checks of a request that depend on the model: lengths, ids, and what the model can serve."""

from protocol.api_core import AddRequest, ErrorCode, RequestError
from protocol.message import has_ids_from, unpack_token_ids
from protocol.model_facts import ModelFacts
from protocol.sampling import MAX_REPEATED_TOKENS, RepetitionDetection, SamplingParams


def validate_request(
    add: AddRequest, facts: ModelFacts, id_bound: int | None = None
) -> RequestError | None:
    """Check everything that depends on the model; decoding has checked the bounds of single fields.

    The API calls this before it accepts a request, and the core again for every client. All ids of
    a packed prompt are known to be below `id_bound`; None: nothing is known about them.
    """
    if len(add.packed_prompt) % 4 or (add.packed_prompt and add.prompt_token_ids):
        text = "packed_prompt must hold 4 bytes per token, and prompt_token_ids nothing besides it"
        return RequestError(ErrorCode.INVALID, text, "prompt")
    if (error := _validate_lengths(add, facts) or _validate_ids(add, facts, id_bound)) is not None:
        return error
    params = add.sampling_params
    if (error := _validate_token_ids(params, facts)) is not None:
        return error
    if params.min_tokens > params.max_tokens:
        return RequestError(
            ErrorCode.INVALID,
            f"min_tokens {params.min_tokens} is greater than max_tokens {params.max_tokens}",
            "min_tokens",
        )
    if params.pooling is not None and (error := _validate_pooling(add, facts)) is not None:
        return error
    if params.pooling is None and (error := generation_error(facts)) is not None:
        return error
    detection = params.repetition_detection
    if detection is not None and (error := _validate_detection(detection)) is not None:
        return error
    return _validate_room(add, facts)


def generation_error(facts: ModelFacts) -> RequestError | None:
    """Return why a model answers no request for text; None if it answers them."""
    if facts.generates:
        return None
    text = "the model generates no text: it returns vectors, or scores of labels"
    return RequestError(ErrorCode.UNSUPPORTED, text, "model")


def _validate_lengths(add: AddRequest, facts: ModelFacts) -> RequestError | None:
    num_prompt_tokens, num_output_tokens = add.num_prompt_tokens, len(add.output_token_ids)
    if num_prompt_tokens == 0:
        return RequestError(ErrorCode.INVALID, "prompt must hold at least one token", "prompt")
    context = f"the model's context of {facts.max_model_len} tokens must hold"
    longest = facts.max_prompt_len(add.sampling_params)
    if num_prompt_tokens > longest:
        output = " and at least one output token" if longest < facts.max_model_len else ""
        text = f"prompt has {num_prompt_tokens} tokens; {context} it{output}"
        return RequestError(ErrorCode.TOO_LONG, text, "prompt")
    if num_prompt_tokens + num_output_tokens > facts.max_model_len:
        text = f"output_token_ids has {num_output_tokens} tokens; {context} them and the prompt"
        text = f"{text} of {num_prompt_tokens}"
        return RequestError(ErrorCode.TOO_LONG, text, "output_token_ids")
    return None


def _validate_ids(add: AddRequest, facts: ModelFacts, id_bound: int | None) -> RequestError | None:
    highest = max(add.prompt_token_ids, default=0)
    is_known = id_bound is not None and id_bound <= facts.vocab_size
    if add.packed_prompt and not is_known and has_ids_from(add.packed_prompt, facts.vocab_size):
        highest = max(unpack_token_ids(add.packed_prompt))
    if highest >= facts.vocab_size:
        return outside_vocabulary(highest, facts, "prompt")
    highest = max(add.output_token_ids, default=0)
    if highest >= facts.vocab_size:
        return outside_vocabulary(highest, facts, "output_token_ids")
    return None


def _validate_token_ids(params: SamplingParams, facts: ModelFacts) -> RequestError | None:
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", params.logit_bias),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("logprob_token_ids", params.logprob_token_ids),
        *(("bad_words", word) for word in params.bad_words),
        ("thinking_token_budget", _budget_ids(params)),
    ):
        for token_id in ids:
            if token_id >= facts.vocab_size:
                return outside_vocabulary(token_id, facts, name)
    if params.allowed_token_ids is not None:
        banned = {word[0] for word in params.bad_words if len(word) == 1}
        if params.min_tokens:
            banned.update(facts.eos_token_ids, params.stop_token_ids)
        if banned.issuperset(params.allowed_token_ids):
            text = "bad_words, or min_tokens, ban every token of allowed_token_ids"
            return RequestError(ErrorCode.INVALID, text, "allowed_token_ids")
    return None


def _budget_ids(params: SamplingParams) -> list[int]:
    budget = params.thinking_budget
    if budget is None:
        return []
    markers = budget.begin_token_ids + budget.end_token_ids + budget.call_token_ids
    return markers + budget.space_token_ids


def _validate_detection(detection: RepetitionDetection) -> RequestError | None:
    largest, smallest = detection.max_pattern_size, detection.min_pattern_size
    if smallest > largest:
        text = f"min_pattern_size {smallest} is greater than max_pattern_size {largest}"
    elif largest * detection.min_count > MAX_REPEATED_TOKENS:
        num_tokens = largest * detection.min_count
        text = f"max_pattern_size times min_count is {num_tokens}, over {MAX_REPEATED_TOKENS}"
    else:
        return None
    return RequestError(ErrorCode.INVALID, text, "repetition_detection")


def _validate_pooling(add: AddRequest, facts: ModelFacts) -> RequestError | None:
    params, size = add.sampling_params, facts.embedding_size
    assert params.pooling is not None
    if size == 0:
        return RequestError(ErrorCode.INVALID, "the model returns no embeddings", "pooling")
    if facts.num_labels and params.pooling.type is not facts.default_pooling:
        text = f"the pooling of the model's classification head is {facts.default_pooling}"
        return RequestError(ErrorCode.INVALID, text, "pooling")
    if (params.pooling.dimensions or 1) > size:
        text = f"dimensions {params.pooling.dimensions} is more than the {size} of the model"
        return RequestError(ErrorCode.INVALID, text, "dimensions")
    if params.max_tokens != 1 or add.output_token_ids:
        text = "a request with pooling has max_tokens 1 and no output tokens"
        return RequestError(ErrorCode.INVALID, text, "max_tokens")
    return None


def outside_vocabulary(token_id: int, facts: ModelFacts, param: str) -> RequestError:
    """Return the error for an id that the model does not have; `param` names its field."""
    text = f"token id {token_id} is outside the vocabulary of {facts.vocab_size} tokens"
    return RequestError(ErrorCode.INVALID, text, param)


def _validate_room(add: AddRequest, facts: ModelFacts) -> RequestError | None:
    """Refuse a request that could not run even alone, because it would block all others."""
    total = min(add.num_prompt_tokens + add.sampling_params.max_tokens, facts.max_model_len)
    # The last sampled token never needs a slot.
    needed = facts.num_blocks_for(max(add.num_prompt_tokens, total - 1))
    usable = facts.num_gpu_blocks - 1
    if needed <= usable:
        return None
    return RequestError(
        ErrorCode.UNSERVABLE,
        f"prompt of {add.num_prompt_tokens} tokens with max_tokens "
        f"{add.sampling_params.max_tokens} needs {needed} KV blocks of {facts.block_size} tokens, "
        f"and the whole cache has {usable}",
        "max_tokens",
    )
