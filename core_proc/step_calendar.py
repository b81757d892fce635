"""When running requests are due: why a steady step costs what changes, and not what runs.

A request that decodes needs the scheduler only where a block is full or the end is near. In all
other steps it computes one more token, and that is counted for all of them at once: by a clock.
"""

from operator import attrgetter

from core_proc.request import Request, StepClock

_admission_index = attrgetter("admission_index")


class StepCalendar:
    """Running requests by the step in which they are due.

    Entries are never searched for: one that no longer agrees with its request's `due_at` is passed
    over when its step comes.
    """

    def __init__(self) -> None:
        self.clock = StepClock()
        """Counts the steps in which tokens are granted."""
        self._entries: dict[int, list[Request]] = {}

    def tick(self) -> list[Request]:
        """Begin a step: every request that follows the clock has one more computed token.

        Returns:
            Who is due, in order of admission; each has to be entered anew, or postponed.
        """
        self.clock.now += 1
        due = []
        for request in self._entries.pop(self.clock.now, ()):
            if request.due_at == self.clock.now:
                request.due_at = 0
                due.append(request)
        due.sort(key=_admission_index)
        return due

    def enter(self, request: Request, num_quiet_steps: int) -> None:
        """Leave a request alone for so many steps after this one."""
        self._enter(request, self.clock.now + 1 + num_quiet_steps)

    def postpone(self, request: Request) -> None:
        """A request sits this step out, so it is due one step later than it was."""
        self._enter(request, (request.due_at or self.clock.now) + 1)

    def _enter(self, request: Request, due_at: int) -> None:
        request.due_at = due_at
        self._entries.setdefault(due_at, []).append(request)

    def due_next(self) -> list[Request]:
        """List who is due in the next step, in order of admission."""
        due_at = self.clock.now + 1
        due = {request for request in self._entries.get(due_at, ()) if request.due_at == due_at}
        return sorted(due, key=_admission_index)

    def clear(self) -> None:
        """Nobody runs."""
        self._entries.clear()

    def check_invariants(self, running: list[Request]) -> None:
        """Make sure that nobody who runs is forgotten."""
        for request in running:
            assert request.due_at > self.clock.now
            assert request in self._entries[request.due_at]
