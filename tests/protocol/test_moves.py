"""Requests that are moved between ledgers, in any order of events: each token once, and in order.

Cores and links are models. A core computes tokens that depend on the request alone, or, with
another fingerprint, also on that.
"""

import zlib
from collections.abc import Iterator
from itertools import islice

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protocol.api_core import (
    AbortRequests,
    AddRequest,
    ErrorCode,
    RequestError,
    RequestOutput,
    decode_from_client,
)
from protocol.client.errors import RequestFailed
from protocol.client.ledger import MOVES_MAX, Ledger, OpenLimits
from protocol.client.open_requests import OpenRequests
from protocol.message import encode
from protocol.sampling import FinishReason, SamplingParams

NUM_REPLICAS = 3
MAX_TOKENS = 6
FINGERPRINTS = ("a", "b")


def token(request_id: int, index: int, fingerprint: str) -> int:
    return zlib.crc32(f"{request_id} {index} {fingerprint}".encode()) % 1000


class Reader:
    """Receives the tokens of one request, and which engine computes them."""

    def __init__(self, request_id: int, fingerprint: str) -> None:
        self.request_id = request_id
        self.fingerprint = fingerprint
        self.token_ids: list[int] = []
        self.is_ended = False
        self.may_change = False
        """Whether its engine may be another one after its first token."""
        self.error: RequestFailed | None = None

    def deliver(self, output: RequestOutput) -> None:
        assert not self.is_ended
        assert output.first_index == len(self.token_ids)
        for index, token_id in enumerate(output.token_ids, output.first_index):
            assert token_id == token(self.request_id, index, self.fingerprint)
        self.token_ids += output.token_ids
        self.is_ended = output.finish_reason is not None

    def fail(self, error: RequestFailed) -> None:
        assert not self.is_ended
        self.is_ended, self.error = True, error

    def rebind(self, fingerprint: str, *, is_exact: bool) -> None:
        assert is_exact == (not self.token_ids)
        assert is_exact or self.may_change
        self.fingerprint = fingerprint

    def stored_at(self, blocks_at: str) -> None:
        """There is no journal."""


class Replica:
    """A core with what it knows, and the client's side of the link to it."""

    def __init__(self, limits: OpenLimits, numbers: Iterator[int]) -> None:
        self.open = OpenRequests(Ledger(limits, numbers=numbers), self._send)
        self.fingerprint = "a"
        self.is_linked = False
        self.known: dict[int, list[int]] = {}
        """The tokens of each request that the core has computed or has received."""
        self.sent: list[RequestOutput] = []
        """Outputs under way to the client."""
        self.backlog: Iterator[bytes] = iter(())

    def _send(self, body: bytes) -> None:
        if not self.is_linked:
            return
        message = decode_from_client(body)
        if isinstance(message, AddRequest):
            assert not message.output_token_ids or message.fingerprint == self.fingerprint
            self.known[message.request_id] = list(message.output_token_ids)
        elif isinstance(message, AbortRequests):
            for request_id in message.request_ids:
                self.known.pop(request_id, None)

    def connect(self, fingerprint: str) -> None:
        """Connect to a core that knows nothing."""
        self.lose()
        self.is_linked, self.fingerprint = True, fingerprint
        self.backlog = self.open.resend(fingerprint)

    def send_backlog(self, count: int) -> None:
        """Send some of what waits since the connection."""
        for body in islice(self.backlog, count):
            self._send(body)

    def lose(self) -> None:
        self.is_linked = False
        self.known.clear()
        self.sent.clear()
        self.backlog = iter(())

    def step(self) -> None:
        for request_id, tokens in list(self.known.items()):
            index = len(tokens)
            tokens.append(token(request_id, index, self.fingerprint))
            is_last = len(tokens) == MAX_TOKENS
            reason = FinishReason.LENGTH if is_last else None
            self.sent.append(RequestOutput(request_id, index, tokens[-1:], reason))
            if is_last:
                del self.known[request_id]

    def arrive(self, count: int) -> None:
        arrived, self.sent = self.sent[:count], self.sent[count:]
        for output in arrived:
            self.open.take(output)


replicas = st.integers(0, NUM_REPLICAS - 1)
fingerprints = st.sampled_from(FINGERPRINTS)


class Moves(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.limits = OpenLimits(99)
        self.readers: dict[int, Reader] = {}
        self.numbers = iter(range(1, 10_000))
        self.replicas = [Replica(self.limits, self.numbers) for _ in range(NUM_REPLICAS)]
        for number, replica in enumerate(self.replicas):
            replica.connect("a")
            self.accept(number)
            self.accept(number)

    @rule(replica=replicas)
    @precondition(lambda self: len(self.readers) < 12)
    def accept(self, replica: int) -> None:
        opened = self.replicas[replica].open
        request_id = opened.ledger.next_request_id()
        params = SamplingParams(max_tokens=MAX_TOKENS)
        add = AddRequest(request_id, [5], params, fingerprint=opened.fingerprint)
        self.readers[request_id] = Reader(request_id, opened.fingerprint)
        opened.accept(add, encode(add), self.readers[request_id])

    @rule(count=st.integers(0, 9))
    def compute(self, count: int) -> None:
        """Compute a step everywhere; some outputs arrive, the others later."""
        for replica in self.replicas:
            replica.step()
            replica.arrive(count)

    @rule(replica=replicas, count=st.integers(1, 3))
    def lose_outputs(self, replica: int, count: int) -> None:
        """The next output shows the gap; if there will be none, the link does, and begins anew."""
        here = self.replicas[replica]
        lost, here.sent = here.sent[:count], here.sent[count:]
        if any(output.finish_reason for output in lost):
            here.connect(here.fingerprint)

    @rule(replica=replicas)
    def lose(self, replica: int) -> None:
        self.replicas[replica].lose()

    @rule(replica=replicas, fingerprint=fingerprints, count=st.sampled_from((0, 2, 99)))
    def connect(self, replica: int, fingerprint: str, count: int) -> None:
        self.replicas[replica].connect(fingerprint)
        self.replicas[replica].send_backlog(count)

    @rule(replica=replicas, count=st.integers(1, 20))
    def send_backlog(self, replica: int, count: int) -> None:
        self.replicas[replica].send_backlog(count)

    @rule(replica=replicas)
    def second(self, replica: int) -> None:
        self.replicas[replica].open.ledger.allow_repairs()

    @rule(source=replicas, other=replicas, is_exact=st.booleans())
    def move_all(self, source: int, other: int, is_exact: bool) -> None:
        if source == other:
            return
        for request_id in list(self.replicas[source].open.ledger):
            entry = self.replicas[source].open.entry(request_id)
            assert entry is not None
            num_moves = entry.num_moves
            self.readers[request_id].may_change = not is_exact
            is_moved = self.replicas[source].open.move(
                request_id, self.replicas[other].open, is_exact=is_exact
            )
            self.readers[request_id].may_change = False
            assert is_moved == (num_moves < MOVES_MAX)
            assert (
                is_exact or not is_moved or request_id not in self.replicas[other].open.held_ids()
            )

    @rule(replica=replicas)
    def release(self, replica: int) -> None:
        self._release(self.replicas[replica])

    def _release(self, replica: Replica) -> None:
        for request_id in replica.open.held_ids():
            self.readers[request_id].may_change = True
            replica.open.release(request_id)
            self.readers[request_id].may_change = False

    @rule(replica=replicas, seconds=st.integers(0, 2))
    def fail_held(self, replica: int, seconds: int) -> None:
        error = RequestError(ErrorCode.ENGINE_FAILED, "too late")
        self.replicas[replica].open.fail_held(seconds, 3.0, error)

    @rule(replica=replicas, request_id=st.integers(1, 12))
    def cancel(self, replica: int, request_id: int) -> None:
        if request_id in self.replicas[replica].open.ledger:
            self.replicas[replica].open.cancel(request_id)
            self.readers[request_id].is_ended = True

    @invariant()
    def each_open_request_is_in_one_ledger(self) -> None:
        found = [number for replica in self.replicas for number in replica.open.ledger]
        assert sorted(found) == [n for n, reader in self.readers.items() if not reader.is_ended]
        assert self.limits.num_open == len(found)
        assert self.limits.num_prompt_tokens == len(found)
        for replica in self.replicas:
            entries = map(replica.open.entry, replica.open.ledger)
            expected = sum(entry.num_unstarted_tokens for entry in entries if entry is not None)
            assert replica.open.ledger.num_unstarted_tokens == expected

    @invariant()
    def every_core_knows_what_is_to_be_computed(self) -> None:
        for replica in self.replicas:
            ends = {output.request_id for output in replica.sent if output.finish_reason}
            known = ends | set(replica.known) | set(replica.open.held_ids())
            known |= set(replica.open._unsent)
            if replica.is_linked:
                assert set(replica.known) <= set(replica.open.ledger) <= known

    def teardown(self) -> None:
        """Once a replica serves for long, all that is open ends, each token once."""
        last = self.replicas[0]
        for replica in self.replicas[1:]:
            replica.lose()
        last.connect("a")
        last.send_backlog(99)
        for replica in self.replicas[1:]:
            for request_id in list(replica.open.ledger):
                entry = replica.open.entry(request_id)
                assert entry is not None
                entry.num_moves = 0
                replica.open.move(request_id, last.open)
        self._release(last)
        last.send_backlog(99)
        for _ in range(MAX_TOKENS):
            last.step()
            last.arrive(99)
        assert not len(last.open)
        for reader in self.readers.values():
            assert reader.is_ended


TestMoves = Moves.TestCase
TestMoves.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
