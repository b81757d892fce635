"""A worker for scheduler tests: follows the deltas to the letter and checks the KV it would read.

Each KV slot holds a number that stands for the whole prefix up to its token. A step first writes
the slots of all tokens it computes, then looks whether every slot that a request attends to holds
that request's own prefix. So a wrong block table, a stale cache hit or a block given away too soon
fails here, whatever the scheduler believes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.core_worker import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    decode_from_core,
)
from protocol.message import encode

SampleFn = Callable[[int, int], int]
"""From request id and output position to the token."""


@dataclass
class MirroredRequest:
    """What the worker knows of one request."""

    new: NewRequestData
    token_ids: list[int]
    block_ids: list[int]
    num_computed_tokens: int
    prefixes: list[int] = field(default_factory=list)
    """Entry i stands for tokens 0 to i."""

    def prefix(self, position: int) -> int:
        while len(self.prefixes) <= position:
            before = self.prefixes[-1] if self.prefixes else 0
            self.prefixes.append(hash((before, self.token_ids[len(self.prefixes)])))
        return self.prefixes[position]


class FakeWorker:
    """Executes steps in order."""

    def __init__(self, block_size: int, num_blocks: int, sample: SampleFn) -> None:
        self.mirror: dict[int, MirroredRequest] = {}
        self.total_scheduled = 0
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._sample = sample
        self._kv: dict[int, int] = {}
        self._next_step_id: int | None = None

    def execute(self, sent: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step and sample for whoever reached the end of its tokens."""
        step = decode_from_core(encode(sent))
        assert step == sent
        assert isinstance(step, SchedulerOutput)
        assert self._next_step_id in (None, step.step_id)
        self._next_step_id = step.step_id + 1
        self._forget(step)
        for new in step.scheduled_new_reqs:
            self._add(new)
        self._grow(step.scheduled_cached_reqs)
        assert set(step.num_scheduled_tokens) <= set(self.mirror)
        assert 1 not in step.num_scheduled_tokens.values()
        counts = {req_id: step.num_scheduled_tokens.get(req_id, 1) for req_id in self.mirror}
        assert sum(counts.values()) == step.total_num_scheduled_tokens
        self.total_scheduled += step.total_num_scheduled_tokens
        for req_id, num_tokens in counts.items():
            self._write(self.mirror[req_id], num_tokens)
        return ModelRunnerOutput(step.step_id, self._advance(counts))

    def _forget(self, step: SchedulerOutput) -> None:
        gone = step.preempted_req_ids + step.finished_req_ids
        assert len(gone) == len(set(gone))
        for req_id in gone:
            del self.mirror[req_id]

    def _add(self, new: NewRequestData) -> None:
        assert new.req_id not in self.mirror
        assert new.num_cached_tokens in (new.num_computed_tokens, len(new.token_ids))
        assert new.num_cached_tokens - new.num_computed_tokens in (0, 1)
        self.mirror[new.req_id] = MirroredRequest(
            new, new.token_ids.copy(), new.block_ids.copy(), new.num_computed_tokens
        )

    def _grow(self, cached: CachedRequestData) -> None:
        rows = zip(cached.req_ids, cached.new_block_ids, strict=True)
        for req_id, new_block_ids in rows:
            assert new_block_ids
            self.mirror[req_id].block_ids += new_block_ids

    def _slot(self, request: MirroredRequest, position: int) -> int:
        block_id = request.block_ids[position // self._block_size]
        assert 0 < block_id < self._num_blocks
        return block_id * self._block_size + position % self._block_size

    def _write(self, request: MirroredRequest, num_tokens: int) -> None:
        start = request.num_computed_tokens
        for position in range(start, start + num_tokens):
            if position >= request.new.num_cached_tokens:
                self._kv[self._slot(request, position)] = request.prefix(position)

    def _advance(self, counts: dict[int, int]) -> list[int]:
        sampled = []
        for req_id, num_tokens in counts.items():
            request = self.mirror[req_id]
            if num_tokens == 0:
                continue
            request.num_computed_tokens += num_tokens
            assert request.num_computed_tokens <= len(request.token_ids)
            for position in range(request.num_computed_tokens):
                assert self._kv[self._slot(request, position)] == request.prefix(position)
            if request.num_computed_tokens == len(request.token_ids):
                position = len(request.token_ids) - request.new.num_prompt_tokens
                token_id = self._sample(req_id, position)
                request.token_ids.append(token_id)
                sampled.append(token_id)
        return sampled
