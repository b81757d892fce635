"""When an engine has a standby: if it is set, and by default where it costs little."""

from pathlib import Path
from typing import Any

import pytest

from protocol.config import ConfigError
from protocol.config.settings import configure
from protocol.lifecycle import Role
from scripts.supervisor.checks import complete_config, num_standby_workers
from scripts.supervisor.roles import num_ranks


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"model": "demo", "device": "cpu"}, 1),
        ({"model": "demo", "device": "cpu", "standby_workers": 0}, 0),
        ({"model": "demo", "device": "cuda"}, 0),
        ({"model": "null"}, 0),
        ({"model": "null", "standby_workers": 1}, 1),
        ({"model": "null", "tensor_parallel_size": 2}, 0),
        ({"model": "null", "tensor_parallel_size": 2, "standby_workers": 1}, 1),
    ],
)
def test_the_default_depends_on_model_device_and_ranks(
    settings: dict[str, Any], expected: int
) -> None:
    assert num_standby_workers(configure(**settings)) == expected


def test_automatic_device_is_looked_for(tmp_path: Path) -> None:
    """A device node of a driver means that the model may run on that device."""
    node = tmp_path / "nvidiactl"
    config = configure(model="demo")
    assert num_standby_workers(config, [str(node)]) == 1
    node.touch()
    assert num_standby_workers(config, [str(node)]) == 0


def test_standby_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="standby_workers above 0 needs device cpu"):
        configure(standby_workers=1, model="demo", device="cuda")


@pytest.mark.parametrize("standby_workers", [0, 1])
def test_a_group_of_ranks_has_as_many_zygotes_and_standbys(standby_workers: int) -> None:
    """Without standbys the zygotes fork its successors."""
    settings = {"tensor_parallel_size": 4, "standby_workers": standby_workers}
    numbers = num_ranks(complete_config(configure(model="null", **settings)), has_api=False)
    assert (numbers[Role.WORKER], numbers[Role.ZYGOTE]) == (4, 4)
    assert numbers.get(Role.STANDBY, 0) == 4 * standby_workers


def test_ranks_on_gpus_have_no_zygotes() -> None:
    """No device survives a fork."""
    config = complete_config(configure(model="demo", device="cuda", tensor_parallel_size=2))
    assert Role.ZYGOTE not in num_ranks(config, has_api=False)


def test_one_worker_has_a_zygote_only_with_a_standby() -> None:
    """The zygote starts first, because the worker waits for it."""
    with_standby = complete_config(configure(model="demo", device="cpu"))
    roles = [str(role) for role in num_ranks(with_standby, has_api=True)]
    assert roles == ["zygote", "worker", "standby", "core", "standby_core", "api"]
    without = complete_config(configure(model="null", standby_cores=0))
    assert [str(role) for role in num_ranks(without, has_api=False)] == ["worker", "core"]
