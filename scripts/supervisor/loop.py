"""The supervisor's sockets, signals and processes; policy.py decides what to do with them."""

import logging
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import zmq

from api_proc.http.listener import api_root, url_of
from protocol.config import EngineConfig
from protocol.lifecycle import (
    Command,
    Drain,
    Fatal,
    Hello,
    Progress,
    RestartQuery,
    RestartReply,
    Role,
    StatusQuery,
    StatusReply,
    Stop,
    decode_to_supervisor,
)
from protocol.message import ProtocolError
from protocol.process.child_handle import ChildHandle
from protocol.process.child_runtime import EXIT_FATAL
from protocol.process.failpoints import failpoint
from protocol.process.machines import core_places
from protocol.process.run_dir import lifecycle_address
from protocol.transport.channel import HighWaterMark, Received, RouterChannel
from scripts.supervisor import actions
from scripts.supervisor.actions import Action, Slot, api_slot
from scripts.supervisor.deaths import Evidence
from scripts.supervisor.host_agents import HostAgents
from scripts.supervisor.invocation import Invocation
from scripts.supervisor.policy import SupervisorPolicy
from scripts.supervisor.process_table import ProcessTable
from scripts.supervisor.roles import num_ranks
from scripts.supervisor.run_dir_keeper import RunDirKeeper
from scripts.supervisor.run_dirs import RunDir
from scripts.supervisor.startup import served_name
from scripts.supervisor.system import System
from scripts.supervisor.zygotes import StartEvent

_DRAIN_LIMIT = 256
_FATAL_TIMEOUT_S = 0.5
"""Longest wait in seconds for the `Fatal` of a process that has ended by itself. Before the first
Ready, the `Fatal` decides whether the start is given up."""
_LATER_FATAL_TIMEOUT_S = 0.1
_CANNOT_START = 127
_UNREADABLE_LINE_S = 60.0
"""Minimum time in seconds between two lines of the log about messages that cannot be read."""


def _slots_of(policy: SupervisorPolicy, config: EngineConfig, *, has_api: bool) -> list[Slot]:
    """Return all slots, including those of second API processes during planned restarts."""
    slots = [process.slot for process in policy.processes]
    if has_api:
        count = config.api.api_server_count
        slots += [api_slot(index, count, is_spare=True) for index in range(count)]
    return slots


class Supervisor:
    """Runs one engine from start to end."""

    def __init__(
        self,
        config: EngineConfig,
        run_dir: RunDir,
        invocation: Invocation,
        *,
        listener: socket.socket | None,
        system: System,
        agents: HostAgents | None = None,
    ) -> None:
        """Listen for children; `run` starts them. Without a `listener` there is no API.

        `agents` are the engines of other machines that have joined this one.
        """
        self._invocation = invocation
        self._reports = invocation.reports
        self._agents = agents
        self._config = config
        self._console = invocation.console
        is_tls = config.api.ssl_certfile is not None
        self._url = None if listener is None else url_of(listener, is_tls=is_tls)
        self._cores = core_places(config)
        # A fork of the parent may hold the pipe open after the parent's end: the pidfd shows it.
        parent_fd = invocation.parent_fd
        self._parent_fds = [] if parent_fd is None else [parent_fd, os.pidfd_open(os.getppid())]
        self._clock = system.clock
        self.policy = SupervisorPolicy(
            config.recovery,
            num_ranks(config, has_api=listener is not None),
            run_dir.next_epoch,
            system.make_rng(),
            is_api_alone=config.api.journal_dir is not None,
        )
        self._oom_counter = system.make_oom_counter()
        self._failed_starts: list[Slot] = []
        self._next_unreadable_line = 0.0
        self._exit_status: int | None = None
        self._facts: list[str] = []
        self.was_orphaned = False
        self._context = system.make_context()
        self._link = RouterChannel(
            self._context, lifecycle_address(run_dir.path), HighWaterMark.LIFECYCLE_LINK
        )
        is_whole_engine = config.run.replica is None
        self._run_dir_keeper = RunDirKeeper(
            run_dir, self._link, agents, self._console, makes_parents=is_whole_engine
        )
        self._poller = system.make_poller()
        for source in (self._link.socket, *self._parent_fds):
            self._poller.register(source, zmq.POLLIN)
        slots = _slots_of(self.policy, config, has_api=listener is not None)
        self._table = ProcessTable(config, slots, listener, self._link, self._poller, system=system)

    def run(self) -> int:
        """Run all processes to their end; return the exit status."""
        signal_fd = self._invocation.signal_fd
        self._poller.register(signal_fd, zmq.POLLIN)
        if self._reports is not None:
            self._poller.register(self._reports.socket, zmq.POLLIN)
        if self._agents is not None:
            for socket_of_agents in self._agents.sockets:
                self._poller.register(socket_of_agents, zmq.POLLIN)
        self._perform(self.policy.begin(self._clock.monotonic()))
        while self._exit_status is None:
            ready = dict(self._poller.poll(self._poll_ms()))
            self.policy.on_turn(self._clock.monotonic())
            self._keep_run_dir()
            if self._reports is not None:
                self._on_commands(self._reports.commands())
            if self._agents is not None:
                for severity, text in self._agents.turn(self._clock.monotonic()):
                    self._console.note(severity, text)
            if signal_fd in ready:
                os.read(signal_fd, 64)
                self._perform(self.policy.on_signal(self._clock.monotonic()))
            if any(fd in ready for fd in self._parent_fds):
                self._on_orphaned()
            self.turn(ready)
            self._console.tick(self._clock.monotonic())
        self._table.close()
        self._link.close()
        self._context.term()
        return self._exit_status

    def _keep_run_dir(self) -> None:
        now = self._clock.monotonic()
        failure = self._run_dir_keeper.check(now)
        if failure is not None:
            self._perform(self.policy.on_run_dir_lost(failure, now))

    def turn(self, ready: Mapping[Any, int]) -> None:
        """Handle events and deadlines."""
        self._on_start_events(self._table.start_events())
        self._drain_link()
        self._reap(ready)
        self._perform(self.policy.tick(self._clock.monotonic()))
        now, due = self._clock.monotonic(), self.policy.next_look
        if due is None or now >= due:
            self._oom_counter.expire(now)
            self._perform(self.policy.look(self._table.marks(), now))

    def _poll_ms(self) -> int:
        if self._failed_starts:
            return 0
        policy = self.policy
        deadlines = [policy.next_deadline(), policy.next_look, self._console.next_tick()]
        deadline = min(due for due in deadlines if due is not None)
        poll_ms = max(0, int((deadline - self._clock.monotonic()) * 1000) + 1)
        longest_ms = None if self._reports is None else self._reports.longest_poll_ms
        return poll_ms if longest_ms is None else min(poll_ms, longest_ms)

    # Events -------------------------------------------------------------------------------------

    def _on_orphaned(self) -> None:
        for fd in self._parent_fds:
            self._poller.unregister(fd)
        self._parent_fds.clear()
        self.was_orphaned = True
        self._perform(self.policy.on_orphaned(self._clock.monotonic()))

    def _on_commands(self, commands: Sequence[Command]) -> None:
        """Handle the commands of the process that started the engine."""
        for command in commands:
            now = self._clock.monotonic()
            if isinstance(command, Stop):
                self._perform(self.policy.on_stop(now))
            elif isinstance(command, Drain) and not self.policy.is_ending:
                self._perform(self.policy.on_signal(now))

    def _drain_link(self) -> None:
        num_bad_frames = self._link.num_bad_frames
        for received in self._link.drain(_DRAIN_LIMIT):
            try:
                self._on_message(received)
            except ProtocolError as error:
                self._console.note(logging.ERROR, f"unreadable lifecycle message: {error}")
        if self._link.num_bad_frames > num_bad_frames:
            self._note_bad_frame()

    def _note_bad_frame(self) -> None:
        """Log the reason, at most once a minute: the sender may repeat the message."""
        now = self._clock.monotonic()
        if self._link.last_bad_frame is not None and now >= self._next_unreadable_line:
            self._next_unreadable_line = now + _UNREADABLE_LINE_S
            self._console.note(
                logging.ERROR,
                f"messages of a process cannot be read: {self._link.last_bad_frame.reason};"
                " if installed files were changed, start the engine again",
            )

    def _on_message(self, received: Received) -> None:
        message = decode_to_supervisor(received.body)
        now = self._clock.monotonic()
        if isinstance(message, StatusQuery):
            self._table.answer(received.peer, self._status())
            return
        if isinstance(message, RestartQuery):
            refusal, to_do = self.policy.on_restart(message.role, now, message.index)
            self._table.answer(received.peer, RestartReply(refusal is None, refusal or ""))
            self._perform(to_do)
            return
        epoch = received.header.epoch
        process = self.policy.find(epoch)
        if process is None:
            self._table.forget_peer(received.peer)
            return
        pid = message.pid if isinstance(message, Hello) else None
        self._table.connect(process.slot, epoch, received.peer, pid)
        self._perform(self.policy.on_message(epoch, message, now))

    def _on_start_events(self, events: Sequence[StartEvent]) -> None:
        """Handle the messages of zygotes, and failed starts."""
        for slot, epoch, message in events:
            self._perform(self.policy.on_message(epoch, message, self._clock.monotonic()))
            if self._table.pid(slot) is None:  # it could not be started, and dies in the next turn
                self._failed_starts.append(slot)

    def _reap(self, ready: Mapping[Any, int]) -> None:
        failed, self._failed_starts = self._failed_starts, []
        for slot in failed:
            self._console.ended(slot)
            now = self._clock.monotonic()
            self._perform(self.policy.on_death(slot, _CANNOT_START, now, Evidence()))
        for child in self._table.dead(ready):
            self._reap_child(child)
        self._table.reap_unknown_children()

    def _reap_child(self, child: ChildHandle) -> None:
        status = child.poll()
        assert status is not None, "a readable pidfd means a dead process"
        if status == EXIT_FATAL:
            self._await_fatal(child.epoch)
        slot = self._table.slot_of(child)
        if slot.role is Role.ZYGOTE:
            self._on_start_events(self._table.start_events())
        self._on_start_events(self._table.reap(slot))
        self._console.ended(slot)
        failpoint("supervisor.after_death")
        is_oom = self._oom_counter.has_grown() and status == -signal.SIGKILL
        evidence = self._table.evidence(slot, child.epoch, is_oom=is_oom)
        self._perform(self.policy.on_death(slot, status, self._clock.monotonic(), evidence))

    def _await_fatal(self, epoch: int) -> None:
        process = self.policy.find(epoch)
        timeout_s = _LATER_FATAL_TIMEOUT_S if self.policy.was_ready else _FATAL_TIMEOUT_S
        deadline = self._clock.monotonic() + timeout_s
        while process is not None and process.fatal is None:
            left_ms = int((deadline - self._clock.monotonic()) * 1000)
            if left_ms <= 0 or not self._link.socket.poll(left_ms):
                return
            self._drain_link()

    def _status(self) -> StatusReply:
        policy = self.policy
        rows = self._table.status(policy.processes, policy.state)
        lines = dict.fromkeys(line for one in policy.processes for line in one.remarks)
        return StatusReply(
            rows, policy.is_ready, self._url, policy.failure, self._cores, list(lines)
        )

    # Actions ------------------------------------------------------------------------------------

    def _perform(self, to_do: Sequence[Action]) -> None:
        for action in to_do:
            match action:
                case actions.Start():
                    self._start(action)
                case actions.Kill(slot, spares_zygote):
                    if not self._table.kill(slot, spares_zygote=spares_zygote):
                        self._failed_starts.append(slot)
                case actions.DumpStacks(slot):
                    self._table.dump_stacks(slot)
                case actions.RecordDeath():
                    self._table.record_death(action)
                case actions.Send(slot, message):
                    self._table.send(slot, message)
                case actions.Swap(one, other):
                    self._table.swap(one, other)
                case actions.Show():
                    self._show(action)
                case actions.Announce():
                    self._announce()
                case actions.Note(severity, text):
                    self._console.note(severity, text)
                case actions.Exit(status):
                    self._exit_status = status

    def _start(self, action: actions.Start) -> None:
        slot, epoch = action.slot, action.epoch
        self._console.starting(slot, self._clock.monotonic())
        try:
            self._table.start(action)
        except OSError as error:
            self._on_start_events([StartEvent(slot, epoch, Fatal("start", str(error)))])
            return
        failpoint("supervisor.after_start")

    def _show(self, action: actions.Show) -> None:
        now = self._clock.monotonic()
        if isinstance(action.message, Progress):
            self._console.progress(action.slot, action.message, now)
            if self._reports is not None:
                self._reports.progress(action.message)
        else:
            self._console.ready(action.slot, action.message, now)
            self._facts = action.message.facts or self._facts
            self._table.keep_num_blocks(action.slot, action.message)

    def _announce(self) -> None:
        if self._reports is not None:
            self._reports.ready(self._facts)
        name = served_name(self._config)
        place = ", ".join(self._cores) if self._url is None else api_root(self._url)
        seconds = self._clock.monotonic() - self._invocation.started_at
        self._console.line(f"Troika serves {name} at {place} (ready in {seconds:.1f} s)")
        for fact in self._facts:
            self._console.fact(fact)
