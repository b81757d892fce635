"""Requests that outlive their connections: a client comes back with the same id and body.

Only with a journal. A session is one HTTP request with all its sequences; what they bring goes into
their histories, which connections read. Without a connection it lives on for `resume_window_s`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from api_proc.bodies import SamplingBody
from api_proc.budget import Budget, Lease
from api_proc.errors import ApiError, unavailable
from api_proc.history import History, HistoryReader
from api_proc.journaling import Journaling
from api_proc.sequence import Prompt
from api_proc.session_log import (
    Accepted,
    Brought,
    Cut,
    Forgotten,
    Remembered,
    Replay,
    Row,
    packed,
    resumed,
)
from protocol.api_core import AddRequest, RequestOutput
from protocol.client import AsyncEngineClient
from protocol.config import ApiConfig
from protocol.errors import RequestFailed
from protocol.journal import Journal
from protocol.message import Message, TokenIds
from protocol.runtime import Clock
from protocol.sampling import FinishReason, SamplingParams

_COMMIT_TIMEOUT_S = 0.25
"""The longest that an answer waits for a slow disk."""
_SLICE_S = 0.005
"""Of the event loop, for what a predecessor has left."""

T = TypeVar("T")

log = logging.getLogger("troika.api")


def request_not_found(request_id: str) -> ApiError:
    """There is nothing to go on with."""
    message = f"request {request_id} is not known here, or not any more"
    return ApiError(404, message, code="request_not_found")


class Reread(NamedTuple):
    """A body that was accepted before."""

    body: SamplingBody
    prompts: list[Prompt]


Rereaders = Mapping[str, Callable[[bytes, list[AddRequest]], Reread]]
"""By path: makes of a body and its sequences what the handler had made of them."""


class Session:
    """One HTTP request."""

    def __init__(self, number: int, accepted: Accepted, reread: Reread, lease: Lease) -> None:
        self.number = number
        self.accepted = accepted
        self.body = reread.body
        self.prompts = reread.prompts
        self.histories: list[History] = []
        self.num_attached = 0
        self.is_known = False
        """The client knows its id, and may come back."""
        self.is_told = False
        """An answer was sent to its end: it is kept only in case that got lost."""
        self.lease = lease
        self.expiry: asyncio.TimerHandle | None = None

    @property
    def request_id(self) -> str:
        """What the client calls it."""
        return self.accepted.request_id

    @property
    def is_ended(self) -> bool:
        """Whether no sequence goes on."""
        return all(history.is_ended for history in self.histories)

    def records(self) -> Iterator[Message]:
        """All of it, for the journal."""
        yield packed(self.accepted)
        for index, history in enumerate(self.histories):
            for part in history.parts():
                yield Brought([Row(self.number, index, part)])
            if history.is_cut:
                yield Cut(self.number, index)


class Sessions:
    """All sessions of one server."""

    def __init__(
        self,
        client: AsyncEngineClient,
        config: ApiConfig,
        on_end: Callable[[str], None] = lambda reason: None,
        *,
        clock: Clock = time,
        make_journal: Callable[..., Journal] = Journal,
    ) -> None:
        """`on_end` is called with the finish reason of each sequence that ends unread."""
        assert config.journal_dir is not None
        self._on_end = on_end
        self._client = client
        self._clock = clock
        self._window_s = config.resume_window_s
        self._budget = Budget(config.max_open_requests, config.max_open_bytes)
        self._by_id: dict[str, Session] = {}
        # Greater than any of a predecessor's, also where its journal can be read only later.
        self._next_number = int(clock.time() * 1e6)
        self._rereaders: Rereaders = {}
        self.journaling = Journaling(
            config.journal_dir,
            self._snapshot,
            is_synced=config.journal_sync,
            make_journal=make_journal,
        )
        self.num_resumed = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def start(self, rereaders: Rereaders) -> None:
        """Go on with what a predecessor has left; inside the event loop."""
        self._rereaders = rereaders
        self.journaling.start(self._restore)

    def close(self) -> None:
        """Write what is left to write. Requests stay in the journal, for a successor."""
        self.journaling.close()

    def find(
        self, request_id: str, path: str, raw: bytes, last_event_id: str | None
    ) -> Session | None:
        """Look for the session that a request belongs to; None: it is new.

        Raises:
            ApiError: 409 where the id belongs to another request, 404 where there is nothing to
                go on with, 503 where that is not known yet.
        """
        session = self._by_id.get(request_id)
        if session is None:
            if last_event_id is None:
                return None
            if not self.journaling.is_recovered:
                raise unavailable("the journal has not been read yet", "recovering")
            raise request_not_found(request_id)
        if (session.accepted.path, session.accepted.raw) != (path, raw):
            if last_event_id is None and session.is_ended and not session.num_attached:
                self.forget(session)  # that one is over, and the id was used again
                return None
            message = f"request {request_id} is open with another body"
            raise ApiError(409, message, code="request_id_conflict")
        self.num_resumed += 1
        return session

    def begin(self, request_id: str, path: str, raw: bytes, reread: Reread) -> Session:
        """Enter a new request; its sequences follow.

        Raises:
            ApiError: 429 where there is no room.
        """
        assert request_id not in self._by_id
        lease = self._lease(len(raw))
        accepted = Accepted(self._next_number, request_id, path, raw, int(self._clock.time()), [])
        return self._enter(accepted, reread, lease)

    def _enter(self, accepted: Accepted, reread: Reread, lease: Lease) -> Session:
        session = Session(accepted.number, accepted, reread, lease)
        self._next_number = max(self._next_number, accepted.number + 1)
        self._by_id[accepted.request_id] = session
        return session

    def submit(
        self, session: Session, prompt_token_ids: TokenIds, params: SamplingParams
    ) -> HistoryReader:
        """Send one sequence to the core.

        Raises:
            RequestFailed: the engine refuses it.
        """
        body = session.body
        history = self._history(session)
        add = self._client.submit_to(
            history,
            prompt_token_ids,
            params,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            tenant=body.user or "",
        )
        history.request_id = add.request_id
        session.histories.append(history)
        session.accepted.adds.append(add)
        return self.reader(session, history)

    def reader(self, session: Session, history: History) -> HistoryReader:
        """Begin to read a sequence."""

        def cut() -> None:
            if not history.is_ended:
                self._client.cancel(history.request_id)
            history.cut()

        return HistoryReader(history, cut)

    async def accept(self, session: Session) -> None:
        """All sequences were submitted: wait until that is on disk."""
        self.journaling.write(packed(session.accepted))
        await self.journaling.written(_COMMIT_TIMEOUT_S)

    def attach(self, session: Session) -> None:
        """Somebody reads it."""
        session.num_attached += 1
        if session.expiry is not None:
            session.expiry.cancel()
            session.expiry = None

    def detach(self, session: Session, *, is_known: bool, is_told: bool) -> None:
        """Somebody reads it no more.

        Args:
            session: to whom `attach` was called before.
            is_known: the client has heard of its id.
            is_told: all of it was sent.
        """
        session.num_attached -= 1
        session.is_known = session.is_known or is_known
        session.is_told = session.is_told or is_told
        if session.num_attached or not self._is_held(session):
            return
        has_failed = any(history.error is not None for history in session.histories)
        if has_failed or not session.is_known or not session.histories:
            self.forget(session)
        else:
            self._expire_later(session)

    def forget(self, session: Session) -> None:
        """End it."""
        if not self._is_held(session):
            return
        del self._by_id[session.request_id]
        if session.expiry is not None:
            session.expiry.cancel()
        for history in session.histories:
            reason = history.finish_reason
            if not history.is_ended:
                self._client.cancel(history.request_id)
                reason = FinishReason.ABORT
            if reason is not None and history.count_end():
                self._on_end(reason)
        session.lease.close()
        self.journaling.write(Forgotten(session.number))

    def _is_held(self, session: Session) -> bool:
        """Whether it is not over; its id may be another's by now."""
        return self._by_id.get(session.request_id) is session

    def _expire_later(self, session: Session) -> None:
        loop = asyncio.get_running_loop()
        session.expiry = loop.call_later(self._window_s, self.forget, session)

    def _lease(self, num_bytes: int) -> Lease:
        """Room for one more, at the cost of answers that were told and are kept just in case."""
        while True:
            try:
                return self._budget.open(num_bytes)
            except ApiError:
                kept = (s for s in self._by_id.values() if not s.num_attached and s.is_told)
                oldest = next(kept, None)
                if oldest is None:
                    raise
                self.forget(oldest)

    def _history(self, session: Session) -> History:
        index = len(session.histories)

        def on_output(history: History, output: RequestOutput | None) -> None:
            if output is not None:
                self.journaling.row(Row(session.number, index, output))
            elif history.is_cut:
                self.journaling.write(Cut(session.number, index))

        return History(on_output)

    # The journal --------------------------------------------------------------------------------

    def _snapshot(self) -> Iterator[Message]:
        for session in list(self._by_id.values()):
            if session.accepted.adds:
                for record in session.records():
                    if not self._is_held(session):
                        break
                    yield record

    async def _restore(self, records: list[bytes]) -> None:
        """Send again what was open, and keep what was answered, until its client comes back."""
        replay = Replay()
        await _in_slices(records, replay.take, self._clock)
        remembered = replay.remembered()
        num_open = 0

        def restore(item: Remembered) -> None:
            nonlocal num_open
            try:
                num_open += self._restore_one(item)
            except Exception as error:  # one request, of a version of ours that wrote it otherwise
                log.warning("request %s is not resumed: %s", item.accepted.request_id, error)

        await _in_slices(remembered, restore, self._clock)
        if remembered:
            log.info("%d requests of the journal go on, of %d", num_open, len(remembered))

    def _restore_one(self, item: Remembered) -> bool:
        """Whether it goes on."""
        accepted = item.accepted
        if accepted.request_id in self._by_id:  # it was sent again before the journal was read
            return False
        reread = self._rereaders[accepted.path](accepted.raw, accepted.adds)
        session = self._enter(accepted, reread, self._lease(len(accepted.raw)))
        session.is_known = True
        self._expire_later(session)
        for add, known in zip(accepted.adds, item.histories, strict=True):
            self._adopt(session, add, known)
        return not session.is_ended

    def _adopt(self, session: Session, add: AddRequest, known: History) -> None:
        history = self._history(session)
        session.histories.append(history)
        whole = known.whole()
        history.enter(whole)
        if known.is_cut:
            history.cut()
        if history.is_ended:
            history.is_counted = True  # by the predecessor
            return
        try:
            history.request_id = self._client.adopt(resumed(add, history), history)
        except RequestFailed as failure:
            history.fail(failure)


async def _in_slices(items: Iterable[T], act: Callable[[T], None], clock: Clock) -> None:
    """Do something with many things; the rest of the event loop goes on in between."""
    began = clock.monotonic()
    for item in items:
        act(item)
        if clock.monotonic() - began > _SLICE_S:
            await asyncio.sleep(0)
            began = clock.monotonic()
