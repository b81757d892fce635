"""The worker's end of the link to the core, as a state machine: messages in, replies out.

It checks the epoch of each message and the order of the steps; the runner computes. At most one
step is unfinished when the next one is launched; that one needs its tokens only on the device.
"""

from typing import Any

from protocol.core_worker import (
    AdapterLoaded,
    Adopt,
    BlocksFound,
    BlocksLoaded,
    CompileGrammar,
    CoreToWorker,
    FindBlocks,
    LoadAdapter,
    LoadBlocks,
    ModelRunnerOutput,
    RankAnswer,
    SchedulerOutput,
    StepFailed,
    StoreBlocks,
    UnloadAdapter,
    WorkerHello,
    WorkerToCore,
)
from protocol.message import MAX_TEXT
from worker_proc.adapters.service import AdapterService
from worker_proc.grammar.compiler import compile_now
from worker_proc.grammar.service import GrammarService
from worker_proc.offload.service import OffloadService
from worker_proc.runner import LaunchedStep, Runner, StepAbandoned


class _FailedLaunch:
    """A step whose launch raised an error, which is reported after the step before it."""

    is_done = True

    def __init__(self, error: Exception) -> None:
        self._error = error

    def finish(self) -> ModelRunnerOutput:
        raise self._error


class WorkerShim:
    """Adoption, fencing and step order of one worker."""

    def __init__(
        self,
        runner: Runner,
        rank: int,
        pid: int,
        epoch: int,
        *,
        answering_rank: int = 0,
        grammars: GrammarService | None = None,
        adapters: AdapterService[Any] | None = None,
        offload: OffloadService | None = None,
    ) -> None:
        """`answering_rank` is the rank that sends the outputs of steps."""
        self._runner = runner
        self._grammars = grammars
        self._adapters = adapters
        self._offload = offload
        self._services = [each for each in (grammars, adapters, offload) if each is not None]
        self._rank = rank
        self._answers = rank == answering_rank
        self._pid = pid
        self._own_epoch = epoch
        self._next_step_id = 0
        self._launched: tuple[int, LaunchedStep] | None = None
        """The step that is not answered yet, and its id."""
        self._last_link_epoch = 0
        self.link_epoch: int | None = None
        """Epoch of the link since the last adoption; None while no core has adopted this worker."""
        self._is_abandoned = False
        """True if another rank was adopted again. This rank then waits for its own adoption,
        because later messages may depend on a step that it has not computed."""
        self.num_fenced_frames = 0
        """The number of frames of another epoch, which were dropped."""
        self.failure: Exception | None = None
        """Error of a step or a sleep; the process must exit once its reply is sent, if there is
        one."""

    def end_adoption(self) -> None:
        """Forget the adoption, because the connection was made or lost."""
        if self.link_epoch is not None:
            self._runner.leave()
        self.link_epoch = None
        self._launched = None
        self._is_abandoned = False

    def prepare_memory(self, *, is_idle: bool = True) -> bool:
        """Allocate some memory of later steps, unless a step is unfinished.

        Returns whether more is missing.
        """
        return self._launched is None and self._runner.prepare_memory(is_idle=is_idle)

    def hello(self) -> WorkerHello:
        """Return the message that is repeated until a core adopts this worker."""
        runner = self._runner
        return WorkerHello(
            self._rank,
            self._pid,
            runner.facts,
            runner.swap_cost_tokens,
            self._last_link_epoch,
        )

    @property
    def epoch(self) -> int:
        """Epoch of the next frame that is sent."""
        return self._own_epoch if self.link_epoch is None else self.link_epoch

    def on_message(self, epoch: int, message: CoreToWorker) -> WorkerToCore | None:
        """Handle one message; return the reply to it or to the step before it, if there is one.

        `take_output` may return another reply.
        """
        if isinstance(message, Adopt):
            self._adopt(epoch, message)
            return None
        if epoch != self.link_epoch or self._is_abandoned:
            self.num_fenced_frames += 1
            return None
        if isinstance(message, SchedulerOutput):
            return self._step(message)
        if isinstance(message, CompileGrammar):
            return self._compile(message)
        if isinstance(message, LoadAdapter):
            return self._load(message)
        if isinstance(message, UnloadAdapter):
            if self._adapters is not None:
                self._adapters.unload(message)
            return None
        if isinstance(message, StoreBlocks | LoadBlocks | FindBlocks):
            return self._transfer(message)
        try:
            self._runner.sleep()
        except Exception as error:
            self.failure = error
        return None

    def _transfer(self, message: StoreBlocks | LoadBlocks | FindBlocks) -> WorkerToCore | None:
        offload = self._offload
        match message:
            case StoreBlocks():
                if offload is not None:
                    offload.store(message)
                return None
            case LoadBlocks():
                return BlocksLoaded(message.req_id, 0) if offload is None else offload.load(message)
        return BlocksFound(message.req_id, b"") if offload is None else offload.find(message)

    def _adopt(self, epoch: int, message: Adopt) -> None:
        if epoch < self._own_epoch or (self.link_epoch is not None and epoch <= self.link_epoch):
            self.num_fenced_frames += 1
            return
        self.link_epoch = self._last_link_epoch = epoch
        self._next_step_id = message.first_step_id
        self._launched = None
        self._is_abandoned = False
        self._runner.reset(epoch)
        for service in self._services:
            service.begin_adoption()

    def _compile(self, message: CompileGrammar) -> WorkerToCore | None:
        if self._grammars is None:
            return compile_now(message, None)
        return self._grammars.compile(message)

    def _load(self, message: LoadAdapter) -> WorkerToCore | None:
        if self._adapters is None:
            adapter_id = message.adapter.adapter_id
            return AdapterLoaded(adapter_id, "this worker takes no adapters")
        return self._adapters.load(message)

    @property
    def deadline(self) -> float | None:
        """The time by which to call `take_prepared`, in seconds of `time.monotonic`."""
        return None if self._offload is None else self._offload.deadline

    def take_prepared(self) -> list[RankAnswer]:
        """Return answers about grammars, adapters and blocks that have become ready."""
        results = [result for service in self._services for result in service.take_results()]
        return [] if self.link_epoch is None or self._is_abandoned else results

    @property
    def num_launched(self) -> int:
        """Number of steps that are not answered yet: 0 or 1."""
        return int(self._launched is not None)

    def take_output(self) -> WorkerToCore | None:
        """Return the reply to the launched step, if the step is done."""
        if self._launched is None or not self._launched[1].is_done:
            return None
        launched, self._launched = self._launched, None
        return self._finish(*launched)

    def _step(self, step: SchedulerOutput) -> WorkerToCore | None:
        before = self._launched
        try:
            if step.step_id != self._next_step_id:
                raise ValueError(f"step {step.step_id} came instead of {self._next_step_id}")
            self._next_step_id += 1
            self._launched = step.step_id, self._runner.launch(step)
        except Exception as error:
            self._launched = step.step_id, _FailedLaunch(error)
        return self.take_output() if before is None else self._finish(*before)

    def _finish(self, step_id: int, launched: LaunchedStep) -> WorkerToCore | None:
        try:
            output = launched.finish()
        except StepAbandoned:
            self._is_abandoned = True
            self._launched = None
            return None
        except Exception as error:
            self.failure = error
            return StepFailed(step_id, f"{type(error).__name__}: {error}"[:MAX_TEXT])
        return output if self._answers else None
