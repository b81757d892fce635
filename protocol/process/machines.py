"""Links between machines, as they are configured: where a core listens, and keys of clients."""

import socket
from pathlib import Path

from protocol.config import EngineConfig
from protocol.transport.curve import ClientKeys, read_client_keys, read_server_keys


def check_links(config: EngineConfig) -> None:
    """Raise a ValueError, for people, if keys are missing or the address cannot be used."""
    parallel = config.parallel
    if parallel.curve_keys is None:
        return
    client_keys(config)
    if parallel.core_listen is None:
        return
    read_server_keys(Path(parallel.curve_keys))
    if config.parallel.data_parallel_size > 1:  # each replica checks its own
        return
    host, _, port = str(tcp_address(config)).removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_server((host, int(port))):
            pass
    except OSError as error:
        raise ValueError(
            f"core_listen {host}:{port} cannot be used: {error.strerror or error}"
        ) from error


def tcp_address(config: EngineConfig) -> str | None:
    """Return the address for clients of the core on other machines, if it has one."""
    listen = config.parallel.core_listen
    if listen is None:
        return None
    host, _, port = listen.rpartition(":")
    return f"tcp://{host}:{int(port) + (config.run.replica or 0)}"


def client_keys(config: EngineConfig) -> ClientKeys | None:
    """Return the keys for cores of other machines, if there are such; ValueError: they are bad."""
    parallel = config.parallel
    if not parallel.replica_addresses or parallel.curve_keys is None:
        return None
    return read_client_keys(Path(parallel.curve_keys))
