"""A journal in a test's own thread, and what a successor would read in its directory."""

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from protocol.journal import Journal, Recovered
from tests.system.conftest import eventually


class Owner:
    """A journal whose callbacks run in the test's thread, whenever it looks at anything."""

    def __init__(
        self,
        directory: Path,
        open_file: Callable[[str, int, int], int] = os.open,
        write: Callable[[int, memoryview], int] = os.write,
        sync: Callable[[int], None] | None = None,
        on_told: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_told` runs in the journal's thread, before it goes on."""
        self._errors: list[OSError] = []
        self._told: deque[Callable[[], None]] = deque()
        self._on_told = on_told
        self._journal = Journal(
            str(directory),
            self._notify,
            lambda: None,
            self._errors.append,
            open_file=open_file,
            write=write,
            sync=sync,
        )

    def _notify(self, function: Callable[[], None]) -> None:
        self._on_told()
        self._told.append(function)

    @property
    def journal(self) -> Journal:
        """With all that its thread has told."""
        while self._told:
            self._told.popleft()()
        return self._journal

    @property
    def errors(self) -> list[OSError]:
        """Those that it has told."""
        assert self.journal
        return self._errors

    def recover(self) -> list[bytes]:
        """What the directory says.

        Raises:
            OSError: why it says nothing.
        """
        outcomes: list[Recovered] = []
        self.journal.recover(outcomes.append)
        eventually(lambda: self.journal and outcomes, "the directory is read", 30.0)
        (outcome,) = outcomes
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    def begin(self, *snapshot: bytes) -> None:
        """A new segment with this snapshot."""
        self.journal.begin_segment()
        for record in snapshot:
            self.journal.append(record)
        self.journal.complete_segment()

    def settle(self) -> None:
        """Wait until all that was appended is written or lost."""
        eventually(
            lambda: self.journal.num_written == self.journal.num_appended, "all is settled", 30.0
        )


def recovered(directory: Path) -> list[bytes]:
    """What a successor reads, once its predecessor has let go of the directory."""

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
