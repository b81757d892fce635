"""Fixtures with two API processes."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.api.peers.servers import MakePair, Pair


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    with ExitStack() as stack:
        yield lambda **settings: Pair(stack, **settings)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """A pair without a journal, which tests leave as it was."""
    with ExitStack() as stack:
        yield Pair(stack, enable_admin_routes=True)


@pytest.fixture
def journaled(make_pair: MakePair, tmp_path: Path) -> Pair:
    return make_pair(journal_dir=str(tmp_path / "journal"))
