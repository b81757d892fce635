"""Tracks which marks of a core have changed, so that only these are written before a step.

The marks are the fingerprints of the suspects in the steps in flight. They are written to the
progress page, which outlives the core.
"""

from collections.abc import Iterable

from protocol.process.progress_page import MarkEdits

_NO_REQUEST = -1
"""The request id at the first place, which has the number of the stage."""


class Marks:
    """The stage of the search at the first place, and fingerprints of suspects at the others."""

    def __init__(self) -> None:
        self._written_total = 0
        self.replace(0, ())

    def replace(self, stage: int, marks: Iterable[tuple[int, int]]) -> None:
        """Replace everything by a stage and the (request id, fingerprint) of each suspect."""
        self._numbers = [stage]
        self._req_ids = [_NO_REQUEST]
        self._places: dict[int, int] = {}
        self._changed = {0}
        for req_id, fingerprint in marks:
            self.add(req_id, fingerprint)

    def add(self, req_id: int, fingerprint: int) -> None:
        place = self._places[req_id] = len(self._numbers)
        self._numbers.append(fingerprint)
        self._req_ids.append(req_id)
        self._changed.add(place)

    def discard(self, req_id: int) -> None:
        place = self._places.pop(req_id, None)
        if place is None:
            return
        last_id, last = self._req_ids.pop(), self._numbers.pop()
        if last_id != req_id:
            self._req_ids[place], self._numbers[place] = last_id, last
            self._places[last_id] = place
            self._changed.add(place)

    def take_edits(self, *, is_computing: bool) -> MarkEdits | None:
        """Return what has changed since the last call, if anything; at rest there are no marks."""
        total = len(self._numbers) if is_computing else 0
        if total == self._written_total and not (total and self._changed):
            return None
        self._written_total = total
        if not total:
            return MarkEdits(0, {})
        changed, self._changed = self._changed, set()
        return MarkEdits(total, {p: self._numbers[p] for p in changed if p < total})
