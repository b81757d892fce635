"""AsyncEngineClient over a real socket: accepting, resending and giving up requests."""

import asyncio
import gc
import os
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest

from protocol.api_core import (
    PACKED_FROM_TOKENS,
    EngineState,
    EngineStats,
    ErrorCode,
    Refused,
    RequestError,
    RequestOutput,
    Status,
)
from protocol.client import AsyncEngineClient, open_requests
from protocol.client.errors import InvalidRequest, RequestFailed
from protocol.client.request_stream import RequestStream
from protocol.message import encode, unpack_token_ids
from protocol.sampling import FinishReason, SamplingParams
from tests.protocol.fake_core import (
    FACTS,
    FAST_TICK_S,
    READY,
    RECOVERING,
    TIMEOUT_S,
    FakeCore,
    run_connected,
)

PARAMS = SamplingParams(max_tokens=1000)


async def failure_of(stream: RequestStream) -> RequestError:
    async def read() -> None:
        async for _ in stream:
            pass

    with pytest.raises(RequestFailed) as caught:
        await asyncio.wait_for(read(), TIMEOUT_S)
    return caught.value.error


@pytest.mark.parametrize(
    ("prompt", "values", "salt", "param"),
    [
        ([-1], {}, "", "prompt"),
        (["a"], {}, "", "prompt"),
        ([1], {"temperature": 5.0}, "", "temperature"),
        ([1], {"temperature": float("nan")}, "", "temperature"),
        ([1], {"logit_bias": {1: 1000.0}}, "", "logit_bias"),
        ([1], {"logit_bias": {-1: 1.0}}, "", "logit_bias"),
        ([1], {"stop_token_ids": [-4]}, "", "stop_token_ids"),
        ([1], {}, "x" * 300, "cache_salt"),
        ([1], {}, "\ud800", None),
        ([1], {"seed": 2**70}, "", None),
        ([object()], {}, "", None),
        ([1000], {}, "", "prompt"),
    ],
)
def test_what_the_wire_refuses_is_refused_at_once_and_leaves_no_state(
    core: FakeCore, prompt: list[Any], values: dict[str, Any], salt: str, param: str | None
) -> None:
    async def play(client: AsyncEngineClient) -> None:
        with pytest.raises(RequestFailed) as caught:
            client.submit(prompt, SamplingParams(**values), cache_salt=salt)
        assert (caught.value.error.code, caught.value.error.param) == (ErrorCode.INVALID, param)
        stream = client.submit([7], PARAMS)
        await core.until(lambda: core.num_added == 1)
        await core.restart(1)
        assert [add.prompt_token_ids for add in core.adds] == [[7]]
        stream.cancel()

    run_connected(core, play)


def test_parameters_of_another_type_are_named(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        with pytest.raises(
            RequestFailed, match="sampling_params: must be SamplingParams, got dict"
        ):
            client.submit([5], {"max_tokens": 3})  # type: ignore[arg-type]

    run_connected(core, play)


def test_error_of_a_bound_names_field_and_bound(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        with pytest.raises(RequestFailed, match=r"temperature: must be a number <= 2\.0$"):
            client.submit([1], SamplingParams(temperature=5.0))

    run_connected(core, play)


def test_accepted_request_does_not_change_with_the_callers_list(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        prompt = [5, 6, 7]
        client.submit(prompt, PARAMS)
        prompt.clear()
        await core.restart(1)
        assert core.adds[-1].prompt_token_ids == [5, 6, 7]

    run_connected(core, play)


def test_sequences_of_a_request_hold_one_copy_of_its_token_lists(core: FakeCore) -> None:
    """The copy is not the caller's list, which may change."""

    async def play(client: AsyncEngineClient) -> None:
        ids = [7, 8, 9]
        for seed in range(3):
            client.submit([5], SamplingParams(seed=seed, allowed_token_ids=ids))
        entries = [client.requests.entry(number) for number in client.requests.ids()]
        params = [entry.add.sampling_params for entry in entries if entry is not None]
        assert [one.seed for one in params] == [0, 1, 2]
        assert {id(one.allowed_token_ids) for one in params} == {id(params[0].allowed_token_ids)}
        assert params[0].allowed_token_ids is not ids

    run_connected(core, play)


def test_ready_means_ready(core: FakeCore) -> None:
    """Recovering and draining engines are connected but not ready."""

    async def play(client: AsyncEngineClient) -> None:
        for state in (EngineState.RECOVERING, EngineState.DRAINING):
            status = Status(state, FACTS, EngineStats())
            core.send(status)
            await core.until(lambda expected=status: client.status == expected)
            expected = rf"engine has not been ready within 0\.02 s: its last state is {state}$"
            with pytest.raises(TimeoutError, match=expected):
                await client.wait_ready(timeout_s=0.02)
            assert client.connected
        waiting = asyncio.create_task(client.wait_ready(timeout_s=TIMEOUT_S))
        core.send(READY)
        await core.until(waiting.done)
        assert waiting.result() == FACTS

    core.status = RECOVERING
    run_connected(core, play)


def test_an_engine_that_is_gone_is_not_called_ready(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        await core.until(lambda: client.serves)
        core.link.close()
        async with asyncio.timeout(TIMEOUT_S):
            while client.connected:
                await asyncio.sleep(0.001)
        with pytest.raises(TimeoutError, match=f"nothing answers any more at {core.address}$"):
            await client.wait_ready(timeout_s=0.02)

    run_connected(core, play)


def test_waiting_for_an_engine_fails_when_the_client_closes(core: FakeCore) -> None:
    """A later wait fails as well."""

    async def play(client: AsyncEngineClient) -> None:
        waiting = asyncio.create_task(client.wait_ready(timeout_s=600))
        await core.until(lambda: client.connected)
        await client.close()
        for waits in (waiting, client.wait_ready(timeout_s=600)):
            with pytest.raises(RequestFailed, match="closed"):
                await asyncio.wait_for(waits, TIMEOUT_S)

    core.status = RECOVERING
    run_connected(core, play)


def test_new_core_gets_everything_open_oldest_first_marked_as_accepted(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        streams = [client.submit([5, n], PARAMS) for n in range(3)]
        await core.until(lambda: core.num_added == 3)
        assert not any(add.resent for add in core.adds)
        core.emit(RequestOutput(streams[1].request_id, 0, [10, 11]))
        assert (await anext(streams[1])).token_ids == [10, 11]
        streams[0].cancel()
        await core.restart(2)
        assert [add.prompt_token_ids for add in core.adds] == [[5, 1], [5, 2]]
        assert [add.output_token_ids for add in core.adds] == [[10, 11], []]
        assert all(add.resent for add in core.adds)

    run_connected(core, play)


def test_request_too_large_to_be_sent_again_fails_alone(
    core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(client: AsyncEngineClient) -> None:
        large = client.submit([999] * 500, PARAMS)
        small = client.submit([5], PARAMS)
        await core.until(lambda: core.num_added == 2)
        monkeypatch.setattr(open_requests, "MAX_FRAME_BYTES", 400)
        await core.restart(1)
        assert (await failure_of(large)).code is ErrorCode.TOO_LONG
        assert core.adds[-1].request_id == small.request_id
        await core.until(lambda: core.aborted == [large.request_id])

    run_connected(core, play)


def test_one_gap_is_repaired_once_and_the_stream_continues(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        stream = client.submit([5], PARAMS)
        await core.until(lambda: core.num_added == 1)
        core.emit(RequestOutput(stream.request_id, 0, [10]))
        for index in range(2, 12):
            core.emit(RequestOutput(stream.request_id, index, [10 + index]))
        await core.until(lambda: core.num_added == 2)
        assert core.adds[-1].output_token_ids == [10]
        core.emit(RequestOutput(stream.request_id, 1, [11], FinishReason.STOP))
        async with asyncio.timeout(TIMEOUT_S):
            tokens = [token async for output in stream for token in output.token_ids]
        assert tokens == [10, 11]
        core.pump()
        assert core.num_added == 2

    run_connected(core, play)


def test_gap_that_stays_is_asked_for_again_with_the_next_status(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        stream = client.submit([5], PARAMS)
        await core.until(lambda: core.num_added == 1)
        for num_added in (2, 3):
            core.emit(RequestOutput(stream.request_id, 4, [10]))
            await core.until(lambda expected=num_added: core.num_added == expected)
            core.send(READY)

    run_connected(core, play)


def test_request_that_contradicts_the_ledger_ends_in_the_core_too(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        stream = client.submit([5], PARAMS)
        await core.until(lambda: core.num_added == 1)
        core.emit(RequestOutput(stream.request_id, 0, [10]))
        core.emit(RequestOutput(stream.request_id, 0, [11]))
        assert (await failure_of(stream)).code is ErrorCode.INTERNAL
        await core.until(lambda: core.aborted == [stream.request_id])

    run_connected(core, play)


@pytest.mark.usefixtures("fast_ticks")
def test_refusal_fails_its_request_and_a_nameless_one_has_all_sent_again(core: FakeCore) -> None:
    """Once in a while: what the core could not read may be unreadable for ever."""

    async def play(client: AsyncEngineClient) -> None:
        streams = [client.submit([5], PARAMS) for _ in range(3)]
        await core.until(lambda: core.num_added == 3)
        full = RequestError(ErrorCode.OVERLOADED, "full")
        core.send(Refused(streams[1].request_id, full))
        assert await failure_of(streams[1]) == full
        unreadable = RequestError(ErrorCode.INVALID, "cannot be read")
        for _ in range(2):
            core.send(Refused(None, unreadable, seq=1))
            await core.until(lambda: core.num_added == 5)
        await asyncio.sleep(5 * FAST_TICK_S)
        core.send(READY)
        assert [add.request_id for add in core.adds[3:]] == [s.request_id for s in streams[::2]]
        core.emit(*(RequestOutput(s.request_id, 0, [9], FinishReason.STOP) for s in streams[::2]))
        for stream in streams[::2]:
            assert [output.token_ids async for output in stream] == [[9]]

    run_connected(core, play)


def test_only_what_was_not_accepted_before_counts_as_refused(core: FakeCore) -> None:
    """A request that has outputs, or is part of one that was accepted, has failed."""

    async def play(client: AsyncEngineClient) -> None:
        streams = [client.submit([5], PARAMS, resent=resent) for resent in (False, False, True)]
        await core.until(lambda: core.num_added == 3)
        core.emit(RequestOutput(streams[0].request_id, 0, [9]))
        await anext(streams[0])
        refused = []
        for stream in streams:
            core.send(Refused(stream.request_id, RequestError(ErrorCode.INVALID, "not so")))
            with pytest.raises(InvalidRequest) as caught:
                await anext(stream)
            refused.append(caught.value.is_refusal)
        assert refused == [False, True, False]

    run_connected(core, play)


def unreadable_row(request_id: int) -> list[object]:
    return [request_id, 0, "tokens"]


def test_an_output_that_cannot_be_read_is_asked_for_again_alone(core: FakeCore) -> None:
    """So is the last one of a stream, after which no gap would show."""

    async def play(client: AsyncEngineClient) -> None:
        broken, whole = (client.submit([5], PARAMS) for _ in range(2))
        await core.until(lambda: core.num_added == 2)
        good = RequestOutput(whole.request_id, 0, [8], FinishReason.STOP)
        core.send_raw(encode(["StepOutputs", [unreadable_row(broken.request_id), good]]))
        assert [output.token_ids async for output in whole] == [[8]]
        await core.until(lambda: core.num_added == 3)
        assert core.adds[2].request_id == broken.request_id
        core.emit(RequestOutput(broken.request_id, 0, [9], FinishReason.STOP))
        assert [output.token_ids async for output in broken] == [[9]]
        assert client.num_bad_frames == 1

    run_connected(core, play)


def test_a_request_whose_outputs_can_never_be_read_fails_alone(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        broken, whole = (client.submit([5], PARAMS) for _ in range(2))
        failing = asyncio.create_task(failure_of(broken))
        num_added = 2
        while not failing.done():
            await core.until(lambda: core.num_added == num_added or core.aborted)  # noqa: B023
            core.send_raw(encode(["StepOutputs", [unreadable_row(broken.request_id)]]))
            num_added += 1
            await asyncio.wait([failing], timeout=0.01)
        assert failing.result().code is ErrorCode.INTERNAL
        core.emit(RequestOutput(whole.request_id, 0, [8], FinishReason.STOP))
        assert [output.token_ids async for output in whole] == [[8]]

    run_connected(core, play)


@pytest.mark.usefixtures("fast_ticks")
def test_another_message_that_cannot_be_read_has_all_sent_again(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        stream = client.submit([5], PARAMS)
        await core.until(lambda: core.num_added == 1)
        core.send_raw(encode(["Refused", "not an id"]))
        while core.num_added < 2:
            core.send(READY)  # a silent core would be asked again for that alone
            core.pump()
            await asyncio.sleep(FAST_TICK_S / 4)
        core.emit(RequestOutput(stream.request_id, 0, [9], FinishReason.STOP))
        assert [output.token_ids async for output in stream] == [[9]]

    run_connected(core, play)


def test_a_long_prompt_crosses_packed(core: FakeCore) -> None:
    prompt = [token_id % 1000 for token_id in range(PACKED_FROM_TOKENS)]
    long_facts = msgspec.structs.replace(FACTS, max_model_len=2 * PACKED_FROM_TOKENS)

    async def play(client: AsyncEngineClient) -> None:
        core.send(msgspec.structs.replace(READY, facts=long_facts))
        await core.until(lambda: client.facts == long_facts)
        client.submit(prompt, PARAMS)
        await core.until(lambda: core.num_added == 1)
        await core.restart(1)
        for add in core.adds:
            assert add.prompt_token_ids == []
            assert unpack_token_ids(add.packed_prompt) == prompt

    run_connected(core, play)


@pytest.mark.usefixtures("fast_ticks")
def test_requests_fail_at_an_engine_that_never_finishes_recovering(core: FakeCore) -> None:
    """Reports alone do not count as service: the time without READY counts."""

    async def play(client: AsyncEngineClient) -> None:
        core.status = RECOVERING  # so that a Connect of a client that was delayed changes nothing
        stream = client.submit([5], PARAMS)
        failing = asyncio.create_task(failure_of(stream))
        while not failing.done():
            core.send(RECOVERING)
            await core.until(lambda: True)
            await asyncio.wait([failing], timeout=FAST_TICK_S)
        assert "no engine has served" in failing.result().message
        await core.until(lambda: core.aborted == [stream.request_id])
        with pytest.raises(RequestFailed) as caught:
            client.submit([5], PARAMS)
        assert caught.value.error.code is ErrorCode.ENGINE_FAILED
        core.status = READY
        core.send(READY)
        await core.until(lambda: client.status == READY)
        client.submit([5], PARAMS)

    run_connected(core, play, stall_timeout_s=10 * FAST_TICK_S)


@pytest.mark.usefixtures("fast_ticks")
def test_requests_fail_at_a_core_that_makes_no_progress(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        assert "no engine has served" in (await failure_of(client.submit([5], PARAMS))).message

    run_connected(core, play, stall_timeout_s=10 * FAST_TICK_S)


def test_the_end_of_a_block_aborts_a_request_and_a_cancelled_reader_alone_does_not(
    core: FakeCore,
) -> None:
    """A reader may thus limit its wait for one output, and go on reading."""

    async def play(client: AsyncEngineClient) -> None:
        with client.submit([5], PARAMS) as stream:
            await core.until(lambda: core.num_added == 1)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.01)
            core.emit(RequestOutput(stream.request_id, 0, [10]))
            assert (await asyncio.wait_for(anext(stream), TIMEOUT_S)).token_ids == [10]
            assert core.aborted == []
        await core.until(lambda: core.aborted == [stream.request_id])
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

        async def read() -> None:
            with client.submit([7], PARAMS) as second:
                await anext(second)

        reading = asyncio.create_task(read())
        await core.until(lambda: core.num_added == 2)
        reading.cancel()
        await core.until(lambda: len(core.aborted) == 2)

    run_connected(core, play)


def test_close_fails_waiting_readers_and_aborts_in_the_core(core: FakeCore) -> None:
    async def main() -> None:
        client = AsyncEngineClient(core.address)
        await client.start()
        await core.until(lambda: client.connected)
        streams = [client.submit([5], PARAMS) for _ in range(2)]
        await core.until(lambda: core.num_added == 2)
        reading = asyncio.create_task(failure_of(streams[0]))
        await asyncio.sleep(0)
        await client.close()
        await client.close()
        assert (await reading).message == "the client was closed"
        assert (await failure_of(streams[1])).message == "the client was closed"
        streams[0].cancel()
        with pytest.raises(RequestFailed, match="not open"):
            client.submit([5], PARAMS)
        await core.until(lambda: core.aborted == [stream.request_id for stream in streams])

    asyncio.run(main())


@pytest.mark.parametrize("is_closed_late", [False, True])
def test_a_client_whose_loop_was_closed_first_leaves_no_sockets(
    is_closed_late: bool, tmp_path: Path
) -> None:
    """The garbage collector does not wait for them either, if nothing closes the client."""

    async def start() -> AsyncEngineClient:
        client = AsyncEngineClient(f"ipc://{tmp_path}/core")
        await client.start()
        return client

    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    client = asyncio.run(start())
    assert len(os.listdir("/proc/self/fd")) > before
    if is_closed_late:
        client.disconnect()
    del client
    collecting = Thread(target=gc.collect, daemon=True)
    collecting.start()
    collecting.join(TIMEOUT_S)
    assert not collecting.is_alive()
    assert len(os.listdir("/proc/self/fd")) == before
