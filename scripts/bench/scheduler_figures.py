"""The figures of a benchmark of the scheduler, and the plan that they follow."""

import msgspec

BLOCK_SIZE = 16


class SteadyDecode(msgspec.Struct, frozen=True):
    """One step in which every running request decodes, in microseconds."""

    running: int
    schedule_us: float
    update_us: float
    total_us: float
    vllm_total_us: float | None


class Admission(msgspec.Struct, frozen=True):
    """One prompt that enters an empty scheduler, is computed in one step, and ends, in µs."""

    case: str
    create_us: float
    """The time from the ids of the message to a `Request`; not part of the total."""
    add_us: float
    schedule_us: float
    update_us: float
    total_us: float
    vllm_total_us: float


class MarksCost(msgspec.Struct, frozen=True):
    """What an admission and an end cost to write suspects to the progress page, in microseconds."""

    running: int
    change_us: float


class WaitingCost(msgspec.Struct, frozen=True):
    """What a queue behind full slots adds to a step, in microseconds."""

    running: int
    waiting: int
    without_us: float
    with_us: float
    extra_us: float


class FrontCost(msgspec.Struct, frozen=True):
    """What a request in front of the queue that cannot be admitted adds to a step, in µs."""

    case: str
    without_us: float
    with_us: float
    extra_us: float


class Departure(msgspec.Struct, frozen=True):
    """A client leaves whose requests all run."""

    requests: int
    total_ms: float
    per_request_us: float


class WaitingMemory(msgspec.Struct, frozen=True):
    """Bytes of one waiting request, besides four for each of its tokens."""

    requests: int
    bare_bytes: float
    """In the scheduler, with sampling parameters that all share."""
    wire_bytes: float
    """In the engine, as decoded from a message: with separate parameters and ids."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured, and how long."""

    running: tuple[int, ...] = (16, 64, 256, 1024, 4096)
    waiting_behind: int = 256
    waiting: int = 10_000
    leaving: int = 16_384
    admissions: int = 200
    """The number of admissions in each repeat."""
    steps: int = 10 * BLOCK_SIZE
    """Steps in each repeat: a multiple of the block size, so that all repeats allocate alike."""
    repeats: int = 5
    steps_in_flight: int = 1

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if (min(value) if name == "running" else value) < 1:
                raise ValueError(f"{name} {value} must be at least 1")
        if self.steps % BLOCK_SIZE:
            raise ValueError(f"steps {self.steps} must be a multiple of {BLOCK_SIZE}")
