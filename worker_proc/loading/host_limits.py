"""The CPUs and memory that this process may use, within the limits of its cgroups.

In a container the host's numbers are wrong: more threads than the quota allows are throttled
together, and a cache larger than the limit ends in an OOM kill. The limits of a cgroup's ancestors
apply as well. Version 2 has one hierarchy, version 1 one for each controller.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")


def available_cpus(root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP) -> int:
    """Return how many threads can compute at once: this process's CPUs, within its quota."""
    quotas = [_cpu_quota(directory) for directory in _cgroups(root, membership, "cpu")]
    return max(1, int(min([len(os.sched_getaffinity(0)), *quotas])))


def available_memory(
    root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP, meminfo: Path = MEMINFO
) -> int:
    """Return the bytes that this process can allocate without swapping or being killed."""
    rests = [_memory_rest(directory) for directory in _cgroups(root, membership, "memory")]
    return max(0, int(min([_host_memory(meminfo), *rests])))


def _host_memory(meminfo: Path) -> int:
    found = re.search(r"^MemAvailable:\s*(\d+)", meminfo.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{meminfo} has no line MemAvailable")
    return int(found[1]) * 1024


def _cgroups(root: Path, membership: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of this process's cgroup and of its ancestors, in either version."""
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        # In a container the path may be the host's, while the mounted directory is the cgroup
        # itself.
        place = top / path.lstrip("/")
        while place != top and top in place.parents:
            yield place
            place = place.parent
        yield top


def _cpu_quota(cgroup: Path) -> float:
    """Return CPU seconds per second; infinity if there is no limit."""
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read(cgroup / "cpu.cfs_quota_us"), _read(cgroup / "cpu.cfs_period_us")
    if not (quota.isdigit() and period.isdigit() and int(period)):  # "max" or -1: no limit
        return float("inf")
    return int(quota) / int(period)


def _memory_rest(cgroup: Path) -> float:
    """Return the bytes left below the limit; infinity if there is no limit.

    Cached files count as free, since the system can drop them.
    """
    for limit_file, usage_file, cached_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _read(cgroup / limit_file), _read(cgroup / usage_file)
        if limit.isdigit() and usage.isdigit():
            stat = dict(line.split(" ", 1) for line in _read(cgroup / "memory.stat").splitlines())
            return int(limit) - int(usage) + int(stat.get(cached_key, 0))
    return float("inf")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
