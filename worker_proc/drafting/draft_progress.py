"""How far the draft model has computed one request."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class DraftProgress:
    """The positions of a request that the draft model has computed.

    Its KV of them is in the request's blocks. `DraftModelStates` has the state after them, of
    recurrent layers.
    """

    position: int
    """All known tokens before it."""
    ahead: list[int] = field(default_factory=list)
    """Drafts at this and the next positions, whose KV holds as far as they were right."""

    def settle(self, token_ids: list[int]) -> None:
        """Count the drafts that were right, now that the tokens are known.

        Not the last token: the next drafts follow from what is computed of it.
        """
        for draft in self.ahead:
            if self.position >= len(token_ids) - 1 or token_ids[self.position] != draft:
                break
            self.position += 1
        self.ahead = []
