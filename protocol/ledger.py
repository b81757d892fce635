"""The client's ledger: the truth about every request that it has accepted.

No sockets here: outputs of the core go in, news to deliver and messages to send come out. Core and
workers are caches of the ledger, so every repair is the same: add the request again, with the
tokens that are already known. Exactly once by index: an output that starts too low is compared and
dropped, one that starts too high is asked for again.
"""

from collections.abc import Iterator

import msgspec

from protocol.api_core import (
    AbortRequests,
    AddRequest,
    ErrorCode,
    RequestError,
    RequestOutput,
)

REPAIR_MESSAGES_MAX = 3
"""A request whose outputs never fit, even after so many repairs, fails."""


class RequestFailed(Exception):
    """One request was refused or cannot go on."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(f"{error.code}: {error.message}")
        self.error = error


class _Entry:
    __slots__ = ("add", "num_repairs", "output_token_ids")

    def __init__(self, add: AddRequest) -> None:
        self.add = add
        self.output_token_ids = list(add.output_token_ids)
        self.num_repairs = 0

    def resumed(self) -> AddRequest:
        """The request as a core must see it that knows nothing of it."""
        return msgspec.structs.replace(self.add, output_token_ids=list(self.output_token_ids))


class Ledger:
    """All open requests of one client, in the order in which they were accepted."""

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._entries: dict[int, _Entry] = {}
        self._next_id = 0
        self.num_duplicates = 0
        """Tokens that came again, equal to the known ones, and were dropped."""
        self.num_mismatches = 0
        """Requests failed because a token came again as another one."""

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
            RequestFailed: too many are open already.
        """
        assert add.request_id not in self._entries
        if len(self._entries) >= self._max_open:
            message = f"{self._max_open} requests are open, the most this client takes"
            raise RequestFailed(RequestError(ErrorCode.OVERLOADED, message))
        self._entries[add.request_id] = _Entry(add)

    def cancel(self, request_id: int) -> AbortRequests | None:
        """Forget a request; returns what to tell the core, if it was open."""
        if self._entries.pop(request_id, None) is None:
            return None
        return AbortRequests([request_id])

    def fail(self, request_id: int) -> bool:
        """Forget a request that the core refused; whether it was open."""
        return self._entries.pop(request_id, None) is not None

    def open_requests(self) -> Iterator[AddRequest]:
        """Everything open as a new core must see it, oldest first."""
        for entry in self._entries.values():
            yield entry.resumed()

    def take(self, output: RequestOutput) -> RequestOutput | AddRequest | None:
        """Enter one output of the core.

        Returns:
            What is new in it, to be delivered; or the request to be sent again because tokens are
            missing before this output; or None where nothing is new.

        Raises:
            RequestFailed: the output contradicts the ledger.
        """
        entry = self._entries.get(output.request_id)
        if entry is None:
            return None
        known = entry.output_token_ids
        num_again = len(known) - output.first_index
        if num_again < 0:
            return self._repair(output.request_id, entry)
        if num_again:
            return self._take_overlapping(output, entry, num_again)
        known += output.token_ids
        if output.finish_reason is not None:
            del self._entries[output.request_id]
        return output

    def _take_overlapping(
        self, output: RequestOutput, entry: _Entry, num_again: int
    ) -> RequestOutput | AddRequest | None:
        again = output.token_ids[:num_again]
        if entry.output_token_ids[output.first_index :][: len(again)] != again:
            self.num_mismatches += 1
            del self._entries[output.request_id]
            message = f"output {output.first_index} came again with other tokens"
            raise RequestFailed(RequestError(ErrorCode.INTERNAL, message))
        self.num_duplicates += len(again)
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

    def _repair(self, request_id: int, entry: _Entry) -> AddRequest:
        entry.num_repairs += 1
        if entry.num_repairs > REPAIR_MESSAGES_MAX:
            del self._entries[request_id]
            message = f"outputs were missing {entry.num_repairs} times"
            raise RequestFailed(RequestError(ErrorCode.INTERNAL, message))
        return entry.resumed()
