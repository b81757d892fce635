"""Decides which grammars the workers compile, and which requests wait for one.

A request with a grammar is queued as WAITING_FOR_GRAMMAR and keeps its place; all others are
admitted meanwhile. The workers get each grammar once, and answer when it is ready. A lost worker
takes its grammars along: the requests wait again until its successor has compiled them.

Clients compete for the compilation. Each origin of requests, and each of its tenants, has a share
of the places, and the grammars of all accounts are sent in turns.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

from core_proc.request import Request, RequestStatus
from core_proc.scheduler import Scheduler
from protocol.api_core import ErrorCode
from protocol.core_worker import CompileGrammar, GrammarCompiled, GrammarFault
from protocol.fairness.account import Account
from protocol.fairness.shares import Shares
from protocol.fairness.turns import Turns
from protocol.sampling import Grammar

GRAMMAR_PARAM = "grammar"
"""`RequestError.param` of a grammar that cannot be used."""
MAX_COMPILING = 128
"""Grammars that are not proven yet; a request with one past its client's share is refused."""
MAX_IDLE = 128
"""Maximum number of ready grammars without a request that are remembered."""
_MAX_SENT = 32
"""Maximum number of grammars that were sent to the workers and are not answered: half of the
messages that a link may queue. The workers' slow lanes hold fewer, of each account and of all, so
other grammars are still sent when these lanes are full."""
_MAX_WAITING = 16
"""Maximum number of accounts in whose turns one grammar may be sent; each origin has a share."""
_FEW = 4
"""Number of ended requests that a grammar may have, beyond as many as are open."""
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
    account: Account
    """The account whose share it takes, of the places until it is proven, and of those sent."""
    is_unsent: bool = False
    waiting: Shares = field(default_factory=lambda: Shares(_MAX_WAITING))
    """While it is unsent: the accounts in whose turns it may be sent."""
    is_ready: bool = False
    is_proven: bool = False
    requests: list[Request] = field(default_factory=list)
    """Some of them may have ended."""
    prune_at: int = _FEW
    """Number of requests at which those that have ended are dropped."""

    def add(self, request: Request) -> None:
        """Add a request; a grammar that is used for days does not keep all that have ended."""
        self.requests.append(request)
        if len(self.requests) > self.prune_at:
            self.forget_ended()
            self.prune_at = 2 * len(self.requests) + _FEW

    def forget_ended(self) -> bool:
        """Drop the requests that have ended; returns whether any is left."""
        self.requests = [request for request in self.requests if not request.is_finished]
        return bool(self.requests)


class Grammars:
    """The grammars of a scheduler's requests; at most `MAX_COMPILING` of them are not proven."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._entries: dict[Grammar, _Entry] = {}
        self._by_id: dict[int, _Entry] = {}
        self._ids = count()
        self._unsent: Turns[_Entry] = Turns()
        """An entry is there once for each account that waits for it, up to `_MAX_WAITING`."""
        self._has_unsent = False
        """Whether anything has changed since none could be sent."""
        self._sent: dict[int, Account] = {}
        """Ids of the grammars that the present workers have not answered."""
        self._unproven, self._window = Shares(MAX_COMPILING), Shares(_MAX_SENT)
        self._prune_at = 2 * MAX_IDLE

    def is_full(self, grammar: Grammar, account: Account) -> bool:
        """Return whether too many grammars are being compiled for this one to join them."""
        if grammar in self._entries or self._unproven.has_room(account):
            return False
        # Those of requests that have ended are not worth the wait.
        self._unsent.keep(self._keep_if_waiting)
        return not self._unproven.has_room(account)

    def _keep_if_waiting(self, entry: _Entry) -> bool:
        """Return whether an entry is to be sent; drop it instead if no request has it any more."""
        return entry.is_unsent and self._keep_if_wanted(entry)

    def _keep_if_wanted(self, entry: _Entry) -> bool:
        """Drop an entry that no request has any more; return whether it stays."""
        if not entry.forget_ended():
            self._drop(entry)
            return False
        return True

    def add(self, request: Request, grammar: Grammar) -> None:
        """Queue a request; it waits until its grammar is ready. Errors as `add_request`."""
        entry, account = self._entries.get(grammar), account_of(request)
        is_ready = entry is not None and entry.is_ready
        blocked = None if is_ready else RequestStatus.WAITING_FOR_GRAMMAR
        self._scheduler.add_request(request, blocked)
        if entry is None:
            entry = _Entry(next(self._ids), grammar, account, is_unsent=True)
            self._entries[grammar] = self._by_id[entry.grammar_id] = entry
            self._unproven.enter(account)
        self._put(account, entry)
        entry.add(request)
        if request.num_output_tokens:  # it has run in an earlier life
            self._prove(entry)
        if len(self._entries) > self._prune_at:
            self._prune()

    def _prune(self) -> None:
        """Forget the oldest ready grammars that no request uses."""
        idle = [e for e in self._entries.values() if e.is_ready and not e.forget_ended()]
        for entry in idle[:-MAX_IDLE]:
            self._drop(entry)
        self._prune_at = len(self._entries) + MAX_IDLE

    def _put(self, account: Account, entry: _Entry) -> None:
        """Queue an entry in an account's turn, if it is unsent."""
        waiting = entry.waiting
        if entry.is_unsent and account not in waiting and waiting.has_room(account):
            waiting.enter(account)
            self._unsent.put(account, entry)
            self._has_unsent = True

    def _prove(self, entry: _Entry) -> None:
        if not entry.is_proven:
            entry.is_proven = True
            self._unproven.leave(entry.account)

    def _drop(self, entry: _Entry) -> None:
        entry.is_unsent = False
        if not entry.is_proven:
            self._unproven.leave(entry.account)
        del self._entries[entry.grammar]
        del self._by_id[entry.grammar_id]

    def take_messages(self) -> list[CompileGrammar]:
        """Return the grammars that the workers are to compile now."""
        messages: list[CompileGrammar] = []
        if not self._has_unsent:
            return messages
        self._has_unsent = False
        while taken := self._unsent.take(self._window.has_room):
            account, entry = taken
            if self._keep_if_waiting(entry):
                entry.is_unsent = False
                self._sent[entry.grammar_id] = account
                self._window.enter(account)
                message = CompileGrammar(
                    entry.grammar_id, entry.grammar, entry.is_proven, account.origin, account.tenant
                )
                messages.append(message)
        return messages

    def compiled(self, message: GrammarCompiled) -> list[Request]:
        """Unblock or fail the requests of a grammar; returns those that may be admitted now."""
        account = self._sent.pop(message.grammar_id, None)
        if account is not None:
            self._window.leave(account)
            self._has_unsent = True
        entry = self._by_id.get(message.grammar_id)
        if entry is None:
            return []
        entry.forget_ended()
        if message.error and message.fault is GrammarFault.BUSY and account is not None:
            self._refused(entry, account, message)
            return []
        if message.error:
            self._drop(entry)
            self._fail(entry.requests, message)
            return []
        self._prove(entry)
        entry.is_ready = True
        waiting = [r for r in entry.requests if r.status is RequestStatus.WAITING_FOR_GRAMMAR]
        for request in waiting:
            self._scheduler.unblock(request.req_id)
        return waiting

    def _refused(self, entry: _Entry, account: Account, message: GrammarCompiled) -> None:
        """End the requests of an account whose share is used up; others have their own turns."""
        others, refused = entry.requests, []
        if not entry.is_proven:
            others = [one for one in entry.requests if account_of(one) != account]
            refused = [one for one in entry.requests if account_of(one) == account]
        if others:
            entry.requests = others
            self._let_send(entry)
            if not entry.is_proven:
                self._unproven.leave(entry.account)
                entry.account = account_of(others[0])
                self._unproven.enter(entry.account)
        else:
            self._drop(entry)
        self._fail(refused, message)

    def _fail(self, requests: Iterable[Request], message: GrammarCompiled) -> None:
        code = _CODES[message.fault]
        param = GRAMMAR_PARAM if code is ErrorCode.INVALID else None
        for request in requests:
            self._scheduler.fail_request(request.req_id, message.error, code, param)

    def _let_send(self, entry: _Entry) -> None:
        """Queue an entry in the turns of all accounts that wait for it."""
        entry.is_unsent = True
        entry.waiting.clear()
        for request in entry.requests:
            self._put(account_of(request), entry)

    def hold_if_unready(self, request: Request) -> bool:
        """Block a request's admission if its grammar is not ready; return whether it is blocked."""
        grammar = request.sampling_params.grammar
        if grammar is None or self._entries[grammar].is_ready:
            return False
        self._scheduler.hold(request, RequestStatus.WAITING_FOR_GRAMMAR)
        return True

    def workers_lost(self) -> None:
        """Let all requests with a grammar wait until the next workers have compiled it."""
        self._sent.clear()
        self._window.clear()
        self._unsent.clear()
        for entry in list(self._entries.values()):
            entry.is_ready = False
            if self._keep_if_wanted(entry):
                self._let_send(entry)
                for request in entry.requests:
                    self._scheduler.hold(request, RequestStatus.WAITING_FOR_GRAMMAR)


def account_of(request: Request) -> Account:
    """Return the account in whose turns the grammar of a request is sent."""
    return Account(request.origin, request.tenant)
