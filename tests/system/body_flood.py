"""Many large bodies at once, and what they do to the API: latency of /livez, memory, deaths.

`python -m tests.system.body_flood` prints the figures of each mix, with a short context, in which
long texts are refused, and with a long one and a real tokenizer. Names of bodies as arguments
choose some of them.
"""

import contextlib
import itertools
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from protocol.lifecycle import Role
from scripts.testing import Engine, EngineFactory
from tests.paths import DEMO_MODEL

SIZE = 4 * 2**20 - 300
ENGINES: Mapping[str, tuple[str, ...]] = {
    "short": ("--max-model-len", "8192"),
    "long": (
        *("--max-model-len", "1048576", "--num-gpu-blocks-override", "262144"),
        *("--tokenizer", str(DEMO_MODEL), "--tool-call-parser", "hermes"),
    ),
}
"""Flags of engines with the null model, by the length of their context."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_PROBE_S = 0.005
_TIMEOUT_S = 120.0


def _chat(**fields: object) -> bytes:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **fields}
    return json.dumps(body).encode()


def _calls(count: int, num_chars: int) -> dict[str, object]:
    arguments = json.dumps({"text": "x" * num_chars, "list": [1, 2]})
    function = {"name": "f", "arguments": arguments}
    call = {"id": "c", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call] * count}


def _tool(number: int, num_properties: int) -> dict[str, object]:
    properties = {f"property_{i}": {"type": "string"} for i in range(num_properties)}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": f"f{number}", "parameters": parameters}}


def _with_kwargs(inner: bytes) -> bytes:
    return _chat()[:-1] + b', "chat_template_kwargs": {"a": [%b]}}' % inner


def _filled(item: bytes) -> bytes:
    return b",".join([item] * (SIZE // (len(item) + 1)))


def _prompts(count: int, num_chars: int) -> bytes:
    return json.dumps({"prompt": ["x" * num_chars] * count, "max_tokens": 1}).encode()


@cache
def _large_ids() -> bytes:
    return b"".join(b"%d," % (256 + i) for i in range(3800)) * (SIZE // 5 // 3800)


BODIES: Mapping[str, tuple[str, Callable[[], bytes]]] = {
    "objects": (CHAT, lambda: _with_kwargs(_filled(b"{}"))),
    "names": (CHAT, lambda: _with_kwargs(_filled(b'{"a":1}'))),
    "some objects": (CHAT, lambda: _with_kwargs(b",".join([b"{}"] * 30_000))),
    "ids": (COMPLETIONS, lambda: b'{"prompt":[%b]}' % _filled(b"1")),
    "lists of ids": (COMPLETIONS, lambda: b'{"prompt":[%b]}' % _filled(b"[%b1]" % (b"7," * 1999))),
    "text": (COMPLETIONS, lambda: b'{"prompt":"%b"}' % (b"a" * SIZE)),
    "wide text": (COMPLETIONS, lambda: b'{"prompt":"%b"}' % ("a" * (SIZE - 9) + "🙂").encode()),
    "escapes": (COMPLETIONS, lambda: b'{"prompt":"%b"}' % (b"\\n" * (SIZE // 2))),
    "prompts": (COMPLETIONS, lambda: _prompts(2048, 1980)),
    "messages": (CHAT, lambda: _chat(messages=[{"role": "user", "content": "x" * 900}] * 4096)),
    "ids of a large vocabulary": (
        COMPLETIONS,
        lambda: b'{"prompt":[%b3]}' % _large_ids(),
    ),
    "long lists of ids": (
        COMPLETIONS,
        lambda: b'{"prompt":[%b],"max_tokens":1}' % _filled(b"[%b3]" % _large_ids()[:40_000]),
    ),
    "ids for a vector": ("/v1/embeddings", lambda: b'{"input":[%b3]}' % _large_ids()),
    "ids for a text": ("/detokenize", lambda: b'{"tokens":[%b3]}' % _large_ids()),
    "prose": (
        COMPLETIONS,
        lambda: (
            b'{"prompt":"%b","max_tokens":1}' % (b"The quick brown fox jumps. " * (SIZE // 27 - 2))
        ),
    ),
    "literal": (
        COMPLETIONS,
        lambda: b'{"prompt":"%b","parse_special":false}' % (b"<|endoftext|>" * (SIZE // 13 - 4)),
    ),
    "chat": (
        CHAT,
        lambda: _chat(messages=[{"role": "user", "content": "<|endoftext|> a" * (SIZE // 15)}]),
    ),
    "calls": (CHAT, lambda: _chat(messages=[{"role": "user", "content": "x"}, _calls(1024, 3900)])),
    "tools": (CHAT, lambda: _chat(tools=[_tool(i, 200) for i in range(60)])),
    "template": (
        "/apply-template",
        lambda: _chat(messages=[{"role": "user", "content": "é" * (SIZE // 6 - 20)}]),
    ),
    "tokenize": ("/tokenize", lambda: b'{"prompt":"%b"}' % (b"a b " * 250_000)),
}
"""The route of each kind of body, and a function that makes it: together they take 80 MB."""


@cache
def body_of(kind: str) -> tuple[str, bytes]:
    """Return the route and a body of this kind."""
    path, make = BODIES[kind]
    return path, make()


class Figures(NamedTuple):
    """What a flood did."""

    livez_p99_s: float
    livez_max_s: float
    growth_mib: float
    statuses: dict[int, int]
    seconds: float


def requests(base: str, names: list[str], count: int) -> Iterator[tuple[str, int, bytes]]:
    """Yield host, port and bytes of `count` requests that take turns among these bodies."""
    url = urlsplit(base)
    for i in range(count):
        path, body = body_of(names[i % len(names)])
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        yield (
            str(url.hostname),
            int(url.port or 0),
            f"{head}Connection: close\r\n\r\n".encode() + body,
        )


def _send(host: str, port: int, data: bytes, statuses: list[int]) -> None:
    try:
        with socket.create_connection((host, port), timeout=_TIMEOUT_S) as connection:
            with contextlib.suppress(OSError):  # the server may reject it before its end
                connection.sendall(data)
            received = connection.recv(65536)
            statuses.append(int(received.split(b" ", 2)[1]) if received else 0)
            while connection.recv(65536):
                pass
    except (OSError, IndexError):
        statuses.append(0)


def flood(engine: Engine, names: list[str], count: int) -> Figures:
    """Send `count` bodies at once, and probe /livez meanwhile."""
    url, pid = engine.url(), engine.pid(Role.API)
    before = memory_mib(pid, "VmRSS")
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the peak
    statuses: list[int] = []
    threads = [
        threading.Thread(target=_send, args=(*request, statuses))
        for request in requests(url, names, count)
    ]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    lags = list(_probe(url, threads))
    seconds = time.monotonic() - began
    for thread in threads:
        thread.join()
    growth = memory_mib(pid, "VmHWM") - before
    by_status = {status: statuses.count(status) for status in sorted(set(statuses))}
    p99 = sorted(lags)[int(len(lags) * 0.99)]
    return Figures(p99, max(lags), growth, by_status, seconds)


def _probe(url: str, threads: list[threading.Thread]) -> Iterator[float]:
    """Yield the latency of /livez over one connection while the threads run."""
    parts = urlsplit(url)
    address = (str(parts.hostname), int(parts.port or 0))
    with socket.create_connection(address, timeout=_TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while any(thread.is_alive() for thread in threads):
            began = time.perf_counter()
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            if not connection.recv(65536):
                raise ConnectionError("the server closed the connection")
            yield time.perf_counter() - began
            time.sleep(_PROBE_S)


def memory_mib(pid: int, field: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) / 1024


def main() -> None:
    chosen = sys.argv[1:]
    mixes = [[name] for name in chosen or BODIES] + ([] if chosen else [list(BODIES)])
    for context, count in itertools.product(ENGINES, (1, 12, 62)):
        for names in mixes:
            with EngineFactory() as start:
                engine = start(*ENGINES[context])
                engine.readiness()
                pids = {role: engine.pid(role) for role in (Role.API, Role.CORE, Role.WORKER)}
                label = f"{context:5s} {count:3d} x {'all' if len(names) > 1 else names[0]:25s}"
                try:
                    found = flood(engine, names, count)
                except OSError as error:
                    print(label, "the API failed:", error, flush=True)
                    continue
                died = [role for role, pid in pids.items() if engine.pid(role) != pid]
                print(
                    f"{label} livez p99 {found.livez_p99_s * 1e3:6.1f} max "
                    f"{found.livez_max_s * 1e3:6.1f} ms, growth {found.growth_mib:5.0f} MiB, "
                    f"{found.seconds:5.1f} s, {found.statuses}, died {died}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
