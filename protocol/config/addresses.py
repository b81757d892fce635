"""Addresses of cores on other machines: tcp://HOST:PORT with a host name or an IPv4 address."""

import re

_HOST = "[A-Za-z0-9]([A-Za-z0-9._-]{0,253}[A-Za-z0-9])?"
TCP_ADDRESS = rf"^tcp://{_HOST}:[1-9][0-9]{{0,4}}\Z"
"""What libzmq can connect to, but for ports beyond 65535: see `check_tcp_address`."""
LISTEN_ADDRESS = rf"^([*]|{_HOST}):[1-9][0-9]{{0,4}}\Z"
"""HOST:PORT; the host may be `*`, all of this machine's."""
_PATTERN = re.compile(TCP_ADDRESS)


def is_remote(address: str) -> bool:
    """Return whether an address may be one of another machine."""
    return address.startswith("tcp://")


def check_tcp_address(address: str) -> None:
    """Raise a ValueError, which users are shown, if an address is not tcp://HOST:PORT."""
    if not _PATTERN.match(address):
        raise ValueError(f"{address[:64]} is not tcp://HOST:PORT")
    if int(address.rpartition(":")[2]) >= 2**16:
        raise ValueError(f"the port of {address} must be 1 to 65535")
