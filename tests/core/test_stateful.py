"""Any sequence of events leaves the scheduler consistent, and every request ends as it should.

The events are in `tests/core/events.py`, and the checks after each in
`tests/core/machine.py`; here hypothesis chooses them and shrinks what fails.
TROIKA_STATEFUL_EXAMPLES sets the number of sequences.
"""

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from tests.combinations import in_turn
from tests.core.events import EVENTS, OPTIONS, Values, make_options
from tests.core.machine import Machine
from tests.soak.scheduler import run_sequence

NUM_EXAMPLES = int(os.environ.get("TROIKA_STATEFUL_EXAMPLES", "1000"))
DEPTHS = (1, 2, 3, 4)


def _drawn(values: Values) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({name: st.sampled_from(list(v)) for name, v in values.items()})


def _event(name: str) -> st.SearchStrategy[dict[str, Any]]:
    return _drawn(EVENTS[name][1])


class SchedulerMachine(RuleBasedStateMachine):
    """Executes the events that hypothesis draws on a `Machine`."""

    depth = 1

    def __init__(self) -> None:
        super().__init__()
        self.machine: Machine | None = None

    @initialize(drawn=_drawn(OPTIONS), arrivals=st.lists(_event("add"), min_size=1, max_size=4))
    def start(self, drawn: dict[str, Any], arrivals: list[dict[str, Any]]) -> None:
        machine = Machine(make_options(drawn, self.depth), has_store=drawn["has_store"])
        for arrival in arrivals:
            machine.apply("add", **arrival)
        self.machine = machine

    def _apply(self, event: str, **drawn: Any) -> None:
        """A run that has failed is not finished."""
        machine, self.machine = self.machine, None
        assert machine is not None
        machine.apply(event, **drawn)
        self.machine = machine

    @rule(drawn=_event("add"))
    def add(self, drawn: dict[str, Any]) -> None:
        self._apply("add", **drawn)

    @rule(drawn=_event("work"))
    def work(self, drawn: dict[str, Any]) -> None:
        self._apply("work", **drawn)

    @rule()
    def schedule(self) -> None:
        self._apply("schedule")

    @rule()
    def update(self) -> None:
        self._apply("update")

    @rule(
        event=st.sampled_from(["preempt", "unblock", "hold", "abort", "fail"]),
        drawn=_event("abort"),
    )
    def touch(self, event: str, drawn: dict[str, Any]) -> None:
        self._apply(event, **drawn)

    @rule(event=st.sampled_from(["begin_load", "end_load"]), drawn=_event("end_load"))
    def load(self, event: str, drawn: dict[str, Any]) -> None:
        self._apply(event, **drawn)

    @rule(event=st.just("compile"), drawn=_event("compile"))
    def compile(self, event: str, drawn: dict[str, Any]) -> None:
        self._apply(event, **drawn)

    @rule(drawn=_event("disturb"))
    def disturb(self, drawn: dict[str, Any]) -> None:
        self._apply("disturb", **drawn)

    def teardown(self) -> None:
        if self.machine is not None:
            self.machine.finish()


@pytest.mark.timeout(600)  # shrinking a failure takes longer than finding it
@pytest.mark.parametrize("depth", DEPTHS)
def test_any_sequence_of_events_keeps_every_promise(depth: int) -> None:
    machine = type(f"SchedulerMachineOfDepth{depth}", (SchedulerMachine,), {"depth": depth})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max(1, NUM_EXAMPLES // len(DEPTHS)),
            stateful_step_count=30,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize(("seed", "depth"), in_turn(range(10), [1, 2, 3, 4, 8]))
def test_long_sequences_keep_every_promise(seed: int, depth: int) -> None:
    """Sequences are longer than those of hypothesis, so that memory fills and queues grow."""
    run_sequence(seed, 400, depth)
