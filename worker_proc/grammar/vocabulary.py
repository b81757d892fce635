"""The tokens of a model, in the form that llguidance requires for masks."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from worker_proc.grammar.errors import GrammarError

if TYPE_CHECKING:  # imported on use: most workers never receive a grammar
    import llguidance

FIRST_BYTE_ID = 3
"""The null model's id of byte 0; its ids 3 to 258 are the bytes 0 to 255."""


class Vocabulary(msgspec.Struct, frozen=True):
    """The sources of a model's tokens."""

    eos_token_ids: list[int]
    directory: str | None = None
    """The tokenizer's directory; None: the null model, whose tokens are bytes."""


class _ByteTokens:
    """The tokens of the null model, in llguidance's form."""

    bos_token_id = None
    special_token_ids = range(FIRST_BYTE_ID)

    def __init__(self, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.tokens = [b""] * FIRST_BYTE_ID + [bytes([byte]) for byte in range(256)]

    def __call__(self, text: bytes) -> list[int]:
        return [FIRST_BYTE_ID + byte for byte in text]


class Tokens(NamedTuple):
    """The trie of a model's tokens."""

    tokenizer: "llguidance.LLTokenizer"
    special_token_ids: list[int]
    """Added tokens that llguidance matches only by their ids."""


def load_tokens(vocabulary: Vocabulary) -> Tokens:
    """Build the trie of a model's tokens; GrammarError: EOS or tokenizer.json is missing."""
    import llguidance

    eos = vocabulary.eos_token_ids
    if not eos:
        raise GrammarError("the checkpoint names no EOS token, and a grammar ends with one")
    if vocabulary.directory is None:
        wrapper = llguidance.TokenizerWrapper(_ByteTokens(eos[0]))
        return Tokens(llguidance.LLTokenizer(wrapper, eos_token=eos), [])
    file = Path(vocabulary.directory) / "tokenizer.json"
    try:
        text = file.read_text(encoding="utf-8")
        tokenizer = json.loads(text)
        if tokenizer.get("padding") is not None or tokenizer.get("truncation") is not None:
            tokenizer["padding"] = tokenizer["truncation"] = None
            text = json.dumps(tokenizer)
        trie = llguidance.LLTokenizer(text, eos_token=eos)
        added = tokenizer.get("added_tokens") or []
        added_ids = [each["id"] for each in added]
        return Tokens(trie, [token_id for token_id in added_ids if trie.is_special_token(token_id)])
    except Exception as error:
        raise GrammarError(f"grammars need tokenizer.json: {error}") from error
