"""Run directories: each has one supervisor and increasing epochs, and a register lists all of them.

A given directory keeps `epoch` and `supervisor.lock` beyond the supervisor's end; a temporary one
disappears with it. The register is a directory of links, one per supervisor of this user.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from protocol.adapters import ADAPTERS_FILE
from protocol.process.run_dir import ADOPTIONS_FILE, exchange_prefix, make_run_dir, runtime_base
from protocol.stores.tiers import SHARED_MEMORY, remove_memory, remove_orphaned_memory

_EPOCH_FILE = "epoch"
_LOCK_FILE = "supervisor.lock"
_TEMPORARY = "temporary"
_LOCK_TIMEOUT_S = 0.2
_LOCK_POLL_S = 0.01
_EPOCHS_BEGIN_AT = 1_735_689_600
"""The first second of 2025 on the system clock."""
_EPOCHS_PER_S = 4
"""Epochs by the clock stay below 2^31, the bound of a link's epoch, until 2042."""

log = logging.getLogger("troika.supervisor")


class RunDirBusyError(Exception):
    """Another supervisor uses that directory."""


class RunDir:
    """A directory that this process has locked until `close`."""

    def __init__(self, path: str | None, *, is_temporary: bool = False) -> None:
        """Create or take over a directory; without a path a new temporary one.

        With `is_temporary`, a given directory may be removed once no supervisor holds it.
        ValueError: it cannot be used. RunDirBusyError: another supervisor uses it.
        """
        self.path = make_run_dir(path)
        self._is_own = path is None
        self._is_temporary = is_temporary or self._is_own
        self._link: Path | None = None
        self._is_closed = False
        self.is_lost = False
        """Whether the directory was removed, and another supervisor has made it again."""
        self._shared = {exchange_prefix(self.path)}
        """The common prefix of the names of files that ranks share."""
        self._lock_fd = os.open(self._file(_LOCK_FILE), os.O_RDWR | os.O_CREAT, 0o600)
        if not _lock(self._lock_fd, _LOCK_TIMEOUT_S):
            holder = _pid_in(self._lock_fd)
            os.close(self._lock_fd)
            raise RunDirBusyError(
                f"run_dir {self.path} is in use by the supervisor with pid {holder}"
            )
        _write_pid(self._lock_fd)
        self._epoch = self._read_epoch()
        self._file(ADAPTERS_FILE).unlink(missing_ok=True)  # an earlier engine left it

    def next_epoch(self) -> int:
        """Return a number greater than any that was issued in this directory before.

        The number is on the disk when this returns. If the disk is full or broken, a running engine
        continues without that, because no other can use the directory while this process is alive.
        """
        self._epoch += 1
        try:
            self._save_epoch()
        except OSError as error:
            log.error("epoch %d cannot be saved: %s", self._epoch, error)
        return self._epoch

    def _save_epoch(self) -> None:
        draft = self._file(f"{_EPOCH_FILE}.new")
        with open(draft, "w") as file:
            file.write(f"{self._epoch}\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._file(_EPOCH_FILE))
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def restore(self, *, makes_parents: bool = True) -> bool:
        """Restore the removed parts of the directory; return whether there were any.

        Programs that clean up directories of temporary files remove old files. With
        `makes_parents`, the directories above are made as well. OSError or ValueError: the
        directory cannot be made. RunDirBusyError: another supervisor uses it now.
        """
        lock = self._file(_LOCK_FILE)
        has_lock = _is_file_of(lock, self._lock_fd)
        has_epoch = not self._epoch or self._file(_EPOCH_FILE).exists()
        has_link = self._link is None or os.path.lexists(self._link)
        if has_lock and has_epoch and has_link:
            return False
        if makes_parents or Path(self.path).parent.is_dir():
            make_run_dir(self.path)
        if not has_lock:
            self._lock_again(lock)
        self._shared.add(exchange_prefix(self.path))
        if self._epoch:
            self._save_epoch()
        if self._link is not None:
            self.register()
        return True

    def _lock_again(self, path: Path) -> None:
        lock_fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not _lock(lock_fd, _LOCK_TIMEOUT_S):
                self.is_lost = True
                holder = _pid_in(lock_fd)
                text = f"run_dir {self.path} was removed, and the supervisor with pid {holder} has "
                raise RunDirBusyError(f"{text}made it again for its own engine")
            _write_pid(lock_fd)
            os.dup2(lock_fd, self._lock_fd, inheritable=False)
        finally:
            os.close(lock_fd)

    def raise_epoch(self, least: int) -> None:
        """Ensure that the next epoch is greater than `least`."""
        self._epoch = max(self._epoch, least)

    def register(self) -> None:
        """Enter this directory into the register; its supervisor must be listening already."""
        register = _register_dir()
        for link, target in _entries(register):
            # A link to this directory is of a killed predecessor: this process has the lock.
            if target == self.path:
                link.unlink(missing_ok=True)
            elif not is_live(target):
                link.unlink(missing_ok=True)
                remove_memory(target)
                with contextlib.suppress(FileNotFoundError):  # the directory is gone
                    _remove_shared_files(target, {exchange_prefix(target)})
                if link.name.startswith(_TEMPORARY):
                    shutil.rmtree(target, ignore_errors=True)
        remove_orphaned_memory()
        kind = _TEMPORARY if self._is_temporary else "given"
        self._link = register / f"{kind}-{os.getpid()}"
        self._link.unlink(missing_ok=True)
        self._link.symlink_to(self.path)

    def close(self, *, is_abandoned: bool) -> None:
        """Release the directory; if `is_abandoned`, also remove a given temporary one.

        Idempotent.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._link is not None:
            self._link.unlink(missing_ok=True)
        if not self.is_lost:
            self._clear(is_abandoned=is_abandoned)
        os.close(self._lock_fd)

    def _clear(self, *, is_abandoned: bool) -> None:
        remove_memory(self.path)
        _remove_shared_files(self.path, self._shared)
        if self._is_own or (self._is_temporary and is_abandoned):
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            for pattern in ("*.sock", f"{ADOPTIONS_FILE}*"):
                for file in Path(self.path).glob(pattern):
                    file.unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        return Path(self.path) / name

    def _read_epoch(self) -> int:
        try:
            return int(self._file(_EPOCH_FILE).read_text())
        except FileNotFoundError:
            return 0
        except ValueError as error:
            os.close(self._lock_fd)
            raise ValueError(f"{self._file(_EPOCH_FILE)} must hold a number") from error


def wait_for_epoch_by_clock() -> int:
    """Return an epoch greater than those of all previous engines, even if they are forgotten.

    Clients of other machines outlive a run directory, and connect at one address to the engines of
    several run directories. If two of their cores had the same epoch, they would be taken for the
    same core. The call returns when the time of its epoch begins, within 1 / _EPOCHS_PER_S seconds,
    so no two calls on one machine return the same epoch, however short an engine's life is.
    """
    epoch = int((time.time() - _EPOCHS_BEGIN_AT) * _EPOCHS_PER_S) + 1
    left_s = _EPOCHS_BEGIN_AT + epoch / _EPOCHS_PER_S - time.time()
    time.sleep(min(max(0.0, left_s), 1 / _EPOCHS_PER_S))  # the clock may be set back meanwhile
    return max(0, epoch)


def live_run_dirs() -> list[str]:
    """Return the run directories that supervisors of this user hold."""
    return sorted(target for _, target in _entries(_register_dir()) if is_live(target))


def holder_of(run_dir: str) -> int | None:
    """Return the pid of the supervisor that holds a directory; None: none does.

    OSError: the lock cannot be read.
    """
    try:
        lock_fd = os.open(Path(run_dir) / _LOCK_FILE, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        return None if _lock(lock_fd, timeout_s=0.0) else _pid_in(lock_fd)
    finally:
        os.close(lock_fd)


def _remove_shared_files(run_dir: str, prefixes: set[str]) -> None:
    """Remove the shared files that the ranks of an ended engine have left, if any."""
    for directory in (SHARED_MEMORY, Path(run_dir)):
        for prefix in prefixes:
            for file in directory.glob(f"*{prefix}*"):
                with contextlib.suppress(OSError):  # it may be another user's
                    file.unlink()


def _is_file_of(path: Path, fd: int) -> bool:
    """Return whether a path names the file of a descriptor."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _write_pid(lock_fd: int) -> None:
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)


def _pid_in(lock_fd: int) -> int | None:
    """Return the pid in a lock file; None: it is being written."""
    text = os.pread(lock_fd, 20, 0).strip()
    return int(text) if text.isdigit() else None


def _register_dir() -> Path:
    return Path(make_run_dir(f"{runtime_base()}/troika-{os.getuid()}"))


def _entries(register: Path) -> Iterator[tuple[Path, str]]:
    """Yield each link with its target; other processes may change the register meanwhile."""
    for link in list(register.iterdir()):
        try:
            target = os.readlink(link)
        except OSError:  # it was just removed, or is a file
            continue
        yield link, target


def is_live(run_dir: str) -> bool:
    """Return whether a supervisor holds the directory; True also if the lock cannot be tested.

    Only the lock decides: a busy supervisor may not answer, or even refuse a connection.
    """
    try:
        lock_fd = os.open(Path(run_dir) / _LOCK_FILE, os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        return not _lock(lock_fd, timeout_s=0.0)
    finally:
        os.close(lock_fd)


def _lock(lock_fd: int, timeout_s: float) -> bool:
    """Take the lock until the descriptor is closed; False if it is held until the timeout.

    A process that only tests the lock holds it for a moment, hence the wait.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOCK_POLL_S)
        else:
            return True
