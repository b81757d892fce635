"""Keeps the prefix index like the caches of the replicas, from the KV events of their cores.

With events the index also has the prompts of other clients, and loses what was evicted.
"""

import asyncio
import logging

from protocol.client.errors import RequestFailed
from protocol.client.prefix_index import PrefixIndex, name_of
from protocol.client.replica import Replica
from protocol.core_worker import KVGroup
from protocol.kv_events import AllBlocksCleared, BlocksStored, KVEvent

_PAUSE_S = 1.0
_EVENTS_AT_ONCE = 64

log = logging.getLogger("troika.client")


async def follow(replica: Replica, index: PrefixIndex) -> None:
    """Apply the events of a replica until it is cancelled, or there are none."""
    while True:
        try:
            num_applied = 0
            async for _, event in replica.client.kv_events():
                _apply(event, replica, index)
                num_applied += 1
                if num_applied % _EVENTS_AT_ONCE == 0:  # arrived ones are read without a pause
                    await asyncio.sleep(0)
        except ValueError as refusal:
            log.warning("replica %d: its cache is not followed: %s", replica.number, refusal)
            return
        except ConnectionError:  # no engine has served for long
            index.forget(replica.number)
        except RequestFailed:  # the client is closed
            return
        await asyncio.sleep(_PAUSE_S)


def _apply(event: KVEvent, replica: Replica, index: PrefixIndex) -> None:
    if isinstance(event, AllBlocksCleared):
        index.forget(replica.number)
        return
    facts = replica.client.facts
    if facts is None or event.group != _leading_group(facts.kv_groups):
        return
    names = [name_of(block_hash) for block_hash in event.block_hashes]
    if isinstance(event, BlocksStored):
        index.add(replica.number, names, facts.num_gpu_blocks)
    else:
        index.remove(replica.number, names)


def _leading_group(groups: list[KVGroup]) -> int:
    """Return the group whose blocks give the length of a cached prefix: one without a window."""
    whole = (number for number, group in enumerate(groups) if group.window is None)
    return next((number for number in whole if not groups[number].is_state), 0)
