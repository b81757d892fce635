"""The engine in one process, without sockets: for notebooks, tests and debugging.

    engine = InprocEngine(configure(model="null"))
    for output in engine.generate([[1, 2, 3]], SamplingParams(max_tokens=8)):
        print(output.token_ids)

The same core and the same runner as in the separate processes, stepped by the caller. Nothing runs
between calls, and nothing survives a crash: use the processes for services.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from core_proc.engine import EngineCore
from protocol.api_core import AddRequest, EngineStats, RequestOutput
from protocol.config import EngineConfig
from protocol.core_worker import ModelFacts
from protocol.ledger import Ledger, RequestFailed, check_request
from protocol.sampling import SamplingParams
from worker_proc.__main__ import make_runner

_CLIENT = b"inprocess"


class InprocEngine:
    """One EngineCore and one runner, taking turns."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the model of `config`; ValueError if it cannot be served."""
        self._runner = make_runner(config, lambda phase, done, total: None)
        self._core = EngineCore(config)
        self._core.adopt_workers(self._runner.facts)
        self._max_num_waiting = config.scheduler.max_num_waiting
        self._ledger = Ledger(config.scheduler.max_num_seqs + self._max_num_waiting)

    @property
    def facts(self) -> ModelFacts:
        """What was loaded."""
        return self._runner.facts

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> int:
        """Add a request and return its id; RequestFailed if it cannot be served, or not now."""
        request_id = self._ledger.next_request_id()
        add = AddRequest(request_id, prompt_token_ids, params, [], priority, 0.0, cache_salt)
        add, _body = check_request(add, self.facts)
        self._ledger.accept(add)
        refused = self._core.add(_CLIENT, add)
        if refused is not None:
            self._ledger.fail(request_id)
            raise RequestFailed(refused.error)
        return request_id

    def cancel(self, request_id: int) -> None:
        """Abort a request."""
        self._ledger.cancel(request_id)
        self._core.abort(_CLIENT, [request_id])

    def step(self) -> list[RequestOutput]:
        """Run one step; empty where nothing was sampled."""
        step = self._core.schedule()
        if step is None:
            return []
        outputs = self._core.update(self._runner.execute(step)).get(_CLIENT)
        rows = [] if outputs is None else outputs.outputs
        news = [self._ledger.take(row) for row in rows]
        return [item for item in news if isinstance(item, RequestOutput)]

    def stats(self) -> EngineStats:
        """Gauges and counters as of now."""
        return self._core.stats()

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to do."""
        return self._core.has_unfinished

    def generate(
        self, prompts: Sequence[list[int]], params: SamplingParams
    ) -> Iterator[RequestOutput]:
        """Run all prompts together; yields tokens as they come.

        `request_id` tells the prompts apart: the first of this call has the lowest. However many
        there are, the queue does not overflow: prompts enter it as it empties. A prompt that
        cannot be served raises RequestFailed before any of them runs; leaving early aborts all.
        """
        for prompt in prompts:
            check_request(AddRequest(0, prompt, params), self.facts)
        pending = deque(prompts)
        request_ids: list[int] = []
        try:
            while pending or self.has_unfinished:
                while pending and self.stats().num_waiting_reqs < self._max_num_waiting:
                    request_ids.append(self.submit(pending.popleft(), params))
                yield from self.step()
        finally:
            for request_id in request_ids:
                self.cancel(request_id)
