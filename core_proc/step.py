"""What one step grants, while the scheduler puts it together."""

from core_proc.request import Request
from protocol.core_worker import CachedRequestData, NewRequestData, SchedulerOutput


class ScheduledStep:
    """The budget of one step and who got what of it."""

    __slots__ = ("budget", "granted", "grown", "new_reqs", "preempted", "sampling", "threshold")

    def __init__(self, budget: int, threshold: int) -> None:
        self.budget = budget
        """Tokens left to hand out."""
        self.threshold = threshold
        """No request gets more tokens than this; 0: no such limit."""
        self.sampling: list[Request] = []
        """Whoever reaches the end of its tokens and so samples one, in mirror order."""
        self.granted: dict[int, int] = {}
        """Tokens by request id; a request missing here is in `sampling` and has one token."""
        self.grown: dict[int, list[int]] = {}
        """New blocks of requests that the worker knows, by request id."""
        self.new_reqs: list[NewRequestData] = []
        self.preempted: list[Request] = []

    def limit(self, num_tokens: int) -> int:
        """Cut a wish to the threshold."""
        return min(num_tokens, self.threshold) if self.threshold else num_tokens

    def introduce(self, request: Request, num_cached_tokens: int) -> None:
        """Name a request that the worker does not know, with all that it needs."""
        self.new_reqs.append(
            NewRequestData(
                req_id=request.req_id,
                token_ids=request.token_ids.tolist(),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling_params=request.sampling_params,
                block_ids=request.block_ids.copy(),
                num_computed_tokens=request.num_computed_tokens,
                num_cached_tokens=num_cached_tokens,
            )
        )

    def withdraw(self, request: Request) -> int:
        """Undo a grant of this step.

        Returns:
            The number of tokens it was for; 0 if there was none.
        """
        samples = request in self.sampling
        num_tokens = self.granted.pop(request.req_id, int(samples))
        if samples:
            self.sampling.remove(request)
        self.grown.pop(request.req_id, None)
        self.budget += num_tokens
        return num_tokens

    def message(
        self, step_id: int, finished_req_ids: list[int], num_tokens: int
    ) -> SchedulerOutput:
        """Say it to the worker: only what is not one token for a request that it knows."""
        return SchedulerOutput(
            step_id=step_id,
            scheduled_new_reqs=self.new_reqs,
            scheduled_cached_reqs=CachedRequestData(list(self.grown), list(self.grown.values())),
            num_scheduled_tokens={req_id: n for req_id, n in self.granted.items() if n != 1},
            total_num_scheduled_tokens=num_tokens,
            preempted_req_ids=[request.req_id for request in self.preempted],
            finished_req_ids=finished_req_ids,
        )
