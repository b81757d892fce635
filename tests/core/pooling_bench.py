"""An engine with a null runner, and what its client receives."""

from collections.abc import Sequence

import msgspec

from core_proc.engine import EngineCore
from protocol.api_core import AddRequest, ErrorCode, Refused, RequestOutput, StepOutputs
from protocol.config.settings import configure
from protocol.model_facts import ModelFacts
from protocol.sampling import FinishReason, SamplingParams
from worker_proc.null.runner import NullRunner

CLIENT = b"client"
FACTS = ModelFacts("null", 1000, 4096, 16, 4096, [2], embedding_size=16, num_host_blocks=64)


class Bench:
    """An engine with a null runner, and what its client receives."""

    def __init__(self, facts: ModelFacts = FACTS, **settings: object) -> None:
        config = configure(model="null", check_invariants=True, **settings)
        self.core = EngineCore(config)
        num_drafts = config.scheduler.num_speculative_tokens
        self.runner = NullRunner(facts, num_speculative_tokens=num_drafts)
        self.core.adopt_workers(facts, 0.001)
        self.rows: dict[int, list[RequestOutput]] = {}
        self.refused: dict[int, ErrorCode] = {}
        self.largest_answer = 0

    def add(self, number: int, prompt: Sequence[int], params: SamplingParams) -> Refused | None:
        return self.core.add(CLIENT, AddRequest(number, list(prompt), params))

    def step(self, change: dict[str, object] | None = None) -> bool:
        step = self.core.schedule()
        if step is None:
            return False
        output = msgspec.structs.replace(self.runner.execute(step), **(change or {}))
        self.largest_answer = max(self.largest_answer, len(output.pooled))
        for row in self.core.update(output).get(CLIENT, StepOutputs([])).outputs:
            self.rows.setdefault(row.request_id, []).append(row)
        for _, message in self.core.take_outgoing():
            assert isinstance(message, Refused)
            assert message.request_id is not None
            self.refused[message.request_id] = message.error.code
        return True

    def run(self) -> None:
        while self.step():
            pass

    def vectors(self) -> dict[int, bytes]:
        """Return the vectors; each is the only output of its request."""
        found = {}
        for number, rows in self.rows.items():
            [row] = rows
            assert (row.token_ids, row.first_index) == ([], 0)
            assert row.finish_reason is FinishReason.STOP
            assert row.embedding is not None
            found[number] = row.embedding
        return found
