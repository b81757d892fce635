"""Bounds on the open requests of all clients, and on the bytes that these hold.

Each client has a share of both: see `protocol.fairness.shares`.
"""

from api_proc.errors import ApiError, overloaded
from api_proc.fairness.client_budget import ClientBudget
from api_proc.fairness.shared_bound import SharedBound


class Freed:
    """What the ends of some requests would free, in total and of what one client holds."""

    def __init__(self, holder: str | None) -> None:
        self.holder = holder
        self.num_requests = self.num_own_requests = 0
        self.num_bytes = self.num_own_bytes = 0

    def add(self, lease: "Lease") -> None:
        """Add the end of one more request."""
        self.num_requests += 1
        self.num_bytes += lease.num_bytes
        if lease.holder == self.holder:
            self.num_own_requests += 1
            self.num_own_bytes += lease.num_bytes


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
        self._requests = SharedBound("max_open_requests", max_requests, "requests")
        self._bytes = SharedBound("max_open_bytes", max_bytes, "bytes")
        self.clients = clients or ClientBudget()
        self.foreign = ClientBudget(self.clients.max_per_client * max(1, num_others))
        """Counts connections for requests of other API processes, which count the sequences: a
        client that has reached its bound at each of them can read here what it has begun there."""

    @property
    def num_requests(self) -> int:
        """Number of open requests."""
        return self._requests.total

    @property
    def num_bytes(self) -> int:
        """Number of bytes that open requests hold."""
        return self._bytes.total

    def open(
        self,
        num_bytes: int = 0,
        client: str | None = None,
        *,
        holder: str | None = None,
        is_foreign: bool = False,
    ) -> "Lease":
        """Admit one request that holds `num_bytes` so far, or raise a 429.

        None as `client`: the sequences are not counted for any client. `holder` is the client whose
        shares of the bounds the request takes, by default `client`. `is_foreign`: another API
        process may own the request; until its sequences are counted here, `foreign` counts it.
        """
        holder = client if holder is None else holder
        requests = self._requests
        if not requests.has_room(1):
            raise overloaded(f"{requests.setting}: {requests.limit} requests are open")
        if not requests.has_share(holder, 1):
            raise requests.beyond_share(holder, 1)
        if self._bytes.total >= self._bytes.limit:
            raise self._out_of_bytes()
        clients = self.foreign if is_foreign else self.clients
        if client is not None:
            clients.check(client, 1)
        self.reserve(num_bytes, holder)
        lease = Lease(self, num_bytes, client, holder)
        lease.count_connection(clients)
        requests.add(holder, 1)
        return lease

    def has_room(self, num_bytes: int, freed: Freed) -> bool:
        """Return whether the bounds of all permit one more request, once others have ended.

        The request holds `num_bytes`.
        """
        if not self._requests.has_room(1, freed.num_requests):
            return False
        num_held = self._bytes.total - freed.num_bytes
        return not num_held or self._bytes.has_room(num_bytes, freed.num_bytes)

    def has_share(self, num_bytes: int, freed: Freed) -> bool:
        """Return whether the shares of a client permit one more request, once others have ended.

        The request holds `num_bytes`.
        """
        ends, end_bytes = freed.num_requests, freed.num_bytes
        own, own_bytes = freed.num_own_requests, freed.num_own_bytes
        return self._requests.has_share(
            freed.holder, 1, freed=ends, freed_own=own
        ) and self._bytes.has_share(freed.holder, num_bytes, freed=end_bytes, freed_own=own_bytes)

    def reserve(self, num_bytes: int, holder: str | None, own: int = 0) -> None:
        """Reserve `num_bytes` more for a request that holds `own`, or raise a 429.

        A single request may have any size.
        """
        if self._bytes.total and not self._bytes.has_room(num_bytes):
            raise self._out_of_bytes()
        if not self._bytes.has_share(holder, num_bytes, own):
            raise self._bytes.beyond_share(holder, num_bytes)
        self._bytes.add(holder, num_bytes)

    def release(self, num_bytes: int, holder: str | None) -> None:
        """End a request that holds `num_bytes`."""
        self._bytes.add(holder, -num_bytes)
        self._requests.add(holder, -1)

    def _out_of_bytes(self) -> ApiError:
        held = self._bytes
        return overloaded(f"{held.setting}: open requests hold {held.total} of {held.limit} bytes")


class Lease:
    """What one request holds of the budget.

    The lease of a request in a journal counts its sequences as long as it runs, with or without a
    connection. It includes one connection that reads them; further ones count as one each.
    """

    __slots__ = (
        *("_budget", "_clients", "_is_read", "_num_sequences"),
        *("client", "holder", "num_bytes"),
    )

    def __init__(
        self,
        budget: Budget,
        num_bytes: int,
        client: str | None = None,
        holder: str | None = None,
    ) -> None:
        self._budget: Budget | None = budget
        self._clients = budget.clients
        """The budget that counts the sequences."""
        self.num_bytes = num_bytes
        self.holder = holder
        """The client whose shares of the bounds the request takes."""
        self.client = client
        """The client for which the sequences count; None: they count for no client."""
        self._num_sequences = 0
        self._is_read = False

    def grow(self, num_bytes: int) -> None:
        """Reserve `num_bytes` more, or raise a 429."""
        assert self._budget is not None
        self._budget.reserve(num_bytes, self.holder, self.num_bytes)
        self.num_bytes += num_bytes

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
            self._budget.release(self.num_bytes, self.holder)
            self._budget = None
