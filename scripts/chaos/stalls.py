"""How long streams were silent because of the faults, and how soon deaths were noticed."""

from collections.abc import Sequence
from itertools import pairwise

from scripts.chaos.injection import Kill
from scripts.chaos.recording import Recording

_AFTERMATH_S = 1.0
"""After the last kill; at least so long a gap that begins is put down to it."""


def stall_s(
    recording: Recording, kill_times: Sequence[float], returned_at: float | None = None
) -> float | None:
    """The longest silence of a stream around the kills; None if it was not under way then.

    Only what lies between two events counts, so neither the wait for the first token nor the
    silence after the last one; `wait_s` counts the former.

    Args:
        recording: of one stream.
        kill_times: in order.
        returned_at: when all processes were back. Gaps that begin before are put down to the
            kills.
    """
    if not kill_times:
        return None
    first, last = kill_times[0], kill_times[-1] + _AFTERMATH_S
    last = last if returned_at is None else max(last, returned_at)
    times = [event.time for event in recording.events]
    gaps = [
        after - before for before, after in pairwise(times) if after >= first and before <= last
    ]
    if not gaps or times[0] > first:
        return None
    return max(gaps)


def wait_s(recording: Recording, kill_times: Sequence[float]) -> float | None:
    """From the last kill to the first event of a stream that was open then and had not begun.

    What was left of its wait for its turn is in that. None for other streams.
    """
    if not kill_times or recording.opened_at > kill_times[-1] or not recording.events:
        return None
    waited_s = recording.events[0].time - kill_times[-1]
    return waited_s if waited_s >= 0 else None


def detections_s(kills: Sequence[Kill], notices: Sequence[float]) -> list[float | None]:
    """From each kill to the moment in which the supervisor had buried the dead; None: never.

    Args:
        kills: of processes that have a supervisor, which was not killed itself.
        notices: one for each death, monotonic.
    """
    left = sorted(notices)
    found: list[float | None] = []
    for kill in sorted(kills, key=lambda kill: kill.time):
        notice = next((moment for moment in left if moment >= kill.time), None)
        if notice is not None:
            left.remove(notice)
        found.append(None if notice is None else notice - kill.time)
    return found
