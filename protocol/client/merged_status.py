"""Merges the statuses of several replicas into that of one engine."""

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from protocol.api_core import EngineState, EngineStats, Status

_BEST_FIRST = (
    *(EngineState.READY, EngineState.RECOVERING, EngineState.DRAINING),
    EngineState.STARTING,
)


def merged_status(statuses: Sequence[Status]) -> Status | None:
    """Return the combined status of all replicas; None if there is none."""
    if len(statuses) < 2:
        return statuses[0] if statuses else None
    best = min(statuses, key=lambda status: _BEST_FIRST.index(status.state))
    stats = [status.stats for status in statuses]
    return msgspec.structs.replace(best, stats=_sum(stats))


_SHARES = ("kv_cache_usage", "state_cache_usage")
"""Fractions of a replica's memory, which are averaged over the replicas."""
_NAMES = ("running_lora_adapters", "waiting_lora_adapters")
"""Lists of names, each of which is in the result once."""


def _sum(stats: Sequence[EngineStats]) -> EngineStats:
    total: dict[str, Any] = {}
    for name in EngineStats.__struct_fields__:
        values = [getattr(one, name) for one in stats]
        if name in _SHARES:
            known = [value for value in values if value is not None]
            total[name] = sum(known) / len(known) if known else None
        elif name in _NAMES:
            total[name] = list(dict.fromkeys(itertools.chain.from_iterable(values)))
        elif isinstance(values[0], list):
            total[name] = [sum(row) for row in itertools.zip_longest(*values, fillvalue=0)]
        else:
            total[name] = sum(values)
    return EngineStats(**total)
