"""Lists of CPUs for workers: what is read and refused, and that each list can be read again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.config import ConfigError
from protocol.config.cpu_lists import MAX_CPUS, format_cpus, parse_cpu_lists
from protocol.config.settings import configure


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3", [{3}]), ("0-1:2-3", [{0, 1}, {2, 3}]), ("0-2,7:5,9-9", [{0, 1, 2, 7}, {5, 9}])],
)
def test_each_worker_has_a_list(text: str, expected: list[set[int]]) -> None:
    assert parse_cpu_lists(text) == expected


@given(st.sets(st.integers(0, MAX_CPUS - 1), min_size=1, max_size=20))
def test_a_list_is_read_as_it_was_written(cpus: set[int]) -> None:
    assert parse_cpu_lists(format_cpus(cpus)) == [cpus]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"worker_cpus": ""}, "worker_cpus: '' is not a CPU"),
        ({"worker_cpus": "0-"}, "worker_cpus: '0-' is not a CPU"),
        ({"worker_cpus": "2-1"}, "worker_cpus: 2-1 must be a range of CPUs from 0 to 8191"),
        ({"worker_cpus": "0-9000"}, "worker_cpus: 0-9000 must be a range"),
        ({"worker_cpus": "0-2:2-4"}, "worker_cpus: workers 0 and 1 share CPU 2"),
        ({"worker_cpus": "0:1"}, "worker_cpus must have a list of CPUs for each worker: 1, not 2"),
        (
            {"worker_cpus": "0:1", "tensor_parallel_size": 2, "data_parallel_size": 2},
            "worker_cpus must have a list of CPUs for each worker: 4, not 2",
        ),
        ({"worker_cpus": "0-1", "num_threads": 3}, "num_threads 3 must be at most 2"),
        ({"worker_cpus": "0", "cpu_pinning": "auto"}, "worker_cpus works without cpu_pinning"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        configure(model="null", **settings)
