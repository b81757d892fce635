"""Bounds on the number of open requests and on the bytes of their bodies."""

from api_proc.errors import ApiError, overloaded


class Budget:
    """Counts open requests and their bytes; past either bound a request is rejected with 429."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self.num_requests = 0
        self.num_bytes = 0

    def open(self, num_bytes: int = 0) -> "Lease":
        """Admit one request that holds `num_bytes` so far, or raise a 429."""
        if self.num_requests >= self._max_requests:
            raise overloaded(f"max_open_requests: {self._max_requests} requests are open")
        if self.num_bytes >= self._max_bytes:
            raise self._out_of_bytes()
        self.reserve(num_bytes)
        self.num_requests += 1
        return Lease(self, num_bytes)

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

    __slots__ = ("_budget", "_num_bytes")

    def __init__(self, budget: Budget, num_bytes: int) -> None:
        self._budget: Budget | None = budget
        self._num_bytes = num_bytes

    def grow(self, num_bytes: int) -> None:
        """Reserve `num_bytes` more, or raise a 429."""
        assert self._budget is not None
        self._budget.reserve(num_bytes)
        self._num_bytes += num_bytes

    def close(self) -> None:
        """Release everything; a second call has no effect."""
        if self._budget is not None:
            self._budget.num_bytes -= self._num_bytes
            self._budget.num_requests -= 1
            self._budget = None
