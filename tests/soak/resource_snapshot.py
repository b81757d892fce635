"""Counts the resources of an engine: memory, descriptors, threads, processes, zombies, sockets."""

import os
import re
from collections.abc import Mapping, Set
from pathlib import Path

import msgspec

from tests.proc import process_stats

_ROLLUP = re.compile(rb"^(Rss|Pss|Private_Clean|Private_Dirty): +(\d+) kB$", re.MULTILINE)


class ProcessSnapshot(msgspec.Struct, frozen=True):
    """One process at one moment; sizes in bytes."""

    pid: int
    role: str
    rss: int
    pss: int
    """Proportional share of shared memory; 0 if the system does not report it."""
    private: int
    """Memory that is not shared; 0 if the system does not report it."""
    num_fds: int
    num_threads: int


class ResourceSnapshot(msgspec.Struct, frozen=True):
    """A whole engine at one moment."""

    num_requests: int
    """Requests that have ended."""
    elapsed_s: float
    processes: list[ProcessSnapshot]
    num_zombies: int
    num_sockets: int
    """In the run directory."""
    num_files: int
    """In the run directory, sockets included."""
    num_strays: int
    """Processes of the engine that are not descendants of this process any more."""
    num_held: int
    """Requests in the core and in the ledger of the embedding client."""
    kv_usage_ppm: int
    """Millionths of the KV blocks."""
    num_unexpected_restarts: int
    """Restarts of processes that the soak has not killed."""
    gauges: dict[str, int]
    """Gauges of the API by name."""


def take_snapshot(
    names: Mapping[int, str],
    run_dir: Path,
    *,
    num_requests: int,
    elapsed_s: float,
    living: Set[int],
    num_held: int,
    kv_usage_ppm: int,
    num_unexpected_restarts: int,
    gauges: dict[str, int],
) -> ResourceSnapshot:
    """Read the resources of this process and its descendants.

    Args:
        names: roles by pid; other processes are named after their program.
        run_dir: the directory whose files are counted.
        living: pids of the engine, to find those that are not descendants of this process.

    The other arguments are recorded unchanged.
    """
    snapshots, num_zombies = [], 0
    family = _family(os.getpid())
    for pid, is_zombie in family.items():
        if is_zombie:
            num_zombies += 1
            continue
        snapshot = _process_snapshot(pid, names.get(pid) or _program(pid))
        if snapshot is not None:
            snapshots.append(snapshot)
    files = [entry.name for entry in run_dir.iterdir()]
    num_sockets = sum(name.endswith(".sock") for name in files)
    num_strays = len(living - family.keys())
    return ResourceSnapshot(
        num_requests,
        elapsed_s,
        snapshots,
        num_zombies,
        num_sockets,
        len(files),
        num_strays,
        num_held,
        kv_usage_ppm,
        num_unexpected_restarts,
        gauges,
    )


def _family(root: int) -> dict[int, bool]:
    """Return the pids of a process and its descendants, and whether each is a zombie."""
    states: dict[int, bool] = {}
    children: dict[int, list[int]] = {}
    for one in process_stats():
        states[one.pid] = one.state == "Z"
        children.setdefault(one.parent, []).append(one.pid)
    family: dict[int, bool] = {}
    to_visit = [root]
    while to_visit:
        pid = to_visit.pop()
        family[pid] = states[pid]
        to_visit += children.get(pid, [])
    return family


def _process_snapshot(pid: int, role: str) -> ProcessSnapshot | None:
    """Return the snapshot of a process; None if it has ended."""
    proc = Path(f"/proc/{pid}")
    try:
        num_fds = len(os.listdir(proc / "fd"))
        num_threads = len(os.listdir(proc / "task"))
        memory = _memory(proc)
    except OSError:
        return None
    return ProcessSnapshot(pid, role, *memory, num_fds, num_threads)


def _memory(proc: Path) -> tuple[int, int, int]:
    """Return resident, proportional and private bytes."""
    try:
        text = (proc / "smaps_rollup").read_bytes()
    except (FileNotFoundError, PermissionError):
        pages = int((proc / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), 0, 0
    sizes = {name: int(kib) * 1024 for name, kib in _ROLLUP.findall(text)}
    if not sizes:
        raise ProcessLookupError(f"{proc} has just ended")
    private = sizes[b"Private_Clean"] + sizes[b"Private_Dirty"]
    return sizes[b"Rss"], sizes[b"Pss"], private


def _program(pid: int) -> str:
    """Return the module that a Python process runs, or its name."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if "-m" in words[:-1]:
            return words[words.index("-m") + 1]
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone"
