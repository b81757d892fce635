"""Compiles grammars for the tokens of one model, and caches the compiled ones."""

import re
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from protocol.core_worker import CompileGrammar, GrammarCompiled
from protocol.message import MAX_TEXT
from protocol.sampling import CONTENT_RULE, JSON_WHITESPACE, Grammar, GrammarKind
from worker_proc.grammar.errors import NO_TOKEN, GrammarError, in_words
from worker_proc.grammar.state import GrammarState
from worker_proc.grammar.vocabulary import Tokens, Vocabulary, load_tokens

if TYPE_CHECKING:  # imported on use: most workers never receive a grammar
    import llguidance

MAX_CACHE_BYTES = 256 * 2**20
_INITIAL_LEXER_FUEL = 1_000_000
_STEP_LEXER_FUEL = 200_000
_STEP_MAX_ITEMS = 50_000
_FOLLOWED_TOKENS = 4
_BYTES_PER_CHARACTER = 32
_MIN_BYTES = 64 * 1024
_MARKED_RULE = re.compile(r"^[?!]{1,2}(?=[a-z_]\w*\s*:)", re.MULTILINE)
"""Matches what Lark allows before a rule's name; it shapes a tree and changes no language."""
_START = re.compile(r"^start:", re.MULTILINE)
_CONTENT = re.compile(rf"^{CONTENT_RULE}:", re.MULTILINE)


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


def content_of(grammar: Grammar) -> Grammar | None:
    """Return the grammar of the content alone; None if nothing can precede the content."""
    if grammar.kind is not GrammarKind.LARK or not _CONTENT.search(grammar.source):
        return None
    rules = _START.sub(f"{CONTENT_RULE}_and_before:", grammar.source, count=1)
    return Grammar(GrammarKind.LARK, f"{rules}start: {CONTENT_RULE}\n")


class CompiledGrammar(NamedTuple):
    """A grammar that is ready for use."""

    matcher: "llguidance.LLMatcher"
    """A matcher at the beginning of the grammar."""
    num_bytes: int
    """The estimated memory of the matcher."""


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
        self._compiled(grammar, definition)

    def _compiled(
        self, grammar: Grammar, definition: Definition | None = None
    ) -> "llguidance.LLMatcher":
        """Return the cached matcher of a grammar, which other threads may displace at any time."""
        with self._lock:
            if cached := self._matchers.get(grammar):
                self._matchers.move_to_end(grammar)
                return cached.matcher
        self.load()
        definition = definition or Definition(define(grammar))
        matcher = _compile(self.tokenizer, definition.text)
        num_bytes = max(
            definition.num_bytes, _MIN_BYTES + _BYTES_PER_CHARACTER * len(definition.text)
        )
        with self._lock:
            if grammar not in self._matchers:
                self._matchers[grammar] = CompiledGrammar(matcher, num_bytes)
                self._num_bytes += num_bytes
            while self._num_bytes > MAX_CACHE_BYTES and len(self._matchers) > 1:
                self._num_bytes -= self._matchers.popitem(last=False)[1].num_bytes
        return matcher

    def follow(self, grammar: Grammar) -> None:
        """Follow a grammar over some tokens; raise GrammarError if they cannot be generated.

        Some grammars are compiled within the limits, and exceed them with the first token. Others
        demand a text for which the model has no tokens.
        """
        matcher = self.matcher(grammar)
        state = GrammarState(matcher, 0, tokenizer=self.tokenizer)
        ends = sum(1 << token_id for token_id in self.vocabulary.eos_token_ids)
        for _ in range(_FOLLOWED_TOKENS):
            [mask] = state.masks([])
            allowed = int.from_bytes(mask, "little") & ~ends
            if not allowed or matcher.is_error() or matcher.is_stopped():
                break
            token_id = (allowed & -allowed).bit_length() - 1
            is_refused = matcher.try_consume_tokens([token_id]) == 0 and not matcher.is_error()
            if is_refused and allowed == 1 << token_id:
                # Bytes without a token are left out of a text that is demanded.
                raise GrammarError(in_words(NO_TOKEN, has_begun=True))
        if matcher.is_error():
            reason = in_words(matcher.get_error(), has_begun=True)
            is_limit = not matcher.get_error().startswith(NO_TOKEN)
            text = f"it needs too much work for one token: {reason}" if is_limit else reason
            raise GrammarError(text[:MAX_TEXT])

    def matcher(self, grammar: Grammar) -> "llguidance.LLMatcher":
        """Return a matcher at the beginning of a grammar; raises GrammarError like `compile`."""
        compiled = self._compiled(grammar)
        with self._lock:
            return compiled.deep_copy()


def _compile(tokenizer: "llguidance.LLTokenizer", definition: str) -> "llguidance.LLMatcher":
    """Return a matcher at the beginning of a grammar; raise GrammarError if it is invalid."""
    import llguidance

    limits = llguidance.LLParserLimits(
        initial_lexer_fuel=_INITIAL_LEXER_FUEL,
        step_lexer_fuel=_STEP_LEXER_FUEL,
        step_max_items=_STEP_MAX_ITEMS,
        verbose_errors=False,
    )
    matcher = llguidance.LLMatcher(tokenizer, definition, log_level=0, limits=limits)
    matcher.compute_bitmask()  # its clones share the result
    if matcher.is_error():
        raise GrammarError(in_words(matcher.get_error())[:MAX_TEXT])
    return matcher


def compile_now(message: CompileGrammar, grammars: GrammarCompiler | None) -> GrammarCompiled:
    """Compile a grammar in this process, without limits of time and memory."""
    if grammars is None:
        return GrammarCompiled(message.grammar_id, "this worker cannot compile grammars")
    try:
        grammars.compile(message.grammar)
    except GrammarError as error:
        return GrammarCompiled(message.grammar_id, str(error))
    return GrammarCompiled(message.grammar_id)
