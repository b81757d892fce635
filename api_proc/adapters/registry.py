"""The names of adapters, which all API processes of an engine share, even after a restart.

The names are in a file of the run directory, which is replaced as a whole under a lock. A process
reads it again when it has changed. The ledger of each open request names its adapter by itself, so
a request does not depend on the file.
"""

import contextlib
import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from protocol.adapters import (
    ADAPTERS_FILE,
    Adapter,
    AdapterError,
    read_adapter,
)
from protocol.config import LoraConfig
from protocol.config.lora_modules import LoraModule, parse_lora_module
from protocol.config.peft_config import read_config

MAX_NAMES = 65_536
LOCK_TIMEOUT_S = 5.0
"""How long another process may have the names; it has them for milliseconds."""
_LOCK_POLL_S = 0.005
_SETTLED = ".settled"
"""A file next to the names: the adapters of the settings are among them."""


class NameTaken(Exception):
    """There is an adapter of this name already."""


class NamesLocked(Exception):
    """Another process does not release the names."""


class NamedAdapter(msgspec.Struct, frozen=True):
    """An adapter under its name."""

    adapter: Adapter
    parent: str | None
    """Name of the model that it was made for; None: that of this server."""
    created: int
    """Seconds since the Unix epoch."""


_Names = dict[str, NamedAdapter]


class AdapterRegistry:
    """The named adapters of one engine."""

    def __init__(self, run_dir: str | Path | None, config: LoraConfig) -> None:
        """Read the names from the run directory; without one, they belong to this process alone."""
        self.config = config
        self._path = None if run_dir is None else Path(run_dir) / ADAPTERS_FILE
        self._lock = threading.Lock()
        self._names: _Names = {}
        self._state: tuple[int, int, int] | None = None
        """What changes with the file that was read."""
        self._has_settled = False
        self._is_complete = not config.lora_modules

    def begin(self) -> list[NamedAdapter]:
        """Read the adapters of the settings, unless an earlier process has named them.

        Returns those that are to be loaded and then passed to `settle`. It reads their files: call
        it in a thread. AdapterError: one of them cannot be used.
        """
        if not self.config.enable_lora or self._is_settled:
            return []
        modules = [parse_lora_module(text) for text in self.config.lora_modules]
        return [self.read(module) for module in modules]

    def settle(self, named: list[NamedAdapter]) -> None:
        """Name the adapters of the settings, unless another process has. NamesLocked as `add`.

        A name that a client has given to another adapter meanwhile stays.
        """
        if not self.config.enable_lora:
            return
        with self._locked() as names:
            if not self._is_settled:
                self._write({one.adapter.name: one for one in named} | names)
                if self._path is not None:
                    self._path.with_suffix(_SETTLED).touch()
            self._has_settled = True

    @property
    def is_complete(self) -> bool:
        """Whether the adapters of the settings have been named, or there are none."""
        if not self._is_complete:
            self._is_complete = self._is_settled
        return self._is_complete

    @property
    def _is_settled(self) -> bool:
        """Whether the adapters of the settings were named once; later an unload is not undone."""
        if self._path is None:
            return self._has_settled
        return self._path.with_suffix(_SETTLED).exists()

    def read(self, module: LoraModule) -> NamedAdapter:
        """Read an adapter's files; AdapterError: they are not there, or not supported."""
        path = os.path.abspath(os.path.expanduser(module.path))
        adapter, config = read_adapter(module.name, path)
        try:
            read_config(config, self.config.max_lora_rank)
        except AdapterError as error:
            raise AdapterError(f"{path}: {error}") from error
        return NamedAdapter(adapter, module.base_model_name, int(time.time()))

    def all(self) -> list[NamedAdapter]:
        """Return all adapters, in the order in which they were named."""
        return list(self._refresh().values())

    def find(self, name: str) -> NamedAdapter | None:
        return self._refresh().get(name)

    def add(self, named: NamedAdapter, *, replaces: bool = False) -> None:
        """Name an adapter; NameTaken: the name is taken, and it does not replace.

        NamesLocked: another process does not release the names. Call it in a thread.
        """
        with self._locked() as names:
            name = named.adapter.name
            if name in names and not replaces:
                raise NameTaken(name)
            self._write({**names, name: named})

    def remove(self, name: str) -> NamedAdapter | None:
        """Forget a name; returns its adapter, or None if there is none. NamesLocked as `add`."""
        with self._locked() as names:
            removed = names.get(name)
            if removed is not None:
                self._write({key: one for key, one in names.items() if key != name})
        return removed

    def restore(self) -> None:
        """Write the names again if their files were removed: other processes read them.

        NamesLocked as `add`. Call it in a thread.
        """
        if self._path is None or not self._has_settled:
            return
        if self._path.exists() and self._is_settled:
            return
        with self._locked() as names:
            if not self._path.exists():
                self._write(names)
            self._path.with_suffix(_SETTLED).touch()

    def _refresh(self) -> _Names:
        """Return the names, which are read again if the file has changed."""
        if self._path is None:
            return self._names
        try:
            stat = self._path.stat()
            state = stat.st_ino, stat.st_mtime_ns, stat.st_size
            if state == self._state:
                return self._names
            names = msgspec.msgpack.decode(self._path.read_bytes(), type=_Names)
        except FileNotFoundError:
            return self._names
        # A thread that writes may be overtaken here by one that reads; the next reader notices it.
        self._names, self._state = names, state
        return names

    @contextlib.contextmanager
    def _locked(self) -> Iterator[_Names]:
        """Let no other thread or process change the names meanwhile; yields the latest ones."""
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        if not self._lock.acquire(timeout=LOCK_TIMEOUT_S):
            raise NamesLocked("the names of adapters are being changed")
        try:
            if self._path is None:
                yield self._names
                return
            with self._path.with_suffix(".lock").open("w") as lock:
                while not _try_lock(lock):
                    if time.monotonic() > deadline:
                        text = f"{lock.name} is locked for more than {LOCK_TIMEOUT_S:g} s"
                        raise NamesLocked(text)
                    time.sleep(_LOCK_POLL_S)
                yield self._refresh()
        finally:
            self._lock.release()

    def _write(self, names: _Names) -> None:
        if self._path is not None:
            # Renamed when complete: a process that dies here leaves the names as they were.
            fd, scratch = tempfile.mkstemp(dir=self._path.parent)
            with os.fdopen(fd, "wb") as file:
                file.write(msgspec.msgpack.encode(names))
            os.replace(scratch, self._path)
            self._state = None
        self._names = names


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
