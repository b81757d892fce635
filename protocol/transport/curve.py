"""CURVE keys of links that cross machines, and the core's list of clients that may connect.

A directory has the core's pair `server.key` and `server.secret`, and in `clients` a pair for each
client. The core's machine needs the first pair and all public keys; a client's machine needs
`server.key` and the pair of that client. `scripts/keys.py` makes them.

libzmq encrypts what is sent, and asks a socket in the same process about each client that wants to
connect (ZAP, RFC 27). The core answers in its loop.
"""

import logging
import os
import re
import time
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from protocol.transport.runtime import SocketFactory

SERVER = "server"
CLIENTS = "clients"
_PUBLIC, _SECRET = ".key", ".secret"
_KEY_CHARS = 40
"""32 bytes in Z85."""
_NAME = re.compile("[A-Za-z0-9_-]{1,64}")
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_MAX_ANSWERS = 64
"""Maximum number of questions answered in one turn of the core's loop."""
_REREAD_S = 1.0
"""Seconds for which the list of clients is used before it is read again."""
_LONGEST_ADDRESS = 64
_REPORT_S = 60.0
"""Shortest time between two lines about clients that are refused."""

log = logging.getLogger("troika.transport")


class ServerKeys(NamedTuple):
    """What the core needs to listen."""

    public: bytes
    secret: bytes
    directory: Path
    """The directory that holds the public keys of clients."""


class ClientKeys(NamedTuple):
    """What a client needs to connect."""

    public: bytes
    secret: bytes
    server: bytes
    """The core's public key: nothing else answers under it."""


def make_keys(directory: Path, names: list[str]) -> list[Path]:
    """Make the pairs that are not there yet; returns the files that were written.

    ValueError: a name is not made of letters, digits, hyphens and underscores.
    """
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"the name {name!r} must be 1 to 64 letters, digits, - or _")
    (directory / CLIENTS).mkdir(mode=0o700, parents=True, exist_ok=True)
    written = []
    for base in (directory / SERVER, *(directory / CLIENTS / name for name in names)):
        if base.with_suffix(_PUBLIC).exists():
            continue
        public, secret = zmq.curve_keypair()
        # A secret without its public key, as of an interrupted call, was never in use.
        for suffix, key in ((_SECRET, secret), (_PUBLIC, public)):
            path = base.with_suffix(suffix)
            _write(path, key)
            written.append(path)
    return written


def _write(path: Path, key: bytes) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(key + b"\n")
    draft.replace(path)


def read_server_keys(directory: Path) -> ServerKeys:
    """Return the core's keys; ValueError: a file is missing, or is not a key."""
    base = directory / SERVER
    public, secret = _read(base.with_suffix(_PUBLIC)), _read(base.with_suffix(_SECRET))
    return ServerKeys(public, secret, directory / CLIENTS)


def read_client_keys(directory: Path) -> ClientKeys:
    """Return the keys of the only client whose secret is there; errors as `read_server_keys`."""
    secrets = sorted((directory / CLIENTS).glob(f"*{_SECRET}"))
    if len(secrets) != 1:
        names = ", ".join(path.name for path in secrets) or "none"
        raise ValueError(
            f"{directory / CLIENTS} must have the secret key of one client, the one that runs here,"
            f" and has {names} (docs/machines.md#keys)"
        )
    public, secret = _read(secrets[0].with_suffix(_PUBLIC)), _read(secrets[0])
    return ClientKeys(public, secret, _read((directory / SERVER).with_suffix(_PUBLIC)))


def read_engine_keys(directory: Path) -> ClientKeys:
    """Return the keys with which an engine connects to a block server; errors as above.

    These are the pair of all engines, or where that is not, as beside an API, the client's.
    """
    if not (directory / SERVER).with_suffix(_SECRET).exists():
        return read_client_keys(directory)
    keys = read_server_keys(directory)
    return ClientKeys(keys.public, keys.secret, keys.public)


def _read(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if len(key) != _KEY_CHARS:
        raise ValueError(f"{path} must have a key of {_KEY_CHARS} characters")
    return key


class ClientAuthenticator:
    """Decides which clients of other machines may connect, by their keys."""

    def __init__(
        self, context: SocketFactory, directory: Path, engines: bytes | None = None
    ) -> None:
        """Answer for all sockets of a context; `directory` has a file for each client.

        `engines`: the public key of engines, which may connect, too.
        """
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP_ADDRESS)
        self._directory = directory
        self._engines = engines
        self._known: dict[bytes, str] = {}
        self._known_until = 0.0
        self._unreadable: set[Path] = set()
        """Files that were reported."""
        self.num_refused = 0
        self._report_at = 0.0

    def answer(self) -> None:
        """Answer the questions that have arrived, a bounded number of them."""
        for _ in range(_MAX_ANSWERS):
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.socket.send_multipart(self._answer(parts))

    def _answer(self, parts: list[bytes]) -> list[bytes]:
        version, number = [*parts, b"", b""][:2]
        name = None
        if version == _ZAP_VERSION and len(parts) == 7 and parts[5] == b"CURVE":
            name = self._clients().get(z85.encode(parts[6]))
        if name is None:
            self.num_refused += 1
            self._report(parts)
            return [_ZAP_VERSION, number, b"400", b"unknown client", b"", b""]
        return [_ZAP_VERSION, number, b"200", b"OK", name.encode(), b""]

    def _report(self, parts: list[bytes]) -> None:
        now = time.monotonic()
        if now < self._report_at or len(parts) < 4:
            return
        self._report_at = now + _REPORT_S
        address = parts[3][:_LONGEST_ADDRESS].decode("ascii", "replace")
        log.warning(
            "a client at %s was refused: no file in %s has its key", address, self._directory
        )

    def _clients(self) -> dict[bytes, str]:
        """Return the names of clients by key; a file that is added or removed counts soon."""
        now = time.monotonic()
        if now >= self._known_until:
            self._known_until = now + _REREAD_S
            self._known = {} if self._engines is None else {self._engines: SERVER}
            for path in self._directory.glob(f"*{_PUBLIC}"):
                self._add(path)
        return self._known

    def _add(self, path: Path) -> None:
        try:
            self._known[_read(path)] = path.stem
            self._unreadable.discard(path)
        except ValueError as error:
            if path not in self._unreadable:
                self._unreadable.add(path)
                log.warning("a client cannot connect: %s", error)
