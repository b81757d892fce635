"""What a client has asked of the engine as a whole: still unanswered, or in force.

No sockets here, as in the ledger. A pause belongs to whoever asked for it: a core that starts anew
knows nothing of it, and is asked again before it is sent any request. As long as the core lives its
word is the truth: a pause that another client has ended or changed is not this client's any more.
"""

from protocol.api_core import Control, ControlAction, ControlDone, PauseMode, Status


class Controls:
    """The controls of one client, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._next_number = 0
        self._unanswered: dict[int, Control] = {}
        self._in_force: Control | None = None
        """The pause or sleep that this client answers for."""
        self._repeated = 0
        """Number under which that was sent to the newest core, if it is not the first."""
        self._epoch = 0
        """Of the core that this is about."""

    def ask(
        self,
        action: ControlAction,
        pause_mode: PauseMode = PauseMode.PAUSED_ALL,
        *,
        reset_running_requests: bool = False,
    ) -> Control:
        """Note a control, to be sent now and to every new core until it is answered."""
        self._next_number += 1
        control = Control(self._next_number, action, pause_mode, reset_running_requests)
        self._unanswered[control.number] = control
        return control

    def give_up(self, number: int) -> None:
        """Nobody waits for this answer any more; whether the core obeyed is not known."""
        self._unanswered.pop(number, None)

    def take(self, done: ControlDone) -> None:
        """Enter an answer."""
        control = self._unanswered.pop(done.number, None)
        if control is None or control.action is ControlAction.RESET_PREFIX_CACHE:
            return
        if done.pause_mode is PauseMode.RUNNING:
            self._in_force = None
        elif done.ok:
            self._in_force = control

    def follow(self, status: Status) -> None:
        """Learn from a later word of the same core whose the pause is by now.

        A word from before an answer does no harm: what was asked is in force from its answer on.
        """
        if self._in_force is not None and not self._holds(status):
            self._in_force = None

    def _holds(self, status: Status) -> bool:
        assert self._in_force is not None
        if self._in_force.action is ControlAction.SLEEP:
            return status.is_sleeping
        return status.is_sleeping or status.pause_mode is self._in_force.pause_mode

    def begin(self, epoch: int, status: Status) -> list[Control]:
        """Return what to send on a new connection, before anything else.

        Args:
            epoch: of the core; another one than before is a core that knows nothing.
            status: its first word.
        """
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
