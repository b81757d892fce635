"""Runs the application under uvicorn inside this process, which keeps its signals to itself."""

import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

BACKLOG = 2048
_KEEP_ALIVE_S = 75
_STOP_TIMEOUT_S = 5


class HttpServer(uvicorn.Server):
    """A uvicorn that installs no signal handlers: whoever owns the process stops it."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_STOP_TIMEOUT_S,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    def stop(self) -> None:
        """Take no more connections, finish open ones, and return from `serve`."""
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """Bind and listen; port 0 takes any free one.

    Raises:
        OSError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def adopt(listen_fd: int) -> socket.socket:
    """Use a listening socket that was inherited."""
    listening = socket.socket(fileno=listen_fd)
    listening.setblocking(False)
    return listening


def url_of(listening: socket.socket) -> str:
    """Where clients find the server."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
