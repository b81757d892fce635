"""Outputs that arrive while no task reads are merged into one."""

import asyncio
import tracemalloc

import pytest

from protocol.api_core import RequestOutput
from protocol.client.request_stream import RequestStream
from protocol.core_worker import TokenLogprobs
from protocol.message import Decoder, Message, encode
from protocol.sampling import FinishReason


class _Wire(Message):
    output: RequestOutput


_decode: Decoder[_Wire] = Decoder(_Wire)


def arriving(first: int, token_ids: list[int], **rest: object) -> RequestOutput:
    """An output as decoded from a socket: its lists are not shared."""
    output = RequestOutput(1, first, token_ids, **rest)  # type: ignore[arg-type]
    return _decode(encode(_Wire(output))).output


@pytest.mark.parametrize("num_outputs", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("with_logprobs", [False, True])
def test_nothing_is_lost_however_late_it_is_read(num_outputs: int, with_logprobs: bool) -> None:
    async def play() -> None:
        stream = RequestStream(1, lambda request_id: None)
        ids = list(range(1000, 1000 + 2 * num_outputs))
        logprobs = [TokenLogprobs(i, -0.5, 1, [], []) for i in ids] if with_logprobs else None
        for first in range(0, len(ids), 2):
            is_last = first + 2 == len(ids)
            stream.deliver(
                arriving(
                    first,
                    ids[first : first + 2],
                    finish_reason=FinishReason.LENGTH if is_last else None,
                    num_cached_tokens=7 if first == 0 else None,
                    logprobs=None if logprobs is None else logprobs[first : first + 2],
                )
            )
        assert stream.num_unread == len(ids)
        whole = RequestOutput(1, 0, ids, FinishReason.LENGTH, None, 7, logprobs)
        assert await anext(stream) == whole
        assert stream.num_unread == 0
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(play())


def test_a_second_task_that_waits_for_outputs_gets_an_error() -> None:
    async def play() -> None:
        stream = RequestStream(1, lambda request_id: None)
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)  # it waits now
        with pytest.raises(RuntimeError, match="another task"):
            await anext(stream)
        stream.deliver(arriving(0, [5], finish_reason=FinishReason.LENGTH))
        assert (await asyncio.wait_for(first, 5)).token_ids == [5]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(play())


def test_unread_tokens_cost_four_bytes_each() -> None:
    stream = RequestStream(1, lambda request_id: None)
    num_tokens = 20_000
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for first in range(num_tokens):
        stream.deliver(arriving(first, [1000 + first]))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 5 * num_tokens + 64 * 1024
