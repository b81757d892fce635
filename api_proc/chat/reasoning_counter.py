"""Counts the tokens of reasoning in an output, its end marker included.

The count follows from the ids alone: it does not depend on how the output was cut into pieces.
"""

import re
from collections.abc import Callable


class ReasoningCounter:
    """The number of reasoning tokens among the ids so far."""

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        begin: str,
        ends: tuple[str, ...],
        *,
        is_open: bool,
        repeats: bool,
    ) -> None:
        """`is_open`: the output begins within reasoning.

        `repeats`: there may be several blocks, at any place; else one, at the start.
        """
        self.num_tokens = 0
        self._token_bytes = token_bytes
        self._begin = begin.encode()
        self._ends = re.compile(b"|".join(re.escape(end.encode()) for end in ends))
        self._repeats = repeats
        self._is_inside = is_open
        self._is_over = False
        self._text = b""
        """The end of the output, as long as a marker may be."""
        self._num_kept = max(len(end.encode()) for end in (begin, *ends))

    def push(self, token_ids: list[int]) -> None:
        if self._is_over:
            return
        for token_id in token_ids:
            self._text = self._text[-self._num_kept :] + self._token_bytes(token_id)
            if self._is_inside:
                self.num_tokens += 1
                if self._ends.search(self._text):
                    self._leave()
            else:
                self._look_for_begin()
            if self._is_over:
                return

    def _leave(self) -> None:
        self._is_inside, self._is_over = False, not self._repeats
        self._text = b""

    def _look_for_begin(self) -> None:
        if self._repeats:
            has_begun = self._begin in self._text
        else:
            text = self._text.lstrip()
            has_begun = text.startswith(self._begin)
            self._is_over = not has_begun and not self._begin.startswith(text)
        if has_begun:
            self._is_inside, self._text = True, b""
