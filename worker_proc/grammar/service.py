"""Compiles grammars alongside the worker's steps: first in a prover process, then in a thread.

There are three lanes, each a thread with its own prover. The first lane gives each grammar a short
time, so that the grammars queued after it do not wait. A grammar that needs longer moves to the
next lane. The slower lanes are bounded. A lane starts its prover with its first grammar.

What was proven before, for another worker, needs no limit. It has a separate lane with several
threads, where a grammar that takes long delays neither new ones nor those of other accounts.

In each lane, accounts are served in turns and have a share of the places (protocol/fairness).
"""

import contextlib
import logging
import os
import threading
from collections import deque
from typing import NamedTuple

from protocol.core_worker import CompileGrammar, GrammarCompiled, GrammarFault
from protocol.fairness.account import Account
from protocol.fairness.shares import Shares
from protocol.fairness.turns import Turns
from protocol.message import MAX_TEXT
from worker_proc.grammar.compiler import GrammarCompiler
from worker_proc.grammar.errors import GrammarError
from worker_proc.grammar.prover import Task
from worker_proc.grammar.prover_link import ProverLink

QUICK_S = 0.1
MIDDLE_S = 0.5
LIMIT_S = 5.0
"""Processor time for one grammar in each lane. `_longest_wait_s` bounds the wall time. All lanes
together take less than the time after which a response starts with a keep-alive comment, so that an
error can still set the HTTP status."""
MAX_MIDDLE = 16
MAX_SLOW = 8
"""Maximum number of unanswered grammars in a lane. Their sum is less than the core sends, and so is
each account's share of them."""
_PROVEN_THREADS = 4
"""An account gets two of them at most."""
_UNBOUNDED = 2**31
"""Number of grammars in a lane that only the core's own limit bounds."""
_NICENESS = 10
"""Niceness of the lanes' threads, and of their provers, which inherit it."""

log = logging.getLogger("troika.worker")


class _Job(NamedTuple):
    """A grammar, and the adoption that has requested it."""

    adoption: int
    message: CompileGrammar

    @property
    def account(self) -> Account:
        return Account(self.message.origin, self.message.tenant)


class GrammarService:
    """Takes grammars and returns answers; `wake_fd` is readable while there are any."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._adoption = 0
        self._results: deque[tuple[int, GrammarCompiled]] = deque()
        self._slow = _Lane(self, compiler, LIMIT_S, max_jobs=MAX_SLOW)
        self._middle = _Lane(self, compiler, MIDDLE_S, self._slow, max_jobs=MAX_MIDDLE)
        self._quick = _Lane(self, compiler, QUICK_S, self._middle)
        self._proven = _Lane(self, compiler, LIMIT_S, num_threads=_PROVEN_THREADS)
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def begin_adoption(self) -> None:
        """Forget the grammars of another core: they are neither compiled nor answered."""
        self._adoption += 1
        self._results.clear()

    def compile(self, message: CompileGrammar) -> GrammarCompiled | None:
        """Compile a grammar; return the answer if it is compiled already."""
        if self._compiler.has(message.grammar):
            return GrammarCompiled(message.grammar_id)
        lane = self._proven if message.is_proven else self._quick
        lane.put(_Job(self._adoption, message))
        return None

    def is_wanted(self, job: _Job) -> bool:
        return job.adoption == self._adoption

    def answer(self, job: _Job, error: str = "", fault: GrammarFault = GrammarFault.WRONG) -> None:
        """Keep an answer for the loop, and wake it; called by the lanes."""
        result = GrammarCompiled(job.message.grammar_id, error[:MAX_TEXT], fault)
        self._results.append((job.adoption, result))
        os.eventfd_write(self.wake_fd, 1)

    def take_results(self) -> list[GrammarCompiled]:
        """Return the answers that are ready."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)
        results = []
        while self._results:
            adoption, result = self._results.popleft()
            if adoption == self._adoption:
                results.append(result)
        return results


class _Jobs:
    """The grammars of one lane; its threads take those of all accounts in turns."""

    def __init__(self, max_jobs: int, num_threads: int) -> None:
        self._changed = threading.Condition()
        self._turns: Turns[_Job] = Turns()
        self._places, self._threads = Shares(max_jobs), Shares(num_threads)

    def put(self, job: _Job) -> bool:
        """Queue a grammar; return False if its account's share of the places is used up."""
        with self._changed:
            if not self._places.has_room(job.account):
                return False
            self._places.enter(job.account)
            self._turns.put(job.account, job)
            self._changed.notify()
        return True

    def take(self) -> _Job:
        """Wait for the next grammar, of an account with a share of the threads left."""
        with self._changed:
            while (taken := self._turns.take(self._threads.has_room)) is None:
                self._changed.wait()
            account, job = taken
            self._threads.enter(account)
        return job

    def done(self, job: _Job) -> None:
        with self._changed:
            self._threads.leave(job.account)
            self._places.leave(job.account)
            self._changed.notify()


class _Lane:
    """One or more threads, each of which compiles one grammar at a time."""

    def __init__(
        self,
        service: GrammarService,
        compiler: GrammarCompiler,
        limit_s: float,
        slower: "_Lane | None" = None,
        *,
        max_jobs: int = _UNBOUNDED,
        num_threads: int = 1,
    ) -> None:
        """Store the limits of the lane.

        Args:
            service: receives the answers.
            compiler: compiles proven grammars in this process.
            limit_s: processor time for one grammar.
            slower: the lane for grammars that need more time; None: they are refused.
            max_jobs: maximum number of unanswered grammars.
            num_threads: maximum number of threads; more than one are for proven grammars.

        Only one thread may call `put`.
        """
        self._service = service
        self._compiler = compiler
        self._limit_s = limit_s
        self._wall_s = _longest_wait_s(limit_s)
        self._slower = slower
        self._max_jobs = max_jobs
        self._jobs = _Jobs(max_jobs, num_threads)
        self._num_to_start = num_threads
        self._prover: ProverLink | None = None

    def put(self, job: _Job) -> bool:
        """Queue a grammar; return False if its account's share of the lane is used up."""
        if not self._jobs.put(job):
            return False
        if self._num_to_start:
            self._num_to_start -= 1
            threading.Thread(target=self._run, name="troika-grammar", daemon=True).start()
        return True

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # this thread only
        while True:
            job = self._jobs.take()
            if self._service.is_wanted(job):
                self._handle(job)
            self._jobs.done(job)

    def _handle(self, job: _Job) -> None:
        try:
            self._compile(job.message)
        except TimeoutError:
            self._pass_on(job)
        except GrammarError as problem:
            self._service.answer(job, str(problem))
        except OSError as problem:
            self._service.answer(job, str(problem), GrammarFault.BROKEN)
        except Exception as problem:
            log.exception("a grammar could not be compiled")
            self._service.answer(job, f"{type(problem).__name__}: {problem}")
        else:
            self._service.answer(job)

    def _pass_on(self, job: _Job) -> None:
        """Move a grammar to the slower lane, or refuse it."""
        limit = f"longer than {self._limit_s:g} s"
        if self._slower is None:
            self._service.answer(job, f"compiling it takes {limit}")
        elif not self._slower.put(job):
            grammars = f"{self._slower._max_jobs} grammars at a time that take {limit}"
            text = f"its client's share of the {grammars} is used up"
            self._service.answer(job, text, GrammarFault.BUSY)

    def _compile(self, message: CompileGrammar) -> None:
        definition = None
        if not message.is_proven and not self._compiler.has(message.grammar):
            if self._prover is None:
                self._prover = ProverLink(self._compiler.vocabulary)
            try:
                definition = self._prover.prove(Task(message.grammar, self._limit_s, self._wall_s))
            except OSError:
                if self._prover.is_broken:
                    self._prover.close()
                    self._prover = None
                raise
        self._compiler.compile(message.grammar, definition)


def _longest_wait_s(limit_s: float) -> float:
    """Return the time for a prover that shares its processor with others."""
    return 1.5 + 1.8 * limit_s
