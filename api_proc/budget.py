"""How much the server holds open: requests, and bytes of their bodies. Past it new ones get 429."""

from api_proc.errors import overloaded


class Budget:
    """Shared by all requests; each has a `Lease` of it from before its body is read to its end."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self.num_requests = 0
        self.num_bytes = 0

    def open(self, num_bytes: int = 0) -> "Lease":
        """Begin a request, of so many bytes for now.

        Raises:
            ApiError: 429 where too many are open.
        """
        if self.num_requests >= self._max_requests:
            raise overloaded(f"{self._max_requests} requests are open already")
        if self.num_bytes >= self._max_bytes:
            raise self._no_room()
        self.take(num_bytes)
        self.num_requests += 1
        return Lease(self, num_bytes)

    def take(self, num_bytes: int) -> None:
        """Hold so many bytes more.

        Raises:
            ApiError: 429 where there is no room for them.
        """
        if self.num_bytes and self.num_bytes + num_bytes > self._max_bytes:
            raise self._no_room()
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Hold so many bytes less."""
        self.num_bytes -= num_bytes

    def _no_room(self) -> Exception:
        return overloaded(f"requests of {self.num_bytes} bytes are open already")


class Lease:
    """One request's share."""

    __slots__ = ("_budget", "_num_bytes")

    def __init__(self, budget: Budget, num_bytes: int) -> None:
        self._budget: Budget | None = budget
        self._num_bytes = num_bytes

    def grow(self, num_bytes: int) -> None:
        """Hold so many bytes more.

        Raises:
            ApiError: 429 where there is no room for them.
        """
        assert self._budget is not None
        self._budget.take(num_bytes)
        self._num_bytes += num_bytes

    def close(self) -> None:
        """Give all of it back; harmless when repeated."""
        if self._budget is not None:
            self._budget.give_back(self._num_bytes)
            self._budget.num_requests -= 1
            self._budget = None
