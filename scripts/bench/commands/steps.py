"""An engine in this process that is stepped, with the time of each part of a step.

The parts are functions of the engine that are replaced by timed ones, without a change of the
engine. The core and the runner are those of the processes, and take turns.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

from core_proc.engine import EngineCore
from protocol.config import ConfigError
from protocol.model_facts import ModelFacts
from protocol.sampling import SamplingParams
from scripts.bench.client import BenchError
from scripts.bench.scheduler_costs import production_gc
from scripts.bench.workloads import Request
from scripts.inprocess import InprocEngine
from scripts.supervisor.checks import complete_config
from scripts.supervisor.startup import parse
from worker_proc.null.runner import NullRunner
from worker_proc.runner import Runner

Patch = tuple[Any, str, Callable[[Any], Any]]
"""An owner, the name of its function, and what makes the function that takes its place."""

P = ParamSpec("P")
T = TypeVar("T")


class Parts:
    """Adds up the time of each part; an inner part's time does not count for the outer one."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        """Take what returns the present time in nanoseconds."""
        self.ns: dict[str, int] = {}
        self._clock = clock
        self._open: list[str] = []
        self._since = 0

    def begin(self, part: str) -> None:
        """Stop the time of the present part, and start that of another one."""
        now = self._clock()
        if self._open:
            self.ns[self._open[-1]] += now - self._since
        self._open.append(part)
        self.ns.setdefault(part, 0)
        self._since = now

    def end(self) -> None:
        """Return to the part before."""
        now = self._clock()
        self.ns[self._open.pop()] += now - self._since
        self._since = now

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a block of code."""
        self.begin(name)
        try:
            yield
        finally:
            self.end()

    def timed(self, name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Return what makes a function a part."""

        def make(function: Callable[P, T]) -> Callable[P, T]:
            def call(*args: P.args, **kwargs: P.kwargs) -> T:
                self.begin(name)
                try:
                    return function(*args, **kwargs)
                finally:
                    self.end()

            return call

        return make

    def take(self) -> dict[str, float]:
        """Return the microseconds of each part, and begin anew."""
        taken, self.ns = self.ns, {}
        return {name: ns / 1000 for name, ns in taken.items()}


@contextlib.contextmanager
def replaced(patches: Sequence[Patch]) -> Iterator[None]:
    """Replace functions of modules and classes for a while."""
    with contextlib.ExitStack() as stack:
        for owner, name, make in patches:
            before = getattr(owner, name)
            if name in vars(owner):
                stack.callback(setattr, owner, name, before)
            else:  # it is inherited
                stack.callback(delattr, owner, name)
            setattr(owner, name, make(before))
        yield


def runner_class(model: str) -> type[Runner]:
    """Return the class that executes the steps of a model; its libraries must be loaded."""
    if model == "null":
        return NullRunner
    from worker_proc.model_runner import ModelRunner

    return ModelRunner


class SteppedEngine:
    """One engine; `parts` has the time of the core, and of the worker as one part."""

    def __init__(
        self, model: str, flags: Sequence[str], clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        """Load the model; BenchError: the settings are wrong."""
        self.model = model
        self.parts = Parts(clock)
        try:
            _, config = parse("scripts.bench", [model, *flags])
            self._engine = InprocEngine(complete_config(config))
        except (ConfigError, ValueError) as error:
            raise BenchError(str(error)) from error

    @property
    def facts(self) -> ModelFacts:
        return self._engine.facts

    @property
    def num_running(self) -> int:
        return self._engine.stats().num_running_reqs

    @property
    def num_waiting(self) -> int:
        return self._engine.stats().num_waiting_reqs

    @property
    def has_unfinished(self) -> bool:
        return self._engine.has_unfinished

    @contextlib.contextmanager
    def timing(self, more: Sequence[Patch] = ()) -> Iterator[None]:
        """Time the core, the worker, and more."""
        timed = self.parts.timed
        coarse: list[Patch] = [
            (EngineCore, "schedule", timed("schedule")),
            (EngineCore, "update", timed("output")),
            (runner_class(self.model), "execute", timed("worker")),
        ]
        with production_gc(), replaced([*coarse, *more]):
            yield

    def submit(self, request: Request) -> int:
        """Add a request and return its id."""
        params = SamplingParams(max_tokens=request.num_tokens, temperature=0.0, ignore_eos=True)
        return self._engine.submit(request.prompt, params)

    def step(self) -> dict[int, list[int]]:
        """Run one step; returns the new tokens by request. Everything else in it is "client"."""
        with self.parts.part("client"):
            outputs = self._engine.step()
        return {output.request_id: output.token_ids for output in outputs}

    def cancel(self, request_ids: Sequence[int]) -> None:
        """End requests, and compute what is left."""
        for request_id in request_ids:
            self._engine.cancel(request_id)
        while self._engine.has_unfinished:
            self._engine.step()
