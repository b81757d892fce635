"""Two API processes of one engine, as servers in threads of this process, and their clients."""

import asyncio
import json
import re
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import httpx

from api_proc.app import peer_app, start_sessions
from api_proc.http.connection import KEEP_ALIVE_INTERVAL_S
from api_proc.http.listener import listen_unix
from api_proc.http.request_ids import RequestIds
from api_proc.http.server import HttpServer
from api_proc.peers.directory import Directory
from api_proc.peers.peers import Peers
from api_proc.peers.shared_counters import SharedCounters
from protocol.config.settings import configure
from tests.api.fake_engine import FakeClient, LiveServer

COUNT = 2


class PeerServer(LiveServer):
    """One API process of two, in a thread of this one."""

    def __init__(
        self,
        run_dir: str,
        index: int,
        epoch: int,
        *,
        keep_alive_interval_s: float = KEEP_ALIVE_INTERVAL_S,
        **settings: Any,
    ) -> None:
        self._directory = Directory(run_dir, index, epoch)
        config = configure(**({"model": "null", "api_server_count": COUNT} | settings))
        counters = SharedCounters(run_dir, index, COUNT)
        super().__init__(
            config,
            FakeClient(),
            index=index,
            counters=counters,
            keep_alive_interval_s=keep_alive_interval_s,
        )
        self._has_ended = False

    def __exit__(self, *_: object) -> None:
        if not self._has_ended:
            self._has_ended = True
            super().__exit__()

    async def _serve(self) -> None:
        await start_sessions(self.state)
        self.state.peers = Peers(self._directory, self.state.ids, owner_timeout_s=2.0)
        peer_server = HttpServer(peer_app(self.state))
        work = peer_server.serve(sockets=[self._directory.listen()])
        serving = asyncio.create_task(work)
        await super()._serve()
        peer_server.stop()
        await serving
        if self.state.sessions is not None:
            self.state.sessions.close()


class Pair:
    """Two servers in one run directory."""

    def __init__(self, stack: ExitStack, **settings: Any) -> None:
        self.run_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="troika-test-"))
        self.servers = [
            stack.enter_context(PeerServer(self.run_dir, index, epoch=10 + index, **settings))
            for index in range(COUNT)
        ]
        self.http = [
            stack.enter_context(httpx.Client(base_url=live.url, timeout=10))
            for live in self.servers
        ]

    def pause(self, *, is_paused: bool) -> None:
        for live in self.servers:
            live.client.is_paused = is_paused

    def num_submitted(self) -> list[int]:
        return [len(live.client.requests) for live in self.servers]


MakePair = Callable[..., Pair]


class Background:
    """A POST whose answer is read in a thread."""

    def __init__(self, http: httpx.Client, body: dict[str, Any], **headers: str) -> None:
        self.text = ""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.error: Exception | None = None
        self._arguments = (http, body, {key.replace("_", "-"): v for key, v in headers.items()})
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        http, body, headers = self._arguments
        try:
            with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                self.headers = dict(response.headers)
                self.status = response.status_code
                for text in response.iter_text():
                    self.text += text
        except httpx.HTTPError as error:
            self.error = error

    def end(self) -> str:
        self._thread.join(10)
        assert not self._thread.is_alive()
        return self.text


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 20, "stream": True, "seed": 1} | fields


def id_owned_by(index: int) -> str:
    ids = RequestIds(0, COUNT)
    return next(name for name in map(str, range(99)) if ids.owner_of(f"job-{name}") == index)


def value(http: httpx.Client, name: str) -> float:
    text = http.get("/metrics").text
    found = re.search(rf"^troika[:_]{name}(?:_total)?{{[^}}]*}} ([0-9.e+-]+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def text_of(stream: str) -> str:
    data = re.findall(r"^data: (\{.*)$", stream, re.MULTILINE)
    return "".join(json.loads(each)["choices"][0]["text"] for each in data)


class Actor:
    """Listens as the owner of requests, and plays what is given."""

    def __init__(self, run_dir: str, index: int, epoch: int, answer: bytes) -> None:
        self._socket = listen_unix(f"{run_dir}/api{index}.{epoch:x}")
        self._answer = answer
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                connection, _ = self._socket.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(self._answer)
        except OSError:
            pass

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(5)
