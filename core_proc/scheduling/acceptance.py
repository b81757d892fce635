"""How many of the drafts were right, lately."""

from dataclasses import dataclass

_PRIOR_POSITIONS = 2.0
"""Drafts of the request itself that count as much as those of all others."""


@dataclass(slots=True)
class Acceptance:
    """Drafts that were right, of those whose predecessors in the step were right, too."""

    right: float = 0.0
    tested: float = 0.0

    def observe(self, num_drafts: int, num_right: int, memory: float) -> None:
        self.right = self.right * memory + num_right
        self.tested = self.tested * memory + min(num_right + 1, num_drafts)

    def rate(self, prior: float) -> float:
        tested = self.tested + _PRIOR_POSITIONS
        return (self.right + _PRIOR_POSITIONS * prior) / tested
