"""Requests that outlive their connections: a client reconnects with the same id and body.

Sessions exist only with a journal, from which a successor of this process restores them. A session
without a connection is removed after `resume_window_s`.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, TypeVar, Unpack

from api_proc.errors import ApiError, counted_as, unavailable
from api_proc.fairness.budget import Budget, Lease
from api_proc.fairness.client_budget import ClientBudget
from api_proc.resumption.history import History, HistoryReader
from api_proc.resumption.journal import Journal
from api_proc.resumption.journaling import Journaling
from api_proc.resumption.kept_answers import KeptAnswers
from api_proc.resumption.session import (
    DecodedRequest,
    Session,
    deadline_error,
    request_not_found,
)
from api_proc.resumption.session_log import (
    AcceptRecord,
    BindRecord,
    PlaceRecord,
    RemoveRecord,
    Replay,
    ReplayedRequest,
    Row,
    SentRecord,
    StopRecord,
    resumed,
    with_fingerprint,
    with_place,
)
from protocol.api_core import AddRequest, RequestOutput
from protocol.client import ReplicatedClient
from protocol.client.errors import RequestFailed
from protocol.client.ledger import RoutedOptions
from protocol.client.packed_prompt import PromptIds
from protocol.config import ApiConfig
from protocol.message import Message
from protocol.sampling import FinishReason, SamplingParams
from protocol.transport.runtime import Clock

_COMMIT_TIMEOUT_S = 0.25
"""Longest wait of an answer for the record of its request."""
_SLICE_S = 0.005
"""Longest turn of the event loop while the journal is restored."""

T = TypeVar("T")

log = logging.getLogger("troika.api")

Decoders = Mapping[str, Callable[[bytes, list[AddRequest]], DecodedRequest]]
"""A function for each path, which decodes a body from the journal, given its sequences."""


class Kept(Protocol):
    """Values that the journal keeps beside the sessions."""

    def records(self) -> Iterator[Message]:
        """Yield the records of all values for a snapshot; they may change in between."""

    def restore(self, values: dict[str, bytes]) -> None:
        """Take the values of a predecessor, oldest first."""


class Sessions:
    """All sessions, and the journal from which a successor restores them."""

    def __init__(
        self,
        client: ReplicatedClient,
        config: ApiConfig,
        on_end: Callable[[str], None] = lambda reason: None,
        *,
        kept: Kept | None = None,
        clients: ClientBudget | None = None,
        clock: Clock = time,
        make_journal: Callable[..., Journal] = Journal,
    ) -> None:
        """`on_end` gets the finish reason of each sequence that ends unread.

        `clients` counts the sequences of each client, also those without a connection.
        """
        assert config.journal_dir is not None
        self._on_end = on_end
        self._kept = kept
        self._client = client
        self._clock = clock
        self._window_s = config.resume_window_s
        self._budget = Budget(config.max_open_requests, config.max_open_bytes, clients)
        self._kept_answers = KeptAnswers(self._budget)
        self._by_id: dict[str, Session] = {}
        # Greater than any number of a predecessor, whose journal may be read only later.
        self._next_number = int(clock.time() * 1e6)
        self._decoders: Decoders = {}
        self.journaling = Journaling(
            config.journal_dir,
            self._snapshot,
            is_synced=config.journal_sync,
            make_journal=make_journal,
        )
        self.num_resumed = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def start(self, decoders: Decoders) -> None:
        """Begin to restore the sessions of a predecessor, inside the event loop."""
        self._decoders = decoders
        self.journaling.start(self._restore)

    def close(self) -> None:
        """Flush the journal; open requests stay in it for a successor."""
        self.journaling.close()

    def lease_of(self, request_id: str) -> Lease | None:
        """Return the lease of the session with this id, if there is one."""
        session = self._by_id.get(request_id)
        return None if session is None else session.lease

    def is_submitting(self, request_id: str) -> bool:
        """Return whether another connection is submitting the sequences of this request."""
        session = self._by_id.get(request_id)
        return session is not None and not session.submitted.is_set()

    async def submitted(self, request_id: str) -> None:
        """Wait until no connection is submitting this request; its deadlines bound the wait."""
        while self.is_submitting(request_id):
            await self._by_id[request_id].submitted.wait()

    def find(
        self, request_id: str, path: str, raw: bytes, last_event_id: str | None
    ) -> Session | None:
        """Return the session of a request, or None for a new request."""
        session = self._by_id.get(request_id)
        if session is None:
            if last_event_id is None:
                return None
            if not self.journaling.is_recovered:
                raise unavailable("the journal has not been read yet", "recovering")
            raise request_not_found(request_id)
        if (session.accepted.path, session.accepted.raw) != (path, raw):
            if last_event_id is None and session.is_ended and not session.num_attached:
                self.remove(session)  # that request is over, so its id can be reused
                return None
            message = f"request {request_id} is open with another body"
            raise ApiError(409, message, code="request_id_conflict")
        self.num_resumed += 1
        return session

    def begin(
        self,
        request_id: str,
        path: str,
        raw: bytes,
        decoded: DecodedRequest,
        *,
        age_s: float = 0.0,
        origin: str | None = None,
    ) -> Session:
        """Add a request that arrived `age_s` ago from a client, whose sequences follow."""
        assert request_id not in self._by_id
        lease = self._lease(len(raw), origin)
        now, timeout_s = self._clock.time(), decoded.body.timeout
        deadline = 0.0 if timeout_s is None else now + timeout_s - age_s
        number = self._next_number
        secret = secrets.token_hex(16)
        accepted = AcceptRecord(number, request_id, path, raw, int(now), [], deadline, secret)
        return self._add(accepted, decoded, lease)

    def _add(self, accepted: AcceptRecord, decoded: DecodedRequest, lease: Lease) -> Session:
        session = Session(accepted, decoded, lease)
        self._next_number = max(self._next_number, accepted.number + 1)
        self._by_id[accepted.request_id] = session
        return session

    def submit(
        self,
        session: Session,
        prompt_token_ids: PromptIds,
        params: SamplingParams,
        **options: Unpack[RoutedOptions],
    ) -> HistoryReader:
        """Send one sequence to the core."""
        history = self._new_history(session.accepted, len(session.histories))
        add = self._client.submit_to(history, prompt_token_ids, params, **options)
        history.request_id = add.request_id
        session.histories.append(history)
        session.accepted.adds.append(add)
        return self.reader(history)

    def reader(self, history: History) -> HistoryReader:
        """Return a reader of one sequence, which may stop it."""

        def stop() -> None:
            if not history.is_ended:
                self._client.cancel(history.request_id)
            history.stop()

        return HistoryReader(history, stop)

    async def accept(self, session: Session) -> None:
        """Write the session's records once all sequences are submitted, and wait for the disk.

        The first outputs may have arrived; the rows of these have no request, and have no effect.
        """
        self._watch_deadline(session)
        for record in session.records():
            self.journaling.write(record)
        session.submitted.set()
        await self.journaling.written(_COMMIT_TIMEOUT_S)

    def _watch_deadline(self, session: Session) -> None:
        """End the session at the time that its client has set, with or without a connection."""
        timeout_s, deadline = session.body.timeout, session.accepted.deadline
        if timeout_s is not None and deadline:
            loop = asyncio.get_running_loop()
            delay_s = max(0.0, deadline - self._clock.time())
            error = deadline_error(timeout_s)
            session.deadline = loop.call_later(delay_s, self.fail, session, error)

    def fail(self, session: Session, error: RequestFailed) -> None:
        """End what still runs of a session with an error."""
        for history in session.histories:
            if not history.is_ended:
                self._client.cancel(history.request_id)
                history.fail(error)

    def attach(self, session: Session) -> None:
        """Count a connection that begins to read the session."""
        session.num_attached += 1
        self._kept_answers.discard(session.request_id)
        if session.expiry is not None:
            session.expiry.cancel()
            session.expiry = None

    def detach(self, session: Session, *, is_known: bool, is_sent: bool) -> None:
        """Count a connection that has ended; without another one the session will expire."""
        session.num_attached -= 1
        session.is_known = session.is_known or is_known
        session.is_sent = session.is_sent or is_sent
        if session.num_attached or not self._is_open(session):
            return
        if session.is_sent:
            session.lease.count_sequences(0)
        has_failed = any(history.error is not None for history in session.histories)
        if has_failed or not session.is_known or not session.histories:
            self.remove(session)
        else:
            if session.is_sent:
                self.journaling.write(SentRecord(session.accepted.number))
                self._keep(session)
            self._expire_later(session)

    def _keep(self, session: Session) -> None:
        """Keep an answer that was sent until its room is needed, or until it expires."""
        origin = session.accepted.adds[0].origin
        self._kept_answers.add(session.request_id, origin, session.lease)

    def remove(self, session: Session) -> None:
        """Abort what still runs of the session, and remove it."""
        if not self._is_open(session):
            return
        del self._by_id[session.request_id]
        self._kept_answers.discard(session.request_id)
        session.submitted.set()
        for timer in (session.expiry, session.deadline):
            if timer is not None:
                timer.cancel()
        for history in session.histories:
            reason = history.finish_reason
            if not history.is_ended:
                self._client.cancel(history.request_id)
                reason = FinishReason.ABORT
            elif history.error is not None:
                reason = counted_as(history.error)
            if reason is not None and history.count_end():
                self._on_end(reason)
        session.lease.close()
        self.journaling.write(RemoveRecord(session.accepted.number))

    def _is_open(self, session: Session) -> bool:
        """Return whether it was not removed; its id may belong to another session by now."""
        return self._by_id.get(session.request_id) is session

    def _expire_later(self, session: Session) -> None:
        loop = asyncio.get_running_loop()
        session.expiry = loop.call_later(self._window_s, self.remove, session)

    def _lease(self, num_bytes: int, origin: str | None) -> Lease:
        """Reserve room for one more request; answers that were sent completely make room."""
        try:
            return self._budget.open(num_bytes, holder=origin)
        except ApiError:
            answers = self._kept_answers.to_remove_for(num_bytes, origin)
            if not answers:
                raise
        for request_id in answers:
            self.remove(self._by_id[request_id])
        return self._budget.open(num_bytes, holder=origin)

    def _new_history(self, accepted: AcceptRecord, index: int) -> History:
        """Return the history of a sequence.

        It must not refer to its session: memory would be freed only by the rare collector.
        """
        number, adds = accepted.number, accepted.adds

        def on_output(history: History, output: RequestOutput | None) -> None:
            if output is not None:
                self.journaling.row(Row(number, index, output))
            elif history.is_stopped:
                self.journaling.write(StopRecord(number, index))

        def on_rebind(fingerprint: str, is_exact: bool) -> None:
            if index < len(adds):
                adds[index] = with_fingerprint(adds[index], fingerprint)
            self.journaling.write(BindRecord(number, index, fingerprint, is_exact))

        def on_place(blocks_at: str) -> None:
            if index < len(adds):
                adds[index] = with_place(adds[index], blocks_at)
            self.journaling.write(PlaceRecord(number, index, blocks_at))

        return History(on_output, on_rebind, on_place)

    # The journal --------------------------------------------------------------------------------

    def _snapshot(self) -> Iterator[Message]:
        if self._kept is not None:
            yield from self._kept.records()
        for session in list(self._by_id.values()):
            if session.submitted.is_set():  # else `accept` writes it
                for record in session.records():
                    if not self._is_open(session):
                        break
                    yield record

    async def _restore(self, records: list[bytes]) -> None:
        """Resend requests that were open, and keep answers until their clients come back."""
        replay = Replay()
        await _in_slices(records, replay.apply, self._clock)
        if self._kept is not None:
            self._kept.restore(replay.kept)
        requests = replay.open_requests()
        num_open = 0

        def restore(request: ReplayedRequest) -> None:
            nonlocal num_open
            try:
                num_open += self._restore_one(request)
            except Exception as error:  # for example, another version of Troika wrote it
                log.warning("request %s is not resumed: %s", request.accepted.request_id, error)

        await _in_slices(requests, restore, self._clock)
        if requests:
            log.info("%d of the journal's %d requests continue", num_open, len(requests))

    def _restore_one(self, request: ReplayedRequest) -> bool:
        """Add the session of a request; returns whether it still runs."""
        accepted = request.accepted
        if accepted.request_id in self._by_id:  # its client came back before the journal was read
            return False
        decoded = self._decoders[accepted.path](accepted.raw, accepted.adds)
        session = self._add(accepted, decoded, self._lease(len(accepted.raw), None))
        session.submitted.set()
        session.is_known, session.is_sent = True, request.is_sent
        self._expire_later(session)
        for add, replayed in zip(accepted.adds, request.histories, strict=True):
            self._adopt(session, add, replayed)
        self._watch_deadline(session)
        if session.is_sent:
            self._keep(session)
        else:
            adds = accepted.adds
            session.lease.count_restored(adds[0].origin, len(adds))
        return not session.is_ended

    def _adopt(self, session: Session, add: AddRequest, replayed: History) -> None:
        history = self._new_history(session.accepted, len(session.histories))
        session.histories.append(history)
        history.add(replayed.whole())
        history.resumed_inexactly = replayed.resumed_inexactly
        if replayed.is_stopped:
            history.stop()
        if history.is_ended:
            history.is_counted = True  # the predecessor has counted it
            return
        try:
            history.request_id = self._client.adopt(resumed(add, history), history)
        except RequestFailed as failure:
            history.fail(failure)


async def _in_slices(items: Iterable[T], act: Callable[[T], None], clock: Clock) -> None:
    """Call `act` for many items without blocking the event loop for long."""
    began = clock.monotonic()
    for item in items:
        act(item)
        if clock.monotonic() - began > _SLICE_S:
            await asyncio.sleep(0)
            began = clock.monotonic()
