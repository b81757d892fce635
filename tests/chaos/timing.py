"""Checks from the recordings whether a kill happened in the planned phase."""

from collections.abc import Sequence

from tests.chaos.faults import Phase
from tests.chaos.recording import End, Recording


def phase_problem(
    phase: Phase, kill_times: Sequence[float], recordings: Sequence[Recording]
) -> str | None:
    """Return why the first kill was not in its phase; None if it was, or the phase allows any time.

    Args:
        phase: the planned phase.
        kill_times: monotonic, in order.
        recordings: of the streams that were opened when the round began, or after an idle kill.
    """
    if not kill_times:
        return None
    moment = kill_times[0]
    open_streams = [r for r in recordings if r.opened_at <= moment <= r.ended_at]
    num_begun = sum(any(e.time <= moment for e in r.events) for r in open_streams)
    match phase:
        case Phase.IDLE if open_streams:
            return f"{len(open_streams)} streams were open"
        case Phase.FIRST_CHUNK if num_begun:
            return f"{num_begun} streams had begun"
        case Phase.QUEUED | Phase.MIDDLE_CHUNK if num_begun == len(open_streams):
            return "no prompt was left to be computed"
        case Phase.DECODE | Phase.FLUSH if not num_begun:
            return "no stream was under way"
        case Phase.ABORT if not any(r.end is End.LEFT and r.ended_at <= moment for r in recordings):
            return "no client had left"
    return None
