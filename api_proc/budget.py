"""Bounds on the number of open requests, of each client too, and on the bytes of their bodies."""

from collections import Counter

from api_proc.errors import ApiError, overloaded
from protocol.api_core import ErrorCode


class Budget:
    """Counts open requests and their bytes; past a bound a request is rejected with 429."""

    def __init__(self, max_requests: int, max_bytes: int, max_per_client: int = 0) -> None:
        """`max_per_client` bounds the sequences of each client; 0: no bound."""
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._max_per_client = max_per_client
        self._num_of: Counter[str] = Counter()
        """Sequences of each client; a request whose prompts are not known yet counts as one."""
        self.num_requests = 0
        self.num_bytes = 0

    def open(self, num_bytes: int = 0, client: str | None = None) -> "Lease":
        """Admit one request that holds `num_bytes` so far, or raise a 429.

        None as `client`: the request is not counted for any client.
        """
        if self.num_requests >= self._max_requests:
            raise overloaded(f"max_open_requests: {self._max_requests} requests are open")
        if self.num_bytes >= self._max_bytes:
            raise self._out_of_bytes()
        lease = Lease(self, num_bytes, client)
        lease.count_sequences(1)
        try:
            self.reserve(num_bytes)
        except ApiError:
            lease.count_sequences(0)
            raise
        self.num_requests += 1
        return lease

    def check_size(self, num_sequences: int) -> None:
        """Raise a 400 if a client may never have as many sequences open."""
        most = self._max_per_client
        if most and num_sequences > most:
            text = f"max_open_requests_per_client: {num_sequences} sequences are more than {most}"
            raise ApiError(400, text, code=ErrorCode.INVALID)

    def count(self, client: str, more: int) -> None:
        """Count more sequences of a client, or raise a 429; a negative number always succeeds."""
        num_open, most = self._num_of[client], self._max_per_client
        if more > 0 and most and num_open + more > most:
            raise overloaded(
                f"max_open_requests_per_client: {num_open} of this client's {most} requests and"
                f" sequences are open, and this request adds {more}"
            )
        self._num_of[client] += more
        if not self._num_of[client]:
            del self._num_of[client]

    def reserve(self, num_bytes: int) -> None:
        """Reserve `num_bytes` more, or raise a 429; a single request may have any size."""
        if self.num_bytes and self.num_bytes + num_bytes > self._max_bytes:
            raise self._out_of_bytes()
        self.num_bytes += num_bytes

    def _out_of_bytes(self) -> ApiError:
        return overloaded(
            f"max_open_bytes: open requests hold {self.num_bytes} of {self._max_bytes} bytes"
        )


class Lease:
    """What one request holds of the budget."""

    __slots__ = ("_budget", "_client", "_num_bytes", "_num_sequences")

    def __init__(self, budget: Budget, num_bytes: int, client: str | None = None) -> None:
        self._budget: Budget | None = budget
        self._num_bytes = num_bytes
        self._client = client
        self._num_sequences = 0

    def grow(self, num_bytes: int) -> None:
        """Reserve `num_bytes` more, or raise a 429."""
        assert self._budget is not None
        self._budget.reserve(num_bytes)
        self._num_bytes += num_bytes

    def count_sequences(self, number: int) -> None:
        """Set the number of sequences; raise a 429, or a 400 if no client may have as many."""
        if self._budget is not None and self._client is not None:
            self._budget.check_size(number)
            self._budget.count(self._client, number - self._num_sequences)
            self._num_sequences = number

    def close(self) -> None:
        """Release everything; a second call has no effect."""
        if self._budget is not None:
            self.count_sequences(0)
            self._budget.num_bytes -= self._num_bytes
            self._budget.num_requests -= 1
            self._budget = None
