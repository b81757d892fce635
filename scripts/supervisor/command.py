"""The command of the supervisor, which starts an engine and keeps it."""

import logging
import os
import sys
import time
from collections.abc import Sequence

from protocol.config import ConfigError, LogFormat
from protocol.config.settings import speller
from protocol.lifecycle import Role
from protocol.process.logs import configure_logging, log_label
from scripts.supervisor.checks import check_has_processes
from scripts.supervisor.console import Console
from scripts.supervisor.invocation import Invocation
from scripts.supervisor.replica import ReplicaReports
from scripts.supervisor.serving import serve
from scripts.supervisor.startup import (
    parse,
    warnings,
    watch_signals,
    write_failure,
)


def main(argv: Sequence[str] | None = None, program: str = "scripts/serve") -> int:
    """Run an engine until it is stopped. Returns the exit status."""
    started_at = time.monotonic()
    argv = sys.argv[1:] if argv is None else argv
    arguments, config = parse(program, argv)
    label = log_label(Role.SUPERVISOR, 0, config)
    configure_logging(label, config.run)
    signal_fd = watch_signals()
    is_embedded = arguments.config_fd is not None
    is_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    is_json = config.run.log_format is LogFormat.JSON
    is_quiet = is_embedded or not config.run.log_level.shows_facts
    console = Console(sys.stderr, is_terminal=is_terminal, is_quiet=is_quiet, is_log_only=is_json)
    reports = None
    if config.run.replica is not None:
        reports = ReplicaReports(config, arguments.epoch, arguments.progress_fd)
    try:
        if arguments.no_api and not is_embedded:
            check_has_processes(config)
        for text in [] if arguments.no_api else warnings(argv, config):
            console.note(logging.WARNING, text)
        invocation = Invocation(
            console,
            signal_fd,
            started_at,
            has_api=not arguments.no_api,
            has_bars=is_terminal and not is_json and config.run.log_level.shows_facts,
            parent_fd=arguments.parent_fd,
            reports=reports,
        )
        status, failure = serve(
            config,
            invocation,
            is_temporary=arguments.temporary_run_dir,
            epoch=arguments.epoch or 0,
        )
    except (ConfigError, ValueError) as error:
        status, failure = 1, str(error)
        if isinstance(error, ConfigError) and not is_embedded:
            failure = error.spelled(speller(arguments))
    if reports is not None:
        reports.close(failure)
    elif failure is not None:
        is_written = is_embedded and write_failure(config.run.run_dir, failure)
        if not is_written:
            console.error(failure)
    return status
