"""Prints what crosses the wire: `python -m scripts.wiretap` runs streams on a core and a worker.

Both are processes with the null model; their connections pass through this one. A frame is one
line: direction, bytes of header and body, message type (or the flag of a frame without a message),
and the fields that differ from their defaults.
"""

import argparse
import contextlib
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from protocol import api_core, core_worker
from protocol.client.sync_client import EngineClient
from protocol.message import ProtocolError, unpack_header
from protocol.process.run_dir import client_address
from protocol.sampling import SamplingParams
from protocol.transport.frame_sequence import Flag
from scripts.testing import eventually

_GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4
_TIMEOUT_S = 30.0
_SETTINGS = ("--model", "null", "--null-step-ms", "50", "--log-level", "error", "--run-dir")
Decode = Callable[[bytes], object]
_Way = tuple[socket.socket, socket.socket, str, Decode]
_LINKS: dict[str, tuple[str, Decode, Decode]] = {
    "core.sock": ("client", api_core.decode_from_client, api_core.decode_from_core),
    "workers.sock": ("worker", core_worker.decode_from_worker, core_worker.decode_from_core),
}


class MessageSplitter:
    """Cuts one direction of a ZMTP 3 connection into messages; commands are skipped."""

    def __init__(self) -> None:
        self._unread = bytearray()
        self._to_skip = _GREETING_BYTES
        self._parts: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[list[bytes]]:
        """Yield the parts of each message that is complete with `data`."""
        self._unread += data
        num_skipped = min(self._to_skip, len(self._unread))
        del self._unread[:num_skipped]
        self._to_skip -= num_skipped
        while self._unread:
            flags = self._unread[0]
            start = 9 if flags & _LONG else 2
            end = start + int.from_bytes(self._unread[1:start])
            if len(self._unread) < max(start, end):
                return
            part = bytes(self._unread[start:end])
            del self._unread[:end]
            if not flags & _COMMAND:
                self._parts.append(part)
                if not flags & _MORE:
                    yield self._parts
                    self._parts = []


def tap(name: str, front: Path, back: Path) -> None:
    """Listen at socket `name` in directory `front`, and pass everything on to the one in `back`."""
    peer, decode_from_peer, decode_from_core = _LINKS[name]
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(front / name))
    listening.listen()

    def accept() -> None:
        while True:
            near, _ = listening.accept()
            far = socket.socket(socket.AF_UNIX)
            far.connect(str(back / name))
            inwards = (near, far, f"{peer} → core", decode_from_peer)
            outwards = (far, near, f"core → {peer}", decode_from_core)
            threading.Thread(target=_relay, args=(inwards, outwards), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def _relay(inwards: _Way, outwards: _Way) -> None:
    """Pass on both directions of a connection, and close its sockets when both have ended."""
    returning = threading.Thread(target=_pump, args=outwards, daemon=True)
    with inwards[0], outwards[0]:
        returning.start()
        _pump(*inwards)
        returning.join()


def _pump(source: socket.socket, sink: socket.socket, direction: str, decode: Decode) -> None:
    splitter = MessageSplitter()
    with contextlib.suppress(ConnectionError):
        while data := source.recv(2**16):
            for parts in splitter.feed(data):
                line = f"{direction:16} {sum(map(len, parts)):5} B  {describe(parts, decode)}"
                print(line[:160] + "\n", end="", flush=True)  # lines of two threads do not mix
            sink.sendall(data)
    for end in (source, sink):  # the opposite direction ends too
        with contextlib.suppress(OSError):  # its peer has disconnected
            end.shutdown(socket.SHUT_RDWR)


def describe(parts: list[bytes], decode: Decode) -> str:
    """Return the type and the fields of a message that has the parts header and body."""
    try:
        flags = Flag(unpack_header(*parts).flags) & ~Flag.BEGINS
        return f"{flags.name}" if flags else shown(decode(parts[1]))
    except (ProtocolError, TypeError) as error:
        return f"unreadable: {error}"


def shown(value: object) -> str:
    """Return a message without the fields that are empty or have their defaults."""
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    if not isinstance(value, msgspec.Struct):
        return f"{len(value)} bytes" if isinstance(value, bytes) else str(value)
    items = [(field, getattr(value, field.name)) for field in msgspec.structs.fields(value)]
    fields = [(f.name, shown(item)) for f, item in items if item not in (f.default, [], {})]
    texts = [f"{name}={text}" for name, text in fields if not text.endswith("()")]
    return f"{type(value).__name__}({', '.join(texts)})"


def run(streams: int, tokens: int) -> None:
    """Start a core and a worker with taps before the core, and run streams to their ends."""
    with contextlib.ExitStack() as stack:
        front, back = (Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2))
        _start("core_proc", back, stack)
        for name in _LINKS:
            eventually((back / name).exists, f"the core listens at {name}", _TIMEOUT_S)
            tap(name, front, back)
        _start("worker_proc", front, stack)
        with EngineClient(client_address(str(front))) as client:
            client.wait_ready(_TIMEOUT_S)
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            for stream in [client.submit([5, 6, number], params) for number in range(streams)]:
                stream.result(_TIMEOUT_S + tokens)


def _start(module: str, run_dir: Path, stack: contextlib.ExitStack) -> None:
    command = [sys.executable, "-m", module, *_SETTINGS, str(run_dir)]
    stack.callback(stack.enter_context(subprocess.Popen(command)).kill)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m scripts.wiretap", description=__doc__)
    parser.add_argument("--streams", type=int, default=2, help="requests at a time (default: 2)")
    parser.add_argument("--tokens", type=int, default=8, help="of each request (default: 8)")
    run(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    main()
