"""Distributes decoding requests over steps, so that all stages of a pipeline compute.

A stage computes a step while the next stage computes the previous one. A request's next token needs
the last stage first. So the steps in flight share the decoding requests: each has the same number,
and none has a request whose token is in another step. A single request cannot be shared, and is
scheduled ahead of its token as always. Chunks of a prompt need no tokens, and follow each other in
consecutive steps.
"""

from core_proc.options import SchedulerOptions
from core_proc.request import Request


class Stages:
    """Decides which requests wait, for a model in several stages."""

    def __init__(self, options: SchedulerOptions) -> None:
        self._num_stages = options.pipeline_parallel_size
        self.is_on = options.pipeline_parallel_size > 1

    def must_wait(self, request: Request, num_sampling: int, num_running: int) -> bool:
        """Return whether a request with at most one token left to compute waits for later steps.

        `num_sampling` is the number of requests that already sample in this step.
        """
        if num_running == 1:
            return False
        is_pending = request.num_computed_tokens >= request.num_tokens
        return is_pending or num_sampling >= -(-num_running // self._num_stages)
