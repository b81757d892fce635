"""Tracks when running requests must be visited, so that a steady step visits few of them.

A request that decodes into a block that it holds needs no decision: it gets one token in each step.
It is due when that block is full, or when its end is near.
"""

from operator import attrgetter

from core_proc.request import Request, RequestStatus

_admission_index = attrgetter("admission_index")


class DueIndex:
    """Running requests by due step; entries that disagree with `due_at` are skipped."""

    def __init__(self) -> None:
        self.now = 0
        self._entries: dict[int, list[Request]] = {}

    def begin_step(self) -> list[Request]:
        """Return the due requests, by admission; the caller re-enters those that still run."""
        self.now += 1
        entered = self._entries.pop(self.now, None)
        if entered is None:
            return []
        due = []
        for request in entered:
            if request.due_at == self.now:
                request.due_at = 0  # a request may have two entries for one step
                due.append(request)
        due.sort(key=_admission_index)
        return due

    def enter(self, request: Request, num_quiet_steps: int = 0) -> None:
        """Make a request due again, after `num_quiet_steps` further steps."""
        request.due_at = self.now + 1 + num_quiet_steps
        self._entries.setdefault(request.due_at, []).append(request)

    def due_next(self) -> list[Request]:
        due_at = self.now + 1
        due = {request for request in self._entries.get(due_at, ()) if request.due_at == due_at}
        return sorted(
            (request for request in due if request.status is RequestStatus.RUNNING),
            key=_admission_index,
        )

    def clear(self) -> None:
        """Remove all entries, when no request runs."""
        self._entries.clear()

    def check_invariants(self, running: list[Request]) -> None:
        for request in running:
            assert request.due_at > self.now
            assert request in self._entries[request.due_at]
