"""Reports how much of a prompt is computed, for requests that ask for it."""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from core_proc.outputs.owners import owner_of
from core_proc.request import Request
from protocol.api_core import RequestOutput
from protocol.core_worker import SchedulerOutput


class _Progress(NamedTuple):
    request: Request
    num_computed_tokens: int


class PromptProgress:
    """Reports each part of a prompt except the last one, which is followed by the first token.

    A step costs no more than the requests that it computes: those that wait are not visited.
    """

    def __init__(self, requests: Mapping[int, Request]) -> None:
        """`requests` are all open requests, by their ids."""
        self._requests = requests
        self._is_used = False
        """Whether any request has asked so far."""
        self._in_flight: deque[tuple[int, list[_Progress]]] = deque()
        """What the output of each step will show to be computed."""

    def added(self, request: Request) -> None:
        self._is_used = self._is_used or request.sampling_params.return_progress

    def dispatched(self, step: SchedulerOutput) -> None:
        """Note the parts of prompts that a step computes."""
        if not self._is_used:
            return
        parts = []
        for req_id in step.num_scheduled_tokens:
            request = self._requests[req_id]
            if not request.sampling_params.return_progress or request.num_output_tokens:
                continue
            owner, num_computed = owner_of(request), request.num_computed_tokens
            # After a preemption a part is computed again.
            if owner.num_reported_tokens < num_computed < request.num_prompt_tokens:
                owner.num_reported_tokens = num_computed
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
