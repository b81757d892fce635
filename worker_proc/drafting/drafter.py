"""Makes the drafts of a step's requests, from repetitions or with a draft model."""

from collections.abc import Callable, Sequence

from protocol.core_worker import SchedulerOutput
from worker_proc.drafting.draft_model import DraftModel
from worker_proc.drafting.repetitions import propose_repetitions
from worker_proc.mirror import Mirror
from worker_proc.request import ScheduledRequest


class Drafter:
    """Drafts for the requests of a mirror, after each step that samples."""

    def __init__(
        self,
        mirror: Mirror,
        model: DraftModel | None = None,
        share: Callable[[Sequence[ScheduledRequest]], None] | None = None,
        min_states: Callable[[], int] | None = None,
    ) -> None:
        """Draft with `model`; without one, from repetitions in each request's own text.

        Args:
            share: gives all ranks the drafts of the one that has the draft model.
            min_states: returns the draft states of the rank that has the fewest; None: there is
                one rank, or no recurrent layer.
        """
        self._mirror = mirror
        self.model = model
        self._share = share
        self._min_states = min_states
        self._has_limited_states = False
        """True if the ranks of this adoption have agreed on the number of draft states."""

    def reset(self) -> None:
        """Forget every request."""
        if self.model is not None:
            self.model.reset()
        self._has_limited_states = False

    def sleep(self) -> None:
        """Release the draft model's KV cache."""
        if self.model is not None:
            self.model.sleep()

    def follow(self, step: SchedulerOutput) -> None:
        """Record the changes of a step to the blocks, before it is computed."""
        if self.model is not None:
            self.model.follow(step)

    def draft(self, scheduled: Sequence[ScheduledRequest]) -> list[int]:
        """Make drafts for each request that sampled; return their counts, or [] if all are 0."""
        if self.model is not None:
            self.model.propose(scheduled)
        elif self._share is None:
            propose_repetitions(scheduled)
        if self._share is not None:
            self._share(scheduled)
        self._limit_states()
        counts = []
        for part in scheduled:
            if part.samples:
                request = part.request
                drafts = request.draft_token_ids
                if request.grammar_state is not None and request.draft_limit:
                    drafts = request.grammar_state.drafts(request.draft_limit, drafts)
                counts.append(self._mirror.take_drafts(request, drafts))
        return counts if any(counts) else []

    def _limit_states(self) -> None:
        """Use no more draft states than the rank with the fewest has."""
        if self._min_states is not None and not self._has_limited_states:
            self._mirror.limit_draft_states(self._min_states())
            self._has_limited_states = True
