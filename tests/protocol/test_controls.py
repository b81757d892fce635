"""Which client owns a pause, and what it repeats to a new core: the rules, then the client."""

import asyncio

import pytest

from protocol.api_core import (
    AddRequest,
    Control,
    ControlAction,
    ControlDone,
    EngineState,
    EngineStats,
    PauseMode,
    Status,
)
from protocol.client import AsyncEngineClient
from protocol.client.controls import Controls
from protocol.client.errors import RequestFailed
from protocol.sampling import SamplingParams
from tests.protocol.fake_core import FACTS, FakeCore, run_connected

NEW, ALL, RUNNING = PauseMode.PAUSED_NEW, PauseMode.PAUSED_ALL, PauseMode.RUNNING
PAUSE, RESUME, SLEEP, RESET = (
    ControlAction.PAUSE,
    ControlAction.RESUME,
    ControlAction.SLEEP,
    ControlAction.RESET_PREFIX_CACHE,
)


def status(mode: PauseMode = RUNNING, *, is_sleeping: bool = False) -> Status:
    return Status(EngineState.READY, FACTS, EngineStats(), mode, is_sleeping)


def applied(controls: Controls, action: ControlAction, mode: PauseMode = ALL) -> None:
    control = controls.ask(action, mode)
    in_force = {PAUSE: mode, SLEEP: ALL, RESUME: RUNNING}.get(action, RUNNING)
    controls.take(ControlDone(control.number, True, in_force))


def asked_again(controls: Controls, epoch: int = 2) -> list[tuple[ControlAction, PauseMode]]:
    """The control in force is repeated first, and only it yields to those of other clients."""
    controls_ = controls.begin(epoch, status())
    assert [c.restores for c in controls_] == sorted([c.restores for c in controls_], reverse=True)
    return [(c.action, c.pause_mode) for c in controls_]


@pytest.fixture
def controls() -> Controls:
    connected = Controls()
    assert connected.begin(1, status()) == []
    return connected


@pytest.mark.parametrize(("action", "mode"), [(PAUSE, ALL), (PAUSE, NEW), (SLEEP, ALL)])
def test_what_is_in_force_is_asked_of_every_new_core(
    controls: Controls, action: ControlAction, mode: PauseMode
) -> None:
    applied(controls, action, mode)
    for epoch in (2, 3):
        assert asked_again(controls, epoch) == [(action, mode)]
    assert [control.restores for control in controls.begin(4, status())] == [True]


def test_after_a_resume_nothing_is_asked_again(controls: Controls) -> None:
    applied(controls, PAUSE)
    applied(controls, RESUME)
    assert asked_again(controls) == []


def test_a_reset_is_asked_once_and_leaves_a_pause_in_force(controls: Controls) -> None:
    applied(controls, PAUSE)
    done = controls.ask(RESET, reset_running_requests=True)
    controls.take(ControlDone(done.number, True, ALL))
    assert asked_again(controls) == [(PAUSE, ALL)]


def test_a_refused_control_is_not_in_force(controls: Controls) -> None:
    control = controls.ask(PAUSE)
    controls.take(ControlDone(control.number, False, RUNNING))
    assert asked_again(controls) == []


def test_what_has_no_answer_yet_is_asked_again_after_what_is_in_force(controls: Controls) -> None:
    applied(controls, PAUSE, NEW)
    controls.ask(RESET)
    controls.ask(SLEEP)
    assert [action for action, _ in asked_again(controls)] == [PAUSE, RESET, SLEEP]
    assert [action for action, _ in asked_again(controls, 3)].count(SLEEP) == 1


def test_a_control_without_a_waiting_caller_is_not_repeated(controls: Controls) -> None:
    controls.give_up(controls.ask(PAUSE).number)
    assert asked_again(controls) == []


@pytest.mark.parametrize(
    ("action", "word"),
    [
        (PAUSE, status(RUNNING)),
        (PAUSE, status(NEW)),
        (SLEEP, status(RUNNING)),
        (SLEEP, status(ALL)),
    ],
)
def test_a_pause_that_another_client_has_ended_or_changed_is_its_own_no_more(
    controls: Controls, action: ControlAction, word: Status
) -> None:
    applied(controls, action)
    controls.follow(word)
    assert asked_again(controls) == []


@pytest.mark.parametrize(("mode", "again"), [(ALL, [(PAUSE, ALL)]), (RUNNING, [])])
def test_the_same_is_learned_from_the_same_core_after_a_lost_connection(
    controls: Controls, mode: PauseMode, again: list[tuple[ControlAction, PauseMode]]
) -> None:
    applied(controls, PAUSE)
    assert controls.begin(1, status(mode)) == []
    assert asked_again(controls) == again


def test_a_status_from_before_the_answer_is_ignored(controls: Controls) -> None:
    control = controls.ask(PAUSE)
    controls.follow(status(RUNNING))
    controls.take(ControlDone(control.number, True, ALL))
    controls.follow(status(ALL))
    assert asked_again(controls) == [(PAUSE, ALL)]
    controls.follow(status(RUNNING))  # of a new core that has not read the control yet
    assert asked_again(controls, 3) == [(PAUSE, ALL)]


def test_a_sleep_of_another_client_leaves_a_pause_in_force(controls: Controls) -> None:
    applied(controls, PAUSE, NEW)
    controls.follow(status(ALL, is_sleeping=True))
    assert asked_again(controls) == [(PAUSE, NEW)]


# The client --------------------------------------------------------------------------------------


def test_each_call_asks_and_returns_what_the_core_has_answered(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        calls = [
            (client.pause(NEW), Control(1, PAUSE, NEW), NEW),
            (client.sleep(), Control(2, SLEEP), ALL),
            (client.wake_up(), Control(3, RESUME), RUNNING),
            (client.resume(), Control(4, RESUME), RUNNING),
            (client.reset_prefix_cache(True), Control(5, RESET, ALL, True), RUNNING),
        ]
        for i, (call, expected, mode) in enumerate(calls):
            task = asyncio.create_task(call)
            await core.until(lambda n=i: len(core.controls) > n)
            assert core.controls[-1] == expected
            core.done(mode, ok=i != 4)
            assert await task is (i != 4)

    run_connected(core, play)


@pytest.mark.parametrize("is_starting", [False, True])
def test_a_new_core_is_paused_before_it_is_sent_any_request(
    core: FakeCore, is_starting: bool
) -> None:
    async def play(client: AsyncEngineClient) -> None:
        stream = client.submit([7], SamplingParams())
        task = asyncio.create_task(client.pause())
        await core.until(lambda: core.controls)
        core.done(ALL)
        assert await task
        if is_starting:  # its first status comes before it has workers
            core.send(Status(EngineState.STARTING, None, EngineStats()), core.epoch + 1)
        await core.restart(1)
        first, second = core.received
        assert isinstance(first, Control)
        assert (first.action, first.pause_mode) == (PAUSE, ALL)
        assert isinstance(second, AddRequest)
        stream.cancel()

    run_connected(core, play)


def test_a_core_that_dies_before_it_answers_leaves_the_answer_to_its_successor(
    core: FakeCore,
) -> None:
    async def play(client: AsyncEngineClient) -> None:
        task = asyncio.create_task(client.sleep())
        await core.until(lambda: core.controls)
        await core.restart(0)
        await core.until(lambda: core.controls)
        core.done(ALL)
        assert await task

    run_connected(core, play)


def test_without_an_answer_the_deadline_ends_the_call_and_nothing_is_sent_again(
    core: FakeCore,
) -> None:
    async def play(client: AsyncEngineClient) -> None:
        with pytest.raises(TimeoutError, match=r"engine has not answered within 0\.05 s"):
            await client.pause(timeout_s=0.05)
        await core.until(lambda: core.controls)
        core.done(ALL)
        client.submit([7], SamplingParams())
        await core.restart(1)
        assert core.controls == []

    run_connected(core, play)


def test_closing_the_client_ends_the_wait_for_an_answer(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        task = asyncio.create_task(client.pause())
        await core.until(lambda: core.controls)
        await client.close()
        with pytest.raises(RequestFailed):
            await task
        with pytest.raises(RequestFailed):
            await client.pause()

    run_connected(core, play)


@pytest.mark.parametrize("mode", ["new", RUNNING, None])
def test_a_mode_that_is_not_a_pause_is_refused_at_the_call(core: FakeCore, mode: PauseMode) -> None:
    async def play(client: AsyncEngineClient) -> None:
        with pytest.raises(ValueError, match="mode"):
            await client.pause(mode)
        core.pump()
        assert core.controls == []

    run_connected(core, play)


def test_an_odd_truth_value_is_sent_as_a_bool(core: FakeCore) -> None:
    """A control that cannot be encoded would block every later recovery."""

    async def play(client: AsyncEngineClient) -> None:
        odd: bool = [1]  # type: ignore[assignment]
        task = asyncio.create_task(client.reset_prefix_cache(odd))
        await core.until(lambda: core.controls)
        assert core.controls[-1] == Control(1, RESET, ALL, True)
        core.done(RUNNING, ok=True)
        assert await task

    run_connected(core, play)
