"""A request that moves to another machine has its blocks read from there, or computes them.

Each engine here stands for a machine: it has a run directory and stores of its own.
"""

import asyncio
import itertools
import os
import signal
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from protocol.client import AsyncEngineClient, ReplicatedClient, ReplicatedOptions
from protocol.client import moving as module
from protocol.client.request_stream import RequestStream
from protocol.config import RoutingPolicy
from protocol.lifecycle import Role
from protocol.sampling import SamplingParams
from protocol.transport.curve import read_client_keys
from scripts.testing import LOAD_TIMEOUT_S, TIMEOUT_S, Engine, EngineFactory, eventually
from tests.system import streams
from tests.system.machines.proxy import Proxy
from tests.system.machines.replicated_streams import until_serving
from tests.system.null_load import null_tokens
from tests.system.offload.machine import Machine, num_remote
from tests.system.offload.stored_blocks import (
    NUM_PROMPTS,
    PARAMS,
    PROMPT_LEN,
    PROMPTS,
    STAGES,
    Tokens,
    begin_and_hold,
    damage,
    files_in,
    start,
    tokens_left,
    wait_for_files,
)
from tests.system.resumed_streams import body, ids_of

TENSOR = ("--tensor-parallel-size", "2")
NULL = ("--null-step-ms", "5", "--null-token-ms", "0.3")
"""Of the null model: reading pays."""
NUM_THERE = NUM_PROMPTS // 2
"""Of the requests, those at the machine that is lost."""


@pytest.fixture
def machines(
    start_engine: EngineFactory, keys: Path, request: pytest.FixtureRequest
) -> tuple[Machine, Machine]:
    """The one that is lost, and the other one.

    A parameter divides the demo model between two ranks, or has the null model.
    """
    flags = getattr(request, "param", ())
    num_ranks = 2 if flags in (TENSOR, STAGES) else 1
    begin = None if flags == NULL else start
    lost, kept = (
        Machine(start_engine, keys, *flags, begin=begin, num_ranks=num_ranks) for _ in range(2)
    )
    for machine in (lost, kept):
        machine.engine.ready()
    return lost, kept


def remote_tokens(engine: Engine) -> float:
    """Return the tokens that all replicas of an API have read from other machines."""
    with urllib.request.urlopen(engine.url() + "/metrics", timeout=TIMEOUT_S) as response:
        lines = response.read().decode().splitlines()
    name = "troika_kv_remote_tokens_loaded_total"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


class Streams:
    """Requests at two machines in turn; each has computed its own ones before."""

    def __init__(self, client: ReplicatedClient) -> None:
        self.client = client
        self.before: Tokens = []
        self.first: Tokens = []
        self._streams: list[RequestStream] = []

    @property
    def kept(self) -> AsyncEngineClient:
        return self.client.clients[1]

    async def begin(self, lost: Machine) -> None:
        await until_serving(self.client, LOAD_TIMEOUT_S)
        requests = list(zip(PROMPTS, PARAMS, strict=True))
        streams = [self.client.submit(*one) for one in requests]
        self.before = [await tokens_left(stream) for stream in streams]
        num_files = lost.num_ranks * NUM_THERE * (PROMPT_LEN // 16)
        await asyncio.to_thread(wait_for_files, lost.files, num_files)
        self._streams, self.first = await begin_and_hold(self.client, 0)

    async def end(self) -> None:
        """Read to the ends, and compare all tokens."""
        pairs = zip(self.first, self._streams, strict=True)
        found = [begun + await tokens_left(stream) for begun, stream in pairs]
        assert found == self.before
        assert self.client.num_moved == NUM_THERE

    def num_read(self) -> int:
        return num_remote(self.kept)

    async def read_at_least(self, num_tokens: int) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while self.num_read() < num_tokens:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def begun(lost: Machine, kept: Machine, keys: Path) -> AsyncIterator[Streams]:
    addresses = [lost.address, kept.address]
    options = ReplicatedOptions(policy=RoutingPolicy.ROUND_ROBIN)
    async with ReplicatedClient(addresses, options, keys=read_client_keys(keys)) as client:
        streams = Streams(client)
        await streams.begin(lost)
        yield streams


@pytest.mark.parametrize(
    ("is_killed", "machines"),
    [
        (True, NULL),
        *[pytest.param(True, flags, marks=pytest.mark.slow) for flags in ((), TENSOR, STAGES)],
        pytest.param(False, (), marks=pytest.mark.slow),
    ],
    indirect=["machines"],
)
def test_a_request_that_moves_to_another_machine_brings_its_blocks(
    is_killed: bool, machines: tuple[Machine, Machine], keys: Path
) -> None:
    lost, kept = machines

    async def play() -> None:
        async with begun(lost, kept, keys) as streams:
            if is_killed:
                lost.lose_engine()
            else:  # it ends in order: other machines read for a while
                lost.engine.process.terminate()
            await streams.end()
            await streams.read_at_least(PROMPT_LEN)  # the other one, if that pays
        if not is_killed:
            assert await asyncio.to_thread(lost.engine.process.wait, TIMEOUT_S) == 0
            assert not lost.files.exists()

    asyncio.run(play())


def remove(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("spoil", [damage, remove])
def test_blocks_that_are_damaged_or_missing_there_are_computed(
    spoil: Callable[[Path], None], machines: tuple[Machine, Machine], keys: Path
) -> None:
    lost, kept = machines

    async def play() -> None:
        async with begun(lost, kept, keys) as streams:
            for file in files_in(lost.files):
                spoil(file)
            lost.lose_engine()
            await streams.end()
            assert streams.num_read() == 0
            assert kept.engine.row(Role.WORKER).num_restarts == 0

    asyncio.run(play())


def test_a_machine_that_hangs_delays_its_requests_and_no_stream(
    machines: tuple[Machine, Machine], keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, kept = machines

    async def play() -> None:
        proxy = Proxy(lost.kv_port)
        async with proxy.listening() as address, begun(lost, kept, keys) as streams:
            proxy.cut()
            monkeypatch.setattr(module, "blocks_for", lambda *_: address)
            lost.lose_engine()
            await streams.end()
            assert streams.num_read() == 0

    asyncio.run(play())


@pytest.mark.parametrize("role", [Role.WORKER, Role.CORE])
def test_kill_9_of_the_reader_amid_a_load_continues_exactly(
    role: Role, machines: tuple[Machine, Machine], keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, kept = machines

    async def play() -> None:
        proxy = Proxy(lost.kv_port)
        async with proxy.listening() as address, begun(lost, kept, keys) as streams:
            monkeypatch.setattr(module, "blocks_for", lambda *_: address)
            num_blocks = PROMPT_LEN // 16
            proxy.cut_after(num_blocks // 2 * files_in(lost.files)[0].stat().st_size)
            lost.lose_engine()
            async with asyncio.timeout(TIMEOUT_S):
                while not proxy.is_cut:
                    await asyncio.sleep(0.005)
            os.kill(kept.engine.pid(role), signal.SIGKILL)
            proxy.mend()
            await streams.end()

    asyncio.run(play())


def test_prompts_are_computed_on_one_machine_and_continue_at_the_other(
    start_engine: EngineFactory, keys: Path
) -> None:
    machines = [Machine(start_engine, keys, *NULL) for _ in range(2)]
    params = SamplingParams(max_tokens=200, seed=1, ignore_eos=True)

    async def play() -> None:
        addresses = [machine.address for machine in machines]
        made = read_client_keys(keys)
        options = ReplicatedOptions(prefill_replicas=1)
        async with ReplicatedClient(addresses, options, keys=made) as client:
            await until_serving(client)
            streams = [client.submit(prompt, params) for prompt in PROMPTS]
            for prompt, stream in zip(PROMPTS, streams, strict=True):
                assert await tokens_left(stream) == null_tokens(prompt, params.max_tokens)
            assert client.num_handed_over == NUM_PROMPTS
            async with asyncio.timeout(TIMEOUT_S):
                while num_remote(client.clients[1]) < NUM_PROMPTS * PROMPT_LEN // 2:
                    await asyncio.sleep(0.01)

    asyncio.run(play())


@pytest.mark.slow
def test_requests_that_are_resumed_from_a_journal_bring_their_blocks(
    start_engine: EngineFactory, keys: Path, tmp_path: Path
) -> None:
    """The API and a machine die together: its successor has only the journal."""
    machines = [Machine(start_engine, keys, *NULL) for _ in range(2)]
    addresses = [machine.address for machine in machines]
    flags = ("--data-parallel-size", "0", "--routing-policy", "round_robin")
    flags += ("--replica-addresses", *addresses, "--curve-keys", str(keys))
    head = start_engine(*flags, "--journal-dir", str(tmp_path / "journal"))
    eventually(lambda: head.readiness()["replicas"] == ["ready"] * 2, "both replicas serve")
    bodies = [body(prompt=prompt, max_tokens=400, seed=1) for prompt in PROMPTS]
    begun = [
        streams.Stream(head.url(), each, headers={"X-Request-Id": f"request-{number}"})
        for number, each in enumerate(bodies)
    ]
    first = [list(itertools.islice(iter(stream.next, None), 10)) for stream in begun]
    wait_for_files(machines[0].files, NUM_THERE * (PROMPT_LEN // 16))
    machines[0].lose_engine()
    head.kill(Role.API)
    for number, read in enumerate(first):
        begun[number].close()
        headers = {"X-Request-Id": f"request-{number}", "Last-Event-ID": read[-1].id or ""}
        rest = streams.Stream(head.url(), bodies[number], headers=headers).events()
        assert ids_of(read + rest) == {0: null_tokens(PROMPTS[number], 400)}

    assert remote_tokens(head) >= PROMPT_LEN, "blocks are read from the other machine"


def test_the_block_server_of_a_machine_comes_back(start_engine: EngineFactory, keys: Path) -> None:
    engine = Machine(start_engine, keys, "--null-step-ms", "1").engine
    before = engine.pid(Role.BLOCK_SERVER)
    os.kill(before, signal.SIGKILL)
    eventually(lambda: engine.pid(Role.BLOCK_SERVER) != before, "a successor")
    assert engine.row(Role.CORE).num_restarts == 0
