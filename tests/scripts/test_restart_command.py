"""The restart command with a scripted supervisor: when it ends, and how."""

from collections.abc import Iterator
from typing import cast

import pytest

from protocol.lifecycle import ProcessState, ProcessStatus, RestartReply, Role, StatusReply
from protocol.process.status import StatusLink
from scripts.restart import RestartFailed, restart

READY, STARTING = ProcessState.READY, ProcessState.STARTING
Row = tuple[int, int, ProcessState]
"""A status row of an API with this rank, epoch and state."""


class FakeLink:
    """Answers with one table after the other, and repeats the last one."""

    unreadable = ""

    def __init__(
        self, tables: list[list[Row]], refusal: str = "", num_lost: int = 0, count: int = 1
    ) -> None:
        self._tables = tables
        self._count = count
        """Number of API processes; others are successors or predecessors."""
        self._refusal = refusal
        self._num_lost = num_lost
        """Number of lost answers by kind of query."""
        self._num_asked = {"query": 0, "restart": 0}

    def _is_lost(self, kind: str) -> bool:
        self._num_asked[kind] += 1
        return self._num_asked[kind] <= self._num_lost

    def query(self, timeout_s: float) -> StatusReply | None:
        if self._is_lost("query"):
            return None
        rows = self._tables.pop(0) if len(self._tables) > 1 else self._tables[0]
        processes = [
            ProcessStatus(
                Role.API, rank, 100 + epoch, epoch, state, 0, 0, "api", rank >= self._count
            )
            for rank, epoch, state in rows
        ]
        return StatusReply(processes, ready=True, url=None)

    def restart(
        self, role: Role, timeout_s: float, index: int | None = None
    ) -> RestartReply | None:
        if self._is_lost("restart"):
            return None
        return RestartReply(not self._refusal, self._refusal)


def run(tables: list[list[Row]], refusal: str = "", timeout_s: float = 10.0) -> str:
    return restart(cast(StatusLink, FakeLink(tables, refusal)), Role.API, timeout_s)


def leaving() -> Iterator[list[Row]]:
    """The command waits until the successor serves."""
    yield [(0, 1, READY)]
    yield [(0, 1, READY), (1, 2, STARTING)]


def test_it_ends_when_the_successor_serves() -> None:
    tables = [*leaving(), [(0, 2, READY), (1, 1, ProcessState.DRAINING)]]
    text = run(tables)
    assert text.startswith("api replaced in ")
    assert text.endswith(" s: pid 101 by 102")


def test_it_ends_when_the_successor_has_died() -> None:
    with pytest.raises(RestartFailed, match="the api stays: its successor has died"):
        run([*leaving(), [(0, 1, READY)]])


def test_it_waits_when_the_old_one_has_died_too() -> None:
    """One successor replaces both."""
    restarting: list[Row] = [(0, 3, STARTING)]
    assert "by 103" in run([*leaving(), restarting, restarting, [(0, 3, READY)]])


def test_it_does_not_wait_for_ever() -> None:
    with pytest.raises(RestartFailed, match=r"the api is not replaced after 0\.1 s"):
        run([*leaving()], timeout_s=0.1)


def test_refusal_is_printed() -> None:
    with pytest.raises(RestartFailed, match="the engine is stopping"):
        run([*leaving()], refusal="the engine is stopping")


def test_answers_that_are_late_fail_nothing() -> None:
    """The second query is refused because the first one was received."""
    tables = [*leaving(), [(0, 2, READY), (1, 1, ProcessState.DRAINING)]]
    link = FakeLink(tables, "the api is being replaced already", num_lost=2)
    assert restart(cast(StatusLink, link), Role.API, 10.0).endswith(" s: pid 101 by 102")


def test_a_late_refusal_is_printed() -> None:
    link = FakeLink([[(0, 1, READY)]], "the engine is stopping", num_lost=1)
    with pytest.raises(RestartFailed, match="the engine is stopping"):
        restart(cast(StatusLink, link), Role.API, 10.0)


def test_a_supervisor_that_never_answers_is_reported() -> None:
    link = FakeLink([[(0, 1, READY)]], num_lost=1000)
    with pytest.raises(RestartFailed, match="the supervisor does not answer"):
        restart(cast(StatusLink, link), Role.API, 10.0)


def test_several_are_replaced_one_after_the_other() -> None:
    """The command ends with the last one; between two there may be no second process."""
    both: list[Row] = [(0, 1, READY), (1, 2, READY)]
    tables = [
        both,
        [*both, (2, 3, STARTING)],
        [(0, 3, READY), (1, 2, READY), (2, 1, ProcessState.DRAINING)],
        [(0, 3, READY), (1, 2, READY), (3, 4, STARTING)],
        [(0, 3, READY), (1, 4, READY)],
    ]
    link = FakeLink([*tables], count=2)
    text = restart(cast(StatusLink, link), Role.API, 10.0)
    assert text.endswith(" s: pid 101, 102 by 103, 104")
    link = FakeLink([*tables], count=2)
    assert restart(cast(StatusLink, link), Role.API, 10.0, 1).endswith(" s: pid 102 by 104")
    with pytest.raises(RestartFailed, match="the api stays: its successor has died"):
        restart(cast(StatusLink, FakeLink([*tables[:2], both], count=2)), Role.API, 10.0)
    with pytest.raises(RestartFailed, match="this engine has no api 2"):
        restart(cast(StatusLink, FakeLink([both], count=2)), Role.API, 10.0, 2)
