"""GPUs are divided among replicas by CUDA's own variable."""

from pathlib import Path

import msgspec
import pytest

from protocol.config import ConfigError
from protocol.config.settings import configure
from scripts.supervisor.gpus import VISIBLE, divide_gpus, gpus_of, visible_gpus
from scripts.supervisor.replica import replica_config


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0,1,2", ["0", "1", "2"]),
        ("3, GPU-8a, MIG-1b", ["3", "GPU-8a", "MIG-1b"]),
        ("", []),
        ("-1", []),
        ("1,-1,2", ["1"]),
    ],
)
def test_variable_names_the_gpus(value: str, expected: list[str]) -> None:
    assert visible_gpus({VISIBLE: value}) == expected


def test_device_files_are_counted_without_the_variable(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1", "2"]


def test_each_gpu_belongs_to_one_replica() -> None:
    gpus = [f"GPU-{number}" for number in range(6)]
    shares = [gpus_of(gpus, replica, 3) for replica in range(3)]
    assert [gpu for each in shares for gpu in each] == gpus
    assert {len(each) for each in shares} == {2}


def test_replica_sees_its_share_and_the_supervisor_above_all(tmp_path: Path) -> None:
    config = configure(model="m", device="cuda", data_parallel_size=2)
    run = msgspec.structs.replace(config.run, run_dir=str(tmp_path))
    config = msgspec.structs.replace(config, run=run)
    environment = {VISIBLE: "4,5,6,7"}
    divide_gpus(config, environment)
    assert environment[VISIBLE] == "4,5,6,7"
    divide_gpus(replica_config(config, 1), environment)
    assert environment[VISIBLE] == "6,7"


def test_error_names_both_numbers() -> None:
    config = configure(model="m", device="cuda", data_parallel_size=2)
    with pytest.raises(ConfigError, match="data_parallel_size 2 does not divide the 3 visible"):
        divide_gpus(config, {VISIBLE: "0,1,2"})


def test_each_rank_of_a_model_needs_a_gpu() -> None:
    config = configure(model="m", device="cuda", tensor_parallel_size=2, data_parallel_size=2)
    divide_gpus(config, {VISIBLE: "0,1,2,3"})
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 2 needs .*, and 1 are visible"):
        divide_gpus(config, {VISIBLE: "0,1"})


def test_cpu_and_the_null_model_need_no_gpu() -> None:
    for config in (
        configure(model="m", device="cpu", data_parallel_size=2),
        configure(model="null", device="cuda", data_parallel_size=2),
    ):
        divide_gpus(config, {VISIBLE: "0,1,2"})


def test_engines_of_other_machines_need_no_gpus_here() -> None:
    config = configure(
        model="m",
        device="cuda",
        tensor_parallel_size=2,
        data_parallel_size=0,
        agents_listen="10.0.0.1:5555",
        curve_keys="keys",
    )
    divide_gpus(config, {VISIBLE: "0"})
