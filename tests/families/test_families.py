"""Every family in the table of docs/families.md is served as the table states."""

from pathlib import Path

import pytest

from scripts.testing import EngineFactory
from tests.families.configs import FAMILIES
from tests.families.table import NAMES, PAGE, row, rows_of
from tests.families.verification import verify
from tests.system.conftest import start_engine

__all__ = ["start_engine"]


def test_the_table_has_every_family() -> None:
    assert list(rows_of(PAGE.read_text())) == sorted(NAMES)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # without shared experts
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_family_is_served_as_stated(
    name: str, tmp_path: Path, start_engine: EngineFactory
) -> None:
    verified = verify(FAMILIES[name], tmp_path, start_engine)
    assert row(name, verified) in rows_of(PAGE.read_text()).values()
    assert all(verified.equal)
