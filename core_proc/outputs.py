"""From a step's results to the rows that clients are told, and whose row is whose."""

from core_proc.request import Request
from core_proc.results import StepResult
from protocol.api_core import RequestOutput
from protocol.core_worker import ModelRunnerOutput, PromptLogprobs

Client = bytes
"""Identity of a client's connection."""

_MAX_ENTRIES = 4096
"""Prompt logprobs in one output: a prompt has any number of them, and a frame a largest size."""


class Owner:
    """What the engine keeps beside each request: whose it is and what was told already."""

    __slots__ = ("client", "next_prompt_position", "request_id", "told_cached")

    def __init__(self, client: Client, request_id: int) -> None:
        self.client = client
        self.request_id = request_id
        self.told_cached = False
        self.next_prompt_position = 0
        """Of the first prompt logprob that was not told yet."""


def owner_of(request: Request) -> Owner:
    """Return what the engine attached to a request."""
    owner = request.owner
    assert isinstance(owner, Owner)
    return owner


def prompt_rows(request: Request, part: PromptLogprobs) -> list[RequestOutput]:
    """Pass on prompt logprobs that are new: a prompt computed again brings them again.

    They go out before the first token, so a request with outputs has all of them.
    """
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
    """Tell the tokens that a step brought to one request, and its end."""
    request, token_ids = result.request, result.new_token_ids
    first_index = len(request.token_ids) - request.num_prompt_tokens - len(token_ids)
    if owner.told_cached and not output.logprobs and result.finish_reason is None:
        return RequestOutput(owner.request_id, first_index, token_ids)
    num_cached = None if owner.told_cached else request.num_cached_tokens
    owner.told_cached = True
    logprobs = output.logprobs.get(request.req_id)
    return RequestOutput(
        owner.request_id,
        first_index,
        token_ids,
        result.finish_reason,
        result.stop_token_id,
        num_cached,
        None if logprobs is None else logprobs[: len(token_ids)],
    )
