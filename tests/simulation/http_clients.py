"""HTTP clients that reconnect until their answer is complete.

A client knows the body, the id, and the number of tokens that it has received.
"""

import random
from collections.abc import Callable
from typing import Protocol

import msgspec

from protocol.api_core import RequestError, RequestOutput
from protocol.core_worker import PromptLogprobs
from tests.simulation.disk import Disk
from tests.simulation.oracle import Oracle, Stream
from tests.simulation.plan import RequestPlan
from tests.simulation.world import SECOND, Violation, World

_WIRE_S = (0.00005, 0.001)
_COME_BACK_S = (0.005, 0.2)
_RETRY_S = 0.2
_UNNOTICED_S = (0.0005, 0.5)
"""Delay until the server notices a broken connection."""
_NOT_FOUND, _CONFLICT = 404, 409


class Server(Protocol):
    """The process that accepts connections at the moment."""

    def accept(self, connection: "Connection") -> None:
        """Serve a connection."""


class Internet:
    """All clients, and the server to which they connect."""

    def __init__(
        self,
        oracle: Oracle,
        disk: Disk,
        kill_after_answers: int | None,
        kill_server: Callable[[], None],
    ) -> None:
        """Start without clients.

        Args:
            oracle: checks the answers.
            disk: holds the server's journal.
            kill_after_answers: kill the server shortly after this many answers have begun.
            kill_server: kills it.
        """
        self.oracle = oracle
        self.world: World = oracle.world
        self.disk = disk
        self.server: Server | None = None
        self._connections: list[Connection] = []
        self._answers_left = kill_after_answers
        self._kill_server = kill_server

    def submit(self, plan: RequestPlan) -> None:
        """Send a request from a new client."""
        client = HttpClient(self, plan)
        client.connect()
        if plan.cancel_after_s is not None:
            self.world.after(int(plan.cancel_after_s * SECOND), client.leave)

    def opened(self, connection: "Connection") -> None:
        self._connections.append(connection)

    def closed(self, connection: "Connection") -> None:
        if connection in self._connections:
            self._connections.remove(connection)

    def break_one(self) -> None:
        """Break one open connection, if there is one."""
        if self._connections:
            self.world.rng.choice(self._connections).break_off()

    def server_died(self) -> None:
        """Deliver what the server had sent, then end its connections."""
        self.server = None
        for connection in list(self._connections):
            connection.end_after_all()

    def answer_begun(self) -> None:
        """Count an answer that has begun."""
        if self._answers_left is not None:
            self._answers_left -= 1
            if self._answers_left == 0:
                self.world.after(self.world.between(0, 0.01), self._kill_server)


class HttpClient:
    """One request until its answer is complete."""

    def __init__(self, internet: Internet, plan: RequestPlan) -> None:
        self._internet = internet
        self._world = internet.world
        self.plan = plan
        self.stream: Stream = internet.oracle.accepted("http", plan)
        self._connection: Connection | None = None
        self._is_promised = False
        """An answer had begun with the promise that the journal holds the request."""

    @property
    def num_seen(self) -> int:
        """Number of received tokens, as `Last-Event-ID` gives it."""
        return len(self.stream.received)

    def connect(self) -> None:
        """Send the request, possibly once more."""
        if not self.stream.is_open or self._connection is not None:
            return
        internet = self._internet
        if internet.server is None:
            self._come_back(_RETRY_S)
            return
        if self.num_seen:
            self._world.counts["came back"] += 1
        else:  # the answer starts from the beginning
            self.stream.next_prompt_position = 1
        self._connection = Connection(self, internet)
        internet.opened(self._connection)
        self._world.after(self._world.between(*_WIRE_S), self._connection.arrive, internet.server)

    def leave(self) -> None:
        """Give up the request."""
        if self.stream.is_open:
            self.stream.cancelled()
            if self._connection is not None:
                self._connection.break_off()

    def _come_back(self, seconds: float) -> None:
        self._world.after(int(seconds * SECOND), self.connect)

    # Events of a connection ---------------------------------------------------------------------

    def on_begin(self, connection: "Connection", *, is_durable: bool) -> None:
        """The head of the answer has arrived."""
        if connection is self._connection:
            self._is_promised = self._is_promised or is_durable
            self._internet.answer_begun()

    def on_output(self, connection: "Connection", output: RequestOutput) -> None:
        """A part of the answer has arrived."""
        if connection is self._connection and self.stream.is_open:
            self.stream.take(output)

    def on_refusal(self, connection: "Connection", status: int) -> None:
        """An error status has arrived.

        Raises:
            Violation: the server has lost a request that it promised to keep.
        """
        if connection is not self._connection:
            return
        self._connection = None
        if status == _CONFLICT:
            raise Violation(f"mismatched: {self.stream.name}: confused with another request")
        if status != _NOT_FOUND:
            self._come_back(_RETRY_S)
        elif self._is_promised and not self._internet.disk.has_failed:
            raise Violation(f"lost: {self.stream.name}: the server does not know it any more")
        elif self.stream.is_open:
            self.stream.cancelled()

    def on_failure(self, connection: "Connection", error: RequestError) -> None:
        """The answer ends with an error."""
        if connection is self._connection and self.stream.is_open:
            self.stream.failed(error)

    def on_end(self, connection: "Connection") -> None:
        """The connection is closed."""
        if connection is self._connection:
            self._connection = None
            self._come_back(self._world.between(*_COME_BACK_S) / SECOND)


class Connection:
    """One HTTP request and its answer."""

    def __init__(self, client: HttpClient, internet: Internet) -> None:
        self.plan = client.plan
        self.num_seen = client.num_seen
        self.on_close: Callable[[], None] | None = None
        """Called when the server notices the end of the connection."""
        self.is_closed = False
        self._client = client
        self._internet = internet
        self._world = internet.world
        self._last_arrival = 0
        # A generator of its own: the order in which readers wake must make no difference.
        self._rng = random.Random(self._world.rng.getrandbits(32))

    def arrive(self, server: Server) -> None:
        """Pass the request to the server, if that is still alive."""
        if server is self._internet.server and not self.is_closed:
            server.accept(self)

    # The server's side --------------------------------------------------------------------------

    def begin(self, *, is_durable: bool) -> None:
        """Send the head of the answer."""
        self._later(lambda: self._client.on_begin(self, is_durable=is_durable))

    def send(self, output: RequestOutput) -> None:
        """Send the tokens that the client has not received yet."""
        num_known = self.num_seen - output.first_index
        if num_known > 0:
            output = msgspec.structs.replace(
                output,
                first_index=min(self.num_seen, output.first_index + len(output.token_ids)),
                token_ids=output.token_ids[num_known:],
                logprobs=None if output.logprobs is None else output.logprobs[num_known:],
                prompt_logprobs=None,
            )
        elif output.prompt_logprobs is not None:
            output = msgspec.structs.replace(
                output, prompt_logprobs=_without_repetition(output.prompt_logprobs)
            )
        if output.token_ids or output.finish_reason is not None:
            self._later(lambda: self._client.on_output(self, output))

    def refuse(self, status: int) -> None:
        """Send an error status instead of an answer."""
        self._later(lambda: self._client.on_refusal(self, status))
        self.finish()

    def fail(self, error: RequestError) -> None:
        """Send an error in the middle of an answer."""
        self._later(lambda: self._client.on_failure(self, error))
        self.finish()

    def finish(self) -> None:
        """Send the end of the answer."""
        self.is_closed = True
        self._internet.closed(self)
        self._later(lambda: self._client.on_end(self))

    def _later(self, action: Callable[[], None]) -> None:
        arrival = self._world.local_time + int(self._rng.uniform(*_WIRE_S) * SECOND)
        self._last_arrival = max(arrival, self._last_arrival + 1)
        self._world.at(self._last_arrival, action)

    # Its end ------------------------------------------------------------------------------------

    def break_off(self) -> None:
        """Break: the client notices now, the server later; what is in flight is lost."""
        self._internet.closed(self)
        self._client.on_end(self)
        self._world.after(self._world.between(*_UNNOTICED_S), self._server_notices)

    def end_after_all(self) -> None:
        """Close after the server's death, once everything that it had sent has arrived."""
        self.is_closed = True
        self._internet.closed(self)
        self._later(lambda: self._client.on_end(self))

    def _server_notices(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            if self.on_close is not None:
                self.on_close()


def _without_repetition(parts: list[PromptLogprobs]) -> list[PromptLogprobs]:
    """Drop prompt logprobs that a recomputed prompt has repeated, as the API does."""
    kept: list[PromptLogprobs] = []
    end = 1
    for part in parts:
        num_known = max(0, end - part.first_position)
        entries = part.entries[num_known:]
        if entries:
            first = part.first_position + num_known
            kept.append(msgspec.structs.replace(part, first_position=first, entries=entries))
            end = first + len(entries)
    return kept
