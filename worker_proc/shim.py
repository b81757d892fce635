"""The worker's end of the link to the core, as a state machine: messages in, replies out.

It checks the epoch of each message and the order of the steps; the runner computes.
"""

from protocol.core_worker import (
    Adopt,
    CompileGrammar,
    CoreToWorker,
    GrammarCompiled,
    SchedulerOutput,
    StepFailed,
    WorkerHello,
    WorkerToCore,
)
from protocol.message import MAX_TEXT
from worker_proc.grammar.compiler import compile_now
from worker_proc.grammar.service import GrammarService
from worker_proc.runner import Runner


class WorkerShim:
    """Adoption, fencing and step order of one worker."""

    def __init__(
        self,
        runner: Runner,
        rank: int,
        pid: int,
        epoch: int,
        grammars: GrammarService | None = None,
    ) -> None:
        self._runner = runner
        self._grammars = grammars
        self._rank = rank
        self._pid = pid
        self._own_epoch = epoch
        self._next_step_id = 0
        self.link_epoch: int | None = None
        """Epoch of the link since the last adoption; None while no core has adopted this worker."""
        self.num_fenced_frames = 0  # of another epoch, which were dropped
        self.failure: Exception | None = None
        """Error of a step or a sleep; the process must exit once the reply, if any, is sent."""

    def end_adoption(self) -> None:
        """Forget the adoption, since the connection was made or lost."""
        self.link_epoch = None

    def hello(self) -> WorkerHello:
        """Return the message that is sent repeatedly until a core adopts this worker."""
        runner = self._runner
        return WorkerHello(self._rank, self._pid, runner.facts, runner.swap_cost_tokens)

    @property
    def epoch(self) -> int:
        """Epoch of the next frame that is sent."""
        return self._own_epoch if self.link_epoch is None else self.link_epoch

    def on_message(self, epoch: int, message: CoreToWorker) -> WorkerToCore | None:
        """Handle one message; returns the reply, if there is one."""
        if isinstance(message, Adopt):
            self._adopt(epoch, message)
            return None
        if epoch != self.link_epoch:
            self.num_fenced_frames += 1
            return None
        if isinstance(message, SchedulerOutput):
            return self._step(message)
        if isinstance(message, CompileGrammar):
            return self._compile(message)
        try:
            self._runner.sleep()
        except Exception as error:
            self.failure = error
        return None

    def _adopt(self, epoch: int, message: Adopt) -> None:
        if epoch < self._own_epoch or (self.link_epoch is not None and epoch <= self.link_epoch):
            self.num_fenced_frames += 1
            return
        self.link_epoch = epoch
        self._next_step_id = message.first_step_id
        self._runner.reset()
        if self._grammars is not None:
            self._grammars.begin_adoption()

    def _compile(self, message: CompileGrammar) -> WorkerToCore | None:
        if self._grammars is None:
            return compile_now(message, None)
        return self._grammars.compile(message)

    def take_compiled(self) -> list[GrammarCompiled]:
        """Return answers about grammars that have become ready; all but rank 0 drop them."""
        results = [] if self._grammars is None else self._grammars.take_results()
        return results if self._rank == 0 and self.link_epoch is not None else []

    def _step(self, step: SchedulerOutput) -> WorkerToCore | None:
        try:
            if step.step_id != self._next_step_id:
                raise ValueError(f"step {step.step_id} came instead of {self._next_step_id}")
            self._next_step_id += 1
            output = self._runner.execute(step)
        except Exception as error:
            self.failure = error
            return StepFailed(step.step_id, f"{type(error).__name__}: {error}"[:MAX_TEXT])
        return output if self._rank == 0 else None
