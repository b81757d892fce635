"""What a person at the terminal sees: seconds per phase, a bar while a model loads, the address.

Without a terminal the same facts come as plain lines. A terminal that goes away is no error.
"""

import logging
import shutil
from dataclasses import dataclass, field
from typing import TextIO

from protocol.lifecycle import Progress, Ready, Role
from scripts.supervised import Slot

_BAR_CELLS = 24
_REDRAW_S = 0.05
_SHORTEST_SHOWN_S = 0.05
_CLEAR_LINE = "\r\x1b[K"
_BEFORE_FIRST_PHASE = "start"

log = logging.getLogger("troika.supervisor")


@dataclass
class PhaseClock:
    """When the phases of one start began, on the monotonic clock."""

    started_at: float
    phases: list[tuple[str, float]] = field(default_factory=list)

    def enter(self, phase: str, now: float) -> None:
        """A phase goes on, or a new one begins."""
        if not self.phases or self.phases[-1][0] != phase:
            self.phases.append((phase, now))

    def seconds(self, now: float) -> list[tuple[str, float]]:
        """Each phase with its seconds, in order; the last one ends now."""
        begun = [(_BEFORE_FIRST_PHASE, self.started_at), *self.phases]
        ends = [time for _, time in begun[1:]] + [now]
        return [(name, end - start) for (name, start), end in zip(begun, ends, strict=True)]


class Console:
    """Writes to one stream. `is_quiet` leaves only the log."""

    def __init__(self, stream: TextIO, *, is_terminal: bool, is_quiet: bool = False) -> None:
        self._stream = stream
        self._is_terminal = is_terminal
        self._is_quiet = is_quiet
        self._clocks: dict[Slot, PhaseClock] = {}
        self._has_bar = False
        self._drawn_at = 0.0

    def starting(self, slot: Slot, now: float) -> None:
        """A process was started."""
        self._clocks[slot] = PhaseClock(now)

    def progress(self, slot: Slot, message: Progress, now: float) -> None:
        """A phase of its start goes on. The bar shows the slowest process, the first worker."""
        clock = self._clocks[slot]
        clock.enter(message.phase.replace("_", " "), now)
        is_due = now - self._drawn_at >= _REDRAW_S or message.done == message.total
        if slot == Slot(Role.WORKER) and is_due and self._is_terminal and not self._is_quiet:
            phase, seconds = clock.seconds(now)[-1]
            self._draw(render_bar(str(slot), phase, message.done, message.total, seconds))
            self._drawn_at = now

    def ready(self, slot: Slot, message: Ready, now: float) -> None:
        """Its start is over."""
        self.line(render_phases(str(slot), self._clocks[slot], message.detail, now))

    def line(self, text: str) -> None:
        """Print a line of its own."""
        if not self._is_quiet:
            self._clear_bar()
            self._write(text + "\n")

    def note(self, severity: int, text: str) -> None:
        """Log what happened."""
        self._clear_bar()
        log.log(severity, "%s", text)

    def error(self, text: str) -> None:
        """Print the last words."""
        self._clear_bar()
        self._write(f"troika: {text}\n")

    def _draw(self, bar: str) -> None:
        """The cursor waits in column 0, so that a log line of a child covers the bar."""
        width = shutil.get_terminal_size().columns - 1
        self._write(f"{_CLEAR_LINE}{bar[:width]}\r")
        self._has_bar = True

    def _clear_bar(self) -> None:
        if self._has_bar:
            self._has_bar = False
            self._write(_CLEAR_LINE)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the terminal is gone, or the stream is closed
            self._has_bar = False


def render_phases(name: str, clock: PhaseClock, detail: str, now: float) -> str:
    """One row of the table, such as `worker   2.1 s  start 0.2 s, import 1.9 s  (cpu)`."""
    parts = [
        f"{phase} {duration:.1f} s"
        for phase, duration in clock.seconds(now)
        if duration >= _SHORTEST_SHOWN_S
    ]
    total = f"{now - clock.started_at:.1f} s"
    row = f"  {name:<10}{total:>8}"
    row += f"   {', '.join(parts)}" if len(parts) > 1 else ""
    return row + (f"   ({detail})" if detail else "")


def render_bar(name: str, phase: str, done: int, total: int, seconds: float) -> str:
    """A bar without line end; without a total only the names."""
    head = f"  {name:<10}{phase}"
    if total <= 0:
        return f"{head} ..."
    share = min(done / total, 1.0)
    num_full = round(share * _BAR_CELLS)
    cells = "#" * num_full + "." * (_BAR_CELLS - num_full)
    return f"{head}  [{cells}] {share:4.0%}  {seconds:.1f} s"
