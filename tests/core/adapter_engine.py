"""Engines whose requests have adapters."""

from core_proc.engine import EngineCore
from protocol.adapters import Adapter
from protocol.api_core import AddRequest, Control, ControlAction, ControlDone, ErrorCode, Refused
from protocol.config.settings import configure
from protocol.core_worker import (
    AdapterLoaded,
    LoadAdapter,
    ModelRunnerOutput,
    SchedulerOutput,
    UnloadAdapter,
)
from tests.core.engine_bench import FACTS, add

A, B, C, D = (Adapter(name, f"/adapters/{name}", name.encode() * 32) for name in "abcd")


def make_engine(max_loras: int = 1, max_cpu_loras: int | None = None, **more: object) -> EngineCore:
    config = configure(enable_lora=True, max_loras=max_loras, max_cpu_loras=max_cpu_loras, **more)
    engine = EngineCore(config)
    engine.adopt_workers(FACTS)
    return engine


def adapted(request_id: int, adapter: Adapter, **more: object) -> AddRequest:
    base = add(request_id, **more)  # type: ignore[arg-type]
    fields = {name: getattr(base, name) for name in base.__struct_fields__}
    return AddRequest(**{**fields, "adapter": adapter})


def new_ids(step: SchedulerOutput | None) -> list[int]:
    return [] if step is None else [new.req_id for new in step.scheduled_new_reqs]


def load_all(engine: EngineCore) -> list[LoadAdapter | UnloadAdapter]:
    """Answer all loads that are sent; returns the messages."""
    messages = engine.take_adapters()
    for message in messages:
        if isinstance(message, LoadAdapter):
            engine.answered(AdapterLoaded(message.adapter.adapter_id))
    return messages


def refusals(engine: EngineCore) -> dict[int, ErrorCode]:
    mail = [message for _, message in engine.take_outgoing() if isinstance(message, Refused)]
    return {message.request_id: message.error.code for message in mail}


def answer_oldest(engine: EngineCore) -> ModelRunnerOutput:
    step_id, sampling = engine.scheduler.in_flight[0]
    return ModelRunnerOutput(step_id, [7] * len(sampling))


def control(number: int, adapter: Adapter, action: str = "load_adapter") -> Control:
    return Control(number, ControlAction(action), adapter=adapter)


def ended_controls(engine: EngineCore) -> list[tuple[int, bool, str]]:
    mail = [message for _, message in engine.take_outgoing() if isinstance(message, ControlDone)]
    return [(message.number, message.ok, message.error) for message in mail]
