"""The worker's loop: owns the sockets, passes messages to the shim and sends its replies.

A worker whose core dies keeps its weights, reconnects and is adopted by the next core.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from protocol.core_worker import (
    Adopt,
    CoreToWorker,
    SchedulerOutput,
    WorkerToCore,
    decode_from_core,
)
from protocol.lifecycle import Stop
from protocol.message import ProtocolError, encode
from protocol.process import gc_tuning
from protocol.process.child_runtime import ChildProcess
from protocol.process.failpoints import failpoint
from protocol.transport.channel import DealerChannel, HighWaterMark, LinkEvent
from protocol.transport.runtime import Clock, Poller
from worker_proc.adapters.kept import KeptAdapters
from worker_proc.adapters.service import AdapterService
from worker_proc.grammar.compiler import GrammarCompiler
from worker_proc.grammar.service import GrammarService
from worker_proc.offload.service import OffloadService
from worker_proc.runner import Runner
from worker_proc.shim import WorkerShim
from worker_proc.step_timer import StepTimer

HELLO_INTERVAL_S = 1.0
SILENCE_S = 5.0
"""A core sends a frame every second; after this silence it does not know the worker any more."""
QUIET_S = 0.1
"""The time without a step after which the runner prepares memory."""
_LONGEST_SLEEP_S = 1.0
"""Maximum time that one turn adds to the silence: a process that was stopped could not receive."""
_FLUSH_MS = 1000

log = logging.getLogger("troika.worker")


class WorkerLoop:
    """Connects one runner to the core and to the supervisor."""

    def __init__(
        self,
        child: ChildProcess,
        runner: Runner,
        *,
        clock: Clock,
        poller: Poller,
        make_grammars: Callable[[GrammarCompiler], GrammarService] = GrammarService,
        make_adapters: Callable[[KeptAdapters[Any]], AdapterService[Any]] = AdapterService,
        offload: OffloadService | None = None,
    ) -> None:
        """`offload`: what writes and reads blocks that are kept in stores, if any are."""
        self._child = child
        self._clock = clock
        self._reporter = child.reporter
        self._step_timer = StepTimer(child.config.recovery)
        runner.on_wait(self._reporter.waits)
        self._begun: deque[tuple[int, float]] = deque()
        """Tokens and time of each step that is not answered yet."""
        self._step_ended_at = 0.0
        self._may_prepare = True
        """Whether steps may have used memory since the runner had prepared all of it."""
        self._owes_memory = False
        """Whether steps may have used memory that was not allocated again between steps."""
        grammars = None if runner.grammars is None else make_grammars(runner.grammars)
        adapters = None if runner.adapters is None else make_adapters(runner.adapters)
        services = (grammars, adapters, offload)
        self._wake_fds = [service.wake_fd for service in services if service is not None]
        self._shim = WorkerShim(
            runner,
            child.rank,
            child.pid,
            child.epoch,
            answering_rank=child.config.parallel.answering_rank,
            grammars=grammars,
            adapters=adapters,
            offload=offload,
        )
        self._core = DealerChannel(
            child.context, child.core_worker_address, HighWaterMark.WORKER_LINK
        )
        self._is_connected = False
        self._next_hello = 0.0
        self._num_frames_read = 0
        self._silent_s = 0.0
        """The time without a frame of the core that has adopted this worker."""
        self._turned_at = clock.monotonic()
        self._poller = poller
        poller.register(self._core.socket, zmq.POLLIN)
        poller.register(self._core.monitor, zmq.POLLIN)
        for fd in self._wake_fds:
            poller.register(fd, zmq.POLLIN)
        if child.lifecycle_socket is not None:
            poller.register(child.lifecycle_socket, zmq.POLLIN)

    def run(self) -> None:
        """Compute until the supervisor sends Stop; raises errors that were sent to the core."""
        gc_tuning.freeze()
        while self.turn(self._poll_ms()):
            pass

    def turn(self, timeout_ms: int | None) -> bool:
        """Wait for an event and handle it; returns False on Stop."""
        is_idle = not self._shim.num_launched  # else the deadline of its step remains
        if is_idle:
            self._reporter.idle()
        ready = self._poller.poll(timeout_ms)
        if is_idle:
            self._reporter.turn()
        for message in self._child.messages():
            if isinstance(message, Stop):
                return False
        self._handle_link_events()
        self._handle_messages()
        self._answer(self._shim.take_output())
        has_answers = any((fd, zmq.POLLIN) in ready for fd in self._wake_fds)
        deadline = self._shim.deadline
        if has_answers or (deadline is not None and self._clock.monotonic() >= deadline):
            for reply in self._shim.take_prepared():
                self._send(reply)
        self._check_silence()
        self._prepare_memory(is_idle=not ready)
        return True

    @property
    def _wants_adoption(self) -> bool:
        return self._is_connected and self._shim.link_epoch is None

    def _poll_ms(self) -> int | None:
        if self._shim.num_launched:
            return 0  # wait as CUDA does for its device, without sleeping
        if self._owes_memory:
            return 0
        deadlines = []
        if self._wants_adoption:
            deadlines.append(self._next_hello)
        if self._may_prepare:
            deadlines.append(self._quiet_at)
        if (deadline := self._shim.deadline) is not None:
            deadlines.append(deadline)
        if not deadlines:
            return self._reporter.tick_ms
        wait_ms = max(0, int((min(deadlines) - self._clock.monotonic()) * 1000) + 1)
        return min(wait_ms, self._reporter.tick_ms or wait_ms)

    @property
    def _quiet_at(self) -> float:
        return self._step_ended_at + QUIET_S

    def _prepare_memory(self, *, is_idle: bool) -> None:
        """Allocate some memory of later steps: after each one, and while none arrives."""
        if self._owes_memory:
            self._owes_memory = self._shim.prepare_memory(is_idle=False)
        elif is_idle and self._may_prepare and self._clock.monotonic() >= self._quiet_at:
            self._may_prepare = self._shim.prepare_memory()

    def _handle_link_events(self) -> None:
        for event in self._core.link_events():
            self._shim.end_adoption()
            self._is_connected = event is LinkEvent.CONNECTED
            self._next_hello = 0.0
            if not self._is_connected:
                log.debug("core gone; waiting for the next one")
        now = self._clock.monotonic()
        if self._wants_adoption and now >= self._next_hello:
            self._next_hello = now + HELLO_INTERVAL_S
            self._core.send(self._shim.epoch, encode(self._shim.hello()), begins=True)

    def _handle_messages(self) -> None:
        for received in self._core.drain(limit=1):
            try:
                message = decode_from_core(received.body)
            except ProtocolError as error:
                log.error("received an unreadable message from the core: %s", error)
                raise
            reply = self._handle(received.header.epoch, message)
            if isinstance(message, Adopt) and received.header.epoch == self._shim.link_epoch:
                log.debug(
                    "adopted, link epoch %s; %d frames of other epochs dropped so far",
                    self._shim.link_epoch,
                    self._shim.num_fenced_frames,
                )
                failpoint("worker.after_adopt")
            self._answer(reply)
        if self._core.take_loss() and self._shim.link_epoch is not None:
            self._end_adoption("frames of the link to the core were lost")

    def _answer(self, reply: WorkerToCore | None) -> None:
        """Send a reply, if there is one, and raise the error of a step or a sleep."""
        if reply is not None:
            self._send(reply)
        if self._shim.failure is not None:
            raise self._shim.failure
        self._observe_steps()

    def _observe_steps(self) -> None:
        """Record the steps that have ended; each began when the one before it had ended."""
        if self._shim.link_epoch is None:
            self._begun.clear()
        while len(self._begun) > self._shim.num_launched:
            num_tokens, began = self._begun.popleft()
            now = self._clock.monotonic()
            self._step_timer.observe(num_tokens, now - max(began, self._step_ended_at))
            self._step_ended_at = now
            self._may_prepare = self._owes_memory = True
            self._reporter.step_completed()  # also on ranks that do not reply

    def _send(self, reply: WorkerToCore) -> None:
        """Send a reply; it is dropped if the core reads nothing, as its successor asks again."""
        body = encode(reply)
        sent = self._core.send(self._shim.epoch, body)
        if not sent and self._core.socket.poll(_FLUSH_MS, zmq.POLLOUT):
            self._core.send(self._shim.epoch, body)

    def _end_adoption(self, reason: str) -> None:
        log.warning("%s; asking to be adopted again", reason)
        self._shim.end_adoption()
        self._next_hello = 0.0

    def _check_silence(self) -> None:
        """Request adoption again after a silence of the core."""
        slept_s = self._clock.monotonic() - self._turned_at
        self._turned_at += slept_s
        if self._core.num_read != self._num_frames_read or self._shim.link_epoch is None:
            self._num_frames_read = self._core.num_read
            self._silent_s = 0.0
            return
        self._silent_s += min(slept_s, _LONGEST_SLEEP_S)
        if self._silent_s >= SILENCE_S:
            self._end_adoption("the core is silent")

    def _handle(self, epoch: int, message: CoreToWorker) -> WorkerToCore | None:
        """Pass a message to the shim; before a step, record its deadline."""
        if not isinstance(message, SchedulerOutput) or epoch != self._shim.link_epoch:
            reply = self._shim.on_message(epoch, message)
            if not self._shim.num_launched:
                self._begun.clear()  # an adoption drops the step that was launched
            return reply
        num_tokens = message.total_num_scheduled_tokens
        self._begun.append((num_tokens, self._clock.monotonic()))
        limit_s = sum(self._step_timer.limit_s(begun) for begun, _ in self._begun)
        self._reporter.step(message.step_id, limit_s)
        failpoint("worker.before_step")
        reply = self._shim.on_message(epoch, message)
        failpoint("worker.after_step")
        return reply
