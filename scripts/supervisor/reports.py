"""A supervisor's reports to the process that started its engine, and the commands from there."""

from collections.abc import Sequence
from typing import Any, Protocol

from protocol.lifecycle import Command, Progress


class Reports(Protocol):
    """The supervisor above a replica, or the engine that a host agent has joined."""

    @property
    def socket(self) -> Any:
        """Socket to poll for `commands`."""

    @property
    def longest_poll_ms(self) -> int | None:
        """Longest time between two calls of `commands`; None: any."""

    def commands(self) -> Sequence[Command]:
        """Return the commands that have arrived. To be called in every turn of the loop."""

    def progress(self, message: Progress) -> None:
        """Report that a process continues its start."""

    def ready(self, facts: list[str]) -> None:
        """Report that the engine serves; `facts` are lines for the console."""

    def close(self, failure: str | None) -> None:
        """Report that the engine has ended, in order unless there is a failure."""
