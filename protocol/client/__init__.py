"""Clients of the core: submit requests, stream tokens, and outlive the core and its workers."""

from protocol.client.async_client import AsyncEngineClient
from protocol.client.options import ClientOptions, ReplicatedOptions
from protocol.client.replicated_client import ReplicatedClient
from protocol.client.sync_client import EngineClient, SyncStream

__all__ = [
    "AsyncEngineClient",
    "ClientOptions",
    "EngineClient",
    "ReplicatedClient",
    "ReplicatedOptions",
    "SyncStream",
]
