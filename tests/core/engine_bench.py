"""An engine without sockets, and a worker's outputs for its steps."""

from collections.abc import Iterator

from core_proc.engine import EngineCore
from protocol.api_core import AddRequest, RequestOutput, StepOutputs
from protocol.config.settings import configure
from protocol.core_worker import ModelRunnerOutput, SchedulerOutput
from protocol.model_facts import ModelFacts
from protocol.sampling import SamplingParams

FACTS = ModelFacts("fake", 1000, 512, 16, 100, [2])
CLIENT, OTHER = b"client", b"other"


def make_engine(**settings: object) -> EngineCore:
    engine = EngineCore(configure(model="null", **settings))
    engine.adopt_workers(FACTS)
    return engine


def add(
    request_id: int,
    prompt: list[int] | None = None,
    max_tokens: int = 8,
    *,
    outputs: list[int] | None = None,
    resent: bool = False,
    **params: object,
) -> AddRequest:
    sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    return AddRequest(request_id, prompt or [5, 6, 7], sampling, outputs or [], resent=resent)


def answer(engine: EngineCore, step: SchedulerOutput, token_id: int = 7) -> ModelRunnerOutput:
    """Return a worker's output in which every sampling request gets the same token."""
    sampling = dict(engine.scheduler.in_flight)[step.step_id]
    return ModelRunnerOutput(step.step_id, [token_id] * len(sampling))


def scheduled(engine: EngineCore) -> SchedulerOutput:
    step = engine.schedule()
    assert step is not None
    return step


def run_step(engine: EngineCore, token_id: int = 7) -> dict[bytes, StepOutputs]:
    return engine.update(answer(engine, scheduled(engine), token_id))


def run_all(engine: EngineCore) -> Iterator[tuple[bytes, RequestOutput]]:
    while engine.has_unfinished:
        for client, outputs in run_step(engine).items():
            for row in outputs.outputs:
                yield client, row
