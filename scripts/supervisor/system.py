"""What the supervisor uses of the operating system; the simulation passes its own."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from protocol.process.child_handle import Child
from protocol.process.fork_server import ForkServer, reap_strangers
from protocol.transport.runtime import Clock, Poller, SocketFactory
from scripts.supervisor.death_causes import OomCounter


@dataclass(frozen=True, slots=True)
class System:
    """The clock, the poller, the sockets, and how processes are started and reaped."""

    clock: Clock = time
    make_poller: Callable[[], Poller] = zmq.Poller
    make_context: Callable[[], SocketFactory] = zmq.Context
    make_rng: Callable[[], random.Random] = random.Random
    make_oom_counter: Callable[[], OomCounter] = OomCounter
    start_child: Callable[..., Child] = Child
    start_fork_server: Callable[..., ForkServer] = ForkServer
    reap_strangers: Callable[[frozenset[int]], None] = reap_strangers
