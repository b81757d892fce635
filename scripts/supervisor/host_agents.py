"""The host agents that have joined this engine, and the file with the addresses of their cores.

The supervisor sends the engine's settings to each agent. API processes read the file again whenever
it changes. A supervisor that is started again finds the agents within a second, as they repeat
`Join`; until then the file has nothing, and requests of other machines wait there.
"""

import contextlib
import hashlib
import logging
import os
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from protocol.config import ApiConfig, EngineConfig, ParallelConfig, PlacementConfig, RunConfig
from protocol.config.addresses import check_tcp_address
from protocol.config.cpu_lists import first_cpu_lists
from protocol.message import NO_EPOCH, ProtocolError, encode
from protocol.process.host_agents import (
    LEASE_S,
    MAX_AGENTS,
    MAX_SETTINGS_BYTES,
    Failed,
    Join,
    Joined,
    Leave,
    Settings,
    ToAgent,
    decode_from_agent,
)
from protocol.process.machines import members_file
from protocol.transport.channel import HighWaterMark, PeerGone, Received, RouterChannel
from protocol.transport.curve import ClientAuthenticator, read_server_keys
from scripts.hub.messages import one_line

_DRAIN_LIMIT = 1024
_LONGEST_TURN_S = 1.0
"""Maximum time in seconds that counts for a turn: in a longer turn this process did not look for
messages."""
_COMPLAINT_S = 60.0
"""Time between two lines about messages that cannot be read, and between two about one failure of
an agent, which may be started again every second."""
_MAX_FAILURES = 3
"""Maximum number of failures of one agent that are reported within `_COMPLAINT_S`."""
_NUMBER = re.compile("0x[0-9a-f]+|[0-9]+")
"""Process ids, sizes and addresses: failures that differ only in them count as one."""

log = logging.getLogger("troika.supervisor")

Note = tuple[int, str]
"""A line for the console, with its severity."""


@dataclass(slots=True)
class _Member:
    """An agent that has joined the engine."""

    peer: bytes
    address: str
    silent_s: float = 0.0
    """Seconds since its last `Join`."""


def settings_of(config: EngineConfig) -> Settings:
    """Return the settings for an engine on another machine: those of its core and its workers.

    It computes on the CPUs of the first replica here.
    """
    parallel = ParallelConfig(
        tensor_parallel_size=config.parallel.tensor_parallel_size,
        pipeline_parallel_size=config.parallel.pipeline_parallel_size,
    )
    cpus = config.worker.worker_cpus
    if cpus is not None:
        cpus = first_cpu_lists(cpus, parallel.num_ranks)
    worker = msgspec.structs.replace(config.worker, worker_cpus=cpus)
    run = RunConfig(
        log_level=config.run.log_level,
        log_format=config.run.log_format,
        check_invariants=config.run.check_invariants,
        log_stats_interval_s=config.run.log_stats_interval_s,
    )
    config = msgspec.structs.replace(
        config,
        parallel=parallel,
        placement=PlacementConfig(),
        worker=worker,
        api=ApiConfig(),
        run=run,
    )
    return Settings(msgspec.msgpack.encode(config))


def digest_of(settings: Settings) -> str:
    return hashlib.blake2b(settings.encoded, digest_size=16).hexdigest()


class HostAgents:
    """Takes in agents of other machines, and keeps the file of their cores."""

    def __init__(self, config: EngineConfig, run_dir: str) -> None:
        """Listen for agents. `config` has the names of models, which each agent looks up itself.

        Raises ValueError if the keys or the address cannot be used, or if the settings are too
        large for a message.
        """
        address, directory = config.parallel.agents_listen, config.parallel.curve_keys
        assert address is not None
        assert directory is not None
        keys = read_server_keys(Path(directory))
        self._settings = settings_of(config)
        if (size := len(self._settings.encoded)) > MAX_SETTINGS_BYTES:
            raise ValueError(
                f"agents_listen: host agents get at most {MAX_SETTINGS_BYTES} bytes of settings,"
                f" and these take {size}; lora_modules takes most of them"
            )
        self._digest = digest_of(self._settings)
        self._members: dict[str, _Member] = {}
        self._replaced: deque[bytes] = deque(maxlen=MAX_AGENTS)
        """Agents whose name another one has taken."""
        self._file = members_file(run_dir)
        self._written: list[str] | None = None
        self._is_file_late = False
        self._turned_at: float | None = None
        self._complain_at = 0.0
        self._failures: dict[str, dict[str, float]] = {}
        """By the agent's name: failures that were reported, without numbers, and the times of the
        reports."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = ClientAuthenticator(self._context, keys.directory)
        self._link = RouterChannel(
            self._context, f"ipc://{run_dir}/agents.sock", HighWaterMark.LIFECYCLE_LINK
        )
        try:
            self._link.listen(f"tcp://{address}", keys)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            text = f"agents_listen {address} cannot be used: {error.strerror}"
            raise ValueError(text) from error
        log.info("host agents may join at %s", address)
        self._write()

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """The sockets to poll for `turn`."""
        return [self._authenticator.socket, self._link.socket]

    def turn(self, now: float) -> list[Note]:
        """Handle what has arrived, and end leases; returns lines for the console."""
        self._authenticator.answer()
        notes: list[Note] = []
        passed_s = 0.0 if self._turned_at is None else min(now - self._turned_at, _LONGEST_TURN_S)
        self._turned_at = now
        for member in self._members.values():
            member.silent_s += passed_s
        for received in self._link.drain(_DRAIN_LIMIT):
            notes += self._on(received, now)
        for name, member in list(self._members.items()):
            if member.silent_s > LEASE_S:
                del self._members[name]
                text = f"agent {name} has been silent for {LEASE_S:g} s: it is not used"
                notes.append((logging.INFO, text))
        self._write()
        return notes

    def _on(self, received: Received, now: float) -> Iterator[Note]:
        try:
            message = decode_from_agent(received.body)
        except ProtocolError as error:
            if now >= self._complain_at:
                self._complain_at = now + _COMPLAINT_S
                yield logging.INFO, f"unreadable message of an agent: {error}"
            return
        if isinstance(message, Failed):
            yield from self._on_failed(message, now)
        else:
            for text in self._on_join(received.peer, message):
                yield logging.INFO, text

    def _on_failed(self, failed: Failed, now: float) -> Iterator[Note]:
        reported = self._failures.pop(failed.name, {})
        reported = {text: at for text, at in reported.items() if now < at + _COMPLAINT_S}
        text = _NUMBER.sub("", failed.reason)
        is_due = text not in reported and len(reported) < _MAX_FAILURES
        if is_due:
            reported[text] = now
        if len(self._failures) >= MAX_AGENTS:
            del self._failures[next(iter(self._failures))]
        self._failures[failed.name] = reported
        if is_due:
            yield logging.WARNING, f"agent {failed.name} has failed: {one_line(failed.reason)}"

    def _on_join(self, peer: bytes, join: Join) -> Iterator[str]:
        if not join.settings:
            self._send(peer, self._settings)
        elif peer in self._replaced:
            self._send(peer, Leave(f"another agent has the name {join.name}"))
        elif join.settings != self._digest:
            self._send(peer, Leave("the engine has other settings now"))
        elif join.is_leaving:
            member = self._members.get(join.name)
            if member is not None and member.peer == peer:
                del self._members[join.name]
                yield f"agent {join.name} leaves"
        else:
            yield from self._enter(peer, join)

    def _enter(self, peer: bytes, join: Join) -> Iterator[str]:
        try:
            if join.address:
                check_tcp_address(join.address)
        except ValueError as error:
            self._send(peer, Leave(str(error)))
            return
        member = self._members.get(join.name)
        if member is None and len(self._members) >= MAX_AGENTS:
            self._send(peer, Leave(f"there are {MAX_AGENTS} agents already"))
            return
        if member is not None and member.peer != peer:
            self._replaced.append(member.peer)
            self._send(member.peer, Leave(f"another agent has the name {join.name}"))
        if member is None or member.peer != peer:
            yield f"agent {join.name} has joined"
        if join.address and (member is None or member.address != join.address):
            yield f"agent {join.name} serves at {join.address}"
        self._members[join.name] = _Member(peer, join.address)
        self._send(peer, Joined())

    def _send(self, peer: bytes, message: ToAgent) -> None:
        with contextlib.suppress(PeerGone):  # it joins again, and is answered again
            self._link.send(peer, NO_EPOCH, encode(message))

    def write_again(self) -> None:
        """Write the file of the agents' cores in the next turn, as it may have been removed."""
        self._written = None

    def _write(self) -> None:
        addresses = sorted({one.address for one in self._members.values() if one.address})
        if addresses == self._written:
            return
        new = self._file.with_suffix(".new")
        try:
            new.write_text("".join(f"{address}\n" for address in addresses))
            os.replace(new, self._file)
        except OSError as error:  # it is tried again in the next turn
            if not self._is_file_late:
                log.error("the engines of other machines cannot be listed: %s", error)
            self._is_file_late = True
            return
        self._written, self._is_file_late = addresses, False

    def close(self) -> None:
        self._context.destroy(linger=0)
