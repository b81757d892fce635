"""The processor time of another process, by which the work of a helper is limited."""

import time


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used; 0 if it is gone."""
    process_clock = ~pid << 3 | 2  # see clock_getcpuclockid(3)
    try:
        return time.clock_gettime(process_clock)
    except OSError:
        return 0.0
