"""The supervisor's side of the progress pages: one for each slot."""

import os
from collections.abc import Iterable

from protocol.lifecycle import Role
from protocol.process.progress_page import Death, Phase, ProgressPage, ProgressRecord
from scripts.supervisor.actions import RecordDeath, Slot

NEXT_API = Slot(Role.API, 1)
"""The second API during a planned restart: the successor, then the predecessor."""


class Pages:
    """All pages of one engine; they outlive the processes that write them."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        """Make a page for each slot.

        Raises:
            OSError: there is no memory or descriptor left; nothing is left behind.
        """
        self._pages: dict[Slot, ProgressPage] = {}
        self._fds: dict[Slot, int] = {}
        try:
            for slot in slots:
                self._create(slot)
                if slot.role is Role.API:
                    self._create(NEXT_API)
        except OSError:
            self.close()
            raise

    def _create(self, slot: Slot) -> None:
        self._pages[slot], self._fds[slot] = ProgressPage.create(f"{slot.role}-{slot.rank}")

    def close(self) -> None:
        """Close all pages."""
        for page in self._pages.values():
            page.close()
        for fd in self._fds.values():
            os.close(fd)
        self._pages.clear()
        self._fds.clear()

    def begin(self, slot: Slot, epoch: int) -> int | None:
        """Prepare a page for a new incarnation; returns the descriptor to hand on, if any."""
        page = self._pages.get(slot)
        if page is not None:
            page.write(epoch, Phase.NONE, None, 0, 0)
        return self._fds.get(slot)

    def exchange(self, one: Slot, other: Slot) -> None:
        """Exchange the pages of two slots: processes keep the page that they write."""
        pages, fds = self._pages, self._fds
        pages[one], pages[other] = pages[other], pages[one]
        fds[one], fds[other] = fds[other], fds[one]

    def promote(self, standby: Slot, slot: Slot) -> None:
        """Give a slot the standby's page, with what its predecessor has left for it."""
        self._pages[standby].inherit(self._pages[slot])
        self.exchange(standby, slot)

    def marks(self) -> dict[Slot, ProgressRecord]:
        """The marks of all pages that can be read."""
        found = {slot: page.read() for slot, page in self._pages.items()}
        return {slot: mark for slot, mark in found.items() if mark is not None}

    def step_of(self, slot: Slot, epoch: int) -> int | None:
        """The step that an incarnation is computing, or was when it died."""
        page = self._pages.get(slot)
        mark = None if page is None else page.read()
        return None if mark is None or mark.epoch != epoch else mark.step_id

    def has_completed_step(self, slot: Slot, epoch: int) -> bool:
        """Whether an incarnation has completed a step."""
        page = self._pages.get(slot)
        return page is not None and page.last_completing_epoch == epoch

    def record_death(self, death: RecordDeath) -> None:
        """Write how the last incarnation ended, for the next one."""
        page = self._pages.get(death.slot)
        if page is not None:
            page.write_death(Death(death.epoch, death.cause, death.step_id))
