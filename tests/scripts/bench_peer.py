"""A server with OpenAI's API that streams as many chunks as it is asked for, or fails."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

ERROR_TEXT = "the peer has no memory left"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fault = ""
    prompts: list[tuple[int, ...]] = []

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"data": [{"id": "peer-model"}]}).encode())

    def do_POST(self) -> None:
        size = int(self.headers["content-length"])
        body = json.loads(self.rfile.read(size))
        num_tokens = body["max_tokens"]
        self.prompts.append(tuple(body["prompt"]))
        if self.fault == "status":
            self._answer(503, ERROR_TEXT.encode())
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if self.fault == "short":
            num_tokens -= 1
        for index in range(num_tokens):
            if self.fault == "event" and index == num_tokens // 2:
                self._event({"error": {"message": ERROR_TEXT}})
            if self.fault != "no text":
                self._event({"choices": [{"text": "a"}]})
            elif body.get("return_token_ids"):
                self._event({"choices": [{"text": "", "token_ids": [index]}]})
        if self.fault != "no usage":
            self._event({"choices": [], "usage": {"completion_tokens": num_tokens}})
        self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        self.close_connection = True

    def _event(self, content: dict[str, Any]) -> None:
        data = f"data: {json.dumps(content)}\n\n".encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


class Peer(NamedTuple):
    """A server that runs."""

    url: str
    prompts: list[tuple[int, ...]]
    """Those of all requests so far."""


@contextmanager
def peer(fault: str = "") -> Iterator[Peer]:
    """Run a server.

    Faults: "status" (503), "event" (an error within a stream), "short" (a token is missing),
    "no usage" (the stream has no count), "no text" (tokens have ids alone, sent if asked for).
    """
    prompts: list[tuple[int, ...]] = []
    handler = type("Handler", (_Handler,), {"fault": fault, "prompts": prompts})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield Peer(f"http://127.0.0.1:{server.server_port}", prompts)
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
