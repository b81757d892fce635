"""The client knows which prefixes its replicas have cached, from their KV events too."""

import asyncio

from protocol.client import ReplicatedClient
from protocol.client.prefix_index import name_of, piece_tokens
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
from tests.protocol.fake_core import FACTS
from tests.protocol.replicas import (
    PARAMS,
    Cores,
    answer,
    known_index,
    play,
    ticks,
    until,
    with_facts,
)


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
