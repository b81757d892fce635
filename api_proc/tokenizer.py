"""Text to token ids and back, without transformers: tokenizer.json by its own library.

`HfTokenizer` reads a checkpoint's directory; `ByteTokenizer` stands in where there is none.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from api_proc.checkpoint import special_tokens
from api_proc.detokenizer import ByteDetokenizer, Detokenizer, StreamDetokenizer
from protocol.config import ConfigError

FIRST_BYTE_ID = 3
"""The byte tokenizer's ids 3 to 258 are the bytes 0 to 255."""

_BYTE_FALLBACK_LENGTH = len("<0x00>")


class TooManyTokens(Exception):
    """A text has more tokens than asked for."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.num_tokens = num_tokens


class TextTokenizer(Protocol):
    """What the API needs of any tokenizer. All methods block."""

    special_tokens: dict[str, str]
    """Named special tokens, for chat templates."""
    longest_token_chars: int
    """No text of more than this many characters per token can fit."""

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        max_tokens: int,
        keep_last: int | None = None,
    ) -> list[int]:
        """Return the ids of `text`, or of its end where `keep_last` says how many to keep.

        Raises:
            TooManyTokens: there are more than `max_tokens`.
        """

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return the text of a whole sequence."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; not necessarily UTF-8."""

    def detokenizer(self, prompt_token_ids: list[int], *, skip_special_tokens: bool) -> Detokenizer:
        """Start to decode what follows a prompt."""


class HfTokenizer:
    """A checkpoint's tokenizer."""

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        """Load `directory`/tokenizer.json.

        Args:
            config: content of tokenizer_config.json.

        Raises:
            ConfigError: there is none, or it cannot be read.
        """
        file = directory / "tokenizer.json"
        try:
            source = file.read_text(encoding="utf-8")
            self._tokenizer = Tokenizer.from_str(source)
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"cannot load the tokenizer {file}: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
        self.special_tokens = special_tokens(config)
        vocabulary = self._tokenizer.get_vocab()
        self.longest_token_chars = max(map(len, vocabulary), default=1)
        self._special_ids = _special_ids(self._tokenizer, self.special_tokens)
        decoder = json.loads(source).get("decoder") or {}
        self._is_byte_level = decoder.get("type") == "ByteLevel"
        self._table: Mapping[int, bytes] = (
            _ByteLevelTable(self._tokenizer)
            if self._is_byte_level
            else _PieceTable(self._tokenizer)
        )

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        max_tokens: int,
        keep_last: int | None = None,
    ) -> list[int]:
        # Of the library's methods this one lets other threads run meanwhile.
        encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        encoding = encodings[0]
        if keep_last is not None and len(encoding) > keep_last:
            encoding.truncate(keep_last, direction="left")
        if len(encoding) > max_tokens:
            raise TooManyTokens(len(encoding))
        return list(encoding.ids)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        return self._table[token_id]

    def detokenizer(self, prompt_token_ids: list[int], *, skip_special_tokens: bool) -> Detokenizer:
        if self._is_byte_level:
            hidden = self._special_ids if skip_special_tokens else frozenset[int]()
            return ByteDetokenizer(self._table, prompt_token_ids, hidden)
        return StreamDetokenizer(
            self._tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens
        )


class ByteTokenizer:
    """For a model without checkpoint: one token per byte of UTF-8.

    Ids that are no byte are shown as `<id>`, so that every output of the null worker is visible.
    """

    def __init__(self) -> None:
        self.special_tokens: dict[str, str] = {}
        self.longest_token_chars = 1
        self._table = _ByteIdTable()

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        max_tokens: int,
        keep_last: int | None = None,
    ) -> list[int]:
        data = text.encode("utf-8")
        if keep_last is not None:
            data = data[-keep_last:]
        if len(data) > max_tokens:
            raise TooManyTokens(len(data))
        return [FIRST_BYTE_ID + byte for byte in data]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return b"".join([self._table[i] for i in token_ids]).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._table[token_id]

    def detokenizer(self, prompt_token_ids: list[int], *, skip_special_tokens: bool) -> Detokenizer:
        return ByteDetokenizer(self._table, prompt_token_ids, frozenset())


class _ByteIdTable(dict[int, bytes]):
    """Bytes by id of the byte tokenizer."""

    def __missing__(self, token_id: int) -> bytes:
        byte = token_id - FIRST_BYTE_ID
        value = bytes((byte,)) if 0 <= byte < 256 else f"<{token_id}>".encode()
        self[token_id] = value
        return value


class _ByteLevelTable(dict[int, bytes]):
    """Bytes by id of a byte-level vocabulary, which spells each byte as a printable character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._bytes_by_character = _byte_level_alphabet()

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id) or ""
        try:
            value = bytes([self._bytes_by_character[character] for character in token])
        except KeyError:  # an added token, spelled as it is
            value = token.encode("utf-8")
        self[token_id] = value
        return value


class _PieceTable(dict[int, bytes]):
    """Bytes by id of a SentencePiece-like vocabulary; used for logprobs only."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id) or ""
        if len(token) == _BYTE_FALLBACK_LENGTH and token.startswith("<0x"):
            value = bytes.fromhex(token[3:5])
        else:
            value = token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode("utf-8")
        self[token_id] = value
        return value


def _byte_level_alphabet() -> dict[str, int]:
    """Byte by character: printable Latin-1 stands for itself, the rest follows from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(256 + i): byte for i, byte in enumerate(others)}
    return alphabet


def _special_ids(tokenizer: Tokenizer, named: dict[str, str]) -> frozenset[int]:
    added = tokenizer.get_added_tokens_decoder()
    ids = {token_id for token_id, token in added.items() if token.special}
    ids |= {token_id for token in named.values() if (token_id := _id(tokenizer, token)) is not None}
    return frozenset(ids)


def _id(tokenizer: Tokenizer, token: str) -> int | None:
    token_id = tokenizer.token_to_id(token)
    return None if token_id is None else int(token_id)
