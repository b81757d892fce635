"""Text to token ids and back, with the tokenizers library and without transformers.

`HfTokenizer` loads a checkpoint's tokenizer.json; `ByteTokenizer` serves models without one.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from api_proc.text.checkpoint import special_tokens
from api_proc.text.detokenizer import ByteDetokenizer, Detokenizer, StreamDetokenizer
from api_proc.text.literal import LiteralText, SpecialTokens
from api_proc.text.shared_ids import shared_ids
from protocol.config import ConfigError
from protocol.sampling import MAX_SPACE_TOKENS

FIRST_BYTE_ID = 3
"""Ids 3 to 258 of the byte tokenizer are the bytes 0 to 255."""
_BATCH_PIECES = 256
_SPELLINGS_OF_SPACE = " \t\n\v\f\rĠĉĊċČč▁<0x9ABCD2>"
"""Characters of tokens that may be white space: as text, as bytes, or with marks for spaces."""
_MIN_SHARED_IDS = 1024


class EncodeOptions(NamedTuple):
    """Options for converting a text into token ids."""

    add_special_tokens: bool
    max_tokens: int
    keep_last: int | None = None
    """Keep only this number of ids at the end."""
    num_outputs: int = 1
    """Minimum number of tokens that must fit into the model's context after the ids."""


class TooManyTokens(Exception):
    """A text has more tokens than `max_tokens`."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.num_tokens = num_tokens


class _TokenTable(dict[int, bytes]):
    """The bytes of each token by id, computed on first use."""

    def __init__(self, compute: Callable[[int], bytes]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, token_id: int) -> bytes:
        value = self[token_id] = self._compute(token_id)
        return value


class HfTokenizer:
    """A checkpoint's tokenizer."""

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        """Load `directory`/tokenizer.json; `config` is the content of tokenizer_config.json."""
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
        # A text of n characters has at least n / longest_token_chars tokens.
        vocabulary = self._tokenizer.get_vocab()
        self.longest_token_chars = max(map(len, vocabulary), default=1)
        self._special_ids = _special_ids(self._tokenizer, self.special_tokens)
        names = map(self._tokenizer.id_to_token, self._special_ids)
        self.special = SpecialTokens(name for name in names if name)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added_ids = {token.content: token_id for token_id, token in added.items()}
        self._hidden_without: dict[frozenset[str], frozenset[int]] = {}
        decoder = json.loads(source).get("decoder") or {}
        self._is_byte_level = decoder.get("type") == "ByteLevel"
        self._byte_by_character = _byte_level_alphabet()
        self._table = _TokenTable(
            self._byte_level_bytes if self._is_byte_level else self._piece_bytes
        )
        spelled = (i for token, i in vocabulary.items() if not token.strip(_SPELLINGS_OF_SPACE))
        self.space_token_ids = _space_ids(spelled, self._table)
        """Ids of white-space tokens."""

    def encode(self, text: str, options: EncodeOptions) -> list[int]:
        """Return the ids, or raise `TooManyTokens`."""
        if isinstance(text, LiteralText) and len(text.pieces) > 1:
            return self._encode_pieces(text.pieces, options)
        if options.num_outputs == 0 and options.keep_last is not None:
            return _compact(self._encode_last(text, options))
        # Among the library's methods, this one releases the GIL.
        [encoding] = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=options.add_special_tokens
        )
        if options.keep_last is not None and len(encoding) > options.keep_last:
            encoding.truncate(options.keep_last, direction="left")
        if len(encoding) > options.max_tokens:
            raise TooManyTokens(len(encoding))
        return _compact(encoding.ids)

    def _encode_last(self, text: str, options: EncodeOptions) -> list[int]:
        """Return the ids of the end of a text: `keep_last` ids including the surrounding ones."""
        assert options.keep_last is not None
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        num_kept = options.keep_last
        if options.add_special_tokens:
            num_kept = max(num_kept - self._tokenizer.num_special_tokens_to_add(False), 1)
        if len(encoding) > num_kept:
            encoding.truncate(num_kept, direction="left")
        if options.add_special_tokens:
            encoding = self._tokenizer.post_process(encoding, None, True)
        if len(encoding) > options.max_tokens:
            raise TooManyTokens(len(encoding))
        return list(encoding.ids)

    def encode_pair(self, first: str, second: str, options: EncodeOptions) -> tuple[list[int], int]:
        """Return the ids of a pair of texts, and where those of type 1 begin, or 0.

        With `keep_last` the ends of the texts are cut, that of the longer one first.
        """
        parts = self._tokenizer.encode_batch_fast([first, second], add_special_tokens=False)
        one, two = parts
        if options.keep_last is not None:
            num_added = 0
            if options.add_special_tokens:
                num_added = self._tokenizer.num_special_tokens_to_add(True)
            room = max(options.keep_last - num_added, 2)
            num_first = min(len(one), max(room - len(two), room - room // 2))
            one.truncate(num_first)
            two.truncate(min(len(two), room - num_first))
        pair = self._tokenizer.post_process(one, two, options.add_special_tokens)
        if len(pair) > options.max_tokens:
            raise TooManyTokens(len(pair))
        types = pair.type_ids
        return _compact(pair.ids), types.index(1) if 1 in types else 0

    def _encode_pieces(self, pieces: list[str], options: EncodeOptions) -> list[int]:
        if options.keep_last is None and len(pieces) > options.max_tokens:
            raise TooManyTokens(len(pieces))  # each has at least one token
        token_ids: list[int] = []
        for start in range(0, len(pieces), _BATCH_PIECES):
            batch = pieces[start : start + _BATCH_PIECES]
            for encoding in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                token_ids += encoding.ids
        if options.add_special_tokens:
            before, after = self._surrounding_ids(pieces[0])
            token_ids = before + token_ids + after
        if options.keep_last is not None:
            token_ids = token_ids[-options.keep_last :]
        if len(token_ids) > options.max_tokens:
            raise TooManyTokens(len(token_ids))
        return _compact(token_ids)

    def _surrounding_ids(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids that the tokenizer adds before and after a text."""
        plain = self._tokenizer.encode(text, add_special_tokens=False)
        whole = self._tokenizer.encode(text, add_special_tokens=True)
        is_added = whole.special_tokens_mask
        num_before = is_added.index(0) if 0 in is_added else len(is_added) - len(plain)
        return whole.ids[:num_before], whole.ids[num_before + len(plain) :]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, which need not be valid UTF-8."""
        return self._table[token_id]

    def added_token_id(self, text: str) -> int | None:
        """Return the id of a token that is not part of the trained vocabulary."""
        return self._added_ids.get(text)

    def detokenizer(
        self,
        prompt_token_ids: list[int],
        *,
        skip_special_tokens: bool,
        shown: frozenset[str] = frozenset(),
    ) -> Detokenizer:
        """Return a decoder for the tokens that follow a prompt; it never hides those in `shown`."""
        if self._is_byte_level:
            hidden = self._hidden(shown) if skip_special_tokens else frozenset[int]()
            return ByteDetokenizer(self._table, prompt_token_ids, hidden)
        # The library can hide all special tokens or none.
        skip = skip_special_tokens and self._hidden(shown) == self._special_ids
        return StreamDetokenizer(self._tokenizer, prompt_token_ids, skip_special_tokens=skip)

    def _hidden(self, shown: frozenset[str]) -> frozenset[int]:
        """Return the special tokens except those that a parser must see."""
        if not shown:
            return self._special_ids
        known = self._hidden_without
        if shown not in known:  # one entry, as a server has one format
            known[shown] = self._special_ids - {self._added_ids.get(text) for text in shown}
        return known[shown]

    def _byte_level_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a byte-level token, which spells each as a printable character."""
        token = self._tokenizer.id_to_token(token_id) or ""
        try:
            return bytes([self._byte_by_character[character] for character in token])
        except KeyError:  # an added token is spelled as text
            return token.encode("utf-8")

    def _piece_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a SentencePiece-like token; used for logprobs only."""
        token = self._tokenizer.id_to_token(token_id) or ""
        if len(token) == len("<0x00>") and token.startswith("<0x"):
            return bytes.fromhex(token[3:5])
        return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode("utf-8")


class ByteTokenizer:
    """For models without a checkpoint: one token per UTF-8 byte; other ids become `<id>`."""

    longest_token_chars = 1

    def __init__(self) -> None:
        self.special_tokens: dict[str, str] = {}
        self.special = SpecialTokens([])
        self._table = _TokenTable(_byte_of_id)
        self.space_token_ids = _space_ids(range(FIRST_BYTE_ID, FIRST_BYTE_ID + 256), self._table)

    def encode(self, text: str, options: EncodeOptions) -> list[int]:
        data = text.encode("utf-8")
        if options.keep_last is not None:
            data = data[-options.keep_last :]
        if len(data) > options.max_tokens:
            raise TooManyTokens(len(data))
        return [FIRST_BYTE_ID + byte for byte in data]

    def encode_pair(self, first: str, second: str, options: EncodeOptions) -> tuple[list[int], int]:
        """Return the ids of both texts, which have the same type."""
        return self.encode(first + second, options), 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return b"".join([self._table[i] for i in token_ids]).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._table[token_id]

    def added_token_id(self, text: str) -> None:
        """There are no such tokens."""

    def detokenizer(
        self,
        prompt_token_ids: list[int],
        *,
        skip_special_tokens: bool,
        shown: frozenset[str] = frozenset(),
    ) -> Detokenizer:
        return ByteDetokenizer(self._table, prompt_token_ids, frozenset())


TextTokenizer = HfTokenizer | ByteTokenizer


def _compact(token_ids: list[int]) -> list[int]:
    return shared_ids(token_ids) if len(token_ids) >= _MIN_SHARED_IDS else token_ids


def _byte_of_id(token_id: int) -> bytes:
    byte = token_id - FIRST_BYTE_ID
    return bytes((byte,)) if 0 <= byte < 256 else f"<{token_id}>".encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character: printable Latin-1 is itself, the rest starts at U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


def _space_ids(token_ids: Iterable[int], table: _TokenTable) -> list[int]:
    """Return the ids of tokens that consist of ASCII white space only."""
    found = sorted(i for i in token_ids if table[i] and not table[i].strip())
    return found[:MAX_SPACE_TOKENS]


def _special_ids(tokenizer: Tokenizer, named: dict[str, str]) -> frozenset[int]:
    added = tokenizer.get_added_tokens_decoder()
    ids = {token_id for token_id, token in added.items() if token.special}
    by_name = [tokenizer.token_to_id(token) for token in named.values()]
    return frozenset(ids | {int(token_id) for token_id in by_name if token_id is not None})
