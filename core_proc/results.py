"""What the scheduler tells of its requests."""

from typing import NamedTuple

import msgspec

from core_proc.request import Request
from protocol.sampling import FinishReason


class StepResult(msgspec.Struct, gc=False):
    """What one step brought to one request."""

    request: Request
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The request's own stop token that ended it; None for EOS and all other reasons."""


class Failure(NamedTuple):
    """A request that ended because something went wrong with it alone."""

    request: Request
    error: str
