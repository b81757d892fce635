"""The open requests of every client, the messages that wait for it, and the rows of its outputs."""

from dataclasses import dataclass

from core_proc.request import Request
from core_proc.scheduling.results import StepResult
from protocol.api_core import CoreToClient, RequestOutput
from protocol.core_worker import ModelRunnerOutput, PromptLogprobs
from protocol.sampling import FinishReason

_MAX_ENTRIES = 4096
"""Prompt logprobs in one output, so that the outputs of a long prompt fit into frames."""
Client = bytes
"""Identity of a client's connection."""


@dataclass(slots=True, eq=False)
class Owner:
    """The client of a request, and a record of what the client was sent."""

    client: Client
    request_id: int
    sent_cached: bool = False
    next_prompt_position: int = 0
    num_reported_tokens: int = 0
    """Prompt tokens whose progress was reported, for requests that ask for it."""


def owner_of(request: Request) -> Owner:
    owner = request.owner
    assert isinstance(owner, Owner)
    return owner


class Owners:
    """Maps the numbers that clients give their requests to the unique ones of the engine."""

    def __init__(self) -> None:
        self._open: dict[Client, dict[int, int]] = {}
        """By client and its number: the engine's."""
        self._outgoing: list[tuple[Client, CoreToClient]] = []

    @property
    def num_open(self) -> int:
        return sum(map(len, self._open.values()))

    def has(self, client: Client, request_id: int) -> bool:
        return request_id in self._open.get(client, ())

    def waits_for(self, request: Request) -> bool:
        """Return whether this request is open, and not a later one with the same number."""
        owner = owner_of(request)
        return self._open.get(owner.client, {}).get(owner.request_id) == request.req_id

    def enter(self, client: Client, request_id: int, req_id: int) -> None:
        self._open.setdefault(client, {})[request_id] = req_id

    def remove(self, client: Client, request_id: int) -> int | None:
        """Remove a request; returns the engine's number of it, None if it is not open."""
        return self._open.get(client, {}).pop(request_id, None)

    def drop(self, client: Client) -> list[int]:
        """Remove a client and its messages; returns the engine's numbers of its open requests."""
        self._outgoing = [(peer, message) for peer, message in self._outgoing if peer != client]
        return list(self._open.pop(client, {}).values())

    def post(self, client: Client, message: CoreToClient) -> None:
        self._outgoing.append((client, message))

    def take_outgoing(self) -> list[tuple[Client, CoreToClient]]:
        outgoing, self._outgoing = self._outgoing, []
        return outgoing


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
    if owner.sent_cached and not output.logprobs and result.finish_reason is None:
        return RequestOutput(owner.request_id, first_index, token_ids)
    num_cached = None if owner.sent_cached else request.num_cached_tokens
    owner.sent_cached = True
    if request.sampling_params.pooling is not None:
        return RequestOutput(
            owner.request_id,
            0,
            [],
            FinishReason.STOP,
            num_cached_tokens=num_cached,
            embedding=output.pooled[request.req_id],
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
    )
