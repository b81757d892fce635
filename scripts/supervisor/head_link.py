"""A host agent's link to the engine that it has joined."""

import logging
import select
import time

import msgspec
import zmq

from protocol.config import ConfigError, EngineConfig
from protocol.lifecycle import Command, Drain, Progress
from protocol.message import MAX_TEXT, NO_EPOCH, ProtocolError, encode
from protocol.process.host_agents import (
    REPEAT_S,
    Failed,
    FromAgent,
    Join,
    Joined,
    Leave,
    Settings,
    decode_to_agent,
)
from protocol.transport.channel import DealerChannel, HighWaterMark, LinkEvent
from protocol.transport.curve import ClientKeys
from scripts.supervisor.host_agents import digest_of

SILENCE_S = 5.0
"""Time without an answer after which a line reports it, and without a connection after which a new
one is tried: libzmq does not retry one that was refused for its key."""
_READ_LIMIT = 64
_LINGER_MS = 1000

log = logging.getLogger("troika.agent")


class HeadLink:
    """Fetches the settings, and then reports where the core of this machine serves (`Reports`)."""

    def __init__(
        self, address: str, keys: ClientKeys, name: str, *, leave_after_s: float | None = None
    ) -> None:
        """Connect to tcp `address`; after `leave_after_s` without an answer the engine ends."""
        self._address = address
        self._name = name
        self._leave_after_s = leave_after_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channel = DealerChannel(self._context, address, HighWaterMark.LIFECYCLE_LINK, keys)
        self._settings = ""
        self._core = ""
        self._serves = False
        self._repeat_at = 0.0
        self._turned_at = time.monotonic()
        self._silent_s = 0.0
        self._is_silent = False
        self._is_linked = False
        self._unlinked_s = 0.0
        self._ends = False

    def fetch_settings(self, signal_fd: int, parent_fd: int | None = None) -> EngineConfig | None:
        """Wait until the engine sends its settings; None: a signal has arrived before.

        EOF of `parent_fd` counts as a signal. ConfigError: the settings cannot be used.
        """
        ends = [signal_fd] if parent_fd is None else [signal_fd, parent_fd]
        while True:
            for message in self._turn():
                if isinstance(message, Settings):
                    self._settings = digest_of(message)
                    return decoded(message)
                if isinstance(message, Leave):
                    raise ConfigError(f"{self._address}: {message.reason}")
            if self._is_abandoned:
                raise ConfigError(f"{self._address} does not answer")
            ready, _, _ = select.select([*ends, self._channel.fd], [], [], REPEAT_S / 4)
            if any(fd in ready for fd in ends):
                return None

    def serve_at(self, address: str) -> None:
        """Name the address of the core, which is reported once it serves."""
        self._core = address

    def _turn(self) -> list[Settings | Leave]:
        """Repeat `Join` if it is time, and return the messages that have arrived."""
        now = time.monotonic()
        # A longer turn is this process's own, as while a model is fetched: it has not looked.
        passed_s = min(now - self._turned_at, REPEAT_S)
        self._silent_s += passed_s
        self._turned_at = now
        self._follow_link(passed_s)
        if now >= self._repeat_at:
            self._repeat_at = now + REPEAT_S
            core = self._core if self._serves else ""
            self._send(Join(self._name, core, self._settings))
        found: list[Settings | Leave] = []
        for received in self._channel.drain(_READ_LIMIT):
            try:
                message = decode_to_agent(received.body)
            except ProtocolError as error:
                log.error("unreadable message of %s: %s", self._address, error)
                continue
            self._silent_s = 0.0
            if not isinstance(message, Joined):
                found.append(message)
        self._report_silence()
        return found

    def _follow_link(self, passed_s: float) -> None:
        """Record connections that were made or lost; after a long time without one, try another."""
        self._unlinked_s = 0.0 if self._is_linked else self._unlinked_s + passed_s
        for event in self._channel.link_events():
            self._is_linked = event is LinkEvent.CONNECTED
        if self._unlinked_s > SILENCE_S and not self._is_linked:
            self._unlinked_s = 0.0
            self._channel.reconnect()

    def _report_silence(self) -> None:
        is_silent = self._silent_s > SILENCE_S
        if is_silent and not self._is_silent:
            problem = f" ({self._channel.problem})" if self._channel.problem else ""
            text = "%s does not answer%s; trying again"
            log.warning(text, self._address, problem)
        elif self._is_silent and not is_silent:
            log.info("%s answers", self._address)
        self._is_silent = is_silent

    @property
    def _is_abandoned(self) -> bool:
        return self._leave_after_s is not None and self._silent_s > self._leave_after_s

    def _send(self, message: FromAgent) -> None:
        self._channel.send(NO_EPOCH, encode(message))

    # Reports ------------------------------------------------------------------------------------

    @property
    def socket(self) -> zmq.Socket[bytes]:
        return self._channel.socket

    @property
    def longest_poll_ms(self) -> int | None:
        return int(REPEAT_S * 1000)

    def commands(self) -> list[Command]:
        """Return `Drain` once if this engine is to leave."""
        reasons = [message.reason for message in self._turn() if isinstance(message, Leave)]
        if self._is_abandoned:
            reasons.append(f"{self._address} has not answered for {self._leave_after_s:g} s")
        if not reasons or self._ends:
            return []
        log.warning("this engine ends: %s", reasons[0])
        self._ends = True
        return [Drain()]

    def progress(self, message: Progress) -> None:
        """Do nothing: starts are shown on this machine only."""

    def ready(self, facts: list[str]) -> None:
        self._serves = True
        self._repeat_at = 0.0

    def close(self, failure: str | None) -> None:
        if self._settings:
            if failure is not None:
                self._send(Failed(self._name, failure[:MAX_TEXT]))
            self._send(Join(self._name, "", self._settings, is_leaving=True))
        self._channel.socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._context.destroy()


def decoded(settings: Settings) -> EngineConfig:
    """Return the settings of an engine; ConfigError: they cannot be read."""
    try:
        return msgspec.msgpack.decode(settings.encoded, type=EngineConfig)
    except msgspec.MsgspecError as error:
        text = f"the settings of the engine cannot be read, as if it had another version: {error}"
        raise ConfigError(text) from error
