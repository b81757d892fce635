"""Injects the faults of one cell into a running engine while its streams are open."""

import asyncio
import random
import signal
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from tests.chaos import processes
from tests.chaos.engine import READY_TIMEOUT_S, Engine, Firing
from tests.chaos.faults import MAX_PAUSE_MS, Cell, Fault, Phase, Place, place, sequel
from tests.chaos.members import Member
from tests.chaos.supervisor_death import replace_supervisor

DETECTION = "supervisor.after_death"
"""Its notes give the time at which the supervisor noticed a death."""
_NOTE = "note@*"
_POLL_S = 0.002
_RETURN_TIMEOUT_S = 8.0
"""The longest wait for a successor to exist, after a death or a hang."""
_AGAIN_TIMEOUT_S = 60.0
"""The longest wait for a successor to load its model and take over."""
_KILLS_OF_THRICE = 3
_THRICE_S = 10.0
_LONGEST_RANDOM = 3
_STANDBYS = ("standby", "standby_core")


class Kill(msgspec.Struct, frozen=True):
    """One process that was killed or stopped."""

    time: float
    """Monotonic time of the signal."""
    role: str
    pid: int
    how: str
    rank: int = 0
    replica: int | None = None


class Injection:
    """The faults of one round."""

    def __init__(self, engine: Engine, cell: Cell, typical_s: float, num_streams: int) -> None:
        """Prepare.

        Args:
            engine: ready.
            cell: the victims and the phase.
            typical_s: duration of the streams without faults.
            num_streams: number of the streams.
        """
        self.kills: list[Kill] = []
        self.missed: str | None = None
        """Why no process was killed in the cell's phase, if so."""
        self.problems: list[str] = []
        """Faults of a supervisor's shutdown, in words."""
        self.returned_at: float | None = None
        """Monotonic time at which every process was ready again after the last kill."""
        self._engine = engine
        self._cell = cell
        self._typical_s = typical_s
        self._armed_at = 0.0
        self._rng = random.Random(cell.seed)
        self._place = place(cell, self._rng, num_streams)
        self._signal = signal.SIGSTOP if cell.fault.hangs else signal.SIGKILL
        self._known: dict[str, list[Member]] = {}
        self._replica: int | None = None
        """The replica of the victims; None: the engine has no replicas."""
        self._stopped: int | None = None
        """Pid of the supervisor of a lost replica, which is stopped."""

    async def prepare(self) -> None:
        """Arm the failpoint of the phase and look up pids; called right before the streams open."""
        self._armed_at = time.monotonic()
        self._engine.arm(DETECTION, _NOTE)
        for role in {*self._cell.fault.roles, *_STANDBYS, "worker", "core"}:
            self._known[role] = await self._engine.members(role)
        num_replicas = len(await self._engine.members("replica"))
        self._replica = self._cell.seed % num_replicas if num_replicas else None
        if self._place is not None:
            self._arm(self._place)

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Kill; returns when no more deaths are planned, or `is_over` returns True.

        After the death of a supervisor it returns when another one has started its engine.
        """
        phase = self._cell.phase
        if self._place is not None:
            await self._kill_at(self._place, is_over)
        elif phase in (Phase.LOAD, Phase.RECOVERY):
            await self._kill_twice()
        elif phase is Phase.THRICE:
            await asyncio.sleep(self._rng.uniform(0.1, 0.5) * self._typical_s)
            await self._kill_repeatedly(_KILLS_OF_THRICE)
            self._check_thrice()
        elif phase is Phase.IDLE:
            await self._kill(self._cell.fault.roles, "outside")
        else:
            await asyncio.sleep(self._rng.uniform(0, self._typical_s))
            is_once = self._cell.fault.hangs or self._cell.fault in (Fault.SUPERVISOR, Fault.LOST)
            most = 1 if is_once else _LONGEST_RANDOM
            await self._kill_repeatedly(self._rng.randint(1, most))
        if self._cell.fault is Fault.SUPERVISOR and self.kills:
            await self._engine.ready(READY_TIMEOUT_S)
        if not self.kills and self.missed is None:
            self.missed = "no process was there to kill"

    async def wait_return(self, timeout_s: float) -> None:
        """Let a lost replica return, and wait until every process is ready again.

        Raises:
            EngineFailed: it takes longer than `timeout_s`.
        """
        if self._stopped is not None and processes.kill(self._stopped, signal.SIGCONT) is None:
            self.missed = "the lost replica was replaced before all streams had ended"
        await self._engine.ready(timeout_s, without={kill.pid for kill in self.kills})
        self.returned_at = time.monotonic()

    async def _kill_at(self, where: Place, is_over: Callable[[], bool]) -> None:
        fired = await self._wait_fired(where, is_over)
        if fired is None:
            self.missed = f"{where.failpoint} was never reached"
            return
        if where.failpoint == DETECTION:  # before the kill: the death may be noticed at once
            self._engine.arm(DETECTION, _NOTE)
        own_role = where.failpoint.partition(".")[0]
        own = self._member(own_role, fired.pid)
        self._replica = self._replica if own.replica is None else own.replica
        if where.by_itself:
            role = own_role if own_role in self._cell.fault.roles else self._cell.fault.roles[0]
            self._note_kill(fired.time, own._replace(role=role), f"itself at {where.failpoint}")
            await self._after_kill(role, fired.time)
        else:
            known = self._known if self._has_rank(own_role) else {**self._known, own_role: [own]}
            before = len(self.kills)
            await self._kill(self._cell.fault.roles, f"outside at {where.failpoint}", known)
            self._end_pause(where, fired, has_killed=len(self.kills) > before)

    def _member(self, role: str, pid: int) -> Member:
        """Return the process that has reached a failpoint; a successor is of the same replica."""
        for members in self._known.values():
            for member in members:
                if member.pid == pid:
                    return member._replace(role=role)
        return Member(role, self._replica, 0, pid)

    def _has_rank(self, role: str) -> bool:
        """Return whether the cell names the victim of this role."""
        return role == "worker" and self._cell.rank is not None

    def _end_pause(self, where: Place, fired: Firing, *, has_killed: bool) -> None:
        """Let the process at the place continue; the kills are a hit only if it still waited."""
        was_paused = self._engine.release(where.failpoint, fired.pid)
        if not has_killed:
            self.missed = f"no process was there to kill at {where.failpoint}"
        elif not was_paused:
            self.missed = f"killed more than {MAX_PAUSE_MS} ms after {where.failpoint}, too late"

    async def _kill_twice(self) -> None:
        """Kill the first roles of the sequel, then the cell's roles during the recovery."""
        await asyncio.sleep(self._rng.uniform(0.1, 0.6) * self._typical_s)
        plan = sequel(self._cell, has_journal=self._engine.has_journal)
        assert plan is not None
        for where in plan.places:
            self._arm(where)
        first = [role for role in plan.first if role not in _STANDBYS or self._known[role]]
        await self._kill(first, "outside")
        self._known = {role: pids for role, pids in self._known.items() if role not in first}
        if not plan.places:
            await self._kill(self._cell.fault.roles, "outside while it starts")
        deadline = time.monotonic() + _AGAIN_TIMEOUT_S
        for where in plan.places:
            await self._kill_at(where, lambda: time.monotonic() > deadline)

    async def _kill_repeatedly(self, num_kills: int) -> None:
        for number in range(num_kills):
            if number:
                await asyncio.sleep(self._rng.uniform(0.05, 2.0))
            await self._kill(self._cell.fault.roles, "outside")

    def _check_thrice(self) -> None:
        times = [kill.time for kill in self.kills]
        if len(times) < _KILLS_OF_THRICE * len(self._cell.fault.roles):
            self.missed = f"only {len(times)} could be killed"
        elif times[-1] - times[0] > _THRICE_S:
            self.missed = f"three deaths took {times[-1] - times[0]:.1f} s"

    async def _kill(
        self, roles: Sequence[str], how: str, known: dict[str, list[Member]] | None = None
    ) -> None:
        """Kill processes of these roles in one replica one right after the other, once they exist.

        Args:
            roles: in this order.
            how: for the record.
            known: processes by role; others are queried.
        """
        if self._cell.fault is Fault.LOST and self._replica is not None:
            await self._lose(self._replica, how)
            return
        found = {role: self._victims(role, (known or {}).get(role, ())) for role in roles}
        victims = {role: found[role] or await self._wait_victims(role) for role in roles}
        for role, members in victims.items():
            for member in members:
                moment = processes.kill(member.pid, self._signal)
                if moment is not None:
                    self._note_kill(moment, member, how)
                    await self._after_kill(role, moment)

    async def _lose(self, replica: int, how: str) -> None:
        """Kill the processes of a replica while its supervisor is stopped and replaces none."""
        members = await self._engine.replica(replica)
        if not members or processes.kill(members[0].pid, signal.SIGSTOP) is None:
            return
        self._stopped = members[0].pid
        for member in sorted(members[1:], key=lambda each: each.role not in ("core", "worker")):
            moment = processes.kill(member.pid)
            if moment is not None:
                self._note_kill(moment, member, how)

    def _note_kill(self, moment: float, member: Member, how: str) -> None:
        role, replica, rank, pid = member
        self.kills.append(Kill(moment, role, pid, how, rank, replica))

    def _victims(self, role: str, members: Iterable[Member]) -> list[Member]:
        """Return those of the replica; of its workers one, by the cell's rank or its seed."""
        living = [each for each in members if each.replica in (None, self._replica)]
        if role != "worker":
            return living
        if self._cell.rank is not None:
            return [each for each in living if each.rank == self._cell.rank]
        place = self._cell.seed % max(1, len(living))  # any rank; the others die of it
        return living[place : place + 1]

    async def _after_kill(self, role: str, moment: float) -> None:
        if role == "supervisor":
            self.problems += await replace_supervisor(self._engine, moment)

    async def _wait_victims(self, role: str) -> list[Member]:
        """Return the victims among the living processes of a role that were not stopped."""
        dead = {kill.pid for kill in self.kills}
        deadline = time.monotonic() + _RETURN_TIMEOUT_S
        while time.monotonic() < deadline:
            members = await self._engine.members(role)
            victims = self._victims(role, [each for each in members if each.pid not in dead])
            if victims:
                return victims
            await asyncio.sleep(_POLL_S)
        return []

    def _arm(self, where: Place) -> None:
        own_action = "stop" if self._cell.fault.hangs else "kill9"
        action = own_action if where.by_itself else f"pause:{MAX_PAUSE_MS}"
        self._engine.arm(where.failpoint, f"{action}@{where.hit}")

    async def _wait_fired(self, where: Place, is_over: Callable[[], bool]) -> Firing | None:
        while True:
            ended = is_over()
            for firing in self._engine.firings(self._armed_at):
                if firing.name == where.failpoint and firing.action != "note":
                    return firing
            if ended:
                return None
            await asyncio.sleep(_POLL_S)
