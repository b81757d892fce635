"""A server without HTTP, for tests of sessions in a running event loop."""

import asyncio
import functools
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, ParamSpec

from api_proc.bodies import CompletionBody
from api_proc.generation.generation import Generation
from api_proc.http.connection import Connection
from api_proc.http.scope import HAS_CLIENT_ID_KEY
from api_proc.resumption.journal import Journal
from api_proc.resumption.session import DecodedRequest, Session
from api_proc.resumption.session_log import Replay, ReplayedRequest
from api_proc.resumption.sessions import Sessions
from api_proc.state import ApiState
from api_proc.text.output_sequence import Prompt
from api_proc.text.processor import TextProcessor
from protocol.api_core import AddRequest
from protocol.config import EngineConfig
from protocol.config.settings import configure
from protocol.sampling import SamplingParams
from tests.api.fake_engine import FakeClient, emitting

P = ParamSpec("P")

PATH = "/p"
RAW = b"{}"
OUTPUT_IDS = [100 + i % 50 for i in range(900)]


class Server:
    """The parts of a server that sessions need."""

    def __init__(
        self, directory: Path, make_journal: Callable[..., Journal] = Journal, **settings: Any
    ) -> None:
        self.client = FakeClient(script=emitting(OUTPUT_IDS))
        self.config: EngineConfig = configure(model="null", journal_dir=str(directory), **settings)
        text = TextProcessor.load(self.config.model)
        self.state = ApiState(self.client, self.config, text)  # type: ignore[arg-type]
        count_end = self.state.metrics.count_end
        self.sessions = Sessions(
            self.client,  # type: ignore[arg-type]
            self.config.api,
            count_end,
            make_journal=make_journal,
        )
        self.state.sessions = self.sessions
        self.sessions.start({PATH: decode})

    async def written(self) -> "Server":
        """Wait until the journal can be written."""
        await until(lambda: not self.sessions.journaling.is_failed)
        return self

    def generation(self, name: str, session: Session | None = None, **fields: Any) -> Generation:
        body = CompletionBody(prompt="x", stream=True, **fields)
        return Generation(self.state, body, connection_of(name), session)

    async def accept(self, name: str, raw: bytes = RAW, *, n: int = 1, **params: Any) -> Session:
        """Begin a session without a connection, whose client does not know of it."""
        with self.generation(name, n=n) as generation:
            generation.begin_session(PATH, raw, [Prompt([5, 6], None)])
            submit_all(
                generation, [5, 6], SamplingParams(**{"max_tokens": 900, "seed": 1} | params)
            )
            await generation.accepted()
            generation.cancel()
        found = self.find(name, raw)
        assert found is not None
        return found

    def find(self, name: str, raw: bytes = RAW, last: str | None = None) -> Session | None:
        return self.sessions.find(name, PATH, raw, last)


def submit_all(generation: Generation, token_ids: list[int], params: SamplingParams) -> None:
    for _ in generation.submit(token_ids, token_ids, params):
        pass


def replay(records: Iterable[bytes]) -> list[ReplayedRequest]:
    """Return the open requests of a journal, oldest first."""
    replayed = Replay()
    for record in records:
        replayed.apply(record)
    return replayed.open_requests()


def connection_of(name: str) -> Connection:
    async def receive() -> Any:
        await asyncio.sleep(3600)

    async def send(message: Any) -> None:
        pass

    return Connection({"troika.request_id": name, HAS_CLIENT_ID_KEY: True}, receive, send)


def decode(raw: bytes, adds: list[AddRequest]) -> DecodedRequest:
    fields = json.loads(raw) | {"n": len(adds)}
    return DecodedRequest(CompletionBody(prompt="x", stream=True, **fields), [Prompt([5, 6], None)])


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


async def read(generation: Generation, count: int) -> list[int]:
    """Read the next tokens of the only sequence."""
    found: list[int] = []
    async for step in generation.steps():
        found += [token_id for _, delta in step for token_id in delta.token_ids]
        if len(found) >= count:
            break
    return found


def play(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run a test inside an event loop."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(90):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return run
