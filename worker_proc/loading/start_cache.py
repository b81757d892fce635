"""Stores results of a start in the user's cache directory, for later starts.

A result is found only under the key with which it was stored: the key must hold everything that the
result depends on. A file that is damaged, or owned by another user, counts as absent. Without a
writable directory, nothing is stored.
"""

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from worker_proc.native.build import cache_directory

MAX_KEYS = 64
"""Maximum number of keys of one kind; the oldest are removed."""
_DIGEST_BYTES = 16

T = TypeVar("T")

log = logging.getLogger("troika.worker")


class StartCache:
    """Named results of one kind, under one key."""

    def __init__(self, kind: str, key: Iterable[bytes]) -> None:
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for part in key:
            digest.update(len(part).to_bytes(8, "little") + part)
        self._kind, self._key = kind, digest.hexdigest()

    def get(self, name: str, type_: type[T]) -> T | None:
        """Return a result of an earlier start, or None."""
        try:
            with (self._directory() / name).open("rb") as file:
                if os.fstat(file.fileno()).st_uid != os.getuid():
                    return None
                content = file.read()
            body = content[_DIGEST_BYTES:]
            if content[:_DIGEST_BYTES] != self._digest(name, body):
                return None
            return msgspec.msgpack.decode(body, type=type_)
        except (OSError, RuntimeError, msgspec.DecodeError):  # RuntimeError: no home directory
            return None

    def put(self, name: str, result: object) -> None:
        """Store a result for later starts, if possible."""
        try:
            directory = self._directory()
            if not directory.is_dir():
                # `parents` would create them with the default mode, perhaps group-writable.
                for path in (cache_directory(), directory.parent, directory):
                    path.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._remove_first(directory.parent)
            body = msgspec.msgpack.encode(result)
            # The file is renamed when complete, so that no process reads an incomplete one.
            fd, scratch = tempfile.mkstemp(dir=directory)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(self._digest(name, body) + body)
                os.replace(scratch, directory / name)
            except OSError:
                os.unlink(scratch)
                raise
        except (OSError, RuntimeError) as error:
            log.debug("%s is not kept for later starts: %s", name, error)

    def _digest(self, name: str, body: bytes) -> bytes:
        """Return a digest that shows that a file is complete and has this key and name."""
        place = f"{self._kind}/{self._key}/{name}:".encode()
        return hashlib.blake2b(place + body, digest_size=_DIGEST_BYTES).digest()

    def _directory(self) -> Path:
        return cache_directory() / self._kind / self._key

    @staticmethod
    def _remove_first(parent: Path) -> None:
        keys = sorted(parent.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in keys[:-MAX_KEYS]:
            with contextlib.suppress(OSError):
                shutil.rmtree(path)
