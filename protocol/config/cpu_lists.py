"""The CPUs of each worker, as `worker_cpus` lists them: "0-7,16:8-15" are those of two workers."""

import re

MAX_CPUS = 8192  # Linux has no more
_RANGE = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")


def parse_cpu_lists(text: str) -> list[set[int]]:
    """Return the CPUs of each worker; ValueError: a part is wrong, or two workers share a CPU."""
    lists = [_parse_list(part) for part in text.split(":")]
    owners: dict[int, int] = {}
    for worker, cpus in enumerate(lists):
        for cpu in cpus:
            if cpu in owners:
                raise ValueError(f"workers {owners[cpu]} and {worker} share CPU {cpu}")
            owners[cpu] = worker
    return lists


def first_cpu_lists(text: str, num_workers: int) -> str:
    """Return the part of a text that has the CPUs of the first workers."""
    return ":".join(text.split(":")[:num_workers])


def format_cpus(cpus: set[int]) -> str:
    """Return a list that `parse_cpu_lists` reads."""
    firsts = sorted(cpu for cpu in cpus if cpu - 1 not in cpus)
    lasts = sorted(cpu for cpu in cpus if cpu + 1 not in cpus)
    ranges = zip(firsts, lasts, strict=True)
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _parse_list(text: str) -> set[int]:
    cpus: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is not a CPU or a range of CPUs such as 0-7")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < MAX_CPUS:
            raise ValueError(f"{part} must be a range of CPUs from 0 to {MAX_CPUS - 1}")
        cpus |= set(range(first, last + 1))
    return cpus
