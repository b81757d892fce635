"""A stand-in for `protocol.client.ReplicatedClient` with scripted tokens, and a live server."""

import asyncio
import inspect
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Unpack

import msgspec
import uvloop

from api_proc.app import openai_app
from api_proc.http.access_log import AccessLogger
from api_proc.http.listener import open_listener, url_of
from api_proc.http.server import HttpServer
from api_proc.http.tls import make_context
from api_proc.peers.shared_counters import SharedCounters
from api_proc.state import ApiState
from api_proc.text.processor import TextProcessor
from api_proc.text.tokenizer import FIRST_BYTE_ID
from protocol.adapters import Adapter
from protocol.api_core import (
    AddRequest,
    EngineState,
    EngineStats,
    PauseMode,
    RequestOutput,
    Status,
)
from protocol.client.errors import RequestFailed
from protocol.client.ledger import RequestOptions, RoutedOptions, check_request
from protocol.client.open_requests import Receiver
from protocol.client.packed_prompt import PromptIds
from protocol.client.request_stream import RequestStream
from protocol.config import EngineConfig
from protocol.core_worker import PromptLogprobs, TokenLogprobs
from protocol.model_facts import ModelFacts
from protocol.sampling import FinishReason, SamplingParams

EOS_ID = 2
FACTS = ModelFacts("null", 1000, 512, 16, 200, [EOS_ID], embedding_size=16)
QUEUE_TIME_S = 0.25
"""What the engine states for each sequence."""
REPLY = "The quick brown fox jumps over the lazy dog. "

Script = Callable[[AddRequest], Iterator[RequestOutput]]


def ids_of(text: str) -> list[int]:
    return [FIRST_BYTE_ID + byte for byte in text.encode()]


def repeating(text: str = REPLY, *, per_output: int = 1) -> Script:
    """Emit `text` repeatedly until max_tokens."""
    return emitting(ids_of(text) * 100, per_output=per_output)


def embed(add: AddRequest) -> Iterator[RequestOutput]:
    """Return the prompt's first id, its length, and numbers."""
    pooling = add.sampling_params.pooling
    assert pooling is not None
    first = int.from_bytes(add.packed_prompt[:4], "little") or add.prompt_token_ids[0]
    numbers = [float(first), float(add.num_prompt_tokens), *[0.1] * 14][: pooling.dimensions]
    packed = struct.pack(f"<{len(numbers)}f", *numbers)
    yield RequestOutput(add.request_id, 0, [], FinishReason.STOP, embedding=packed)


def emitting(token_ids: list[int], *, per_output: int = 1) -> Script:
    """Emit these tokens, ending at EOS or at max_tokens; or a vector, where that is asked for."""

    def script(add: AddRequest) -> Iterator[RequestOutput]:
        params = add.sampling_params
        if params.pooling is not None:
            yield from embed(add)
            return
        output_ids = token_ids[: params.max_tokens]
        if EOS_ID in output_ids and not params.ignore_eos:
            output_ids = output_ids[: output_ids.index(EOS_ID) + 1]
        for first in range(0, len(output_ids), per_output):
            ids = output_ids[first : first + per_output]
            is_last = first + per_output >= len(output_ids)
            reason = FinishReason.STOP if ids[-1] == EOS_ID else FinishReason.LENGTH
            yield RequestOutput(
                add.request_id,
                first,
                ids,
                reason if is_last else None,
                num_cached_tokens=add.num_prompt_tokens // 16 * 16 if first == 0 else None,
                logprobs=[logprobs_of(i, params.logprobs) for i in ids]
                if params.logprobs is not None
                else None,
                prompt_logprobs=prompt_part(add) if first == 0 else None,
                queue_time_s=QUEUE_TIME_S if first == 0 else None,
            )

    return script


def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
    """The token and its successors as candidates; the last has probability 0."""
    values = [-0.5 - i for i in range(num_top)]
    if num_top > 1:
        values[-1] = float("-inf")
    return TokenLogprobs(token_id, -0.5, 1, [token_id + i for i in range(num_top)], values)


def prompt_part(add: AddRequest) -> list[PromptLogprobs] | None:
    num_top = add.sampling_params.prompt_logprobs
    if num_top is None or add.num_prompt_tokens == 1:  # a worker computes none for the first token
        return None
    entries = [logprobs_of(i, num_top) for i in add.unpacked_prompt[1:]]
    return [PromptLogprobs(add.request_id, 1, entries)]


class FakeClient:
    """Plays a script for every request: one output per turn of the event loop."""

    def __init__(self, facts: ModelFacts | None = FACTS, script: Script | None = None) -> None:
        self.facts = facts
        self.status: Status | None = None
        self.silent_since: float | None = None
        """Time of the core's last status message; None: always now."""
        self.connected = True
        self.other_model = ""
        self.num_moved = 0
        self.num_handed_over = 0
        self.num_inexact = 0
        self.script = script or repeating()
        self.is_paused = False
        self.stuck_since: float | None = None
        """Time of the core's last step; None: it makes progress."""
        self.refusal: RequestFailed | None = None
        self.requests: list[AddRequest] = []
        self.cancelled: list[int] = []
        self.affinities: list[str] = []
        self.controls: list[tuple[str, object]] = []
        self.response: bool | Exception = True
        """The result of every control command."""
        self.receivers: dict[int, Receiver] = {}
        self._scripts: dict[int, Iterator[RequestOutput]] = {}
        if facts is not None:
            self.report(EngineState.READY)

    @property
    def is_open(self) -> bool:
        return True

    @property
    def clients(self) -> "list[FakeClient]":
        return [self]

    @property
    def engine(self) -> "FakeClient":
        """The facts of the engine: the fake itself has these attributes."""
        return self

    @property
    def fingerprint(self) -> str:
        return "" if self.facts is None else self.facts.fingerprint

    @property
    def num_open_requests(self) -> int:
        return len(self._scripts)

    @property
    def last_status_time(self) -> float:
        return time.monotonic() if self.silent_since is None else self.silent_since

    @property
    def last_progress_time(self) -> float:
        return time.monotonic() if self.stuck_since is None else self.stuck_since

    def report(self, state: EngineState, **stats: Any) -> None:
        self.status = Status(state, self.facts, EngineStats(**stats))

    def submit(
        self, prompt_token_ids: PromptIds, params: SamplingParams, **options: Unpack[RoutedOptions]
    ) -> RequestStream:
        stream = RequestStream(len(self.requests) + 1, self.cancel)
        self.submit_to(stream, prompt_token_ids, params, **options)
        return stream

    def submit_to(
        self,
        receiver: Receiver,
        prompt_token_ids: PromptIds,
        params: SamplingParams,
        *,
        affinity: str = "",
        **options: Unpack[RequestOptions],
    ) -> AddRequest:
        self.affinities.append(affinity)
        add = AddRequest(len(self.requests) + 1, [], params, **options)
        assert self.facts is not None
        add, _ = check_request(add, self.facts, prompt_token_ids)
        if self.refusal is not None and not add.resent:
            raise self.refusal
        self._begin(add, receiver)
        return add

    def adopt(self, add: AddRequest, receiver: Receiver) -> int:
        """Continue the script after the known tokens."""
        add = msgspec.structs.replace(add, request_id=len(self.requests) + 1, resent=True)
        self._begin(add, receiver)
        return add.request_id

    def _begin(self, add: AddRequest, receiver: Receiver) -> None:
        self.requests.append(add)
        self.receivers[add.request_id] = receiver
        num_known = len(add.output_token_ids)
        self._scripts[add.request_id] = (
            output for output in self.script(add) if output.first_index >= num_known
        )
        asyncio.get_running_loop().call_soon(self._turn, add.request_id)

    async def pause(self, mode: PauseMode) -> bool:
        return self._control("pause", mode)

    async def resume(self) -> bool:
        return self._control("resume", PauseMode.RUNNING)

    async def sleep(self) -> bool:
        return self._control("sleep", PauseMode.PAUSED_ALL, is_sleeping=True)

    async def load_adapter(self, adapter: Adapter) -> str:
        self.controls.append(("load", adapter.name))
        return "" if self._respond() else "r is 64"

    async def unload_adapter(self, adapter: Adapter) -> bool:
        self.controls.append(("unload", adapter.name))
        return self._respond()

    async def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        self.controls.append(("reset", reset_running_requests))
        return self._respond()

    def _control(self, name: str, mode: PauseMode, *, is_sleeping: bool = False) -> bool:
        self.controls.append((name, mode))
        assert self.status is not None
        is_done = self._respond()
        if is_done:
            self.status = msgspec.structs.replace(
                self.status, pause_mode=mode, is_sleeping=is_sleeping
            )
        return is_done

    def _respond(self) -> bool:
        if isinstance(self.response, Exception):
            raise self.response
        return self.response

    def cancel(self, request_id: int) -> None:
        if self._scripts.pop(request_id, None) is not None:
            self.cancelled.append(request_id)

    def _turn(self, request_id: int) -> None:
        script = self._scripts.get(request_id)
        if script is None:
            return
        loop = asyncio.get_running_loop()
        if self.is_paused:
            loop.call_later(0.002, self._turn, request_id)
            return
        output = next(script, None)
        if output is None:
            return
        if output.finish_reason is not None:
            del self._scripts[request_id]
        self.receivers[request_id].deliver(output)
        loop.call_soon(self._turn, request_id)


class LiveServer:
    """The application under uvicorn in a separate thread."""

    def __init__(
        self,
        config: EngineConfig,
        client: FakeClient,
        text: TextProcessor | None = None,
        keep_alive_interval_s: float = 15.0,
        access_logger: AccessLogger | None = None,
        *,
        index: int = 0,
        counters: SharedCounters | None = None,
    ) -> None:
        self.client = client
        self.text = text or TextProcessor.load(config.model, config.api.tokenizer_pool_size)
        self.state = ApiState(
            client,  # type: ignore[arg-type]
            config,
            self.text,
            index=index,
            counters=counters,
        )
        app = openai_app(
            self.state, keep_alive_interval_s=keep_alive_interval_s, access_logger=access_logger
        )
        self._server = HttpServer(app, tls=make_context(config.api))
        self.socket = open_listener(msgspec.structs.replace(config.api, port=0))
        self.url = url_of(self.socket, is_tls=config.api.ssl_certfile is not None)
        self.port = self.socket.getsockname()[1]
        self.loop: asyncio.AbstractEventLoop
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "LiveServer":
        self._thread.start()
        self._started.result(timeout=30)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()
        self._thread.join(timeout=30)
        assert not self._thread.is_alive()
        self.text.close()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function, or a coroutine function, inside the server's event loop."""

        async def run() -> Any:
            result = function(*args)
            return await result if inspect.isawaitable(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(timeout=30)

    def _run(self) -> None:
        uvloop.run(self._serve())

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.loop.call_soon(self._started.set_result, None)
        await self._server.serve(sockets=[self.socket])


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait until `condition` holds; fail after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition did not hold in time"
        time.sleep(0.002)
