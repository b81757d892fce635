"""The core's end of the worker link: adoption, steps out, results in.

A worker that breaks the protocol is killed: its supervisor starts another one, and the requests
wait for it.
"""

import logging
from collections.abc import Callable, Iterable

from core_proc.engine import EngineCore
from core_proc.links.pidfd_monitor import PidfdMonitor
from core_proc.links.rank_answers import RankAnswers, joined
from core_proc.links.workers import WorkerGroup
from core_proc.outputs.check import InvalidWorkerOutput
from core_proc.outputs.owners import Client
from protocol.api_core import StepOutputs
from protocol.core_worker import (
    AdapterLoaded,
    Adopt,
    CoreToWorker,
    RankAnswer,
    Sleep,
    StepFailed,
    UnloadAdapter,
    WorkerHello,
    WorkerToCore,
    decode_from_worker,
)
from protocol.lifecycle import DeathCause, Role, Suspect, WorkerDied, process_name
from protocol.message import ProtocolError, encode
from protocol.process.failpoints import failpoint
from protocol.process.progress_page import CoreLoads, CoreMarks, Death, ProgressPage
from protocol.transport.channel import PeerGone, Received, RouterChannel

DRAIN_LIMIT = 16
FAULTS = frozenset({DeathCause.SIGNAL, DeathCause.EXCEPTION, DeathCause.OOM, DeathCause.DEADLINE})
"""Causes of death that may come from what was computed."""

log = logging.getLogger("troika.core")


def _level(cause: DeathCause) -> int:
    """Return the log level of a death: INFO if it was orderly, as in a restart.

    The supervisor logs why a process could not be started.
    """
    return logging.INFO if cause is DeathCause.ENDED else logging.WARNING


class WorkerLink:
    """The connections of all ranks, and the epoch under which the group was adopted."""

    def __init__(
        self,
        link: RouterChannel,
        monitor: PidfdMonitor,
        group: WorkerGroup,
        engine: EngineCore,
        send_to_client: Callable[[Client, StepOutputs], None],
        *,
        page: ProgressPage | None = None,
        core_epoch: int,
    ) -> None:
        """Start without workers. The marks of a step are written to `page` before it is sent."""
        self._link = link
        self._monitor = monitor
        self._group = group
        self._engine = engine
        self._send_to_client = send_to_client
        self._adopted_epoch: int | None = None
        self._answers = RankAnswers(group.size)
        self._page = page
        self._core_epoch = core_epoch
        self._unexplained: set[int] = set()
        """Epochs of the group lost last, until the cause of the loss is known."""
        self._adopted: set[int] = set()
        self._last_unreadable = ""
        """The last reason logged for a worker outside the group, since the last adoption."""
        self._last_death = 0
        """Epoch of the last `WorkerDied`."""
        self._suspects: dict[int, float] = {}
        """Epochs of workers that show no progress, and until when that holds. They get no steps, so
        that no further request is in a step that may be the last."""

    def drain(self) -> None:
        """Handle the messages that have arrived, a bounded number of them."""
        num_bad = self._link.num_bad_frames
        for received in self._link.drain(DRAIN_LIMIT):
            self._on_frame(received)
        bad = self._link.last_bad_frame
        if bad is not None and self._link.num_bad_frames != num_bad:
            self._refuse(bad.peer, bad.reason)

    def _on_frame(self, received: Received) -> None:
        try:
            message = decode_from_worker(received.body)
            self._handle(received.peer, received.header.epoch, message)
        except (ProtocolError, InvalidWorkerOutput) as problem:
            if self._refuse(received.peer, str(problem)):
                self._explain_loss(is_fault=True)

    def _refuse(self, peer: bytes, problem: str) -> bool:
        """Kill a worker that breaks the protocol; return whether it was in the group.

        The process of a worker outside the group is not known. It repeats its message, which is
        logged once.
        """
        if self._lose(peer, problem, kill=True):
            return True
        if problem != self._last_unreadable:
            self._last_unreadable = problem
            log.error(
                "a worker that connects is not used, as if it had another version: %s", problem
            )
        return False

    def _handle(self, peer: bytes, epoch: int, message: WorkerToCore) -> None:
        rank = self._group.rank_of(peer)
        if isinstance(message, WorkerHello):
            self._on_hello(peer, epoch, message)
        elif epoch != self._adopted_epoch or rank is None:
            self._engine.num_fenced_frames += 1
        elif isinstance(message, StepFailed):  # the worker exits and reports to its supervisor
            self._lose(peer, f"step {message.step_id} failed on rank {rank}: {message.error}")
            self._explain_loss(is_fault=True)
        elif isinstance(message, RankAnswer):
            self._join(rank, message)
        elif rank != self._group.answering_rank:
            self._engine.num_fenced_frames += 1
        else:
            outputs_of = self._engine.update(message)
            if self._page is not None:
                self._page.write_completed(self._core_epoch)
            failpoint("core.before_reply")
            for client, outputs in outputs_of.items():
                self._send_to_client(client, outputs)

    def _join(self, rank: int, answer: RankAnswer) -> None:
        """Collect the answers of all ranks; the engine gets the answer of the whole group.

        An adapter that only some ranks have loaded is dropped.
        """
        answers = self._answers.take(rank, answer)
        if answers is None:
            return
        whole = joined(answers)
        if isinstance(whole, AdapterLoaded) and whole.error:
            is_loaded_somewhere = AdapterLoaded(whole.adapter_id) in answers
            if is_loaded_somewhere and not self._send_to_all(UnloadAdapter(whole.adapter_id)):
                return
        self._engine.answered(whole)

    def _on_hello(self, peer: bytes, epoch: int, hello: WorkerHello) -> None:
        before = self._group.peers
        if not self._group.enter(peer, epoch, hello):
            self._engine.num_fenced_frames += 1
            return
        self._end_adoption()
        for replaced in set(before) - set(self._group.peers):
            self._forget(replaced)
        if not self._monitor.add(peer, hello.pid):
            self._lose(peer, f"its process {hello.pid} is gone")
        elif self._group.complete:
            self._adopt()

    def _adopt(self) -> None:
        disagreement = self._group.find_disagreement()
        if disagreement is not None:
            self._lose(*disagreement, kill=True)
            return
        facts, swap_cost_tokens = self._group.facts, self._group.swap_cost_tokens
        first_step_id = self._engine.adopt_workers(facts, swap_cost_tokens)
        epoch = self._adopted_epoch = self._group.begin_epoch()
        self._adopted = self._group.epochs
        self._last_unreadable = ""
        self._suspects = {e: until for e, until in self._suspects.items() if e in self._adopted}
        if self._send_to_all(Adopt(first_step_id)):
            log.debug("workers adopted, link epoch %d", epoch)
            failpoint("core.after_adopt")

    def _end_adoption(self) -> None:
        if self._adopted_epoch is not None:
            self._unexplained = self._adopted
        self._adopted_epoch = None
        self._answers.clear()
        self._engine.lose_workers()

    def dead(self, ready: Iterable[object]) -> list[bytes]:
        """Return the workers whose death is among the results of a poll."""
        return self._monitor.dead(ready)

    def reap(self, peers: list[bytes]) -> None:
        """Take back the steps of dead workers, after the results that they still sent."""
        self.drain()
        for peer in peers:
            self._lose(peer, "its process has ended", level=logging.INFO)

    def _lose(
        self, peer: bytes, why: str, *, kill: bool = False, level: int = logging.WARNING
    ) -> bool:
        """Give up a worker, which must send `WorkerHello` to be used again.

        False if the connection is none of the group's. Of a process that has ended the supervisor
        reports the cause, and a planned restart needs no warning.
        """
        if not self._group.leave(peer):
            return False
        log.log(level, "worker lost, running requests wait for its successor: %s", why)
        if kill:
            self._monitor.kill(peer)
        self._forget(peer)
        self._end_adoption()
        return True

    def _forget(self, peer: bytes) -> None:
        self._monitor.remove(peer)
        self._link.forget(peer)

    def on_suspect(self, message: Suspect) -> None:
        """Hold back steps from a worker that shows no progress, until it does again."""
        what = "seems to hang: no further steps" if message.for_s else "continues"
        name = process_name(message.role, message.rank)
        log.warning("%s of epoch %d %s", name, message.epoch, what)
        if message.for_s:
            self._suspects[message.epoch] = self._engine.now + message.for_s
        else:
            self._suspects.pop(message.epoch, None)

    @property
    def _is_suspected(self) -> bool:
        """Whether a worker is suspected; this ends by itself, as its last message may be lost."""
        now = self._engine.now
        return any(self._suspects.get(epoch, now) > now for epoch in self._group.epochs)

    def on_worker_death(self, death: WorkerDied) -> None:
        """Handle the supervisor's report; it may come before or after the loss was noticed here.

        It is repeated for some seconds, so that the successor of a dead core gets it, too. The
        death of a worker that was not adopted here is in the logs of the supervisor and, if it was
        adopted before, of the predecessor.
        """
        if death.epoch <= self._last_death:  # it is repeated
            return
        self._last_death = death.epoch
        step = "at rest" if death.step_id is None else f"in step {death.step_id}"
        name = process_name(Role.WORKER, death.rank)
        level = _level(death.cause) if death.epoch in self._adopted else logging.DEBUG
        log.log(level, "%s of epoch %d died %s: %s", name, death.epoch, step, death.cause)
        peer = self._group.peer_of(death.epoch)
        if peer is not None:
            self.reap([peer])
        if death.epoch in self._unexplained:
            is_fault = death.cause in FAULTS
            self._explain_loss(is_fault=is_fault, in_step=death.step_id is not None)
            if death.is_loaded_anew and not is_fault:
                self._engine.wait_for_load()

    def _explain_loss(self, *, is_fault: bool, in_step: bool = True) -> None:
        """Note the cause of the last loss; of several causes the first counts."""
        is_first, self._unexplained = bool(self._unexplained), set()
        if is_first:
            self._engine.attribute_death(is_fault=is_fault, in_step=in_step)

    def on_core_death(self, death: Death, marks: CoreMarks | None) -> None:
        """Take over the marks of the last core; those of a core before it do not count."""
        log.log(_level(death.cause), "core of epoch %d died: %s", death.epoch, death.cause)
        if death.cause in FAULTS and marks is not None and marks.epoch == death.epoch:
            self._engine.inherit_marks(marks.marks)

    def inherit_loads(self, loads: CoreLoads) -> None:
        """Take over the preceding core's records of adapters, whether its workers live or not."""
        self._unexplained = {loads.workers_epoch}
        self._engine.inherit_loads(loads.records)

    def dispatch(self) -> bool:
        """Send all steps that can be decided now; return whether to call it again at once."""
        if self._adopted_epoch is not None:
            self._send_preparations()
        is_held_back = bool(self._suspects) and self._is_suspected
        while self._adopted_epoch is not None and not is_held_back:
            step = self._engine.schedule()
            if step is None:
                self._send_transfers()
                break
            self._write_page()
            self._send_to_all(step)
            failpoint("core.after_dispatch")
            self._send_transfers()
            failpoint("core.after_preemption", when=bool(step.preempted_req_ids))
        # Even without a step: results may have cleared suspects, or ended what was in flight.
        self._write_page()
        if not is_held_back and self._engine.is_sleep_due and self._send_to_all(Sleep()):
            self._engine.sleep_sent()
        return self._adopted_epoch is not None and not is_held_back and self._engine.is_preparing

    def _send_preparations(self) -> None:
        messages = [*self._engine.take_grammars(), *self._engine.take_adapters()]
        self._write_page()
        for message in messages:
            if not self._send_to_all(message):
                break

    def _send_transfers(self) -> None:
        for message in self._engine.take_transfers():
            if not self._send_to_all(message):
                break

    def _write_page(self) -> None:
        """Write the marks and loads that a successor needs, before the workers get the step."""
        if self._page is None:
            return
        if (edits := self._engine.take_marks()) is not None:
            self._page.write_marks(self._core_epoch, edits)
        if (records := self._engine.take_loads()) is not None:
            self._page.write_loads(CoreLoads(max(self._adopted, default=0), records))

    def _send_to_all(self, message: CoreToWorker) -> bool:
        """Send the same bytes to every rank. A rank that cannot take them takes the group along."""
        body = encode(message)
        assert self._adopted_epoch is not None
        epoch = self._adopted_epoch
        for peer in self._group.peers:
            try:
                has_room = self._link.send(peer, epoch, body)
            except PeerGone:  # its process lives, as far as is known, and connects again
                self._lose(peer, "it has disconnected")
                return False
            if not has_room:
                self._lose(peer, "it has left too many steps unread", kill=True)
                return False
        return True
