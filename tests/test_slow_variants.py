"""The list of variants that the default run leaves out names tests that exist."""

import pytest

from tests.plugins.slow_variants import NAMES, UNKNOWN, unknown_names


def test_each_name_is_that_of_a_test(pytestconfig: pytest.Config) -> None:
    """A name that no collected test has would leave nothing out."""
    assert pytestconfig.stash[UNKNOWN] == []


def test_a_name_is_missed_where_its_file_was_collected() -> None:
    name = min(NAMES)
    file = name.partition("::")[0]
    assert name in unknown_names({f"{file}::test_of_another_name"})
    assert name not in unknown_names({name})
    assert unknown_names(set()) == [], "each file exists"
