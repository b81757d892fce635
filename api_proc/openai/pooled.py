"""The prompts of one HTTP request that get a vector each: embeddings, scores, labels."""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import msgspec

from api_proc.bodies import check_truncation
from api_proc.errors import ApiError, counted_as
from api_proc.http.access_log import GENERATION_KEY, GenerationRecord
from api_proc.http.connection import Connection
from api_proc.http.json_body import Turn
from api_proc.http.open_requests import Slot
from api_proc.openai.packing import packed_in_turn
from api_proc.state import ApiState
from protocol.adapters import Adapter
from protocol.api_core import ErrorCode, RequestError, RequestOutput
from protocol.client.errors import RequestFailed, failure_of
from protocol.client.request_stream import RequestStream
from protocol.core_worker import ModelFacts
from protocol.sampling import FinishReason, Pooling, pooling_params

AT_ONCE = 32
"""Vectors rendered in one turn of the event loop."""
_SLICE_S = 0.002

T = TypeVar("T")


class PooledPrompt(NamedTuple):
    """The ids of a text, or of a pair of texts."""

    token_ids: list[int]
    second_text_start: int = 0
    """As in `Pooling`."""


class Submission(NamedTuple):
    """What the prompts of a request have in common."""

    pooling: Pooling
    priority: int
    cache_salt: str
    tenant: str
    adapter: Adapter | None = None


def require_vectors(facts: ModelFacts) -> None:
    """Raise a 400 for a model that returns no vectors."""
    if facts.embedding_size == 0:
        raise ApiError(400, "the model returns no embeddings", code="unsupported_model")
    if facts.num_labels:
        message = "the model returns scores of labels, and no embeddings: use /score or /classify"
        raise ApiError(400, message, code="unsupported_model")


def kept_length(truncate_prompt_tokens: int | None, facts: ModelFacts) -> int | None:
    """Return the length to which a prompt is cut, if at all; -1 stands for the model's context."""
    check_truncation(truncate_prompt_tokens)
    return facts.max_model_len if truncate_prompt_tokens == -1 else truncate_prompt_tokens


class PooledRequests:
    """All vectors of one HTTP request. At its exit those that are not computed are aborted."""

    def __init__(
        self, state: ApiState, connection: Connection, path: str, prompts: list[PooledPrompt]
    ) -> None:
        self.request_id = connection.request_id
        self.response = None
        self._state = state
        self._connection = connection
        self._path = path
        self._prompts = prompts
        self._streams: list[RequestStream] = []
        self._num_read = 0
        self._end: FinishReason | None = FinishReason.ABORT
        """Of the prompts without a vector, at the exit; None: they were refused."""
        self._is_cancelled = False
        self._arrival = time.monotonic()

    @property
    def num_tokens(self) -> int:
        """Of all prompts."""
        return sum(len(prompt.token_ids) for prompt in self._prompts)

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
        record = GenerationRecord(self.num_tokens, 0, None, is_sent=is_sent)
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
            path=self._path,
            state="running" if self._num_read else "waiting",
            age_s=round(time.monotonic() - self._arrival, 3),
            num_sequences=len(self._prompts),
            num_prompt_tokens=self.num_tokens,
            num_output_tokens=0,
        )

    async def submit(self, common: Submission, facts: ModelFacts, turn: Turn) -> None:
        """Send all prompts to the core, in slices."""
        state = self._state
        began = time.perf_counter()
        for token_ids, second_text_start in self._prompts:
            [prompt] = await packed_in_turn([token_ids], facts, turn)
            if self._is_cancelled:
                return
            pooling = common.pooling
            if second_text_start:
                changed = {"second_text_start": second_text_start}
                pooling = msgspec.structs.replace(pooling, **changed)
            stream = state.client.submit(
                prompt,
                pooling_params(pooling),
                priority=common.priority,
                cache_salt=common.cache_salt,
                tenant=common.tenant or ("" if common.adapter is None else common.adapter.name),
                adapter=common.adapter,
            )
            self._streams.append(stream)
            state.metrics.prompt_tokens.observe(len(token_ids))
            if time.perf_counter() - began > _SLICE_S:
                await turn.pause()
                began = time.perf_counter()

    async def read(self, take: Callable[[int, bytes], T]) -> list[T] | None:
        """Return what `take` makes of each vector, in order; None: the client has disconnected.

        A vector is float32, little-endian; `take` gets its number, too.
        """
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
