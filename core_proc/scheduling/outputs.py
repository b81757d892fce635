"""Processes the worker's answer to a step: tokens are appended, and requests end."""

from itertools import islice

from core_proc.options import SchedulerOptions
from core_proc.request import Request, RequestStatus
from core_proc.scheduling.departures import Departures
from core_proc.scheduling.request_queues import RequestQueues
from core_proc.scheduling.results import StepResult
from core_proc.scheduling.speculation import Speculation
from protocol.core_worker import ModelRunnerOutput


class OutputUpdate:
    """Appends the tokens of a step to the requests that sampled in it, in mirror order.

    Tokens of requests that have ended in the meantime are dropped.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        queues: RequestQueues,
        speculation: Speculation,
        departures: Departures,
    ) -> None:
        self._eos_token_ids = options.eos_token_ids
        self._queues = queues
        self._speculation = speculation
        self._departures = departures
        self.num_generation_tokens = 0

    def append(self, sampling: list[Request], output: ModelRunnerOutput) -> list[StepResult]:
        """Append one token to each request, and end the requests that are complete."""
        num_tokens = len(output.sampled_token_ids)
        assert num_tokens == len(sampling), f"{num_tokens} tokens, {len(sampling)} requests sampled"
        results: list[StepResult] = []
        append, running = results.append, RequestStatus.RUNNING
        for request, token_id in zip(sampling, output.sampled_token_ids, strict=True):
            if request.status is not running:
                if request.is_finished:
                    continue
                request.num_late_tokens -= 1
            token_ids = request.token_ids
            token_ids.append(token_id)
            append(result := StepResult(request, [token_id]))
            if len(token_ids) >= request.checked_from or token_id in request.stop_token_ids:
                self._check_stop(result, token_id)
        self.num_generation_tokens += len(results)
        return results

    def append_verified(
        self, sampling: list[Request], output: ModelRunnerOutput
    ) -> list[StepResult]:
        """Append tokens to requests with drafts; tokens after a request's end are dropped."""
        counts = output.num_sampled_tokens or [1] * len(sampling)
        drafts = output.num_draft_tokens or [0] * len(sampling)
        tokens = iter(output.sampled_token_ids)
        results, num_running = [], len(self._queues.running)
        for request, num_sampled, num_drafts in zip(sampling, counts, drafts, strict=True):
            token_ids = list(islice(tokens, num_sampled))
            if request.is_finished:
                continue
            if request.status is RequestStatus.RUNNING:
                self._speculation.verified(request, num_sampled, num_drafts, num_running)
                if request.num_draft_tokens:
                    self._queues.due_index.enter(request)
            else:
                request.num_late_tokens -= 1
            result = StepResult(request, [])
            for token_id in token_ids:
                request.token_ids.append(token_id)
                result.new_token_ids.append(token_id)
                may_end = request.num_tokens >= request.checked_from
                may_end = may_end or token_id in request.stop_token_ids
                if may_end and self._check_stop(result, token_id):
                    break
            results.append(result)
            self.num_generation_tokens += len(result.new_token_ids)
        return results

    def _check_stop(self, result: StepResult, token_id: int) -> bool:
        reason = result.check_stop(token_id, self._eos_token_ids)
        if reason is None:
            return False
        if result.request.sampling_params.pooling is not None:
            self.num_generation_tokens -= 1  # the client gets a vector instead
        self._departures.finish(result.request, reason, result.stop_token_id)
        return True
