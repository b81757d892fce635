"""Waits for the process that fetches models of the hub and makes directories of GGUF files.

The other processes of the engine start after its end.
"""

import logging
import os
import select
import time
from collections.abc import Sequence

import msgspec

from protocol.config import ConfigError, EngineConfig
from protocol.process.child_handle import Child
from protocol.process.launch import fetching_file
from scripts.hub.messages import (
    SHOWN_BYTES,
    Fetched,
    Fetching,
    Found,
    Line,
    Note,
    Refused,
    decode,
    gguf_files,
    hub_names,
)
from scripts.supervisor.console import Console, PhaseClock, render_row
from scripts.supervisor.model_names import local_hint, with_directories

_MAX_DEATHS = 3
_LOG_S = 5.0
_READ_BYTES = 65_536
_REAP_TIMEOUT_S = 1.0


class Interrupted(Exception):
    """The engine ends before it has started."""

    def __init__(self, *, is_orphaned: bool) -> None:
        super().__init__("the engine ends")
        self.is_orphaned = is_orphaned


class ModelFetch:
    """Starts the process, again if it dies, and shows what it reports."""

    def __init__(
        self, config: EngineConfig, console: Console, *, has_api: bool, has_bars: bool
    ) -> None:
        self._config = config
        self._console = console
        self._arguments = [] if has_api else ["--no-api"]
        self._has_bars = has_bars
        self._begun_at = self._shown_at = time.monotonic()
        self._announced: set[str] = set()
        self._commits: dict[str, str] = {}
        self._end: Fetched | Refused | None = None
        self._buffer = b""

    def run(self, signal_fd: int, parent_fd: int | None) -> EngineConfig:
        """Return the configuration with the models' directories.

        ConfigError: a model cannot be fetched, or cannot run. Interrupted: by a signal, or because
        a parent has ended. Files that were fetched stay in the hub's cache.
        """
        marker = fetching_file(str(self._config.run.run_dir), os.getpid())
        marker.touch()
        parent_fds = [] if parent_fd is None else [parent_fd, os.pidfd_open(os.getppid())]
        try:
            for number in range(1, _MAX_DEATHS + 1):
                status = self._run_once(signal_fd, parent_fds)
                if self._end is not None:
                    return self._result(self._end)
                text = f"the process that fetches {self._names} has ended with status {status}"
                if number < _MAX_DEATHS:
                    self._console.note(logging.WARNING, f"{text}; it is started again")
            raise ConfigError(f"{text} {_MAX_DEATHS} times; start again to continue")
        finally:
            marker.unlink(missing_ok=True)
            for fd in parent_fds[1:]:
                os.close(fd)

    @property
    def _names(self) -> str:
        model = self._config.model
        return " and ".join([*hub_names(model).values(), *gguf_files(model).values()])

    def _run_once(self, signal_fd: int, parent_fds: Sequence[int]) -> int | None:
        """Run one process to its end; returns its exit status."""
        read_fd, write_fd = os.pipe()
        try:
            child = Child(
                "scripts.hub",
                self._config,
                epoch=0,
                listen_fd=write_fd,
                arguments=self._arguments,
            )
        finally:
            os.close(write_fd)
        self._buffer = b""
        poller = select.poll()
        stall_s = self._config.recovery.startup_timeout_s
        try:
            for fd in (read_fd, signal_fd, *parent_fds):
                poller.register(fd, select.POLLIN)
            while True:
                ready = {fd for fd, _ in poller.poll(stall_s * 1000)}
                if ready & set(parent_fds):
                    raise Interrupted(is_orphaned=True)
                if signal_fd in ready:
                    os.read(signal_fd, 64)
                    self._console.note(logging.INFO, "stopped; the next start continues")
                    raise Interrupted(is_orphaned=False)
                if not ready:
                    raise ConfigError(f"{self._names}: nothing has arrived for {stall_s:g} s")
                if not self._read(read_fd):
                    return child.wait(_REAP_TIMEOUT_S)
        finally:
            os.close(read_fd)
            child.stop(0.0)

    def _read(self, fd: int) -> bool:
        """Handle the lines that have arrived; return False after the last one."""
        data = os.read(fd, _READ_BYTES)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._on_line(decode(line))
        return bool(data) and self._end is None

    def _on_line(self, line: Line) -> None:
        match line:
            case Found(name, commit):
                self._commits[name] = commit
            case Note(text):
                self._console.note(logging.WARNING, text)
            case Fetching(name, done, total):
                self._on_bytes(name, done, total)
            case Fetched() | Refused():
                self._end = line

    def _on_bytes(self, name: str, done: int, total: int) -> None:
        now = time.monotonic()
        is_new = name not in self._announced
        is_due = is_new or now - self._shown_at >= _LOG_S
        if self._has_bars or not is_due or total < SHOWN_BYTES:
            return
        self._shown_at = now
        self._announced.add(name)
        text = f"{name}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB ({done / total:.0%})"
        self._console.note(logging.INFO, text)

    def _result(self, end: Fetched | Refused) -> EngineConfig:
        model = self._config.model
        if isinstance(end, Refused):
            is_mistake = end.is_absent and "model" in hub_names(model)
            raise ConfigError(end.text + (local_hint(model.model) if is_mistake else ""))
        commits = [f"{name} at {commit[:12]}" for name, commit in self._commits.items()]
        for kind, details in (("hub", commits), ("gguf", list(gguf_files(model).values()))):
            if details:
                clock = PhaseClock(self._begun_at)
                row = render_row(kind, clock, ", ".join(details), time.monotonic())
                self._console.line(row)
        return msgspec.structs.replace(self._config, model=with_directories(model, end.directories))
