"""The client of an engine with replicas: it routes requests, and moves those of a lost replica.

    addresses = core_addresses(run_dir, num_replicas)
    async with ReplicatedClient(addresses) as client:
        ...

It has an `AsyncEngineClient` for each replica, whose ledger holds the requests that are there. A
request that was accepted stays at its replica while that serves, also through restarts of its core
and workers. If the core is gone for `failover_s`, or without workers for much longer, its open
requests continue at other replicas (`moving`). A core that returns has none of them, because a new
connection has no requests; one that was only without workers gets an abort.

A request that has begun continues only at a replica with the fingerprint of the engine that began
it, or, with `allow_inexact_resume`, at any replica. Otherwise it waits.

With one replica, all calls go directly to its client.
"""

import asyncio
import itertools
import logging
import random
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar, Unpack, cast

import msgspec

from protocol.adapters import Adapter
from protocol.api_core import (
    AddRequest,
    ControlAction,
    ErrorCode,
    PauseMode,
    RequestError,
    Status,
)
from protocol.client.async_client import (
    ADAPTER_TIMEOUT_S,
    CONTROL_TIMEOUT_S,
    AsyncEngineClient,
)
from protocol.client.cache_follower import CacheFollowers
from protocol.client.core_link import CoreLink
from protocol.client.deadlines import deadline
from protocol.client.errors import RequestFailed, failure_of
from protocol.client.expected_model import ExpectedModel
from protocol.client.ledger import OpenLimits, RequestOptions, RoutedOptions
from protocol.client.merged_status import merged_status
from protocol.client.moving import RequestMover
from protocol.client.open_requests import Receiver
from protocol.client.options import ClientOptions, ReplicatedOptions, SharedByReplicas
from protocol.client.packed_prompt import PackedPrompt, PromptIds, prompt_length
from protocol.client.placement import Placement
from protocol.client.prefill import Prefill
from protocol.client.replica import TICK_S, Replica
from protocol.client.replica_set import NO_CORE, ReplicaSet
from protocol.client.request_stream import RequestStream, vector_of
from protocol.config import RoutingPolicy
from protocol.message import MAX_TEXT
from protocol.model_facts import ModelFacts
from protocol.process.model_files import ModelFiles
from protocol.sampling import Pooling, SamplingParams, pooling_params
from protocol.transport.channel import check_address
from protocol.transport.curve import ClientKeys
from protocol.transport.runtime import Clock

T = TypeVar("T")

log = logging.getLogger("troika.client")

_DEFAULTS = ReplicatedOptions()


class ReplicatedClient:
    """A client inside the event loop in which `start` was awaited. Not thread-safe."""

    def __init__(
        self,
        addresses: Sequence[str],
        options: ReplicatedOptions = _DEFAULTS,
        *,
        keys: ClientKeys | None = None,
        files: ModelFiles | None = None,
        may_change: bool = False,
        clock: Clock = time,
        rng: random.Random | None = None,
        make_link: Callable[..., CoreLink] = CoreLink,
        **fields: Any,
    ) -> None:
        """Set the cores' addresses (see `run_dir.core_addresses`); nothing connects yet.

        Args:
            fields: fields of the options by name, as for `AsyncEngineClient`.
            keys: for replicas with tcp addresses: see `AsyncEngineClient`.
            files: digests of the model that engines of other machines must have. The first engine
                that serves also determines the model. Engines with another one get no requests.
            may_change: True if `set_addresses` is called later; `addresses` may then be empty.
            make_link: takes the arguments of `CoreLink`.
        """
        options = replace(options, **fields)
        self._may_change = may_change
        self._keys = keys
        self._failover_s = options.failover_s
        is_only = len(addresses) == 1 and not may_change
        shared = SharedByReplicas(
            numbers=itertools.count(1),
            limits=OpenLimits(options.max_open_requests, options.max_open_tokens),
            expected=ExpectedModel(files, learns=not is_only),
            can_move=not is_only,
        )
        self._limits, self._expected = shared.limits, shared.expected
        make_client = partial(
            AsyncEngineClient,
            options=_options_of_one(options, is_only=is_only),
            keys=keys,
            shared=shared,
            clock=clock,
            make_link=make_link,
        )
        self._set = ReplicaSet(addresses, make_client)
        self._replicas = self._set.replicas
        self._only = self._replicas[0].client if is_only else None
        self._placement, self._followers, self._mover = _make_routing(
            self._set, options, clock, rng or random.Random(), is_only=is_only
        )
        self._timer: asyncio.TimerHandle | None = None
        self._pause: tuple[ControlAction, PauseMode] | None = None
        """The last requested pause; None once its end was requested."""

    @property
    def clients(self) -> list[AsyncEngineClient]:
        """The client of each replica, by number; clients of replicas that have left are closed."""
        return [replica.client for replica in self._replicas]

    # State of all replicas ----------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """True if any core is connected."""
        return any(client.connected for client in self.clients)

    @property
    def num_open_requests(self) -> int:
        """Requests that were accepted and have not ended."""
        return self._limits.num_open

    @property
    def num_moved(self) -> int:
        """Requests that were continued by another replica."""
        return self._mover.num_moved

    @property
    def num_handed_over(self) -> int:
        """Requests that moved from a prefill replica to one that decodes."""
        return self._mover.num_handed_over

    @property
    def num_inexact(self) -> int:
        """Requests that were continued by an engine with another fingerprint."""
        return self._set.num_inexact

    @property
    def facts(self) -> ModelFacts | None:
        """Facts of the model: of a replica that serves, or otherwise of one that has served.

        None if no replica has served yet, or if all that have served have left.
        """
        present = (each for each in self._replicas if not each.is_closed)
        known = [one for one in present if one.engine.facts and not one.engine.other_model]
        first = next((one for one in known if one.client.serves), known[0] if known else None)
        return None if first is None else first.engine.facts

    @property
    def status(self) -> Status | None:
        """The combined status of all connected replicas of the model, with the best state."""
        if self._only is not None:
            return None if self._only.engine.other_model else self._only.status
        connected = (client.engine for client in self.clients if client.connected)
        statuses = (engine.status for engine in connected if not engine.other_model)
        return merged_status([status for status in statuses if status is not None])

    @property
    def last_status_time(self) -> float:
        """Time at which the last status of any replica arrived, on the monotonic clock."""
        return max(client.last_status_time for client in self.clients)

    @property
    def last_progress_time(self) -> float:
        """Time of the last progress of the busy replica that has been stuck longest."""
        busy = [c.engine.last_progress_time for c in self.clients if c.num_open_requests]
        return min(busy, default=max(c.engine.last_progress_time for c in self.clients))

    # Connecting ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to connect to all replicas, without waiting for the connections."""
        self._loop = asyncio.get_running_loop()
        for replica in self._replicas:
            self._connect(replica)
        if self._only is None:
            self._timer = self._loop.call_later(TICK_S, self._tick)

    def _connect(self, replica: Replica) -> None:
        replica.client.connect()
        self._followers.begin(replica)

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Set the addresses: new replicas join, and those no longer listed retire.

        A retired replica gets no new requests once another one serves, and its open requests are
        moved, exactly. A pause by this client also applies to new replicas. ValueError: an address
        is not valid; nothing has changed.
        """
        assert self._may_change
        for address in addresses:
            check_address(address, self._keys)
        new = self._set.keep_only(addresses)
        # Another client may have ended the pause.
        pause = self._pause if any(each.client.pauses for each in self._replicas) else None
        self._close_retired()  # their numbers are free
        for replica in self._set.join(new):
            self._placement.join(replica)
            if pause is not None:
                replica.client.begin_paused(*pause)
            if replica.address != NO_CORE:
                log.info("replica %d joins: %s", replica.number, replica.address)
            self._connect(replica)

    def _close_retired(self) -> None:
        for replica in self._set.close_retired():
            self._followers.end(replica)
            self._placement.leave(replica)
            if replica.address != NO_CORE:
                log.info("replica %d has left: %s", replica.number, replica.address)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Disconnect; open streams fail, and the cores abort them. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self._followers.close()
        for client in self.clients:
            await client.close()

    async def wait_ready(self, timeout_s: float) -> ModelFacts:
        """Wait until one of the replicas serves; same errors as `AsyncEngineClient.wait_ready`."""
        if self._only is not None:
            return await self._only.wait_ready(timeout_s)
        async with deadline(timeout_s, "no replica has been ready", self._set.why_not_ready):
            while True:
                if not any(client.is_open for client in self.clients):
                    raise failure_of(RequestError(ErrorCode.ABORTED, "the client is not open"))
                serving = (each.client for each in self._replicas if each.serves)
                facts = next((client.facts for client in serving if client.facts), None)
                if facts is not None:
                    return facts
                await asyncio.sleep(TICK_S)

    # Requests -----------------------------------------------------------------------------------

    def submit(
        self, prompt_token_ids: PromptIds, params: SamplingParams, **options: Unpack[RoutedOptions]
    ) -> RequestStream:
        """Accept a request at one of the replicas; see `AsyncEngineClient.submit`."""
        stream = RequestStream(0, self.cancel)
        add = self.submit_to(stream, prompt_token_ids, params, **options)
        stream.request_id = add.request_id
        return stream

    def submit_to(
        self,
        receiver: Receiver,
        prompt_token_ids: PromptIds,
        params: SamplingParams,
        **options: Unpack[RoutedOptions],
    ) -> AddRequest:
        """Accept a request like `submit`, but deliver its outputs to the caller's own receiver.

        Returns the accepted request.
        """
        affinity = options.pop("affinity", "")
        accepted = cast(RequestOptions, options)
        if self._only is not None:
            return self._only.submit_to(receiver, prompt_token_ids, params, **accepted)
        salt, adapter = options.get("cache_salt", ""), options.get("adapter")
        names = self._placement.names(prompt_token_ids, salt, adapter)
        reads_cache = params.prompt_logprobs is None and params.pooling is None
        num_tokens = prompt_length(prompt_token_ids) if reads_cache else 0
        replica, num_cached = self._placement.choose(
            names, affinity=affinity, num_prompt_tokens=num_tokens
        )
        add = replica.client.submit_to(receiver, prompt_token_ids, params, **accepted)
        self._placement.enter(replica, add.request_id, names, num_cached, affinity)
        return add

    async def embed(
        self,
        prompt_token_ids: list[int],
        pooling: Pooling = Pooling(),  # noqa: B008 - immutable
        **options: Unpack[RoutedOptions],
    ) -> "array[float]":
        """Return the vector of a prompt; see `AsyncEngineClient.embed`."""
        return await vector_of(self.submit(prompt_token_ids, pooling_params(pooling), **options))

    def adopt(self, add: AddRequest, receiver: Receiver) -> int:
        """Continue a request that an earlier incarnation of this client accepted.

        It goes to a replica that continues it exactly; until one serves, it waits.
        """
        if self._only is not None:
            return self._only.adopt(add, receiver)
        packed = add.packed_prompt
        prompt = PackedPrompt(packed, 0) if packed else add.prompt_token_ids
        names = self._placement.names(prompt, add.cache_salt, add.adapter)
        num_outputs = len(add.output_token_ids)
        replica, num_cached = self._placement.choose(
            names,
            fingerprint=add.fingerprint if num_outputs else "",
            num_tokens=add.num_prompt_tokens + num_outputs,
        )
        number = replica.client.adopt(add, receiver)
        self._placement.enter(replica, number, names, num_cached)
        return number

    def cancel(self, request_id: int) -> None:
        """Abort a request if it is open."""
        for client in self.clients:
            client.cancel(request_id)

    # Failover -----------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self._close_retired()
        self._expected.keep_if_present(
            each.engine.facts
            for each in self._replicas
            if not each.is_closed and not each.engine.is_stalled_for_good
        )
        for replica in self._replicas:
            replica.tick()
            has_lost = replica.has_lost_cache(self._failover_s)
            if has_lost and not self._followers.follows(replica):
                self._placement.index.forget(replica.number)
        for line in self._set.differences():
            log.warning("%s", line)
        for severity, line in (*self._set.silences(), *self._set.other_models()):
            log.log(severity, "%s", line)
        self._mover.tick()

    # Controls -----------------------------------------------------------------------------------

    async def pause(
        self, mode: PauseMode = PauseMode.PAUSED_ALL, *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> bool:
        """Pause all replicas; for this and the other controls see `AsyncEngineClient`."""
        self._pause = ControlAction.PAUSE, mode
        return await self._all(lambda c: c.pause(mode, timeout_s=timeout_s))

    async def resume(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> bool:
        self._pause = None
        return await self._all(lambda c: c.resume(timeout_s=timeout_s))

    async def sleep(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> bool:
        self._pause = ControlAction.SLEEP, PauseMode.PAUSED_ALL
        return await self._all(lambda c: c.sleep(timeout_s=timeout_s))

    wake_up = resume

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> bool:
        """Drop the cached prefixes of all replicas."""

        async def reset(client: AsyncEngineClient) -> bool:
            is_done = await client.reset_prefix_cache(reset_running_requests, timeout_s=timeout_s)
            if is_done:
                self._placement.index.forget(self.clients.index(client))
            return is_done

        return await self._all(reset)

    async def load_adapter(self, adapter: Adapter, *, timeout_s: float = ADAPTER_TIMEOUT_S) -> str:
        """Have the workers of all replicas load an adapter; return an error message, or ""."""
        errors = await self._of_all(
            lambda c: c.load_adapter(adapter, timeout_s=timeout_s), needs_model=True
        )
        if self._only is not None:
            return errors[0]
        if not errors:
            raise failure_of(RequestError(ErrorCode.STARTING, "no replica has the model"))
        named = (f"replica {number}: {error}" for number, error in errors.items() if error)
        return next(named, "")

    async def unload_adapter(
        self, adapter: Adapter, *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> bool:
        return await self._all(lambda c: c.unload_adapter(adapter, timeout_s=timeout_s))

    async def _all(self, control: Callable[[AsyncEngineClient], Awaitable[bool]]) -> bool:
        return all((await self._of_all(control)).values())

    async def _of_all(
        self, control: Callable[[AsyncEngineClient], Awaitable[T]], *, needs_model: bool = False
    ) -> dict[int, T]:
        """Send a control to all replicas; return the answers by replica.

        The first error is raised once all have answered or left. With `needs_model`, replicas with
        another model are left out; a pause or its end must reach them, as they may serve later.
        """
        if self._only is not None:
            return {0: await control(self._only)}
        replicas = [
            each
            for each in self._replicas
            if not each.is_closed and not (needs_model and each.engine.other_model)
        ]
        works = (control(each.client) for each in replicas)
        results = await asyncio.gather(*works, return_exceptions=True)
        answers = {}
        for replica, result in zip(replicas, results, strict=True):
            if not isinstance(result, BaseException):
                answers[replica.number] = result
            elif not replica.is_closed:
                raise _of_replica(replica.number, result) from result
        return answers


def _of_replica(number: int, error: BaseException) -> BaseException:
    """Return an error of the same kind whose text names the replica."""
    if isinstance(error, RequestFailed):
        text = f"replica {number}: {error.error.message}"[:MAX_TEXT]
        return failure_of(msgspec.structs.replace(error.error, message=text))
    if isinstance(error, TimeoutError):
        return TimeoutError(f"replica {number} has not answered")
    return error


def _make_routing(
    replicas: ReplicaSet,
    options: ReplicatedOptions,
    clock: Clock,
    rng: random.Random,
    *,
    is_only: bool,
) -> tuple[Placement, CacheFollowers, RequestMover]:
    """Return the objects that choose replicas, follow their caches, and move requests."""
    prefill = Prefill(options.prefill_replicas)
    is_prefix_aware = options.policy is RoutingPolicy.PREFIX_AWARE
    follows = options.follow_kv_events and is_prefix_aware and not is_only
    placement = Placement(replicas, prefill, options.policy, rng, follows_events=follows)
    followers = CacheFollowers(placement.index, is_enabled=follows)
    mover = RequestMover(
        replicas.replicas,
        placement,
        prefill,
        clock,
        failover_s=options.failover_s,
        allow_inexact=options.allow_inexact_resume,
    )
    return placement, followers, mover


def _options_of_one(options: ReplicatedOptions, *, is_only: bool) -> ClientOptions:
    """Return the options of the client of one replica; requests of several are moved above it."""
    return ClientOptions(
        max_open_requests=options.max_open_requests,
        max_open_tokens=options.max_open_tokens,
        stall_timeout_s=options.stall_timeout_s,
        allow_inexact_resume=options.allow_inexact_resume and is_only,
    )
