"""Runs engines in a Ray cluster, each as an actor in a placement group. Only this module calls Ray.

Actors are detached and named, so that they outlive the process that created them, and its successor
finds them again. The CPUs and GPUs of all ranks of an engine form one bundle, because ranks share a
machine. The first engines use the bundles of one placement group with the strategy SPREAD. Each
further engine has a separate group, which is removed when the engine is.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
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
"""Deadline for an actor's answer; the actor may still be waiting for resources or its machine."""
_POLL_S = 0.1
_WAITS = "waits for a machine with room, or for its machine"


class Cluster:
    """The engines behind one API, by number. Calls may take seconds; one runs at a time."""

    def __init__(
        self,
        address: str,
        name: str,
        arguments: Sequence[str],
        bundle: dict[str, float],
        num_first: int,
        *,
        leave_s: float,
    ) -> None:
        """Store the settings; the first call of a method connects.

        Args:
            address: address of the cluster, in the form that `ray.init` accepts.
            name: prefix of the actors' names, followed by their number; unique in the cluster.
            arguments: command-line arguments of the host agents.
            bundle: resources of one engine, such as CPU and GPU.
            num_first: number of engines that share the placement group and are spread over
                machines.
            leave_s: seconds after which an actor is killed if its agent has not ended on request.
        """
        self._address = address
        self._name = name
        self._arguments = list(arguments)
        self._bundle = bundle
        self._num_first = num_first
        self._leave_s = leave_s
        self._states: dict[int, str] = {}
        self._asked: dict[int, tuple[str, Any]] = {}
        """By number, the method last called on an actor, and the future of its result."""
        self._leaving: dict[int, float] = {}
        """The deadline of each engine that was asked to end, by its number."""
        self._lock = threading.Lock()
        self._ends = threading.Event()
        """Set by `end_all`; no engine is started afterwards."""

    def _connect(self) -> None:
        if not ray.is_initialized():
            ray.init(
                address=self._address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )

    def reconcile(self, num_wanted: int) -> list[str]:
        """Start missing engines and end surplus ones; return a line for each change of state.

        Raises an exception of Ray if the cluster does not answer or refuses a call.
        """
        with self._lock:
            return self._reconcile(num_wanted)

    def _reconcile(self, num_wanted: int) -> list[str]:
        if self._ends.is_set():
            return []
        self._connect()
        surplus = [number for number in self._present() if number >= num_wanted]
        for number in range(num_wanted):
            self._leaving.pop(number, None)
        states = self._keep(range(num_wanted)) | self._end(surplus)
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
        """Return the actor of an engine; create it if it does not exist."""
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
        """Return an engine's placement group and the index of its bundle."""
        is_first = number < self._num_first
        name = f"{self._name} {f'first {self._num_first}' if is_first else number}"
        try:
            group = get_placement_group(name)
        except ValueError:
            bundles = [self._bundle] * (self._num_first if is_first else 1)
            group = placement_group(bundles, strategy="SPREAD", name=name, lifetime="detached")
        return group, number if is_first else 0

    def _keep(self, numbers: Iterable[int]) -> dict[int, str]:
        """Start engines that do not run, and keep the others; return the state of each."""
        states = {}
        actors = {number: self._actor(number) for number in numbers if not self._ends.is_set()}
        for number, answer in self._answers(actors, "keep").items():
            match answer:
                case None:
                    states[number] = _WAITS
                case bool():
                    states[number] = "is started" if answer else "has a machine"
                case RayActorError():
                    states[number] = "is placed anew"
                case _:
                    states[number] = f"cannot be started: {_last_line(answer)}"
        return states

    def _end(self, numbers: Iterable[int]) -> dict[int, str]:
        """Ask engines to end, and release the resources of those that have; return their states."""
        states = {}
        actors = {number: ray.get_actor(f"{self._name} {number}") for number in numbers}
        for number, has_ended in self._answers(actors, "end").items():
            deadline = self._leaving.setdefault(number, time.monotonic() + self._leave_s)
            states[number] = "leaves"
            if isinstance(has_ended, RayError) and not isinstance(has_ended, RayActorError):
                states[number] = f"cannot be asked to end: {_last_line(has_ended)}"
            if has_ended is True or time.monotonic() >= deadline:
                states[number] = "has ended"
                self._release(number, actors[number])
        return states

    def _answers(self, actors: Mapping[int, Any], verb: str) -> dict[int, bool | RayError | None]:
        """Call a method of all actors at once; return each result or error, or None if it is late.

        An actor that has not yet answered an earlier call of the same method is not called again.
        """
        for number, actor in actors.items():
            asked = self._asked.get(number)
            if asked is None or asked[0] != verb:
                self._asked[number] = verb, getattr(actor, verb).remote()
        calls = {number: self._asked[number][1] for number in actors}
        late, deadline = list(calls.values()), time.monotonic() + ANSWER_S
        while late and time.monotonic() < deadline and not self._ends.is_set():
            _, late = ray.wait(late, num_returns=len(late), timeout=_POLL_S)
        answers: dict[int, bool | RayError | None] = {}
        for number, call in calls.items():
            try:
                answers[number] = ray.get(call, timeout=0)
            except GetTimeoutError:
                answers[number] = None
                continue
            except RayError as error:  # raised by the actor or by its method
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
        """End all engines and release their resources; `reconcile` has no effect afterwards.

        Raises TimeoutError if another call does not return in time.
        """
        deadline = time.monotonic() + timeout_s
        self._ends.set()
        if not self._lock.acquire(timeout=timeout_s):
            raise TimeoutError("the Ray cluster does not answer")
        try:
            self._connect()
            while (present := self._present()) and time.monotonic() < deadline:
                self._end(present)
                time.sleep(_POLL_S)
            for number in present:
                self._release(number, ray.get_actor(f"{self._name} {number}"))
            for row in placement_group_table().values():
                if row["name"].startswith(f"{self._name} ") and row["state"] != "REMOVED":
                    remove_placement_group(get_placement_group(row["name"]))
        finally:
            self._lock.release()


def _last_line(error: RayError) -> str:
    """Return the last line of a method's error, which follows the traceback."""
    return str(error).strip().rpartition("\n")[2]
