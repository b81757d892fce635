"""TCP ports of this machine."""

import socket


def free_port() -> int:
    """Return a port that no process listens on, until another one takes it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
