"""The API keys, as hashes: from the configuration, and from a file that may change."""

import hashlib
import hmac
import logging
import re
from collections.abc import Iterable
from pathlib import Path

from protocol.config import ApiConfig

MAX_KEYS = 1024
_MAX_FILE_BYTES = 1024 * 1024
_NAME_BYTES = 8
_COMMENT = re.compile(rb"(^|\s)#.*")

log = logging.getLogger("troika.api")


class ApiKeys:
    """The keys in use. Without any key every request is rejected."""

    def __init__(self, api: ApiConfig) -> None:
        """Load the keys. A file that cannot be read adds none: a new process must not exit."""
        self._configured = [_hash(key.encode()) for key in api.api_key]
        self._file = None if api.api_key_file is None else Path(api.api_key_file)
        self._hashes = self._configured
        if self._file is not None:
            try:
                self.take(read_keys(self._file))
            except ValueError as error:
                log.error("%s", error)

    def take(self, keys: Iterable[bytes]) -> None:
        """Replace the keys of the file."""
        self._hashes = [*self._configured, *map(_hash, keys)]

    def name_of(self, key: bytes) -> str | None:
        """Return the name of a key, or None if it is not valid, in the same time for every key.

        The name is part of the key's hash. So it stays when other keys are added or removed, and
        after a restart.
        """
        given, is_valid = _hash(key), False
        for known in self._hashes:
            is_valid = hmac.compare_digest(given, known) or is_valid
        return f"key {given[:_NAME_BYTES].hex()}" if is_valid else None


def read_keys(file: Path) -> list[bytes]:
    """Read one key per line; a ValueError names the file and the reason."""
    try:
        with file.open("rb") as opened:
            content = opened.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"api_key_file {file} cannot be read: {error.strerror}") from error
    lines = [_COMMENT.sub(b"", line).strip() for line in content.splitlines()]
    keys = [line for line in lines if line]
    if not keys:
        raise ValueError(f"api_key_file {file} holds no key; it needs one per line")
    if len(keys) > MAX_KEYS or len(content) > _MAX_FILE_BYTES:
        raise ValueError(f"api_key_file {file} holds more than {MAX_KEYS} keys")
    return keys


def _hash(key: bytes) -> bytes:
    """Hash keys to one length, so that every comparison takes the same time."""
    return hashlib.sha256(key).digest()
