"""A request that has begun continues at a replica that computes the same tokens."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol.api_core import EngineState, RequestOutput
from protocol.client import ReplicatedClient
from protocol.client.errors import EngineFailed
from protocol.client.ledger import MOVES_MAX
from protocol.client.request_stream import RequestStream
from tests.protocol.fake_core import FACTS, READY, RECOVERING, STARTING, FakeCore
from tests.protocol.replicas import PARAMS, Cores, begun, output, play, ticks, until, with_facts


def test_resumed_request_goes_to_the_replica_with_its_fingerprint(cores: Cores) -> None:
    with_facts(cores[0], checkpoint="old")
    fingerprint = with_facts(cores[1], checkpoint="new")

    async def act(client: ReplicatedClient) -> None:
        for _ in range(10):
            client.adopt(begun(fingerprint, 7), RequestStream(0, client.cancel))
        await until(lambda: cores[1].num_added == 10)
        assert not cores[0].adds
        # One without outputs begins anywhere.
        for _ in range(10):
            client.adopt(begun(fingerprint), RequestStream(0, client.cancel))
        await until(lambda: cores[0].num_added > 0)

    play(cores, act)


def test_replicas_that_compute_otherwise_are_reported_once(
    cores: Cores, caplog: pytest.LogCaptureFixture
) -> None:
    """So are those whose successor does; the report names what differs."""

    def lines() -> list[str]:
        return [one for one in caplog.messages if "computes differently" in one]

    with_facts(cores[1], max_model_len=77)

    async def act(client: ReplicatedClient) -> None:
        await ticks(client)
        assert not lines()
        for checkpoint, num_lines in (("new", 1), ("newer", 2)):
            with_facts(cores[1], checkpoint=checkpoint)
            cores[1].epoch += 1
            cores[1].send(cores[1].status)
            await until(lambda count=num_lines: len(lines()) == count)
            await ticks(client)
            assert len(lines()) == num_lines
            assert lines()[-1].startswith("replica 1 computes differently from replica 0")
            assert f"checkpoint '{checkpoint}' instead of ''" in lines()[-1]

    play(cores, act)


def test_resumed_request_waits_for_a_replica_with_its_fingerprint(cores: Cores) -> None:
    with_facts(cores[0], checkpoint="old")

    async def act(client: ReplicatedClient) -> None:
        fingerprint = msgspec.structs.replace(FACTS, checkpoint="new").fingerprint
        stream = RequestStream(0, client.cancel)
        client.adopt(begun(fingerprint, 7), stream)
        await ticks(client)
        assert not cores[0].adds
        assert not cores[1].adds
        assert with_facts(cores[1], checkpoint="new") == fingerprint
        cores[1].epoch += 1
        cores[1].send(cores[1].status)
        await until(lambda: cores[1].num_added == 1)
        assert not cores[0].adds
        assert not stream.resumed_inexactly

    play(cores, act)


def test_requests_of_a_lost_replica_that_have_begun_continue_at_an_equal_one_only(
    cores: Cores,
) -> None:
    with_facts(cores[0], checkpoint="a")
    fingerprint = with_facts(cores[1], checkpoint="b")

    async def act(client: ReplicatedClient) -> None:
        streams = [client.submit([5], PARAMS) for _ in range(8)]
        await until(lambda: sum(core.num_added for core in cores) == 8)
        num_kept = cores[0].num_added
        assert cores[1].num_added > 1
        output(cores[1], 7)
        lost = cores.pop()
        number = lost.adds[-1].request_id
        await until(lambda: any(stream.num_unread for stream in streams))
        lost.link.close()
        await until(lambda: cores[0].num_added == 7)
        moved = cores[0].adds[num_kept:]
        assert {add.fingerprint for add in moved} == {cores[0].status.facts.fingerprint}  # type: ignore[union-attr]
        assert number not in {add.request_id for add in moved}
        assert client.num_moved == len(moved)
        assert client.clients[1].requests.ids() == [number]
        entry = client.clients[1].requests.entry(number)
        assert entry is not None
        assert entry.add.fingerprint == fingerprint
        assert not any(stream.resumed_inexactly for stream in streams)

    play(cores, act, failover_s=0.1)


@pytest.mark.parametrize("is_new", [False, True])
def test_requests_do_not_wait_for_workers_that_load_the_model(is_new: bool, cores: Cores) -> None:
    """Other workers are waited for ten times as long: here longer than the test."""

    async def act(client: ReplicatedClient) -> None:
        for _ in range(4):
            client.submit([5], PARAMS)
        await until(lambda: sum(core.num_added for core in cores) == 4)
        assert cores[1].num_added > 0
        if is_new:  # a successor at the same address
            cores[1].__exit__()
            cores[1] = FakeCore(str(Path(cores[1].address.removeprefix("ipc://")).parent), epoch=5)
            cores[1].status = STARTING
            await until(lambda: client.clients[1].status == STARTING)
        else:
            cores[1].status = msgspec.structs.replace(RECOVERING, is_loading_anew=True)
            cores[1].send(cores[1].status)
        async with asyncio.timeout(5.0):
            await until(lambda: cores[0].num_added == 4)

    play(cores, act, failover_s=0.6)
    cores[1].__exit__()


def test_with_inexact_resume_a_request_continues_elsewhere_and_its_stream_shows_it(
    cores: Cores,
) -> None:
    with_facts(cores[0], checkpoint="a")
    with_facts(cores[1], checkpoint="b")

    async def act(client: ReplicatedClient) -> None:
        for number in range(1, 20):
            stream = client.submit([5], PARAMS)
            await until(lambda number=number: sum(core.num_added for core in cores) == number)
            if cores[1].adds:
                break
        output(cores[1], 7, 8)
        await until(lambda: stream.num_unread == 2)
        assert cores[1].adds[-1].request_id == stream.request_id
        cores.pop().link.close()
        await until(lambda: cores[0].num_added > 0 and cores[0].adds[-1].output_token_ids == [7, 8])
        assert stream.resumed_inexactly
        assert client.num_inexact == client.num_moved == 1
        output(cores[0], 9, first_index=2)
        await until(lambda: stream.num_unread == 3)

    play(cores, act, failover_s=0.1, allow_inexact_resume=True)


def test_engine_that_returns_with_other_facts_gets_no_request_that_has_begun(
    core: FakeCore, fast_ticks: None
) -> None:
    with_facts(core, checkpoint="a")

    async def act(client: ReplicatedClient) -> None:
        held, new = client.submit([5], PARAMS), client.submit([6], PARAMS)
        await until(lambda: core.num_added == 2)
        core.emit(RequestOutput(held.request_id, 0, [7]))
        await until(lambda: held.num_unread == 1)
        with_facts(core, checkpoint="b")
        core.adds.clear()
        core.epoch += 1
        core.send(core.status)
        await until(lambda: core.num_added > 0)
        assert (await anext(held)).token_ids == [7]
        with pytest.raises(EngineFailed, match="the engine that began the request is gone"):
            await anext(held)
        assert {add.request_id for add in core.adds} == {new.request_id}

    play([core], act, stall_timeout_s=0.3)


def test_single_engine_with_inexact_resume_continues(core: FakeCore, fast_ticks: None) -> None:
    with_facts(core, checkpoint="a")

    async def act(client: ReplicatedClient) -> None:
        stream = client.submit([5], PARAMS)
        await until(lambda: core.num_added == 1)
        output(core, 7)
        await until(lambda: stream.num_unread == 1)
        with_facts(core, checkpoint="b")
        core.epoch += 1
        core.send(core.status)
        await until(lambda: core.adds[-1].output_token_ids == [7])
        assert stream.resumed_inexactly

    play([core], act, allow_inexact_resume=True)


def test_core_that_drains_keeps_what_only_it_can_continue_exactly(cores: Cores) -> None:
    """It still computes; once it is gone, the request goes on inexactly."""
    with_facts(cores[0], checkpoint="a")
    with_facts(cores[1], checkpoint="b")

    async def act(client: ReplicatedClient) -> None:
        stream = client.submit([5], PARAMS)
        await until(lambda: any(core.adds for core in cores))
        here, there = cores if cores[0].adds else cores[::-1]
        output(here, 7)
        await until(lambda: stream.num_unread == 1)
        here.send(msgspec.structs.replace(here.status, state=EngineState.DRAINING))
        await ticks(client)
        await ticks(client)
        assert not there.adds
        output(here, 8, first_index=1)
        await until(lambda: stream.num_unread == 2)
        cores.remove(here)
        here.link.close()
        await until(lambda: there.num_added == 1)
        assert there.adds[0].output_token_ids == [7, 8]
        assert stream.resumed_inexactly

    play(cores, act, failover_s=0.1, allow_inexact_resume=True)


def test_request_that_was_moved_often_without_an_output_is_moved_no_more(cores: Cores) -> None:
    async def act(client: ReplicatedClient) -> None:
        stream = client.submit([5], PARAMS)
        await until(lambda: any(core.adds for core in cores))
        for number in range(MOVES_MAX + 1):
            here, there = (0, 1) if cores[0].adds else (1, 0)
            cores[here].adds.clear()
            cores[here].send(msgspec.structs.replace(READY, state=EngineState.DRAINING))
            if number == MOVES_MAX:
                await ticks(client)
                assert not cores[there].adds
            else:
                await until(lambda there=there: cores[there].num_added == 1)
                cores[here].send(READY)
                await until(lambda here=here: client.clients[here].serves)
        assert client.num_moved == MOVES_MAX
        assert client.clients[here].requests.ids() == [stream.request_id]

    play(cores, act)


@pytest.mark.parametrize(
    "facts",
    [
        {"checkpoint": "x"},
        {"build": "avx2"},
        {"dtype": "float32"},
        {"quantization": "w8a16"},
        {"kv_cache_dtype": "int8"},
        {"exact_resume": True},
    ],
)
def test_fingerprint_covers_what_decides_tokens(facts: dict[str, Any]) -> None:
    assert msgspec.structs.replace(FACTS, **facts).fingerprint != FACTS.fingerprint


def test_fingerprint_covers_no_memory_and_no_path() -> None:
    def of(**facts: Any) -> str:
        return msgspec.structs.replace(FACTS, **facts).fingerprint

    memory = {"num_gpu_blocks": 77, "num_host_blocks": 5, "max_model_len": 99}
    assert of(**memory, exact_resume_reason="?") == FACTS.fingerprint
    assert of(model="/a", checkpoint="x") == of(model="/b", checkpoint="x")
    assert of(decoder="native") == of(decoder="modules")
    assert of(decoder="native", exact_resume=True) != of(decoder="modules", exact_resume=True)
