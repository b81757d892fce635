"""EngineCore: requests and results in, steps and outputs out. No sockets, no clock.

Theory of operation. The engine has two parts. `EngineCore` exists from the start: it knows the
settings, which client has which request open, the messages that wait for clients, and whether the
engine drains. `RunningEngine` exists from the first adoption of workers on, because only workers
know the model and its memory: it holds scheduler, pauses and quarantine, and survives the loss of
workers. Until then every request and every control is refused with "starting".

The loop drives the engine in a fixed order. A turn handles messages (`add`, `abort`, `control`,
`update`), and then decides steps (`schedule`, until it returns None). Before it sends a step, it
writes the result of `take_marks` to the progress page. `take_outgoing` comes last. Between two
turns the following holds:

- A request is open for its client exactly as long as the scheduler knows it. Each request that
  ends does so once: with a final output, with `Refused`, or because its client aborted it or left.
- `update` accepts only the answer to the oldest step in flight. `lose_workers` withdraws all steps
  in flight; their requests wait again, with their outputs so far.
- A failure of one request (its hash, its row of outputs) ends that request. A failed assertion ends
  the core: its state is wrong, while the clients' ledgers are right, so that nothing is lost.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from core_proc.kv.stores import open_stores
from core_proc.outputs.check import InvalidWorkerOutput
from core_proc.outputs.owners import Client, Owners
from core_proc.recovery.adapter_trials import AdapterTrials
from core_proc.running_engine import RunningEngine
from core_proc.stats import LoopHistogram
from protocol.api_core import (
    AddRequest,
    Control,
    ControlDone,
    CoreToClient,
    EngineState,
    EngineStats,
    ErrorCode,
    PauseMode,
    Refused,
    RequestError,
    Status,
    StepOutputs,
)
from protocol.config import EngineConfig
from protocol.core_worker import (
    CompileGrammar,
    FindBlocks,
    LoadAdapter,
    LoadBlocks,
    ModelFacts,
    ModelRunnerOutput,
    RankAnswer,
    SchedulerOutput,
    StoreBlocks,
    UnloadAdapter,
)
from protocol.kv_events import KVEvent
from protocol.process.machines import blocks_address
from protocol.process.progress_page import MarkEdits


class FactsChanged(Exception):
    """The new workers have a different model or number of blocks from the last ones."""


class EngineCore:
    """The state of one engine between its clients and its workers."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._owners = Owners()
        self._inherited_marks: Sequence[int] = ()
        self._trials = AdapterTrials()
        self._is_draining = False
        self._has_workers = False
        self._is_loading_anew = False
        self.running: RunningEngine | None = None
        self.now = 0.0
        """Monotonic seconds; the loop sets it at the beginning of each turn."""
        self.loop_histogram = LoopHistogram()
        self.num_fenced_frames = 0

    @property
    def _with_workers(self) -> RunningEngine | None:
        """The running engine, while it has workers."""
        return self.running if self._has_workers else None

    def adopt_workers(self, facts: ModelFacts, swap_cost_tokens: float = 0.0) -> int:
        """Start or continue with workers that know no request; return their first step's id."""
        running = self.running
        if running is None:
            running = RunningEngine(
                self._config,
                facts,
                swap_cost_tokens,
                self._owners,
                self._trials,
                offload=open_stores(self._config, facts),
            )
            running.quarantine.inherit(self._inherited_marks, self.now)
            if self._is_draining:
                running.pausing.drain()
            self.running = running
        elif facts.can_replace(running.facts):
            running.replace_workers(facts)
        else:
            raise FactsChanged(f"workers came back with {facts.changes(running.facts)}")
        self._has_workers = True
        self._is_loading_anew = False
        return running.scheduler.next_step_id

    def lose_workers(self) -> None:
        """Take back all steps in flight: running requests wait again, with their outputs kept."""
        if self._with_workers is not None:
            self._with_workers.lose_workers()
        self._has_workers = False

    def wait_for_load(self) -> None:
        """Note that the lost workers were killed from outside; their successors load the model."""
        self._is_loading_anew = not self._has_workers

    @property
    def is_loading_anew(self) -> bool:
        """Whether requests wait for workers to load the model, without having caused the loss."""
        return self._is_loading_anew and self.state is EngineState.RECOVERING

    def attribute_death(self, *, is_fault: bool = True, in_step: bool = True) -> None:
        """Note whether the workers that were lost last died because of what they did.

        `in_step`: whether they were computing. Workers of a dead core may be meant.
        """
        if self.running is None:
            self._trials.attribute_death(is_fault=is_fault)
        else:
            self.running.attribute_death(self.now, is_fault=is_fault, in_step=in_step)

    def inherit_marks(self, marks: Sequence[int]) -> None:
        """Take over the marks of a core that died because of its computation (see `take_marks`)."""
        self._inherited_marks = marks

    def take_marks(self) -> MarkEdits | None:
        """Return the changes in the marks of the steps in flight; None: no change."""
        return None if self.running is None else self.running.quarantine.take_marks()

    def inherit_loads(self, records: Iterable[int]) -> None:
        """Take over the load records of the preceding core (see `take_loads`)."""
        self._trials.inherit(records)

    def take_loads(self) -> list[int] | None:
        """Return records of adapters whose loads may have killed workers; None: no change."""
        return self._trials.take_records()

    def add(self, client: Client, add: AddRequest) -> Refused | None:
        """Accept a request or refuse it. An open request with the same id ends in either case."""
        if self.running is None:
            error = RequestError(ErrorCode.STARTING, "the engine is starting")
            return Refused(add.request_id, error)
        return self.running.add(client, add, self.now)

    def abort(self, client: Client, request_ids: Iterable[int]) -> None:
        """End requests whose outputs are no longer wanted; unknown ids are ignored."""
        if self.running is not None:
            self.running.abort(client, request_ids)

    def drop_client(self, client: Client) -> int:
        """Abort all requests of a client; returns their number."""
        req_ids = self._owners.drop(client)
        if self.running is not None:
            self.running.drop_client(client, req_ids)
        return len(req_ids)

    def drain(self) -> None:
        """Refuse new requests from now on, and finish the accepted ones, which ends any pause."""
        self._is_draining = True
        if self.running is not None:
            self.running.pausing.drain()

    def control(self, client: Client, control: Control) -> None:
        """Handle a request about the whole engine; the answer is among the outgoing messages."""
        if self.running is None:
            done = ControlDone(control.number, ok=False, pause_mode=PauseMode.RUNNING)
            self._owners.post(client, done)
        else:
            self.running.control(client, control)

    def take_outgoing(self) -> list[tuple[Client, CoreToClient]]:
        """Return all messages for clients except outputs; called once in every turn."""
        return self._owners.take_outgoing()

    def schedule(self) -> SchedulerOutput | None:
        """Decide the next step; None if there are no workers, or nothing is to be sent now."""
        running = self._with_workers
        return None if running is None else running.schedule()

    def take_transfers(self) -> list[StoreBlocks | LoadBlocks | FindBlocks]:
        """Return the messages to send to the workers after the steps that were decided so far."""
        running = self._with_workers
        return [] if running is None else running.scheduler.take_transfers()

    def take_grammars(self) -> list[CompileGrammar]:
        """Return the grammars to send to the workers before the next step."""
        running = self._with_workers
        return [] if running is None else running.grammars.take_messages()

    def take_adapters(self) -> list[LoadAdapter | UnloadAdapter]:
        """Return the messages about adapters to send to the workers before the next step."""
        running = self._with_workers
        return [] if running is None else running.take_adapters()

    def answered(self, answer: RankAnswer) -> None:
        """Handle the joined answer of all ranks about a grammar, an adapter or blocks."""
        if self.running is None:
            raise InvalidWorkerOutput(f"{type(answer).__name__} came before anything was asked for")
        self.running.answered(answer)

    @property
    def is_sleep_due(self) -> bool:
        """Whether `Sleep` must be sent to the workers if there is no step to schedule."""
        running = self._with_workers
        return running is not None and running.pausing.is_sleep_due

    def sleep_sent(self) -> None:
        """Note that the workers were sent `Sleep`, which answers the clients that wait for it."""
        if self.running is not None:
            self.running.pausing.sleep_sent()

    def update(self, output: ModelRunnerOutput) -> dict[Client, StepOutputs]:
        """Take in the results of a step; returns the outputs for each client."""
        if self.running is None:
            raise InvalidWorkerOutput(
                f"output of step {output.step_id} came before any step was sent"
            )
        return self.running.update(output)

    @property
    def has_kv_events(self) -> bool:
        return self._config.cache.enable_kv_events

    def take_kv_events(self) -> list[KVEvent]:
        return [] if self.running is None else self.running.scheduler.kv.take_events()

    def snapshot_kv_events(self) -> Iterator[KVEvent]:
        """Return events that lead from an empty cache to the present contents, generated lazily."""
        return iter(()) if self.running is None else self.running.scheduler.kv.snapshot_events()

    @property
    def state(self) -> EngineState:
        if self.running is None:
            return EngineState.STARTING
        if self._is_draining:
            return EngineState.DRAINING
        return EngineState.READY if self._has_workers else EngineState.RECOVERING

    @property
    def pause_mode(self) -> PauseMode:
        return PauseMode.RUNNING if self.running is None else self.running.pausing.mode

    @property
    def is_sleeping(self) -> bool:
        return self.running is not None and self.running.pausing.is_sleeping

    @property
    def is_drained(self) -> bool:
        return self._is_draining and not self.has_unfinished

    @property
    def is_computing(self) -> bool:
        return self.running is not None and bool(self.running.scheduler.in_flight)

    @property
    def is_preparing(self) -> bool:
        """Whether `schedule` has work left that waits for no message: call it again at once."""
        return self.running is not None and self.running.scheduler.is_preparing

    @property
    def has_unfinished(self) -> bool:
        return self.running is not None and self.running.scheduler.has_unfinished

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(
            EngineStats() if self.running is None else self.running.stats(),
            fenced_frames=self.num_fenced_frames,
            loop_seconds_buckets=list(self.loop_histogram.counts),
            loop_seconds_sum=self.loop_histogram.sum_s,
        )

    def status(self) -> Status:
        """Return the report that clients get once a second and on each change of state."""
        facts = None if self.running is None else self.running.facts
        return Status(
            self.state,
            facts,
            self.stats(),
            self.pause_mode,
            self.is_sleeping,
            blocks_address(self._config),
            self.is_loading_anew,
        )
