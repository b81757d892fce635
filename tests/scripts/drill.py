"""The supervisor's policy in virtual time, with an imagined process table."""

import random
import signal
from itertools import count

from protocol.config import RecoveryConfig
from protocol.lifecycle import (
    Drained,
    Fatal,
    Hello,
    ProcessState,
    Progress,
    Ready,
    Role,
    WorkerDied,
)
from scripts.supervisor.actions import (
    Action,
    Exit,
    Kill,
    Note,
    Origin,
    RecordDeath,
    Send,
    Slot,
    Start,
    Swap,
    api_slot,
)
from scripts.supervisor.deaths import Evidence
from scripts.supervisor.failover import STANDBY_DELAY_S, STANDBY_OF
from scripts.supervisor.policy import SupervisorPolicy

API, CORE, WORKER = api_slot(0, 1), Slot(Role.CORE), Slot(Role.WORKER)
ZYGOTE, STANDBY = Slot(Role.ZYGOTE), Slot(Role.STANDBY)
STANDBY_CORE = Slot(Role.STANDBY_CORE)
BLOCK_SERVER = Slot(Role.BLOCK_SERVER)
RECOVERY = RecoveryConfig(
    startup_timeout_s=10.0, shutdown_timeout_s=20.0, restart_backoff_max_s=2.0
)


class Drill:
    """A policy, a clock, and the processes that it has started; checks the invariants."""

    def __init__(
        self,
        num_workers: int = 1,
        recovery: RecoveryConfig = RECOVERY,
        api: bool = True,
        *,
        standby: bool = False,
        zygotes: bool | None = None,
        standby_core: bool = False,
        is_api_alone: bool = False,
        num_apis: int = 1,
        block_server: bool = False,
    ):
        """`zygotes`: one for each worker; by default where there are standbys, too."""
        num_ranks = {Role.WORKER: num_workers, Role.CORE: 1}
        if api:
            num_ranks[Role.API] = num_apis
        if standby:
            num_ranks = {Role.STANDBY: num_workers, **num_ranks}
        if standby if zygotes is None else zygotes:
            num_ranks = {Role.ZYGOTE: num_workers, **num_ranks}
        if standby_core:
            num_ranks[Role.STANDBY_CORE] = 1
        if block_server:
            num_ranks[Role.BLOCK_SERVER] = 1
        self.policy = SupervisorPolicy(
            recovery, num_ranks, count(1).__next__, random.Random(0), is_api_alone=is_api_alone
        )
        self.now = 1000.0
        self.living: dict[Slot, int] = {}
        self.doomed: set[Slot] = set()
        self.last_epoch = 0
        self.exit_status: int | None = None
        self.words: list[RecordDeath] = []
        self.reported_deaths: list[WorkerDied] = []
        self.sent: list[tuple[int, object]] = []
        """The recipient's epoch, and the message."""
        self.take(self.policy.begin(self.now))

    def take(self, actions: list[Action]) -> list[Action]:
        """Execute actions as a process table would.

        Notes and repeated messages are left out of the result; records of deaths are kept
        in `words`.
        """
        news: list[Action] = []
        assert self.exit_status is None or not actions, "an action after the end"
        for action in actions:
            match action:
                case Start(slot, epoch, origin):
                    if origin is Origin.PROMOTED:
                        self._promote(Slot(STANDBY_OF[slot.role], slot.rank))
                    if origin is Origin.FORKED:
                        assert Slot(Role.ZYGOTE, slot.rank) in self.living
                    assert slot not in self.living, "two incarnations at once"
                    assert epoch > self.last_epoch, "epochs must grow"
                    self.last_epoch = self.living[slot] = epoch
                case Swap(one, other):
                    living = self.living
                    living[one], living[other] = living[other], living[one]
                case Kill(slot):
                    assert slot in self.living
                    assert slot not in self.doomed, "killed twice"
                    self.doomed.add(slot)
                case RecordDeath(slot):
                    assert slot not in self.living, "the page is still written by another"
                    self.words.append(action)
                case Send(slot, message):
                    assert slot in self.living
                    message_to = (self.living[slot], message)
                    is_again = message_to in self.sent
                    self.sent.append(message_to)
                    if is_again:
                        continue
                    if isinstance(message, WorkerDied):
                        assert slot == CORE
                        self.reported_deaths.append(message)
                case Exit(status):
                    self.exit_status = status
            if not _is_word(action):
                news.append(action)
        return news

    def _promote(self, standby: Slot) -> None:
        assert standby not in self.doomed, "a killed process cannot be promoted"
        del self.living[standby]

    def receive(
        self, slot: Slot, message: Hello | Progress | Ready | Fatal | Drained
    ) -> list[Action]:
        return self.take(self.policy.on_message(self.living[slot], message, self.now))

    def die(
        self, slot: Slot, status: int = -signal.SIGKILL, evidence: Evidence | None = None
    ) -> list[Action]:
        del self.living[slot]
        self.doomed.discard(slot)
        evidence = evidence or Evidence()
        return self.take(self.policy.on_death(slot, status, self.now, evidence))

    def signal(self) -> list[Action]:
        return self.take(self.policy.on_signal(self.now))

    def wait(self, seconds: float) -> list[Action]:
        """Advance the clock, waking at every deadline."""
        end, actions = self.now + seconds, []
        while (due := self.policy.next_deadline()) <= end:
            self.now = max(self.now, due)
            self.policy.on_turn(self.now)
            actions += self.take(self.policy.tick(self.now))
        self.now = end
        return actions

    def all_ready(self) -> "Drill":
        for slot in list(self.living):
            self.receive(slot, Ready())
        return self

    def state(self, slot: Slot) -> ProcessState:
        return next(p.state for p in self.policy.processes if p.slot == slot)


def starts(actions: list[Action]) -> list[tuple[Slot, Origin]]:
    """Return the slots of the processes that are started, and how."""
    return [(a.slot, a.origin) for a in actions if isinstance(a, Start)]


def standing() -> Drill:
    """An engine whose processes are all ready, zygote and standby included."""
    drill = Drill(standby=True).all_ready()
    drill.wait(0.0)
    drill.receive(WORKER, Ready())
    drill.wait(STANDBY_DELAY_S)
    drill.receive(STANDBY, Ready())
    return drill


def ask(drill: Drill, role: Role, index: int | None = None) -> list[Action]:
    """Ask for a restart that is possible."""
    refusal, actions = drill.policy.on_restart(role, drill.now, index)
    assert refusal is None
    return drill.take(actions)


def refusal_of(drill: Drill, role: Role, index: int | None = None) -> str | None:
    """Return why a restart is not possible."""
    refusal, actions = drill.policy.on_restart(role, drill.now, index)
    assert refusal is None or actions == []
    return refusal


def _is_word(action: Action) -> bool:
    if isinstance(action, Send):
        return isinstance(action.message, WorkerDied)
    return isinstance(action, Note | RecordDeath)
