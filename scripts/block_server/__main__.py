"""The block server's process, started by the supervisor of a machine that other machines reach.

It shares no lock and no thread with the workers, and has a low priority: who reads here does not
delay their steps. It stays when they die, so that the successors and other machines read on.
"""

import os
import sys
import time

import zmq

from protocol.lifecycle import Drain, Role, Stop
from protocol.process.child_runtime import ChildProcess
from scripts.block_server.server import BlockServer

_NICENESS = 10
_LONGEST_POLL_MS = 250


def main() -> None:
    child = ChildProcess.from_argv("scripts.block_server", Role.BLOCK_SERVER, sys.argv[1:])
    os.nice(_NICENESS)  # first: the threads that encrypt inherit it
    try:
        server = BlockServer(child.config, child.run_dir, time.monotonic)
    except ValueError as error:
        child.fatal("listen", error, retry=False)
    poller = zmq.Poller()
    for socket in server.sockets:
        poller.register(socket, zmq.POLLIN)
    if child.lifecycle_socket is not None:
        poller.register(child.lifecycle_socket, zmq.POLLIN)
    child.ready()
    has_reported = False
    while True:
        child.reporter.idle()
        poller.poll(min(child.reporter.tick_ms or _LONGEST_POLL_MS, _LONGEST_POLL_MS))
        child.reporter.turn()
        for message in child.messages():
            if isinstance(message, Stop):
                server.close()
                child.leave()
            if isinstance(message, Drain):
                server.drain()
        server.turn()
        if server.is_drained and not has_reported:
            has_reported = True
            child.drained()


if __name__ == "__main__":
    main()
