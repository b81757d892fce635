"""The engine in one process, without sockets: for notebooks, tests and debugging.

    engine = InprocEngine(configure(model="null"))
    for output in engine.generate([[1, 2, 3]], SamplingParams(max_tokens=8)):
        print(output.token_ids)

The same core and the same runner as in the separate processes, stepped by the caller. Nothing runs
between calls, and nothing survives a crash: use the processes for services.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Unpack

from core_proc.engine import EngineCore
from protocol.api_core import (
    AddRequest,
    Control,
    ControlAction,
    ControlDone,
    EngineStats,
    PauseMode,
    Refused,
    RequestOutput,
)
from protocol.client.errors import failure_of
from protocol.client.ledger import Ledger, OpenLimits, RequestOptions, check_request
from protocol.config import EngineConfig
from protocol.kv_events import KVEvent
from protocol.model_facts import ModelFacts
from protocol.sampling import FinishReason, SamplingParams
from worker_proc.adapters.service import carry_out
from worker_proc.grammar.compiler import compile_now
from worker_proc.startup.announcement import why_portable
from worker_proc.startup.start import make_runner

log = logging.getLogger("troika.inprocess")

_CLIENT = b"inprocess"


class InprocEngine:
    """One EngineCore and one runner, taking turns."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the model of `config`; ValueError if it cannot be served.

        Without the compiled kernels, the log has a warning.
        """
        self._runner = make_runner(config, lambda phase, done, total: None)
        if (reason := why_portable(self._runner.facts, self._runner.attention)) is not None:
            log.warning("%s", reason)
        self._core = EngineCore(config)
        self._core.adopt_workers(self._runner.facts, self._runner.swap_cost_tokens)
        self._failed: list[RequestOutput] = []
        """Ends that `step` will return."""
        self._max_num_waiting = config.scheduler.max_num_waiting
        self._ledger = Ledger(OpenLimits(config.scheduler.max_num_seqs + self._max_num_waiting))

    @property
    def facts(self) -> ModelFacts:
        """The facts of the model that was loaded."""
        return self._runner.facts

    def submit(
        self, prompt_token_ids: list[int], params: SamplingParams, **options: Unpack[RequestOptions]
    ) -> int:
        """Add a request and return its id; RequestFailed if it cannot be served, or not now."""
        request_id = self._ledger.next_request_id()
        add = AddRequest(request_id, prompt_token_ids, params, **options)
        add, _body = check_request(add, self.facts)
        self._ledger.accept(add)
        refused = self._core.add(_CLIENT, add)
        if refused is not None:
            self._ledger.fail(request_id)
            raise failure_of(refused.error)
        return request_id

    def cancel(self, request_id: int) -> None:
        self._ledger.fail(request_id)
        self._core.abort(_CLIENT, [request_id])

    def step(self) -> list[RequestOutput]:
        """Run one step and return its outputs.

        A request that fails on its own ends with an output of reason ERROR; the log has the error.
        """
        for message in self._core.take_grammars():
            self._core.answered(compile_now(message, self._runner.grammars))
        for order in self._core.take_adapters():
            if (answer := carry_out(order, self._runner.adapters)) is not None:
                self._core.answered(answer)
        step = self._core.schedule()
        rows: list[RequestOutput] = []
        if step is not None:
            outputs = self._core.update(self._runner.execute(step)).get(_CLIENT)
            rows = [] if outputs is None else outputs.outputs
        news = [self._ledger.take(row) for row in rows]
        self._take_outgoing()
        failed, self._failed = self._failed, []
        return [item for item in news if isinstance(item, RequestOutput)] + failed

    def _take_outgoing(self) -> list[ControlDone]:
        """Keep the failures; returns the answers."""
        answers = []
        for _, message in self._core.take_outgoing():
            if isinstance(message, ControlDone):
                answers.append(message)
            elif isinstance(message, Refused) and message.request_id is not None:
                self._ledger.fail(message.request_id)
                self._failed.append(RequestOutput(message.request_id, 0, [], FinishReason.ERROR))
        return answers

    def pause(self, mode: PauseMode = PauseMode.PAUSED_ALL) -> bool:
        """Let `step` admit no request that has not run before, or compute nothing."""
        return self._control(ControlAction.PAUSE, mode)

    def resume(self) -> bool:
        """End a pause or a sleep."""
        return self._control(ControlAction.RESUME)

    def sleep(self) -> bool:
        """Pause everything and free the memory of the KV cache."""
        return self._control(ControlAction.SLEEP)

    def wake_up(self) -> bool:
        """End a sleep, or a pause, as `resume` does."""
        return self.resume()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Drop all cached prefixes, and preempt running requests if asked; False: blocks in use."""
        action, mode = ControlAction.RESET_PREFIX_CACHE, PauseMode.PAUSED_ALL
        return self._control(action, mode, reset_running_requests)

    def _control(
        self,
        action: ControlAction,
        mode: PauseMode = PauseMode.PAUSED_ALL,
        reset_running_requests: bool = False,
    ) -> bool:
        self._core.control(_CLIENT, Control(0, action, mode, reset_running_requests))
        if self._core.is_sleeping:
            while (notices := self._core.schedule()) is not None:  # no tokens: all are paused
                self._core.update(self._runner.execute(notices))
        if self._core.is_sleep_due:
            self._runner.sleep()
            self._core.sleep_sent()
        [done] = self._take_outgoing()
        return done.ok

    def take_kv_events(self) -> list[KVEvent]:
        """Return the changes of the prefix cache since the last call, with `enable_kv_events`."""
        return self._core.take_kv_events()

    def stats(self) -> EngineStats:
        return self._core.stats()

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to do."""
        return self._core.has_unfinished

    @property
    def _is_stuck(self) -> bool:
        """Whether a pause stops all requests that are left."""
        if self._core.pause_mode is PauseMode.PAUSED_NEW:
            return not self.stats().num_running_reqs
        return self._core.pause_mode is PauseMode.PAUSED_ALL

    def generate(
        self, prompts: Sequence[list[int]], params: SamplingParams
    ) -> Iterator[RequestOutput]:
        """Run all prompts together; yields tokens as they come, with `request_id` in prompt order.

        Prompts enter the queue as it empties, so that it does not overflow. Leaving early aborts
        all. RequestFailed: a prompt cannot be served; none has run. RuntimeError: the engine is
        paused, so they would never end.
        """
        for prompt in prompts:
            check_request(AddRequest(0, prompt, params), self.facts)
        pending = deque(prompts)
        request_ids: list[int] = []
        try:
            while pending or self.has_unfinished:
                while pending and self.stats().num_waiting_reqs < self._max_num_waiting:
                    request_ids.append(self.submit(pending.popleft(), params))
                outputs = self.step()
                if not outputs and self._is_stuck:
                    raise RuntimeError(f"the engine is {self._core.pause_mode}: resume it first")
                yield from outputs
        finally:
            for request_id in request_ids:
                self.cancel(request_id)
