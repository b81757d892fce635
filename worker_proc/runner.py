"""The interface of runners, which execute the core's steps.

ModelRunner, StageRunner and NullRunner implement it: with a whole model or its last pipeline stage,
with another stage, and without a model.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from protocol.core_worker import ModelRunnerOutput, SchedulerOutput
from protocol.model_facts import ModelFacts
from worker_proc.adapters.kept import KeptAdapters
from worker_proc.grammar.compiler import GrammarCompiler
from worker_proc.offload.drafts import DraftBlocks
from worker_proc.offload.memory import BlockMemory

PORTABLE_ATTENTION = "PyTorch (portable)"


class StepAbandoned(Exception):
    """The core that sent the step is gone: the next adoption will follow."""


class LaunchedStep(Protocol):
    """A step that a runner has begun, and a device may still be computing."""

    @property
    def is_done(self) -> bool:
        """Whether `finish` would return without waiting."""

    def finish(self) -> ModelRunnerOutput:
        """Wait for the output; raises what the step has raised."""


class ComputedStep(NamedTuple):
    """A step that was computed when it was launched."""

    output: ModelRunnerOutput
    is_done: bool = True

    def finish(self) -> ModelRunnerOutput:
        return self.output


class Runner(Protocol):
    """Executes steps in the order of their ids."""

    @property
    def facts(self) -> ModelFacts:
        """The loaded model and its memory, as announced to the core; constant."""

    @property
    def swap_cost_tokens(self) -> float:
        """Cost of copying a block to the host and back, in computed prompt tokens; constant."""

    @property
    def attention(self) -> str:
        """The attention path in use, in words; empty without a model; constant."""

    @property
    def grammars(self) -> GrammarCompiler | None:
        """The grammars that its requests may have; None: it supports none. Constant."""

    @property
    def adapters(self) -> KeptAdapters[Any] | None:
        """The adapters that its requests may have; None: it takes none. Constant."""

    @property
    def block_memory(self) -> BlockMemory | None:
        """The blocks that may be kept in stores; None: they cannot be. Constant."""

    @property
    def state_memory(self) -> BlockMemory | None:
        """The blocks of recurrent states that may be kept in stores; None: there are none."""

    @property
    def draft_blocks(self) -> DraftBlocks | None:
        """The draft model's blocks that may be kept in stores; None: there are none."""

    def on_wait(self, report: Callable[[], None]) -> None:
        """Call `report` several times a second while a step waits for another rank."""

    def reset(self, epoch: int = 0) -> None:
        """Forget every request; the next step may carry any `step_id`.

        `epoch` is that of the link: all ranks that a core has adopted together have the same.
        """

    def leave(self) -> None:
        """Note that the adoption has ended: a `reset` precedes the next steps."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step; raises a MirrorError if it contradicts those before it."""

    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        """Begin the work of `execute`. The preceding step may be unfinished, but no other step."""

    def prepare_memory(self, *, is_idle: bool = True) -> bool:
        """Allocate some memory that later steps will need; return whether more is missing.

        Unless the worker is idle, about as much is allocated in all calls as steps have used.
        """

    def sleep(self) -> None:
        """Release the KV cache until the next step; raises a MirrorError if requests remain."""


ReportProgress = Callable[[str, int, int], None]
"""Called while a model is loaded, with phase, steps done and total steps, or 0."""
RunnerFactory = Callable[[ReportProgress], Runner]
