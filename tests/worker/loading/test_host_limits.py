"""Limits of a container: CPUs and memory of the cgroup count, not those of the host."""

import os
from pathlib import Path

import pytest

from worker_proc.loading import host_limits
from worker_proc.loading.host_limits import available_cpus, available_memory

HOST_BYTES = 64 * 1024**3


def write(root: Path, membership: str, **files: str) -> tuple[Path, Path]:
    """Write a fake hierarchy; "__" in a name separates directories, "_dot_" is a dot."""
    for name, content in files.items():
        path = root.joinpath(*name.replace("_dot_", ".").split("__"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    member = root.with_name("membership")
    member.write_text(membership)
    return root, member


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "cgroup"
    directory.mkdir()
    return directory


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text(f"MemTotal: 9 kB\nMemAvailable:    {HOST_BYTES // 1024} kB\n")
    return path


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("9900000 100000", 8),
        ("nonsense", 8),
    ],
)
def test_threads_follow_the_quota_of_version_2(root: Path, limit: str, expected: int) -> None:
    assert available_cpus(*write(root, "0::/\n", cpu_dot_max=limit)) == expected


def test_threads_follow_the_quota_of_version_1(root: Path) -> None:
    files = {"cpu__cpu_dot_cfs_quota_us": "300000", "cpu__cpu_dot_cfs_period_us": "100000"}
    membership = "4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n"
    assert available_cpus(*write(root, membership, **files)) == 3
    assert available_cpus(*write(root, membership, cpu__cpu_dot_cfs_quota_us="-1")) == 8


def test_the_limit_of_an_ancestor_holds(root: Path, meminfo: Path) -> None:
    files = {
        "pod__cpu_dot_max": "100000 100000",
        "pod__box__cpu_dot_max": "400000 100000",
        "pod__memory_dot_max": "5000",
        "pod__memory_dot_current": "1000",
        "pod__box__memory_dot_max": "max",
        "pod__box__memory_dot_current": "10",
    }
    where = write(root, "0::/pod/box\n", **files)
    assert available_cpus(*where) == 1
    assert available_memory(*where, meminfo) == 4000


def test_affinity_counts_without_a_quota(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert available_cpus(*write(root, "0::/\n")) == 1
    assert available_cpus(root, root / "missing") == 1


@pytest.mark.parametrize(
    ("membership", "prefix", "names"),
    [
        ("0::/\n", "", ("max", "current", "inactive_file")),
        (
            "3:memory:/docker/abc\n",
            "memory__",
            ("limit_in_bytes", "usage_in_bytes", "total_inactive_file"),
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_memory_is_what_is_left_to_the_limit(
    root: Path, meminfo: Path, membership: str, prefix: str, names: tuple[str, str, str]
) -> None:
    """Cached files that can go count as free."""
    limit, usage, cached = names
    files = {
        f"{prefix}memory_dot_{limit}": "1000000",
        f"{prefix}memory_dot_{usage}": "700000",
        f"{prefix}memory_dot_stat": f"anon 5\n{cached} 200000",
    }
    assert available_memory(*write(root, membership, **files), meminfo) == 500_000
    files[f"{prefix}memory_dot_{usage}"] = "1300000"
    assert available_memory(*write(root, membership, **files), meminfo) == 0


def test_memory_is_the_hosts_without_a_limit(root: Path, meminfo: Path) -> None:
    """Version 1 writes a huge number where there is none."""
    assert available_memory(*write(root, "0::/\n", memory_dot_max="max"), meminfo) == HOST_BYTES
    files = {
        "memory__memory_dot_limit_in_bytes": "9223372036854771712",
        "memory__memory_dot_usage_in_bytes": "4096",
    }
    assert available_memory(*write(root, "3:memory:/\n", **files), meminfo) == HOST_BYTES
    assert available_memory(root, root / "missing", meminfo) == HOST_BYTES


def test_one_module_reads_the_limits_for_all() -> None:
    """Thread count, cache size, swap space and forked workers read the same module."""
    assert Path("/sys/fs/cgroup") == host_limits.CGROUP_ROOT
    package = Path(host_limits.__file__).parent
    readers = [path for path in package.rglob("*.py") if "os.sched_getaffinity" in path.read_text()]
    assert readers == [Path(host_limits.__file__)]
