"""Raw HTTP requests: bodies from the OpenAPI document, in heads that are damaged now and then."""

import random
from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.fuzz.bodies import Bodies, damaged, encoded
from tests.fuzz.mutation import edited

_METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT", "PRI", "get")
_TARGETS = (
    *("{path}?x=1&x=2", "/{path}", "{path}/", "{path}#a", "http://x{path}", "{path}%00", "*"),
    *("/%2e{path}", "{path}/../livez", "/v1/models/%ff", "/", "/nowhere", "\x7f"),
    "/v1/models/" + "a" * 3000,
)
_VERSIONS = ("HTTP/1.0", "HTTP/1.2", "HTTP/2.0", "HTTP/0.9", "http/1.1", "")
_HEADERS = (
    *(b"X-Request-Id: abc-1", b"X-Request-Id: \xff\xfe", b"X-Request-Id: " + b"i" * 500),
    *(b"Last-Event-ID: x.5", b"Last-Event-ID: abc-1.7-3-u", b"Authorization: Bearer \xc3\xa9"),
    *(b"Expect: 100-continue", b"Content-Encoding: gzip", b"Content-Encoding: identity"),
    *(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"Upgrade: websocket"),
    *(b"Accept: text/event-stream", b"Accept-Encoding: gzip", b"Origin: http://evil"),
    *(b"Content-Type: text/plain", b"Content-Type: application/json; charset=utf-16"),
    *(b"Cookie: " + b"c" * 5000, b"X: \t", b"Forwarded: for=1", b"X-Forwarded-Host: x/?#"),
    *(b"Idempotency-Key: 1", b"Range: bytes=0-1", b"If-None-Match: *", b"Host: y"),
)
_LENGTHS = (b"-1", b"+5", b"0x5", b"5, 5", b"9" * 20, b"", b"1e3", b"5\r\nContent-Length: 6")
_CODINGS = (b"chunked, chunked", b"gzip, chunked", b"identity", b"\x0bchunked", b"")
_SIZES = (b"f" * 16 + b"1", b"-1", b"g", b"", b"5;a=b", b" 5", b"0x5", b"0" * 20 + b"5")


class Case(NamedTuple):
    """What one connection sends."""

    pieces: list[bytes]
    """Written one after the other."""
    is_whole: bool
    """The server can see where each request ends, so each has a response."""
    is_left: bool
    """The client leaves with a reset once all is sent."""


class Cases:
    """Makes the cases of one seed, each by its number."""

    def __init__(self, document: Mapping[str, Any], seed: int) -> None:
        self._seed = seed
        self._bodies = Bodies(document)
        self._operations = [
            (method.upper(), path, operation)
            for path, methods in sorted(document["paths"].items())
            for method, operation in sorted(methods.items())
        ]
        self._weights = [5 if "requestBody" in op else 1 for _, _, op in self._operations]

    def case(self, number: int) -> Case:
        """Return a case; the same number gives the same bytes."""
        rng = random.Random(f"{self._seed}/{number}")
        num_requests = 1 + (rng.random() < 0.04) * int(rng.random() * 4)
        parts, is_whole = [], True
        for place in range(num_requests):
            head, body, is_framed = self._request(rng, is_last=place == num_requests - 1)
            is_whole = is_whole and is_framed
            if rng.random() < 0.06:
                head, is_whole = edited(head, rng), False
            parts.append(head + body)
        data = b"".join(parts)
        if rng.random() < 0.03:
            data, is_whole = data[: int(rng.random() * len(data))], False
        pieces = [data]
        if rng.random() < 0.1:
            place = int(rng.random() * len(data))
            pieces = [data[:place], data[place:]]
        return Case(pieces, is_whole, rng.random() < 0.03)

    def _request(self, rng: random.Random, *, is_last: bool) -> tuple[bytes, bytes, bool]:
        """Return head, body, and whether both are valid HTTP."""
        [(method, path, operation)] = rng.choices(self._operations, self._weights)
        body = b""
        if "requestBody" in operation:
            content = operation["requestBody"]["content"]["application/json"]
            value = self._bodies.draw(content["schema"], content.get("example"), rng)
            for _ in range(int(rng.random() * 4) * (rng.random() < 0.5)):
                value = damaged(value, rng)
            body = encoded(value, rng)
        version, is_valid = "HTTP/1.1", True
        target = path.replace("{name}", "null")
        if rng.random() < 0.05:
            method, is_valid = rng.choice(_METHODS), False
        if rng.random() < 0.07:
            target, is_valid = rng.choice(_TARGETS).replace("{path}", target), False
        if rng.random() < 0.02:
            version, is_valid = rng.choice(_VERSIONS), False
        lines = [f"{method} {target} {version}".encode("latin-1")]
        lines += [b"Host: x"] * (rng.random() < 0.98)
        lines += rng.choices(_HEADERS, k=int(rng.random() * 3)) if rng.random() < 0.25 else []
        if is_last:
            lines.append(b"Connection: close")
        if body or method == "POST":
            line, body, is_framed = _framed(body, rng)
            lines.append(line)
            is_valid = is_valid and is_framed
        # An upgrade, or a client that waits for 100, is another conversation.
        is_plain = not any(
            line.startswith((b"Upgrade", b"Connection: U", b"Expect")) for line in lines
        )
        return b"\r\n".join([*lines, b"", b""]), body, is_valid and is_plain


def _framed(body: bytes, rng: random.Random) -> tuple[bytes, bytes, bool]:
    """Return a header with the length or coding of a body, the body, and whether they agree."""
    kind = rng.random()
    if kind < 0.03:
        return b"Content-Length: " + rng.choice(_LENGTHS), body, False
    if kind < 0.05:
        return b"Transfer-Encoding: " + rng.choice(_CODINGS), _chunked(body, rng), False
    if kind < 0.07:
        return b"Transfer-Encoding: chunked", rng.choice(_SIZES) + b"\r\n" + body + b"\r\n", False
    if kind < 0.2:
        return b"Transfer-Encoding: chunked", _chunked(body, rng), True
    if kind < 0.22:
        return b"Content-Length: %d" % (len(body) + rng.choice((-1, 1, 100))), body, False
    return b"Content-Length: %d" % len(body), body, True


def _chunked(body: bytes, rng: random.Random) -> bytes:
    size = 1 + int(rng.random() * max(1, len(body)))
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
