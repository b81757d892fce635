"""The supervisor: `python -m scripts.supervisor [MODEL] [flags]` starts an engine and keeps it."""

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from api_proc.http.listener import close_listener
from api_proc.peers.directory import remove_all
from protocol.config import ConfigError, EngineConfig, LogFormat
from protocol.lifecycle import Role
from protocol.process.child_runtime import configure_logging, log_label
from protocol.process.machines import check_links
from protocol.process.prctl import set_subreaper
from scripts.gguf.locks import hold
from scripts.hub.messages import gguf_files, hub_names
from scripts.supervisor.console import Console
from scripts.supervisor.fetching import Interrupted, ModelFetch
from scripts.supervisor.gpus import divide
from scripts.supervisor.loop import Supervisor
from scripts.supervisor.replica import ReplicaReports
from scripts.supervisor.run_dirs import RunDir, RunDirBusyError
from scripts.supervisor.startup import (
    complete,
    open_listener,
    parse,
    warnings,
    watch_signals,
    write_failure,
)
from scripts.supervisor.system import System


def main(argv: Sequence[str] | None = None, program: str = "scripts/serve") -> int:
    """Run an engine until it is stopped. Returns the exit status."""
    started_at = time.monotonic()
    argv = sys.argv[1:] if argv is None else argv
    arguments, config = parse(program, argv)
    label = log_label(Role.SUPERVISOR, 0, config)
    configure_logging(label, config.run.log_level, config.run.log_format)
    signal_fd = watch_signals()
    is_embedded = arguments.parent_fd is not None
    is_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    is_json = config.run.log_format is LogFormat.JSON
    console = Console(
        sys.stderr, is_terminal=is_terminal, is_quiet=is_embedded, is_log_only=is_json
    )
    reports = None
    if config.run.replica is not None:
        reports = ReplicaReports(config, arguments.epoch, arguments.progress_fd)
    try:
        for text in [] if arguments.no_api else warnings(argv, config):
            console.note(logging.WARNING, text)
        has_bars = is_terminal and not is_json
        status, failure = _serve(
            arguments, config, console, signal_fd, started_at, reports=reports, has_bars=has_bars
        )
    except (ConfigError, ValueError, RunDirBusyError) as error:
        status, failure = 1, str(error)
    if reports is not None:
        reports.close(failure)
    elif failure is not None:
        console.error(failure)
        if is_embedded:
            write_failure(config.run.run_dir, failure)
    return status


def _serve(
    arguments: argparse.Namespace,
    config: EngineConfig,
    console: Console,
    signal_fd: int,
    started_at: float,
    *,
    reports: ReplicaReports | None,
    has_bars: bool,
) -> tuple[int, str | None]:
    """Return the exit status, and the reason if the engine gave up."""
    config = complete(config)
    divide(config, os.environ)
    check_links(config)
    check_links(config)
    try:
        run_dir = RunDir(config.run.run_dir, is_temporary=arguments.temporary_run_dir)
    except OSError as error:
        text = f"run_dir {config.run.run_dir} cannot be used: {error.strerror}"
        raise ConfigError(text) from error
    is_abandoned = False
    listener = None
    held: list[int] = []
    try:
        remove_all(run_dir.path)
        run_dir.raise_epoch(arguments.epoch or 0)
        run = msgspec.structs.replace(config.run, run_dir=run_dir.path)
        config = msgspec.structs.replace(config, run=run)
        has_api = not arguments.no_api
        if hub_names(config.model) or gguf_files(config.model):
            if has_api:  # a wrong address is reported before hours of waiting
                close_listener(open_listener(config.api))
            fetch = ModelFetch(config, console, has_api=has_api, has_bars=has_bars)
            config = fetch.run(signal_fd, arguments.parent_fd)
            used = (config.model.model, config.model.speculative_model)
            held = hold(Path(name) for name in used if name is not None)
        listener = open_listener(config.api) if has_api else None
        set_subreaper(bool(config.recovery.standby_workers))
        supervisor = Supervisor(
            config,
            run_dir,
            console,
            listener=listener,
            parent_fd=arguments.parent_fd,
            started_at=started_at,
            system=System(),
            reports=reports,
        )
        if reports is None:
            run_dir.register()
        status = supervisor.run(signal_fd)
        is_abandoned = supervisor.was_orphaned
        return status, supervisor.policy.failure
    except Interrupted as interrupted:
        is_abandoned = interrupted.is_orphaned
        return 0, None
    finally:
        if listener is not None:
            close_listener(listener)
        remove_all(run_dir.path)
        run_dir.close(is_abandoned=is_abandoned)
        for fd in held:
            os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
