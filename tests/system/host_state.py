"""State of a program that embeds the engine: what must not change, and what could leak."""

import asyncio
import atexit
import faulthandler
import gc
import logging
import os
import resource
import signal
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

from tests.proc import process_stats


def settings() -> dict[str, Any]:
    """Return all state that an embedded engine must not change; compare it with `==`."""
    root, package = logging.getLogger(), logging.getLogger("troika")
    umask = os.umask(0)
    os.umask(umask)
    wakeup_fd = signal.set_wakeup_fd(-1) if _is_main() else None
    if wakeup_fd is not None:
        signal.set_wakeup_fd(wakeup_fd)
    return {
        "signal handlers": {n: signal.getsignal(n) for n in signal.valid_signals()},
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "wakeup descriptor": wakeup_fd,
        "timers": [_timer(n) for n in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL)],
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "umask": umask,
        "limits": [resource.getrlimit(n) for n in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "process group": (os.getpgrp(), os.getsid(0)),
        "root logger": (root.level, list(root.handlers), list(root.filters), root.disabled),
        "logging": (logging.raiseExceptions, logging.root.manager.disable, logging.lastResort),
        "package logger": (package.level, list(package.handlers), package.propagate),
        "loop policy": id(asyncio.get_event_loop_policy()),
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook),
        "warnings": list(warnings.filters),
        "path": list(sys.path),
        "collector": (gc.isenabled(), gc.get_threshold(), list(gc.callbacks), gc.get_debug()),
        "interpreter": (sys.getswitchinterval(), sys.getrecursionlimit(), sys.gettrace()),
        "streams": [os.get_blocking(fd) for fd in (0, 1, 2)],
        "faulthandler": faulthandler.is_enabled(),
        "exit functions": atexit._ncallbacks(),
    }


def _timer(number: int) -> tuple[bool, float]:
    """Return whether a timer runs, as that of a test's timeout does, and its interval."""
    remaining_s, interval_s = signal.getitimer(number)
    return remaining_s > 0, interval_s


def loop_settings() -> dict[str, Any]:
    """Return the state of the running event loop, with its tasks and watched descriptors."""
    loop = asyncio.get_running_loop()
    return {
        "exception handler": loop.get_exception_handler(),
        "task factory": loop.get_task_factory(),
        "debug": loop.get_debug(),
        "tasks": len(asyncio.all_tasks()),
        "watched": len(loop._selector.get_map()),  # type: ignore[attr-defined]
    }


def resources() -> dict[str, list[str]]:
    """Return the resources of this process by kind; more after a cycle is a leak."""
    gc.collect()
    descriptors = [_target(name) for name in os.listdir("/proc/self/fd")]
    return {
        "descriptors": sorted(target for target in descriptors if target is not None),
        "threads": sorted(thread.name for thread in threading.enumerate())
        + ["native"] * (len(os.listdir("/proc/self/task")) - threading.active_count()),
        "children": sorted(_children()),
        "temporary files": sorted(os.listdir(tempfile.gettempdir())),
    }


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return one line for each entry that differs."""
    return [f"{key}: {before[key]} -> {after[key]}" for key in before if before[key] != after[key]]


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _target(name: str) -> str | None:
    """Return the target of a descriptor without its inode number."""
    try:
        target = os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:  # the descriptor of the listing itself
        return None
    return target.partition("[")[0] if target.startswith(("pipe:", "socket:")) else target


def _children() -> list[str]:
    """Return pids and names of children, zombies included."""
    me = os.getpid()
    return [f"{one.pid} {one.name} {one.state}" for one in process_stats() if one.parent == me]
