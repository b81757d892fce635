"""The process that prepares models: `python -m scripts.hub`, started by a supervisor.

It fetches models from the hub and creates a checkpoint directory for each GGUF file.
"""

import argparse
import os
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from protocol.config import EngineConfig, LogFormat, LogLevel, ModelConfig
from protocol.process.child_runtime import watch_parent
from protocol.process.prctl import die_with_parent
from scripts.gguf.cache import why_not_bounded
from scripts.hub.check import Checker
from scripts.hub.folders import snapshots_folder
from scripts.hub.gguf import directory_of
from scripts.hub.messages import (
    SHOWN_BYTES,
    Fetched,
    Fetching,
    Line,
    Note,
    Refusal,
    encode,
    gguf_files,
    hub_names,
)

if TYPE_CHECKING:
    from scripts.hub.snapshot import Snapshot

_REPORT_S = 0.2


class Reporter:
    """Writes messages to the parent, and a progress bar to a terminal."""

    def __init__(self, fd: int, *, has_bar: bool) -> None:
        self._fd = fd
        self.has_bar = has_bar
        self._lock = threading.Lock()
        self._reported_at = 0.0
        self._bar: Any = None

    def report(self, line: Line) -> None:
        """Write a message; progress is written only a few times a second."""
        with self._lock:
            if isinstance(line, Fetching):
                self._draw(line)
                now = time.monotonic()
                if now - self._reported_at < _REPORT_S and line.done < line.total:
                    return
                self._reported_at = now
            os.write(self._fd, encode(line))

    def _draw(self, line: Fetching) -> None:
        if not self.has_bar or line.total < SHOWN_BYTES:
            return
        from tqdm.auto import tqdm

        if self._bar is None or self._bar.total != line.total:
            self.close()
            self._bar = tqdm(
                total=line.total, initial=line.done, desc=line.name, unit="B", unit_scale=True
            )
        self._bar.update(line.done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def main() -> None:
    """Fetch the models that the configuration names, and report their directories."""
    parser = argparse.ArgumentParser("scripts.hub")
    for flag in ("--config-fd", "--parent-fd", "--listen-fd", "--epoch", "--rank"):
        parser.add_argument(flag, type=int)
    parser.add_argument("--no-api", action="store_true")
    arguments = parser.parse_args()
    die_with_parent()
    watch_parent(arguments.parent_fd)
    with os.fdopen(arguments.config_fd, "rb") as pipe:
        config = msgspec.msgpack.decode(pipe.read(), type=EngineConfig)
    is_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    is_text = config.run.log_format is LogFormat.TEXT
    reporter = Reporter(arguments.listen_fd, has_bar=is_terminal and is_text)
    has_api = not arguments.no_api
    try:
        directories = convert(config.model, has_api=has_api)
        if hub_names(config.model):
            directories |= fetch(config.model, reporter, has_api=has_api)
        if text := why_not_bounded():
            reporter.report(Note(text))
        last: Line = Fetched(directories)
    except Refusal as refusal:
        if config.run.log_level is LogLevel.DEBUG:
            traceback.print_exc()
        last = refusal.message()
    reporter.close()
    reporter.report(last)
    sys.stderr.flush()
    os._exit(0)  # threads may still wait for the hub


def convert(model: ModelConfig, *, has_api: bool) -> dict[str, str]:
    """Return the checkpoint directories of GGUF files; raise Refusal if one cannot be served."""
    return {
        setting: str(
            directory_of(
                Path(name),
                needs_tokenizer=_needs_tokenizer(model, setting, has_api=has_api),
            )
        )
        for setting, name in gguf_files(model).items()
    }


def fetch(model: ModelConfig, reporter: Reporter, *, has_api: bool) -> dict[str, str]:
    """Complete the snapshots; raise Refusal if a model cannot be fetched or cannot run."""
    names = {setting: name.partition(":") for setting, name in hub_names(model).items()}
    checker = Checker(model)
    if not all(snapshots_folder(name).is_dir() for name, _, _ in names.values()):
        checker.start()  # loads its libraries while this process loads huggingface_hub
    from huggingface_hub import logging
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars

    from scripts.hub.snapshot import Request, Snapshot
    from scripts.hub.waits import bound_waits

    logging.set_verbosity_error()
    reporter.has_bar &= not are_progress_bars_disabled()
    disable_progress_bars()  # those of the library count links, not bytes
    bound_waits()
    snapshots = {}
    for setting, (name, _, quant) in names.items():
        is_main = setting == "model"
        needs_tokenizer = _needs_tokenizer(model, setting, has_api=has_api)
        revision = model.revision if is_main else None
        check = partial(checker.check, needs_tokenizer=needs_tokenizer)
        request = Request(name, revision, needs_tokenizer, check, quant)
        snapshots[setting] = Snapshot(request, reporter.report)
    for snapshot in snapshots.values():
        snapshot.prepare()
    checker.stop()
    for snapshot in snapshots.values():
        snapshot.fetch()
    return {
        setting: str(_directory(snapshot, model, setting, has_api=has_api))
        for setting, snapshot in snapshots.items()
    }


def _directory(snapshot: "Snapshot", model: ModelConfig, setting: str, *, has_api: bool) -> Path:
    """Return the directory of a snapshot, or the one created from its GGUF file."""
    if ":" not in hub_names(model)[setting]:
        return snapshot.directory
    needs_tokenizer = _needs_tokenizer(model, setting, has_api=has_api)
    return directory_of(snapshot.gguf_file(), needs_tokenizer=needs_tokenizer)


def _needs_tokenizer(model: ModelConfig, setting: str, *, has_api: bool) -> bool:
    return setting == "model" and has_api and model.tokenizer is None


if __name__ == "__main__":
    main()
