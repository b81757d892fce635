"""The rows that clients are sent: what one step brought to each request."""

from core_proc.outputs.owners import Owner, owner_of
from core_proc.request import Request
from core_proc.scheduling.results import StepResult
from protocol.api_core import RequestOutput
from protocol.core_worker import ModelRunnerOutput, PromptLogprobs
from protocol.sampling import FinishReason

_MAX_ENTRIES = 4096
"""Prompt logprobs in one output, so that the outputs of a long prompt fit into frames."""


def prompt_rows(request: Request, part: PromptLogprobs) -> list[RequestOutput]:
    """Return rows with the prompt logprobs that were not sent yet; they precede the first token."""
    if request.num_output_tokens:
        return []
    owner = owner_of(request)
    rows = []
    end = part.first_position + len(part.entries)
    for first in range(max(owner.next_prompt_position, part.first_position), end, _MAX_ENTRIES):
        index = first - part.first_position
        piece = PromptLogprobs(part.req_id, first, part.entries[index : index + _MAX_ENTRIES])
        rows.append(RequestOutput(owner.request_id, 0, [], prompt_logprobs=[piece]))
    owner.next_prompt_position = max(owner.next_prompt_position, end)
    return rows


def output_row(result: StepResult, owner: Owner, output: ModelRunnerOutput) -> RequestOutput:
    """Return the row with the tokens of a step for one request, and its end."""
    request, token_ids = result.request, result.new_token_ids
    first_index = len(request.token_ids) - request.num_prompt_tokens - len(token_ids)
    if owner.sent_first and not output.logprobs and result.finish_reason is None:
        return RequestOutput(owner.request_id, first_index, token_ids)
    num_cached = queue_time_s = None
    if not owner.sent_first:
        num_cached, queue_time_s = request.num_cached_tokens, owner.queue_time_s
        owner.sent_first = True
    if request.sampling_params.pooling is not None:
        return RequestOutput(
            owner.request_id,
            0,
            [],
            FinishReason.STOP,
            num_cached_tokens=num_cached,
            embedding=output.pooled[request.req_id],
            queue_time_s=queue_time_s,
        )
    logprobs = output.logprobs.get(request.req_id)
    return RequestOutput(
        owner.request_id,
        first_index,
        token_ids,
        result.finish_reason,
        result.stop_token_id,
        num_cached,
        None if logprobs is None else logprobs[: len(token_ids)],
        queue_time_s=queue_time_s,
    )
