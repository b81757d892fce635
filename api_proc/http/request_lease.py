"""What an HTTP request holds of the server's budgets, with the request in a journal that it reads.

A request in a journal has a lease of its sequences, with or without a connection. That lease counts
the sequences of one connection that reads them; further connections count by themselves.
"""

from api_proc.fairness.budget import Budget, Lease

_VALUE_BYTES = 100
"""Bytes that a name or a value of the body takes as an object, as long as the request is open."""
_USUAL_VALUES = 1024
"""Values that are not counted, so that agents with some tools are charged only for their bytes."""


class RequestLease:
    """What one request holds; without a budget nothing is counted."""

    def __init__(self, budget: Budget | None, control_budget: Budget | None) -> None:
        """`control_budget` counts the requests that end or control others."""
        self._budget = budget
        self._control_budget = control_budget
        self._lease: Lease | None = None
        self._origin = ""
        self.session: Lease | None = None
        """Lease of the request in the journal that has this request's id, if there is one."""
        self._is_included = False
        """Whether that lease counts this connection."""
        self.is_foreign = False
        """Whether the request may be in the journal of another API process."""

    def open(self, origin: str, *, is_control: bool) -> None:
        """Count the request of a client, before its body is read, or raise a 429.

        `is_control`: the request ends or controls others, so it counts neither for its client nor
        among those that may fill the bounds.
        """
        self._origin = origin
        budget = self._control_budget if is_control else self._budget
        if budget is None:
            return
        holder = client = None if is_control else origin
        if self.session is not None and client is not None and self.session.begin_reading(client):
            self._is_included, client = True, None
        self._lease = budget.open(client=client, holder=holder, is_foreign=self.is_foreign)

    def reserve(self, num_bytes: int) -> None:
        """Reserve room for a part of the body or for a large response, or raise a 429."""
        if self._lease is not None:
            self._lease.grow(num_bytes)

    def reserve_values(self, num_values: int) -> None:
        """Reserve room for the names and values of the decoded body, or raise a 429."""
        self.reserve(max(0, num_values - _USUAL_VALUES) * _VALUE_BYTES)

    def count_sequences(self, number: int) -> None:
        """Count the sequences of a new request for its client, or raise a 400 or a 429."""
        if self._lease is not None:
            if self._is_included:  # the request that had this id is over
                self._end_reading()
                self._lease.client = self._origin
            self._lease.count_sequences(number)

    def pass_sequences(self, session: Lease) -> None:
        """Let the lease of a request in the journal count the sequences from here on."""
        if self._lease is not None:
            session.take_sequences(self._lease)
            self.session = session
            self._is_included = session.begin_reading(self._origin)

    def close(self) -> None:
        """Release everything."""
        if self._lease is not None:
            self._lease.close()
        self._end_reading()

    def _end_reading(self) -> None:
        if self.session is not None and self._is_included:
            self.session.end_reading()
        self._is_included = False
