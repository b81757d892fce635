"""LoRA adapters in all processes: a name, a directory, and a digest of the files in it.

An adapter is identified by the digest of its two files. A worker that reads other bytes refuses it,
so a request continues on a new worker with the weights that it began with, or not at all.
"""

import hashlib
import io
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from protocol.message import Record

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
BIN_FILE = "adapter_model.bin"
ADAPTERS_FILE = "lora_adapters"
"""Name of the file in the run directory that holds the names of adapters, for all API processes."""
MAX_CONFIG_BYTES = 2**20
MAX_WEIGHTS_BYTES = 2**35
"""Largest file of weights that any adapter may have; a worker applies its model's own bound."""
_CHUNK_BYTES = 2**20

AdapterId = Annotated[int, Meta(ge=0, lt=2**53)]
"""0: no adapter."""
AdapterName = Annotated[str, Meta(min_length=1, max_length=256)]
AdapterPath = Annotated[str, Meta(min_length=1, max_length=4096)]


class AdapterError(Exception):
    """An adapter that cannot be used; the text names the file or the key, and what is wrong."""


class Adapter(Record):
    """An adapter whose files were read once."""

    name: AdapterName
    path: AdapterPath
    digest: Annotated[bytes, Meta(min_length=32, max_length=32)]
    """Digest of the contents of both files; see `digest_of`."""

    @property
    def adapter_id(self) -> int:
        """The number under which the adapter's KV is cached: equal for equal files, and never 0."""
        return (int.from_bytes(self.digest[:8], "little") >> 11) or 1


def digest_of(config: bytes, weights: Iterable[bytes | memoryview]) -> bytes:
    """Return the digest of an adapter, given its configuration and the pieces of its weights."""
    digest = hashlib.sha256(len(config).to_bytes(8, "little") + config)
    for piece in weights:
        digest.update(piece)
    return digest.digest()


def read_adapter(name: str, path: str) -> tuple[Adapter, bytes]:
    """Read an adapter's files and compute their digest, which takes about a second for 500 MB.

    Returns the contents of its configuration, too.

    AdapterError: a file is missing or cannot be read.
    """
    config = read_config_bytes(path)
    try:
        with open_weights(path) as file:
            size = os.fstat(file.fileno()).st_size  # what is appended meanwhile is not read
            chunks = (
                file.read(min(_CHUNK_BYTES, size - first)) for first in range(0, size, _CHUNK_BYTES)
            )
            return Adapter(name, path, digest_of(config, chunks)), config
    except OSError as error:
        raise AdapterError(f"{path}/{WEIGHTS_FILE}: {error.strerror or error}") from error


def read_config_bytes(path: str) -> bytes:
    """Return the contents of adapter_config.json; AdapterError without one."""
    directory = Path(path)
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise AdapterError(f"{path} {what}")
    try:
        with _open_regular(directory / CONFIG_FILE, MAX_CONFIG_BYTES) as file:
            config = file.read(MAX_CONFIG_BYTES + 1)
    except FileNotFoundError as error:
        raise AdapterError(f"{path} has no {CONFIG_FILE}, which a PEFT adapter has") from error
    except OSError as error:
        raise AdapterError(f"{path}/{CONFIG_FILE}: {error.strerror or error}") from error
    if len(config) > MAX_CONFIG_BYTES:
        raise AdapterError(f"{path}/{CONFIG_FILE} has more than {MAX_CONFIG_BYTES} bytes")
    return config


def open_weights(path: str) -> io.BufferedReader:
    """Open adapter_model.safetensors; AdapterError without one, OSError if it cannot be opened."""
    try:
        return _open_regular(Path(path) / WEIGHTS_FILE, MAX_WEIGHTS_BYTES)
    except FileNotFoundError as error:
        text = f"{path} has no {WEIGHTS_FILE}"
        if (Path(path) / BIN_FILE).exists():
            text += f": {BIN_FILE} is not read, as it could run code; save it as safetensors"
        raise AdapterError(text) from error


def _open_regular(path: Path, max_bytes: int) -> io.BufferedReader:
    """Open a regular file of bounded size; AdapterError: it is something else, or too large.

    A FIFO without a writer would block its reader for ever, so it is opened without waiting.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise AdapterError(f"{path} is not a regular file")
        if status.st_size > max_bytes:
            raise AdapterError(f"{path} has {status.st_size} bytes, more than {max_bytes}")
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise
