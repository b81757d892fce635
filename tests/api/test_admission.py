"""A burst of requests of one client does not delay those of another until its end."""

import asyncio
import json
import socket
import threading

from api_proc.fairness.admission import _PER_TURN, Admission
from api_proc.fairness.waiting import current_client
from tests.api.conftest import MakeServer
from tests.api.fake_engine import wait_until

NUM = 10 * _PER_TURN


def test_clients_are_admitted_in_turns() -> None:
    """A request that comes last has its turn, too; those that are cancelled have none."""

    async def run() -> list[str]:
        admission, order = Admission(), []

        async def request(client: str) -> None:
            current_client.set(client)
            await admission.enter()
            order.append(client)

        tasks = [asyncio.create_task(request("a")) for _ in range(NUM)]
        await asyncio.sleep(0)
        tasks[-1].cancel()
        tasks += [asyncio.create_task(request("b")) for _ in range(2)]
        await asyncio.gather(*tasks, return_exceptions=True)
        await admission.enter()
        return order

    order = asyncio.run(run())
    assert len(order) == NUM + 1
    assert max(i for i, client in enumerate(order) if client == "b") <= 3 * _PER_TURN


def test_a_request_behind_many_of_another_key_is_not_the_last(make_server: MakeServer) -> None:
    live = make_server(api_key=("one", "two"))
    address = ("127.0.0.1", int(live.url.rsplit(":", 1)[1]))
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    keys = ["one"] * (5 * _PER_TURN) + ["two"]
    connections = [socket.create_connection(address) for _ in keys]
    wait_until(lambda: len(live._server.server_state.connections) == len(keys))
    have_come = threading.Event()
    live.loop.call_soon_threadsafe(have_come.wait, 30)  # all come in one turn
    for key, connection in zip(keys, connections, strict=True):
        lines = f"{head}Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(lines.encode() + body)
    have_come.set()
    wait_until(lambda: len(live.client.requests) == len(connections))
    for connection in connections:
        connection.close()
    origins: list[str | None] = [add.origin for add in live.client.requests]
    assert origins.index(live.state.api_keys.name_of(b"two")) <= 2 * _PER_TURN
