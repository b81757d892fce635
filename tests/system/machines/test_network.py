"""Three machines on a bad network: delay, lost packets, a partition, a death, a listener."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.message import pack_token_ids
from protocol.transport.curve import make_keys
from scripts.testing import Engine, EngineFactory, eventually
from tests.ports import free_port
from tests.system import network
from tests.system.machines.agents import FLAGS, kill_machine
from tests.system.network import Network
from tests.system.null_load import Stream, null_tokens

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not network.is_possible(), reason="needs root, ip and /dev/net/tun"),
]
NUM_STREAMS = 12
NUM_TOKENS = 3000
"""More than 15 seconds of them."""
PARTITION_S = 10.0


@pytest.fixture
def bad_network() -> Iterator[Network]:
    with Network(3, delay_s=0.05, loss=0.01) as made:
        yield made


def prompt_of(number: int) -> list[int]:
    return [number + 900, *range(700, 730)]


def begin(head: Engine) -> list[Stream]:
    streams = [
        Stream(head.url(), prompt=prompt_of(number), max_tokens=NUM_TOKENS, seed=1)
        for number in range(NUM_STREAMS)
    ]
    eventually(lambda: all(len(one.token_ids) > 100 for one in streams), "all have begun")
    return streams


def check(streams: list[Stream]) -> None:
    """Assert that every stream has every token once, in order."""
    for number, stream in enumerate(streams):
        stream.join()
        assert stream.error is None
        assert stream.token_ids == null_tokens(prompt_of(number), NUM_TOKENS)


def test_streams_are_exact_through_delay_loss_a_partition_and_the_death_of_a_machine(
    bad_network: Network, start_engine: EngineFactory, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    make_keys(keys, ["api"])
    here, *others = bad_network.machines
    join = f"{here.address}:{free_port()}"
    head = start_engine(*FLAGS, "--agents-listen", join, "--curve-keys", str(keys))
    agents = [
        start_engine.agent(join, keys, "--name", f"machine-{number}", prefix=machine.prefix)
        for number, machine in enumerate(others)
    ]

    def are_ready() -> bool:
        states: list[str] = head.readiness()["replicas"]
        return states == ["ready", "ready"]

    eventually(are_ready, "both machines serve")
    streams = begin(head)
    bad_network.cut(1)
    cut_at = time.monotonic()
    eventually(lambda: time.monotonic() - cut_at > PARTITION_S, "the partition ends")
    bad_network.cut()
    check(streams)
    assert any(one.longest_gap_s(cut_at, cut_at + PARTITION_S) > 1.0 for one in streams)
    assert max(one.longest_gap_s(cut_at, cut_at + PARTITION_S) for one in streams) < PARTITION_S
    eventually(are_ready, "the machine is back")
    streams = begin(head)
    kill_machine(agents[1])
    check(streams)
    assert bad_network.num_lost > 20
    assert bad_network.has_seen(b"CURVE"), "the listener sees the handshake"
    assert not bad_network.has_seen(pack_token_ids(prompt_of(0)[1:]))
    assert not bad_network.has_seen(b"machine-0")
    assert not bad_network.has_seen(b"null")
