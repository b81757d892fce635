"""Drafts the next tokens of requests with a second, smaller model.

It chooses each draft as the sampler would from its logits: with the request's parameters, and with
the random number of that position. The better it agrees with the model, the more drafts are right,
at any temperature.

Its KV is stored under the block ids of the model's requests, in separate tensors. When drafts are
wanted, it is computed from the first position at which it is missing. This is the case for a new
prompt, for a prefix whose blocks were filled while no drafts were made, and for a request that
returns from a preemption, from the host or from a worker that died. Blocks are also written to
stores and read from them, together with the model's (`worker_proc/offload/drafts.py`). Recurrent
layers have states in addition to KV (`DraftModelStates`), and compute a request from the last
position that has one. A draft is never trusted, so missing or outdated KV costs time but never
changes a token.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from protocol.core_worker import NULL_BLOCK, SchedulerOutput
from protocol.model_facts import ModelFacts
from protocol.sampling import SamplingParams
from worker_proc.attention.interface import AttentionBackend
from worker_proc.drafting.draft_model_states import DraftModelStates, StatePath
from worker_proc.drafting.draft_progress import DraftProgress
from worker_proc.forward import compute_logits
from worker_proc.inputs import pack_step
from worker_proc.kv.kv_pool import KVPool
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.request import MirroredRequest, ScheduledRequest
from worker_proc.sampling.sampler import Sampler


def num_spare_blocks(block_size: int, num_speculative_tokens: int) -> int:
    """Return the number of extra blocks that a request needs while drafts are made for it."""
    return 1 + -(-num_speculative_tokens // block_size)


class DraftCache(NamedTuple):
    """The memory that a draft model is attached to."""

    pool: KVPool
    """The model's blocks, followed by spare ones."""
    group: int
    """The KV group whose tables the draft model follows."""
    num_spare: int
    """Number of spare blocks of a request."""
    states: DraftModelStates | None = None
    """States of the draft model's recurrent layers, if it has any."""


class DraftModel:
    """A draft model with its KV cache, which follows the steps of the model."""

    def __init__(
        self,
        loaded: LoadedModel,
        backend: AttentionBackend,
        cache: DraftCache,
        sampler: Sampler,
        facts: ModelFacts,
        *,
        max_tokens: int,
    ) -> None:
        """Draft with a model that is attached to `cache`.

        `facts` are those of the main model; `max_tokens` is the maximum number of tokens that the
        draft model computes in a step.
        """
        self._loaded = loaded
        self._backend = backend
        self._pool, self._group, self._num_spare, self._states = cache
        self._sampler = sampler
        self._facts = facts
        self._max_tokens = max_tokens
        self._max_len = min(facts.max_model_len, loaded.model_len)
        self._is_filled = bytearray(facts.num_gpu_blocks)
        """For each block, 1 if it holds this model's KV for the same tokens as the model's KV."""

    def reset(self) -> None:
        """Forget every request."""
        if self._states is not None:
            self._states.clear()

    def sleep(self) -> None:
        self._pool.sleep()
        self.reset()
        self._is_filled = bytearray(len(self._is_filled))

    def holds(self, block_id: int) -> bool:
        """Return whether a block has this model's KV for the same tokens as the model's KV."""
        return bool(self._is_filled[block_id])

    def note(self, block_id: int, *, is_filled: bool) -> None:
        """Record whether a block that no request has yet was filled from a store."""
        self._is_filled[block_id] = is_filled

    def follow(self, step: SchedulerOutput) -> None:
        """Record the requests that leave, and the blocks whose contents this step replaces."""
        size, group, is_filled = self._facts.block_size, self._group, self._is_filled
        if self._states is not None:
            for req_id in (*step.preempted_req_ids, *step.finished_req_ids):
                self._states.release(req_id)
        for new in step.scheduled_new_reqs:
            for block_id in new.block_ids[group][-(-new.num_cached_tokens // size) :]:
                is_filled[block_id] = 0
        for new_blocks in step.scheduled_cached_reqs.new_block_ids:
            for block_id in new_blocks[group]:
                is_filled[block_id] = 0
        for block_id in step.swap_in.device_block_ids:
            is_filled[block_id] = 0

    def propose(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Make drafts for the requests that sampled, after their tokens have been appended.

        If drafts will follow, the KV of the step's other tokens is computed, too. A request that is
        missing more than one step may compute gets no drafts yet.
        """
        parts: list[_Part] = []
        num_drafting = 0
        num_left = self._max_tokens
        for scheduled_part in scheduled:
            request, samples = scheduled_part.request, scheduled_part.samples
            if samples:
                request.draft_token_ids = []
            if request.draft_limit == 0 and self._states is not None and request.draft_progress:
                self._progress(request)  # the states of its last drafts are free now
            if request.draft_limit == 0 or num_left == 0:
                continue
            end = request.num_tokens if samples else scheduled_part.end
            progress = self._progress(request)
            start = min(progress.position, end - 1) if samples else progress.position
            num_tokens = min(end - start, num_left)
            if num_tokens <= 0 or end > self._max_len:
                continue
            num_drafts = 0
            if samples and start + num_tokens == end:
                num_drafts = self._num_drafts(request)
                if num_drafts <= 0:
                    continue  # its end is near, and no draft could be accepted
            stop = start + num_tokens
            path = self._state_path(request, start, stop, num_drafts)
            if path is None:
                continue  # there is no room until other requests leave
            num_left -= num_tokens
            table = self._table(request, num_drafting if path.num_drafts else None)
            num_drafting += path.num_drafts > 0
            parts.append(_Part(request, table, start, stop, path))
            self._record_computed(request, progress, stop)
        if parts:
            self._pool.wake()
            self._draft(parts)

    def _progress(self, request: MirroredRequest) -> DraftProgress:
        """Return a request's progress, settled by the tokens that are known now."""
        progress, states = request.draft_progress, self._states
        if progress is None:
            blocks = self._filled_blocks(request)
            position = len(blocks) * self._facts.block_size
            if states is not None:
                num_before_last = (request.num_tokens - 1) // self._facts.block_size
                position = states.begin(request.req_id, blocks[:num_before_last])
            progress = request.draft_progress = DraftProgress(position)
        else:
            before = progress.position
            progress.settle(request.token_ids)
            self._fill(request, before, progress.position)
            if states is not None:
                self._keep_snapshots(states, request, before, progress.position)
                states.settle(request.req_id, progress.position)
        progress.position = min(progress.position, request.num_tokens)
        return progress

    def _state_path(
        self, request: MirroredRequest, start: int, stop: int, num_drafts: int
    ) -> StatePath | None:
        """Return the state blocks of a part and of its drafts; None: there is no room."""
        if self._states is None:
            return StatePath(NULL_BLOCK, {}, num_drafts)
        num_slots = len(request.block_tables[self._group]) * self._facts.block_size
        return self._states.take(request.req_id, start, stop, num_slots, num_drafts)

    def _filled_blocks(self, request: MirroredRequest) -> "array[int]":
        """Return the first blocks of a request that hold this model's KV of its tokens."""
        table = request.block_tables[self._group]
        missing = (index for index, block_id in enumerate(table) if not self._is_filled[block_id])
        return table[: next(missing, len(table))]

    def _keep_snapshots(
        self, states: DraftModelStates, request: MirroredRequest, start: int, stop: int
    ) -> dict[int, int]:
        """Keep snapshots of positions from `start` to `stop`, in the request's own blocks.

        Returns the state blocks that must receive states, by position.
        """
        table, size, path = request.block_tables[self._group], self._facts.block_size, {}
        stop = min(stop, len(table) * size)
        for end in states.ends_of_snapshots(start, stop, request.num_prompt_tokens):
            block_id = states.keep(request.req_id, table[end // size - 1], end)
            if block_id is not None:
                path[end] = block_id
        return path

    def _num_drafts(self, request: MirroredRequest) -> int:
        """Return how many drafts could be accepted before the request's end."""
        most = request.num_prompt_tokens + request.sampling_params.max_tokens
        room = min(most, self._max_len) - request.num_tokens - 1
        return min(request.draft_limit, room)

    def _table(self, request: MirroredRequest, place: int | None) -> "array[int]":
        """Return the request's table; a request with drafts, given its `place`, has spare blocks.

        The model's own table may end before the next tokens, since their blocks are not allocated
        yet.
        """
        table = request.block_tables[self._group]
        if place is None:
            return table
        first = self._facts.num_gpu_blocks + place * self._num_spare
        return table + array("i", range(first, first + self._num_spare))

    def _record_computed(self, request: MirroredRequest, progress: DraftProgress, end: int) -> None:
        """Record that a request is computed to `end`, up to the end of its own blocks."""
        before = progress.position
        num_slots = len(request.block_tables[self._group]) * self._facts.block_size
        progress.position = max(before, min(end, num_slots))
        self._fill(request, before, progress.position)

    def _fill(self, request: MirroredRequest, start: int, end: int) -> None:
        """Mark the blocks as filled that end after `start` and up to `end`."""
        size, table = self._facts.block_size, request.block_tables[self._group]
        for index in range(start // size, end // size):
            if not self._is_filled[table[index]]:
                self._is_filled[table[index]] = 1
                if self._states is not None:
                    self._states.forget(table[index])

    def _draft(self, parts: Sequence["_Part"]) -> None:
        """Compute all parts, then one more token for each request and further draft."""
        drafting = [part for part in parts if part.num_drafts]
        known = [part.request.num_tokens for part in drafting]
        if self._states is not None:
            for part in parts:
                snapshots = self._keep_snapshots(self._states, part.request, part.start, part.stop)
                part.path.blocks.update(snapshots)
        chosen = self._compute(parts)
        if self._states is not None:
            self._states.end_step()
        places = list(range(len(drafting)))
        most = max((part.num_drafts for part in drafting), default=0)
        for number in range(1, most + 1):
            # The draft becomes the request's last token until all drafts are made.
            for place, token_id in zip(places, chosen, strict=True):
                drafting[place].request.token_ids.append(token_id)
            places = [place for place in places if drafting[place].num_drafts > number]
            if not places:
                break
            chosen = self._compute([drafting[place].after(number) for place in places])
        for part, length in zip(drafting, known, strict=True):
            request = part.request
            drafts = request.token_ids[length:]
            del request.token_ids[length:]
            request.draft_token_ids = drafts
            self._keep(request, drafts[:-1], length)

    def _keep(self, request: MirroredRequest, drafts: list[int], length: int) -> None:
        """Keep the drafts whose KV is in the request's own blocks."""
        progress = request.draft_progress
        assert progress is not None
        num_slots = len(request.block_tables[self._group]) * self._facts.block_size
        if progress.position == length:
            progress.ahead = drafts[: num_slots - length]

    def _compute(self, parts: Sequence["_Part"]) -> list[int]:
        """Compute the parts, and choose the next token of those with drafts."""
        loaded, vocab_size = self._loaded, self._facts.vocab_size
        inputs = pack_step([self._scheduled(part) for part in parts], loaded.device)
        if loaded.vocab_size < vocab_size:  # the model's vocabulary is padded
            inputs.input_ids.clamp_(max=loaded.vocab_size - 1)
        logits = compute_logits(loaded.model, self._backend, inputs, vocab_size)
        choosing = [part.request for part in parts if part.num_drafts]
        if not choosing:
            return []
        if logits.shape[1] < vocab_size:
            missing = vocab_size - logits.shape[1]
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return self._sampler.choose(logits, choosing)

    def _scheduled(self, part: "_Part") -> ScheduledRequest:
        """Return a part in the draft model's form: without prompt logprobs."""
        tables = [part.table]
        if self._states is not None:
            tables.append(part.state_table(self._facts.block_size))
        computed = MirroredRequest(
            part.request.req_id,
            part.request.token_ids,
            part.request.num_prompt_tokens,
            _NO_PARAMS,
            tables,
            0,
            0,
            state_block=part.path.source,
        )
        num_tokens = part.stop - part.start
        return ScheduledRequest(computed, part.start, num_tokens, part.num_drafts > 0)


_NO_PARAMS = SamplingParams()


class _Part(NamedTuple):
    """Consecutive tokens of a request that the draft model computes at once."""

    request: MirroredRequest
    table: "array[int]"
    start: int
    stop: int
    path: StatePath

    @property
    def num_drafts(self) -> int:
        """Number of drafts to make after it; 0: it does not reach the end of the known tokens."""
        return self.path.num_drafts

    def after(self, number: int) -> "_Part":
        """Return the part that computes draft `number` after this one, counted from 1."""
        end = self.stop + number
        path = self.path._replace(source=self.path.blocks.get(end - 1, NULL_BLOCK))
        return self._replace(start=end - 1, stop=end, path=path)

    def state_table(self, block_size: int) -> "array[int]":
        """Return a table that has each block that receives a state at the end of its tokens."""
        table = array("i", [NULL_BLOCK]) * -(-self.stop // block_size)
        for position, block_id in self.path.blocks.items():
            if self.start < position <= self.stop:
                table[(position - 1) // block_size] = block_id
        return table
