"""Compiles grammars for the tokens of one model, and caches the compiled ones."""

import json
import re
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from protocol.core_worker import CompileGrammar, GrammarCompiled
from protocol.message import MAX_TEXT
from protocol.sampling import JSON_WHITESPACE, Grammar, GrammarKind

if TYPE_CHECKING:  # imported on use: most workers never receive a grammar
    import llguidance

MAX_CACHE_BYTES = 256 * 2**20
FIRST_BYTE_ID = 3
"""For the null model, whose ids 3 to 258 are the bytes 0 to 255."""

_INITIAL_LEXER_FUEL = 1_000_000
_STEP_LEXER_FUEL = 200_000
_STEP_MAX_ITEMS = 50_000
_FOLLOWED_TOKENS = 4
_BYTES_PER_CHARACTER = 32
_MIN_BYTES = 64 * 1024
_SCHEMA_ERROR = "failed to compile JSON schema: "
_REGEX_REPORT = re.compile(
    r'(?:invalid regex ".*" \(in [^)]*\): )?regex parse error:\n {4}(?P<regex>.*)\n'
    r" {4}(?P<before> *)\^.*\nerror: (?P<reason>.*)"
)
"""Matches the regular expression, the mark below the faulty place, and the reason."""
_SHOWN_CHARS = 40
"""Number of characters of a regular expression shown on each side of that place."""
_DETAILS_HIDDEN = "\n<non-verbose/>"
"""Replaces the state of the parser, which `verbose_errors` would show."""
_SOURCE_LINES = re.compile(r"\n +\d+ \| .*", re.DOTALL)
_UNIMPLEMENTED = "Unimplemented keys"
_LENIENT = '; "x-guidance": {"lenient": true} in the schema leaves them out'
_MARKED_RULE = re.compile(r"^[?!]{1,2}(?=[a-z_]\w*\s*:)", re.MULTILINE)
"""Matches what Lark allows before a rule's name; it shapes a tree and changes no language."""


class GrammarError(ValueError):
    """A grammar that cannot be compiled; the message is for its author."""


class Vocabulary(msgspec.Struct, frozen=True):
    """The sources of a model's tokens."""

    vocab_size: int
    eos_token_ids: list[int]
    directory: str | None = None
    """The checkpoint's directory; None: the null model, whose tokens are bytes."""


class Definition(msgspec.Struct, frozen=True):
    """A grammar in llguidance's own form, and the memory that compiling it took."""

    text: str
    num_bytes: int = 0


def define(grammar: Grammar) -> str:
    """Translate a grammar to llguidance's own form; raise GrammarError if that is not possible."""
    import llguidance
    from llguidance.gbnf_to_lark import any_to_lark

    matcher, source = llguidance.LLMatcher, grammar.source
    try:
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            return matcher.grammar_from_json_schema(
                source, defaults={"whitespace_pattern": JSON_WHITESPACE}
            )
        if grammar.kind is GrammarKind.REGEX:
            return matcher.grammar_from_regex(source)
        if grammar.kind is GrammarKind.EBNF:
            source = any_to_lark(_MARKED_RULE.sub("", source))
        return matcher.grammar_from_lark(source)
    except Exception as error:  # the translation from GBNF raises plain Exceptions
        raise GrammarError(f"{error}"[:MAX_TEXT]) from error


def in_words(error: str) -> str:
    """Explain llguidance's terse errors, and remove source lines that the request does not have.

    A schema or a regular expression may be part of a grammar of the server, for example after
    reasoning.
    """
    if error.startswith("NoExtensionBias"):
        return "nothing matches the grammar: it is empty, or refers to itself without an end"
    report = _REGEX_REPORT.search(error)
    if report is not None:
        return _in_one_line(report["regex"], len(report["before"]), report["reason"])
    error = error.removesuffix(_DETAILS_HIDDEN)
    cause = error.partition(_SCHEMA_ERROR)[2]
    words = _SOURCE_LINES.sub("", cause).rstrip() if cause else error.rstrip()
    return words + _LENIENT if words.startswith(_UNIMPLEMENTED) else words


def _in_one_line(regex: str, place: int, reason: str) -> str:
    """Describe an error in a regular expression, showing the part around it."""
    first, last = max(0, place - _SHOWN_CHARS), place + _SHOWN_CHARS
    shown = f"{'…' * (first > 0)}{regex[first:last]}{'…' * (last < len(regex))}"
    return f'invalid regex "{shown}", character {place + 1}: {reason}'


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


class CompiledGrammar(NamedTuple):
    """A grammar that is ready for use."""

    matcher: "llguidance.LLMatcher"
    """At the beginning of the grammar."""
    num_bytes: int
    """Estimated."""


def load_tokens(vocabulary: Vocabulary) -> Tokens:
    """Build the trie of a model's tokens; raise GrammarError naming what the checkpoint lacks."""
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
        raise GrammarError(f"grammars need the checkpoint's tokenizer.json: {error}") from error


class GrammarCompiler:
    """Compiled grammars, from which the states of requests are cloned; thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._lock = threading.Lock()
        self._tokens: Tokens | None = None
        self._matchers: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        """The most recently used one is last."""
        self._num_bytes = 0

    def load(self) -> None:
        """Build the tokens now, so that the first grammar does not wait for them."""
        if self._tokens is None:
            self._tokens = load_tokens(self.vocabulary)

    @property
    def tokenizer(self) -> "llguidance.LLTokenizer":
        """The trie of the tokens, which must be loaded."""
        assert self._tokens is not None
        return self._tokens.tokenizer

    @property
    def num_tokens(self) -> int:
        """Number of tokens that have bits in a mask; the tokens must be loaded."""
        return self.tokenizer.vocab_size

    @property
    def special_token_ids(self) -> list[int]:
        """The added tokens that only their ids match; the tokens must be loaded."""
        assert self._tokens is not None
        return self._tokens.special_token_ids

    def has(self, grammar: Grammar) -> bool:
        """Return whether a grammar is compiled; it then counts as used."""
        with self._lock:
            if grammar not in self._matchers:
                return False
            self._matchers.move_to_end(grammar)
            return True

    def compile(self, grammar: Grammar, definition: Definition | None = None) -> None:
        """Compile a grammar, unless it is compiled already; raise GrammarError on failure."""
        if self.has(grammar):
            return
        import llguidance

        self.load()
        definition = definition or Definition(define(grammar))
        limits = llguidance.LLParserLimits(
            initial_lexer_fuel=_INITIAL_LEXER_FUEL,
            step_lexer_fuel=_STEP_LEXER_FUEL,
            step_max_items=_STEP_MAX_ITEMS,
            verbose_errors=False,
        )
        text = definition.text
        matcher = llguidance.LLMatcher(self.tokenizer, text, log_level=0, limits=limits)
        matcher.compute_bitmask()  # its clones share the result
        if matcher.is_error():
            raise GrammarError(in_words(matcher.get_error())[:MAX_TEXT])
        num_bytes = max(
            definition.num_bytes, _MIN_BYTES + _BYTES_PER_CHARACTER * len(definition.text)
        )
        with self._lock:
            if grammar not in self._matchers:
                self._matchers[grammar] = CompiledGrammar(matcher, num_bytes)
                self._num_bytes += num_bytes
            while self._num_bytes > MAX_CACHE_BYTES and len(self._matchers) > 1:
                self._num_bytes -= self._matchers.popitem(last=False)[1].num_bytes

    def follow(self, grammar: Grammar) -> None:
        """Follow a grammar over some tokens; a GrammarError: the limits do not allow its use.

        Some grammars are compiled within them, and exceed them with the first token.
        """
        matcher = self.matcher(grammar)
        ends = sum(1 << token_id for token_id in self.vocabulary.eos_token_ids)
        for _ in range(_FOLLOWED_TOKENS):
            allowed = int.from_bytes(matcher.compute_bitmask(), "little") & ~ends
            if not allowed or matcher.is_error() or matcher.is_stopped():
                break
            matcher.try_consume_tokens([(allowed & -allowed).bit_length() - 1])
        if matcher.is_error():
            text = f"it needs too much work for one token: {in_words(matcher.get_error())}"
            raise GrammarError(text[:MAX_TEXT])

    def matcher(self, grammar: Grammar) -> "llguidance.LLMatcher":
        """Return a matcher at the beginning of a grammar; raises GrammarError like `compile`."""
        self.compile(grammar)
        with self._lock:
            return self._matchers[grammar].matcher.deep_copy()


def compile_now(message: CompileGrammar, grammars: GrammarCompiler | None) -> GrammarCompiled:
    """Compile a grammar in this process, without limits of time and memory."""
    if grammars is None:
        return GrammarCompiled(message.grammar_id, "this worker cannot compile grammars")
    try:
        grammars.compile(message.grammar)
    except GrammarError as error:
        return GrammarCompiled(message.grammar_id, str(error))
    return GrammarCompiled(message.grammar_id)
