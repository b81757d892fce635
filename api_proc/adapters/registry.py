"""The names of adapters, which all API processes of an engine share, also after a restart.

The names are in a file of the run directory, which is replaced as a whole under a lock. A process
reads it again when it has changed. The ledger of each open request names its adapter by itself, so
a request does not depend on the file.
"""

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from protocol.adapters import (
    ADAPTERS_FILE,
    Adapter,
    AdapterError,
    LoraModule,
    parse_lora_module,
    read_adapter,
)
from protocol.config import LoraConfig
from protocol.peft_config import read_config

MAX_NAMES = 65_536


class NameTaken(Exception):
    """There is an adapter of this name already."""


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
        """Without a run directory, the names are those of this process alone."""
        self.config = config
        self._path = None if run_dir is None else Path(run_dir) / ADAPTERS_FILE
        self._names: _Names = {}
        self._state: tuple[int, int, int] | None = None
        """What changes with the file that was read."""

    def begin(self) -> list[NamedAdapter]:
        """Name the adapters of the settings, unless an earlier process of the engine has.

        Returns those that were named now. It reads their files: call it in a thread. AdapterError:
        one of them cannot be used.
        """
        if not self.config.enable_lora or (self._path is not None and self._path.exists()):
            return []
        modules = [parse_lora_module(text) for text in self.config.lora_modules]
        named = [self.read(module) for module in modules]
        with self._locked():
            if self._path is not None and self._path.exists():
                return []
            self._write({one.adapter.name: one for one in named})
        return named

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
        self._refresh()
        return list(self._names.values())

    def find(self, name: str) -> NamedAdapter | None:
        self._refresh()
        return self._names.get(name)

    def add(self, named: NamedAdapter, *, replaces: bool = False) -> None:
        """Name an adapter; NameTaken: the name is taken, and it does not replace."""
        with self._locked():
            name = named.adapter.name
            if name in self._names and not replaces:
                raise NameTaken(name)
            self._write({**self._names, name: named})

    def remove(self, name: str) -> NamedAdapter | None:
        """Forget a name; returns its adapter, or None if there is none."""
        with self._locked():
            names = dict(self._names)
            removed = names.pop(name, None)
            if removed is not None:
                self._write(names)
        return removed

    def _refresh(self) -> None:
        if self._path is None:
            return
        try:
            stat = self._path.stat()
            state = stat.st_ino, stat.st_mtime_ns, stat.st_size
            if state == self._state:
                return
            self._names = msgspec.msgpack.decode(self._path.read_bytes(), type=_Names)
            self._state = state
        except FileNotFoundError:
            return

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Let no other process change the names meanwhile, and know the latest ones."""
        if self._path is None:
            yield
            return
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._refresh()
            yield

    def _write(self, names: _Names) -> None:
        if self._path is not None:
            # Renamed when complete: a process that dies here leaves the names as they were.
            fd, scratch = tempfile.mkstemp(dir=self._path.parent)
            with os.fdopen(fd, "wb") as file:
                file.write(msgspec.msgpack.encode(names))
            os.replace(scratch, self._path)
            self._state = None
        self._names = names
