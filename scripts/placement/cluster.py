"""The engines in a Ray cluster: an actor and a place for each. All calls of Ray are here.

Actors are detached and have names, so that they outlive the process that has made them: its
successor finds them again. Each engine has the CPUs and GPUs of all its ranks in one bundle, since
ranks share a machine. The first engines have the bundles of one placement group with the strategy
SPREAD; each further one has a group of its own, which is released with it.
"""

import contextlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util import (
    get_placement_group,
    list_named_actors,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from scripts.placement.machine import Machine

NAMESPACE = "troika"
ANSWER_S = 2.0
"""For an actor, which may wait for a place, or for its machine."""
LEAVE_S = 60.0
"""From the request to end to the end of an actor whose agent has not ended."""
_WAITS = "waits for a machine with room, or for its machine"


class Cluster:
    """The engines of one engine's API, by number. Not thread-safe; calls may take seconds."""

    def __init__(
        self,
        address: str,
        name: str,
        arguments: Sequence[str],
        bundle: dict[str, float],
        num_first: int,
    ) -> None:
        """Nothing connects yet.

        Args:
            address: of the cluster, as `ray.init` takes it.
            name: of the actors, with their number behind it; unique in the cluster.
            arguments: of the host agents.
            bundle: resources of one engine, as CPU and GPU.
            num_first: engines that are spread over machines, and have a place as long as they last.
        """
        self._address = address
        self._name = name
        self._arguments = list(arguments)
        self._bundle = bundle
        self._num_first = num_first
        self._states: dict[int, str] = {}
        self._asked: dict[int, tuple[str, Any]] = {}
        """By number, the last call of an actor and what becomes its result."""
        self._leaving: dict[int, float] = {}
        """By number, when an engine that was asked to end is given up."""

    def _connect(self) -> None:
        if not ray.is_initialized():
            ray.init(
                address=self._address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )

    def reconcile(self, num_wanted: int) -> list[str]:
        """Start what is lacking, and end what is too much; returns what has changed, for people.

        An exception of Ray: the cluster does not answer, or refuses.
        """
        self._connect()
        surplus = [number for number in self._present() if number >= num_wanted]
        for number in range(num_wanted):
            self._leaving.pop(number, None)
        states = self._have_run(range(num_wanted)) | self._have_ended(surplus)
        notes = [
            f"engine {number} in the cluster {state}"
            for number, state in states.items()
            if state != self._states.get(number)
        ]
        self._states = states
        return notes

    def _present(self) -> list[int]:
        """Return the numbers of the engines that have actors."""
        names = (name.rpartition(" ") for name in list_named_actors())
        return sorted(int(number) for name, _, number in names if name == self._name)

    def _actor(self, number: int) -> Any:
        """Return an actor, which is made if there is none."""
        name = f"{self._name} {number}"
        with contextlib.suppress(ValueError):
            return ray.get_actor(name)
        group, index = self._place(number)
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        options: dict[str, Any] = {
            "name": name,
            "get_if_exists": True,
            "lifetime": "detached",
            "max_restarts": -1,
            "num_cpus": self._bundle.get("CPU", 0),
            "num_gpus": self._bundle.get("GPU", 0),
            "scheduling_strategy": strategy,
        }
        agent = name.replace(" ", ":")
        return ray.remote(Machine).options(**options).remote(agent, self._arguments)

    def _place(self, number: int) -> tuple[Any, int]:
        """Return the placement group of an engine, and which of its bundles it has."""
        is_first = number < self._num_first
        name = f"{self._name} {f'first {self._num_first}' if is_first else number}"
        try:
            group = get_placement_group(name)
        except ValueError:
            bundles = [self._bundle] * (self._num_first if is_first else 1)
            group = placement_group(bundles, strategy="SPREAD", name=name, lifetime="detached")
        return group, number if is_first else 0

    def _have_run(self, numbers: Iterable[int]) -> dict[int, str]:
        """Have engines run; returns their states."""
        states = {}
        actors = {number: self._actor(number) for number in numbers}
        for number, answer in self._answers(actors, "keep").items():
            if isinstance(answer, bool):
                states[number] = "is started" if answer else "has a machine"
            else:
                states[number] = "is placed anew" if answer else _WAITS
        return states

    def _have_ended(self, numbers: Iterable[int]) -> dict[int, str]:
        """Have engines end in order, and give their places back; returns their states."""
        states = {}
        actors = {number: ray.get_actor(f"{self._name} {number}") for number in numbers}
        for number, has_ended in self._answers(actors, "end").items():
            deadline = self._leaving.setdefault(number, time.monotonic() + LEAVE_S)
            states[number] = "leaves"
            if has_ended is True or time.monotonic() >= deadline:
                states[number] = "has ended"
                self._release(number, actors[number])
        return states

    def _answers(self, actors: Mapping[int, Any], verb: str) -> dict[int, bool | Exception | None]:
        """Call a method of all actors at once; returns a result, an error, or None: it is late.

        An actor that has not answered an earlier call of this kind is not called again.
        """
        for number, actor in actors.items():
            asked = self._asked.get(number)
            if asked is None or asked[0] != verb:
                self._asked[number] = verb, getattr(actor, verb).remote()
        calls = {number: self._asked[number][1] for number in actors}
        if calls:
            ray.wait(list(calls.values()), num_returns=len(calls), timeout=ANSWER_S)
        answers: dict[int, bool | Exception | None] = {}
        for number, call in calls.items():
            try:
                answers[number] = ray.get(call, timeout=0)
            except GetTimeoutError:
                answers[number] = None
                continue
            except RayActorError as error:
                answers[number] = error
            del self._asked[number]
        return answers

    def _release(self, number: int, actor: Any) -> None:
        self._leaving.pop(number, None)
        self._asked.pop(number, None)
        ray.kill(actor, no_restart=True)
        if number >= self._num_first:
            with contextlib.suppress(ValueError):
                remove_placement_group(get_placement_group(f"{self._name} {number}"))

    def end_all(self, timeout_s: float) -> None:
        """Have all engines end, and release all places."""
        deadline = time.monotonic() + timeout_s
        while (present := self._present()) and time.monotonic() < deadline:
            self._have_ended(present)
        for number in present:
            self._release(number, ray.get_actor(f"{self._name} {number}"))
        for row in placement_group_table().values():
            if row["name"].startswith(f"{self._name} ") and row["state"] != "REMOVED":
                remove_placement_group(get_placement_group(row["name"]))
