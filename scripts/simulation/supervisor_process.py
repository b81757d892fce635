"""The supervisor: the real Supervision, with a process table that is simulated."""

from collections.abc import Callable
from itertools import count
from typing import Any

from protocol.channel import HighWaterMark, PeerGone, RouterChannel
from protocol.config import EngineConfig
from protocol.lifecycle import Hello, RestartQuery, Role, StatusQuery, decode_to_supervisor
from protocol.message import ProtocolError, encode
from scripts.simulation.sockets import SimulatedContext, Wire
from scripts.simulation.stand_ins import SUPERVISOR_ADDRESS
from scripts.simulation.world import SECOND, Process, Violation
from scripts.supervisor.death_causes import Evidence
from scripts.supervisor.pages import Pages
from scripts.supervisor.supervised import Action, Exit, Kill, LeaveWord, Slot, Start, Tell
from scripts.supervisor.supervision import Supervision

_DRAIN_LIMIT = 256
StartChild = Callable[[Slot, int, int | None], Process]
"""Told the slot, the epoch, and the descriptor of the progress page."""


class SupervisorProcess(Process):
    """Performs what Supervision decides, as scripts/supervisor does."""

    def __init__(
        self, wire: Wire, config: EngineConfig, ranks: dict[Role, int], start: StartChild
    ) -> None:
        super().__init__(wire.world, "supervisor")
        self._start_child = start
        self._link = RouterChannel(
            SimulatedContext(wire, self),  # type: ignore[arg-type]
            SUPERVISOR_ADDRESS,
            HighWaterMark.LIFECYCLE_LINK,
        )
        self._socket: Any = self._link.socket
        self.supervision = Supervision(config.recovery, ranks, count(1).__next__, wire.world.rng)
        self.pages = Pages(process.slot for process in self.supervision.processes)
        self.on_death.append(self.pages.close)
        self.children: dict[Slot, Process] = {}
        self._peers: dict[Slot, bytes] = {}
        self._epochs: dict[Slot, int] = {}
        self._asked: list[Role] = []
        self._deaths: list[tuple[Process, int]] = []
        self._is_started = False
        self.wake()

    def turn(self) -> int | None:
        now = self.world.seconds()
        if not self._is_started:
            self._is_started = True
            self._perform(self.supervision.begin(now))
        self._drain_link()
        deaths, self._deaths = self._deaths, []
        for process, status in deaths:
            slot = next((s for s, child in self.children.items() if child is process), None)
            if slot is not None:
                del self.children[slot]
                peer = self._peers.pop(slot, None)
                if peer is not None:
                    self._link.forget(peer)
                evidence = Evidence(self.pages.step_of(slot, self._epochs[slot]))
                self._perform(self.supervision.on_death(slot, status, now, evidence))
        asked, self._asked = self._asked, []
        for role in asked:
            self._perform(self.supervision.on_restart(role, now)[1])
        self._perform(self.supervision.tick(now))
        look_at = self.supervision.next_look
        if look_at is None or now >= look_at:
            self._perform(self.supervision.look(self.pages.marks(), now))
        if self._socket.inbox:
            return self.busy_until
        times = (self.supervision.next_deadline(), self.supervision.next_look)
        deadline = min((time for time in times if time is not None), default=None)
        return None if deadline is None else int(deadline * SECOND) + 1000

    def restart(self, role: Role) -> None:
        """Somebody asks for a planned restart."""
        self._asked.append(role)
        self.wake()

    def notice_death(self, process: Process, status: int) -> None:
        self._deaths.append((process, status))
        self.wake()

    def _drain_link(self) -> None:
        for received in self._link.drain(_DRAIN_LIMIT):
            try:
                message = decode_to_supervisor(received.body)
            except ProtocolError:
                continue
            if isinstance(message, StatusQuery | RestartQuery):
                continue
            epoch = received.header.epoch
            if isinstance(message, Hello):
                process = self.supervision.find(epoch)
                if process is not None and self.children[process.slot].pid == message.pid:
                    self._peers[process.slot] = received.peer
            actions = self.supervision.on_message(epoch, message, self.world.seconds())
            self._perform(actions)

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start(slot, epoch):
                    assert slot not in self.children, "two incarnations at once"
                    self.world.trace(f"start {slot} {epoch}")
                    self._epochs[slot] = epoch
                    page_fd = self.pages.begin(slot, epoch)
                    self.children[slot] = self._start_child(slot, epoch, page_fd)
                case Kill(slot):
                    self.world.counts[f"killed by supervisor: {slot.role}"] += 1
                    self.world.at(self.busy_until, self.children[slot].die)
                case LeaveWord():
                    self.pages.leave_word(action)
                case Tell(slot, message):
                    self._tell(slot, encode(message))
                case Exit():
                    raise Violation(f"gave up: {self.supervision.failure}")

    def _tell(self, slot: Slot, body: bytes) -> None:
        peer = self._peers.get(slot)
        if peer is not None:
            try:
                self._link.send(peer, self._epochs[slot], body)
            except PeerGone:
                return
