"""The client's ledger: the truth about every request that it has accepted.

No sockets here: outputs of the core go in, news to deliver and messages to send come out. Core and
workers are caches of the ledger, so every repair is the same: add the request again, with the
tokens that are already known. Exactly once by index: an output that starts too low is compared and
dropped, one that starts too high is asked for again. Prompt logprobs go by position likewise.
"""

import re
from array import array
from collections.abc import Iterator

import msgspec

from protocol.api_core import (
    PACKED_FROM_TOKENS,
    AbortRequests,
    AddRequest,
    ErrorCode,
    RequestError,
    RequestOutput,
    decode_from_client,
    encode_add,
    validate_request,
)
from protocol.core_worker import ModelFacts, PromptLogprobs
from protocol.errors import failure_of
from protocol.message import MAX_TEXT, ProtocolError, encode
from protocol.sampling import SamplingParams

REPAIR_MESSAGES_MAX = 3
"""A request whose outputs still do not fit after so many repairs in a row fails."""
_PATH = re.compile(r" - at .*?\$\[(\d+)\](?:\[(\d+)\])?.*")
"""Where in a body the decoder found fault: the place of a field, and of a field within that."""


def check_request(add: AddRequest, facts: ModelFacts) -> tuple[AddRequest, bytes]:
    """Check a request as the core will, before anybody takes responsibility for it.

    Structs check nothing when they are built, so the bounds are checked by decoding what would be
    sent.

    Returns:
        The request, sharing nothing with the caller's, and its body for the wire.

    Raises:
        RequestFailed: the error names the field and the bound.
    """
    try:
        body = encode(add)
    except (TypeError, ValueError, OverflowError, RecursionError) as problem:
        message = f"request cannot be encoded: {problem}"[:MAX_TEXT]
        raise failure_of(RequestError(ErrorCode.INVALID, message)) from problem
    try:
        checked = decode_from_client(body)
    except ProtocolError as problem:
        raise failure_of(_out_of_bounds(str(problem))) from problem
    assert isinstance(checked, AddRequest)
    error = validate_request(checked, facts)
    if error is not None:
        raise failure_of(error)
    return checked, body if len(add.prompt_token_ids) < PACKED_FROM_TOKENS else encode_add(checked)


def _out_of_bounds(problem: str) -> RequestError:
    """Translate the decoder's complaint: places in arrays become names of fields."""
    match = _PATH.search(problem)
    if match is None:
        return RequestError(ErrorCode.INVALID, problem[:MAX_TEXT])
    name = AddRequest.__struct_fields__[int(match[1]) - 1]  # the message's own name comes first
    if name == "sampling_params" and match[2] is not None:
        name = SamplingParams.__struct_fields__[int(match[2])]
    param = "prompt" if name == "prompt_token_ids" else name
    text = f"{param}: {_PATH.sub('', problem)}"
    return RequestError(ErrorCode.INVALID, text[:MAX_TEXT], param)


class _Entry:
    __slots__ = ("add", "next_prompt_position", "num_repairs", "output_token_ids")

    def __init__(self, add: AddRequest) -> None:
        self.add = add
        self.output_token_ids = array("i", add.output_token_ids)
        self.num_repairs = 0
        """Since the last output that fitted."""
        self.next_prompt_position = 0

    def resumed(self) -> AddRequest:
        """The request as a core must see it that knows nothing of it."""
        return msgspec.structs.replace(
            self.add, output_token_ids=list(self.output_token_ids), resent=True
        )

    def new_prompt_logprobs(self, parts: list[PromptLogprobs]) -> list[PromptLogprobs] | None:
        """Cut off what came before: a prompt computed again brings its logprobs again."""
        news = []
        for part in parts:
            num_again = max(0, self.next_prompt_position - part.first_position)
            if num_again < len(part.entries):
                first = part.first_position + num_again
                news.append(PromptLogprobs(part.req_id, first, part.entries[num_again:]))
                self.next_prompt_position = part.first_position + len(part.entries)
        return news or None


class Ledger:
    """All open requests of one client, in the order in which they were accepted."""

    def __init__(self, max_open: int, max_open_tokens: int | None = None) -> None:
        """Take at most so many requests, and prompts of so many tokens together; None: any."""
        self._max_open = max_open
        self._max_open_tokens = max_open_tokens
        self.num_prompt_tokens = 0
        """Of everything open."""
        self._entries: dict[int, _Entry] = {}
        self._repairing: set[int] = set()
        """Requests sent again for a gap since the last `allow_repairs`."""
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._entries

    def next_request_id(self) -> int:
        """A number that this incarnation has not used yet."""
        self._next_id += 1
        return self._next_id

    def accept(self, add: AddRequest) -> None:
        """Take responsibility for a request.

        Raises:
            Overloaded: too many are open already, or too many tokens.
        """
        assert add.request_id not in self._entries
        if len(self._entries) >= self._max_open:
            message = f"{self._max_open} requests are open, the most this client takes"
            raise failure_of(RequestError(ErrorCode.OVERLOADED, message))
        num_tokens = self.num_prompt_tokens + len(add.prompt_token_ids)
        limit = self._max_open_tokens
        if limit is not None and num_tokens > limit and self._entries:
            message = f"prompts of {limit} tokens are open, the most this client takes"
            raise failure_of(RequestError(ErrorCode.OVERLOADED, message))
        self.num_prompt_tokens = num_tokens
        self._entries[add.request_id] = _Entry(add)

    def cancel(self, request_id: int) -> AbortRequests | None:
        """Forget a request; returns what to tell the core, if it was open."""
        if not self.fail(request_id):
            return None
        return AbortRequests([request_id])

    def fail(self, request_id: int) -> bool:
        """Forget a request that is not served; whether it was open."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return False
        self.num_prompt_tokens -= len(entry.add.prompt_token_ids)
        return True

    def open_requests(self) -> Iterator[AddRequest]:
        """Everything open as a new core must see it, oldest first."""
        for entry in self._entries.values():
            yield entry.resumed()

    def allow_repairs(self) -> None:
        """Called about once a second: a gap that has not closed yet may be asked for again."""
        self._repairing.clear()

    def take(self, output: RequestOutput) -> RequestOutput | AddRequest | None:
        """Enter one output of the core.

        Returns:
            What is new in it, to be delivered; or the request to be sent again because tokens are
            missing before this output; or None where nothing is new.

        Raises:
            RequestFailed: the output contradicts the ledger; the request is forgotten.
        """
        entry = self._entries.get(output.request_id)
        if entry is None:
            return None
        known = entry.output_token_ids
        num_again = len(known) - output.first_index
        if num_again < 0:
            # One repair at a time: outputs that were under way already are no further gaps.
            return None if output.request_id in self._repairing else self.repair(output.request_id)
        if num_again:
            return self._take_overlapping(output, entry, num_again)
        if output.prompt_logprobs is not None:
            parts = entry.new_prompt_logprobs(output.prompt_logprobs)
            if parts is None and not output.token_ids and output.finish_reason is None:
                return None
            output = msgspec.structs.replace(output, prompt_logprobs=parts)
        if entry.num_repairs:
            entry.num_repairs = 0
            self._repairing.discard(output.request_id)
        known.extend(output.token_ids)
        if output.finish_reason is not None:
            self.fail(output.request_id)
        return output

    def _take_overlapping(
        self, output: RequestOutput, entry: _Entry, num_again: int
    ) -> RequestOutput | AddRequest | None:
        again = output.token_ids[:num_again]
        first = output.first_index
        if entry.output_token_ids[first : first + len(again)].tolist() != again:
            self.fail(output.request_id)
            message = f"output {output.first_index} came again with other tokens"
            raise failure_of(RequestError(ErrorCode.INTERNAL, message))
        if len(output.token_ids) < num_again or (
            len(output.token_ids) == num_again and output.finish_reason is None
        ):
            return None
        logprobs = None if output.logprobs is None else output.logprobs[num_again:]
        return self.take(
            msgspec.structs.replace(
                output,
                first_index=output.first_index + num_again,
                token_ids=output.token_ids[num_again:],
                logprobs=logprobs,
            )
        )

    def repair(self, request_id: int) -> AddRequest | None:
        """Return a request to be sent again, as an output of it is missing; None: it is not open.

        Raises:
            RequestFailed: it was repaired too often; the request is forgotten.
        """
        entry = self._entries.get(request_id)
        if entry is None:
            return None
        if entry.num_repairs == REPAIR_MESSAGES_MAX:
            self.fail(request_id)
            message = f"outputs were missing after {REPAIR_MESSAGES_MAX} repairs"
            raise failure_of(RequestError(ErrorCode.INTERNAL, message))
        entry.num_repairs += 1
        self._repairing.add(request_id)
        return entry.resumed()
