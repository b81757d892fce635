"""The origin of a request: the API key or the address that it came from."""

import ipaddress

from starlette.types import Scope

from api_proc.http.scope import ORIGIN_KEY

UNIX_SOCKET = "unix socket"
"""The origin of all clients of a Unix socket, at each API process."""
ORIGIN_HEADER = b"x-troika-origin"
"""The origin of a request that another API process has forwarded."""


def origin_of(scope: Scope, *, is_forwarded: bool) -> str:
    """Return the origin of a request, or `UNIX_SOCKET`.

    `is_forwarded`: another API process has sent the request, and names its origin.
    """
    if (key := scope.get(ORIGIN_KEY)) is not None:
        return str(key)
    if is_forwarded:
        origin: bytes = dict(scope["headers"]).get(ORIGIN_HEADER, b"")
        return origin.decode()
    host = (scope.get("client") or ("", 0))[0]
    return _network(host) or UNIX_SOCKET


def _network(host: str) -> str:
    """Return an IPv4 address, or the network of an IPv6 address, whose host part is free to choose.

    Any other text is returned as it is.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host[:64]
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    mapped = address.ipv4_mapped
    return str(mapped or ipaddress.IPv6Network((address, 64), strict=False))
