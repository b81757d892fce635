"""The supervisor's policy in virtual time, with a simulated process table."""

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
from scripts.supervisor.death_causes import Evidence
from scripts.supervisor.succession import STANDBY_DELAY_S, STANDBY_OF
from scripts.supervisor.supervised import (
    Action,
    Exit,
    Kill,
    LeaveWord,
    Note,
    Origin,
    Slot,
    Start,
    Swap,
    Tell,
)
from scripts.supervisor.supervision import Supervision

API, CORE, WORKER = Slot(Role.API), Slot(Role.CORE), Slot(Role.WORKER)
ZYGOTE, STANDBY = Slot(Role.ZYGOTE), Slot(Role.STANDBY)
STANDBY_CORE = Slot(Role.STANDBY_CORE)
RECOVERY = RecoveryConfig(
    startup_timeout_s=10.0, shutdown_timeout_s=20.0, restart_backoff_max_s=2.0
)


class Drill:
    """The policy, a clock and simulated processes; checks invariants with every action."""

    def __init__(
        self,
        num_workers: int = 1,
        recovery: RecoveryConfig = RECOVERY,
        api: bool = True,
        *,
        standby: bool = False,
        standby_core: bool = False,
        is_api_alone: bool = False,
    ):
        num_ranks = {Role.WORKER: num_workers, Role.CORE: 1, **({Role.API: 1} if api else {})}
        if standby:
            num_ranks = {Role.ZYGOTE: 1, Role.STANDBY: 1, **num_ranks}
        if standby_core:
            num_ranks[Role.STANDBY_CORE] = 1
        self.supervision = Supervision(
            recovery, num_ranks, count(1).__next__, random.Random(0), is_api_alone=is_api_alone
        )
        self.now = 1000.0
        self.living: dict[Slot, int] = {}
        self.doomed: set[Slot] = set()
        self.last_epoch = 0
        self.exit_status: int | None = None
        self.words: list[LeaveWord] = []
        self.reported_deaths: list[WorkerDied] = []
        self.sent: list[tuple[int, object]] = []
        """Every message sent, with the epoch of its receiver."""
        self.take(self.supervision.begin(self.now))

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
                        self._promote(Slot(STANDBY_OF[slot.role]))
                    if origin is Origin.FORKED:
                        assert ZYGOTE in self.living
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
                case LeaveWord(slot):
                    assert slot not in self.living, "another process still writes the page"
                    self.words.append(action)
                case Tell(slot, message):
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
        return self.take(self.supervision.on_message(self.living[slot], message, self.now))

    def die(
        self, slot: Slot, status: int = -signal.SIGKILL, evidence: Evidence | None = None
    ) -> list[Action]:
        del self.living[slot]
        self.doomed.discard(slot)
        evidence = evidence or Evidence()
        return self.take(self.supervision.on_death(slot, status, self.now, evidence))

    def signal(self) -> list[Action]:
        return self.take(self.supervision.on_signal(self.now))

    def wait(self, seconds: float) -> list[Action]:
        """Advance the clock, waking at every deadline."""
        end, actions = self.now + seconds, []
        while (due := self.supervision.next_deadline()) <= end:
            self.now = max(self.now, due)
            self.supervision.on_turn(self.now)
            actions += self.take(self.supervision.tick(self.now))
        self.now = end
        return actions

    def all_ready(self) -> "Drill":
        for slot in list(self.living):
            self.receive(slot, Ready())
        return self

    def state(self, slot: Slot) -> ProcessState:
        return next(p.state for p in self.supervision.processes if p.slot == slot)


def starts(actions: list[Action]) -> list[tuple[Slot, Origin]]:
    """Return the slots that are started, and how."""
    return [(a.slot, a.origin) for a in actions if isinstance(a, Start)]


def standing() -> Drill:
    """Return a drill whose processes are all ready, zygote and standby included."""
    drill = Drill(standby=True).all_ready()
    drill.wait(0.0)
    drill.receive(WORKER, Ready())
    drill.wait(STANDBY_DELAY_S)
    drill.receive(STANDBY, Ready())
    return drill


def ask(drill: Drill, role: Role) -> list[Action]:
    """Ask for a restart that must be accepted."""
    refusal, actions = drill.supervision.on_restart(role, drill.now)
    assert refusal is None
    return drill.take(actions)


def refusal_of(drill: Drill, role: Role) -> str | None:
    """Return the reason why a restart is refused."""
    refusal, actions = drill.supervision.on_restart(role, drill.now)
    assert refusal is None or actions == []
    return refusal


def _is_word(action: Action) -> bool:
    if isinstance(action, Tell):
        return isinstance(action.message, WorkerDied)
    return isinstance(action, Note | LeaveWord)
