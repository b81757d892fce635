"""The position of a request in its grammar, which determines the tokens that may follow.

It is rebuilt from the output ids whenever a worker receives the request, so that no state has to
survive a preemption or a worker's death.
"""

from itertools import takewhile
from typing import TYPE_CHECKING

from worker_proc.grammar.errors import in_words

if TYPE_CHECKING:
    import llguidance


class GrammarState:
    """Follows the outputs of one request; a failure affects only this request."""

    __slots__ = ("_num_tokens", "_position", "_tokenizer", "error", "matcher")

    def __init__(
        self,
        matcher: "llguidance.LLMatcher | None",
        num_prompt_tokens: int,
        error: str = "",
        *,
        num_tokens: int = 2**31,
        tokenizer: "llguidance.LLTokenizer | None" = None,
    ) -> None:
        """Take a matcher at the beginning of the grammar, or None and the error.

        `num_tokens` is the matcher's number of tokens; a model may have more. Without `tokenizer`,
        the text of a special token cannot be written.
        """
        self.matcher = matcher
        self._tokenizer = tokenizer
        self._num_tokens = num_tokens
        self.error = error
        """The reason why the request cannot continue; empty: nothing has failed."""
        self._position = num_prompt_tokens

    def advance(self, token_ids: list[int]) -> None:
        """Advance by the request's new outputs, given all of its tokens.

        Tokens after the end (EOS, and those sampled before the core knows of it) do not count.
        """
        matcher = self.matcher
        new, self._position = token_ids[self._position :], len(token_ids)
        if matcher is None or self.error or matcher.is_stopped():
            return
        try:
            num_allowed = matcher.try_consume_tokens(new)
        except BaseException as error:  # also a panic of the library, which is not an Exception
            self.error = f"{type(error).__name__}: {error}"
            return
        self.note_error()
        if self.error:
            return
        if num_allowed < len(new) and not matcher.is_stopped():
            self.error = f"the grammar does not allow token {new[num_allowed]}"

    def note_error(self) -> None:
        """Copy an error of the matcher, which may exceed its limits at any token."""
        if self.matcher is not None and self.matcher.is_error():
            self.error = (
                in_words(self.matcher.get_error(), has_begun=True) or "the grammar has failed"
            )

    def masks(self, draft_token_ids: list[int]) -> list[bytes]:
        """Return the allowed tokens, one bit each: after the outputs and after each right draft."""
        if self.matcher is None or self.error:
            return []
        matcher = self.matcher.deep_copy() if draft_token_ids else self.matcher
        masks = [self._mask(matcher)]
        for token_id in draft_token_ids:
            if matcher.is_stopped() or matcher.try_consume_tokens([token_id]) == 0:
                break
            masks.append(self._mask(matcher))
        self.note_error()
        return masks

    def _mask(self, matcher: "llguidance.LLMatcher") -> bytes:
        """Return the allowed tokens; the text of a special token is written with other tokens.

        llguidance encodes forced text with the tokenizer, which finds the special token, but
        matches that token only where the grammar names its id.
        """
        mask = matcher.compute_bitmask()
        allowed = int.from_bytes(mask, "little")
        token_id = allowed.bit_length() - 1
        if self._tokenizer is None or allowed.bit_count() != 1 or matcher.is_error():
            return mask
        if matcher.validate_tokens([token_id]):
            return mask
        num_bytes = len(self._tokenizer.decode_bytes([token_id]))
        text = matcher.compute_ff_bytes()[:num_bytes].decode(errors="ignore")
        others = self._tokenizer.greedy_tokenize(text)[:1]  # special tokens are not in the trie
        if not others or not matcher.validate_tokens(others):
            return mask
        return (1 << others[0]).to_bytes(len(mask), "little")

    def drafts(self, max_tokens: int, proposed: list[int]) -> list[int]:
        """Return the tokens that the grammar forces, or the proposed drafts that it allows.

        Both are guesses: the step that verifies them samples each of them under its mask.
        """
        matcher = self.matcher
        if matcher is None or self.error or matcher.is_stopped():
            return []
        try:
            forced = matcher.compute_ff_tokens()[:max_tokens]
            forced = forced[: matcher.validate_tokens(forced)]
            if forced:
                return forced
            # An unknown token would make the matcher fail.
            known = list(takewhile(lambda token_id: token_id < self._num_tokens, proposed))
            return known[: matcher.validate_tokens(known)]
        except BaseException:  # the next mask reports the error
            return []
