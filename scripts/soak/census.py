"""Counts what an engine holds: memory, descriptors, threads, processes, zombies, sockets."""

import os
import re
from collections.abc import Mapping, Set
from pathlib import Path

import msgspec

_ROLLUP = re.compile(rb"^(Rss|Pss|Private_Clean|Private_Dirty): +(\d+) kB$", re.MULTILINE)


class ProcessReading(msgspec.Struct, frozen=True):
    """One process at one moment; bytes."""

    pid: int
    role: str
    rss: int
    pss: int
    """Its share of what it shares; 0 where the system does not tell."""
    private: int
    """What nobody shares with it; 0 where the system does not tell."""
    num_fds: int
    num_threads: int


class Reading(msgspec.Struct, frozen=True):
    """A whole engine at one moment."""

    num_requests: int
    """Ended so far."""
    elapsed_s: float
    processes: list[ProcessReading]
    num_zombies: int
    num_sockets: int
    """In the run directory."""
    num_files: int
    """In the run directory, sockets included."""
    num_strays: int
    """Processes of the engine that do not descend from this one any more."""
    num_held: int
    """Requests in the core and in the ledger of the embedding client."""
    kv_usage_ppm: int
    """Millionths of the KV blocks."""
    num_unasked_restarts: int
    """Restarts of processes that were not killed."""
    gauges: dict[str, int]
    """What the API says that it holds, by name."""


def take_census(
    names: Mapping[int, str],
    run_dir: Path,
    *,
    num_requests: int,
    elapsed_s: float,
    living: Set[int],
    num_held: int,
    kv_usage_ppm: int,
    num_unasked_restarts: int,
    gauges: dict[str, int],
) -> Reading:
    """Look at this process and all that descend from it.

    Args:
        names: roles by pid; others are called after what they run.
        run_dir: whose files are counted.
        num_requests: to be noted down.
        elapsed_s: likewise.
        living: pids known to belong to the engine, to find those that do not descend from here.
        num_held: to be noted down.
        kv_usage_ppm: likewise.
        num_unasked_restarts: likewise.
        gauges: likewise.
    """
    readings, num_zombies = [], 0
    family = _family(os.getpid())
    for pid, is_zombie in family.items():
        if is_zombie:
            num_zombies += 1
            continue
        reading = _read_process(pid, names.get(pid) or _program(pid))
        if reading is not None:
            readings.append(reading)
    files = [entry.name for entry in run_dir.iterdir()]
    num_sockets = sum(name.endswith(".sock") for name in files)
    num_strays = len(living - family.keys())
    return Reading(
        num_requests,
        elapsed_s,
        readings,
        num_zombies,
        num_sockets,
        len(files),
        num_strays,
        num_held,
        kv_usage_ppm,
        num_unasked_restarts,
        gauges,
    )


def _family(root: int) -> dict[int, bool]:
    """Pids of a process and its descendants, and whether each is a zombie."""
    states: dict[int, bool] = {}
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            stat = Path(f"/proc/{name}/stat").read_text()
        except OSError:
            continue
        state, parent = stat.rpartition(")")[2].split()[:2]
        states[int(name)] = state == "Z"
        children.setdefault(int(parent), []).append(int(name))
    family: dict[int, bool] = {}
    to_visit = [root]
    while to_visit:
        pid = to_visit.pop()
        family[pid] = states[pid]
        to_visit += children.get(pid, [])
    return family


def _read_process(pid: int, role: str) -> ProcessReading | None:
    """None if it is gone."""
    proc = Path(f"/proc/{pid}")
    try:
        num_fds = len(os.listdir(proc / "fd"))
        num_threads = len(os.listdir(proc / "task"))
        memory = _memory(proc)
    except OSError:
        return None
    return ProcessReading(pid, role, *memory, num_fds, num_threads)


def _memory(proc: Path) -> tuple[int, int, int]:
    """Resident, proportional and private bytes."""
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
    """The module that a Python process runs, or its name."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if "-m" in words[:-1]:
            return words[words.index("-m") + 1]
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone"
