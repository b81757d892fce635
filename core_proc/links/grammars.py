"""Decides which grammars the workers compile, and which requests wait for one.

A request with a grammar is queued as WAITING_FOR_GRAMMAR and keeps its place; all others are
admitted meanwhile. The workers get each grammar once, and answer when it is ready. A lost worker
takes its grammars along: the requests wait again until its successor has compiled them.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import count

from core_proc.request import Request, RequestStatus
from core_proc.scheduler import Scheduler
from protocol.api_core import ErrorCode
from protocol.core_worker import CompileGrammar, GrammarCompiled, GrammarFault
from protocol.sampling import Grammar

GRAMMAR_PARAM = "grammar"
"""`RequestError.param` of a grammar that cannot be used."""
MAX_COMPILING = 64
"""Grammars that are not ready yet; a request with one more is refused."""
MAX_IDLE = 128
"""Most ready grammars without a request that are remembered."""
_MAX_SENT = 32
"""Grammars that the workers have got and not answered, of the frames that a link may queue. They
are more than may wait for being compiled slowly, so that the others go on."""
_CODES = {
    GrammarFault.WRONG: ErrorCode.INVALID,
    GrammarFault.BUSY: ErrorCode.OVERLOADED,
    GrammarFault.BROKEN: ErrorCode.ENGINE_FAILED,
}


@dataclass(slots=True, eq=False)
class _Entry:
    """One grammar, and the requests with it."""

    grammar_id: int
    grammar: Grammar
    is_ready: bool = False
    is_proven: bool = False
    requests: list[Request] = field(default_factory=list)
    """Some of them may have ended."""

    def forget_ended(self) -> bool:
        """Drop the requests that have ended; returns whether any is left."""
        self.requests = [request for request in self.requests if not request.is_finished]
        return bool(self.requests)


class Grammars:
    """The grammars of a scheduler's requests; at most `MAX_COMPILING` of them are not ready."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._entries: dict[Grammar, _Entry] = {}
        self._by_id: dict[int, _Entry] = {}
        self._ids = count()
        self._unsent: deque[_Entry] = deque()
        self._sent: set[int] = set()
        """Ids of the grammars that the present workers have not answered."""
        self._prune_at = 2 * MAX_IDLE

    def is_full(self, grammar: Grammar) -> bool:
        """Whether too many grammars are being compiled for this one to join them."""
        if grammar in self._entries or len(self._unsent) + len(self._sent) < MAX_COMPILING:
            return False
        # Those of requests that have ended are not worth the wait.
        self._unsent = deque(entry for entry in self._unsent if self._is_wanted(entry))
        return len(self._unsent) + len(self._sent) >= MAX_COMPILING

    def _is_wanted(self, entry: _Entry) -> bool:
        if not entry.forget_ended():
            self._drop(entry)
            return False
        return True

    def add(self, request: Request, grammar: Grammar) -> None:
        """Queue a request; it waits until its grammar is ready. Errors as `add_request`."""
        entry = self._entries.get(grammar)
        is_ready = entry is not None and entry.is_ready
        blocked = None if is_ready else RequestStatus.WAITING_FOR_GRAMMAR
        self._scheduler.add_request(request, blocked)
        if entry is None:
            entry = _Entry(next(self._ids), grammar)
            self._entries[grammar] = self._by_id[entry.grammar_id] = entry
            self._unsent.append(entry)
        entry.requests.append(request)
        if request.num_output_tokens:  # it has run in an earlier life
            entry.is_proven = True
        if len(self._entries) > self._prune_at:
            self._prune()

    def _prune(self) -> None:
        """Forget the oldest ready grammars that no request uses."""
        idle = [e for e in self._entries.values() if e.is_ready and not e.forget_ended()]
        for entry in idle[:-MAX_IDLE]:
            self._drop(entry)
        self._prune_at = len(self._entries) + MAX_IDLE

    def _drop(self, entry: _Entry) -> None:
        del self._entries[entry.grammar]
        del self._by_id[entry.grammar_id]

    def take_messages(self) -> list[CompileGrammar]:
        """Return the grammars that the workers are to compile now."""
        messages = []
        while self._unsent and len(self._sent) < _MAX_SENT:
            entry = self._unsent.popleft()
            if self._is_wanted(entry):
                self._sent.add(entry.grammar_id)
                message = CompileGrammar(entry.grammar_id, entry.grammar, entry.is_proven)
                messages.append(message)
        return messages

    def compiled(self, message: GrammarCompiled) -> list[Request]:
        """Unblock or fail the requests of a grammar; returns those that may be admitted now."""
        self._sent.discard(message.grammar_id)
        entry = self._by_id.get(message.grammar_id)
        if entry is None:
            return []
        entry.forget_ended()
        if message.error:
            self._drop(entry)
            for request in entry.requests:
                code = _CODES[message.fault]
                param = GRAMMAR_PARAM if code is ErrorCode.INVALID else None
                self._scheduler.fail_request(request.req_id, message.error, code, param)
            return []
        entry.is_ready = entry.is_proven = True
        waiting = [r for r in entry.requests if r.status is RequestStatus.WAITING_FOR_GRAMMAR]
        for request in waiting:
            self._scheduler.unblock(request.req_id)
        return waiting

    def holds(self, request: Request) -> bool:
        """Block a request's admission if its grammar is not ready; return whether it is blocked."""
        grammar = request.sampling_params.grammar
        if grammar is None or self._entries[grammar].is_ready:
            return False
        self._scheduler.hold(request, RequestStatus.WAITING_FOR_GRAMMAR)
        return True

    def workers_lost(self) -> None:
        """Let all requests with a grammar wait until the next workers have compiled it."""
        self._sent.clear()
        self._unsent.clear()
        for entry in list(self._entries.values()):
            entry.is_ready = False
            if self._is_wanted(entry):
                self._unsent.append(entry)
                for request in entry.requests:
                    self._scheduler.hold(request, RequestStatus.WAITING_FOR_GRAMMAR)
