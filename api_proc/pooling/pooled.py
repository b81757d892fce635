"""Common code of the routes for embeddings, scores and labels: each prompt gets a vector."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from api_proc.bodies import TruncateTokens, check_truncation
from api_proc.errors import ApiError, counted_as, from_request_error
from api_proc.generation.packing import packed_in_slices
from api_proc.http.access_log import GenerationRecord
from api_proc.http.connection import Connection
from api_proc.http.json_body import BodyDecoder, Turn
from api_proc.http.open_requests import Slot
from api_proc.http.scope import GENERATION_KEY
from api_proc.state import ApiState
from api_proc.unknown_fields import FOREIGN_POOLED
from protocol.adapters import Adapter
from protocol.api_core import ErrorCode, RequestError, RequestOutput
from protocol.client.errors import RequestFailed, failure_of
from protocol.client.request_stream import RequestStream
from protocol.message import Tenant
from protocol.model_facts import ModelFacts
from protocol.sampling import CacheSalt, FinishReason, Pooling, Priority, pooling_params

AT_ONCE = 32
"""Vectors rendered in one turn of the event loop."""
_SLICE_S = 0.002

T = TypeVar("T")


class PooledBody(msgspec.Struct, kw_only=True):
    """Fields that the bodies of all these routes have. None means the server's default."""

    model: str | None = None
    user: Tenant | None = None
    truncate_prompt_tokens: TruncateTokens | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None


Body = TypeVar("Body", bound=PooledBody)


class EmbeddingUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class PooledList(msgspec.Struct, Generic[T], kw_only=True):
    """The fields of a response that has a result for each input."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[T]
    usage: EmbeddingUsage


Response = TypeVar("Response", bound=PooledList[Any])


class PooledPrompt(NamedTuple):
    """The ids of a text, or of a pair of texts."""

    token_ids: list[int]
    second_text_start: int = 0
    """Position at which the second text of a pair begins; see `Pooling`."""


def usage_of(prompts: Sequence[PooledPrompt]) -> EmbeddingUsage:
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    return EmbeddingUsage(num_tokens, num_tokens)


def pooled_list(
    kind: type[Response],
    prefix: str,
    connection: Connection,
    model: str,
    data: list[Any],
    *,
    usage: EmbeddingUsage,
) -> Response:
    """Return a response of this kind that is made now; `prefix` begins its id."""
    return kind(
        id=f"{prefix}-{connection.request_id}",
        created=int(time.time()),
        model=model,
        data=data,
        usage=usage,
    )


@asynccontextmanager
async def decoded_in_slices(
    state: ApiState, connection: Connection, decode: BodyDecoder[Body]
) -> AsyncIterator[tuple[Body, ModelFacts, Turn]]:
    """Read and decode the body of a request, whose turn lasts until the end of the block."""
    raw = await connection.read_body(state.config.api.max_body_bytes)
    facts = await state.accepting(connection.origin)
    with Turn(state.large_requests) as turn:
        body, unknown = await decode.in_slices(raw, turn)
        connection.lease.reserve_values(turn.num_values)
        connection.headers += state.unknown_fields.check(raw, unknown, FOREIGN_POOLED)
        del raw
        yield body, facts, turn


def require_vectors(facts: ModelFacts) -> None:
    """Raise a 400 for a model that returns no vectors."""
    if facts.embedding_size == 0:
        raise ApiError(400, "the model returns no embeddings", code="unsupported_model")
    if facts.num_labels:
        message = "the model returns scores of labels, and no embeddings: use /score or /classify"
        raise ApiError(400, message, code="unsupported_model")


def kept_length(truncate_prompt_tokens: int | None, facts: ModelFacts) -> int | None:
    """Return the length to which a prompt is cut, or None; -1 means the model's context."""
    check_truncation(truncate_prompt_tokens)
    return facts.max_model_len if truncate_prompt_tokens == -1 else truncate_prompt_tokens


class PooledRequests:
    """All vectors of one HTTP request. On exit, those that are not computed are aborted."""

    def __init__(
        self,
        state: ApiState,
        connection: Connection,
        body: PooledBody,
        prompts: Sequence[PooledPrompt],
        *,
        pooling: Pooling,
        adapter: Adapter | None,
    ) -> None:
        self.request_id = connection.request_id
        self.response = None
        self._state = state
        self._connection = connection
        self._body = body
        self._prompts = prompts
        self._pooling = pooling
        self._adapter = adapter
        self._streams: list[RequestStream] = []
        self._num_read = 0
        self._end: FinishReason | None = FinishReason.ABORT
        """Finish reason on exit of the prompts without a vector; None: they were refused."""
        self._is_cancelled = False
        self._arrival = time.monotonic()

    @property
    def _num_tokens(self) -> int:
        return usage_of(self._prompts).total_tokens

    def __enter__(self) -> "PooledRequests":
        self._state.open_requests.add(self)
        self._connection.watch(self._cancel)
        return self

    def __exit__(self, *_: object) -> None:
        metrics = self._state.metrics
        if self._end is not None:
            for _stream in self._streams[self._num_read :]:
                metrics.count_end(self._end)
        is_sent = self._num_read == len(self._prompts)
        record = GenerationRecord(self._num_tokens, 0, None, None, is_sent)
        self._connection.scope[GENERATION_KEY] = record
        self._cancel()
        self._state.open_requests.remove(self)

    def _cancel(self) -> None:
        self._is_cancelled = True
        for stream in self._streams:
            stream.cancel()

    def abort(self) -> bool:
        """End the request with an error for its client."""
        self.fail(failure_of(RequestError(ErrorCode.ABORTED, "the request was aborted")))
        return bool(self._streams)

    def fail(self, error: RequestFailed) -> None:
        for stream in self._streams:
            stream.fail(error)
            stream.cancel()

    def slot(self) -> Slot:
        return Slot(
            path=self._connection.scope["path"],
            state="running" if self._num_read else "waiting",
            age_s=round(time.monotonic() - self._arrival, 3),
            num_sequences=len(self._prompts),
            num_prompt_tokens=self._num_tokens,
            num_output_tokens=0,
        )

    async def compute(
        self, facts: ModelFacts, turn: Turn, take: Callable[[int, bytes], T], *, param: str
    ) -> list[T] | None:
        """Return the result of `take` for each prompt; None: the client has disconnected.

        `take` is called with the prompt's number and its vector, as little-endian float32. Errors
        name `param`.
        """
        self._connection.lease.count_sequences(len(self._prompts))
        with self:
            try:
                await self._submit(facts, turn)
                turn.end()
                return await self._read(take)
            except RequestFailed as failure:
                num_prompts = len(self._prompts)
                error = self._state.refusal(failure.error, num_prompts, self._num_tokens)
                raise from_request_error(error, param) from failure

    async def _submit(self, facts: ModelFacts, turn: Turn) -> None:
        """Send all prompts to the core, in slices."""
        state, body, adapter = self._state, self._body, self._adapter
        began = time.perf_counter()
        for token_ids, second_text_start in self._prompts:
            [prompt] = await packed_in_slices([token_ids], facts, turn)
            if self._is_cancelled:
                return
            pooling = self._pooling
            if second_text_start:
                changed = {"second_text_start": second_text_start}
                pooling = msgspec.structs.replace(pooling, **changed)
            stream = state.client.submit(
                prompt,
                pooling_params(pooling),
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                tenant=body.user or "",
                origin=self._connection.origin,
                adapter=adapter,
            )
            self._streams.append(stream)
            state.metrics.prompt_tokens.observe(len(token_ids))
            if time.perf_counter() - began > _SLICE_S:
                await turn.pause()
                began = time.perf_counter()

    async def _read(self, take: Callable[[int, bytes], T]) -> list[T] | None:
        taken = []
        for index, stream in enumerate(self._streams):
            try:
                async for output in stream:
                    taken.append(take(index, _vector(output)))
                    self._num_read += 1
                    self._state.metrics.count_end(FinishReason.STOP)
            except RequestFailed as failure:
                self._end = counted_as(failure)
                raise
            if self._is_cancelled:
                return None
            if index % AT_ONCE == 0:
                await asyncio.sleep(0)
        self._state.metrics.e2e_request_latency.observe(time.monotonic() - self._arrival)
        return taken


def _vector(output: RequestOutput) -> bytes:
    if output.embedding is None:
        message = f"the engine ended the request: {output.finish_reason}"
        raise failure_of(RequestError(ErrorCode.INTERNAL, message))
    return output.embedding
