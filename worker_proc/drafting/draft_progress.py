"""The draft model's progress in a request."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class DraftProgress:
    """The positions of a request that the draft model has computed.

    Their KV is in the request's blocks. `DraftModelStates` has the state of recurrent layers after
    them.
    """

    position: int
    """The number of computed tokens, all of which are known."""
    ahead: list[int] = field(default_factory=list)
    """Drafts at the following positions; their KV is valid up to the first wrong one."""

    def settle(self, token_ids: list[int]) -> None:
        """Count the drafts that were right, now that the tokens are known.

        The last token does not count, since the next drafts follow from its computation.
        """
        for draft in self.ahead:
            if self.position >= len(token_ids) - 1 or token_ids[self.position] != draft:
                break
            self.position += 1
        self.ahead = []
