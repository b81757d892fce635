"""Grammars in virtual time: compiled late, wrong now and then, and different at every position.

A grammar allows odd or even tokens in turn, and after some of them only EOS. A state that was not
rebuilt from all outputs of a request therefore allows other tokens. The real `GrammarState` follows
the outputs; the compiler and the service beside the worker are replaced.
"""

from collections import deque

from protocol.core_worker import CompileGrammar, GrammarCompiled
from protocol.model_facts import ModelFacts
from protocol.sampling import Grammar, GrammarKind
from tests.simulation.world import Process, Violation

FIRST_TOKEN_ID = 3
"""Lower ids, EOS among them, are sampled only where a grammar allows nothing else."""
WRONG = Grammar(GrammarKind.REGEX, "(")
"""No worker can compile it."""
WRONG_TEXT = "unclosed group"
_QUICK_S = (0.0002, 0.01)
_SLOW_S = (0.05, 0.8)
_SLOW_RATE = 0.3


def make_grammar(parity: int, length: int) -> Grammar:
    """Return a grammar of `length` tokens and EOS; the first is odd for parity 1."""
    return Grammar(GrammarKind.REGEX, f"{parity}:{length}")


class SimulatedMatcher:
    """A place in a grammar, with the methods of llguidance's matcher."""

    def __init__(self, grammar: Grammar, facts: ModelFacts, num_tokens: int = 0) -> None:
        self._grammar, self._facts = grammar, facts
        self._parity, self._length = map(int, grammar.source.split(":"))
        self._num_tokens = num_tokens

    def allowed(self) -> list[int]:
        """Return the tokens that may follow, in order."""
        if self._num_tokens >= self._length:
            return self._facts.eos_token_ids[: self._num_tokens == self._length]
        first = FIRST_TOKEN_ID + (FIRST_TOKEN_ID + self._parity + self._num_tokens) % 2
        return list(range(first, self._facts.vocab_size, 2))

    def try_consume_tokens(self, token_ids: list[int]) -> int:
        """Advance over the allowed ones of these, and return their number."""
        for number, token_id in enumerate(token_ids):
            if token_id not in self.allowed():
                return number
            self._num_tokens += 1
        return len(token_ids)

    def compute_bitmask(self) -> bytes:
        bits = sum(1 << token_id for token_id in self.allowed())
        return bits.to_bytes(-(-self._facts.vocab_size // 8), "little")

    def is_stopped(self) -> bool:
        return self._num_tokens > self._length

    def is_error(self) -> bool:
        return False

    def deep_copy(self) -> "SimulatedMatcher":
        return SimulatedMatcher(self._grammar, self._facts, self._num_tokens)


class SimulatedCompiler:
    """The compiled grammars of one worker."""

    def __init__(self, facts: ModelFacts, *, may_compile_late: bool) -> None:
        """`may_compile_late`: other ranks may get a request before they are ready."""
        self._facts = facts
        self._may_compile_late = may_compile_late
        self.num_tokens = facts.vocab_size
        self.tokenizer = None
        self.compiled: set[Grammar] = set()

    def has(self, grammar: Grammar) -> bool:
        return grammar in self.compiled

    def matcher(self, grammar: Grammar) -> SimulatedMatcher:
        """Return a matcher at the beginning. Violation: the core has not waited for the grammar."""
        if not self.has(grammar) and not self._may_compile_late:
            raise Violation("grammar: a request runs before the worker has reported its grammar")
        return SimulatedMatcher(grammar, self._facts)


class SimulatedGrammarService:
    """Compiles in virtual time, several grammars at once and in any order."""

    def __init__(self, process: Process, compiler: SimulatedCompiler) -> None:
        self._process, self._world = process, process.world
        self._compiler = compiler
        self._adoption = 0
        self._results: deque[GrammarCompiled] = deque()
        self.wake_fd = self._world.new_fd()
        process.on_death.append(self._sleep)

    def begin_adoption(self) -> None:
        """Forget the answers for another core."""
        self._adoption += 1
        self._results.clear()

    def compile(self, message: CompileGrammar) -> GrammarCompiled | None:
        if self._compiler.has(message.grammar):
            return GrammarCompiled(message.grammar_id)
        is_slow = not message.is_proven and self._world.random() < _SLOW_RATE
        self._world.counts["grammar late" if is_slow else "grammar"] += 1
        done = self._world.local_time + self._world.between(*(_SLOW_S if is_slow else _QUICK_S))
        self._world.at(done, self._finish, self._adoption, message)
        return None

    def _finish(self, adoption: int, message: CompileGrammar) -> None:
        if not self._process.is_alive:
            return
        error = WRONG_TEXT if message.grammar == WRONG else ""
        if not error:
            self._compiler.compiled.add(message.grammar)
        if adoption == self._adoption:
            self._results.append(GrammarCompiled(message.grammar_id, error))
            self._world.readable_fds.add(self.wake_fd)
            self._process.wake()

    def take_results(self) -> list[GrammarCompiled]:
        self._sleep()
        results = list(self._results)
        self._results.clear()
        return results

    def _sleep(self) -> None:
        self._world.readable_fds.discard(self.wake_fd)
