"""A Ray cluster in this process: actors whose methods answer at once, late, or with an error.

It has what `scripts.placement` uses. `install` puts it in the place of Ray's package, which need
not be installed.
"""

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest

_PACKAGES = ("ray", "ray.exceptions", "ray.util", "ray.util.scheduling_strategies")
_USERS = ("scripts.placement.machine", "scripts.placement.cluster")


class RayError(Exception):
    """As `ray.exceptions.RayError`."""


class RayTaskError(RayError):
    """A method has raised an error."""


class RayActorError(RayError):
    """An actor is gone."""


class GetTimeoutError(RayError, TimeoutError):
    """A result is late."""


class Call:
    """One call of an actor's method."""

    def __init__(self, result: bool | Exception | None) -> None:
        self.result = result


class Actor:
    """An engine: what its methods answer, which the test sets; None: nothing yet."""

    def __init__(self, answer: Callable[[str], bool | Exception | None]) -> None:
        self.answer = answer
        self.calls: list[str] = []

    def __getattr__(self, verb: str) -> Any:
        def remote() -> Call:
            self.calls.append(verb)
            return Call(self.answer(verb))

        method = ModuleType(verb)
        method.remote = remote  # type: ignore[attr-defined]
        return method


class FakeRay:
    """The cluster: its named actors and its placement groups."""

    def __init__(self) -> None:
        self.actors: dict[str, Actor] = {}
        self.groups: dict[str, int] = {}
        """By name, the number of bundles."""
        self.on_list: Callable[[], None] = lambda: None
        """Called when the names of actors are asked for."""

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Have `scripts.placement` imported anew, with this in the place of Ray."""
        modules = {name: ModuleType(name) for name in _PACKAGES}
        main, exceptions, util, strategies = modules.values()
        vars(main).update(
            is_initialized=lambda: True,
            get_actor=self._get_actor,
            get=_get,
            wait=_wait,
            kill=self._kill,
            get_runtime_context=lambda: self,
            remote=lambda _: self,
        )
        vars(exceptions).update(
            RayError=RayError, RayActorError=RayActorError, GetTimeoutError=GetTimeoutError
        )
        vars(util).update(
            get_placement_group=self._get_group,
            list_named_actors=self._list,
            placement_group=self._make_group,
            placement_group_table=self._table,
            remove_placement_group=self.groups.pop,
        )
        vars(strategies).update(PlacementGroupSchedulingStrategy=lambda *_, **__: None)
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        for name in _USERS:  # what was imported before comes back afterwards
            patch.setitem(sys.modules, name, ModuleType(name))
            del sys.modules[name]

    @staticmethod
    def get_node_id() -> str:
        return "node"

    def options(self, *, name: str, **_: object) -> "_Maker":
        return _Maker(self, name)

    def _get_actor(self, name: str) -> Actor:
        if name not in self.actors:
            raise ValueError(name)
        return self.actors[name]

    def _list(self) -> list[str]:
        names = list(self.actors)
        self.on_list()
        return names

    def _kill(self, actor: Actor, *, no_restart: bool) -> None:
        assert no_restart
        self.actors = {name: one for name, one in self.actors.items() if one is not actor}

    def _make_group(self, bundles: list[object], *, name: str, **_: object) -> str:
        self.groups[name] = len(bundles)
        return name

    def _get_group(self, name: str) -> str:
        if name not in self.groups:
            raise ValueError(name)
        return name

    def _table(self) -> dict[str, dict[str, str]]:
        return {name: {"name": name, "state": "CREATED"} for name in self.groups}


class _Maker:
    def __init__(self, cluster: FakeRay, name: str) -> None:
        self._cluster, self._name = cluster, name

    def remote(self, *_: object) -> Actor:
        made = Actor(lambda _: True)
        return self._cluster.actors.setdefault(self._name, made)


def _get(call: Call, timeout: float) -> bool:
    if call.result is None:
        raise GetTimeoutError
    if isinstance(call.result, Exception):
        raise call.result
    return call.result


def _wait(calls: Iterable[Call], **_: object) -> tuple[list[Call], list[Call]]:
    calls = list(calls)
    late = [call for call in calls if call.result is None]
    return [call for call in calls if call.result is not None], late
