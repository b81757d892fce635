"""The group of workers and its epochs, and the watch for deaths of processes."""

import os
import select
import subprocess
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from core_proc.links.pidfd_monitor import PidfdMonitor
from core_proc.links.workers import WorkerGroup
from protocol.core_worker import WorkerHello
from protocol.model_facts import ModelFacts
from protocol.transport.runtime import SystemProcesses

FACTS = ModelFacts("fake", 1000, 512, 16, 100, [2])


def hello(rank: int = 0, facts: ModelFacts = FACTS) -> WorkerHello:
    return WorkerHello(rank, 1, facts)


def test_a_group_is_complete_when_every_rank_is_there() -> None:
    group = WorkerGroup(2, core_epoch=1)
    assert group.enter(b"b", 3, hello(1))
    assert not group.complete
    assert group.rank_of(b"b") == 1
    assert group.enter(b"a", 2, hello(0))
    assert group.complete
    assert group.rank_of(b"a") == 0
    assert group.facts == FACTS
    assert set(group.peers) == {b"a", b"b"}


def test_a_rank_with_other_facts_is_named_with_the_fields() -> None:
    group = WorkerGroup(2, core_epoch=1)
    group.enter(b"a", 2, hello(0))
    group.enter(b"b", 3, hello(1, ModelFacts("other", 900, 512, 16, 90, [2])))
    disagreement = group.find_disagreement()
    assert disagreement is not None
    peer, text = disagreement
    assert peer == b"b"
    assert text == (
        "rank 1 has model 'other' instead of 'fake', vocab_size 900 instead of 1000 of rank 0"
    )


def test_a_group_has_the_sizes_of_its_smallest_rank_and_swaps_like_its_slowest() -> None:
    """Only what the ranks have found differs; a group of one has its own facts."""
    sizes: list[dict[str, int]] = [
        {"num_gpu_blocks": 100, "num_host_blocks": 7, "num_state_blocks": 9},
        {"num_gpu_blocks": 90, "num_host_blocks": 8, "num_state_blocks": 9, "max_model_len": 480},
        {"num_gpu_blocks": 95, "num_host_blocks": 9, "num_state_blocks": 6},
    ]
    group = WorkerGroup(3, core_epoch=1)
    for rank, found in enumerate(sizes):
        facts = msgspec.structs.replace(FACTS, **found)
        one = WorkerHello(rank, 1, facts, swap_cost_tokens=[3.0, 5.0, 4.0][rank])
        assert group.enter(b"%d" % rank, 5 + rank, one)
    assert group.find_disagreement() is None
    least = {"num_gpu_blocks": 90, "num_host_blocks": 7, "num_state_blocks": 6}
    least["max_model_len"] = 480
    assert group.facts == msgspec.structs.replace(FACTS, **least)
    assert group.swap_cost_tokens == 5.0


def test_stages_may_have_other_decoders_and_layouts_of_blocks_but_not_the_ranks_of_one() -> None:
    """The layers of a stage may lack the native decoder's proof; a successor must be alike."""
    native = msgspec.structs.replace(FACTS, decoder="native", kv_layout="a", exact_resume=True)
    modules = msgspec.structs.replace(native, decoder="modules", kv_layout="b")

    def group_of(*all_facts: ModelFacts) -> WorkerGroup:
        group = WorkerGroup(len(all_facts), core_epoch=1, answering_rank=2)
        for rank, facts in enumerate(all_facts):
            assert group.enter(b"%d" % rank, 5 + rank, hello(rank, facts))
        return group

    mixed = group_of(native, native, modules, modules)
    assert mixed.find_disagreement() is None
    assert mixed.facts == msgspec.structs.replace(
        native, decoder="native, modules", kv_layout="a, b"
    )
    alike = group_of(native, native, native, native)
    assert alike.facts == native
    assert not alike.facts.can_replace(mixed.facts)
    disagreement = group_of(native, native, modules, native).find_disagreement()
    assert disagreement is not None
    assert disagreement[0] == b"3"
    assert "decoder 'native' instead of 'modules'" in disagreement[1]


def test_the_next_core_takes_a_greater_epoch_than_any_before() -> None:
    """The core before it has adopted the workers again and again, under growing epochs."""
    group = WorkerGroup(2, core_epoch=8)
    group.enter(b"a", 2, WorkerHello(0, 1, FACTS, last_link_epoch=30))
    group.enter(b"b", 3, WorkerHello(1, 1, FACTS, last_link_epoch=31))
    assert group.begin_epoch() == 32
    assert group.begin_epoch() == 33


def test_ranks_of_two_incarnations_are_never_one_group() -> None:
    """The death of the older rank 1 may be noticed only after the younger rank 0 has come."""
    group = WorkerGroup(2, core_epoch=1)
    group.enter(b"a", 2, hello(0))
    group.enter(b"b", 3, hello(1))
    assert group.enter(b"c", 8, hello(0))
    assert group.peers == [b"c"]
    assert not group.enter(b"b", 3, hello(1)), "an older one comes back"
    assert not group.complete
    assert group.enter(b"d", 9, hello(1))
    assert group.complete


def test_a_group_resumes_exactly_only_if_all_ranks_do() -> None:
    group = WorkerGroup(2, core_epoch=1)
    exact = msgspec.structs.replace(FACTS, exact_resume=True)
    group.enter(b"a", 2, hello(0, exact))
    group.enter(b"b", 3, hello(1, FACTS))
    assert group.find_disagreement() is None
    assert not group.facts.exact_resume
    group.enter(b"b", 3, hello(1, exact))
    assert group.facts.exact_resume


@pytest.mark.parametrize(("rank", "epoch"), [(1, 5), (0, 2), (0, 3), (0, 2**31), (0, 2**32 - 1)])
def test_strange_ranks_older_incarnations_and_absurd_epochs_stay_outside(
    rank: int, epoch: int
) -> None:
    """A second one that claims the epoch of a present incarnation is refused, too."""
    group = WorkerGroup(1, core_epoch=1)
    assert group.enter(b"a", 3, hello())
    assert not group.enter(b"b", epoch, hello(rank))
    assert group.peers == [b"a"]


def test_a_successor_takes_the_place_of_its_rank() -> None:
    group = WorkerGroup(1, core_epoch=1)
    group.enter(b"a", 2, hello())
    assert group.enter(b"b", 3, hello())
    assert group.peers == [b"b"]
    assert not group.leave(b"a")
    assert group.leave(b"b")
    assert not group.complete


def test_one_connection_is_one_rank() -> None:
    group = WorkerGroup(2, core_epoch=1)
    group.enter(b"a", 2, hello(0))
    assert group.enter(b"a", 3, hello(1))
    assert group.peers == [b"a"]
    assert not group.complete


def test_the_epoch_of_the_link_is_the_greatest_of_both_sides() -> None:
    group = WorkerGroup(2, core_epoch=4)
    group.enter(b"a", 2, hello(0))
    group.enter(b"b", 3, hello(1))
    assert group.begin_epoch() == 4
    group = WorkerGroup(1, core_epoch=1)
    group.enter(b"a", 7, hello())
    assert group.begin_epoch() == 7


def test_every_adoption_raises_the_epoch_of_the_link() -> None:
    group = WorkerGroup(1, core_epoch=1)
    group.enter(b"a", 7, hello())
    assert [group.begin_epoch() for _ in range(3)] == [7, 8, 9]
    group.enter(b"b", 8, hello())
    assert group.begin_epoch() == 10
    group.enter(b"c", 30, hello())
    assert group.begin_epoch() == 30


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as running:
        yield running
        running.kill()


def is_ended(process: subprocess.Popen[bytes], timeout_s: float = 30.0) -> bool:
    """Return whether the process ends in time; it is not reaped, so its pid is not reused."""
    pidfd = os.pidfd_open(process.pid)
    try:
        return bool(select.select([pidfd], [], [], timeout_s)[0])
    finally:
        os.close(pidfd)


def test_a_watched_death_is_found_once_and_by_its_peer(process: subprocess.Popen[bytes]) -> None:
    poller = zmq.Poller()
    watch = PidfdMonitor(poller, SystemProcesses())
    assert watch.add(b"peer", process.pid)
    assert watch.dead(dict(poller.poll(0))) == []
    watch.kill(b"peer")
    assert is_ended(process)
    assert watch.dead(dict(poller.poll(1000))) == [b"peer"]
    watch.remove(b"peer")
    watch.remove(b"peer")
    watch.kill(b"peer")
    assert poller.sockets == []


def test_a_peer_that_is_watched_again_is_not_taken_for_its_predecessor(
    process: subprocess.Popen[bytes],
) -> None:
    poller = zmq.Poller()
    watch = PidfdMonitor(poller, SystemProcesses())
    assert watch.add(b"peer", process.pid)
    watch.add(b"peer", 0)
    process.kill()
    assert is_ended(process)
    assert watch.dead(dict(poller.poll(0))) == []


@pytest.mark.parametrize("pid", [0, -1, 2**22 + 1, 2**31 - 1, 2**31, 2**64, None])
def test_a_process_that_cannot_be_watched_is_reported(pid: int | None) -> None:
    """No pid raises an error, because it comes from the wire. The core's own pid is refused."""
    poller = zmq.Poller()
    monitor = PidfdMonitor(poller, SystemProcesses())
    assert not monitor.add(b"peer", os.getpid() if pid is None else pid)
    assert poller.sockets == []
