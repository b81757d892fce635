"""Which CPUs a worker computes on, and that it is confined to them only if it is asked for."""

import os

import pytest

from protocol.config import CpuPinning, EngineConfig, ParallelConfig, RunConfig, WorkerConfig
from worker_proc.startup import cpu_pinning
from worker_proc.startup.cpu_pinning import pin_worker, worker_cpus


@pytest.mark.parametrize(
    ("present", "num_workers", "expected"),
    [
        (range(1), 1, [{0}]),
        (range(2), 1, [{0, 1}]),
        (range(4), 1, [{1, 2, 3}]),
        (range(16), 1, [set(range(1, 16))]),
        (range(64), 1, [set(range(4, 64))]),
        (range(4), 3, [{1}, {2}, {3}]),
        (range(16), 2, [set(range(1, 8)), set(range(8, 16))]),
        (range(64), 4, [set(range(4 + 15 * i, 19 + 15 * i)) for i in range(4)]),
        # More workers than CPUs: each of them may use all.
        (range(2), 2, [{0, 1}, {0, 1}]),
        (range(4), 4, [{0, 1, 2, 3}] * 4),
        # An affinity mask with holes.
        ((3, 9, 40, 41), 1, [{9, 40, 41}]),
        ((3, 9), 1, [{3, 9}]),
        ((7, 5, 63, 21, 20), 2, [{7, 20}, {21, 63}]),
    ],
)
def test_workers_share_what_is_left_of_the_cpus(
    present: range | tuple[int, ...], num_workers: int, expected: list[set[int]]
) -> None:
    found = [worker_cpus(present, len(present), num_workers, rank) for rank in range(num_workers)]
    assert found == expected


@pytest.mark.parametrize("num_cpus", [2, 3, 4, 7, 16, 64, 255])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 8])
def test_no_cpu_has_two_workers_and_one_is_free(num_cpus: int, num_workers: int) -> None:
    present = set(range(0, 3 * num_cpus, 3))
    found = [worker_cpus(present, num_cpus, num_workers, rank) for rank in range(num_workers)]
    assert all(cpus and cpus <= present for cpus in found)
    if found[0] != present:
        assert sum(map(len, found)) == len(set().union(*found)) < num_cpus
        assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize("num_usable", [1, 4, 15])
def test_a_quota_below_the_cpus_leaves_the_choice_to_the_kernel(num_usable: int) -> None:
    """The CPUs are shared with other containers."""
    assert worker_cpus(range(16), num_usable, 1, 0) == set(range(16))


AUTO = CpuPinning.AUTO
PINNED = [(0, {3, 5, 8})]


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        (WorkerConfig(cpu_pinning=CpuPinning.OFF), []),
        (WorkerConfig(cpu_pinning=AUTO), PINNED),
        (WorkerConfig(cpu_pinning=AUTO, num_threads=3), PINNED),
        # They would share CPUs.
        (WorkerConfig(cpu_pinning=AUTO, num_threads=4), []),
    ],
)
def test_workers_are_pinned_as_configured(
    worker: WorkerConfig, expected: list[tuple[int, set[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[tuple[int, set[int]]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 8})
    monkeypatch.setattr(os, "sched_setaffinity", lambda *args: pinned.append(args))
    monkeypatch.setattr(cpu_pinning, "available_cpus", lambda: 4)
    pin_worker(EngineConfig(worker=worker), 0)
    assert pinned == expected


def test_two_cpus_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("it is confined"))
    monkeypatch.setattr(cpu_pinning, "available_cpus", lambda: 2)
    pin_worker(EngineConfig(worker=WorkerConfig(cpu_pinning=CpuPinning.AUTO)), 0)


LISTED = EngineConfig(
    worker=WorkerConfig(worker_cpus="2:3:5,8:9"),
    parallel=ParallelConfig(tensor_parallel_size=2),
    run=RunConfig(replica=1, num_replicas=2),
)


def test_each_rank_of_each_replica_computes_on_the_cpus_that_are_listed_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned: list[tuple[int, set[int]]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 8, 9})
    monkeypatch.setattr(os, "sched_setaffinity", lambda *args: pinned.append(args))
    for rank in range(2):
        pin_worker(LISTED, rank)
    assert pinned == [(0, {5, 8}), (0, {9})]


def test_cpus_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5})
    with pytest.raises(ValueError, match="contains 8; there are only the CPUs 0-2,5"):
        pin_worker(LISTED, 0)
