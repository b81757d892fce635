"""What the set of replicas reports about those of other machines."""

import logging
from types import SimpleNamespace
from typing import Any

from protocol.client.replica_set import NO_CORE, ReplicaSet

HERE, THERE = "ipc:///run/core.sock", "tcp://10.0.0.2:7000"


def make_client(address: str) -> Any:
    counts = {"num_open_requests": 0, "num_inexact": 0}
    return SimpleNamespace(link_problem="", engine=None, requests=(), disconnect=bool, **counts)


def test_a_replica_of_another_machine_that_is_not_connected_is_reported_once() -> None:
    found = ReplicaSet([HERE, THERE, NO_CORE], make_client)
    for replica in found.replicas:
        replica.lost_s = 9.0
    assert list(found.silences()) == []
    for replica in found.replicas:
        replica.lost_s = 11.0
    replica = found.replicas[1]
    replica.client.link_problem = "the key of this client is unknown there"  # type: ignore[misc]
    text = f"replica 1, {THERE}, is not connected: the key of this client is unknown there"
    assert list(found.silences()) == [(logging.WARNING, text)]
    assert list(found.silences()) == []
    replica.lost_s = 0.0
    assert list(found.silences()) == [(logging.INFO, f"replica 1, {THERE}, is connected")]
    replica.client.link_problem = ""  # type: ignore[misc]
    replica.lost_s = 11.0
    [(_, line)] = found.silences()
    assert line.endswith("is not connected: nothing answers there")
    replica.close()
    assert list(found.silences()) == []


def test_replicas_that_come_silent_and_leave_are_not_kept() -> None:
    """Each may have another address: a list of machines can change without an end."""
    found = ReplicaSet([NO_CORE], make_client)
    for port in range(7000, 7003):
        for replica in found.join(found.keep_only([f"tcp://10.0.0.2:{port}"])):
            replica.lost_s = 11.0
        assert len(list(found.silences())) == 1
        found.keep_only([])
        list(found.close_retired())
    assert not found._silent
