"""The API process with a journal: real sessions between HTTP connections and the engine client.

HTTP itself and text are left out: connections carry tokens.
"""

from collections.abc import Callable
from typing import cast

from api_proc.bodies import SamplingBody
from api_proc.errors import ApiError
from api_proc.resumption.event_ids import parse_event_id
from api_proc.resumption.history import HistoryReader
from api_proc.resumption.session import DecodedRequest, Session
from api_proc.resumption.sessions import Sessions
from api_proc.text.output_sequence import Prompt
from protocol.api_core import AddRequest
from protocol.client.errors import RequestFailed
from tests.simulation.child import SimulatedChild
from tests.simulation.client_process import ClientProcess
from tests.simulation.disk import Thread
from tests.simulation.http_clients import Connection, Internet
from tests.simulation.oracle import Oracle
from tests.simulation.plan import RequestPlan
from tests.simulation.wire import Wire
from tests.simulation.world import SECOND, Process

PATH = "/v1/completions"
_COMMIT_TIMEOUT_S = 0.25
_CLOSE_TIMEOUT_S = 2.0
_UNAVAILABLE = 503


class ApiProcess(ClientProcess):
    """Serves connections; its requests survive it in the journal."""

    def __init__(
        self,
        wire: Wire,
        name: str,
        oracle: Oracle,
        connect: Callable[[Process], SimulatedChild],
        *,
        start_s: float,
        internet: Internet,
        plans: list[RequestPlan],
    ) -> None:
        """Succeed the last API process; `plans` are all requests of the run."""
        super().__init__(wire, name, [], oracle, connect, start_s=start_s)
        self._internet = internet
        self._num_served = 0
        self._closed_at: int | None = None
        self._bodies = {_raw(plan): plan for plan in plans}

    def begin(self) -> None:
        self._sessions = Sessions(
            self.engine,
            self.config.api,
            clock=self.world.clock,
            make_journal=self._internet.disk.journal,
        )
        self.on_death.append(self._release_journal)
        self._sessions.start({PATH: self._decode})
        self.run(self._open())

    async def _open(self) -> None:
        await self._sessions.journaling.wait_read()
        self._internet.server = self

    def _release_journal(self) -> None:
        """Release the journal's lock and file, as the system does when a process ends."""
        journal = vars(self._sessions.journaling).get("_journal")
        if journal is not None:
            journal._segments.close()
            journal._segments.unlock()

    def _abandon(self) -> None:
        super()._abandon()
        if self._internet.server is self or self._is_leaving:
            self._internet.server_died()

    def retire(self) -> None:
        if self._internet.server is self:
            self._internet.server = None

    @property
    def has_finished(self) -> bool:
        return not self._num_served

    def flush_for_successor(self) -> bool:
        if self._closed_at is None:
            self._closed_at = self.world.now
            self._sessions.close()
        thread = cast(Thread | None, self._sessions.journaling._journal._thread)
        has_waited = self.world.now - self._closed_at >= int(_CLOSE_TIMEOUT_S * SECOND)
        return thread is None or thread.has_ended or has_waited

    def accept(self, connection: Connection) -> None:
        self._num_served += 1
        self.run(self._serve(connection))

    def _decode(self, raw: bytes, adds: list[AddRequest]) -> DecodedRequest:
        plan = self._bodies[raw]
        body = SamplingBody(priority=plan.priority, cache_salt=plan.salt, stream=True)
        return DecodedRequest(body, [Prompt(plan.prompt, None)])

    async def _serve(self, connection: Connection) -> None:
        try:
            await self._answer(connection)
        finally:
            self._num_served -= 1

    async def _answer(self, connection: Connection) -> None:
        sessions, plan, raw = self._sessions, connection.plan, _raw(connection.plan)
        request_id = raw.decode()
        seen = connection.num_seen
        last_event_id = f"{request_id}.{seen}" if seen else None
        try:
            session = sessions.find(request_id, PATH, raw, last_event_id)
            if session is not None:
                if last_event_id is not None:
                    parse_event_id(last_event_id, request_id, [plan.params.max_tokens])
                await self._stream_rest(connection, session)
                return
            session = sessions.begin(request_id, PATH, raw, self._decode(raw, []))
        except ApiError as error:
            connection.refuse(error.status)
            return
        await self._stream_new(connection, session)

    async def _stream_new(self, connection: Connection, session: Session) -> None:
        sessions, plan = self._sessions, connection.plan
        sessions.attach(session)
        try:
            reader = sessions.submit(session, plan.prompt, plan.params, adapter=plan.adapter)
        except RequestFailed:  # the engine is starting: nothing was accepted
            sessions.remove(session)
            sessions.detach(session, is_known=False, is_sent=False)
            connection.refuse(_UNAVAILABLE)
            return
        began = self._loop.time()
        await sessions.accept(session)
        is_quick = self._loop.time() - began < _COMMIT_TIMEOUT_S
        is_durable = is_quick and sessions.journaling._journal.is_writing
        await self._stream(connection, session, reader, is_durable=is_durable)

    async def _stream_rest(self, connection: Connection, session: Session) -> None:
        self._sessions.attach(session)
        reader = self._sessions.reader(session.histories[0])
        await self._stream(connection, session, reader, is_durable=False)

    async def _stream(
        self, connection: Connection, session: Session, reader: HistoryReader, *, is_durable: bool
    ) -> None:
        is_sent = False
        connection.on_close = reader.leave
        try:
            if not connection.is_closed:
                connection.begin(is_durable=is_durable)
                async for output in reader:
                    connection.send(output)
                is_sent = not connection.is_closed
        except RequestFailed as failure:
            connection.fail(failure.error)
        else:
            if is_sent:
                connection.finish()
        finally:
            if self.is_alive:
                self._sessions.detach(session, is_known=True, is_sent=is_sent)


def _raw(plan: RequestPlan) -> bytes:
    return b"request-%d" % plan.number
