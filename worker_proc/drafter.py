"""Guesses what a request samples next: whatever followed when its last tokens occurred before.

Prompt lookup: texts repeat names, quotations, code and tables, and each repetition is predicted by
the one before. A guess is a pure function of the request's token ids, so every rank makes the same
one. It costs no forward, and a wrong one costs one row of the step that verifies it.
"""

from array import array

MAX_CANDIDATES = 16
"""Earlier occurrences of the last pair that are looked at, latest first: they bound the time for
pairs that are everywhere (line breaks with indents), and latest is likeliest to be of use."""

_NONE = -1
_TOKEN_BITS = 31


class NgramIndex:
    """Where each pair of tokens of one request occurred; grows with its text and goes with it.

    Per token it holds 4 bytes, and about 120 for each pair that had not occurred before.
    """

    __slots__ = ("_before", "_latest")

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}
        """By pair: the position after its last occurrence that something followed."""
        self._before = array("i", [_NONE, _NONE])
        """By such a position: that of the occurrence before, or `_NONE`."""

    @property
    def num_tokens(self) -> int:
        """Positions that are known as the continuation of what stands before them."""
        return len(self._before)

    def extend(self, token_ids: list[int], end: int) -> None:
        """Take in the tokens up to position `end`, not included, that are not in it yet."""
        latest, before = self._latest, self._before
        for position in range(len(before), end):
            pair = token_ids[position - 2] << _TOKEN_BITS | token_ids[position - 1]
            before.append(latest.get(pair, _NONE))
            latest[pair] = position

    def propose(self, token_ids: list[int], max_tokens: int) -> list[int]:
        """Return guesses for the tokens after `token_ids`, all of which are taken in.

        The text's last four tokens are looked for, else its last three, else two; of their
        occurrences the latest decides. Single tokens repeat in every text without being followed by
        the same, and longer agreement than four says little more. What followed may run into the
        end of the text; the guess is then that it goes on in circles.

        Args:
            token_ids: all tokens of the request.
            max_tokens: guesses wanted.

        Returns:
            `max_tokens` ids, or none where nothing occurred before.
        """
        position = self._find(token_ids)
        if position == _NONE:
            return []
        drafts = token_ids[position : position + max_tokens]
        while len(drafts) < max_tokens:
            drafts += drafts[: max_tokens - len(drafts)]
        return drafts

    def _find(self, token_ids: list[int]) -> int:
        """Return the position after the best earlier occurrence of the text's end, or `_NONE`."""
        length = len(token_ids)
        if length < 2:
            return _NONE
        fourth, third = token_ids[-4:-2] if length >= 4 else (_NONE, _NONE)
        pair = token_ids[-2] << _TOKEN_BITS | token_ids[-1]
        position = best_of_two = self._latest.get(pair, _NONE)
        best_of_three = _NONE
        before = self._before
        for _ in range(MAX_CANDIDATES):
            if position < 3:  # nothing stands before the pair, and no occurrence before this one
                break
            if token_ids[position - 3] == third:
                if position > 3 and token_ids[position - 4] == fourth:
                    return position
                if best_of_three == _NONE:
                    best_of_three = position
            position = before[position]
        return best_of_two if best_of_three == _NONE else best_of_three
