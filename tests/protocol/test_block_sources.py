"""Where the blocks of a replica are read, and which replicas need not ask."""

from types import SimpleNamespace
from typing import cast

import pytest

from protocol.api_core import EngineState, EngineStats, Status
from protocol.client.block_sources import blocks_for, reaches_blocks
from protocol.client.expected_model import ExpectedModel
from protocol.client.known_engine import KnownEngine
from protocol.client.replica import Replica
from protocol.config import EngineConfig
from protocol.config.settings import configure
from protocol.model_facts import ModelFacts
from protocol.process.machines import blocks_address, with_kv_listen

HERE = "ipc:///run/core.sock"
A, A_TWO, B = "tcp://10.0.0.2:7000", "tcp://10.0.0.2:7001", "tcp://10.0.0.3:7000"


def replica(address: str, blocks_at: str = "", layout: str = "0a1b") -> Replica:
    facts = ModelFacts("m", 1000, 4096, 16, 512, [], kv_layout=layout)
    status = Status(EngineState.READY, facts, EngineStats(), blocks_at=blocks_at)
    engine = KnownEngine(address, 1.0, 0.0, ExpectedModel())
    engine.take(status, 0.0, 0)
    return cast(Replica, SimpleNamespace(address=address, engine=engine))


def test_another_machine_is_read_where_its_core_reports() -> None:
    reader, other = replica(B, "tcp://10.0.0.3:7300"), replica(A, "tcp://10.0.0.2:7300")
    assert blocks_for(reader, other) == "tcp://10.0.0.2:7300"
    assert reaches_blocks(reader, other)


def test_a_host_that_is_not_named_is_that_of_the_core() -> None:
    assert blocks_for(replica(B), replica(A, "tcp://*:7300")) == "tcp://10.0.0.2:7300"
    assert blocks_for(replica(B), replica(A, "tcp://0.0.0.0:7300")) == "tcp://10.0.0.2:7300"
    assert blocks_for(replica(B), replica(HERE, "tcp://*:7300")) == ""


def test_replicas_of_one_machine_share_its_stores() -> None:
    one, other = replica(A, "tcp://*:7300"), replica(A_TWO, "tcp://*:7300")
    assert blocks_for(one, other) == ""
    assert reaches_blocks(one, other)
    assert blocks_for(replica(HERE), replica(HERE)) == ""
    assert reaches_blocks(replica(HERE), replica(HERE))


@pytest.mark.parametrize("layout", ["", "2c3d"])
def test_blocks_with_another_layout_are_of_no_use(layout: str) -> None:
    other = replica(A, "tcp://10.0.0.2:7300", layout)
    assert blocks_for(replica(B), other) == ""
    assert not reaches_blocks(replica(B), other)


def test_a_machine_without_a_block_server_is_not_read() -> None:
    assert blocks_for(replica(B), replica(A)) == ""
    assert not reaches_blocks(replica(B), replica(A))


def listening(**values: object) -> EngineConfig:
    return with_kv_listen(configure(model="null", curve_keys="keys", **values))


@pytest.mark.parametrize("name", ["core_listen", "agents_listen"])
def test_blocks_that_are_stored_are_served_where_other_machines_connect(name: str) -> None:
    config = listening(**{name: "127.0.0.1:7000"}, kv_offload_bytes=1000)
    host, _, port = blocks_address(config).rpartition(":")
    assert host == "tcp://127.0.0.1"
    assert int(port) not in (0, 7000)
    assert blocks_address(listening(**{name: "127.0.0.1:7000"})) == ""


def test_without_stores_or_other_machines_nothing_listens() -> None:
    assert blocks_address(listening(kv_offload_bytes=1000)) == ""
    api_alone = {"agents_listen": "127.0.0.1:7000", "data_parallel_size": 0}
    assert blocks_address(listening(**api_alone, kv_offload_bytes=1000)) == ""
    chosen = listening(kv_listen="127.0.0.1:7300", core_listen="*:7000", kv_offload_bytes=1000)
    assert blocks_address(chosen) == "tcp://127.0.0.1:7300"
