"""A small scheduler that frees blocks as early as the link allows, and overwrites them with NaN.

Every step computes up to `chunk` tokens of each running request. Before the step, the blocks that a
request's window has passed are freed, and are allocated again first. After it, all free blocks
and the null block hold NaN, so that a read from any of them changes the tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from protocol.core_worker import (
    NULL_BLOCK,
    BlockCopies,
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    TokenLogprobs,
)
from protocol.message import pack_token_ids
from protocol.sampling import SamplingParams
from tests.worker.driving import MAX_STEPS, across_the_wire
from worker_proc.kv.window import first_visible
from worker_proc.model_runner import ModelRunner

MAX_RUNNING = 5
STEPS_AWAY = 3


@dataclass(slots=True, eq=False)
class Served:
    """One running request."""

    req_id: int
    prompt: list[int]
    params: SamplingParams
    output_token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_entries: int = 0
    """Entries sent to the worker, per block table."""
    blocks: list[dict[int, int]] = field(default_factory=list)
    """The block of each entry that the request still holds, by KV group."""
    host_blocks: list[dict[int, int]] = field(default_factory=list)
    """The same for blocks on the host while the request is swapped out."""
    back_at: int = 0
    num_drafts: int = 0
    """Drafts to verify in the next step."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt + self.output_token_ids


class MiniScheduler:
    """Runs requests to their ends on a model runner."""

    def __init__(
        self, runner: ModelRunner, chunk: int, swap_every: int = 0, spare_drafts: int = 0
    ) -> None:
        """Take the runner and the largest number of tokens of a request in a step.

        Every `swap_every` steps the oldest request is swapped out for a while. With `spare_drafts`
        a request is granted all announced drafts in one step of `spare_drafts`, fewer in others.
        """
        self._runner = runner
        self._facts = runner.facts
        self._chunk = chunk
        self._swap_every = swap_every
        self._free = list(range(1, self._facts.num_gpu_blocks))
        self._free_host = list(range(self._facts.num_host_blocks))
        self._waiting: list[Served] = []
        self._running: list[Served] = []
        self._finished: list[int] = []
        self._step_id = 0
        self.num_reused = 0
        """Blocks that were freed behind a window and allocated to another request later."""
        self.num_swaps = 0
        self._passed: set[int] = set()
        self._spare_drafts = spare_drafts
        self.accepted: list[tuple[int, int]] = []
        """(number verified, number accepted) of each request and step with drafts."""
        self.logprobs: list[list[TokenLogprobs]] = []
        """Log-probabilities of each request's outputs."""

    def run(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> list[list[int]]:
        """Return the outputs of all requests."""
        self._runner.reset()
        pairs = zip(prompts, params, strict=True)
        requests = [Served(i, list(p), s) for i, (p, s) in enumerate(pairs)]
        self._waiting = list(requests)
        while self._waiting or self._running or self._finished:
            assert self._step_id < MAX_STEPS
            self._step()
        assert len(self._free) == self._facts.num_gpu_blocks - 1
        assert len(self._free_host) == self._facts.num_host_blocks
        self.logprobs = [request.logprobs for request in requests]
        return [request.output_token_ids for request in requests]

    def _step(self) -> None:
        preempted, out = self._swap_out()
        news, into = self._admit()
        known = [r for r in self._running if r.req_id not in {new.req_id for new in news}]
        cached = CachedRequestData(
            [request.req_id for request in known], [self._grow(request) for request in known]
        )
        counts = {r.req_id: self._num_tokens(r) for r in self._running}
        finished, self._finished = self._finished, []
        step = SchedulerOutput(
            *(self._step_id, news, cached, counts, sum(counts.values())),
            *(preempted, finished, out, into),
        )
        self._step_id += 1
        self._take(counts, self._runner.execute(across_the_wire(step)))
        self._spoil()

    def _num_tokens(self, request: Served) -> int:
        num_left = len(request.token_ids) - request.num_computed
        return num_left + request.num_drafts if num_left <= self._chunk else self._chunk

    def _take(self, counts: dict[int, int], output: ModelRunnerOutput) -> None:
        sampling = [
            request
            for request in self._running
            if request.num_computed + counts[request.req_id] >= len(request.token_ids)
        ]
        nums_sampled = output.num_sampled_tokens or [1] * len(sampling)
        nums_drafted = output.num_draft_tokens or [0] * len(sampling)
        tokens = iter(output.sampled_token_ids)
        for request in self._running:
            request.num_computed += counts[request.req_id]
        for request, num_sampled, drafted in zip(sampling, nums_sampled, nums_drafted, strict=True):
            if request.num_drafts:
                self.accepted.append((request.num_drafts, num_sampled - 1))
            request.num_computed -= request.num_drafts - (num_sampled - 1)
            self._append(request, [next(tokens) for _ in range(num_sampled)])
            num_kept = len(request.output_token_ids) - len(request.logprobs)
            request.logprobs += output.logprobs.get(request.req_id, [])[:num_kept]
            request.num_drafts = self._grant(request, drafted)
        assert next(tokens, None) is None

    def _grant(self, request: Served, drafted: int) -> int:
        if self._spare_drafts and (self._step_id + request.req_id) % self._spare_drafts:
            drafted = (self._step_id + request.req_id) % (drafted + 1)
        room = request.params.max_tokens - len(request.output_token_ids) - 1
        return max(0, min(drafted, room))

    def _append(self, request: Served, token_ids: list[int]) -> None:
        for token_id in token_ids:
            request.output_token_ids.append(token_id)
            is_full = len(request.output_token_ids) == request.params.max_tokens
            is_eos = token_id in self._facts.eos_token_ids and not request.params.ignore_eos
            if is_full or is_eos:
                self._running.remove(request)
                self._finished.append(request.req_id)
                for held in request.blocks:
                    self._free += held.values()
                return

    def _admit(self) -> tuple[list[NewRequestData], BlockCopies]:
        """Admit one request per step, so that requests are at different positions."""
        news, into = [], BlockCopies([], [])
        for request in self._waiting:
            if request.back_at <= self._step_id and len(self._running) < MAX_RUNNING:
                self._waiting.remove(request)
                self._running.append(request)
                request.blocks = [{} for _ in self._facts.kv_groups]
                request.num_entries = 0
                tables = self._grow(request)
                for held, host in zip(request.blocks, request.host_blocks, strict=False):
                    for entry, host_id in host.items():
                        if entry in held:
                            into.device_block_ids.append(held[entry])
                            into.host_block_ids.append(host_id)
                    self._free_host += host.values()
                request.host_blocks = []
                had = request.num_computed
                text = (pack_token_ids(request.token_ids), len(request.prompt), request.params)
                news.append(NewRequestData(request.req_id, *text, tables, had, had))
                break
        return news, into

    def _swap_out(self) -> tuple[list[int], BlockCopies]:
        out = BlockCopies([], [])
        if not (self._swap_every and self._running and self._step_id % self._swap_every == 0):
            return [], out
        request = self._running.pop(0)
        request.back_at = self._step_id + STEPS_AWAY
        request.num_drafts = 0
        end = -(-request.num_computed // self._facts.block_size)
        for held in request.blocks:
            host = {entry: self._free_host.pop() for entry in held if entry < end}
            out.device_block_ids.extend(held[entry] for entry in host)
            out.host_block_ids.extend(host.values())
            request.host_blocks.append(host)
            self._free += held.values()
        self._waiting.append(request)
        self.num_swaps += 1
        return [request.req_id], out

    def _grow(self, request: Served) -> list[list[int]]:
        """Free what windows have passed, and return the new entries of each table."""
        size, before = self._facts.block_size, request.num_entries
        end = request.num_computed + self._num_tokens(request)
        request.num_entries = max(before, -(-end // size))
        columns = []
        for group, held in zip(self._facts.kv_groups, request.blocks, strict=True):
            first = first_visible(group.window, request.num_computed) // size
            for entry in [entry for entry in held if entry < first]:
                self._passed.add(held[entry])
                self._free.append(held.pop(entry))
            column = []
            for entry in range(before, request.num_entries):
                column.append(self._hold(held, entry) if entry >= first else NULL_BLOCK)
            assert group.max_blocks is None or len(held) <= group.max_blocks
            columns.append(column)
        return columns

    def _hold(self, held: dict[int, int], entry: int) -> int:
        block_id = held[entry] = self._free.pop()
        if block_id in self._passed:
            self._passed.remove(block_id)
            self.num_reused += 1
        return block_id

    def _spoil(self) -> None:
        for tensors in self._runner._pool.tensors:
            for tensor in (tensors.keys, tensors.values):
                fill_with_nan(tensor, [NULL_BLOCK, *self._free])


def fill_with_nan(pool: torch.Tensor, blocks: Sequence[int] | None = None) -> None:
    """Write what no row may read; of codes, at least the scales are NaN."""
    value = 255 if pool.dtype == torch.uint8 else torch.nan
    pool[slice(None) if blocks is None else blocks] = value
