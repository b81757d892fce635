"""The sockets by which the API processes of one engine reach each other, in its run directory.

A socket's name has the index of its process, and its epoch in hexadecimal: it is short, as the
system bounds the path. Two sockets have one index while a predecessor finishes its requests.
"""

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from api_proc.http.listener import listen_unix
from api_proc.peers.shared_counters import FILE_NAME

_NAME = re.compile(r"api(\d{1,2})\.([0-9a-f]{1,8})")


@dataclass(frozen=True, slots=True)
class Peer:
    """The socket of a process, which may be dead."""

    index: int
    epoch: int
    path: str


class Directory:
    """The sockets in one run directory, as one process sees them."""

    def __init__(self, run_dir: str, index: int, epoch: int) -> None:
        self._run_dir = Path(run_dir)
        self._index = index
        self._epoch = epoch
        self._path = self._run_dir / f"api{index}.{epoch:x}"
        self._is_listening = False

    @property
    def was_removed(self) -> bool:
        """Whether the own socket file was removed while this process listens."""
        return self._is_listening and not self._path.exists()

    def listen(self) -> socket.socket:
        """Listen for the other processes, and remove sockets of dead predecessors."""
        for peer in self.of(self._index):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.setblocking(False)
                try:
                    probe.connect(peer.path)
                except ConnectionRefusedError:
                    Path(peer.path).unlink(missing_ok=True)
                except OSError:
                    pass  # its queue is full, or it was just removed
        listening = listen_unix(str(self._path))
        self._is_listening = True
        return listening

    def leave(self) -> None:
        """Remove the own socket; connections to it stay open."""
        self._is_listening = False
        self._path.unlink(missing_ok=True)

    def others(self) -> list[Peer]:
        """Return all sockets but this process's own, the newest first."""
        found = _sockets(self._run_dir)
        own = (self._index, self._epoch)
        others = [peer for peer in found if (peer.index, peer.epoch) != own]
        return sorted(others, key=lambda peer: -peer.epoch)

    def of(self, index: int) -> list[Peer]:
        """Return the other sockets with an index, the newest first."""
        return [peer for peer in self.others() if peer.index == index]


def remove_all(run_dir: str) -> None:
    """Remove what the processes of an earlier engine have left in its run directory."""
    paths = [peer.path for peer in _sockets(Path(run_dir))]
    for path in (*paths, f"{run_dir}/{FILE_NAME}"):
        Path(path).unlink(missing_ok=True)


def _sockets(run_dir: Path) -> list[Peer]:
    try:
        names = [(_NAME.fullmatch(entry.name), entry.path) for entry in os.scandir(run_dir)]
    except FileNotFoundError:  # the directory was removed with the engine
        return []
    return [Peer(int(name[1]), int(name[2], 16), path) for name, path in names if name]
