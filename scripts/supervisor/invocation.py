"""How an engine was started."""

from typing import NamedTuple

from scripts.supervisor.console import Console
from scripts.supervisor.reports import Reports


class Invocation(NamedTuple):
    """How an engine was started, and its connections to the process that started it."""

    console: Console
    signal_fd: int
    """A descriptor that yields one byte for each signal to stop."""
    started_at: float
    """Time at which the start began, on the monotonic clock."""
    has_api: bool
    has_bars: bool
    """Whether the terminal shows the progress of fetching a model."""
    parent_fd: int | None = None
    """A pipe whose EOF, like the end of this process's parent, ends everything at once."""
    reports: Reports | None = None
    """Receives reports for the process that started the engine."""
