"""The client of several replicas: controls, placement and long prompts, with fake cores."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from protocol.adapters import Adapter
from protocol.api_core import EngineState, ErrorCode, Refused, RequestError
from protocol.client import ReplicatedClient
from protocol.client.errors import Overloaded
from protocol.sampling import SamplingParams
from tests.protocol.fake_core import READY, RECOVERING, FakeCore
from tests.protocol.replicas import (
    PARAMS,
    Cores,
    answer,
    output,
    play,
    pump,
    ticks,
    until,
    with_facts,
)


def test_a_wait_for_replicas_states_why_each_is_not_ready(cores: Cores) -> None:
    async def main() -> None:
        async with ReplicatedClient([*(core.address for core in cores), *others]) as client:
            task = asyncio.create_task(pump(cores))
            await until(lambda: client.clients[0].status == RECOVERING)
            with pytest.raises(TimeoutError) as caught:
                await client.wait_ready(timeout_s=0.02)
            task.cancel()
        assert str(caught.value) == (
            "no replica has been ready within 0.02 s: replica 0: its last state is recovering;"
            f" replica 1: nothing answers at {cores[1].address};"
            f" replica 2: nothing answers at {others[0]};"
            f" replica 3: nothing answers at {others[1]}; 1 more"
        )

    others = [f"ipc://{cores[0].address.removeprefix('ipc://')}.{number}" for number in range(3)]
    cores[0].status, cores[1].answers = RECOVERING, False
    asyncio.run(main())


def test_error_of_a_control_names_the_replica(cores: Cores) -> None:
    async def act(client: ReplicatedClient) -> None:
        load = asyncio.create_task(client.load_adapter(Adapter("a", "/a", b"a" * 32)))
        await until(lambda: all(core.controls for core in cores))
        answer(cores[0], ok=True)
        answer(cores[1], ok=False)
        with pytest.raises(Overloaded, match="replica 1: the engine is starting"):
            await load
        load = asyncio.create_task(client.load_adapter(Adapter("a", "/a", b"a" * 32)))
        await until(lambda: all(len(core.controls) == 2 for core in cores))
        answer(cores[0], ok=True)
        answer(cores[1], ok=False, error="its rank is 99")
        assert await load == "replica 1: its rank is 99"
        with pytest.raises(TimeoutError, match="replica 0 has not answered"):
            await client.resume(timeout_s=0.05)

    play(cores, act)


def test_requests_of_a_session_go_to_one_replica(cores: Cores) -> None:
    async def act(client: ReplicatedClient) -> None:
        for number in range(8):
            client.submit([number], PARAMS, affinity="a")
        await until(lambda: sum(core.num_added for core in cores) == 8)
        assert {core.num_added for core in cores} == {0, 8}

    play(cores, act)


def test_single_replica_takes_all_and_has_no_router(core: FakeCore) -> None:
    async def act(client: ReplicatedClient) -> None:
        client.submit([1] * 200, PARAMS, affinity="a")
        await until(lambda: core.num_added == 1)
        assert len(client._placement.index) == 0
        assert client._timer is None

    play([core], act)


@pytest.mark.parametrize(("max_tokens", "is_moved"), [(50, True), (200, False)])
def test_request_moves_only_where_the_longest_context_does_not_change_its_end(
    cores: Cores, max_tokens: int, is_moved: bool
) -> None:
    with_facts(cores[0], max_model_len=100)
    with_facts(cores[1], max_model_len=4096)

    async def act(client: ReplicatedClient) -> None:
        params = SamplingParams(max_tokens=max_tokens, seed=1)
        for number in range(1, 20):
            stream = client.submit([5], params)
            await until(lambda number=number: sum(core.num_added for core in cores) == number)
            if cores[1].adds:
                break
        output(cores[1], 7)
        await until(lambda: stream.num_unread == 1)
        cores[0].adds.clear()
        cores.pop().link.close()
        await until(lambda: client._replicas[1].lost_s >= 0.2)
        await ticks(client)
        assert len(cores[0].adds) == client.num_moved == int(is_moved)

    play(cores, act, failover_s=0.1)


def test_request_that_a_draining_core_refuses_continues_at_the_other(cores: Cores) -> None:
    async def act(client: ReplicatedClient) -> None:
        stream = client.submit([5], PARAMS)
        await until(lambda: any(core.adds for core in cores))
        here, there = cores if cores[0].adds else cores[::-1]
        error = RequestError(ErrorCode.DRAINING, "the engine is shutting down")
        here.send(Refused(stream.request_id, error))
        here.send(msgspec.structs.replace(READY, state=EngineState.DRAINING))
        await until(lambda: there.num_added == 1)
        output(there, 7)
        assert (await anext(stream)).token_ids == [7]

    play(cores, act)


LONG = list(range(300))


@pytest.mark.parametrize("affinity", ["", "a session"])
def test_long_prompts_continue_where_their_blocks_can_be_read(
    tmp_path: Path, cores: Cores, affinity: str
) -> None:
    """Of the others, one keeps blocks of another layout."""
    with ExitStack() as stack:
        (tmp_path / "third").mkdir()
        third = stack.enter_context(FakeCore(str(tmp_path / "third")))
        for core, layout in zip((*cores, third), ("one", "other", "one"), strict=True):
            with_facts(core, kv_layout=layout)

        async def act(client: ReplicatedClient) -> None:
            for number in range(1, 9):
                client.submit([number, *LONG], PARAMS, affinity=affinity)
                await until(lambda number=number: cores[0].num_added == number)
                output(cores[0], 7)
                await until(lambda number=number: third.num_added == number)
            assert not cores[1].adds
            assert client.num_handed_over == 8
            client.submit(LONG[:5], PARAMS)
            await until(lambda: cores[1].num_added + third.num_added == 9)
            assert cores[0].num_added == 8

        play([*cores, third], act, prefill_replicas=1)


def test_a_prompt_whose_logprobs_are_wanted_is_computed_where_it_is_decoded(cores: Cores) -> None:
    params = SamplingParams(max_tokens=8, seed=1, prompt_logprobs=1)
    for core in cores:
        with_facts(core, kv_layout="one")

    async def act(client: ReplicatedClient) -> None:
        client.submit(LONG, params)
        await until(lambda: cores[1].num_added == 1)

    play(cores, act, prefill_replicas=1)
