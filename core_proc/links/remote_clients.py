"""Serves clients of other machines, too, if the engine is configured to."""

import logging
from pathlib import Path

from protocol.config import EngineConfig
from protocol.process.machines import tcp_address
from protocol.transport.channel import RouterChannel
from protocol.transport.curve import ClientAuthenticator, read_server_keys
from protocol.transport.runtime import SocketFactory

log = logging.getLogger("troika.core")


def listen(
    config: EngineConfig, context: SocketFactory, link: RouterChannel
) -> ClientAuthenticator | None:
    """Bind the client link to its tcp address; return the authenticator of its clients.

    None: the engine has clients on its own machine only. ValueError: the keys cannot be read.
    """
    address, directory = tcp_address(config), config.parallel.curve_keys
    if address is None or directory is None:
        return None
    keys = read_server_keys(Path(directory))
    authenticator = ClientAuthenticator(context, keys.directory)
    link.listen(address, keys)
    log.info("clients of other machines connect to %s", address)
    return authenticator
