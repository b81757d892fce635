"""The command line of an engine, its HTTP socket, its signals, and the report of a failed start."""

import argparse
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from api_proc.http import listener as http_listener
from api_proc.http.api_keys import read_keys
from api_proc.http.tls import make_context
from protocol.config import ApiConfig, ConfigError, EngineConfig, settings
from protocol.config.foreign_flags import KEY_VARIABLES
from protocol.process.launch import failure_file
from protocol.process.version import version
from scripts.supervisor.help_pages import help_text

_FILE_SETTING = re.compile(r"\b(ssl_[a-z_]+|api_key_file)(?= )")


def served_name(config: EngineConfig) -> str:
    return next(iter(config.model.served_model_name), Path(config.model.model).name)


def open_listener(api: ApiConfig) -> socket.socket:
    """Listen for HTTP; ConfigError: the address, a certificate or the file of keys is unusable."""
    try:
        make_context(api)
        if api.api_key_file is not None:
            read_keys(Path(api.api_key_file))
    except (OSError, ValueError) as error:
        raise ConfigError(_FILE_SETTING.sub(r"`\1`", str(error))) from error
    try:
        return http_listener.open_listener(api)
    except (OSError, ValueError) as error:
        reason = str(error)
        if isinstance(error, OSError):  # a resolver's numbers are negative
            number = error.errno or 0
            reason = os.strerror(number) if number > 0 else str(error.strerror)
        if api.uds is not None:
            text = f"cannot listen on uds {api.uds}: {reason}; choose another path with --uds"
        else:
            text = (
                f"cannot listen on host {api.host}, port {api.port}: {reason}; "
                "choose others with --host and --port (port 0: any free one)"
            )
        raise ConfigError(text) from error


def warnings(argv: Sequence[str], config: EngineConfig) -> Iterator[str]:
    """Yield a sentence for each setting with a risk."""
    api = config.api
    if any(word.split("=")[0] == "--api-key" for word in argv):
        yield (
            "every user of this machine can read the API key in the list of processes; "
            "pass it with --api-key-file or the variable TROIKA_API_KEY"
        )
    if not api.api_key and api.api_key_file is None:
        for variable in KEY_VARIABLES:
            if variable in os.environ:
                yield f"{variable} has no effect: clients need no key; set TROIKA_API_KEY"
    is_open = api.uds is None and api.host not in ("127.0.0.1", "::1", "localhost")
    if is_open and not api.api_key and api.api_key_file is None:
        yield f"every client that can reach {api.host} may use this server; set --api-key-file"
    if api.journal_dir is not None:
        journals = Path(api.journal_dir).glob("api-*/*.journal")
        names = {path.parent.name for path in journals}
        if left := sorted(name for name in names if _index_of(name) >= api.api_server_count):
            yield (
                f"requests in {', '.join(left)} of {api.journal_dir} are not resumed: "
                f"api_server_count is only {api.api_server_count}"
            )
    file = Path(api.api_key_file or "")
    if api.api_key_file is not None and file.is_file() and file.stat().st_mode & 0o004:
        yield f"every user of this machine can read {api.api_key_file}: chmod 600"


def _index_of(journal: str) -> int:
    """Return the index of the API process that wrote a journal; -1: it has no such name."""
    _, _, text = journal.partition("-")
    return int(text) if text.isdecimal() else -1


def watch_signals() -> int:
    """Make SIGINT, SIGTERM and SIGHUP only write a byte to the descriptor returned.

    SIGHUP stays ignored if it already is, as under nohup.
    """
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    return read_fd


def write_failure(run_dir: str | None, failure: str) -> bool:
    """Write the failure for the embedding program; False: the directory is gone."""
    if run_dir is None or not os.path.isdir(run_dir):
        return False
    failure_file(run_dir, os.getpid()).write_text(failure)
    return True


def parse(program: str, argv: Sequence[str]) -> tuple[argparse.Namespace, EngineConfig]:
    """Parse the command line. Wrong arguments end the program with status 2, help with 0."""
    # argparse would read llama.cpp's flag as -h.
    argv = ["--hf-repo" if word == "-hf" else word for word in argv]
    parser = settings.OneLineParser(program, add_help=False, allow_abbrev=False)
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        default=argparse.SUPPRESS,
        help="as --model",
    )
    parser.add_argument("-h", "--help", nargs="?", const="", metavar="TOPIC", help="this text")
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("--no-api", action="store_true", help="start no HTTP server")
    for flag in ("--config-fd", "--parent-fd", "--progress-fd", "--epoch", "--rank"):
        parser.add_argument(flag, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--temporary-run-dir", action="store_true", help=argparse.SUPPRESS)
    settings.add_flags(parser)
    asked, _ = parser.parse_known_args(argv)
    if asked.help is not None or asked.version:
        try:
            text = f"troika {version()}" if asked.version else help_text(program, asked.help)
            print(text, flush=True)
        except ConfigError as error:
            parser.error(str(error))
        except BrokenPipeError:  # a reader such as `head` has left
            with open(os.devnull, "w") as sink:
                os.dup2(sink.fileno(), sys.stdout.fileno())  # the rest is written at the exit
        sys.exit(0)
    config = settings.parse_args(parser, argv)
    arguments = parser.parse_args(argv)
    if arguments.config_fd is not None:
        with os.fdopen(arguments.config_fd, "rb") as pipe:
            config = msgspec.msgpack.decode(pipe.read(), type=EngineConfig)
    return arguments, config
