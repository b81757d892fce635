"""A journal whose owner is a test's thread, and the records that a successor reads."""

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from api_proc.resumption.journal import Journal, JournalOwner, Recovered
from api_proc.resumption.journal_segments import DiskCalls
from scripts.testing import eventually


class Owner:
    """A journal whose callbacks run in the test's thread, whenever it reads an attribute."""

    def __init__(
        self,
        directory: Path,
        open_file: Callable[[str, int, int], int] = os.open,
        write: Callable[[int, memoryview], int] = os.write,
        sync: Callable[[int], None] | None = None,
        on_notify: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_notify` runs in the journal's thread before each notification."""
        self._errors: list[OSError] = []
        self._pending: deque[Callable[[], None]] = deque()
        self._on_pending = on_notify
        self._journal = Journal(
            str(directory),
            JournalOwner(self._notify, lambda: None, self._errors.append),
            is_synced=sync is not None,
            disk=DiskCalls(open_file, write, sync or os.fsync),
        )

    def _notify(self, function: Callable[[], None]) -> None:
        self._on_pending()
        self._pending.append(function)

    @property
    def journal(self) -> Journal:
        """The journal, after all pending callbacks."""
        while self._pending:
            self._pending.popleft()()
        return self._journal

    @property
    def errors(self) -> list[OSError]:
        """The errors reported so far."""
        assert self.journal
        return self._errors

    def recover(self) -> list[bytes]:
        """Return the records in the directory.

        Raises:
            OSError: it cannot be read.
        """
        outcomes: list[Recovered] = []
        self.journal.recover(outcomes.append)
        eventually(lambda: self.journal and outcomes, "the directory is read", 30.0)
        (outcome,) = outcomes
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    def begin(self, *snapshot: bytes) -> None:
        """Begin a new segment with this snapshot."""
        self.journal.begin_segment()
        for record in snapshot:
            self.journal.append(record)
        self.journal.complete_segment()

    def settle(self) -> None:
        """Wait until every appended record is written or lost."""
        eventually(
            lambda: self.journal.num_written == self.journal.num_appended, "all is settled", 30.0
        )


def recovered(directory: Path) -> list[bytes]:
    """Return the records that a successor reads once the directory is unlocked."""

    def read() -> list[list[bytes]]:
        successor = Owner(directory)
        try:
            return [successor.recover()]
        except BlockingIOError:
            return []
        finally:
            successor.journal.close()

    return eventually(read, "the directory is free", 30.0)[0]


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.journal"))
