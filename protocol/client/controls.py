"""The controls of one client that are unanswered or in force. Opens no sockets.

A pause belongs to the client that requested it: a new core does not know it, so the client sends it
before any request. While a core lives, its status is authoritative: a pause that another client has
ended or changed no longer belongs to this one.
"""

from protocol.adapters import Adapter
from protocol.api_core import Control, ControlAction, ControlDone, PauseMode, Status

_PAUSES = frozenset({ControlAction.PAUSE, ControlAction.SLEEP})
_LASTING = _PAUSES | {ControlAction.RESUME}
"""Actions that change whether the core is paused."""


class Controls:
    """The controls of one client, in the order of the requests."""

    def __init__(self) -> None:
        self._next_number = 0
        self._unanswered: dict[int, Control] = {}
        self._in_force: Control | None = None
        self._repeated = 0
        """Number of the control that restores the pause in a new core."""
        self._epoch = 0
        """Epoch of the core that last received the controls."""

    def ask(
        self,
        action: ControlAction,
        pause_mode: PauseMode = PauseMode.PAUSED_ALL,
        *,
        reset_running_requests: bool = False,
        adapter: Adapter | None = None,
    ) -> Control:
        """Record a control to be sent now, and to every new core until it is answered."""
        self._next_number += 1
        control = Control(
            self._next_number, action, pause_mode, reset_running_requests, adapter=adapter
        )
        self._unanswered[control.number] = control
        return control

    @property
    def pauses(self) -> bool:
        """True if a pause is in force or requested."""
        unanswered = self._unanswered.values()
        return self._in_force is not None or any(each.action in _PAUSES for each in unanswered)

    def begin_paused(self, action: ControlAction, pause_mode: PauseMode) -> None:
        """Send a pause to the first core as if it had been in force before."""
        self._in_force = Control(0, action, pause_mode)

    def give_up(self, number: int) -> None:
        """Stop waiting for an answer; the core may or may not have executed the control."""
        self._unanswered.pop(number, None)

    def take(self, done: ControlDone) -> None:
        """Process an answer."""
        control = self._unanswered.pop(done.number, None)
        if control is None or control.action not in _LASTING:
            return
        if done.pause_mode is PauseMode.RUNNING:
            self._in_force = None
        elif done.ok:
            self._in_force = control

    def follow(self, status: Status) -> None:
        """Drop the pause if a later status of the same core shows that it no longer holds.

        A status sent before an answer does no harm: a control is in force only after its answer.
        """
        control = self._in_force
        if control is None or status.is_sleeping:
            return
        if control.action is ControlAction.SLEEP or status.pause_mode is not control.pause_mode:
            self._in_force = None

    def begin(self, epoch: int, status: Status) -> list[Control]:
        """Return the controls to send first on a connection to the core of `epoch`."""
        if epoch == self._epoch:
            self.follow(status)
        elif self._in_force is not None:
            self._unanswered.pop(self._repeated, None)
            self._next_number += 1
            self._repeated = self._next_number
            again = self._in_force
            control = Control(self._repeated, again.action, again.pause_mode, restores=True)
            self._unanswered = {control.number: control, **self._unanswered}
        self._epoch = epoch
        return list(self._unanswered.values())
