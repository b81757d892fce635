"""Decodes tokens one by one: the pieces add up to the text of all tokens together."""

import codecs
from collections.abc import Mapping

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

NUM_CONTEXT_TOKENS = 16
"""Number of prompt tokens that are decoded before the first output token."""
MAX_PENDING_TOKENS = 16
"""A character has at most four bytes, so more tokens than this without text are not a character."""
_NUM_UTF8_BYTES_MAX = 4
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class ByteDetokenizer:
    """For tokenizers whose tokens are byte strings: exact even for invalid UTF-8."""

    __slots__ = ("_decode", "_hidden", "_table")

    def __init__(
        self, table: Mapping[int, bytes], prompt_token_ids: list[int], hidden: frozenset[int]
    ) -> None:
        """Continue a prompt, which may end within a character; `hidden` tokens have no text."""
        self._table = table
        self._hidden = hidden
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.push(prompt_token_ids[-_NUM_UTF8_BYTES_MAX:])

    def push(self, token_ids: list[int]) -> str:
        """Return the text that these tokens complete."""
        table = self._table
        hidden = self._hidden
        return self._decode(b"".join([table[i] for i in token_ids if i not in hidden]))

    def flush(self) -> str:
        """Return the text of an incomplete character at the end of the sequence."""
        return self._decode(b"", True)


class StreamDetokenizer:
    """For all other tokenizers: the library's stream, with a limit on the tokens held back."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: list[int], *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = []
        self._pending: list[int] = []
        self._start(prompt_token_ids[-NUM_CONTEXT_TOKENS:])

    def push(self, token_ids: list[int]) -> str:
        return "".join([self._step(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """Return the text of the tokens that are held back.

        If it changes text that was shown, as an invalid byte after other bytes does, it is that of
        these tokens alone.
        """
        pending, self._pending = self._pending, []
        before = self._decoded(self._context)
        after = self._decoded(self._context + pending)
        return after[len(before) :] if after.startswith(before) else self._decoded(pending)

    def _start(self, context: list[int]) -> None:
        """Prime the stream with whole characters: it would repeat a context that splits one."""
        shortest = max(0, len(context) - _NUM_UTF8_BYTES_MAX)
        lengths = range(len(context), shortest, -1)
        whole = (n for n in lengths if not self._decoded(context[:n]).endswith(_REPLACEMENT))
        num_whole = next(whole, len(context))
        self._context = context[:num_whole]
        self._pending = []
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=self._skip)
        for token_id in context[num_whole:]:
            self._step(token_id)

    def _step(self, token_id: int) -> str:
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # "Invalid prefix", without a type: text that was shown has changed
            return self._restart()
        if text is not None:
            self._context, self._pending = self._pending, []
            return str(text)
        return self._restart() if len(self._pending) > MAX_PENDING_TOKENS else ""

    def _restart(self) -> str:
        pending = self._pending
        text = self.flush()
        self._start(pending[-NUM_CONTEXT_TOKENS:])
        return text

    def _decoded(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skip))


Detokenizer = ByteDetokenizer | StreamDetokenizer
