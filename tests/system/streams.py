"""A client of server-sent events on plain sockets: it can stop reading, vanish and come back."""

import json
import re
import socket
import struct
import urllib.request
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from scripts.testing import TIMEOUT_S, Engine


class Event(NamedTuple):
    """One event of a stream."""

    data: str
    id: str | None

    @property
    def text(self) -> str:
        """Text of the first choice of a completion or a chat."""
        choices = json.loads(self.data).get("choices") if self.data != "[DONE]" else None
        if not choices:
            return ""
        choice = choices[0]
        return str(choice["text"] if "text" in choice else choice["delta"].get("content", ""))


class Stream:
    """One POST and its answer."""

    def __init__(
        self,
        url: str,
        body: dict[str, Any],
        *,
        path: str = "/v1/completions",
        headers: dict[str, str] | None = None,
        receive_buffer: int | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        address = urlsplit(url)
        assert address.hostname is not None
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(timeout_s)
        data = json.dumps(body).encode()
        head = {"Host": "x", "Content-Length": str(len(data)), **(headers or {})}
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
        try:
            self.socket.connect((address.hostname, address.port))
            self.socket.sendall("\r\n".join([*lines, "", ""]).encode() + data)
        except OSError:
            self.socket.close()
            raise
        self._received = b""
        self._events_data = b""
        self._has_ended = False
        self.status = 0
        self.headers: dict[str, str] = {}

    def read_head(self) -> int:
        """Read and return the status; the headers are kept."""
        if not self.status:
            head = self._until(b"\r\n\r\n").decode()
            first, *lines = head.splitlines()
            self.status = int(first.split()[1])
            pairs = (line.split(":", 1) for line in lines if ":" in line)
            self.headers = {name.lower(): value.strip() for name, value in pairs}
        return self.status

    def event(self) -> Event | None:
        """Return the next event; None at the end, or where the connection breaks."""
        self.read_head()
        if self._has_ended:
            return None
        try:
            while True:
                size = int(self._until(b"\r\n"), 16)
                if size == 0:
                    self._has_ended = True
                    return None
                self._events_data += self._exactly(size + 2)[:-2]
                if self._has_event():
                    break
        except ConnectionError:
            self._has_ended = True
            return None
        return self._take()

    def _has_event(self) -> bool:
        return b"\n\n" in self._events_data

    def _take(self) -> Event:
        block, _, self._events_data = self._events_data.partition(b"\n\n")
        fields = dict(line.split(": ", 1) for line in block.decode().splitlines() if ": " in line)
        return Event(fields.get("data", ""), fields.get("id"))

    def events(self) -> list[Event]:
        """Return all remaining events and close the connection."""
        found = []
        while (event := self.next()) is not None:
            found.append(event)
        self.close()
        return found

    def next(self) -> Event | None:
        """Return the next event with data; None at the end, or where the connection breaks."""
        while True:
            event = self._take() if self._has_event() else self.event()
            if event is None or event.data:
                return event

    def body(self) -> bytes:
        """Return the body of an answer that has a length."""
        self.read_head()
        content = self._exactly(int(self.headers["content-length"]))
        self.close()
        return content

    def reset(self) -> None:
        """Close the connection with RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def close(self) -> None:
        """Close the connection with FIN."""
        self.socket.close()

    def _until(self, end: bytes) -> bytes:
        while end not in self._received:
            self._more()
        found, _, self._received = self._received.partition(end)
        return found

    def _exactly(self, count: int) -> bytes:
        while len(self._received) < count:
            self._more()
        found, self._received = self._received[:count], self._received[count:]
        return found

    def _more(self) -> None:
        piece = self.socket.recv(65536)
        if not piece:
            raise ConnectionError("closed by the server")
        self._received += piece


def metric(engine: Engine, name: str) -> float:
    """Return one value of /metrics."""
    with urllib.request.urlopen(engine.url() + "/metrics", timeout=TIMEOUT_S) as response:
        text = response.read().decode()
    found = re.search(rf"^troika[:_]{name}(?:_total)?{{[^}}]*}} ([0-9.e+-]+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])
