"""Every client against a real engine: `pytest -m clients` installs and runs them all.

The default suite runs one of them, with the version in the development environment.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.testing import EngineFactory
from tests.clients.catalogue import CLIENTS, Client
from tests.clients.environments import PROGRAMS
from tests.clients.runs import Engines, excerpt, run_client
from tests.clients.table import checks_of


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    """The engines that the clients of this module share."""
    with EngineFactory() as start_engine:
        yield Engines(start_engine)


@pytest.mark.clients
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_client(client: Client, engines: Engines) -> None:
    outcome, output = run_client(client, engines)
    if outcome.reason:
        pytest.skip(outcome.reason)
    assert not outcome.failed, f"{outcome.failed}\n{excerpt(output)}"
    assert outcome.passed or outcome.skipped


@dataclass(frozen=True)
class Installed:
    """The environment of these tests."""

    def make(self, directory: Path) -> None:
        pass

    def command(self, directory: Path, program: str) -> list[str]:
        return [sys.executable, str(PROGRAMS / program)]

    def versions(self, directory: Path) -> dict[str, str]:
        return {}


@pytest.mark.timeout(300)
def test_openai_python(engines: Engines, tmp_path: Path) -> None:
    """It tries completions, chats, parse(), tools, embeddings and errors, streamed and not."""
    client = Client("openai", Installed(), "openai_python.py")
    outcome, output = run_client(client, engines, tmp_path)
    assert not outcome.failed, f"{outcome.failed}\n{excerpt(output)}"
    assert [*outcome.passed, *outcome.skipped] == checks_of(client.program)
    assert "parse" in outcome.passed
