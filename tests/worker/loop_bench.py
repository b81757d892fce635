"""A worker's loop that is run in turns with a core's socket."""

import time
from collections.abc import Callable

import zmq

from protocol.core_worker import (
    CoreToWorker,
    WorkerHello,
    WorkerToCore,
    decode_from_worker,
)
from protocol.lifecycle import Role
from protocol.message import encode
from protocol.transport.channel import HighWaterMark, Received, RouterChannel
from tests.unsupervised_child import UnsupervisedChild
from tests.worker.fake_runner import FakeRunner
from worker_proc.loop import WorkerLoop

OWN_EPOCH = 5
TIMEOUT_S = 30.0


class Bench:
    """A worker's loop and the core's socket, run in turns."""

    def __init__(self, run_dir: str, runner: FakeRunner) -> None:
        self.child = UnsupervisedChild(Role.WORKER, run_dir, OWN_EPOCH)
        self.core = self.bind()
        self.loop = WorkerLoop(self.child, runner, clock=time, poller=zmq.Poller())
        self.received: list[tuple[Received, WorkerToCore]] = []

    def bind(self) -> RouterChannel:
        return RouterChannel(
            self.child.context, self.child.core_worker_address, HighWaterMark.WORKER_LINK
        )

    def close(self) -> None:
        self.loop._core.close()
        self.core.close()
        self.child.context.term()

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, "the condition has not come true"
            assert self.loop.turn(5)
            for received in self.core.drain(16):
                self.received.append((received, decode_from_worker(received.body)))

    @property
    def hellos(self) -> list[Received]:
        return [item for item, message in self.received if isinstance(message, WorkerHello)]

    @property
    def replies(self) -> list[WorkerToCore]:
        return [item for _, item in self.received if not isinstance(item, WorkerHello)]

    def send(self, epoch: int, message: CoreToWorker) -> None:
        assert self.core.send(self.hellos[-1].peer, epoch, encode(message))
