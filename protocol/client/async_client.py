"""The asynchronous client of the core: submit prompts, iterate over tokens, cancel.

    async with AsyncEngineClient(client_address(run_dir)) as client:
        await client.wait_ready(timeout_s=60)
        async for output in client.submit([1, 2, 3], SamplingParams(max_tokens=8)):
            print(output.token_ids)

It survives restarts of the core and of the workers: open requests are sent again from the ledger,
and their streams continue. It changes no signal handlers, environment, logging or event loops.
"""

import asyncio
import itertools
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Unpack

import msgspec

from protocol.adapters import Adapter
from protocol.api_core import (
    AddRequest,
    ControlAction,
    ControlDone,
    ErrorCode,
    KVEventsTaken,
    PauseMode,
    Refused,
    RequestError,
    Status,
    StepOutputs,
    decode_from_client,
)
from protocol.client.controls import Controls
from protocol.client.core_link import TICK_S, CoreLink, News, UnreadableOutputs
from protocol.client.deadlines import deadline
from protocol.client.errors import failure_of
from protocol.client.known_engine import KnownEngine
from protocol.client.kv_feed import KVEventFeed
from protocol.client.ledger import Ledger, RequestOptions, check_request
from protocol.client.open_requests import OpenRequests, Receiver
from protocol.client.options import ClientOptions, SharedByReplicas
from protocol.client.packed_prompt import PromptIds
from protocol.client.request_stream import RequestStream, vector_of
from protocol.kv_events import KVEventBatch, SubscribeKVEvents
from protocol.message import Message, ProtocolError, encode
from protocol.model_facts import ModelFacts
from protocol.sampling import Pooling, SamplingParams, pooling_params
from protocol.shared_params import SharedParams
from protocol.transport.curve import ClientKeys
from protocol.transport.runtime import Clock

CONTROL_TIMEOUT_S = 30.0
ADAPTER_TIMEOUT_S = 120.0
"""Longest wait for an adapter to load; other adapters may be loaded first."""
_DEFAULTS = ClientOptions()


class AsyncEngineClient:
    """A client inside the event loop in which `start` was awaited. Not thread-safe."""

    def __init__(
        self,
        address: str,
        options: ClientOptions = _DEFAULTS,
        *,
        keys: ClientKeys | None = None,
        shared: SharedByReplicas | None = None,
        clock: Clock = time,
        make_link: Callable[..., CoreLink] = CoreLink,
        **fields: Any,
    ) -> None:
        """Set the core's address (see `run_dir.client_address`); nothing connects yet.

        Args:
            fields: fields of the options by name, such as `stall_timeout_s=30`.
            keys: for a tcp address: see `protocol.transport.curve.read_client_keys`.
            shared: state that the clients of several replicas share; otherwise it is this client's.
            make_link: takes the arguments of `CoreLink`.
        """
        options = replace(options, **fields)
        self._options = options
        self._clock = clock
        shared = shared or SharedByReplicas.for_one(options)
        self.engine = KnownEngine(
            address,
            options.stall_timeout_s,
            clock.monotonic(),
            shared.expected,
            is_replica=shared.can_move,
        )
        """What is known of the engine."""
        self._controls = Controls()
        self._answers: dict[int, asyncio.Future[ControlDone]] = {}
        self._feed: KVEventFeed | None = None
        self._subscriptions = itertools.count()
        queue_length = 2 * options.max_open_requests
        self._link = make_link(
            address, queue_length, self._on_status, self._on_message, clock=clock, keys=keys
        )
        ledger = Ledger(shared.limits, clock.monotonic, shared.numbers)
        self.requests = OpenRequests(ledger, self._link.send, is_replica=shared.can_move)
        """The requests that were accepted and have not ended."""
        self._shared_params = SharedParams()
        self._status_event = asyncio.Event()

    # State --------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """True while messages reach the core, which may nevertheless be recovering."""
        return self._link.is_agreed

    @property
    def status(self) -> Status | None:
        """The core's last status."""
        return self.engine.status

    @property
    def last_status_time(self) -> float:
        """Time at which `status` arrived, on the monotonic clock."""
        return self.engine.last_status_time

    @property
    def facts(self) -> ModelFacts | None:
        """The model's facts; kept while the engine recovers."""
        return self.engine.facts

    @property
    def is_open(self) -> bool:
        """True from `start` until `close`."""
        return self._link.is_open

    @property
    def epoch(self) -> int:
        """The epoch of the connected core."""
        return self._link.epoch

    @property
    def link_problem(self) -> str:
        """The reason why the core is not connected, if known."""
        return self._link.problem

    @property
    def serves(self) -> bool:
        """True if the core is connected and has its workers, with the expected model."""
        return self.connected and self.engine.is_ready

    @property
    def num_open_requests(self) -> int:
        """Requests that were accepted and have not ended."""
        return len(self.requests)

    @property
    def num_fenced_frames(self) -> int:
        """Frames dropped because they came from another incarnation of the core."""
        return self._link.num_fenced_frames

    @property
    def num_bad_frames(self) -> int:
        """Frames dropped because their bodies could not be decoded."""
        return self._link.num_bad_frames

    @property
    def num_inexact(self) -> int:
        """Requests begun by an engine with another fingerprint and continued by this one."""
        return self.requests.num_inexact

    # Connecting ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to connect, without waiting for the connection."""
        self.connect()

    def connect(self) -> None:
        """Begin to connect; to be called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._link.open()
        self._timer = self._loop.call_later(TICK_S, self._tick)

    async def __aenter__(self) -> "AsyncEngineClient":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Disconnect; open streams fail, and the core aborts them. Idempotent."""
        self.disconnect()

    def disconnect(self) -> None:
        """Disconnect, as `close`; to be called in the event loop."""
        if not self._link.is_open:
            return
        self._timer.cancel()
        closed = RequestError(ErrorCode.ABORTED, "the client was closed")
        self.requests.fail_all(closed)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(failure_of(closed))
        if self._feed is not None:
            self._feed.fail(ConnectionError(closed.message))
        self._link.close()
        self._status_event.set()

    async def wait_ready(self, timeout_s: float) -> ModelFacts:
        """Wait until the engine is READY.

        Raises TimeoutError after `timeout_s`, with the reason if it is known, and RequestFailed if
        the client is not open.
        """
        async with deadline(timeout_s, "the engine has not been ready", self.why_not_ready):
            while True:
                if self.serves and self.engine.facts is not None:
                    return self.engine.facts
                self._require_open()
                self._status_event.clear()
                await self._status_event.wait()

    def why_not_ready(self) -> str:
        """Return why the engine does not serve, as far as this is known."""
        return self.link_problem or self.engine.why_not_ready(is_connected=self.connected)

    def _require_open(self) -> None:
        if not self._link.is_open:
            message = "the client is not open, or closed again"
            raise failure_of(RequestError(ErrorCode.ABORTED, message))

    def _send(self, message: Message) -> None:
        self._link.send(encode(message))

    # Requests -----------------------------------------------------------------------------------

    def submit(
        self, prompt_token_ids: PromptIds, params: SamplingParams, **options: Unpack[RequestOptions]
    ) -> RequestStream:
        """Accept a request; from now on it survives restarts of everything but this process.

        `params` must have an explicit seed. The caller may change `prompt_token_ids` later. A
        prompt of many thousands of ids may be packed beforehand, in slices: see `PromptPacking`.

        Raises:
            InvalidRequest: a value is out of bounds, or the model cannot serve the request.
            Overloaded: the engine does not accept requests now.
            EngineFailed: no engine has served for longer than `stall_timeout_s`.
        """
        add, body = self._check(prompt_token_ids, params, options)
        stream = RequestStream(add.request_id, self.cancel)
        self.requests.accept(add, body, stream)
        return stream

    async def embed(
        self,
        prompt_token_ids: list[int],
        pooling: Pooling = Pooling(),  # noqa: B008 - immutable
        **options: Unpack[RequestOptions],
    ) -> "array[float]":
        """Return a prompt's embedding, an array of type "f"; survives restarts like `submit`.

        Cancelling the calling task aborts the request. Raises the errors of `submit`, and
        RequestFailed if the request fails.
        """
        return await vector_of(self.submit(prompt_token_ids, pooling_params(pooling), **options))

    def submit_to(
        self,
        receiver: Receiver,
        prompt_token_ids: PromptIds,
        params: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> AddRequest:
        """Accept a request like `submit`, but deliver its outputs to the caller's own receiver.

        Returns the accepted request in the form that `adopt` needs, including the address of its KV
        blocks.
        """
        add, body = self._check(prompt_token_ids, params, options)
        self.requests.accept(add, body, receiver)
        return msgspec.structs.replace(add, blocks_at=self.engine.blocks_at)

    def cancel(self, request_id: int) -> None:
        """Abort a request if it is open."""
        self.requests.cancel(request_id)

    def adopt(self, add: AddRequest, receiver: Receiver) -> int:
        """Continue a request that an earlier incarnation of this client accepted.

        `add` is the accepted request with its known outputs; its number is replaced. Returns the
        new number, for `cancel`. Raises Overloaded if too much is open.
        """
        request_id = self.requests.ledger.next_request_id()
        add = msgspec.structs.replace(add, request_id=request_id, resent=True)
        # Wall-clock time, because monotonic clocks cannot be compared across reboots.
        self.requests.adopt(add, receiver, age_s=max(0.0, self._clock.time() - add.arrival_time))
        return request_id

    def move(
        self,
        request_id: int,
        other: "AsyncEngineClient",
        *,
        is_exact: bool = True,
        blocks_at: str = "",
    ) -> bool:
        """Move a request to another replica; False if it has ended or was moved too often.

        Without `is_exact`, it moves even if the other replica cannot continue it exactly.
        `blocks_at` is the address at which the other replica reads the blocks of this one's
        machine.
        """
        if not self.requests.move(
            request_id, other.requests, is_exact=is_exact, blocks_at=blocks_at
        ):
            return False
        if other.engine.blocks_at:
            other.requests.note_place(request_id, other.engine.blocks_at)
        return True

    def _check(
        self, prompt_token_ids: PromptIds, params: SamplingParams, options: RequestOptions
    ) -> tuple[AddRequest, bytes]:
        self._require_open()
        facts = self.engine.require_facts(is_resent=options.get("resent", False))
        request_id, now = self.requests.ledger.next_request_id(), self._clock.time()
        add = AddRequest(
            request_id,
            [],
            params,
            arrival_time=now,
            fingerprint=self.engine.fingerprint,
            **options,
        )
        add, body = check_request(add, facts, prompt_token_ids)
        params = self._shared_params.shared(add.sampling_params)
        return msgspec.structs.replace(add, sampling_params=params), body

    # Controls -----------------------------------------------------------------------------------

    @property
    def pauses(self) -> bool:
        """True if this client has requested a pause that is still pending or in force."""
        return self._controls.pauses

    def begin_paused(self, action: ControlAction, mode: PauseMode) -> None:
        """Pause the core before any other request reaches it; to be called before `connect`."""
        self._controls.begin_paused(action, mode)

    async def pause(
        self, mode: PauseMode = PauseMode.PAUSED_ALL, *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> bool:
        """Pause scheduling; requests are still accepted, and a restarted core is paused again.

        Returns whether the engine is paused: False while it drains. After a TimeoutError it may or
        may not be paused. Raises RequestFailed if the client is not open, and ValueError if `mode`
        is not a pause.
        """
        if mode not in (PauseMode.PAUSED_NEW, PauseMode.PAUSED_ALL):
            raise ValueError(f"mode {mode!r} must be PauseMode.PAUSED_NEW or PauseMode.PAUSED_ALL")
        return (await self._ask(timeout_s, ControlAction.PAUSE, PauseMode(mode))).ok

    async def resume(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> bool:
        """End any pause or sleep, including those of other clients; same errors as `pause`."""
        return (await self._ask(timeout_s, ControlAction.RESUME)).ok

    async def sleep(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> bool:
        """Pause everything and have the workers release the memory of the KV cache.

        The memory is free soon afterwards. Returns False while the engine drains, or if it was
        resumed first. Requests keep their tokens, and their KV is computed again. Same errors as
        `pause`.
        """
        return (await self._ask(timeout_s, ControlAction.SLEEP)).ok

    wake_up = resume

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> bool:
        """Drop all cached prefixes, as after a change of the weights; same errors as `pause`.

        Returns False if a block is in use. With `reset_running_requests`, running requests are
        preempted first, and their KV is computed again.
        """
        reset = bool(reset_running_requests)  # must be encodable if it is sent again
        return (await self._ask(timeout_s, ControlAction.RESET_PREFIX_CACHE, reset=reset)).ok

    async def load_adapter(self, adapter: Adapter, *, timeout_s: float = ADAPTER_TIMEOUT_S) -> str:
        """Have the workers load an adapter, or only check it if they have no room for it.

        Returns an error message, or "" if requests can use the adapter. An adapter that was refused
        because workers died while loading it is tried again; RequestQuarantined: workers died
        again. RequestFailed: it was not tried, because the engine is starting or too many adapters
        are loading. Otherwise the same errors as `pause`.
        """
        done = await self._ask(timeout_s, ControlAction.LOAD_ADAPTER, adapter=adapter)
        if done.error and done.code is not ErrorCode.INVALID:
            raise failure_of(RequestError(done.code, done.error))
        if not done.ok and not done.error:
            raise failure_of(RequestError(ErrorCode.STARTING, "the engine is starting"))
        return done.error

    async def unload_adapter(
        self, adapter: Adapter, *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> bool:
        """Have the workers drop an adapter once no request uses it; same errors as `pause`."""
        return (await self._ask(timeout_s, ControlAction.UNLOAD_ADAPTER, adapter=adapter)).ok

    async def _ask(
        self,
        timeout_s: float,
        action: ControlAction,
        mode: PauseMode = PauseMode.PAUSED_ALL,
        *,
        reset: bool = False,
        adapter: Adapter | None = None,
    ) -> ControlDone:
        self._require_open()
        control = self._controls.ask(action, mode, reset_running_requests=reset, adapter=adapter)
        answer: asyncio.Future[ControlDone] = self._loop.create_future()
        self._answers[control.number] = answer
        try:
            self._send(control)
            async with deadline(timeout_s, "the engine has not answered"):
                return await answer
        finally:
            del self._answers[control.number]
            self._controls.give_up(control.number)

    # KV events ----------------------------------------------------------------------------------

    def kv_events(self, next_seq: int | None = None) -> KVEventFeed:
        """Follow the prefix cache's contents: iterate over (number, event); one feed at a time.

        The feed begins at event `next_seq`, or with AllBlocksCleared and a snapshot, whose events
        have no numbers. If events are missed, for example because the core is new, another snapshot
        follows. The feed fails with ConnectionError if no engine has served for `stall_timeout_s`.

        Raises ValueError if `next_seq` is not an event number, RequestFailed if the client is not
        open, and RuntimeError if there is a feed already.
        """
        self._require_open()
        try:
            decode_from_client(encode(SubscribeKVEvents(0, next_seq)))
        except (TypeError, OverflowError, ProtocolError) as problem:
            raise ValueError(f"next_seq {next_seq!r} must be None, or 0 to 2**63 - 1") from problem
        if self._feed is not None:
            raise RuntimeError("there is a feed of KV events already: cancel it first")

        def end() -> None:
            self._feed = None

        self._feed = KVEventFeed(next_seq, self._subscriptions, self._send, end)
        return self._feed

    # Events -------------------------------------------------------------------------------------

    def _on_status(self, status: Status, is_new_epoch: bool) -> None:
        engine, requests = self.engine, self.requests
        engine.take(status, self._clock.monotonic(), len(requests))
        requests.ledger.allow_repairs()
        holds_all = bool(engine.other_model)
        if is_new_epoch:  # the core does not know this client's requests
            for control in self._controls.begin(self._link.epoch, status):
                self._send(control)
            self._link.send_backlog(requests.resend(engine.fingerprint, holds_all=holds_all))
            if self._feed is not None:
                self._feed.subscribe()
        elif status.facts is not None:  # otherwise a successor is starting
            self._controls.follow(status)
            requests.follow(engine.fingerprint, holds_all=holds_all)
        self._status_event.set()

    def _on_message(self, message: News) -> None:
        if isinstance(message, StepOutputs):
            for output in message.outputs:
                self.requests.take(output)
        elif isinstance(message, UnreadableOutputs):
            self.requests.repair(message.request_ids)
        elif isinstance(message, Refused):
            if message.request_id is None:  # not about a request: the core would have named it
                self._link.request_resync()
            else:
                self.requests.refuse(message.request_id, message.error)
        elif isinstance(message, ControlDone):
            self._controls.take(message)
            answer = self._answers.get(message.number)
            if answer is not None and not answer.done():
                answer.set_result(message)
        elif isinstance(message, KVEventBatch):
            if self._feed is None:  # cancelled in the meantime
                self._send(KVEventsTaken())
            else:
                self._feed.take(message)
        elif self._feed is not None:
            self._feed.refuse(message)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)
        engine = self.engine
        engine.tick(TICK_S)
        if engine.is_stalled:
            self.requests.fail_all(engine.stall_error)
            if self._feed is not None:
                self._feed.fail(ConnectionError(engine.stall_error.message))
        self.requests.fail_held(TICK_S, self._options.stall_timeout_s, engine.holding_error)
        if self._options.allow_inexact_resume and self.serves:
            for request_id in self.requests.held_ids():
                self.requests.release(request_id)
        self._link.tick()
