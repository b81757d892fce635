"""A child's end of the lifecycle link: its reports to the supervisor, and the commands it gets.

A frame may be lost with its connection, and gaps are ignored on this link. So both ends repeat
their current state: a child that is ready, or drained, sends that every `REPEAT_S`, and so it does
with its remarks.
"""

import logging
import time

from protocol.lifecycle import (
    REPEAT_S,
    Command,
    Drained,
    Ready,
    Remarks,
    RestartQuery,
    RestartReply,
    StatusQuery,
    StatusReply,
    ToSupervisor,
    decode_from_supervisor,
)
from protocol.message import encode
from protocol.transport.channel import DealerChannel
from protocol.transport.runtime import Clock

_READ_LIMIT = 16

log = logging.getLogger("troika.lifecycle")


class SupervisorLink:
    """The link of one child; its owner closes the channel."""

    def __init__(self, channel: DealerChannel, epoch: int, clock: Clock = time) -> None:
        self._channel = channel
        self._epoch = epoch
        self._monotonic = clock.monotonic
        self.num_fenced_frames = 0
        """Commands to another incarnation, dropped."""
        self._state: Ready | Drained | None = None
        self._wish: RestartQuery | None = None
        self._remarks: Remarks | None = None
        self._repeat_at = 0.0

    def send(self, message: ToSupervisor) -> bool:
        """Send a message once; False if there is no connection."""
        return self._channel.send(self._epoch, encode(message))

    def hold(self, message: Ready | Drained) -> None:
        """Send a state, and repeat it from now on; Drained is final."""
        if not isinstance(self._state, Drained):
            self._state = message
        self._send_state()

    def ask_for_restart(self, wish: RestartQuery) -> None:
        """Request a replacement, and repeat it until there is an answer."""
        self._wish = wish
        self._send_state()

    def remark(self, message: Remarks) -> None:
        """Send remarks, and repeat them until the next ones; empty ones, too, may be lost."""
        self._remarks = message
        self.send(message)

    def promoted(self, epoch: int) -> None:
        """Continue under a new epoch, with no state to repeat yet."""
        self._epoch = epoch
        self._state = self._remarks = None

    def ask_for_status(self) -> bool:
        """Request the status of all processes once; the reply may be lost."""
        return self.send(StatusQuery())

    def repeat(self) -> None:
        """Send the current state again, if it is time."""
        if self._monotonic() >= self._repeat_at:
            self._send_state()

    def read(self) -> list[Command | StatusReply]:
        """Return some commands and replies. To be called at least every `REPEAT_S`."""
        self.repeat()
        commands: list[Command | StatusReply] = []
        for received in self._channel.drain(_READ_LIMIT):
            message = decode_from_supervisor(received.body)
            if isinstance(message, RestartReply):
                if self._wish is not None and not message.accepted:
                    log.info("a restart was refused: %s", message.reason)
                self._wish = None
            elif isinstance(message, StatusReply):  # without an epoch: any program may ask
                commands.append(message)
            elif received.header.epoch != self._epoch:
                self.num_fenced_frames += 1
            else:
                commands.append(message)
        return commands

    def _send_state(self) -> None:
        self._repeat_at = self._monotonic() + REPEAT_S
        for message in (self._state, self._wish, self._remarks):
            if message is not None:
                self.send(message)
