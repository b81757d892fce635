"""Fetches the headers of a hub's GGUF files, to check a model before its weights are fetched.

Each header is written to a sparse file of the full length, together with the few tensors whose
values the configuration needs. This file is then checked like a complete one.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import BinaryIO

from scripts.hub.transfer import RemoteFile, Transfer
from worker_proc.gguf.config_tensors import IN_CONFIG
from worker_proc.gguf.header import read_file_header
from worker_proc.gguf.types import READ, TensorType

_MAX_CONFIG_BYTES = 1 << 20
"""Maximum size of a tensor that the configuration needs; it has one factor per frequency."""


@contextmanager
def fetched_headers(transfer: Transfer, paths: Sequence[str]) -> Iterator[Path]:
    """Yield the path of the first file, which contains only the header.

    Raises ValueError for an invalid header, naming the file by its path on the hub.
    """
    with tempfile.TemporaryDirectory(prefix="troika-") as place:
        directory = Path(place)

        def fetch(path: str) -> Path:
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                _fetch(transfer, transfer.describe(path), file)
            return target

        try:
            yield transfer.each(fetch, paths)[0]
        except ValueError as error:
            raise ValueError(str(error).replace(f"{directory}/", "")) from error


def _fetch(transfer: Transfer, remote: RemoteFile, file: BinaryIO) -> None:
    def read(num_bytes: int) -> bytes:
        data = transfer.read(remote, file.tell(), num_bytes) if num_bytes else b""
        file.write(data)
        return data

    header = read_file_header(Path(file.name), remote.size, read)
    file.truncate(remote.size)
    for entry in header.tensors:
        if entry.name in IN_CONFIG and entry.type in READ:
            block = TensorType(entry.type).block
            num_bytes = prod(entry.shape) // block.num_values * block.num_bytes
            file.seek(entry.offset)
            file.write(transfer.read(remote, entry.offset, min(num_bytes, _MAX_CONFIG_BYTES)))
