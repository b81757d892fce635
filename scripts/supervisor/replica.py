"""Replicas: each is an engine with its own supervisor, which reports to the supervisor above.

Like the supervisor of a single engine, a replica's supervisor starts, watches and replaces its core
and its workers, in its own run directory. The supervisor above it starts the API and the replicas.
It knows only whether a replica's supervisor is alive and whether the replica has served once.
"""

import os
import sys

import msgspec
import zmq

from protocol.config import EngineConfig
from protocol.lifecycle import Command, Fatal, Hello, Progress, Ready, Role
from protocol.message import MAX_TEXT
from protocol.process.progress import ProgressReporter
from protocol.process.run_dir import lifecycle_address, replica_dir
from protocol.process.supervisor_link import SupervisorLink
from protocol.transport.channel import DealerChannel, HighWaterMark

_CONNECT_TIMEOUT_MS = 60_000
_LINGER_MS = 1000


def replica_config(config: EngineConfig, replica: int) -> EngineConfig:
    """Return the settings of one replica of an engine with a run directory."""
    parallel = msgspec.structs.replace(config.parallel, data_parallel_size=1)
    run = msgspec.structs.replace(
        config.run,
        run_dir=replica_dir(str(config.run.run_dir), replica),
        replica=replica,
        num_replicas=config.parallel.data_parallel_size,
    )
    return msgspec.structs.replace(config, parallel=parallel, run=run)


class ReplicaReports:
    """The reports of a replica's supervisor to the one above, and the commands from there."""

    def __init__(self, config: EngineConfig, epoch: int, progress_fd: int | None) -> None:
        """Connect; the supervisor above listens before it starts replicas."""
        assert config.run.replica is not None
        above = os.path.dirname(str(config.run.run_dir))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channel = DealerChannel(
            self._context, lifecycle_address(above), HighWaterMark.LIFECYCLE_LINK
        )
        if not self._channel.socket.poll(_CONNECT_TIMEOUT_MS, zmq.POLLOUT):
            sys.exit(f"no supervisor at {lifecycle_address(above)}")
        self._link = SupervisorLink(self._channel, epoch)
        self._link.send(Hello(Role.REPLICA, config.run.replica, os.getpid()))
        # Starts of processes may hold the loop for a while, as long texts hold that of the API.
        recovery = config.recovery
        self._reporter = ProgressReporter(progress_fd, epoch, recovery, recovery.api_hang_timeout_s)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """Socket to poll for `commands`."""
        return self._channel.socket

    @property
    def longest_poll_ms(self) -> int | None:
        """The longest poll after which the supervisor above does not take this one for stopped."""
        return self._reporter.tick_ms

    def commands(self) -> list[Command]:
        """Return the commands that have arrived. To be called in every turn of the loop."""
        self._reporter.turn()
        return [message for message in self._link.read() if isinstance(message, Command)]

    def progress(self, message: Progress) -> None:
        """Report that a process of this replica continues its start."""
        self._link.send(message)

    def ready(self, facts: list[str]) -> None:
        """Report that the replica serves; `facts` are lines for the console."""
        self._link.hold(Ready(facts=facts))

    def close(self, failure: str | None) -> None:
        """Report the reason if the replica has failed, and disconnect."""
        if failure is not None:
            self._link.send(Fatal("start", failure[:MAX_TEXT], retry=False))
        self._channel.socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._context.destroy()
