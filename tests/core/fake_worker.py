"""A worker for scheduler tests: applies the deltas exactly and checks the KV that it would read.

Each KV slot holds a value that identifies a KV group and the prefix up to its token. A step first
copies blocks to and from the host, then writes the slots of all tokens it computes, then checks
that every slot that a request attends to holds that request's own prefix. So a wrong block
table, a stale cache hit or a block freed too soon fails here, whatever the scheduler's state is.
State blocks hold such a value, too: see `FakeStates`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protocol.core_worker import (
    NULL_BLOCK,
    BlockCopies,
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    decode_from_core,
)
from protocol.message import encode, unpack_token_ids
from tests.core.fake_states import FakeStates

SampleFn = Callable[[int, int], int]
"""Returns the token of a request id and output position."""
GuessFn = Callable[[int, int], list[int]]
"""Returns the drafts of a request id from an output position on."""


@dataclass(eq=False)
class MirroredRequest:
    """The worker's state of one request."""

    new: NewRequestData
    token_ids: list[int]
    block_tables: list[list[int]]
    """One block table per KV group, and that of the state blocks, if there are any."""
    num_computed_tokens: int
    draft_limit: int
    drafts: list[int] = field(default_factory=list)
    """Drafts of the tokens after `token_ids`."""
    prefixes: list[int] = field(default_factory=list)
    """Entry i identifies tokens 0 to i."""

    def prefix(self, position: int) -> int:
        while len(self.prefixes) <= position:
            before = self.prefixes[-1] if self.prefixes else 0
            self.prefixes.append(hash((before, self.token_ids[len(self.prefixes)])))
        return self.prefixes[position]


class FakeWorker:
    """Executes steps in order."""

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        sample: SampleFn,
        windows: Sequence[int | None] = (None,),
        num_host_blocks: int = 0,
        *,
        num_state_blocks: int = 0,
        num_host_state_blocks: int = 0,
        guess: GuessFn | None = None,
        max_drafts: int = 0,
    ) -> None:
        """Take the shape of the KV cache: one window per KV group, None where all is seen.

        With `num_state_blocks` a state group follows these.
        """
        self.states: FakeStates | None = None
        if num_state_blocks:
            self.states = FakeStates(block_size, num_state_blocks, num_host_state_blocks)
        self._guess = guess
        self._max_drafts = max_drafts
        self.times_ns: tuple[int, int, int] | None = None
        """Of each step, as it reports them: the whole, its drafts, and the wait before it."""
        self.mirror: dict[int, MirroredRequest] = {}
        self.total_scheduled = 0
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._sample = sample
        self._windows = windows
        self._num_host_blocks = num_host_blocks
        self._kv: dict[int, list[tuple[int, int] | None]] = {}
        """(group, prefix) of each slot of a block. A block belongs to one group at a time."""
        self._host: dict[int, list[tuple[int, int] | None]] = {}
        self._next_step_id: int | None = None

    def execute(self, sent: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step, and sample for each request that reached the end of its tokens."""
        step = decode_from_core(encode(sent))
        assert step == sent
        assert isinstance(step, SchedulerOutput)
        assert self._next_step_id in (None, step.step_id)
        self._next_step_id = step.step_id + 1
        self._forget(step)
        self._swap(step.swap_out, step.swap_in)
        if self.states is not None:
            self.states.swap(step.state_swap_out, step.state_swap_in)
        for new in step.scheduled_new_reqs:
            self._add(new)
        self._grow(step.scheduled_cached_reqs)
        for req_id, limit in step.draft_limits.items():
            self.mirror[req_id].draft_limit = limit
        assert set(step.num_scheduled_tokens) <= set(self.mirror)
        assert 1 not in step.num_scheduled_tokens.values()
        counts = {req_id: step.num_scheduled_tokens.get(req_id, 1) for req_id in self.mirror}
        assert sum(counts.values()) == step.total_num_scheduled_tokens
        self.total_scheduled += step.total_num_scheduled_tokens
        if self.states is not None:
            self.states.execute([(self.mirror[req_id], n) for req_id, n in counts.items() if n])
        for req_id, num_tokens in counts.items():
            self._write(self.mirror[req_id], num_tokens)
        return self._advance(step.step_id, counts)

    def sleep(self) -> None:
        """Execute `Sleep`: lose all KV, on the device and on the host."""
        assert not self.mirror
        self._kv.clear()
        self._host.clear()
        if self.states is not None:
            self.states.clear()

    def content(self, block_id: int) -> list[tuple[int, int] | None]:
        """Return what a block holds, all of which was computed."""
        content = self._kv[block_id].copy()
        assert None not in content
        return content

    def fill(self, block_id: int, content: list[tuple[int, int] | None]) -> None:
        """Write a block, as a load does."""
        assert 0 < block_id < self._num_blocks
        self._kv[block_id] = content.copy()

    def spoil(self, block_id: int) -> None:
        """Write a block in part, as a load does that fails."""
        self._kv[block_id] = [None] * self._block_size

    def write_from_outside(self, token_ids: list[int], tables: list[list[int]]) -> None:
        """Write the KV of the first tokens of a prompt, as a remote load does."""
        prefix = 0
        for position, token_id in enumerate(token_ids):
            prefix = hash((prefix, token_id))
            for group, table in enumerate(tables):
                if table[position // self._block_size] == NULL_BLOCK:
                    continue
                block_id, offset = self._slot(table, position)
                block = self._kv.setdefault(block_id, [None] * self._block_size)
                block[offset] = (group, prefix)

    def _forget(self, step: SchedulerOutput) -> None:
        gone = step.preempted_req_ids + step.finished_req_ids
        assert len(gone) == len(set(gone))
        for req_id in gone:
            left = self.mirror.pop(req_id)
            if self.states is not None:
                self.states.forget(left)

    def _swap(self, out: BlockCopies, into: BlockCopies) -> None:
        for copies in (out, into):
            assert all(0 < i < self._num_blocks for i in copies.device_block_ids)
            assert all(0 <= i < self._num_host_blocks for i in copies.host_block_ids)
        assert len(set(out.host_block_ids)) == len(out.host_block_ids)
        assert len(set(into.device_block_ids)) == len(into.device_block_ids)
        for block_id, host_id in zip(out.device_block_ids, out.host_block_ids, strict=True):
            self._host[host_id] = self._kv[block_id].copy()
        for block_id, host_id in zip(into.device_block_ids, into.host_block_ids, strict=True):
            self._kv[block_id] = self._host[host_id].copy()

    def _add(self, new: NewRequestData) -> None:
        assert new.req_id not in self.mirror
        token_ids = unpack_token_ids(new.token_ids)
        assert new.num_cached_tokens in (new.num_computed_tokens, len(token_ids))
        assert new.num_cached_tokens - new.num_computed_tokens in (0, 1)
        assert len({len(table) for table in new.block_ids}) == 1
        assert len(new.block_ids) == len(self._windows) + (self.states is not None)
        if self.states is not None:
            assert new.num_cached_tokens == new.num_computed_tokens
        self.mirror[new.req_id] = MirroredRequest(
            new,
            token_ids,
            [table.copy() for table in new.block_ids],
            new.num_computed_tokens,
            0 if new.sampling_params.pooling is not None else self._max_drafts,
        )

    def _grow(self, cached: CachedRequestData) -> None:
        for req_id, columns in zip(cached.req_ids, cached.new_block_ids, strict=True):
            assert len({len(column) for column in columns}) == 1
            assert columns[0]
            for group, column in enumerate(columns):
                assert NULL_BLOCK not in column or group == len(self._windows)
                self.mirror[req_id].block_tables[group].extend(column)

    @staticmethod
    def _first_seen(window: int | None, position: int) -> int:
        return 0 if window is None else max(0, position - window + 1)

    def _slot(self, table: list[int], position: int) -> tuple[int, int]:
        block_id = table[position // self._block_size]
        assert 0 < block_id < self._num_blocks
        return block_id, position % self._block_size

    def _write(self, request: MirroredRequest, num_tokens: int) -> None:
        start = request.num_computed_tokens
        first = max(start, request.new.num_cached_tokens)
        for group in range(len(self._windows)):
            table = request.block_tables[group]
            for position in range(first, start + num_tokens):
                block_id, offset = self._slot(table, position)
                block = self._kv.setdefault(block_id, [None] * self._block_size)
                known = position < len(request.token_ids)
                block[offset] = (group, request.prefix(position)) if known else None

    def _read(self, request: MirroredRequest, num_tokens: int) -> None:
        start = request.num_computed_tokens
        for group, window in enumerate(self._windows):
            table = request.block_tables[group]
            for position in range(self._first_seen(window, start), start + num_tokens):
                block_id, offset = self._slot(table, position)
                assert self._kv[block_id][offset] == (group, request.prefix(position))

    def _advance(self, step_id: int, counts: dict[int, int]) -> ModelRunnerOutput:
        sampled, num_sampled, num_drafts = [], [], []
        for req_id, num_tokens in counts.items():
            request = self.mirror[req_id]
            if num_tokens == 0:
                continue
            end = request.num_computed_tokens + num_tokens
            num_ahead = end - len(request.token_ids)
            assert num_ahead <= len(request.drafts)
            self._read(request, num_tokens - max(num_ahead, 0))
            drafts, request.drafts = request.drafts[: max(num_ahead, 0)], []
            request.num_computed_tokens = min(end, len(request.token_ids))
            if num_ahead < 0:
                continue
            token_ids = self._verify(request, drafts)
            sampled += token_ids
            num_sampled.append(len(token_ids))
            if self._guess is not None:
                request.drafts = self._guess(req_id, self._position(request))[: request.draft_limit]
            num_drafts.append(len(request.drafts))
        forward_ns, draft_ns, wait_ns = self.times_ns or (0, 0, 0)
        if self._guess is None:
            return ModelRunnerOutput(step_id, sampled, forward_ns=forward_ns, wait_ns=wait_ns)
        return ModelRunnerOutput(
            step_id,
            sampled,
            num_sampled,
            num_drafts,
            forward_ns=forward_ns,
            draft_ns=draft_ns if any(num_drafts) else 0,
            wait_ns=wait_ns,
        )

    def _position(self, request: MirroredRequest) -> int:
        return len(request.token_ids) - request.new.num_prompt_tokens

    def _verify(self, request: MirroredRequest, drafts: list[int]) -> list[int]:
        """Sample until a draft is wrong; the KV of right drafts was written in this step."""
        token_ids = []
        for draft in [*drafts, None]:
            token_id = self._sample(request.new.req_id, self._position(request))
            token_ids.append(token_id)
            request.token_ids.append(token_id)
            if token_id != draft:
                break
            self._write(request, 1)
            request.num_computed_tokens += 1
        if self.states is not None:
            self.states.verified(request, len(drafts), len(token_ids) - 1)
        return token_ids
