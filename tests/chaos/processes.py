"""Kills and finds processes from outside, independent of their parents."""

import os
import signal
import time
from pathlib import Path

from scripts.testing import is_alive


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> float | None:
    """Send a signal through a pidfd; returns the monotonic time, None if the process had ended.

    A zombie would accept the signal, too; it counts as ended.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        if not is_alive(pid):
            return None
        moment = time.monotonic()  # before the call: the sender may be descheduled during it
        signal.pidfd_send_signal(pidfd, number)
        return moment
    except ProcessLookupError:
        return None
    finally:
        os.close(pidfd)


def living_with(variable: str, value: str) -> set[int]:
    """Return this user's living processes that have this variable in their environment.

    The environment is inherited, so this finds every process of an engine.
    """
    wanted = f"{variable}={value}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environ = (entry / "environ").read_bytes()
        except OSError:
            continue
        if wanted in environ.split(b"\0") and is_alive(int(entry.name)):
            found.add(int(entry.name))
    return found


def matching(pattern: str) -> list[int]:
    """Return other living processes whose command line contains `pattern`, except ancestors."""
    own = _ancestors()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in own:
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if pattern in command:
            found.append(int(entry.name))
    return sorted(found)


def _ancestors() -> set[int]:
    found, pid = set(), os.getpid()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            break
        pid = int(stat.rpartition(")")[2].split()[1])
    return found
