"""Few requests pass a gate at a time; the clients that wait enter in turns."""

import asyncio

import httpx
import msgspec

from api_proc.fairness.fair_gate import FairGate
from api_proc.fairness.waiting import current_client
from tests.api.conftest import MakeServer
from tests.api.fake_engine import FACTS, FakeClient
from tests.api.session_server import until


async def passed(gate: FairGate, client: str, order: list[str]) -> None:
    """Pass a gate on behalf of a client."""
    current_client.set(client)
    async with gate.inside():
        order.append(client)
        await asyncio.sleep(0)


def test_a_client_waits_for_one_request_of_each_other_client() -> None:
    async def run() -> list[str]:
        gate = FairGate()
        order: list[str] = []
        tasks = [asyncio.create_task(passed(gate, "a", order)) for _ in range(50)]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(passed(gate, "b", order)) for _ in range(2)]
        tasks.append(asyncio.create_task(passed(gate, "c", order)))
        await asyncio.gather(*tasks)
        assert not gate.is_full()
        return order

    order = asyncio.run(run())
    assert len(order) == 53
    assert set(order[1:4]) == {"a", "b", "c"}
    assert sorted(order[:6]) == ["a", "a", "a", "b", "b", "c"]


def test_requests_that_leave_give_up_their_places() -> None:
    """So does one that is let in at the moment at which it is cancelled."""

    async def run() -> list[str]:
        gate = FairGate(2)
        order: list[str] = []
        await gate.enter()
        await gate.enter()
        tasks = [asyncio.create_task(passed(gate, name, order)) for name in "abc"]
        await asyncio.sleep(0)
        tasks[0].cancel()
        gate.leave()  # lets b in
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert gate._num_free == 1
        gate.leave()
        assert gate._num_free == 2
        return order

    assert asyncio.run(run()) == ["c"]


def test_requests_have_the_turns_of_their_keys(make_server: MakeServer) -> None:
    """A large body of one client waits behind one large body of another, not behind all."""
    facts = msgspec.structs.replace(FACTS, max_model_len=2**15, num_gpu_blocks=2**13)
    live = make_server(FakeClient(facts), api_key=("one", "two"), tokenizer_pool_size=1)
    gate = live.state.large_requests.in_memory
    large = {"prompt": [5] * 20_000}

    async def fill() -> None:
        while not gate.is_full():
            await gate.enter()

    def num_waiting() -> int:
        accounts = gate._waiting._turns._origins.values()
        return sum(len(items) for tenants in accounts for items in tenants.values())

    async def run() -> None:
        async with httpx.AsyncClient(base_url=live.url, timeout=30) as http:

            async def ask(key: str) -> None:
                headers = {"authorization": f"Bearer {key}"}
                answer = await http.post("/v1/completions", json=large, headers=headers)
                assert answer.status_code == 200, answer.text

            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(fill(), live.loop))
            tasks = [asyncio.create_task(ask("one")) for _ in range(6)]
            await until(lambda: live.call(num_waiting) == 6)
            tasks.append(asyncio.create_task(ask("two")))
            await until(lambda: live.call(num_waiting) == 7)
            live.call(gate.leave)
            await asyncio.gather(*tasks)

    asyncio.run(run())
    origins: list[str | None] = [add.origin for add in live.client.requests]
    assert origins.index(live.state.api_keys.name_of(b"two")) <= 1
