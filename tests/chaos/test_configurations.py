"""The configurations that are drawn for chaos are valid, reproduced, and use every entry."""

from collections.abc import Mapping

from protocol.config.settings import configure
from scripts.supervisor.startup import parse
from tests.chaos.configurations import SETTINGS, draw, flags, is_exact


def test_drawn_settings_are_valid_and_all_are_drawn() -> None:
    drawn = [draw(number, "demo") for number in range(60)]
    for values in drawn:
        configure(model="demo", **values)
    for entry in SETTINGS:
        assert any(entry.items() <= values.items() for values in drawn), entry
    assert drawn[0] == {}
    assert drawn[7] == draw(7, "demo")


def test_settings_that_change_results_are_known() -> None:
    assert is_exact({"max_num_seqs": 3, "num_threads": 1})
    assert is_exact({"block_size": 64})
    assert not is_exact({"block_size": 8})
    assert not is_exact({"max_num_seqs": 3, "dtype": "float32"})


def test_flags_are_those_of_the_settings() -> None:
    values: Mapping[str, bool | int | str] = {
        "enable_prefix_caching": False,
        "elastic_token_budget": True,
        "max_num_seqs": 3,
        "scheduling_policy": "fair",
    }
    _, config = parse("scripts/serve", ["null", *flags(values)])
    assert config == configure(model="null", **values)
