"""Slots of the process table: connections from Hello and other messages, exchange, the dead."""

import contextlib
import socket
from collections.abc import Iterator
from typing import Any, cast

import pytest
import zmq

from protocol.config import EngineConfig
from protocol.config.settings import configure
from protocol.lifecycle import ProcessState, Ready, Role, Stop
from protocol.process.child_handle import ChildHandle
from protocol.transport.channel import RouterChannel
from scripts.supervisor.actions import Origin, Slot, Start, api_slot
from scripts.supervisor.process_state import Process
from scripts.supervisor.process_table import ProcessTable
from scripts.supervisor.system import System

API, NEXT_API = api_slot(0, 1), api_slot(0, 1, is_spare=True)
CORE, STANDBY_CORE = Slot(Role.CORE), Slot(Role.STANDBY_CORE)


class FakeLink:
    def __init__(self) -> None:
        self.sent: list[tuple[bytes, int]] = []
        self.forgotten: list[bytes] = []

    def send(self, peer: bytes, epoch: int, body: bytes) -> bool:
        self.sent.append((peer, epoch))
        return True

    def forget(self, peer: bytes) -> None:
        self.forgotten.append(peer)


class FakeChild:
    """A process that ends when the test ends it: its pid is ten times its pidfd."""

    def __init__(self, epoch: int, pidfd: int) -> None:
        self.epoch = epoch
        self.pidfd = pidfd
        self.pid = 10 * pidfd
        self.status: int | None = None

    def poll(self) -> int | None:
        return self.status

    def close(self) -> None:
        pass


class Bench:
    """A table with a core, its standby and two APIs, which have the pidfds 3 to 6."""

    def __init__(self) -> None:
        self.link = FakeLink()
        self.children = {
            slot: FakeChild(epoch, epoch + 2)
            for epoch, slot in enumerate((CORE, STANDBY_CORE, API, NEXT_API), 1)
        }
        self.table = ProcessTable(
            configure(model="null"),
            self.children,
            None,
            cast(RouterChannel, self.link),
            zmq.Poller(),
            system=System(),
        )
        for slot, child in self.children.items():
            self.table._enter(slot, cast(ChildHandle, child))


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    with contextlib.closing(made.table):
        yield made


def test_process_whose_hello_was_lost_is_reached_after_its_next_message(bench: Bench) -> None:
    """A Hello takes precedence, because it names the process."""
    bench.table.send(CORE, Stop())
    assert bench.link.sent == []
    bench.table.connect(CORE, 1, b"one", None)
    bench.table.send(CORE, Stop())
    bench.table.connect(CORE, 1, b"forged", 77)
    bench.table.connect(CORE, 1, b"two", 30)
    bench.table.connect(CORE, 1, b"one", None)
    bench.table.send(CORE, Stop())
    assert bench.link.sent == [(b"one", 1), (b"two", 1)]


def test_promoted_process_keeps_its_connection(bench: Bench) -> None:
    """`Promote` and all before it have the epoch of the standby."""
    bench.table.connect(STANDBY_CORE, 2, b"standby", 40)
    bench.children[CORE].status = 1
    bench.table.reap(CORE)
    bench.table.start(Start(CORE, 9, Origin.PROMOTED))
    bench.table.send(STANDBY_CORE, Stop())
    bench.table.send(CORE, Stop())
    assert bench.link.sent == [(b"standby", 2), (b"standby", 9)]
    bench.children[STANDBY_CORE].status = 1
    bench.table.reap(CORE)
    assert bench.link.forgotten == [b"standby"]


def test_connections_of_other_programs_are_forgotten_after_the_answer(bench: Bench) -> None:
    bench.table.connect(CORE, 1, b"core", 30)
    for peer in (b"core", b"tool"):
        bench.table.answer(peer, Stop())
    assert bench.link.sent == [(b"core", 0), (b"tool", 0)]
    assert bench.link.forgotten == [b"tool"]


def test_the_dead_are_found_in_their_present_slots(bench: Bench) -> None:
    """The last message of a process may move another, as when an API's successor is ready."""
    dead = bench.table.dead({3, 5})
    bench.table.swap(API, NEXT_API)
    assert [bench.table.slot_of(child) for child in dead] == [CORE, NEXT_API]


def test_helpers_are_reaped_first(bench: Bench) -> None:
    """A dead standby must not be promoted."""
    dead = bench.table.dead({3, 4})
    assert [bench.table.slot_of(child) for child in dead] == [STANDBY_CORE, CORE]


def test_a_process_that_has_not_been_started_has_no_restarts(bench: Bench) -> None:
    process = Process(STANDBY_CORE)
    [_, line] = bench.table.status([process], ProcessState.READY)
    assert (line.state, line.num_restarts) == (ProcessState.STOPPED, 0)


def test_successor_of_an_api_process_has_its_index() -> None:
    """It therefore takes over the journal, and owns the same requests."""
    ranks: list[int] = []

    def start_child(module: str, config: EngineConfig, **options: Any) -> FakeChild:
        ranks.append(options["rank"])
        return FakeChild(options["epoch"], options["epoch"] + 2)

    slots = [api_slot(index, 2, is_spare=spare) for spare in (False, True) for index in range(2)]
    config = configure(model="null", api_server_count=2)
    system = System(start_child=cast(Any, start_child))
    link = cast(RouterChannel, FakeLink())
    table = ProcessTable(config, slots, None, link, zmq.Poller(), system=system)
    with contextlib.closing(table):
        for epoch, slot in enumerate(slots, 1):
            table.start(Start(slot, epoch))
    assert ranks == [0, 1, 0, 1]


class FakeZygote:
    """Records its orders; it has forked nothing."""

    def __init__(self, epoch: int, rank: int) -> None:
        self.rank = rank
        self.child = FakeChild(epoch, 30 + rank)
        self.killed = False
        self.child.kill = self._kill  # type: ignore[attr-defined]
        self.link = socket.socket()
        self.asked: list[int] = []

    def _kill(self) -> None:
        self.killed = True

    def fork(self, epoch: int, progress_fd: int, *, is_standby: bool) -> None:
        self.asked.append(epoch)

    def disown(self, epoch: int) -> None:
        self.asked.remove(epoch)

    def close(self) -> None:
        self.link.close()


@pytest.fixture
def zygotes() -> Iterator[tuple[ProcessTable, list[FakeZygote]]]:
    """A table with the zygotes of two ranks, which were asked for a worker each."""
    made: list[FakeZygote] = []

    def start_zygote(
        config: EngineConfig, epoch: int, progress_fd: int, *, rank: int
    ) -> FakeZygote:
        made.append(FakeZygote(epoch, rank))
        return made[-1]

    roles = (Role.ZYGOTE, Role.WORKER)
    slots = [Slot(role, rank) for role in roles for rank in range(2)]
    config = configure(model="null", tensor_parallel_size=2)
    system = System(start_fork_server=cast(Any, start_zygote))
    link = cast(RouterChannel, FakeLink())
    table = ProcessTable(config, slots, None, link, zmq.Poller(), system=system)
    with contextlib.closing(table):
        for epoch, slot in enumerate(slots, 1):
            origin = Origin.FORKED if slot.role is Role.WORKER else Origin.STARTED
            table.start(Start(slot, epoch, origin))
        yield table, made
        for zygote in made:
            zygote.close()


def test_each_rank_is_forked_by_its_own_zygote(
    zygotes: tuple[ProcessTable, list[FakeZygote]],
) -> None:
    """The death of one fails the fork of that rank alone."""
    table, (first, second) = zygotes
    assert [(zygote.rank, zygote.asked) for zygote in (first, second)] == [(0, [3]), (1, [4])]
    second.child.status = 1
    failed = table.reap(Slot(Role.ZYGOTE, 1))
    assert [(event.slot, event.epoch) for event in failed] == [(Slot(Role.WORKER, 1), 4)]
    with pytest.raises(OSError, match="there is no zygote"):
        table.start(Start(Slot(Role.WORKER, 1), 5, Origin.FORKED))
    assert first.asked == [3]


@pytest.mark.parametrize("is_spared", [False, True])
def test_a_rank_that_is_not_forked_yet_is_given_up(
    zygotes: tuple[ProcessTable, list[FakeZygote]], is_spared: bool
) -> None:
    """Its zygote stays if another rank has died, and is killed if it does not fork in time."""
    table, (first, second) = zygotes
    assert not table.kill(Slot(Role.WORKER, 1), spares_zygote=is_spared)
    assert second.asked == []
    assert second.killed is not is_spared
    assert first.asked == [3]
    assert not first.killed


def test_ranks_start_with_the_fewest_blocks_that_a_rank_of_the_first_group_had() -> None:
    """No number is kept while a rank is unknown, nor of one that measures its memory each time."""
    started: list[tuple[int | None, int | None]] = []

    def start_child(module: str, config: EngineConfig, **options: Any) -> FakeChild:
        cache = config.cache
        started.append((cache.num_gpu_blocks_override, cache.num_state_blocks_override))
        return FakeChild(options["epoch"], options["epoch"] + 2)

    first, second, *others = (Slot(Role.WORKER, rank) for rank in range(5))
    config = configure(model="null", tensor_parallel_size=2)
    system = System(start_child=cast(Any, start_child))
    link = cast(RouterChannel, FakeLink())
    slots = [first, second, *others]
    table = ProcessTable(config, slots, None, link, zmq.Poller(), system=system)
    with contextlib.closing(table):
        table.keep_num_blocks(first, Ready(num_gpu_blocks=9, num_state_blocks=3))
        table.start(Start(others[0], 1))
        table.keep_num_blocks(second, Ready())
        table.start(Start(others[1], 2))
        table.keep_num_blocks(second, Ready(num_gpu_blocks=7, num_state_blocks=5))
        table.start(Start(others[2], 3))
    assert started == [(None, None), (None, None), (7, 3)]
