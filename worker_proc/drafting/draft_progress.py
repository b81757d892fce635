"""How far the draft model has computed one request."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class DraftProgress:
    """The positions of a request for which the draft model's KV is in the request's blocks."""

    position: int
    """All known tokens before it."""
    ahead: list[int] = field(default_factory=list)
    """Drafts at this and the next positions, whose KV holds as far as they were right."""

    def settle(self, token_ids: list[int]) -> None:
        """Count the drafts that were right, now that the tokens are known."""
        for draft in self.ahead:
            if self.position >= len(token_ids) or token_ids[self.position] != draft:
                break
            self.position += 1
        self.ahead = []
