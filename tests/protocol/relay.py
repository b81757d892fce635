"""A relay in the middle of a link that can break connections, unlike a test's own socket."""

import contextlib
import selectors
import socket
import threading
from types import TracebackType

_LOOK_S = 0.005
_CHUNK_BYTES = 2**16


class Relay:
    """Listens at one path and forwards all bytes to another, both ways, until it is closed."""

    def __init__(self, front: str, back: str) -> None:
        """Listen at the path `front`; each connection is forwarded to the path `back`."""
        self._back = back
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(front)
        self._listening.listen()
        self._others: dict[socket.socket, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._is_cut = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Relay":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join(30.0)
        assert not self._thread.is_alive()

    def cut(self) -> None:
        """Break all connections soon; new ones may be made at once."""
        self._is_cut.set()

    def _run(self) -> None:
        while not self._is_over.is_set():
            for key, _ in self._selector.select(_LOOK_S):
                end = key.fileobj
                assert isinstance(end, socket.socket)
                if end is self._listening:
                    self._accept()
                elif end in self._others:
                    self._pass_on(end)
            if self._is_cut.is_set():
                self._is_cut.clear()
                self._break_all()
        self._break_all()
        self._selector.close()
        self._listening.close()

    def _accept(self) -> None:
        near, _ = self._listening.accept()
        far = socket.socket(socket.AF_UNIX)
        try:
            far.connect(self._back)
        except OSError:
            near.close()
            far.close()
            return
        for one, other in ((near, far), (far, near)):
            self._others[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _pass_on(self, end: socket.socket) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = end.recv(_CHUNK_BYTES)
            self._others[end].sendall(data)
        if not data:
            self._break(end)

    def _break_all(self) -> None:
        while self._others:
            self._break(next(iter(self._others)))

    def _break(self, end: socket.socket) -> None:
        for one in (end, self._others[end]):
            del self._others[one]
            self._selector.unregister(one)
            one.close()
