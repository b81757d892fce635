"""Answers a batch file: `troika run-batch IN.jsonl OUT.jsonl [flags]`.

A second run with the same files continues the first: lines that were answered are skipped.
"""

import argparse
import contextlib
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
from tqdm import tqdm

from protocol.config import ConfigError, EngineConfig, LogLevel, settings
from protocol.config.setting_fields import all_settings
from protocol.process.launch import EngineProcesses, EngineStartError
from scripts.batch.files import BatchError, Output, Request, custom_ids, requests
from scripts.batch.sender import Sender, Server

_POLL_S = 0.1
_LINE_INTERVAL_S = 10.0
_ADDRESS = frozenset(
    {"host", "port", "uds", "api_key", "api_key_file"}
    | {"ssl_certfile", "ssl_keyfile", "ssl_ca_certs"}
)
"""Settings of a server that others use: the engine of a batch has its own values."""


def main(
    argv: Sequence[str] | None = None, program: str = "python -m scripts.batch.command"
) -> int:
    """Answer the lines of a file. Returns 0 when all of them have an answer."""
    parser = _make_parser(program)
    argv = sys.argv[1:] if argv is None else argv
    flags_given = argv[: argv.index("--")] if "--" in argv else argv
    if {"-h", "--help"}.intersection(flags_given):  # the many flags of an engine stay out
        parser.print_help()
        return 0
    settings.add_flags(parser)
    config = settings.parse_args(parser, argv)
    arguments = parser.parse_intermixed_args(argv)
    _take_files(parser, arguments)
    flags = [item.flag for item in all_settings() if hasattr(arguments, item.name)]
    if not min(arguments.concurrency, arguments.request_timeout_s, arguments.retry_timeout_s) > 0:
        parser.error("--concurrency and the timeouts must be greater than 0")
    if arguments.base_url is not None and flags:
        parser.error(f"{flags[0]} has no effect with --base-url")
    try:
        return _run(arguments, config)
    except (BatchError, ConfigError, EngineStartError, OSError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            text = f"{error.filename} cannot be used: {error.strerror}"
        print(f"{program}: {text}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{program}: stopped; run the command again to continue", file=sys.stderr)
        return 130


def _make_parser(program: str) -> settings.OneLineParser:
    """Return the parser of the command's own arguments."""
    parser = settings.OneLineParser(
        program,
        usage="%(prog)s IN.jsonl OUT.jsonl [flags]",
        description="Answer the requests of a file in OpenAI's batch format. A second run with the "
        "same files continues the first. Without --base-url, an engine is started for the run.",
        epilog="The flags of `troika serve` apply to that engine, except those of its address and "
        "keys: see `troika serve --help`.",
        allow_abbrev=False,
    )
    for name, option, metavar, text in (
        ("input", "-i", "IN.jsonl", "one request per line"),
        ("output", "-o", "OUT.jsonl", "one answer per line"),
    ):
        parser.add_argument(name, metavar=metavar, type=Path, nargs="?", help=text)
        about = f"another form of {metavar}, as in vLLM"
        parser.add_argument(option, f"--{name}-file", metavar=metavar, type=Path, help=about)
    parser.add_argument(
        "--base-url",
        metavar="URL",
        help="a running server instead, like http://127.0.0.1:8000/v1; its key comes from "
        "OPENAI_API_KEY",
    )
    for flag, default, text in (
        ("--concurrency", 128, "requests that are open at a time"),
        ("--request-timeout-s", 3600.0, "longest wait for an answer, before it is sent again"),
        ("--retry-timeout-s", 300.0, "time for which a request is sent again before the run ends"),
    ):
        about = f"{text} (default: {default:g})"
        parser.add_argument(flag, type=type(default), default=default, metavar="N", help=about)
    return parser


def _take_files(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Take the two files from places or options; an error ends the program, as argparse."""
    for name, metavar in (("input", "IN.jsonl"), ("output", "OUT.jsonl")):
        given = [getattr(arguments, name), getattr(arguments, f"{name}_file")]
        files = [file for file in given if file is not None]
        if len(files) != 1:
            parser.error(f"{metavar} is {'named twice' if files else 'missing'}")
        setattr(arguments, name, files[0])


def _run(arguments: argparse.Namespace, config: EngineConfig) -> int:
    wanted = custom_ids(arguments.input)
    with contextlib.closing(Output(arguments.output, wanted)) as output, ExitStack() as stack:
        num_before = len(output.answered)
        batch = Batch(requests(arguments.input), output)
        if num_before < len(wanted):
            server = _server(arguments, config, stack)
            with _progress(len(wanted), num_before) as on_answers:
                batch.run(server, min(arguments.concurrency, len(wanted) - num_before), on_answers)
    print(
        f"{len(wanted)} lines: {batch.num_answered} answered, {batch.num_errors} of these with an "
        f"error, {num_before} answered before, {batch.num_retries} retries",
        file=sys.stderr,
    )
    return 0


@contextlib.contextmanager
def _progress(num_lines: int, num_before: int) -> Iterator[Callable[[int], object]]:
    """Show the number of answered lines: a bar in a terminal, else a line every 10 s at most."""
    with tqdm(total=num_lines, initial=num_before, unit="line", disable=None) as bar:
        if not bar.disable:
            yield bar.update
            return
    num_answered = num_before
    next_line_at = time.monotonic() + _LINE_INTERVAL_S

    def on_answers(num_more: int) -> None:
        nonlocal num_answered, next_line_at
        num_answered += num_more
        if time.monotonic() >= next_line_at:
            print(f"{num_answered} of {num_lines} lines answered", file=sys.stderr, flush=True)
            next_line_at = time.monotonic() + _LINE_INTERVAL_S

    yield on_answers


def _server(arguments: argparse.Namespace, config: EngineConfig, stack: ExitStack) -> Server:
    """Return the server of the flags, or start an engine that ends with the stack."""
    timeouts = {
        "request_timeout_s": arguments.request_timeout_s,
        "retry_timeout_s": arguments.retry_timeout_s,
    }
    if arguments.base_url is not None:
        return Server(arguments.base_url, os.environ.get("OPENAI_API_KEY"), **timeouts)
    api_key = secrets.token_urlsafe()
    private = settings.configure(port=0, api_key=api_key).api
    names = _ADDRESS.intersection(private.__struct_fields__)
    api = msgspec.structs.replace(config.api, **{name: getattr(private, name) for name in names})
    run = config.run
    if not hasattr(arguments, "log_level"):
        run = msgspec.structs.replace(run, log_level=LogLevel.WARNING)
    config = msgspec.structs.replace(config, api=api, run=run)
    timeout_s = config.recovery.startup_timeout_s
    engine = EngineProcesses.start(config, timeout_s=timeout_s, with_api=True)
    stack.enter_context(engine)
    status = engine.status()
    if status is None or status.url is None:
        raise EngineStartError("the engine has no HTTP server")
    return Server(status.url, api_key, check=engine.check, **timeouts)


class Batch:
    """The run of a batch by several threads, each with a connection."""

    def __init__(self, lines: Iterator[Request], output: Output) -> None:
        self._lines = (line for line in lines if line.custom_id not in output.answered)
        self._output = output
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self.num_answered = 0
        self.num_errors = 0
        """Answers with a status other than 200, and lines that were not sent."""
        self.num_retries = 0

    def run(self, server: Server, concurrency: int, on_answers: Callable[[int], object]) -> None:
        """Answer all lines; BatchError: the server is gone, or a line cannot be written."""
        threads = [
            threading.Thread(target=self._work, args=(server,), name=f"batch-{i}", daemon=True)
            for i in range(concurrency)
        ]
        for thread in threads:
            thread.start()
        num_shown = 0
        try:
            while self._failure is None and any(thread.is_alive() for thread in threads):
                time.sleep(_POLL_S)
                num_answered = self.num_answered
                on_answers(num_answered - num_shown)
                num_shown = num_answered
        finally:
            server.is_stopping.set()
        on_answers(self.num_answered - num_shown)
        if self._failure is not None:
            raise self._failure

    def _work(self, server: Server) -> None:
        sender = Sender(server)
        try:
            while not server.is_stopping.is_set() and (line := self._next()) is not None:
                answer = sender.answer(line)
                self._output.write(answer)
                response = answer.response
                with self._lock:
                    self.num_answered += 1
                    self.num_errors += response is None or response.status_code != 200
        except Exception as failure:
            with self._lock:
                self._failure = self._failure or failure
        finally:
            with self._lock:
                self.num_retries += sender.num_retries
            sender.close()

    def _next(self) -> Request | None:
        with self._lock:
            return next(self._lines, None)


if __name__ == "__main__":
    sys.exit(main())
