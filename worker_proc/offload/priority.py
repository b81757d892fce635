"""The priority of threads that move blocks alongside the steps."""

import os
import threading

_NICENESS = 10


def lower_priority() -> None:
    """Lower that of the calling thread, and of those that it starts."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
