"""Reports a process's progress in its page: each phase with the time that it may take.

The working thread calls it between two pieces of work: a separate reporting thread would prove only
that it is itself alive. Without a page nothing is written and nothing is watched.
"""

import time

from protocol.config import RecoveryConfig
from protocol.process.progress_page import Phase, ProgressPage
from protocol.transport.runtime import Clock

_TICKS_PER_TIMEOUT = 4
_LONGEST_TICK_S = 0.5


class ProgressReporter:
    """The writing side of a progress page, or nothing."""

    def __init__(
        self,
        page_fd: int | None,
        epoch: int,
        recovery: RecoveryConfig,
        turn_timeout_s: float | None = None,
        clock: Clock = time,
    ) -> None:
        """Begin with the phase STARTING, in the page of `page_fd`; errors as `ProgressPage`.

        `turn_timeout_s` is the limit of a poll and of a turn, by default `hang_timeout_s`.
        """
        self.page = None if page_fd is None else ProgressPage(page_fd)
        self._monotonic_ns = clock.monotonic_ns
        self.epoch = epoch
        turn_s = recovery.hang_timeout_s if turn_timeout_s is None else turn_timeout_s
        self._turn_ns = int(turn_s * 1e9)
        # A process is suspected at this limit and killed at twice the limit.
        self._load_ns = int(recovery.startup_timeout_s / 2 * 1e9)
        tick_s = min(_LONGEST_TICK_S, turn_s / _TICKS_PER_TIMEOUT)
        self.tick_ms = None if self.page is None else max(1, int(tick_s * 1000))
        """Longest poll, so that an idle process shows that it was not stopped; None: no limit."""
        self._loaded: tuple[str, int] | None = None
        self._present: tuple[Phase, int, int | None] = Phase.STARTING, self._load_ns, None
        self._write(Phase.STARTING, self._load_ns)

    def load(self, phase: str, done: int) -> None:
        """Report that a phase of the start continues; its limit begins anew only after a change."""
        if (phase, done) != self._loaded:
            self._loaded = (phase, done)
            self._write(Phase.LOAD, self._load_ns)

    def idle(self) -> None:
        """Report that a poll begins, of at most `tick_ms`."""
        self._write(Phase.IDLE, self._turn_ns)

    def turn(self) -> None:
        """Report that short work begins, such as handling what a poll returned."""
        self._write(Phase.TURN, self._turn_ns)

    def step(self, step_id: int, limit_s: float) -> None:
        """Report that a step begins, which should end within `limit_s`."""
        self._write(Phase.STEP, int(limit_s * 1e9), step_id)

    def waits(self) -> None:
        """Let the time of the phase begin anew: it waits for another process, watched like this."""
        self._write(*self._present)

    def step_completed(self) -> None:
        """Record useful work: after it, a death does not delay the next start."""
        if self.page is not None:
            self.page.write_completed(self.epoch)

    def close(self) -> None:
        """Unmap the page; later reports do nothing."""
        if self.page is not None:
            self.page.close()
            self.page = None

    def _write(self, phase: Phase, limit_ns: int, step_id: int | None = None) -> None:
        self._present = phase, limit_ns, step_id
        if self.page is not None:
            now = self._monotonic_ns()
            self.page.write(self.epoch, phase, step_id, now, now + limit_ns)
