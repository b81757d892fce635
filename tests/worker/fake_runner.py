"""Runners that count their calls, and steps for them."""

import time

from protocol.core_worker import CachedRequestData, ModelRunnerOutput, SchedulerOutput
from protocol.model_facts import ModelFacts
from worker_proc.adapters.kept import KeptAdapters
from worker_proc.grammar.compiler import GrammarCompiler
from worker_proc.runner import ComputedStep, LaunchedStep

FACTS = ModelFacts("fake", 1000, 4096, 16, 512, [2])


class FakeRunner:
    """Counts calls, and raises `error` if there is one."""

    facts = FACTS
    swap_cost_tokens = 3.5
    grammars: GrammarCompiler | None = None
    adapters: KeptAdapters[str] | None = None

    def __init__(self) -> None:
        self.num_resets = self.num_leaves = 0
        self.num_sleeps = 0
        self.missing_pieces = 1
        self.num_between_steps = self.owed_pieces = 0
        self.executed_at = self.prepared_at = 0.0
        self.error: Exception | None = None

    def leave(self) -> None:
        self.num_leaves += 1

    def reset(self, epoch: int = 0) -> None:
        self.num_resets += 1

    def on_wait(self, report: object) -> None:
        pass

    def prepare_memory(self, *, is_idle: bool = True) -> bool:
        if not is_idle:
            self.num_between_steps += 1
            self.owed_pieces -= 1
            return self.owed_pieces > 0
        self.prepared_at = self.prepared_at or time.monotonic()
        self.missing_pieces -= 1
        return self.missing_pieces > 0

    def sleep(self) -> None:
        if self.error is not None:
            raise self.error
        self.num_sleeps += 1

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if self.error is not None:
            raise self.error
        self.executed_at = time.monotonic()
        return ModelRunnerOutput(step.step_id, [7])

    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        return ComputedStep(self.execute(step))


class Launched:
    """A step that a device computes until `is_done` is set, or until it is waited for."""

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.is_done = False
        self.error: Exception | None = None

    def finish(self) -> ModelRunnerOutput:
        self.is_done = True
        if self.error is not None:
            raise self.error
        return ModelRunnerOutput(self.step_id, [7])


class DeviceRunner(FakeRunner):
    """Launches steps; raises `error` then."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[Launched] = []

    def launch(self, step: SchedulerOutput) -> Launched:
        if self.error is not None:
            raise self.error
        self.launched.append(Launched(step.step_id))
        return self.launched[-1]


def step(step_id: int) -> SchedulerOutput:
    return SchedulerOutput(step_id, [], CachedRequestData(), {}, 0, [], [])
