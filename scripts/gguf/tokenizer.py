"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json.

A file has the tokens with their types, and merges or scores; how text is normalized and split
follows from the name of the tokenizer's model, from `tokenizer.ggml.pre` and from the architecture.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

from scripts.gguf.splits import BYTE_LEVEL, Split
from worker_proc.errors import CheckpointError, UnsupportedModel
from worker_proc.gguf.model_header import Header

TOKENS = "tokenizer.ggml.tokens"
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
"""Types of tokens; others are plain text, or bytes."""
_WITH_MERGES = "gemma4"
"""Sentencepiece's tokens with merges, where other files have scores."""
_SENTENCEPIECE = ("llama", _WITH_MERGES)
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}
"""Those of files that state none, as in llama.cpp."""
_SPACE = "\u2581"
"""How sentencepiece writes a space."""
_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens of tokenizer_config.json, by their names in the file."""
_ENDS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"}
    | {"<|end_of_text|>", "<|return|>", "<|call|>", "<EOT>", "<turn|>", "<|tool_response>"}
    | {"<eos>", "</s>", "[EOS]", "[EOT]", "_<EOT>", "[e~[", "<end_of_utterance>"}
)
"""Control tokens that end an answer, which files need not state."""
_END_OF_MESSAGE, _ENDS_OF_ANSWERS = "<|end|>", ("<|return|>", "<|call|>")
"""Tokens of gpt-oss, whose answers have several messages; <|end|> ends answers of other models."""
_KEEP_SPACE_AFTER = frozenset({"<s>", "<unk>", "<|endoftext|>"})
"""Added tokens of Phi-3 with sentencepiece that leave the spaces after them; others take these."""
_MAX_TOKEN_CHARACTERS = 512
"""The length of sentencepiece's longest token: each is split at every place to find its merges."""


class TokenizerFiles:
    """Writes the files of a tokenizer into a directory."""

    def __init__(self, header: Header) -> None:
        """Check the tokens and their types; raises CheckpointError."""
        self._header = header
        self._tokens: list[str] = self._texts(TOKENS)
        self._types: list[int] = [1] * len(self._tokens)
        if self._get("token_type", []):
            self._types = self._numbers("token_type", int)
        self._model = self._get("model", "")

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def check_known(self) -> None:
        """Raise UnsupportedModel for a tokenizer of another kind, or with an unknown pattern."""
        if self._model not in ("gpt2", *_SENTENCEPIECE):
            raise UnsupportedModel(
                f"{self._header.path}: tokenizer.ggml.model is {str(self._model)[:100]!r};"
                f" supported: gpt2, {' and '.join(_SENTENCEPIECE)}; --tokenizer names a directory"
                " with a tokenizer.json"
            )
        if self._model == "gpt2":
            self._known_split()

    def write(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json; UnsupportedModel: it is not known."""
        self.check_known()
        self._check_differ()
        tokenizer = self._byte_level() if self._model == "gpt2" else self._sentencepiece()
        self._add_tokens(tokenizer)
        self._add_template(tokenizer)
        tokenizer.save(str(directory / "tokenizer.json"))
        text = json.dumps(self._config(), indent=2, ensure_ascii=False)
        (directory / "tokenizer_config.json").write_text(f"{text}\n")

    def end_ids(self) -> list[int]:
        """Return the ids of tokens that end an answer."""
        stated = [self._id(name) for name in ("eos", "eot", "eom")]
        known = {
            token: number
            for number, (token, type) in enumerate(zip(self._tokens, self._types, strict=True))
            if type == _CONTROL and token in _ENDS
        }
        if all(token in known for token in _ENDS_OF_ANSWERS):
            known.pop(_END_OF_MESSAGE, None)
        found = (*stated, *known.values())
        return list(dict.fromkeys(number for number in found if number is not None))

    def suppressed_ids(self) -> list[int]:
        """Return the ids of tokens that are never sampled, also more than a request may have."""
        numbers = self._get("suppress_tokens", [])
        if not isinstance(numbers, list) or not all(
            type(one) is int and 0 <= one < len(self._tokens) for one in numbers
        ):
            raise self._error("suppress_tokens", f"must be a list of ids below {len(self._tokens)}")
        return list(numbers)

    def _check_differ(self) -> None:
        """Raise CheckpointError for two tokens with one text, of which only one would be found."""
        first: dict[str, int] = {}
        for number, (token, type) in enumerate(zip(self._tokens, self._types, strict=True)):
            if token and type != _UNUSED and first.setdefault(token, number) != number:
                raise self._error(
                    f"tokens[{number}]", f"is {token[:100]!r}, and so is tokens[{first[token]}]"
                )

    def _byte_level(self) -> Tokenizer:
        split = self._known_split()
        tokenizer = self._tokenizer(self._stated_merges(), ignore_merges=split.takes_whole_words)
        if split.composes:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = split.pre_tokenizer()
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        return tokenizer

    def _stated_merges(self) -> list[tuple[str, str]]:
        merges = []
        for merge in self._texts("tokenizer.ggml.merges"):
            left, _, right = merge.partition(" ")
            merges.append((left, right))
        return merges

    def _split(self) -> Split | None:
        """Return how a byte-level tokenizer splits text; None: it is not known."""
        name = self._get("pre", "default")
        return BYTE_LEVEL.get(name) if isinstance(name, str) else None

    def _known_split(self) -> Split:
        """Return how a byte-level tokenizer splits text; UnsupportedModel: it is not known."""
        split = self._split()
        if split is None:
            name = self._get("pre", "default")
            raise UnsupportedModel(
                f"{self._header.path}: tokenizer.ggml.pre is {str(name)[:100]!r}, which is not"
                " known; --tokenizer names a directory with a tokenizer.json"
            )
        return split

    def _sentencepiece(self) -> Tokenizer:
        is_gemma = self._header.architecture.startswith("gemma")
        if is_gemma:  # runs of spaces are stored as text
            self._tokens = [
                _SPACE * len(token) if token and not token.strip(" ") else token
                for token in self._tokens
            ]
        unknown = self._id("unknown")
        has_merges = self._model == _WITH_MERGES
        tokenizer = self._tokenizer(
            self._stated_merges() if has_merges else self._merges_by_score(is_gemma=is_gemma),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else self._tokens[unknown],
        )
        has_prefix = bool(self._get("add_space_prefix", not is_gemma))
        spaces = normalizers.Replace(" ", _SPACE)
        prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
        tokenizer.normalizer = normalizers.Sequence([*prefix, spaces]) if prefix else spaces
        last = [decoders.Strip(" ", 1, 0)] if has_prefix else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
        )
        return tokenizer

    def _tokenizer(self, merges: Sequence[tuple[str, str]], **options: Any) -> Tokenizer:
        vocabulary = {
            token: number
            for number, (token, type) in enumerate(zip(self._tokens, self._types, strict=True))
            if type != _UNUSED
        }
        try:
            return Tokenizer(BPE(vocabulary, merges, **options))
        except Exception as error:  # the library raises plain Exception
            raise self._error("merges", f"are not those of its tokens: {error}") from error

    def _merges_by_score(self, *, is_gemma: bool) -> list[tuple[str, str]]:
        """Return the merges that scores stand for, the best first.

        Gemma's tokens are in the order of their merges, and their scores are not.
        """
        ranks = [] if is_gemma else self._numbers("scores", int | float)
        ids = {token: number for number, token in enumerate(self._tokens)}
        found: list[tuple[float, int, int, tuple[str, str]]] = []
        for number, (token, type) in enumerate(zip(self._tokens, self._types, strict=True)):
            if type in (_UNKNOWN, _CONTROL, _UNUSED):
                continue
            if len(token) > _MAX_TOKEN_CHARACTERS:
                raise self._error(
                    f"tokens[{number}]",
                    f"has {len(token)} characters, and at most {_MAX_TOKEN_CHARACTERS} are read",
                )
            rank = number if is_gemma else -ranks[number]
            for place in range(1, len(token)):
                left, right = ids.get(token[:place]), ids.get(token[place:])
                if left is not None and right is not None:
                    found.append((rank, left, right, (token[:place], token[place:])))
        return [pair for *_, pair in sorted(found)]

    def _add_tokens(self, tokenizer: Tokenizer) -> None:
        """Add the tokens that are found in text before it is split."""
        strips = self._header.architecture == "phi3" and self._model == "llama"
        for type, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
            added = [
                AddedToken(
                    token,
                    special=is_special,
                    normalized=False,
                    rstrip=strips and token not in _KEEP_SPACE_AFTER,
                )
                for token, own in zip(self._tokens, self._types, strict=True)
                if own == type and token and token.strip(_SPACE)
            ]
            (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(added)

    def _add_template(self, tokenizer: Tokenizer) -> None:
        """Let the tokenizer add the tokens that begin and end texts."""
        begin = self._named("bos") if self._adds("bos") else None
        end = self._named("eos") if self._adds("eos") else None
        if begin is None and end is None:
            return
        before = [f"{begin[0]}:0"] if begin else []
        after = [f"{end[0]}:0"] if end else []
        second = [text.replace(":0", ":1") for text in (*before, "$B:0", *after)]
        template = processors.TemplateProcessing(
            single=[*before, "$A:0", *after],
            pair=[*before, "$A:0", *after, *second],
            special_tokens=[named for named in (begin, end) if named is not None],
        )
        earlier = tokenizer.post_processor
        tokenizer.post_processor = (
            template if earlier is None else processors.Sequence([earlier, template])
        )

    def _adds(self, name: str) -> bool:
        """Return whether a text gets a special token; llama.cpp has the same defaults.

        The first files of Gemma-4 state that texts begin with none, and its models need one.
        """
        if name == "bos" and self._model == _WITH_MERGES:
            return True
        split = self._split()
        has_begin = self._model in _SENTENCEPIECE or (split is not None and split.has_begin)
        return bool(self._get(f"add_{name}_token", name == "bos" and has_begin))

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        config |= {f"add_{name}_token": self._adds(name) for name in ("bos", "eos")}
        for name, stored in _NAMES.items():
            if (named := self._named(stored)) is not None:
                config[f"{name}_token"] = named[0]
        metadata = self._header.metadata
        templates = {
            key.removeprefix("tokenizer.chat_template").lstrip(".") or "default": value
            for key, value in metadata.items()
            if key.startswith("tokenizer.chat_template") and isinstance(value, str)
        }
        if list(templates) == ["default"]:
            config["chat_template"] = templates["default"]
        elif templates:
            config["chat_template"] = [
                {"name": name, "template": template} for name, template in templates.items()
            ]
        return config

    def _named(self, name: str) -> tuple[str, int] | None:
        number = self._id(name)
        return None if number is None else (self._tokens[number], number)

    def _id(self, name: str) -> int | None:
        """Return the id of a special token, within the vocabulary."""
        key = f"{name}_token_id"
        number = self._get(key, None)
        if number is None:
            usual = _SENTENCEPIECE_IDS.get(name) if self._model == "llama" else None
            return usual if usual is not None and usual < len(self._tokens) else None
        if type(number) is not int or not 0 <= number < len(self._tokens):
            raise self._error(key, f"is {number!r}, and must be a token of {len(self._tokens)}")
        return number

    def _get(self, name: str, default: Any) -> Any:
        metadata: Mapping[str, Any] = self._header.metadata
        return metadata.get(f"tokenizer.ggml.{name}", default)

    def _texts(self, key: str) -> list[str]:
        value = self._header.metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self._error(key.rpartition(".")[2], "must be a list of texts")
        return value

    def _numbers(self, name: str, kind: type | UnionType) -> list[Any]:
        """Return a number for each token."""
        value = self._get(name, None)
        count = len(self._tokens)
        if not isinstance(value, list) or len(value) != count:
            raise self._error(name, f"must have a number for each of {count} tokens")
        if not all(isinstance(one, kind) and not isinstance(one, bool) for one in value):
            raise self._error(name, "has values of another type than numbers")
        return value

    def _error(self, name: str, text: str) -> CheckpointError:
        return CheckpointError(f"{self._header.path}: tokenizer.ggml.{name} {text}")
