"""The engines in a Ray cluster: an actor and a place for each. All calls of Ray are here.

Actors are detached and have names, so that they outlive the process that has made them: its
successor finds them again. Each engine has the CPUs and GPUs of all its ranks in one bundle, since
ranks share a machine. The first engines have the bundles of one placement group with the strategy
SPREAD; each further one has a group of its own, which is released with it.
"""

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util import get_placement_group, list_named_actors, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from scripts.placement.machine import Machine

NAMESPACE = "troika"
ANSWER_S = 2.0
"""For an actor, which may wait for a place, or for its machine."""
LEAVE_S = 60.0
"""From the request to end to the end of an actor whose agent has not ended."""


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
        notes: list[str] = []
        for number in range(num_wanted):
            self._leaving.pop(number, None)
            notes += self._note(number, self._keep(number))
        for number in self._present():
            if number >= num_wanted:
                notes += self._note(number, self._end(number))
        return notes

    def _note(self, number: int, state: str) -> Iterator[str]:
        if state != self._states.get(number):
            yield f"engine {number} in the cluster {state}"
        self._states[number] = state

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
        name = self._name if is_first else f"{self._name} {number}"
        try:
            group = get_placement_group(name)
        except ValueError:
            bundles = [self._bundle] * (self._num_first if is_first else 1)
            group = placement_group(bundles, strategy="SPREAD", name=name, lifetime="detached")
        return group, number if is_first else 0

    def _keep(self, number: int) -> str:
        """Have an engine run; returns its state."""
        actor = self._actor(number)
        try:
            if not ray.get(actor.is_running.remote(), timeout=ANSWER_S):
                ray.get(actor.start.remote(), timeout=ANSWER_S)
                return "is started"
        except GetTimeoutError:
            return "waits for a machine with room, or for its machine"
        except RayActorError:
            return "is placed anew"
        return "has a machine"

    def _end(self, number: int) -> str:
        """Have an engine end in order, and give its place back; returns its state."""
        actor = ray.get_actor(f"{self._name} {number}")
        deadline = self._leaving.setdefault(number, time.monotonic() + LEAVE_S)
        try:
            actor.stop.remote()
            is_running = ray.get(actor.is_running.remote(), timeout=ANSWER_S)
        except (GetTimeoutError, RayActorError):
            is_running = True
        if is_running and time.monotonic() < deadline:
            return "finishes its requests"
        del self._leaving[number]
        ray.kill(actor, no_restart=True)
        if number >= self._num_first:
            with contextlib.suppress(ValueError):
                remove_placement_group(get_placement_group(f"{self._name} {number}"))
        return "has ended"

    def end_all(self, timeout_s: float) -> None:
        """Have all engines end, and release all places."""
        deadline = time.monotonic() + timeout_s
        while (present := self._present()) and time.monotonic() < deadline:
            for number in present:
                self._end(number)
        for number in present:
            ray.kill(ray.get_actor(f"{self._name} {number}"), no_restart=True)
        with contextlib.suppress(ValueError):
            remove_placement_group(get_placement_group(self._name))
