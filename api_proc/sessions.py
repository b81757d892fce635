"""Requests that outlive their connections: a client comes back with the same id and body.

Only with a journal. A session is one HTTP request with all its sequences; what they bring goes into
their histories, which connections read. Without a connection it lives on for `resume_window_s`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from api_proc.bodies import SamplingBody
from api_proc.budget import Budget, Lease
from api_proc.errors import ApiError
from api_proc.history import History, HistoryReader
from api_proc.journaling import Journaling
from api_proc.sequence import Prompt
from api_proc.session_log import Accepted, Brought, Cut, Forgotten, Row, replay, resumed
from protocol.api_core import AddRequest, RequestOutput
from protocol.client import AsyncEngineClient
from protocol.config import ApiConfig
from protocol.errors import RequestFailed
from protocol.message import Message, TokenIds
from protocol.sampling import SamplingParams

_COMMIT_TIMEOUT_S = 0.25
"""The longest that an answer waits for a slow disk."""

log = logging.getLogger("troika.api")


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

    def records(self) -> list[Message]:
        """All of it, for the journal."""
        rows = [
            Row(self.number, index, history.whole())
            for index, history in enumerate(self.histories)
            if history.token_ids or history.finish_reason or history.prompt_logprobs
        ]
        cuts = [Cut(self.number, i) for i, item in enumerate(self.histories) if item.is_cut]
        return [self.accepted, Brought(rows), *cuts]


class Sessions:
    """All sessions of one server."""

    def __init__(self, client: AsyncEngineClient, config: ApiConfig) -> None:
        assert config.journal_dir is not None
        self._client = client
        self._window_s = config.resume_window_s
        self._budget = Budget(config.max_open_requests, config.max_open_bytes)
        self._by_id: dict[str, Session] = {}
        # Greater than any of a predecessor's, also where its journal can be read only later.
        self._next_number = int(time.time() * 1e6)
        self._rereaders: Rereaders = {}
        self.journaling = Journaling(config.journal_dir, self._snapshot)
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
                go on with.
        """
        session = self._by_id.get(request_id)
        if session is None:
            if last_event_id is None:
                return None
            message = f"request {request_id} is not known here, or not any more"
            raise ApiError(404, message, code="request_not_found")
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
            ApiError: 409 where another one has come with this id meanwhile, 429 where there is no
                room.
        """
        if request_id in self._by_id:
            message = f"request {request_id} is being accepted"
            raise ApiError(409, message, code="request_id_conflict")
        lease = self._lease(len(raw))
        accepted = Accepted(self._next_number, request_id, path, raw, int(time.time()), [])
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
        self.journaling.write(session.accepted)
        await self.journaling.written(_COMMIT_TIMEOUT_S)

    def attach(self, session: Session) -> None:
        """Somebody reads it."""
        session.num_attached += 1
        if session.expiry is not None:
            session.expiry.cancel()
            session.expiry = None

    def detach(self, session: Session, *, is_known: bool) -> None:
        """Somebody reads it no more; `is_known`: the client has heard of its id."""
        session.num_attached -= 1
        session.is_known = session.is_known or is_known
        if session.num_attached or session.request_id not in self._by_id:
            return
        has_failed = any(history.error is not None for history in session.histories)
        if has_failed or not session.is_known or not session.histories:
            self.forget(session)
        else:
            self._expire_later(session)

    def forget(self, session: Session) -> None:
        """End it."""
        if self._by_id.pop(session.request_id, None) is None:
            return
        if session.expiry is not None:
            session.expiry.cancel()
        for history in session.histories:
            if not history.is_ended:
                self._client.cancel(history.request_id)
        session.lease.close()
        self.journaling.write(Forgotten(session.number))

    def _expire_later(self, session: Session) -> None:
        loop = asyncio.get_running_loop()
        session.expiry = loop.call_later(self._window_s, self.forget, session)

    def _lease(self, num_bytes: int) -> Lease:
        """Room for one more, at the cost of answers that were told and are kept just in case."""
        while True:
            try:
                return self._budget.open(num_bytes)
            except ApiError:
                kept = (s for s in self._by_id.values() if not s.num_attached and s.is_ended)
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

    def _snapshot(self) -> Iterator[list[Message]]:
        for session in list(self._by_id.values()):
            if session.request_id in self._by_id and session.accepted.adds:
                yield session.records()

    def _restore(self, records: list[bytes]) -> None:
        """Send again what was open, and keep what was answered, until its client comes back."""
        remembered = replay(records)
        num_open = 0
        for item in remembered:
            accepted = item.accepted
            reread = self._rereaders.get(accepted.path)
            if reread is None or accepted.request_id in self._by_id:
                continue
            try:
                lease = self._lease(len(accepted.raw))
                content = reread(accepted.raw, accepted.adds)
            except ApiError as error:
                log.warning("request %s is not resumed: %s", accepted.request_id, error.message)
                continue
            session = self._enter(accepted, content, lease)
            session.is_known = True
            for add, known in zip(accepted.adds, item.histories, strict=True):
                self._adopt(session, add, known)
            num_open += not session.is_ended
            self._expire_later(session)
        if remembered:
            log.info("%d requests of the journal go on, of %d", num_open, len(remembered))

    def _adopt(self, session: Session, add: AddRequest, known: History) -> None:
        history = self._history(session)
        session.histories.append(history)
        whole = known.whole()
        history.enter(whole)
        if known.is_cut:
            history.cut()
        if history.is_ended:
            return
        try:
            history.request_id = self._client.adopt(resumed(add, history), history)
        except RequestFailed as failure:
            history.fail(failure)
