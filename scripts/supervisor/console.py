"""Terminal output: seconds per phase, a bar while a model loads, and the address.

Without a terminal the same facts are printed as plain lines, and a long load prints one every ten
seconds in place of the bar. A closed terminal is not an error.
"""

import logging
import shutil
import textwrap
from dataclasses import dataclass, field
from typing import TextIO

from protocol.lifecycle import Progress, Ready, Role
from scripts.supervisor.actions import Slot
from scripts.supervisor.process_state import phase_name

_BAR_CELLS = 24
_REDRAW_S = 0.1
_LINE_S = 10.0
"""Seconds between two lines about a load if no bar can be drawn."""
_SHORTEST_SHOWN_S = 0.05
_CLEAR_LINE = "\r\x1b[K"
_CLEAR_BELOW = "\r\x1b[J"
_LINE_UP = "\x1b[A"
_BEFORE_FIRST_PHASE = "start"
_NO_BREAK = "\N{NO-BREAK SPACE}"
_LOADERS = (Role.ZYGOTE, Role.WORKER)
"""The processes that may load the model: the ranks' zygotes, or the ranks, if they start first."""

log = logging.getLogger("troika.supervisor")


@dataclass
class PhaseClock:
    """The times at which the phases of one start began, on the monotonic clock."""

    started_at: float
    phases: list[tuple[str, float]] = field(default_factory=list)

    def enter(self, phase: str, now: float) -> None:
        """Begin a phase, unless it is the current one."""
        if not self.phases or self.phases[-1][0] != phase:
            self.phases.append((phase, now))

    def numbered_phases(self) -> list[tuple[str, int]]:
        """Return each phase in order, with the number of equal ones before it."""
        names = [name for name, _ in self.phases]
        return [(name, names[:place].count(name)) for place, name in enumerate(names)]

    def seconds(self, now: float) -> list[tuple[str, float]]:
        """Return each phase with its seconds, in order; the last one ends now."""
        begun = [(_BEFORE_FIRST_PHASE, self.started_at), *self.phases]
        ends = [time for _, time in begun[1:]] + [now]
        return [(name, end - start) for (name, start), end in zip(begun, ends, strict=True)]


class Console:
    """Writes to one stream; `is_quiet`: only the log; `is_log_only`: the log gets all lines."""

    def __init__(
        self,
        stream: TextIO,
        *,
        is_terminal: bool,
        is_quiet: bool = False,
        is_log_only: bool = False,
    ) -> None:
        self._stream = stream
        self._is_terminal = is_terminal and not is_quiet and not is_log_only
        self._is_quiet = is_quiet
        self._is_log_only = is_log_only
        self._clocks: dict[Slot, PhaseClock] = {}
        self._loading: dict[Slot, Progress] = {}
        """The processes that load the model, of one role; the slowest one is shown."""
        self._has_bar = False
        self._drawn_at = 0.0

    def starting(self, slot: Slot, now: float) -> None:
        """Begin the times of a process that was started."""
        self._clocks[slot] = PhaseClock(now)
        roles = {other.role for other in self._loading} or _LOADERS
        if slot.role in roles:
            if not self._loading:
                self._drawn_at = now
            self._loading[slot] = Progress(_BEFORE_FIRST_PHASE)

    def progress(self, slot: Slot, message: Progress, now: float) -> None:
        self._clocks[slot].enter(phase_name(message.phase), now)
        if slot in self._loading:
            self._loading[slot] = message
            self.tick(now)

    def ready(self, slot: Slot, message: Ready, now: float) -> None:
        """Print the times of a start that is complete."""
        self._loading.pop(slot, None)
        columns = _num_columns() if self._is_terminal else None
        self.line(render_row(str(slot), self._clocks[slot], message.detail, now, columns))

    def ended(self, slot: Slot) -> None:
        """End the progress of a process that is ready or dead; with the last one the bar ends."""
        self._loading.pop(slot, None)
        if self._has_bar and not self._loading:
            self._clear()

    def _slowest(self) -> Slot:
        """Return the process that is furthest behind.

        A rank may omit phases, such as a compilation that another rank has done. So its phase is
        located among the phases of the rank that has passed most of them.
        """
        passed = {slot: self._clocks[slot].numbered_phases() for slot in self._loading}
        most = max(passed.values(), key=len)

        def progress(slot: Slot) -> tuple[int, float]:
            phases, message = passed[slot], self._loading[slot]
            place = len(phases)
            if phases and phases[-1] in most:
                place = most.index(phases[-1]) + 1
            return place, message.done / max(message.total, 1)

        return min(self._loading, key=progress)

    def next_tick(self) -> float | None:
        """Return the time at which `tick` must be called; None while no progress is shown."""
        if not self._loading or self._is_quiet:
            return None
        return self._drawn_at + (_REDRAW_S if self._is_terminal else _LINE_S)

    def tick(self, now: float) -> None:
        due = self.next_tick()
        if due is None or now < due:
            return
        self._drawn_at = now
        slot = self._slowest()
        clock, message = self._clocks[slot], self._loading[slot]
        bar = render_bar(str(slot), clock, message, now, has_cells=self._is_terminal)
        if not self._is_terminal:
            self.line(bar)
            return
        # The cursor stays in an empty line above the bar, where a child may log a whole line.
        self._write(f"{_CLEAR_BELOW}\n{bar[: _num_columns()]}\r{_LINE_UP}")
        self._has_bar = True

    def line(self, text: str) -> None:
        if self._is_log_only and not self._is_quiet:
            log.info("%s", " ".join(text.split()))
        elif not self._is_quiet:
            self._clear()
            self._write(text + "\n")

    def fact(self, text: str) -> None:
        """Print a sentence below the line before it, wrapped on a terminal."""
        if self._is_terminal:
            text = textwrap.fill(text, max(_num_columns() - 2, 24), subsequent_indent="  ")
        self.line(textwrap.indent(text, "  "))

    def note(self, severity: int, text: str) -> None:
        self._clear()
        log.log(severity, "%s", text)

    def error(self, text: str) -> None:
        if self._is_log_only:
            log.error("%s", text)
            return
        self._clear()
        self._write(f"troika: {text}\n")

    def _clear(self) -> None:
        """Clear the bar, or echoed input such as ^C."""
        if self._is_terminal:
            self._write(_CLEAR_BELOW if self._has_bar else _CLEAR_LINE)
            self._has_bar = False

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the terminal is gone, or the stream is closed
            self._has_bar = False


def render_row(
    name: str, clock: PhaseClock, detail: str, now: float, columns: int | None = None
) -> str:
    """Return a row such as `worker   2.1 s   start 0.2 s, import 1.9 s`, wrapped at `columns`."""
    parts = [
        f"{phase} {duration:.1f} s"
        for phase, duration in clock.seconds(now)
        if duration >= _SHORTEST_SHOWN_S
    ]
    head = _head(name, now - clock.started_at)
    cells = [", ".join(part.replace(" ", _NO_BREAK) for part in parts)] if len(parts) > 1 else []
    cells += [f"({detail})".replace(" ", _NO_BREAK)] if detail else []
    if not cells:
        return head.rstrip()
    body = "   ".join(cells)
    if columns is not None:
        width = max(columns - len(head), 24)
        body = textwrap.fill(body, width, break_long_words=False, break_on_hyphens=False)
    return head + body.replace("\n", "\n" + " " * len(head)).replace(_NO_BREAK, " ")


def render_bar(
    name: str, clock: PhaseClock, message: Progress, now: float, *, has_cells: bool = True
) -> str:
    """Return the row of an unfinished start; a phase of several steps has a bar and its share."""
    row = _head(name, now - clock.started_at) + phase_name(message.phase)
    if message.total <= 1:
        return row
    share = min(message.done / message.total, 1.0)
    if not has_cells:
        return f"{row} {share:.0%}"
    cells = "#" * round(share * _BAR_CELLS)
    return f"{row}  [{cells:.<{_BAR_CELLS}}] {share:4.0%}"


def _head(name: str, seconds: float) -> str:
    return f"  {name:<12}{f'{seconds:.1f} s':>6}   "


def _num_columns() -> int:
    """Return the width of the terminal without its last column, which makes some of them wrap."""
    return max(shutil.get_terminal_size().columns - 1, 1)
