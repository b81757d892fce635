"""What happens before an engine starts: flags, the model's directory, the HTTP socket, signals."""

import argparse
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec

from protocol.config import ConfigError, Device, EngineConfig, settings
from protocol.process.launch import failure_file

DEMO_MODEL_DIR = Path(__file__).resolve().parent.parent / "demo_model"
_BACKLOG = 2048
_GPU_NODES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Device files of drivers that torch can use."""


def complete(config: EngineConfig) -> EngineConfig:
    """Resolve the model's directory and the number of standbys; ConfigError: no such model."""
    model = config.model
    recovery = msgspec.structs.replace(config.recovery, standby_workers=num_standby_workers(config))
    config = msgspec.structs.replace(config, recovery=recovery)
    if model.model == "null":
        return config
    directory = DEMO_MODEL_DIR if model.model == "demo" else Path(model.model).absolute()
    if not (directory / "config.json").is_file():
        problem = "has no config.json" if directory.is_dir() else "is not a directory"
        raise ConfigError(
            f"model {directory} {problem}; give a checkpoint directory in Hugging Face format, "
            "'demo' or 'null'"
        )
    served = model.served_model_name or ("demo" if model.model == "demo" else None)
    model = msgspec.structs.replace(model, model=str(directory), served_model_name=served)
    return msgspec.structs.replace(config, model=model)


def num_standby_workers(config: EngineConfig, gpu_nodes: Sequence[str] = _GPU_NODES) -> int:
    """As configured; by default 1 where it costs little: a real model, one rank, the CPU."""
    if config.recovery.standby_workers is not None:
        return config.recovery.standby_workers
    on_cpu = config.model.device is Device.CPU or (
        config.model.device is Device.AUTO and not any(map(os.path.exists, gpu_nodes))
    )
    is_plain = config.parallel.tensor_parallel_size == 1 and config.model.model != "null"
    return int(on_cpu and is_plain)


def served_name(config: EngineConfig) -> str:
    return config.model.served_model_name or Path(config.model.model).name


def open_listener(host: str, port: int) -> socket.socket:
    """Listen for HTTP; ConfigError: the address cannot be used."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on host {host}, port {port}: {error.strerror}; "
            "choose others with --host and --port (port 0: any free one)"
        ) from error


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def watch_signals() -> int:
    """Make SIGINT, SIGTERM and SIGHUP only write a byte to the descriptor returned.

    SIGHUP stays ignored where it is, as under nohup.
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


def write_failure(run_dir: str | None, failure: str) -> None:
    """Write the failure for the embedding program, if the directory is still there."""
    if run_dir is not None and os.path.isdir(run_dir):
        failure_file(run_dir, os.getpid()).write_text(failure)


def parse(program: str, argv: Sequence[str]) -> tuple[argparse.Namespace, EngineConfig]:
    """Parse the command line. Wrong arguments end the program with status 2."""
    parser = argparse.ArgumentParser(
        program, description="Serve a model over HTTP.", allow_abbrev=False
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        default=argparse.SUPPRESS,
        help="checkpoint directory, 'demo' (default) or 'null'; the same as --model",
    )
    parser.add_argument("--no-api", action="store_true", help="start no HTTP server")
    for flag in ("--config-fd", "--parent-fd", "--epoch", "--rank"):
        parser.add_argument(flag, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--temporary-run-dir", action="store_true", help=argparse.SUPPRESS)
    settings.add_flags(parser)
    config = settings.parse_args(parser, argv)
    arguments = parser.parse_args(argv)
    if arguments.config_fd is not None:
        with os.fdopen(arguments.config_fd, "rb") as pipe:
            config = msgspec.msgpack.decode(pipe.read(), type=EngineConfig)
    return arguments, config
