"""How long streams were silent because of the faults, and how soon deaths were noticed."""

from collections.abc import Sequence
from itertools import pairwise

from tests.chaos.injection import Kill
from tests.chaos.recording import Recording

_AFTERMATH_S = 1.0
"""A gap that begins within this time after the last kill is attributed to it."""


def stall_s(
    recording: Recording, kill_times: Sequence[float], returned_at: float | None = None
) -> float | None:
    """Return the longest silence of a stream around the kills; None if it was not active then.

    Only gaps between two events count, not the wait for the first token (`wait_s`) nor the silence
    after the last one.

    Args:
        recording: of one stream.
        kill_times: in order.
        returned_at: when every process was ready again. A gap that begins earlier is attributed to
            the kills.
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
    """Return the time from the last kill to the first event of a stream that waited for it.

    It includes the rest of the stream's wait in the queue. None for other streams.
    """
    if not kill_times or recording.opened_at > kill_times[-1] or not recording.events:
        return None
    waited_s = recording.events[0].time - kill_times[-1]
    return waited_s if waited_s >= 0 else None


def detections_s(kills: Sequence[Kill], notices: Sequence[float]) -> list[float | None]:
    """Return the time from each kill until the supervisor had reaped the process; None: never.

    Args:
        kills: of processes with a living supervisor.
        notices: one monotonic time per reaped process.
    """
    left = sorted(notices)
    found: list[float | None] = []
    for kill in sorted(kills, key=lambda kill: kill.time):
        notice = next((moment for moment in left if moment >= kill.time), None)
        if notice is not None:
            left.remove(notice)
        found.append(None if notice is None else notice - kill.time)
    return found
