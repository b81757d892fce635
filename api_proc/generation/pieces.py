"""Splits an output into pieces that are decoded one at a time, so that unread tokens stay ids."""

from collections.abc import AsyncIterator, Iterator

from protocol.api_core import RequestOutput

_MAX_TOKENS = 256
"""Maximum number of tokens in a piece."""
_MAX_LOGPROBS = 16
"""Maximum number of tokens in a piece with log-probabilities."""


def pieces(output: RequestOutput, num_first: int) -> Iterator[RequestOutput]:
    """Split an output after its first `num_first` tokens, and into pieces of limited size."""
    size = _MAX_TOKENS if output.logprobs is None else _MAX_LOGPROBS
    num_tokens = len(output.token_ids)
    if num_first <= 0 and num_tokens <= size:
        yield output
        return
    start = 0
    while True:
        end = min(start + size, num_tokens)
        if start < num_first < end:
            end = num_first
        is_last = end == num_tokens
        yield RequestOutput(
            output.request_id,
            output.first_index + start,
            output.token_ids[start:end],
            output.finish_reason if is_last else None,
            output.stop_token_id if is_last else None,
            None if start else output.num_cached_tokens,
            None if output.logprobs is None else output.logprobs[start:end],
            None if start else output.prompt_logprobs,
            queue_time_s=None if start else output.queue_time_s,
        )
        if is_last:
            return
        start = end


async def chained(
    first: RequestOutput, rest: AsyncIterator[RequestOutput]
) -> AsyncIterator[RequestOutput]:
    """Iterate over an output that has already been read, and then over the rest."""
    yield first
    async for output in rest:
        yield output
