"""The tokens that end an output: of the tokenizer, and of the generation configuration."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec


class _Added(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that has special tokens; the rest is skipped."""

    added_tokens: list[_Added] = []


def end_tokens(directory: str, configured: object, vocab_size: int) -> list[int]:
    """Return the EOS tokens of a model; the first is the tokenizer's, if it has one.

    `directory` is the tokenizer's. `configured` is the value of `eos_token_id` in the configuration
    of the model: an id, a list of ids, or None.
    Many models that were trained further have the end of a message only in their tokenizer.
    """
    ids = configured if isinstance(configured, Sequence) else [configured]
    found = [token_id for token_id in ids if isinstance(token_id, int) and token_id >= 0]
    own = _tokenizer_eos(Path(directory))
    if own is not None and own < vocab_size:
        found = [own, *(token_id for token_id in found if token_id != own)]
    return found


def _tokenizer_eos(directory: Path) -> int | None:
    """Return the id of the `eos_token` in tokenizer_config.json.

    None: there is none, or it is not an added token.
    """
    config = _object(directory / "tokenizer_config.json")
    name = config.get("eos_token")
    if isinstance(name, dict):
        name = name.get("content")
    if not isinstance(name, str):
        return None
    listed = config.get("added_tokens_decoder")
    for key, token in (listed if isinstance(listed, dict) else {}).items():
        is_eos = isinstance(token, dict) and token.get("content") == name
        if is_eos and re.fullmatch(r"[0-9]{1,9}", str(key)):
            return int(key)
    try:
        file = msgspec.json.decode((directory / "tokenizer.json").read_bytes(), type=_TokenizerFile)
    except (OSError, msgspec.MsgspecError):  # the API reports what is wrong with a tokenizer
        return None
    ids = (token.id for token in file.added_tokens if token.content == name and token.id >= 0)
    return next(ids, None)


def _object(path: Path) -> dict[str, Any]:
    try:
        content = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError):
        return {}
    return content if isinstance(content, dict) else {}
