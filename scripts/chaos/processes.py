"""Killing and finding processes from outside, as neither their parent nor themselves would."""

import os
import signal
import time
from pathlib import Path

from scripts.testing import is_alive


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> float | None:
    """Send a signal through a pidfd; returns the monotonic time, None if it was gone already.

    One that is dead and waits to be reaped would take the signal, too: that is no kill.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        if not is_alive(pid):
            return None
        moment = time.monotonic()  # before: who sends it may lose the processor to who notices it
        signal.pidfd_send_signal(pidfd, number)
        return moment
    except ProcessLookupError:
        return None
    finally:
        os.close(pidfd)


def living_with(variable: str, value: str) -> set[int]:
    """Living processes of this user that were started with this in their environment.

    However they were started, and by whom: nothing of an engine hides from it.
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
    """Living processes whose command line contains `pattern`, but for this one and its parents."""
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
