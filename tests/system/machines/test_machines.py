"""Engines of several machines, here at addresses of this one, and a proxy that cuts the wire."""

import asyncio
import itertools
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from protocol.api_core import PauseMode
from protocol.client import EngineClient, ReplicatedClient
from protocol.lifecycle import Role
from protocol.transport.curve import read_client_keys
from scripts.testing import TIMEOUT_S, EngineFactory, eventually
from tests.paths import DEMO_MODEL
from tests.system import streams
from tests.system.machines.machine import Machine
from tests.system.machines.proxy import Proxy
from tests.system.machines.replicated_streams import (
    EXPECTED,
    NUM_STREAMS,
    PARAMS,
    Tokens,
    all_streams,
    half_read,
    prompt_of,
    until_serving,
)
from tests.system.null_load import NullLoad
from tests.system.resumed_streams import body, ids_of


def test_streams_by_tcp_are_exact_through_kill_9_of_worker_and_core(
    start_engine: EngineFactory, keys: Path
) -> None:
    machine = Machine(start_engine, keys)
    machine.engine.ready()
    with EngineClient(machine.address, keys=read_client_keys(keys)) as client:
        client.wait_ready(TIMEOUT_S)
        for role in (Role.WORKER, Role.CORE):
            streams = [client.submit(prompt_of(number), PARAMS) for number in range(8)]
            for stream in streams:
                next(stream)
            os.kill(machine.engine.pid(role), signal.SIGKILL)
            found = [stream.result(TIMEOUT_S).token_ids for stream in streams]
            assert found == EXPECTED[:8]
            machine.engine.ready()


def test_a_machine_that_is_started_again_is_paused_as_before(
    start_engine: EngineFactory, keys: Path
) -> None:
    """The client takes neither core for the other, although their run directories know no epoch."""
    first, client_keys = Machine(start_engine, keys), read_client_keys(keys)
    first.engine.ready()
    with EngineClient(first.address, keys=client_keys) as client:
        client.wait_ready(TIMEOUT_S)
        assert client.pause(PauseMode.PAUSED_ALL)
        epoch = first.engine.row(Role.CORE).epoch
        first.engine.close()
        again = Machine(start_engine, keys, first.port)
        again.engine.ready()
        assert again.engine.row(Role.CORE).epoch > epoch
        with EngineClient(again.address, keys=client_keys) as other:

            def is_paused() -> bool | None:
                status = other.status
                return status is not None and status.pause_mode is PauseMode.PAUSED_ALL

            eventually(is_paused, "the pause holds again")


# test_streams_go_on_when_a_machine_dies_… kills one, too.
@pytest.mark.parametrize("is_killed", [pytest.param(True, marks=pytest.mark.slow), False])
def test_requests_of_a_machine_that_is_gone_or_silent_continue_at_another(
    is_killed: bool, start_engine: EngineFactory, keys: Path
) -> None:
    kept, lost = Machine(start_engine, keys), Machine(start_engine, keys)
    for machine in (kept, lost):
        machine.engine.ready()

    async def play() -> None:
        proxy = Proxy(lost.port)
        async with proxy.listening() as address:
            client = ReplicatedClient([kept.address, address], keys=read_client_keys(keys))
            async with client:
                found, streams, num_there = await half_read(client)
                if is_killed:
                    await asyncio.to_thread(lost.engine.process.kill)
                else:
                    proxy.cut()
                await streams
                assert found == EXPECTED
                assert client.num_moved == num_there
                if not is_killed:  # it comes back, without an old request
                    proxy.mend()
                    await until_serving(client)
                    assert await all_streams(client, again := [[] for _ in range(NUM_STREAMS)])
                    assert again == EXPECTED

    asyncio.run(play())


@pytest.mark.slow
def test_a_slow_wire_that_loses_packets_costs_time_only(
    start_engine: EngineFactory, keys: Path
) -> None:
    """It delays by 50 ms each way, and stalls for one piece of a hundred."""
    machine = Machine(start_engine, keys)
    machine.engine.ready()

    async def play() -> None:
        proxy = Proxy(machine.port, delay_s=0.05, stalls=0.01)
        made = read_client_keys(keys)
        async with (
            proxy.listening() as address,
            ReplicatedClient([address], keys=made) as client,
        ):
            await client.wait_ready(TIMEOUT_S)
            for _ in range(5):
                found: Tokens = [[] for _ in range(NUM_STREAMS)]
                await all_streams(client, found)
                assert found == EXPECTED

    asyncio.run(play())


def test_an_api_has_replicas_on_other_machines(start_engine: EngineFactory, keys: Path) -> None:
    machine = Machine(start_engine, keys)
    machine.engine.ready()
    remote = ("--replica-addresses", machine.address, "--curve-keys", str(keys))
    head = start_engine("--null-step-ms", "5", "--routing-policy", "round_robin", *remote)

    def serve() -> bool:
        states: list[str] = head.readiness()["replicas"]
        return states == ["ready"] * 2

    eventually(serve, "both replicas serve")
    load = NullLoad(head.url(), 8, PARAMS.max_tokens).read(11)
    machine.engine.process.kill()
    load.check()


def test_clients_of_a_lost_machine_read_on_at_another_api_from_the_journal(
    start_engine: EngineFactory, keys: Path, tmp_path: Path
) -> None:
    """API, core and worker of a machine die; the journal is on storage that both machines have."""
    machine = Machine(start_engine, keys)
    machine.engine.ready()
    flags = ("--replica-addresses", machine.address, "--curve-keys", str(keys))
    flags += ("--journal-dir", str(tmp_path / "journal"))
    lost = start_engine("--null-step-ms", "5", "--routing-policy", "round_robin", *flags)
    eventually(lambda: lost.readiness()["replicas"] == ["ready"] * 2, "both replicas serve")
    bodies = [
        body(prompt=prompt_of(number), max_tokens=PARAMS.max_tokens, seed=1) for number in range(8)
    ]
    begun = [
        streams.Stream(lost.url(), each, headers={"X-Request-Id": f"request-{number}"})
        for number, each in enumerate(bodies)
    ]
    first = [list(itertools.islice(iter(stream.next, None), 10)) for stream in begun]
    lost.process.kill()
    another = start_engine("--data-parallel-size", "0", *flags)
    another.ready()
    for number, read in enumerate(first):
        begun[number].close()
        last_id = read[-1].id
        assert last_id is not None
        headers = {"X-Request-Id": f"request-{number}", "Last-Event-ID": last_id}
        rest = streams.Stream(another.url(), bodies[number], headers=headers).events()
        assert ids_of(read + rest) == {0: EXPECTED[number]}


@pytest.mark.slow
def test_an_engine_with_another_training_of_the_model_gets_no_request(
    start_engine: EngineFactory, keys: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(DEMO_MODEL, other)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[len(weights) // 2 :] = bytes(len(weights) - len(weights) // 2)
    (other / "model.safetensors").unlink()  # it may be read-only
    (other / "model.safetensors").write_bytes(weights)
    machine = Machine(start_engine, keys, model=str(other))
    machine.engine.ready()
    remote = ("--replica-addresses", machine.address, "--curve-keys", str(keys))
    alone = start_engine("--data-parallel-size", "0", *remote, model="demo")
    head = start_engine("--routing-policy", "round_robin", *remote, model="demo")

    def compared() -> Any:
        answer = head.readiness()
        return answer if answer["other_models"] else None

    answer = eventually(compared, "the engine is compared")
    assert answer["replicas"] == ["ready", "other_model"]
    [line] = answer["other_models"]
    assert line.startswith("replica 1 gets no requests: its model")
    assert "weights" in line
    assert "tokenizer" not in line
    body = {"prompt": "def a", "max_tokens": 8, "temperature": 0}
    texts = [head.post("/v1/completions", **body)["choices"][0]["text"] for _ in range(6)]
    assert len(set(texts)) == 1

    def remarked() -> str | None:
        """Return where the engine without one of its own serves, once the status names it."""
        reply = alone.status()
        line = f"replica 0 gets no requests{answer['other_models'][0].partition('requests')[2]}"
        return reply.url if reply is not None and reply.remarks == [line] else None

    url = eventually(remarked, "the status names it")
    refused = httpx.post(f"{url}/v1/completions", json=body)
    assert refused.status_code == 503
    assert "weights" in refused.json()["error"]["message"]
