"""The recent acceptance rate of drafts."""

from dataclasses import dataclass

_PRIOR_POSITIONS = 2.0
"""Weight of the prior rate, in drafts of the request itself."""


@dataclass(slots=True)
class Acceptance:
    """Counts right drafts, and drafts whose predecessors in the step were all right."""

    right: float = 0.0
    tested: float = 0.0

    def observe(self, num_drafts: int, num_right: int, memory: float) -> None:
        self.right = self.right * memory + num_right
        self.tested = self.tested * memory + min(num_right + 1, num_drafts)

    def rate(self, prior: float) -> float:
        tested = self.tested + _PRIOR_POSITIONS
        return (self.right + _PRIOR_POSITIONS * prior) / tested
