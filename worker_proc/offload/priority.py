"""The priority of threads that move blocks alongside the steps."""

import os
import threading

_NICENESS = 10


def lower_priority() -> None:
    """Lower the priority of the calling thread, and of threads that it starts."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
