"""The core and the workers: the real loops, each turned by the world instead of by itself."""

from collections.abc import Callable
from typing import Any, cast

import core_proc.loop
import worker_proc.loop
from core_proc.engine import EngineCore
from core_proc.invariants import check_invariants
from protocol.api_core import StepOutputs
from protocol.config import EngineConfig
from protocol.core_worker import ModelFacts, ModelRunnerOutput, SchedulerOutput
from protocol.process import ChildProcess
from scripts.simulation.model import SimulatedModel
from scripts.simulation.sockets import SimulatedSocket, Wire
from scripts.simulation.stand_ins import Incarnation, SimulatedChild
from scripts.simulation.world import SECOND, Process, Violation


class EngineProcess(Process):
    """A child of the supervisor that starts, runs one of the real loops, and ends."""

    def __init__(self, wire: Wire, life: Incarnation, start_s: float) -> None:
        """It is ready after `start_s`."""
        super().__init__(wire.world, f"{life.role}{life.rank or ''}.{life.epoch}")
        self._ready_at = self.world.now + int(start_s * SECOND)
        self.is_begun = False
        self.child = SimulatedChild(wire, self, life)
        self.wake()

    def turn(self) -> int | None:
        if not self.is_begun:
            self.child.messages()
            if self.world.now < self._ready_at:
                return self._ready_at
            self.is_begun = True
            self.begin()
            self.child.ready()
        try:
            again = self.work()
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"{self.name} raised {type(error).__name__}: {error}") from error
        if self.child.is_told_to_stop:
            self.world.at(self.busy_until, self.die, 0)
        return again

    def begin(self) -> None:
        """Make the loop."""
        raise NotImplementedError

    def work(self) -> int | None:
        """Turn it once; returns when it wants to be turned again."""
        raise NotImplementedError

    def notice_death(self, process: Process, status: int) -> None:
        self.wake()

    def _again(self, poll_ms: int | None, *sockets: Any) -> int | None:
        """What a poll on these sockets would do."""
        if any(cast(SimulatedSocket, socket).inbox for socket in sockets):
            return self.busy_until
        return None if poll_ms is None else self.busy_until + poll_ms * 1000


class CheckedEngine(EngineCore):
    """The real engine; results that it takes in must belong to the adoption in force."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.watched_link: SimulatedSocket | None = None

    def update(self, output: ModelRunnerOutput) -> dict[bytes, StepOutputs]:
        if self.watched_link is not None:
            read, sent = self.watched_link.last_epoch_read, self.watched_link.last_epoch_sent
            if read != sent:
                raise Violation(f"fence: a result of link epoch {read} was taken in at {sent}")
        return super().update(output)

    def check_idle(self) -> str | None:
        """What is wrong where nothing should be left; None: nothing."""
        scheduler = self._scheduler
        if scheduler is None:
            return None
        check_invariants(scheduler)
        if scheduler.has_unfinished or any(self._ids.values()):
            return f"{len(scheduler.requests)} requests are left in the core"
        usage = scheduler.kv_cache_usage
        return f"KV cache usage is {usage} with nothing open" if usage else None


class CoreProcess(EngineProcess):
    """Runs the real CoreLoop."""

    def begin(self) -> None:
        self.engine = CheckedEngine(self.child.config)
        self.loop = core_proc.loop.CoreLoop(cast(ChildProcess, self.child), self.engine)
        self._sockets = [link.socket for link in self.loop._links]
        self._sockets.append(self.child.lifecycle_socket)
        self.loop._hear_of_predecessor()
        self.engine.watched_link = cast(SimulatedSocket, self._sockets[1])

    def work(self) -> int | None:
        self.loop.turn(0)
        return self._again(self.loop._poll_ms(), *self._sockets)


class CheckedModel(SimulatedModel):
    """Steps that it is given must belong to the adoption that it was reset for."""

    def __init__(self, facts: ModelFacts, step_s: float, read_epoch: Callable[[], int]) -> None:
        super().__init__(facts, step_s, token_delay_s=step_s / 8)
        self._read_epoch = read_epoch
        self._epoch = -1

    def reset(self) -> None:
        self._epoch = self._read_epoch()
        super().reset()

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if self._read_epoch() != self._epoch:
            raise Violation(f"fence: a step of link epoch {self._read_epoch()} was computed")
        return super().execute(step)


class WorkerProcess(EngineProcess):
    """Runs the real WorkerLoop with a model that costs nothing."""

    def __init__(
        self, wire: Wire, life: Incarnation, start_s: float, *, facts: ModelFacts, step_s: float
    ) -> None:
        """A step takes `step_s`, and each of its tokens an eighth of that."""
        self._facts = facts
        self._step_s = step_s
        super().__init__(wire, life, start_s)

    def begin(self) -> None:
        model = CheckedModel(self._facts, self._step_s, self._last_epoch_read)
        self.loop = worker_proc.loop.WorkerLoop(cast(ChildProcess, self.child), model)
        self._socket = cast(SimulatedSocket, self.loop._core.socket)

    def _last_epoch_read(self) -> int:
        return self._socket.last_epoch_read

    def work(self) -> int | None:
        self.loop.turn(0)
        return self._again(self.loop._poll_ms(), self._socket, self.child.lifecycle_socket)


def facts_of(config: EngineConfig, vocab_size: int, num_host_blocks: int) -> ModelFacts:
    """What the workers pretend to have loaded."""
    assert config.model.max_model_len is not None
    assert config.cache.num_gpu_blocks_override is not None
    return ModelFacts(
        model="simulated",
        vocab_size=vocab_size,
        max_model_len=config.model.max_model_len,
        block_size=config.cache.block_size,
        num_gpu_blocks=config.cache.num_gpu_blocks_override,
        eos_token_ids=[2],
        num_host_blocks=num_host_blocks,
    )
