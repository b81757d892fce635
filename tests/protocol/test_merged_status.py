"""One status for several replicas: numbers are added, shares averaged, names united."""

from typing import Any

import msgspec
from msgspec import inspect

from protocol.api_core import EngineState, EngineStats, Status
from protocol.client.merged_status import merged_status

_VALUES: dict[type[inspect.Type], object] = {
    inspect.IntType: 1,
    inspect.FloatType: 0.5,
    inspect.StrType: "a",
}


def status(state: EngineState = EngineState.READY, **stats: Any) -> Status:
    return Status(state, None, EngineStats(**stats))


def merged(*statuses: Status) -> Status:
    found = merged_status(statuses)
    assert found is not None
    return found


def test_adapters_of_any_replica_are_named_once() -> None:
    first = status(running_lora_adapters=["a", "b"], waiting_lora_adapters=["c"])
    second = status(running_lora_adapters=["b", "d"])
    stats = merged(first, second).stats
    assert stats.running_lora_adapters == ["a", "b", "d"]
    assert stats.waiting_lora_adapters == ["c"]


def test_counts_are_added_and_shares_are_averaged() -> None:
    first = status(num_steps=3, loop_seconds_buckets=[1, 2], kv_cache_usage=0.25)
    second = status(num_steps=4, loop_seconds_buckets=[1, 1, 5], state_cache_usage=0.5)
    stats = merged(first, second).stats
    assert (stats.num_steps, stats.loop_seconds_buckets) == (7, [2, 3, 5])
    assert (stats.kv_cache_usage, stats.state_cache_usage) == (0.125, 0.5)


def example(kind: inspect.Type) -> object:
    if isinstance(kind, inspect.UnionType):
        return example(kind.types[0])
    return [example(kind.item_type)] if isinstance(kind, inspect.ListType) else _VALUES[type(kind)]


def test_every_field_of_the_statistics_can_be_merged() -> None:
    """The merged statistics are a message again, whatever the fields have."""
    info = inspect.type_info(EngineStats)
    assert isinstance(info, inspect.StructType)
    full = {field.name: example(field.type) for field in info.fields}
    stats = merged(status(**full), status(**full)).stats
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=EngineStats) == stats


def test_the_best_state_is_that_of_the_whole() -> None:
    states = EngineState.STARTING, EngineState.READY, EngineState.RECOVERING
    assert merged(*map(status, states)).state is EngineState.READY
    assert merged_status([]) is None
