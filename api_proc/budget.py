"""Bounds on the number of open requests, of each client too, and on the bytes of their bodies."""

from collections import Counter

from api_proc.errors import ApiError, overloaded
from protocol.api_core import ErrorCode


class ClientBudget:
    """Counts the sequences of each client; past the bound a request is rejected."""

    def __init__(self, max_per_client: int = 0) -> None:
        """`max_per_client` bounds the sequences of each client; 0: no bound."""
        self.max_per_client = max_per_client
        self._num_of: Counter[str] = Counter()
        """Sequences of each client; a request whose prompts are not known yet counts as one."""

    def check_size(self, num_sequences: int) -> None:
        """Raise a 400 if a client may never have as many sequences open."""
        limit = self.max_per_client
        if limit and num_sequences > limit:
            text = f"max_open_requests_per_client: {num_sequences} sequences are more than {limit}"
            raise ApiError(400, text, code=ErrorCode.INVALID)

    def check(self, client: str, more: int) -> None:
        """Raise a 429 if a client may not have this number of further sequences now."""
        num_open, limit = self.num_of(client), self.max_per_client
        if more > 0 and limit and num_open + more > limit:
            raise overloaded(
                f"max_open_requests_per_client: {num_open} of this client's {limit} requests and"
                f" sequences are open, and this request adds {more}"
            )

    def count(self, client: str, more: int) -> None:
        """Count further sequences of a client, whatever the bound is; `more` may be negative."""
        self._num_of[client] += more
        if not self._num_of[client]:
            del self._num_of[client]

    def num_of(self, client: str) -> int:
        """Return the number of a client's sequences."""
        return self._num_of[client]


class Budget:
    """Counts open requests and their bytes; past a bound a request is rejected with 429."""

    def __init__(
        self,
        max_requests: int,
        max_bytes: int,
        clients: ClientBudget | None = None,
        *,
        num_others: int = 0,
    ) -> None:
        """Make a budget in which nothing is open.

        Args:
            max_requests: bound of the open requests.
            max_bytes: bound of the bytes that they hold.
            clients: counts the sequences of each client; by default there is no bound for them.
            num_others: number of the other API processes.
        """
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self.clients = clients or ClientBudget()
        self.foreign = ClientBudget(self.clients.max_per_client * max(1, num_others))
        """Counts connections for requests of other API processes, which count the sequences: a
        client that has reached its bound at each of them can read here what it has begun there."""
        self.num_requests = 0
        self.num_bytes = 0

    def open(
        self, num_bytes: int = 0, client: str | None = None, *, is_foreign: bool = False
    ) -> "Lease":
        """Admit one request that holds `num_bytes` so far, or raise a 429.

        None as `client`: the request is not counted for any client. `is_foreign`: another API
        process may own the request; until its sequences are counted here, `foreign` counts it.
        """
        if self.num_requests >= self._max_requests:
            raise overloaded(f"max_open_requests: {self._max_requests} requests are open")
        if self.num_bytes >= self._max_bytes:
            raise self._out_of_bytes()
        clients = self.foreign if is_foreign else self.clients
        if client is not None:
            clients.check(client, 1)
        self.reserve(num_bytes)
        lease = Lease(self, num_bytes, client)
        lease.count_connection(clients)
        self.num_requests += 1
        return lease

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
    """What one request holds of the budget.

    The lease of a request in a journal counts its sequences as long as it runs, with or without a
    connection. It includes one connection that reads them; further ones count as one each.
    """

    __slots__ = ("_budget", "_clients", "_is_read", "_num_bytes", "_num_sequences", "client")

    def __init__(self, budget: Budget, num_bytes: int, client: str | None = None) -> None:
        self._budget: Budget | None = budget
        self._clients = budget.clients
        """The budget that counts the sequences."""
        self._num_bytes = num_bytes
        self.client = client
        """The client for which the sequences count; None: they count for no client."""
        self._num_sequences = 0
        self._is_read = False

    def grow(self, num_bytes: int) -> None:
        """Reserve `num_bytes` more, or raise a 429."""
        assert self._budget is not None
        self._budget.reserve(num_bytes)
        self._num_bytes += num_bytes

    def count_sequences(self, number: int) -> None:
        """Set the number of sequences; raise a 429, or a 400 if no client may have as many."""
        if self._budget is not None and self.client is not None:
            clients = self._budget.clients
            clients.check_size(number)
            num_counted = self._num_sequences if self._clients is clients else 0
            clients.check(self.client, number - num_counted)
            self._count_at(clients, number)

    def count_connection(self, clients: ClientBudget) -> None:
        """Count a connection whose sequences are not known yet, or count at another process."""
        self._count_at(clients, 1)

    def _count_at(self, clients: ClientBudget, number: int) -> None:
        if self._clients is not clients:
            self._set(0)
            self._clients = clients
        self._set(number)

    def count_restored(self, client: str, number: int) -> None:
        """Count the sequences of a request that a predecessor accepted, even past the bound."""
        self.client = client
        self._set(number)

    def take_sequences(self, connection: "Lease") -> None:
        """Count the sequences that the lease of a connection counts, instead of that."""
        number, self.client = connection._num_sequences, connection.client
        connection._set(0)
        self._set(number)

    def begin_reading(self, client: str) -> bool:
        """Include a connection of this client; returns False if it counts by itself."""
        if self._is_read or self.client != client or not self._num_sequences:
            return False
        self._is_read = True
        return True

    def end_reading(self) -> None:
        """Note that the included connection has ended."""
        self._is_read = False

    def _set(self, number: int) -> None:
        if self._budget is not None and self.client is not None:
            self._clients.count(self.client, number - self._num_sequences)
            self._num_sequences = number

    def close(self) -> None:
        """Release everything; a second call has no effect."""
        if self._budget is not None:
            self._set(0)
            self._budget.num_bytes -= self._num_bytes
            self._budget.num_requests -= 1
            self._budget = None
