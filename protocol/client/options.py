"""The options of the clients, for one engine and for an engine with replicas."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from protocol.client.expected_model import ExpectedModel
from protocol.client.ledger import OpenLimits
from protocol.config import EngineConfig, RoutingPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """How much a client accepts, and how long its requests wait for an engine."""

    max_open_requests: int = 16384
    """Above this number, `submit` raises Overloaded."""
    max_open_tokens: int = 2**23
    """Above this total number of tokens in open prompts, `submit` raises Overloaded."""
    stall_timeout_s: float = 120.0
    """Open requests fail after this time without a serving engine."""
    allow_inexact_resume: bool = False
    """True: requests also continue at an engine with other facts than those of the one that began
    them. Otherwise they wait for `stall_timeout_s`, and fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedOptions(ClientOptions):
    """How requests are distributed among replicas; limits are those of all replicas together."""

    policy: RoutingPolicy = RoutingPolicy.PREFIX_AWARE
    """How to choose a replica for a request. With `allow_inexact_resume`, a replica that continues
    a request exactly is preferred."""
    failover_s: float = 0.75
    """Seconds without a core after which the requests of a replica are moved."""
    follow_kv_events: bool = False
    """True if the cores publish KV events, so that prompts of other clients and evictions are
    known."""
    prefill_replicas: int = 0
    """This number of replicas, the first ones, compute long prompts for the others."""

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        """Return the options that the settings of an engine contain, with the default limits."""
        recovery, parallel = config.recovery, config.parallel
        return cls(
            stall_timeout_s=recovery.stall_timeout_s,
            allow_inexact_resume=recovery.allow_inexact_resume,
            policy=parallel.routing_policy,
            failover_s=recovery.failover_s,
            follow_kv_events=config.cache.enable_kv_events,
            prefill_replicas=parallel.prefill_replicas,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedByReplicas:
    """State that the clients of several replicas share."""

    numbers: Iterator[int]
    """Yields unused request numbers."""
    limits: OpenLimits
    """Limits on open requests."""
    expected: ExpectedModel
    """No request goes to an engine with another model."""
    can_move: bool
    """True if there are other clients to which requests can be moved."""

    @classmethod
    def for_one(cls, options: ClientOptions) -> Self:
        """Return the state of a client that shares it with no other."""
        return cls(
            numbers=itertools.count(1),
            limits=OpenLimits(options.max_open_requests, options.max_open_tokens),
            expected=ExpectedModel(learns=False),
            can_move=False,
        )
