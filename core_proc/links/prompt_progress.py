"""How much of their prompts is computed, for requests that ask for it."""

from collections import deque
from typing import NamedTuple

from core_proc.links.owners import owner_of
from core_proc.request import Request
from protocol.api_core import RequestOutput
from protocol.core_worker import SchedulerOutput


class _Progress(NamedTuple):
    request: Request
    num_computed_tokens: int


class PromptProgress:
    """Follows requests from their arrival to the step that ends their prompts."""

    def __init__(self) -> None:
        self._num_reported: dict[Request, int] = {}
        self._in_flight: deque[tuple[int, list[_Progress]]] = deque()
        """By step: what its output shows to be computed."""

    def __bool__(self) -> bool:
        return bool(self._num_reported or self._in_flight)

    def added(self, request: Request) -> None:
        if not request.num_output_tokens:
            self._num_reported[request] = 0

    def dispatched(self, step: SchedulerOutput) -> None:
        """Note the parts of prompts that a step computes."""
        if not step.num_scheduled_tokens:
            return  # one token for each request
        parts = []
        for request, num_reported in list(self._num_reported.items()):
            num_computed = request.num_computed_tokens
            if request.is_finished or num_computed >= request.num_prompt_tokens:
                del self._num_reported[request]  # the first token follows
            elif num_computed > num_reported:
                self._num_reported[request] = num_computed
                parts.append(_Progress(request, num_computed))
        if parts:
            self._in_flight.append((step.step_id, parts))

    def computed(self, step_id: int) -> list[tuple[Request, RequestOutput]]:
        """Return the rows for the clients of requests in this step."""
        if not self._in_flight or self._in_flight[0][0] != step_id:
            return []
        _, parts = self._in_flight.popleft()
        return [
            (
                request,
                RequestOutput(
                    owner_of(request).request_id,
                    0,
                    [],
                    num_cached_tokens=request.num_cached_tokens,
                    num_computed_tokens=num_computed,
                ),
            )
            for request, num_computed in parts
            if not (request.is_finished or request.num_output_tokens)
        ]

    def workers_lost(self) -> None:
        self._in_flight.clear()
