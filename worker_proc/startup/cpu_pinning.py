"""Confines a worker to some of the CPUs, so that the API and the core find a free one.

The threads of a step wait for each other: if one of them shares its CPU with the API, all wait. The
API and the core are not confined, since the API's tokenizers may need more than one CPU: the kernel
wakes a thread on a free CPU, if there is one.
"""

import os
from collections.abc import Collection

from protocol.config import CpuPinning, EngineConfig
from protocol.config.cpu_lists import format_cpus, parse_cpu_lists
from worker_proc.loading.host_limits import available_cpus

MIN_CPUS = 3
"""With fewer CPUs, leaving one free would cost up to half of the computing power."""
CPUS_PER_FREE_ONE = 16


def pin_worker(config: EngineConfig, rank: int) -> None:
    """Confine this process as configured; its threads and forks are confined, too.

    Raises ValueError, which names the CPUs, if it may not use some of them.
    """
    listed = config.worker.worker_cpus
    if listed is None and config.worker.cpu_pinning is CpuPinning.OFF:
        return
    present = os.sched_getaffinity(0)
    num_ranks = config.parallel.num_ranks
    num_workers = config.num_workers
    place = num_ranks * (config.run.replica or 0) + rank
    if listed is not None:
        os.sched_setaffinity(0, _usable(parse_cpu_lists(listed)[place], present))
        return
    chosen = worker_cpus(present, available_cpus(), num_workers, place)
    # More threads than CPUs would wait for each other in every part of a step.
    if chosen != present and (config.worker.num_threads or 0) <= len(chosen):
        os.sched_setaffinity(0, chosen)


def _usable(wanted: set[int], present: set[int]) -> set[int]:
    if not wanted <= present:
        absent, here = format_cpus(wanted - present), format_cpus(present)
        raise ValueError(f"worker_cpus contains {absent}; there are only the CPUs {here}")
    return wanted


def is_confined() -> bool:
    """Return whether this process may use fewer CPUs than its parent."""
    return os.sched_getaffinity(0) < os.sched_getaffinity(os.getppid())


def worker_cpus(present: Collection[int], num_usable: int, num_workers: int, rank: int) -> set[int]:
    """Return the CPUs of one worker: all that are present, if there is no good choice.

    `num_usable` is the number of CPUs that the quota allows. If it is less than the number of
    present CPUs, other processes may use them as well, and the kernel must be free to choose.
    """
    count = len(present)
    num_free = max(1, count // CPUS_PER_FREE_ONE)
    if count < MIN_CPUS or num_usable < count or count - num_free < num_workers:
        return set(present)
    # The lowest CPUs are left free, since they serve most interrupts. CPUs of one socket have
    # consecutive numbers; those of one core usually do not.
    rest = sorted(present)[num_free:]
    first, last = (len(rest) * place // num_workers for place in (rank, rank + 1))
    return set(rest[first:last])
