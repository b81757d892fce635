"""Links between machines as they are configured: addresses of cores, and keys of clients."""

import re
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec

from protocol.config import EngineConfig
from protocol.config.addresses import LISTEN_ADDRESS, check_tcp_address, is_remote
from protocol.process.model_files import ModelFiles, read_model_files
from protocol.process.run_dir import core_addresses
from protocol.transport.curve import ClientKeys, read_client_keys, read_server_keys

MAX_ADDRESSES = 1024
"""Maximum number of addresses in all files together."""


def check_links(config: EngineConfig) -> None:
    """Raise a ValueError, which users are shown, if keys are missing or an address is wrong."""
    parallel = config.parallel
    if parallel.curve_keys is None:
        return
    client_keys(config)
    if parallel.replica_file is not None:
        read_addresses([Path(parallel.replica_file)])
    if parallel.kv_listen is not None and config.run.replica is None:
        read_server_keys(Path(parallel.curve_keys))
        _check_listen("kv_listen", parallel.kv_listen)
    if parallel.core_listen is None:
        return
    read_server_keys(Path(parallel.curve_keys))
    if config.parallel.data_parallel_size > 1:  # each replica checks its own
        return
    _check_listen("core_listen", str(tcp_address(config)).removeprefix("tcp://"))


def _check_listen(name: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_server(("" if host == "*" else host, int(port))):
            pass
    except OSError as error:
        raise ValueError(
            f"{name} {host}:{port} cannot be used: {error.strerror or error}"
        ) from error


def tcp_address(config: EngineConfig) -> str | None:
    """Return the address for clients of the core on other machines, if it has one."""
    listen = config.parallel.core_listen
    return None if listen is None else _nth_address(listen, config.run.replica or 0)


def _nth_address(listen: str, number: int) -> str:
    """Return the address of a replica: each takes the next port."""
    host, _, port = listen.rpartition(":")
    return f"tcp://{host}:{int(port) + number}"


def core_places(config: EngineConfig) -> list[str]:
    """Return where clients find the cores of this engine: with core_listen, also other machines'.

    `config`: with the run directory. An address of the run directory is of no use elsewhere.
    """
    count = config.parallel.data_parallel_size
    listen = config.parallel.core_listen
    if listen is None:
        return core_addresses(str(config.run.run_dir), count)
    first = config.run.replica or 0
    return [_nth_address(listen, first + number) for number in range(count)]


def with_kv_listen(config: EngineConfig) -> EngineConfig:
    """Choose a port for the blocks that are stored here, if other machines may read them.

    ValueError: there is no port at that address.
    """
    parallel = config.parallel
    listen = parallel.core_listen or parallel.agents_listen
    has_stores = config.cache.keeps_blocks and parallel.data_parallel_size > 0
    if parallel.kv_listen is not None or not has_stores or listen is None:
        return config
    host = listen.rpartition(":")[0]
    try:
        with socket.create_server(("" if host == "*" else host, 0)) as free:
            port = free.getsockname()[1]
    except OSError as error:
        raise ValueError(f"{host} cannot be used: {error.strerror or error}") from error
    kv_listen = f"{host}:{port}"
    if not re.match(LISTEN_ADDRESS, kv_listen):  # others could not connect to such a name
        return config
    parallel = msgspec.structs.replace(parallel, kv_listen=kv_listen)
    return msgspec.structs.replace(config, parallel=parallel)


def blocks_address(config: EngineConfig) -> str:
    """Return where other machines read the blocks here; the host may be `*`. Empty: nowhere."""
    listen, has_cores = config.parallel.kv_listen, config.parallel.data_parallel_size > 0
    has_blocks = has_cores and config.cache.keeps_blocks
    return f"tcp://{listen}" if has_blocks and listen is not None else ""


def blocks_address_seen_at(blocks: str, core: str) -> str:
    """Return the address of a machine's blocks for other machines; empty: there is none.

    `core`: the address of a core there.
    """
    host, _, port = blocks.removeprefix("tcp://").rpartition(":")
    if host not in ("*", "0.0.0.0"):
        return blocks
    if not is_remote(core):
        return ""
    return f"{core.rpartition(':')[0]}:{port}"


def client_keys(config: EngineConfig) -> ClientKeys | None:
    """Return the keys for cores of other machines, if there are such; ValueError: they are bad."""
    parallel = config.parallel
    if not parallel.has_other_machines or parallel.curve_keys is None:
        return None
    return read_client_keys(Path(parallel.curve_keys))


def own_model_files(config: EngineConfig) -> ModelFiles | None:
    """Return what is known of the model here, if there are engines of other machines."""
    return read_model_files(config.model.model) if config.parallel.has_other_machines else None


def members_file(run_dir: str) -> Path:
    """Return the file in which a supervisor keeps the addresses of the host agents' cores."""
    return Path(run_dir) / "members"


def address_files(config: EngineConfig, run_dir: str) -> list[Path]:
    """Return the files with addresses of cores that change while the engine runs."""
    parallel = config.parallel
    files = [] if parallel.replica_file is None else [Path(parallel.replica_file)]
    return files if parallel.agents_listen is None else [*files, members_file(run_dir)]


def read_addresses(files: Sequence[Path]) -> list[str]:
    """Read addresses of cores, one a line; empty lines, and those after a #, are skipped.

    ValueError: a file cannot be read, a line is not an address, or there are too many.
    """
    addresses: list[str] = []
    for path in files:
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        for number, line in enumerate(map(str.strip, lines), 1):
            if not line or line.startswith("#"):
                continue
            try:
                check_tcp_address(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            addresses.append(line)
    if len(addresses) > MAX_ADDRESSES:
        raise ValueError(f"{len(addresses)} addresses are more than {MAX_ADDRESSES}")
    return addresses
