"""Pauses and sleeps of the engine, and the clients that wait for the answer to their request."""

from collections.abc import Callable

from core_proc.outputs.owners import Client
from core_proc.scheduler import Scheduler
from protocol.api_core import Control, ControlAction, ControlDone, PauseMode

_STILLNESS = {PauseMode.RUNNING: 0, PauseMode.PAUSED_NEW: 1, PauseMode.PAUSED_ALL: 2}
_MAX_SLEEPERS = 1024
"""Requests that wait for one sleep to begin; further ones are refused."""


class Pausing:
    """Handles `Control`. A sleep begins after the results of all steps in flight, which count."""

    def __init__(self, scheduler: Scheduler, send: Callable[[Client, ControlDone], None]) -> None:
        self._scheduler = scheduler
        self._send = send
        self._sleepers: list[tuple[Client, int]] = []
        self._is_sleep_sent = False
        self._is_asked = False
        """Whether a client has paused or resumed this core, other than by restoring a state."""
        self.is_draining = False
        self.is_sleeping = False

    @property
    def mode(self) -> PauseMode:
        return self._scheduler.pause_mode

    def handle(self, client: Client, control: Control) -> None:
        if control.restores and self._is_overtaken(control):
            self._answer(client, control.number, ok=False)
            return
        is_reset = control.action is ControlAction.RESET_PREFIX_CACHE
        self._is_asked |= not (control.restores or is_reset)
        if control.action is ControlAction.SLEEP:
            self._sleep(client, control.number)
            return
        ok = True
        if control.action is ControlAction.RESUME:
            self._resume()
        elif control.action is ControlAction.PAUSE:
            ok = self._pause(control.pause_mode)
        else:
            ok = self._scheduler.reset_prefix_cache(control.reset_running_requests)
            if ok and self._scheduler.offload is not None:
                self._scheduler.offload.clear()
        self._answer(client, control.number, ok)

    def _is_overtaken(self, control: Control) -> bool:
        """Return whether the state of an earlier core, which is to be restored, is out of date.

        Clients restore in any order, and each knows only the state of its last `Status`.
        """
        is_pause = control.action is ControlAction.PAUSE
        is_weaker = is_pause and _STILLNESS[control.pause_mode] < _STILLNESS[self.mode]
        return self._is_asked or is_weaker

    def _pause(self, mode: PauseMode) -> bool:
        if mode is PauseMode.RUNNING:
            self._resume()
        elif self.is_draining:
            return False
        elif not self.is_sleeping:  # a sleep includes any pause
            self._scheduler.pause(mode)
        return True

    def _sleep(self, client: Client, number: int) -> None:
        if self.is_draining or len(self._sleepers) >= _MAX_SLEEPERS:
            self._answer(client, number, ok=False)
            return
        if not self.is_sleeping:
            self.is_sleeping = self._scheduler.sleep()
            self._is_sleep_sent = False
        if self._is_sleep_sent or not self.is_sleeping:
            self._answer(client, number, ok=self.is_sleeping)
        else:
            self._sleepers.append((client, number))

    def _resume(self) -> None:
        self.is_sleeping = False
        self._scheduler.resume()
        self._answer_sleepers(ok=False)

    def drain(self) -> None:
        """End any pause for good, so that all accepted requests are finished."""
        self.is_draining = True
        self._resume()

    def forget(self, client: Client) -> None:
        """Drop the answers for a client that is gone; its pauses stay, others may rely on them."""
        self._sleepers = [sleeper for sleeper in self._sleepers if sleeper[0] != client]

    @property
    def is_sleep_due(self) -> bool:
        """Whether `Sleep` is to be sent now, if no step could be scheduled."""
        return self.is_sleeping and not self._is_sleep_sent and not self._scheduler.in_flight

    def sleep_sent(self) -> None:
        self._is_sleep_sent = True
        self._answer_sleepers(ok=True)

    def workers_lost(self) -> None:
        """New workers need `Sleep` again."""
        self._is_sleep_sent = False

    def _answer_sleepers(self, *, ok: bool) -> None:
        sleepers, self._sleepers = self._sleepers, []
        for client, number in sleepers:
            self._answer(client, number, ok)

    def _answer(self, client: Client, number: int, ok: bool) -> None:
        self._send(client, ControlDone(number, ok, self.mode))
