"""Drafts the next tokens of a request by prompt lookup: the tokens that followed its end before.

Texts repeat names, quotations, code and tables, and each repetition predicts the next. Drafts are a
pure function of the request's token ids, so every rank makes the same ones. They cost no forward; a
wrong one costs one row of the step that verifies it.
"""

from array import array

MAX_CANDIDATES = 16
"""Maximum number of earlier occurrences of the last pair that are compared, latest first. It bounds
the time for frequent pairs, such as line breaks with indents."""

_NONE = -1
_TOKEN_BITS = 31


class NgramIndex:
    """Positions of each pair of a request's tokens: 4 bytes a token, 120 a distinct pair."""

    __slots__ = ("_before", "_latest")

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}
        """For each pair, the position after its last occurrence that has a next token."""
        self._before = array("i", [_NONE, _NONE])
        """For each such position, that of the previous occurrence, or `_NONE`."""

    def extend(self, token_ids: list[int], end: int) -> None:
        """Index the tokens before position `end` that are not indexed yet."""
        latest, before = self._latest, self._before
        for position in range(len(before), end):
            pair = token_ids[position - 2] << _TOKEN_BITS | token_ids[position - 1]
            before.append(latest.get(pair, _NONE))
            latest[pair] = position

    def propose(self, token_ids: list[int], max_tokens: int) -> list[int]:
        """Return drafts for the tokens after `token_ids`, all of which are indexed.

        Looks for an earlier occurrence of the text's last four tokens, then the last three, then
        two; the latest occurrence counts. Matches of one token predict little, and those longer
        than four hardly more. If the continuation reaches the end of the text, it is repeated.
        Returns `max_tokens` ids, or none if there is no earlier occurrence.
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
            if position < 3:  # there is no token before the pair, or no earlier occurrence
                break
            if token_ids[position - 3] == third:
                if position > 3 and token_ids[position - 4] == fourth:
                    return position
                if best_of_three == _NONE:
                    best_of_three = position
            position = before[position]
        return best_of_two if best_of_three == _NONE else best_of_three
