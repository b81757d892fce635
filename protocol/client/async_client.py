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
import logging
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
    EngineState,
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
from protocol.client.kv_feed import KVEventFeed
from protocol.client.ledger import Ledger, RequestOptions, check_request
from protocol.client.open_requests import OpenRequests, Receiver
from protocol.client.options import ClientOptions, SharedByReplicas
from protocol.client.packed_prompt import PromptIds
from protocol.client.request_stream import RequestStream, vector_of
from protocol.core_worker import ModelFacts
from protocol.kv_events import KVEventBatch, SubscribeKVEvents
from protocol.message import MAX_TEXT, Message, ProtocolError, encode
from protocol.process.machines import blocks_address_seen_at
from protocol.sampling import Pooling, SamplingParams, pooling_params
from protocol.transport.curve import ClientKeys
from protocol.transport.runtime import Clock

CONTROL_TIMEOUT_S = 30.0
ADAPTER_TIMEOUT_S = 120.0
"""Longest wait for an adapter to load; other adapters may be loaded first."""
_NO_EQUAL_ENGINE = RequestError(
    ErrorCode.ENGINE_FAILED,
    "the engine that began the request is gone, and none with its fingerprint has served in time",
)
_SERVING = (EngineState.READY, EngineState.DRAINING)
_NONE_THERE = "the engine is starting, or all replicas have left"
_LAST_DRAINS = "the last replica that served is shutting down, and no other one has joined"
_DEFAULTS = ClientOptions()

log = logging.getLogger("troika.client")


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
        """Set the core's address (see `channel.client_address`); nothing connects yet.

        Args:
            fields: fields of the options by name, such as `stall_timeout_s=30`.
            keys: for a tcp address: see `protocol.transport.curve.read_client_keys`.
            shared: state that the clients of several replicas share; otherwise it is this client's.
            make_link: takes the arguments of `CoreLink`.
        """
        options = replace(options, **fields)
        self._address = address
        self._options = options
        self._stall_text = f"no engine has served for {options.stall_timeout_s:g} s"
        self._can_move = can_move = shared is not None and shared.can_move
        self._starting_text = _NONE_THERE if can_move else "the engine is starting"
        self._draining_text = _LAST_DRAINS if can_move else "the engine is shutting down"
        self._stalled_s = 0.0
        self._expected = None if shared is None else shared.expected
        self.other_model = ""
        """How the engine's model differs from the expected one; empty: it does not, or is not
        known yet."""
        self._clock = clock
        self._controls = Controls()
        self._answers: dict[int, asyncio.Future[ControlDone]] = {}
        self._feed: KVEventFeed | None = None
        self._subscriptions = itertools.count()
        queue_length = 2 * options.max_open_requests
        self._link = make_link(
            address, queue_length, self._on_status, self._on_message, clock=clock, keys=keys
        )
        ledger = Ledger(
            options.max_open_requests,
            options.max_open_tokens,
            clock.monotonic,
            None if shared is None else shared.numbers,
            None if shared is None else shared.limits,
        )
        self.requests = OpenRequests(ledger, self._link.send, is_replica=can_move)
        """The requests that were accepted and have not ended."""
        self._status_event = asyncio.Event()
        self.facts: ModelFacts | None = None
        """The model's facts; kept while the engine recovers."""
        self.status: Status | None = None
        self.last_status_time = 0.0
        """Time at which `status` arrived, on the monotonic clock."""
        self.num_other_requests = 0
        """Requests of other clients at the core when `status` arrived."""
        self.last_progress_time = clock.monotonic()
        """Time of the last status that showed further steps, or that there were none to compute."""

    @property
    def connected(self) -> bool:
        """True while messages reach the core, which may nevertheless be recovering."""
        return self._link.is_agreed

    @property
    def blocks_at(self) -> str:
        """Address at which other machines read the KV blocks on the core's machine, or "".

        It is taken from the last status, so the core may no longer exist.
        """
        status = self.status
        return "" if status is None else blocks_address_seen_at(status.blocks_at, self._address)

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
        status = self.status
        is_ready = status is not None and status.state is EngineState.READY
        return self.connected and is_ready and not self.other_model

    @property
    def is_stalled_for_good(self) -> bool:
        """True if requests have already failed because the engine has not served for too long."""
        return self._stalled_s > 2 * self._options.stall_timeout_s

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the engine's facts; empty until they are known."""
        return self.requests.fingerprint

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

    async def start(self) -> None:
        """Begin to connect, without waiting for the connection."""
        self.connect()

    def connect(self) -> None:
        """Begin to connect; to be called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._link.open()
        self._timer = self._loop.call_later(TICK_S, self._tick)

    @property
    def pauses(self) -> bool:
        """True if this client has requested a pause that is still pending or in force."""
        return self._controls.pauses

    def begin_paused(self, action: ControlAction, mode: PauseMode) -> None:
        """Pause the core before any other request reaches it; to be called before `connect`."""
        self._controls.begin_paused(action, mode)

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
                if self.serves and self.facts is not None:
                    return self.facts
                self._require_open()
                self._status_event.clear()
                await self._status_event.wait()

    def why_not_ready(self) -> str:
        """Return why the engine does not serve, as far as this is known."""
        if self.link_problem:
            return self.link_problem
        if self.status is None:
            return f"nothing answers at {self._address}"
        if self.status.state is EngineState.READY and not self.connected:
            return f"nothing answers any more at {self._address}"
        if self.other_model:
            return f"its {self.other_model}"
        return f"its last state is {self.status.state}"

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
        return msgspec.structs.replace(add, blocks_at=self.blocks_at)

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
        if other.blocks_at:
            other.requests.note_place(request_id, other.blocks_at)
        return True

    def _check(
        self, prompt_token_ids: PromptIds, params: SamplingParams, options: RequestOptions
    ) -> tuple[AddRequest, bytes]:
        self._require_open()
        if self.status is None or self.facts is None:
            raise failure_of(RequestError(ErrorCode.STARTING, self._starting_text))
        if self.other_model:
            raise failure_of(self._holding_error())
        if self._stalled_s > self._options.stall_timeout_s:
            raise failure_of(RequestError(ErrorCode.ENGINE_FAILED, self._stall_text))
        if self.status.state is EngineState.DRAINING and not options.get("resent"):
            raise failure_of(RequestError(ErrorCode.DRAINING, self._draining_text))
        request_id, now = self.requests.ledger.next_request_id(), self._clock.time()
        add = AddRequest(
            request_id,
            [],
            params,
            arrival_time=now,
            fingerprint=self.requests.fingerprint,
            **options,
        )
        return check_request(add, self.facts, prompt_token_ids)

    def cancel(self, request_id: int) -> None:
        """Abort a request if it is open."""
        self.requests.cancel(request_id)

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
            self._link.send(encode(control))
            async with deadline(timeout_s, "the engine has not answered"):
                return await answer
        finally:
            del self._answers[control.number]
            self._controls.give_up(control.number)

    def _require_open(self) -> None:
        if not self._link.is_open:
            message = "the client is not open, or closed again"
            raise failure_of(RequestError(ErrorCode.ABORTED, message))

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

        def send(message: Message) -> None:
            self._link.send(encode(message))

        self._feed = KVEventFeed(next_seq, self._subscriptions, send, end)
        return self._feed

    def _on_status(self, status: Status, is_new_epoch: bool) -> None:
        self.last_status_time = self._clock.monotonic()
        if _shows_progress(status, self.status, self.num_open_requests):
            self.last_progress_time = self.last_status_time
        self.status = status
        num_requests = status.stats.num_running_reqs + status.stats.num_waiting_reqs
        self.num_other_requests = max(0, num_requests - len(self.requests))
        fingerprint = self.requests.fingerprint
        if status.facts is not None and status.facts != self.facts:
            self.facts = status.facts
            fingerprint = status.facts.fingerprint
        if status.state in _SERVING:
            self._stalled_s = 0.0
        self.requests.ledger.allow_repairs()
        is_other_now = self._compare_model(status)
        if is_new_epoch:  # the core does not know this client's requests
            for control in self._controls.begin(self._link.epoch, status):
                self._link.send(encode(control))
            self._link.send_backlog(self.requests.resend(fingerprint))
            if self._feed is not None:
                self._feed.subscribe()
        elif status.facts is not None:  # otherwise a successor is starting
            self._controls.follow(status)
            self.requests.follow(fingerprint, anew=is_other_now)
        self._status_event.set()

    def _holding_error(self) -> RequestError:
        """Return the error that states why requests are held."""
        if not self.other_model:
            return _NO_EQUAL_ENGINE
        return RequestError(ErrorCode.ENGINE_FAILED, self.other_model[:MAX_TEXT])

    def _compare_model(self, status: Status) -> bool:
        """Compare the engine's model with the expected one; return whether the result is new."""
        if self._expected is None or status.facts is None:
            return False
        before = self.other_model
        self.other_model = self._expected.difference(status.facts, self._address)
        if status.state is EngineState.READY and not self.other_model:
            self._expected.learn(status.facts)
        self.requests.holds_all = bool(self.other_model)
        is_new = before != self.other_model
        if is_new and self.other_model and not self._can_move:  # else all replicas are reported
            log.error("%s gets no requests: its %s", self._address, self.other_model)
        return is_new

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
                self._link.send(encode(KVEventsTaken()))
            else:
                self._feed.take(message)
        elif self._feed is not None:
            self._feed.refuse(message)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self._stalled_s += TICK_S  # counts ticks rather than reading the clock, as the link does
        if self._stalled_s > self._options.stall_timeout_s:
            self.requests.fail_all(RequestError(ErrorCode.ENGINE_FAILED, self._stall_text))
            if self._feed is not None:
                self._feed.fail(ConnectionError(self._stall_text))
        self.requests.fail_held(TICK_S, self._options.stall_timeout_s, self._holding_error())
        if self._options.allow_inexact_resume and self.serves:
            for request_id in self.requests.held_ids():
                self.requests.release(request_id)
        self._link.tick()


def _shows_progress(status: Status, before: Status | None, num_open: int) -> bool:
    """Return whether the core has sent steps since the last status, or has none to send."""
    stats = status.stats
    is_idle = num_open + stats.num_running_reqs + stats.num_waiting_reqs == 0
    is_paused = status.pause_mode is not PauseMode.RUNNING
    is_further = before is None or before.stats.num_steps != stats.num_steps
    return is_idle or is_paused or is_further
