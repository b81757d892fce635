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
from tests.system.null_load import NullLoad

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not network.is_possible(), reason="needs root, ip and /dev/net/tun"),
]
NUM_STREAMS = 12
NUM_TOKENS = 3000
"""More than 15 seconds of them."""
PARTITION_S = 10.0
SUFFIX = [*range(700, 730)]
"""The tokens of all prompts but the first of each."""


@pytest.fixture
def bad_network() -> Iterator[Network]:
    with Network(3, delay_s=0.05, loss=0.01) as made:
        yield made


def begin(head: Engine) -> NullLoad:
    return NullLoad(head.url(), NUM_STREAMS, NUM_TOKENS, suffix=SUFFIX).read(101)


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
    load = begin(head)
    bad_network.cut(1)
    cut_at = time.monotonic()
    eventually(lambda: time.monotonic() - cut_at > PARTITION_S, "the partition ends")
    bad_network.cut()
    load.check()
    gaps_s = [one.longest_gap_s(cut_at, cut_at + PARTITION_S) for one in load.streams]
    assert 1.0 < max(gaps_s) < PARTITION_S
    eventually(are_ready, "the machine is back")
    load = begin(head)
    kill_machine(agents[1])
    load.check()
    assert bad_network.num_lost > 20
    assert bad_network.has_seen(b"CURVE"), "the listener sees the handshake"
    assert not bad_network.has_seen(pack_token_ids(SUFFIX))
    assert not bad_network.has_seen(b"machine-0")
    assert not bad_network.has_seen(b"null")
