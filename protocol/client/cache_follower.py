"""Keeps the prefix index in step with the replicas' caches, using KV events of their cores.

With events, the index also knows the prompts of other clients and drops evicted prefixes.
"""

import asyncio
import logging

from protocol.client.errors import RequestFailed
from protocol.client.prefix_index import PrefixIndex, name_of
from protocol.client.replica import Replica
from protocol.kv_events import AllBlocksCleared, BlocksStored, KVEvent
from protocol.model_facts import KVGroup

_PAUSE_S = 1.0
_EVENTS_AT_ONCE = 64

log = logging.getLogger("troika.client")


class CacheFollowers:
    """One task for each replica whose cache is followed; no tasks unless `is_enabled`."""

    def __init__(self, index: PrefixIndex, *, is_enabled: bool) -> None:
        self._index = index
        self._is_enabled = is_enabled
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """The task of each replica, by its number."""

    def begin(self, replica: Replica) -> None:
        """Follow a replica that has joined, in the running event loop."""
        if self._is_enabled:
            work = _follow(replica, self._index)
            self._tasks[replica.number] = asyncio.get_running_loop().create_task(work)

    def end(self, replica: Replica) -> None:
        """Stop following a replica that has left."""
        if (task := self._tasks.pop(replica.number, None)) is not None:
            task.cancel()

    def follows(self, replica: Replica) -> bool:
        """Return whether events report this replica's cache, beginning with its contents."""
        return self._is_enabled and replica.client.connected

    def close(self) -> None:
        """End all tasks. Idempotent."""
        for task in self._tasks.values():
            task.cancel()


async def _follow(replica: Replica, index: PrefixIndex) -> None:
    """Apply a replica's events until cancelled, or until there are none."""
    while True:
        try:
            num_applied = 0
            async for _, event in replica.client.kv_events():
                _apply(event, replica, index)
                num_applied += 1
                if num_applied % _EVENTS_AT_ONCE == 0:  # arrived events are read without a pause
                    await asyncio.sleep(0)
        except ValueError as refusal:
            log.warning("replica %d: its cache is not followed: %s", replica.number, refusal)
            return
        except ConnectionError:  # no engine has served for too long
            index.forget(replica.number)
        except RequestFailed:  # the client is closed
            return
        await asyncio.sleep(_PAUSE_S)


def _apply(event: KVEvent, replica: Replica, index: PrefixIndex) -> None:
    if isinstance(event, AllBlocksCleared):
        index.forget(replica.number)
        return
    facts = replica.engine.facts
    if facts is None or event.group != _leading_group(facts.kv_groups):
        return
    names = [name_of(block_hash) for block_hash in event.block_hashes]
    if isinstance(event, BlocksStored):
        index.add(replica.number, names, facts.num_gpu_blocks)
    else:
        index.remove(replica.number, names)


def _leading_group(groups: list[KVGroup]) -> int:
    """Return a group without a window; its blocks determine the length of a cached prefix."""
    whole = (number for number, group in enumerate(groups) if group.window is None)
    return next((number for number in whole if not groups[number].is_state), 0)
