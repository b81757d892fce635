"""The core's end of the worker link: adoption, steps out, results in.

A worker that breaks the protocol is killed and not argued with: its supervisor starts another, and
the requests wait for it.
"""

import logging
from collections.abc import Callable, Iterable

from core_proc.engine import EngineCore
from core_proc.output_check import WorkerMisbehaved
from core_proc.owners import Client
from core_proc.watch import DeathWatch
from core_proc.workers import WorkerGroup
from protocol.api_core import StepOutputs
from protocol.channel import PeerGone, Received, RouterChannel
from protocol.core_worker import (
    Adopt,
    CoreToWorker,
    ModelRunnerOutput,
    Sleep,
    StepFailed,
    WorkerHello,
    WorkerToCore,
    decode_from_worker,
)
from protocol.failpoints import failpoint
from protocol.lifecycle import DeathCause, Suspect, WorkerDied
from protocol.message import ProtocolError, encode
from protocol.progress_page import CoreMarks, Death, ProgressPage

DRAIN_LIMIT = 16
FAULTS = frozenset({DeathCause.SIGNAL, DeathCause.EXCEPTION, DeathCause.OOM, DeathCause.DEADLINE})
"""Causes of death for which what was computed may be to blame."""

log = logging.getLogger("troika.core")


class WorkerLink:
    """The connections of all ranks, and the epoch under which the group was adopted."""

    def __init__(
        self,
        link: RouterChannel,
        watch: DeathWatch,
        group: WorkerGroup,
        engine: EngineCore,
        tell_client: Callable[[Client, StepOutputs], None],
        *,
        page: ProgressPage | None = None,
        core_epoch: int = 0,
    ) -> None:
        """Begin without workers; who is in a step is kept in `page` before it is sent."""
        self._link = link
        self._watch = watch
        self._group = group
        self._engine = engine
        self._tell_client = tell_client
        self._adopted_epoch: int | None = None
        self._swap_cost_tokens = 0.0
        self._page = page
        self._core_epoch = core_epoch
        self._unjudged: set[int] = set()
        """Epochs of the group that was lost last, until it is known why one of them died."""
        self._adopted: set[int] = set()
        """Epochs of the workers that were adopted last."""
        self._last_death = 0
        """Epoch of a worker whose death was told."""
        self._suspects: dict[int, float] = {}
        """Epochs of workers that show no progress, and until when that holds: they get no steps,
        and so nobody is admitted."""

    def drain(self) -> None:
        """Obey what has arrived, a bounded part of it."""
        num_bad = self._link.num_bad_frames
        for received in self._link.drain(DRAIN_LIMIT):
            self._on_frame(received)
        bad = self._link.last_bad_frame
        if bad is not None and self._link.num_bad_frames != num_bad:
            self._lose(bad.peer, bad.reason, kill=True)

    def _on_frame(self, received: Received) -> None:
        try:
            message = decode_from_worker(received.body)
            self._obey(received.peer, received.header.epoch, message)
        except (ProtocolError, WorkerMisbehaved) as problem:
            self._lose(received.peer, str(problem), kill=True)
            self._judge(is_fault=True)

    def _obey(self, peer: bytes, epoch: int, message: WorkerToCore) -> None:
        if isinstance(message, WorkerHello):
            self._on_hello(peer, epoch, message)
        elif epoch != self._adopted_epoch or not self._group.is_leader(peer):
            self._engine.num_fenced_frames += 1
        elif isinstance(message, ModelRunnerOutput):
            news = self._engine.update(message)
            if self._page is not None:
                self._page.write_completed(self._core_epoch)
            failpoint("core.before_reply")
            for client, outputs in news.items():
                self._tell_client(client, outputs)
        elif isinstance(message, StepFailed):  # it exits by itself, and tells its supervisor why
            self._lose(peer, f"step {message.step_id} failed: {message.error}")
            self._judge(is_fault=True)

    def _on_hello(self, peer: bytes, epoch: int, hello: WorkerHello) -> None:
        before = self._group.peers
        if not self._group.enter(peer, epoch, hello):
            self._engine.num_fenced_frames += 1
            return
        if hello.rank == 0:
            self._swap_cost_tokens = hello.swap_cost_tokens
        self._end_adoption()
        for replaced in set(before) - set(self._group.peers):
            self._forget(replaced)
        if not self._watch.add(peer, hello.pid):
            self._lose(peer, f"its process {hello.pid} is gone")
        elif self._group.complete:
            self._adopt()

    def _adopt(self) -> None:
        first_step_id = self._engine.adopt_workers(self._group.facts, self._swap_cost_tokens)
        epoch = self._adopted_epoch = self._group.begin_epoch()
        self._adopted = self._group.epochs
        self._suspects = {e: until for e, until in self._suspects.items() if e in self._adopted}
        if self._tell_all(Adopt(first_step_id)):
            log.info("workers adopted, link epoch %d", epoch)
            failpoint("core.after_adopt")

    def _end_adoption(self) -> None:
        if self._adopted_epoch is not None:
            self._unjudged = self._adopted
        self._adopted_epoch = None
        self._engine.lose_workers()

    def dead(self, ready: Iterable[object]) -> list[bytes]:
        """Workers that have died, according to a poll."""
        return self._watch.dead(ready)

    def bury(self, peers: list[bytes]) -> None:
        """Take back what the dead were given; the results that they still sent count."""
        self.drain()
        for peer in peers:
            self._lose(peer, "its process has died")

    def _lose(self, peer: bytes, why: str, *, kill: bool = False) -> None:
        """Give up a worker, if it is known; alive or not, it must say Hello to be used again."""
        if not self._group.leave(peer):
            return
        log.warning("worker lost, running requests wait for its successor: %s", why)
        if kill:
            self._watch.kill(peer)
        self._forget(peer)
        self._end_adoption()

    def _forget(self, peer: bytes) -> None:
        self._watch.remove(peer)
        self._link.forget(peer)

    def on_suspect(self, message: Suspect) -> None:
        """A worker shows no progress, or does again.

        Meanwhile nobody new is put into a step that may be its last.
        """
        what = "seems to hang: no further steps" if message.for_s else "goes on"
        log.warning("%s %d of epoch %d %s", message.role, message.rank, message.epoch, what)
        if message.for_s:
            self._suspects[message.epoch] = self._engine.now + message.for_s
        else:
            self._suspects.pop(message.epoch, None)

    @property
    def _is_suspected(self) -> bool:
        """Whether one of the workers is; the word that took it back may have been lost."""
        now = self._engine.now
        return any(self._suspects.get(epoch, now) > now for epoch in self._group.epochs)

    def on_worker_death(self, death: WorkerDied) -> None:
        """The supervisor's verdict; it may come before or after the loss was noticed here."""
        if death.epoch <= self._last_death:  # said again
            return
        self._last_death = death.epoch
        step = "at rest" if death.step_id is None else f"in step {death.step_id}"
        log.warning("worker %d of epoch %d died %s: %s", death.rank, death.epoch, step, death.cause)
        peer = self._group.peer_of(death.epoch)
        if peer is not None:
            self.bury([peer])
        if death.epoch in self._unjudged:
            self._judge(is_fault=death.cause in FAULTS and death.step_id is not None)

    def _judge(self, *, is_fault: bool) -> None:
        """It is known why the group was lost; the first word on it counts."""
        is_first, self._unjudged = bool(self._unjudged), set()
        if is_first and is_fault:
            self._engine.blame_requests()

    def on_core_death(self, death: Death, marks: CoreMarks | None) -> None:
        """Take over the marks of the last core; those of a core before it do not count."""
        log.warning("core of epoch %d died: %s", death.epoch, death.cause)
        if death.cause in FAULTS and marks is not None and marks.epoch == death.epoch:
            self._engine.inherit_marks(marks.marks)

    def dispatch(self) -> None:
        """Send all steps that can be decided now."""
        if self._suspects and self._is_suspected:
            return
        while self._adopted_epoch is not None:
            step = self._engine.schedule()
            if step is None:
                break
            self._keep_marks()
            self._tell_all(step)
            failpoint("core.after_dispatch")
            failpoint("core.after_preemption", when=bool(step.preempted_req_ids))
        self._keep_marks()
        if self._engine.is_sleep_due and self._tell_all(Sleep()):
            self._engine.sleep_sent()

    def _keep_marks(self) -> None:
        """Who is in the steps under way, where it survives this process."""
        marks = None if self._page is None else self._engine.take_marks()
        if marks is not None and self._page is not None:
            self._page.write_marks(self._core_epoch, marks)

    def _tell_all(self, message: CoreToWorker) -> bool:
        """The same bytes to every rank. A rank that cannot take them is lost, and so the group."""
        body = encode(message)
        assert self._adopted_epoch is not None
        epoch = self._adopted_epoch
        for peer in self._group.peers:
            try:
                has_room = self._link.send(peer, epoch, body)
            except PeerGone:  # its process lives, as far as is known, and will connect anew
                self._lose(peer, "it has disconnected")
                return False
            if not has_room:
                self._lose(peer, "it has left too many steps unread", kill=True)
                return False
        return True
