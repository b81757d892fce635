"""The socket that clients connect to: TCP, or a Unix socket that only this user can open."""

import errno
import os
import socket
import stat
from pathlib import Path

from protocol.config import ApiConfig
from protocol.process.run_dir import MAX_IPC_PATH_BYTES

BACKLOG = 2048
_PROBE_TIMEOUT_S = 1.0


def open_listener(api: ApiConfig) -> socket.socket:
    """Listen as configured; an OSError or ValueError has the reason why that is not possible."""
    if api.uds is not None:
        return listen_unix(api.uds)
    addresses = socket.getaddrinfo(api.host, api.port, type=socket.SOCK_STREAM)
    family, _, _, _, address = addresses[0]
    return socket.create_server(address[:2], family=family, backlog=BACKLOG)


def listen_unix(path: str) -> socket.socket:
    """Listen on a new socket file of mode 0600, in place of one that no process listens on."""
    path = os.path.abspath(path)
    if len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
        raise ValueError(f"the path has more than {MAX_IPC_PATH_BYTES} bytes")
    Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_stale(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listening.bind(path)
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    finally:
        os.umask(mask)
    return listening


def _remove_stale(path: str) -> None:
    """Remove the socket file of a server that was killed."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ValueError("there is a file that is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except (BlockingIOError, TimeoutError):
            pass  # its queue is full
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def close_listener(listening: socket.socket) -> None:
    """Close the socket, and remove its file unless another server has taken the path."""
    address = listening.getsockname()
    if isinstance(address, str) and os.path.exists(address):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            listening.close()
            try:
                probe.connect(address)
            except ConnectionRefusedError:
                os.unlink(address)
            except OSError:
                pass
    listening.close()


def url_of(listening: socket.socket, *, is_tls: bool = False) -> str:
    """Return the root of the server's URLs; for a Unix socket `unix:PATH`."""
    address = listening.getsockname()
    if isinstance(address, str):
        return f"unix:{address}"
    host, port = address[:2]
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def api_root(url: str) -> str:
    """Return what an OpenAI client takes as its base URL; a Unix socket has only its path."""
    return url if url.startswith("unix:") else f"{url}/v1"
