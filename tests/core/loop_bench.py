"""A core loop on real sockets in the test's thread, with fake clients and workers."""

import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import TypeVar

import zmq

from core_proc.engine import EngineCore
from core_proc.loop import CoreLoop
from protocol.api_core import (
    AddRequest,
    Connect,
    CoreToClient,
    EngineState,
    Refused,
    RequestOutput,
    Status,
    StepOutputs,
    decode_from_core,
)
from protocol.core_worker import (
    Adopt,
    CoreToWorker,
    ModelRunnerOutput,
    SchedulerOutput,
    Sleep,
    WorkerHello,
)
from protocol.core_worker import decode_from_core as decode_step
from protocol.lifecycle import Role, Suspect
from protocol.message import Message, encode
from protocol.model_facts import ModelFacts
from protocol.sampling import SamplingParams
from protocol.transport.channel import DealerChannel, HighWaterMark, LinkEvent
from protocol.transport.frame_sequence import Flag
from protocol.transport.runtime import SystemProcesses
from tests.core.fake_worker import FakeWorker
from tests.unsupervised_child import UnsupervisedChild

CORE_EPOCH = 3
FACTS = ModelFacts("fake", 1000, 4096, 16, 512, [2])
TIMEOUT_S = 30.0
T = TypeVar("T")


def token_at(req_id: int, position: int) -> int:
    """The token that every fake worker samples: a function of the position, so that gaps show."""
    return 100 + position


class _End:
    """One connection to the core, optionally with a process that represents its peer."""

    def __init__(self, bench: "Bench", address: str, hwm: HighWaterMark) -> None:
        self.bench = bench
        self.channel = DealerChannel(bench.child.context, address, hwm)
        self.is_open = True
        self.process: subprocess.Popen[bytes] | None = None
        bench.ends.append(self)
        bench.until(lambda: LinkEvent.CONNECTED in self.channel.link_events(), turn=False)

    def start_process(self) -> int:
        """Start a process that can be killed; return its pid."""
        self.process = subprocess.Popen(["sleep", "600"])
        return self.process.pid

    def kill_process(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(TIMEOUT_S)

    @property
    def is_killed(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None

    def send(self, epoch: int, message: Message) -> None:
        begins = isinstance(message, Connect | WorkerHello)
        assert self.channel.send(epoch, encode(message), begins=begins)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.channel.close()
        if self.process is not None:
            self.kill_process()


class FakeClient(_End):
    """A client that records all messages in order."""

    def __init__(self, bench: "Bench") -> None:
        super().__init__(bench, bench.child.core_client_address, HighWaterMark.CLIENT_LINK)
        self.received: list[CoreToClient] = []
        self.num_welcomes = 0
        """Answers to Connect; another status may arrive at any time."""

    def read(self) -> None:
        for received in self.channel.drain(10_000):
            self.num_welcomes += Flag.BEGINS in Flag(received.header.flags)
            self.received.append(decode_from_core(received.body))

    def connect(self, pid: int = 0) -> None:
        """Send Connect and wait for the answer."""
        before = self.num_welcomes
        self.send(0, Connect(pid))
        self.bench.until(lambda: self.num_welcomes > before)

    def add(self, request_id: int, max_tokens: int = 4, **fields: object) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        add = AddRequest(request_id, [5, 6, 7], params, **fields)  # type: ignore[arg-type]
        self.send(CORE_EPOCH, add)

    @property
    def statuses(self) -> list[Status]:
        return [message for message in self.received if isinstance(message, Status)]

    @property
    def refused(self) -> list[Refused]:
        return [message for message in self.received if isinstance(message, Refused)]

    @property
    def rows(self) -> list[RequestOutput]:
        steps = [message for message in self.received if isinstance(message, StepOutputs)]
        return [row for step in steps for row in step.outputs]

    def tokens(self, request_id: int) -> list[int]:
        return [t for row in self.rows if row.request_id == request_id for t in row.token_ids]

    def finish(self, *request_ids: int) -> None:
        """Wait until requests have ended."""

        def ended() -> bool:
            return set(request_ids) <= {row.request_id for row in self.rows if row.finish_reason}

        self.bench.until(ended)


class WorkerEnd(_End):
    """A worker that executes and answers steps while the test allows it."""

    def __init__(
        self, bench: "Bench", epoch: int, rank: int = 0, facts: ModelFacts = FACTS
    ) -> None:
        super().__init__(bench, bench.child.core_worker_address, HighWaterMark.WORKER_LINK)
        self.epoch = epoch
        self._rank = rank
        self._facts = facts
        self.pid = self.start_process()
        self.adopted: list[int] = []
        """Link epochs of its adoptions."""
        self.unanswered: list[tuple[int, SchedulerOutput]] = []
        """Steps with the epochs of their headers."""
        self.num_sleeps = 0
        self.answers = True
        self._worker = FakeWorker(FACTS.block_size, FACTS.num_gpu_blocks, token_at)

    def hello(self) -> None:
        self.send(self.epoch, WorkerHello(self._rank, self.pid, self._facts))

    def join(self) -> None:
        """Send Hello and wait for the adoption."""
        before = len(self.adopted)
        self.hello()
        self.bench.until(lambda: len(self.adopted) > before)

    def read(self) -> None:
        for received in self.channel.drain(1000):
            message: CoreToWorker = decode_step(received.body)
            if isinstance(message, Adopt):
                self.adopted.append(received.header.epoch)
                self.unanswered.clear()  # a step in flight does not belong to the new adoption
                self._worker = FakeWorker(FACTS.block_size, FACTS.num_gpu_blocks, token_at)
            elif isinstance(message, Sleep):
                assert not self.unanswered, "steps were still to be answered"
                assert not self._worker.mirror, "requests were still in the mirror"
                self.num_sleeps += 1
            else:
                self.unanswered.append((received.header.epoch, message))
        if self.answers:
            self.answer_all()

    def compute(self) -> tuple[int, ModelRunnerOutput]:
        """Compute the oldest step; return its epoch and its output."""
        epoch, step = self.unanswered.pop(0)
        return epoch, self._worker.execute(step)

    def answer_all(self) -> None:
        while self.unanswered:
            self.send(*self.compute())


class Bench:
    """One core with its clients and workers."""

    def __init__(self, **settings: object) -> None:
        self._run_dir = tempfile.TemporaryDirectory(prefix="troika-test-")
        self._settings = settings
        self.ends: list[_End] = []
        self._start_core(CORE_EPOCH)

    def _start_core(self, epoch: int) -> None:
        self.child = UnsupervisedChild(Role.CORE, self._run_dir.name, epoch, **self._settings)
        self.engine = EngineCore(self.child.config)
        self.loop = CoreLoop(
            self.child,
            self.engine,
            clock=time,
            poller=zmq.Poller(),
            processes=SystemProcesses(),
        )

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        for end in self.ends:
            end.close()
        self.child.context.destroy(linger=0)
        self._run_dir.cleanup()

    def turn(self, timeout_ms: int = 10) -> None:
        """Run one turn of the core's loop, then let all clients and workers read."""
        self.loop.turn(timeout_ms)
        for end in self.ends:
            if end.is_open and isinstance(end, FakeClient | WorkerEnd):
                end.read()

    def until(self, condition: Callable[[], object], *, turn: bool = True) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, "the condition has not come true"
            if turn:
                self.turn()

    def client(self) -> FakeClient:
        """Return a connected client."""
        client = FakeClient(self)
        client.connect()
        return client

    def worker(self, epoch: int = 5) -> WorkerEnd:
        """Return an adopted worker."""
        worker = WorkerEnd(self, epoch)
        worker.join()
        return worker

    def admit_together(self, num_requests: int, add: Callable[[], object]) -> None:
        """Let requests begin in one step of worker 5, however far apart they arrive."""
        self.child.inbox.append(Suspect(Role.WORKER, 0, 5, 60.0))
        self.turn()
        add()
        self.until(lambda: self.engine.stats().num_waiting_reqs == num_requests)
        self.child.inbox.append(Suspect(Role.WORKER, 0, 5, 0.0))
        self.until(lambda: self.engine.stats().num_running_reqs == num_requests)

    @property
    def state(self) -> EngineState:
        return self.engine.state


def all_tokens(num_tokens: int) -> list[int]:
    """Return the tokens of the first request."""
    return [token_at(0, position) for position in range(num_tokens)]
