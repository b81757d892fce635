"""docs/compatibility.md: it lists every client, and nothing that did not run."""

from pathlib import Path

import pytest

from tests.clients.catalogue import CLIENTS, ENGINES
from tests.clients.environments import PROGRAMS
from tests.clients.runs import Outcome, read_outcome
from tests.clients.table import PAGE, checks_of, page, results

NAMES = [client.name for client in CLIENTS]


def test_the_page_is_made_of_the_results() -> None:
    assert PAGE.read_text() == "\n".join(page(results())) + "\n"


def test_every_client_has_a_program_an_engine_and_an_outcome() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for client in CLIENTS:
        assert (PROGRAMS / client.program).is_file(), client.name
        assert client.engine in ENGINES, client.name
        assert checks_of(client.program), client.name
    assert list(results()) == NAMES


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_the_results_name_the_checks_of_the_program(client) -> None:
    """A check that was added or renamed since has not run, and the client must run again."""
    outcome = results()[client.name]
    if outcome.reason:
        assert outcome == Outcome(reason=outcome.reason)
        return
    ran = {*outcome.passed, *outcome.failed, *outcome.skipped}
    assert ran == set(checks_of(client.program))
    assert outcome.versions


def test_every_program_belongs_to_a_client() -> None:
    helpers = {"checks.py", "checks.mjs", "reference_loglikelihoods.py"}
    files = {path.name for path in Path(PROGRAMS).iterdir() if path.is_file()}
    assert files == {client.program for client in CLIENTS} | helpers


def test_outcomes_are_read_from_what_a_program_prints() -> None:
    lines = "passed a\nnoise\nskipped b: the server has no route /x\nfailed c d\n"
    assert read_outcome(lines, 1) == Outcome(
        passed=["a"], failed=["c d"], skipped={"b": "the server has no route /x"}
    )
    assert read_outcome("passed a\n", -9).failed  # it was killed before the next check
    assert read_outcome("passed a\n", 1).failed  # it broke off
    assert not read_outcome("passed a\n", 0).failed
