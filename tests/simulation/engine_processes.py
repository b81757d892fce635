"""The core and the workers: the real loops, whose turns are called by the world."""

from collections.abc import Callable, Sized
from typing import cast

from core_proc.engine import EngineCore
from core_proc.invariants import check_invariants
from core_proc.loop import CoreLoop
from protocol.adapters import Adapter
from protocol.api_core import StepOutputs
from protocol.config import EngineConfig
from protocol.core_worker import (
    NULL_BLOCK,
    AdapterLoaded,
    LoadAdapter,
    ModelRunnerOutput,
    RankAnswer,
    SchedulerOutput,
    UnloadAdapter,
)
from protocol.model_facts import KVGroup, ModelFacts
from tests.simulation.adapters import LoadWatch, SimulatedAdapterService, TurnWatch
from tests.simulation.child import Incarnation, SimulatedChild
from tests.simulation.grammars import SimulatedCompiler, SimulatedGrammarService
from tests.simulation.model import SimulatedModel
from tests.simulation.patched_os import SimulatedPoller, SimulatedProcesses
from tests.simulation.sockets import SimulatedSocket
from tests.simulation.wire import Wire
from tests.simulation.world import SECOND, Process, SimulatedClock, Violation
from worker_proc.adapters.kept import KeptAdapters
from worker_proc.grammar.compiler import GrammarCompiler
from worker_proc.grammar.service import GrammarService
from worker_proc.loop import WorkerLoop
from worker_proc.null.runner import NullTimes

Loop = CoreLoop | WorkerLoop
EMBEDDING_SIZE = 8


class EngineProcess(Process):
    """A child of the supervisor that starts, runs one of the real loops, and ends."""

    def __init__(
        self, wire: Wire, life: Incarnation, start_s: float, *, is_standby: bool = False
    ) -> None:
        """Become ready after `start_s`; a standby then waits for its promotion."""
        self._kind = f"{life.role}{life.rank or ''}"
        name = f"standby_{self._kind}" if is_standby else self._kind
        super().__init__(wire.world, f"{name}.{life.epoch}")
        self._ready_at = self.world.now + int(start_s * SECOND)
        self._waits = is_standby
        self._has_loaded = False
        self.is_begun = False
        self.child = SimulatedChild(wire, self, life)
        self.wake(self._ready_at)

    def turn(self) -> int | None:
        if not self.is_begun:
            again = self._start_up()
            if not self.is_begun:
                return again
        try:
            self.loop.turn(0)
            poll_ms = self.loop._poll_ms()
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"{self.name} raised {type(error).__name__}: {error}") from error
        if self.child.has_stop:
            self.leave()
        for inbox in self._inboxes:
            if inbox:
                return self.busy_until
        return None if poll_ms is None else self.busy_until + poll_ms * 1000

    def _start_up(self) -> int | None:
        """Load and wait for a promotion; begins the loop when both are complete."""
        child = self.child
        if not self._has_loaded:
            child.messages()
            if self.world.now < self._ready_at:
                return self._ready_at
            self._has_loaded = True
            if self._waits:
                child.ready()
        if self._waits:
            is_promoted = child.poll_promotion()
            if is_promoted is False:
                self.world.at(self.busy_until, self.die, 0)
            if not is_promoted:
                return self.busy_until + (child.reporter.tick_ms or 1000) * 1000
            self.world.counts[f"promoted: {self._kind}"] += 1
            self.name = f"{self._kind}.{child.epoch}"
            self._waits = False
        self.is_begun = True
        self.loop, self._inboxes = self.begin()
        child.ready()
        return None

    def begin(self) -> tuple[Loop, list[Sized]]:
        """Create the loop; returns it with the inboxes of the sockets that it polls."""
        raise NotImplementedError

    def leave(self) -> None:
        """Handle a Stop."""
        self.world.at(self.busy_until, self.die, 0)


class CheckedEngine(EngineCore):
    """The real engine; it accepts results of the current adoption only.

    What it does with adapters is followed, if there are any.
    """

    def __init__(self, config: EngineConfig, loads: LoadWatch | None) -> None:
        super().__init__(config)
        self.watched_link: SimulatedSocket | None = None
        self._loads = loads
        self._turns = TurnWatch(config.scheduler.max_num_seqs)

    def adopt_workers(self, facts: ModelFacts, swap_cost_tokens: float = 0.0) -> int:
        if self._loads is not None:
            self._loads.adopted()
        return super().adopt_workers(facts, swap_cost_tokens)

    def take_adapters(self) -> list[LoadAdapter | UnloadAdapter]:
        messages = super().take_adapters()
        for message in messages:
            if self._loads is not None and isinstance(message, LoadAdapter):
                self._loads.sent(message.adapter.adapter_id)
        return messages

    def answered(self, answer: RankAnswer) -> None:
        if self._loads is not None and isinstance(answer, AdapterLoaded):
            self._loads.answered(answer.adapter_id)
        super().answered(answer)

    def schedule(self) -> SchedulerOutput | None:
        step = super().schedule()
        if step is not None and self._loads is not None:
            self._turns.scheduled(self.adapters._turns, step)
        return step

    def update(self, output: ModelRunnerOutput) -> dict[bytes, StepOutputs]:
        if self.watched_link is not None:
            read, sent = self.watched_link.last_epoch_read, self.watched_link.last_epoch_sent
            if read != sent:
                raise Violation(f"fence: a result of link epoch {read} was taken in at {sent}")
        return super().update(output)

    def check_idle(self) -> str | None:
        """Describe what is left in an engine that should be idle; None: nothing."""
        scheduler = self.scheduler
        check_invariants(scheduler)
        if scheduler.has_unfinished or self._owners.num_open:
            return f"{len(scheduler.requests)} requests are left in the core"
        if self.adapters.holds_steps:
            return "adapters hold steps with nothing open"
        usage = scheduler.kv.usage
        return f"KV cache usage is {usage} with nothing open" if usage else None


class CoreProcess(EngineProcess):
    """Runs the real CoreLoop."""

    def __init__(
        self,
        wire: Wire,
        life: Incarnation,
        start_s: float,
        *,
        loads: LoadWatch | None,
        is_standby: bool = False,
    ) -> None:
        """`loads` follows adapters, if there are any."""
        super().__init__(wire, life, start_s, is_standby=is_standby)
        self._loads = loads
        if loads is not None:
            self.on_death.append(loads.core_died)

    def begin(self) -> tuple[Loop, list[Sized]]:
        self.engine = CheckedEngine(self.child.config, self._loads)
        loop = CoreLoop(
            self.child,
            self.engine,
            clock=self.world.clock,
            poller=SimulatedPoller(self.world),
            processes=SimulatedProcesses(self.world),
        )
        clients, workers = (cast(SimulatedSocket, link.socket) for link in loop._links)
        loop._read_predecessor()
        self.engine.watched_link = workers
        return loop, [clients.inbox, workers.inbox, self.child.inbox]

    def leave(self) -> None:
        problem = None if self.child.drain is None else self.engine.check_idle()
        if problem is not None:
            raise Violation(f"leak: at the end, {problem}")
        super().leave()


class CheckedModel(SimulatedModel):
    """Accepts steps of the adoption for which it was reset, and no others."""

    def __init__(
        self,
        facts: ModelFacts,
        step_s: float,
        read_epoch: Callable[[], int],
        *,
        clock: SimulatedClock,
        grammars: SimulatedCompiler,
        adapters: KeptAdapters[Adapter] | None,
        num_speculative_tokens: int,
        num_draft_states: int | None,
    ) -> None:
        super().__init__(
            facts,
            NullTimes(step_s, step_s / 8),
            num_speculative_tokens=num_speculative_tokens,
            num_draft_states=num_draft_states,
            clock=clock,
            grammars=cast(GrammarCompiler, grammars),
            adapters=adapters,
        )
        self._read_epoch = read_epoch
        self._epoch = -1

    def reset(self, epoch: int = 0) -> None:
        self._epoch = self._read_epoch()
        super().reset(epoch)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if self._read_epoch() != self._epoch:
            raise Violation(f"fence: a step of link epoch {self._read_epoch()} was computed")
        output = super().execute(step)
        if self.adapters is not None:
            self._check_prefixes(step)
        return output

    def _check_prefixes(self, step: SchedulerOutput) -> None:
        """Check that cached KV was computed with the adapter of the request that reads it."""
        blocks = self._blocks
        for new in step.scheduled_new_reqs:
            num_cached = -(-new.num_cached_tokens // self.facts.block_size)
            for block_id in (b for t in blocks._kv_tables(new.block_ids) for b in t[:num_cached]):
                writer = blocks._writers.get(block_id)
                if block_id == NULL_BLOCK or writer is None:
                    continue
                if writer.request.adapter_id != new.adapter_id:
                    raise Violation("mismatched: a request reads the KV of another adapter")


class WorkerProcess(EngineProcess):
    """Runs the real WorkerLoop with a model that costs nothing."""

    def __init__(
        self,
        wire: Wire,
        life: Incarnation,
        start_s: float,
        *,
        facts: ModelFacts,
        step_s: float,
        loads: LoadWatch | None,
        num_draft_states: int | None = None,
        is_standby: bool = False,
    ) -> None:
        """A step takes `step_s`, and each of its tokens an eighth of that.

        `loads` follows adapters, if there are any.
        """
        self._loads = loads
        self._facts = facts
        self._num_draft_states = num_draft_states
        self._step_s = step_s
        super().__init__(wire, life, start_s, is_standby=is_standby)

    def begin(self) -> tuple[Loop, list[Sized]]:
        grammars = SimulatedCompiler(self._facts, may_compile_late=self.child.rank > 0)
        lora, adapters = self.child.config.lora, None
        if lora.enable_lora:
            adapters = KeptAdapters[Adapter](lambda adapter: adapter, lora.num_kept)
        model = CheckedModel(
            self._facts,
            self._step_s,
            self._last_epoch_read,
            clock=self.world.clock,
            grammars=grammars,
            adapters=adapters,
            num_speculative_tokens=self.child.config.scheduler.num_speculative_tokens,
            num_draft_states=self._num_draft_states,
        )
        service = SimulatedGrammarService(self, grammars)
        loop = WorkerLoop(
            self.child,
            model,
            clock=self.world.clock,
            poller=SimulatedPoller(self.world),
            make_grammars=lambda compiler: cast(GrammarService, service),
            make_adapters=self._adapter_service,
        )
        self._socket = cast(SimulatedSocket, loop._core.socket)
        return loop, [self._socket.inbox, self.child.inbox]

    def _adapter_service(self, kept: KeptAdapters[Adapter]) -> SimulatedAdapterService:
        loads = self._loads
        assert loads is not None
        self.on_death.append(lambda: loads.worker_died(self.status))
        return SimulatedAdapterService(self, kept, loads)

    def _last_epoch_read(self) -> int:
        return self._socket.last_epoch_read


def facts_of(config: EngineConfig, vocab_size: int, num_host_blocks: int) -> ModelFacts:
    """Return the facts of the simulated model."""
    assert config.model.max_model_len is not None
    assert config.cache.num_gpu_blocks_override is not None
    num_state_blocks = config.worker.null_state_blocks
    return ModelFacts(
        model="simulated",
        vocab_size=vocab_size,
        max_model_len=config.model.max_model_len,
        block_size=config.cache.block_size,
        num_gpu_blocks=config.cache.num_gpu_blocks_override,
        eos_token_ids=[2],
        kv_groups=[KVGroup(), *[KVGroup(is_state=True)] * (num_state_blocks > 0)],
        num_state_blocks=num_state_blocks + (num_state_blocks > 0),
        num_host_blocks=num_host_blocks,
        num_host_state_blocks=num_host_blocks // 3 if num_state_blocks else 0,
        state_swap_blocks=0.5 if num_state_blocks else 0.0,
        embedding_size=EMBEDDING_SIZE,
    )
