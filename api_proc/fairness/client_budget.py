"""A bound on the sequences of each client."""

from api_proc.errors import ApiError, overloaded
from api_proc.fairness.shared_bound import SharedBound
from protocol.api_core import ErrorCode
from protocol.fairness.shares import largest_share


class ClientBudget:
    """Counts the sequences of each client; past the bound a request is rejected."""

    def __init__(self, max_per_client: int = 0, max_total: int | None = None) -> None:
        """Bound the sequences of each client.

        Args:
            max_per_client: bound for each client; 0: no bound.
            max_total: number of sequences of all clients, of which each has a share; None: no
                shares.
        """
        self.max_per_client = max_per_client
        self._has_shares = max_total is not None
        self._sequences = SharedBound("max_open_requests", max_total or 0, "sequences")
        """A request whose prompts are not known yet counts as one sequence."""

    def check_size(self, num_sequences: int) -> None:
        """Raise a 400 if one client may never have this number of sequences open."""
        limits = {"max_open_requests_per_client": self.max_per_client}
        if self._has_shares:
            limits["max_open_requests"] = largest_share(self._sequences.limit)
        for setting, limit in limits.items():
            if limit and num_sequences > limit:
                text = f"{setting}: {num_sequences} sequences are more than {limit}"
                raise ApiError(400, f"{text}, all that one client gets", code=ErrorCode.INVALID)

    def check(self, client: str, more: int) -> None:
        """Raise a 429 if a client may not have this number of further sequences now."""
        num_open, limit = self.num_of(client), self.max_per_client
        if more > 0 and limit and num_open + more > limit:
            raise overloaded(
                f"max_open_requests_per_client: {num_open} of this client's {limit} requests and"
                f" sequences are open, and this request adds {more}"
            )
        if more > 0 and self._has_shares and not self._sequences.has_share(client, more):
            raise self._sequences.beyond_share(client, more)

    def count(self, client: str, more: int) -> None:
        """Count further sequences of a client, whatever the bound is; `more` may be negative."""
        self._sequences.add(client, more)

    def num_of(self, client: str) -> int:
        """Return the number of a client's sequences."""
        return self._sequences.held_by(client)
