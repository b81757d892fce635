"""The directory of an engine's sockets, and their addresses in it.

Every process that can enter the directory is trusted. Its mode is the only access control, so only
processes of the same user can connect. Each of several replicas has a directory within that of the
engine.
"""

import os
import re
import stat
import tempfile
from pathlib import Path

MAX_IPC_PATH_BYTES = 107
"""The kernel's limit on the path of a socket file."""
ADOPTIONS_FILE = "ranks-"
"""Begins the name of the file in which the ranks of a group note their adoptions."""
_REPLICA_DIR = re.compile(r"replica-\d+")


def make_run_dir(path: str | None) -> str:
    """Create, or check, the directory for the sockets: mode 0700, ours, short enough.

    The directory of a replica is in that of its engine, which has this mode, too, if it is created.
    None makes a new one in `runtime_base()`. ValueError: the directory cannot be used; the text
    gives the reason. OSError: it cannot be made.
    """
    is_new = path is None
    if path is None:
        path = tempfile.mkdtemp(prefix="troika-", dir=runtime_base())
    path = os.path.abspath(path)
    longest = len(os.fsencode(lifecycle_address(path).removeprefix("ipc://")))
    if longest > MAX_IPC_PATH_BYTES:
        if is_new:
            os.rmdir(path)
        raise ValueError(
            f"run_dir {path} is too long: socket paths of {longest} bytes exceed the system's "
            f"{MAX_IPC_PATH_BYTES}"
        )
    if _REPLICA_DIR.fullmatch(os.path.basename(path)):  # `parents` has no mode
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise ValueError(f"run_dir {path} must be a directory of this user, not a link")
    if info.st_mode & 0o077:
        raise ValueError(f"run_dir {path} must not be accessible to others (mode 0700)")
    return path


def runtime_base() -> str:
    """Return `$XDG_RUNTIME_DIR` if this user can write to it, else the temporary directory.

    After `sudo -u` or `su` the variable may name the directory of the other user.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    is_usable = os.path.isdir(base) and os.access(base, os.W_OK | os.X_OK)
    return base if is_usable else tempfile.gettempdir()


def exchange_prefix(run_dir: str) -> str:
    """Return what begins the names of files that ranks share, there or in shared memory.

    They remove a file once all of them have it.
    """
    place = os.stat(run_dir)
    return f"troika-{place.st_dev:x}-{place.st_ino:x}-"


def replica_dir(run_dir: str, replica: int) -> str:
    """Return the run directory of one of several replicas."""
    return f"{run_dir}/replica-{replica}"


def client_address(run_dir: str) -> str:
    """Return the address at which the core listens for clients."""
    return f"ipc://{run_dir}/core.sock"


def worker_address(run_dir: str) -> str:
    """Return the address at which the core listens for workers."""
    return f"ipc://{run_dir}/workers.sock"


def lifecycle_address(run_dir: str) -> str:
    """Return the address at which the supervisor listens."""
    return f"ipc://{run_dir}/supervisor.sock"


def core_addresses(run_dir: str, num_replicas: int) -> list[str]:
    """Return the addresses for clients of the cores of all replicas, in their order."""
    if num_replicas == 1:
        return [client_address(run_dir)]
    return [client_address(replica_dir(run_dir, number)) for number in range(num_replicas)]
