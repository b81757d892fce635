"""The client of several replicas, with cores that do what a test asks for."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol.adapters import Adapter
from protocol.api_core import (
    AddRequest,
    ControlDone,
    EngineState,
    ErrorCode,
    PauseMode,
    Refused,
    RequestError,
    RequestOutput,
)
from protocol.client import ReplicatedClient, ReplicatedOptions
from protocol.client.errors import EngineFailed, Overloaded
from protocol.client.ledger import MOVES_MAX
from protocol.client.prefix_index import PrefixIndex, name_of, piece_tokens
from protocol.client.request_stream import RequestStream
from protocol.kv_events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KVEventBatch,
    KVEventsRefused,
    SubscribeKVEvents,
    prefix_hash,
    prefix_root,
)
from protocol.message import pack_token_ids
from protocol.sampling import SamplingParams
from tests.protocol.fake_core import FACTS, READY, RECOVERING, STARTING, TIMEOUT_S, FakeCore

PARAMS = SamplingParams(max_tokens=8, seed=1)
Cores = list[FakeCore]


def play(cores: Cores, act: Callable[[ReplicatedClient], Awaitable[None]], **options: Any) -> None:
    """Run a test with a connected client; the cores answer meanwhile."""

    async def main() -> None:
        addresses = [core.address for core in cores]
        async with ReplicatedClient(addresses, ReplicatedOptions(**options)) as client:
            task = asyncio.create_task(pump(cores))
            await until(lambda: all(each.serves for each in client.clients))
            await act(client)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    asyncio.run(main())


async def pump(cores: Cores) -> None:
    """Let the cores answer and report until the task is cancelled."""
    while True:
        for core in cores:
            core.pump()
            core.report()
        await asyncio.sleep(0.001)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.001)


async def ticks(client: ReplicatedClient) -> None:
    """Wait until the client has looked twice at what its replicas hold."""
    for _ in range(2):
        timer = client._timer
        await until(lambda timer=timer: client._timer is not timer)


def answer(core: FakeCore, *, ok: bool, error: str = "") -> None:
    core.send(ControlDone(core.controls[-1].number, ok, PauseMode.RUNNING, error))


async def known_index(client: ReplicatedClient) -> PrefixIndex:
    """Return the index once the client has seen the cores' epochs."""
    await until(lambda: all(each._cache_epoch for each in client._replicas))
    return client._placement.index


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


def test_replica_that_refuses_to_reset_keeps_its_prefixes_and_the_other_does_not(
    cores: Cores,
) -> None:
    async def act(client: ReplicatedClient) -> None:
        index = await known_index(client)
        for each in (0, 1):
            index.add(each, [b"a", b"b"], 9)
        reset = asyncio.create_task(client.reset_prefix_cache())
        await until(lambda: all(core.controls for core in cores))
        answer(cores[0], ok=True)
        answer(cores[1], ok=False)
        assert not await reset
        assert list(index.holders(b"a")) == [1]

    play(cores, act)


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


def test_prefixes_of_a_new_core_and_of_one_that_is_gone_are_forgotten(cores: Cores) -> None:
    async def act(client: ReplicatedClient) -> None:
        index = await known_index(client)
        for each in (0, 1):
            index.add(each, [b"a"], 9)
        await cores[0].restart(0)
        await until(lambda: list(index.holders(b"a")) == [1])
        cores.pop().link.close()
        await until(lambda: not index.holders(b"a"))

    play(cores, act)


def test_pieces_of_prompts_have_blocks_of_a_replica_that_serves(cores: Cores) -> None:
    with_facts(cores[0], block_size=128)
    lost = cores[0]

    async def act(client: ReplicatedClient) -> None:
        cores.remove(lost)
        lost.link.close()
        await until(lambda: not client.clients[0].serves)
        num_pieces = len(client._placement.names(list(range(256)), "", None))
        assert num_pieces == 256 // piece_tokens(FACTS.block_size)

    play(cores, act)


def with_facts(core: FakeCore, **facts: Any) -> str:
    """Change the facts of a core; returns their fingerprint."""
    core.status = msgspec.structs.replace(READY, facts=msgspec.structs.replace(FACTS, **facts))
    assert core.status.facts is not None
    return core.status.facts.fingerprint


def begun(fingerprint: str, *output_token_ids: int) -> AddRequest:
    """Return a request as the journal has it."""
    return AddRequest(1, [5], PARAMS, list(output_token_ids), fingerprint=fingerprint)


def output(core: FakeCore, *token_ids: int, first_index: int = 0) -> None:
    """Send outputs of the newest request."""
    core.emit(RequestOutput(core.adds[-1].request_id, first_index, list(token_ids)))


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
    """Also those whose successor does; what differs is named."""

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
        assert client.clients[1].open_ids() == [number]
        entry = client.clients[1].entry(number)
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
        assert client.clients[here].open_ids() == [stream.request_id]

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


def stored(*names: bytes, group: int = 0) -> BlocksStored:
    return BlocksStored(list(names), None, [], 16, group, "", 0)


def test_events_of_the_cores_are_followed(cores: Cores) -> None:
    long, short = [bytes([number]) * 32 for number in (1, 2)]

    async def act(client: ReplicatedClient) -> None:
        index = client._placement.index

        async def until_held_by(name: bytes, *holders: int) -> None:
            await until(lambda: sorted(index.holders(name_of(name))) == list(holders))

        await until(lambda: all(core.subscriptions for core in cores))
        for core in cores:
            [asked] = core.subscriptions
            assert isinstance(asked, SubscribeKVEvents)
            number = asked.subscription
            core.send(KVEventBatch(number, None, [AllBlocksCleared(), stored(long, short)]))
            core.send(KVEventBatch(number, 5, [stored(b"w" * 32, group=1)]))
        await until_held_by(short, 0, 1)
        await until_held_by(b"w" * 32)
        cores[1].send(KVEventBatch(number, 6, [BlocksRemoved([short], 0)]))
        await until_held_by(short, 0)
        await ticks(client)
        await until_held_by(long, 0, 1)
        cores[0].send(KVEventBatch(number, 6, [AllBlocksCleared()]))
        await until_held_by(long, 1)
        cores[1].send(KVEventsRefused(number, "no events"))
        await until(client._followers._tasks[1].done)

    play(cores, act, follow_kv_events=True)


def test_request_goes_where_the_events_of_another_client_show_its_prefix(cores: Cores) -> None:
    async def act(client: ReplicatedClient) -> None:
        prompt = list(range(64))
        prefix = prefix_hash(prefix_root())
        hashes = []
        for first in range(0, 64, 16):
            prefix.update(pack_token_ids(prompt[first : first + 16]))
            hashes.append(prefix.digest())
        await until(lambda: bool(cores[1].subscriptions))
        [asked] = cores[1].subscriptions
        assert isinstance(asked, SubscribeKVEvents)
        cores[1].send(KVEventBatch(asked.subscription, None, [AllBlocksCleared(), stored(*hashes)]))
        await until(lambda: len(client._placement.index) == 4)
        client.submit([*prompt, 7], PARAMS)
        await until(lambda: cores[1].num_added == 1)
        assert not cores[0].adds

    play(cores, act, follow_kv_events=True)


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


def joining(
    cores: Cores, act: Callable[[ReplicatedClient], Awaitable[None]], *first: FakeCore
) -> None:
    """Run a test with a client whose replicas change; `first`: those that it begins with."""

    async def main() -> None:
        addresses = [core.address for core in first]
        options = ReplicatedOptions(failover_s=0.1)
        async with ReplicatedClient(addresses, options, may_change=True) as client:
            task = asyncio.create_task(pump(cores))
            await act(client)
            task.cancel()

    asyncio.run(main())


def test_without_a_replica_requests_are_refused_and_resumed_ones_wait(cores: Cores) -> None:
    async def act(client: ReplicatedClient) -> None:
        with pytest.raises(Overloaded, match="is starting"):
            client.submit([5], PARAMS)
        client.adopt(begun("", 7), RequestStream(0, client.cancel))
        client.set_addresses([cores[0].address])
        await until(lambda: cores[0].num_added == 1)
        assert cores[0].adds[0].output_token_ids == [7]
        await until(lambda: [each.is_open for each in client.clients] == [False, True])

    joining(cores, act)


def test_replicas_join_and_those_that_retire_leave_once_they_are_empty(cores: Cores) -> None:
    one, other = cores

    async def act(client: ReplicatedClient) -> None:
        await until(lambda: client.clients[0].serves)
        streams = [client.submit([5], PARAMS) for _ in range(8)]
        await until(lambda: one.num_added == 8)
        for stream in streams:
            one.emit(RequestOutput(stream.request_id, 0, [7]))
        await until(lambda: all(stream.num_unread for stream in streams))
        client.set_addresses([one.address, other.address])
        await until(lambda: client.clients[1].serves)
        client.set_addresses([other.address])
        await until(lambda: other.num_added == 8)
        assert all(add.output_token_ids == [7] for add in other.adds)
        await until(lambda: sorted(one.aborted) == [stream.request_id for stream in streams])
        await until(lambda: not client.clients[0].is_open)
        client.submit([6], PARAMS)
        await until(lambda: other.num_added == 9)
        client.set_addresses([other.address, one.address])  # its number is taken again
        await until(lambda: client.clients[0].serves)
        assert len(client.clients) == 2
        for _ in range(20):
            client.submit([5], PARAMS)
        await until(lambda: one.num_added > 8 and one.num_added + other.num_added == 37)

    joining(cores, act, one)


def test_a_replica_that_retires_alone_keeps_its_requests_until_another_one_joins(
    cores: Cores,
) -> None:
    one, other = cores

    async def act(client: ReplicatedClient) -> None:
        await until(lambda: client.clients[0].serves)
        stream = client.submit([5], PARAMS)
        await until(lambda: one.num_added == 1)
        client.set_addresses([])
        await ticks(client)
        output(one, 7)
        await until(lambda: stream.num_unread == 1)
        client.set_addresses([other.address])
        await until(lambda: other.num_added == 1)
        assert other.adds[0].output_token_ids == [7]

    joining(cores, act, one)


def test_when_all_machines_are_gone_new_requests_are_refused_while_others_wait(
    cores: Cores,
) -> None:
    async def act(client: ReplicatedClient) -> None:
        await until(lambda: client.clients[0].serves)
        client.submit([5], PARAMS)
        await until(lambda: cores[0].num_added == 1)
        cores.pop(0).link.close()
        client.set_addresses([])
        await until(lambda: not client.clients[0].connected)
        assert client.num_open_requests == 1
        with pytest.raises(Overloaded, match="all replicas have left") as caught:
            client.submit([6], PARAMS)
        assert caught.value.error.code is ErrorCode.STARTING  # 503, not 429

    joining(cores, act, cores[0])


def test_when_the_last_replicas_leave_requests_are_refused_with_that_reason(cores: Cores) -> None:
    async def act(client: ReplicatedClient) -> None:
        await until(lambda: all(each.serves for each in client.clients))
        for core in cores:
            core.send(msgspec.structs.replace(READY, state=EngineState.DRAINING))
        await until(lambda: not any(each.serves for each in client.clients))
        with pytest.raises(Overloaded, match="no other one has joined"):
            client.submit([5], PARAMS)
        assert client.facts is not None
        client.set_addresses([])
        await until(lambda: sum(each.is_open for each in client.clients) == 1)
        assert client.facts is None

    joining(cores, act, *cores)


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


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_pause_holds_at_a_replica_that_joins(cores: Cores, is_answered: bool) -> None:
    one, other = cores

    async def act(client: ReplicatedClient) -> None:
        await until(lambda: client.clients[0].serves)
        pausing = asyncio.create_task(client.pause())
        await until(lambda: one.controls)
        if is_answered:
            one.done(PauseMode.PAUSED_ALL)
            assert await pausing
        client.set_addresses([one.address, other.address])
        await until(lambda: other.controls)
        assert other.controls[0].pause_mode is PauseMode.PAUSED_ALL
        assert other.controls[0].restores
        one.done(PauseMode.PAUSED_ALL)
        assert await pausing

    joining(cores, act, one)


@pytest.mark.parametrize("ends", ["answered", "not answered", "by another client"])
def test_a_replica_that_joins_after_a_pause_computes(cores: Cores, ends: str) -> None:
    one, other = cores

    async def act(client: ReplicatedClient) -> None:
        await until(lambda: client.clients[0].serves)
        pausing = asyncio.create_task(client.pause())
        await until(lambda: one.controls)
        one.done(PauseMode.PAUSED_ALL)
        assert await pausing
        if ends == "by another client":
            one.send(READY)
            await until(lambda: not client.clients[0].pauses)
        else:
            resuming = asyncio.create_task(client.resume(timeout_s=0.2))
            await until(lambda: len(one.controls) == 2)
            if ends == "answered":
                one.done(PauseMode.RUNNING)
                assert await resuming
            else:
                with pytest.raises(TimeoutError):
                    await resuming
        client.set_addresses([one.address, other.address])
        await until(lambda: client.clients[1].serves)
        client.set_addresses([other.address])
        client.submit([5], PARAMS)
        await until(lambda: other.num_added == 1)
        assert not other.controls

    joining(cores, act, one)


@pytest.mark.parametrize("wrong", ["10.0.0.2:5000", "tcp://10.0.0.2:5000", "tcp://a:0"])
def test_a_wrong_address_changes_nothing(wrong: str, cores: Cores) -> None:
    one, other = cores

    async def act(client: ReplicatedClient) -> None:
        await until(lambda: client.clients[0].serves)
        with pytest.raises(ValueError, match=r"address|tcp://HOST:PORT"):
            client.set_addresses([one.address, wrong, other.address])
        assert len(client.clients) == 1
        client.set_addresses([one.address, other.address])
        await until(lambda: client.clients[1].serves)

    joining(cores, act, one)


def test_a_replica_serves_until_its_successor_does(cores: Cores) -> None:
    one, other = cores
    other.answers = False

    async def act(client: ReplicatedClient) -> None:
        await until(lambda: client.clients[0].serves)
        client.set_addresses([other.address])
        await until(lambda: other.connects)
        client.submit([5], PARAMS)
        await until(lambda: one.num_added == 1)
        other.answers = True
        other.send(READY)
        await until(lambda: other.num_added == 1 and one.aborted)
        client.submit([6], PARAMS)
        await until(lambda: other.num_added == 2 and not client.clients[0].is_open)

    joining(cores, act, one)


def test_a_pause_is_done_when_a_replica_leaves_meanwhile(cores: Cores) -> None:
    one, other = cores

    async def act(client: ReplicatedClient) -> None:
        await until(lambda: all(each.serves for each in client.clients))
        pausing = asyncio.create_task(client.pause())
        await until(lambda: one.controls and other.controls)
        other.done(PauseMode.PAUSED_ALL)
        client.set_addresses([other.address])
        assert await pausing

    joining(cores, act, one, other)


def test_an_address_that_is_none_changes_nothing(cores: Cores) -> None:
    one, other = cores

    async def act(client: ReplicatedClient) -> None:
        await until(lambda: client.clients[0].serves)
        for address in ("tcp://ho!st:7000", "tcp://host:99999", "tcp://-host:7000", "tcp://host"):
            with pytest.raises(ValueError, match="tcp://"):
                client.set_addresses([other.address, address])
        assert client.clients[0].serves
        assert len(client.clients) == 1

    joining(cores, act, one)
