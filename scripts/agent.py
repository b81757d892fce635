"""Run an engine of this machine for another one: `troika agent --join HOST:PORT --curve-keys DIR`.

The engine at HOST:PORT, which was started with --agents-listen, sends its settings; its clients use
the engine here alongside others. Start an agent anew when it ends: it does so when that engine has
other settings.
"""

import argparse
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from protocol.config import ConfigError, CpuPinning, EngineConfig
from protocol.config.addresses import check_tcp_address
from protocol.config.rules import validate
from protocol.config.settings import OneLineParser
from protocol.lifecycle import Role
from protocol.process.logs import configure_logging, log_label
from protocol.transport.curve import read_client_keys, read_server_keys
from scripts.supervisor.console import Console
from scripts.supervisor.head_link import HeadLink
from scripts.supervisor.invocation import Invocation
from scripts.supervisor.serving import open_run_dir, serve
from scripts.supervisor.startup import watch_signals

_NAME = re.compile("[A-Za-z0-9._:-]{1,128}")


def main(argv: Sequence[str] | None = None, program: str = "python -m scripts.agent") -> int:
    """Run the engine until it is stopped, or has to leave. Returns the exit status."""
    started_at = time.monotonic()
    arguments = _parse(argv, program)
    defaults = EngineConfig()
    label = log_label(Role.SUPERVISOR, 0, defaults)
    configure_logging(label, defaults.run)
    signal_fd = watch_signals()
    is_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    console = Console(sys.stderr, is_terminal=is_terminal, is_quiet=False, is_log_only=False)
    run_dir = head = None
    failure: str | None = None
    try:
        run_dir = open_run_dir(arguments.run_dir)  # it shows that this agent is here
        keys = Path(arguments.curve_keys)
        read_server_keys(keys)
        listen, seen_at = _addresses(arguments.listen, arguments.join)
        name = arguments.name or f"{socket.gethostname()}:{listen.rpartition(':')[2]}"
        head = HeadLink(
            f"tcp://{arguments.join}",
            read_client_keys(keys),
            name,
            leave_after_s=arguments.leave_after_s,
        )
        console.line(f"agent {name} joins {arguments.join}")
        asked = head.fetch_settings(signal_fd, arguments.parent_fd)
        if asked is None:
            return 0
        head.serve_at(f"tcp://{seen_at}")
        config = _config_here(asked, listen, arguments)
        configure_logging(label, config.run)
        invocation = Invocation(
            console,
            signal_fd,
            started_at,
            has_api=False,
            has_bars=is_terminal,
            parent_fd=arguments.parent_fd,
            reports=head,
        )
        status, failure = serve(config, invocation, run_dir=run_dir)
    except (ConfigError, ValueError) as error:
        status, failure = 1, str(error)
    finally:
        if head is not None:
            head.close(failure)
        if run_dir is not None:
            run_dir.close(is_abandoned=False)
    if failure is not None:
        console.error(failure)
    return status


def _parse(argv: Sequence[str] | None, program: str) -> argparse.Namespace:
    parser = OneLineParser(program, description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "--join", required=True, metavar="HOST:PORT", help="address of --agents-listen"
    )
    parser.add_argument(
        "--curve-keys",
        required=True,
        metavar="DIR",
        help="keys of the engines, of one client with its secret, and of all that may connect",
    )
    parser.add_argument(
        "--listen",
        metavar="HOST[:PORT]",
        help="where the core serves clients; default: the address here that reaches the other "
        "machine, and a free port",
    )
    parser.add_argument(
        "--worker-cpus",
        metavar="TEXT",
        help="CPUs of each rank here, as 0-7,16:8-15 for two; default: those of the joined engine",
    )
    parser.add_argument("--name", help="name of this engine; default: the host's name and the port")
    parser.add_argument("--run-dir", help="directory for the sockets; default: a temporary one")
    parser.add_argument(
        "--leave-after-s",
        type=float,
        metavar="SECONDS",
        help="leave when the joined engine has not answered for this long; default: never",
    )
    parser.add_argument("--parent-fd", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if not _is_place(arguments.join):
        parser.error(f"--join {arguments.join} is not HOST:PORT")
    if arguments.listen is not None and not _is_listen(arguments.listen):
        parser.error(f"--listen {arguments.listen} is not HOST or HOST:PORT")
    if arguments.name is not None and not _NAME.fullmatch(arguments.name):
        parser.error("--name must be 1 to 128 letters, digits, and . _ : -")
    if arguments.leave_after_s is not None and not arguments.leave_after_s > 0:
        parser.error(f"--leave-after-s {arguments.leave_after_s:g} must be greater than 0")
    return arguments


def _is_place(text: str) -> bool:
    """Return whether it is HOST:PORT."""
    try:
        check_tcp_address(f"tcp://{text}")
    except ValueError:
        return False
    return True


def _is_listen(text: str) -> bool:
    """Return whether it is HOST or HOST:PORT, where * is every address of this machine."""
    host, colon, port = text.partition(":")
    return _is_place(f"{'0.0.0.0' if host == '*' else host}:{port if colon else 1}")


def _addresses(asked: str | None, join: str) -> tuple[str, str]:
    """Return where the core listens, and where others find it; ValueError: no such address."""
    host, _, port = (asked or "").partition(":")
    is_any = host in ("0.0.0.0", "*")
    try:
        seen_at = _address_towards(join) if is_any or not host else host
        if not port:
            with socket.create_server(("" if is_any else host or seen_at, 0)) as free:
                port = str(free.getsockname()[1])
    except OSError as error:
        raise ValueError(f"cannot listen for {join}: {error.strerror or error}") from error
    return f"{host or seen_at}:{port}", f"{seen_at}:{port}"


def _address_towards(place: str) -> str:
    """Return the address of this machine from which a packet to HOST:PORT would be sent."""
    host, _, port = place.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        return str(probe.getsockname()[0])


def _config_here(asked: EngineConfig, listen: str, arguments: argparse.Namespace) -> EngineConfig:
    """Return the settings of the joined engine, with the addresses and CPUs of this machine."""
    parallel = msgspec.structs.replace(
        asked.parallel, core_listen=listen, curve_keys=arguments.curve_keys
    )
    worker = asked.worker
    if arguments.worker_cpus is not None:
        worker = msgspec.structs.replace(
            worker, worker_cpus=arguments.worker_cpus, cpu_pinning=CpuPinning.OFF
        )
    run = msgspec.structs.replace(asked.run, run_dir=arguments.run_dir)
    config = msgspec.structs.replace(asked, parallel=parallel, worker=worker, run=run)
    return validate(config)


if __name__ == "__main__":
    sys.exit(main())
