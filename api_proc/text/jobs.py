"""Text processing jobs as values, done in the server or in a process of the pool.

A job crosses the pipe as JSON, which has integers of any length, and its result as msgpack.
"""

from typing import Any

import msgspec

from api_proc.text.tokenizer import EncodeOptions

LENGTH_BYTES = 4
"""Size of the length before each frame between the API and a helper."""
MAX_MEMORY_BYTES = 1 * 2**30
"""Memory that a job may use in a helper, in addition to the tokenizer."""


class Chat(msgspec.Struct, frozen=True):
    """The input of a chat template."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    extra: dict[str, Any] | None
    tools: list[dict[str, Any]] | None
    continue_final_message: bool


class Render(msgspec.Struct, frozen=True, tag=True):
    """Return the text of a chat's prompt as `Pieces`."""

    chat: Chat


class EncodeChat(msgspec.Struct, frozen=True, tag=True):
    """Return the ids of a chat's prompt."""

    chat: Chat
    options: EncodeOptions


class Encode(msgspec.Struct, frozen=True, tag=True):
    """Return the ids of texts, each given as the pieces of a `LiteralText`."""

    texts: list[list[str]]
    options: EncodeOptions
    is_literal: bool = False
    """True if special tokens in the pieces also stay text."""


class EncodePairs(msgspec.Struct, frozen=True, tag=True):
    """Return the ids of each text pair, and a list with `second_text_start` of its pooling."""

    pairs: list[tuple[str, str]]
    options: EncodeOptions


class Decode(msgspec.Struct, frozen=True, tag=True):
    """Return the text of ids, including special tokens, as one of `Pieces`."""

    token_ids: list[int]


Job = Render | EncodeChat | Encode | EncodePairs | Decode


class Pieces(msgspec.Struct, frozen=True, tag=True):
    """A `LiteralText`."""

    pieces: list[str]


class TokenIdLists(msgspec.Struct, frozen=True, tag=True):
    """The ids of each text."""

    lists: list[list[int]]


class PackedTokenIds(msgspec.Struct, frozen=True, tag=True):
    """The ids of each text, in four bytes per id."""

    lists: list[bytes]


class TooLong(msgspec.Struct, frozen=True, tag=True):
    """A text has more tokens than allowed."""

    num_tokens: int


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """The template rejects the chat."""

    message: str


class OutOfMemory(msgspec.Struct, frozen=True, tag=True):
    """The job needs more memory than a process of the pool may use."""


Result = Pieces | TokenIdLists
"""Results of a job in the process that does it; errors are raised."""
Answer = Pieces | PackedTokenIds | TooLong | Rejected | OutOfMemory
"""Answers of a process of the pool."""


class TextLimitReached(Exception):
    """A job needs more time or memory than allowed; the error text is for the client."""


class TextPoolUnavailable(Exception):
    """The pool cannot do a job now."""
