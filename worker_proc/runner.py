"""The interface between the worker's loop and whatever computes: a model, or the null runner."""

from collections.abc import Callable
from typing import Protocol

from protocol.core_worker import ModelFacts, ModelRunnerOutput, SchedulerOutput


class Runner(Protocol):
    """Executes steps one at a time, in the order in which the core decided them."""

    @property
    def facts(self) -> ModelFacts:
        """What the core must know before its first step; constant."""

    @property
    def swap_cost_tokens(self) -> float:
        """Copying a block to the host and back takes as long as so many prompt tokens; constant."""

    def reset(self) -> None:
        """Forget every request; the next step may carry any `step_id`."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step and return the tokens that it sampled, in mirror order.

        Raises:
            MirrorError: the step contradicts those before it.
        """

    def sleep(self) -> None:
        """Give the memory of the KV back until the next step; what it held is lost.

        Raises:
            MirrorError: a request is mirrored.
        """


Progress = Callable[[str, int, int], None]
"""Called while a model is loaded, with phase, steps done and steps in all, or 0."""
MakeRunner = Callable[[Progress], Runner]
