"""Drafts the next tokens of requests with a second, smaller model.

It chooses each draft as the sampler would if its logits were the model's own: with the request's
parameters, and with the random number of that position. So the better it agrees with the model, the
more drafts are right, whatever the temperature.

Its KV is kept under the block ids of the model's requests, in tensors of its own. It is computed
when drafts are wanted, from the first position on for which it is missing: that of a new prompt, of
a prefix whose blocks were filled while no drafts were made, or of a request that returns from a
preemption, from the host or from a worker that died. Blocks are also written to stores and read
from them, with those of the model (`worker_proc/offload/drafts.py`). A draft is never trusted, so
KV that is missing or outdated costs time, and no token.
"""

from array import array
from collections.abc import Sequence

import torch

from protocol.core_worker import ModelFacts, SchedulerOutput
from protocol.sampling import SamplingParams
from worker_proc.attention.interface import AttentionBackend
from worker_proc.drafting.draft_progress import DraftProgress
from worker_proc.forward import compute_logits
from worker_proc.inputs import pack_step
from worker_proc.kv.kv_pool import KVPool
from worker_proc.loading.loader import LoadedModel
from worker_proc.mirror import MirroredRequest, ScheduledRequest
from worker_proc.sampling.sampler import Sampler


def num_spare_blocks(block_size: int, num_speculative_tokens: int) -> int:
    """Return the blocks beyond its own that one request needs while drafts are made for it."""
    return 1 + -(-num_speculative_tokens // block_size)


class DraftModel:
    """A draft model with its KV cache, which follows the steps of the model."""

    def __init__(
        self,
        loaded: LoadedModel,
        backend: AttentionBackend,
        pool: KVPool,
        sampler: Sampler,
        facts: ModelFacts,
        *,
        group: int,
        num_spare: int,
        max_tokens: int,
    ) -> None:
        """Take a model that is attached to `pool`: the model's blocks, then spare ones.

        `group` is the KV group whose tables it follows, `num_spare` the spare blocks of a request,
        and `max_tokens` the most tokens that it computes in one step.
        """
        self._loaded = loaded
        self._backend = backend
        self._pool = pool
        self._sampler = sampler
        self._facts = facts
        self._group = group
        self._num_spare = num_spare
        self._max_tokens = max_tokens
        self._max_len = min(facts.max_model_len, loaded.model_len)
        self._is_filled = bytearray(facts.num_gpu_blocks)
        """By block: 1 if it holds this model's KV of the tokens that the model's KV is of."""

    def sleep(self) -> None:
        self._pool.sleep()
        self._is_filled = bytearray(len(self._is_filled))

    def holds(self, block_id: int) -> bool:
        """Whether a block has this model's KV of the tokens that the model's KV is of."""
        return bool(self._is_filled[block_id])

    def note(self, block_id: int, *, is_filled: bool) -> None:
        """Note whether a block that no request has yet was filled from a store."""
        self._is_filled[block_id] = is_filled

    def follow(self, step: SchedulerOutput) -> None:
        """Note the blocks that get other contents in this step."""
        size, group, is_filled = self._facts.block_size, self._group, self._is_filled
        for new in step.scheduled_new_reqs:
            for block_id in new.block_ids[group][-(-new.num_cached_tokens // size) :]:
                is_filled[block_id] = 0
        for new_blocks in step.scheduled_cached_reqs.new_block_ids:
            for block_id in new_blocks[group]:
                is_filled[block_id] = 0
        for block_id in step.swap_in.device_block_ids:
            is_filled[block_id] = 0

    def propose(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Make drafts for the requests that sampled, once their tokens are appended.

        The KV of the step's other tokens is computed, too, where drafts will follow. A request for
        which more is missing than one step may compute gets no drafts yet.
        """
        parts: list[ScheduledRequest] = []
        drafting: list[MirroredRequest] = []
        num_left = self._max_tokens
        for part in scheduled:
            request = part.request
            if part.samples:
                request.draft_token_ids = []
            if request.draft_limit == 0 or num_left == 0:
                continue
            end = request.num_tokens if part.samples else part.end
            progress = self._progress(request)
            start = min(progress.position, end - 1) if part.samples else progress.position
            num_tokens = min(end - start, num_left)
            if num_tokens <= 0 or end > self._max_len:
                continue
            num_left -= num_tokens
            is_ready = part.samples and start + num_tokens == end and self._num_drafts(request) > 0
            if is_ready:
                drafting.append(request)
            elif part.samples and start + num_tokens == end:
                continue  # its end is near, and no draft could be accepted
            table = self._table(request, len(drafting) - 1 if is_ready else None)
            parts.append(_part(request, table, start, num_tokens, samples=is_ready))
            self._computed(request, progress, start + num_tokens)
        if parts:
            self._pool.wake()
            self._draft(parts, drafting)

    def _progress(self, request: MirroredRequest) -> DraftProgress:
        progress = request.draft_progress
        if progress is None:
            num_filled = 0
            for block_id in request.block_tables[self._group]:
                if not self._is_filled[block_id]:
                    break
                num_filled += self._facts.block_size
            progress = request.draft_progress = DraftProgress(num_filled)
        else:
            before = progress.position
            progress.settle(request.token_ids)
            self._fill(request, before, progress.position)
        progress.position = min(progress.position, request.num_tokens)
        return progress

    def _num_drafts(self, request: MirroredRequest) -> int:
        """Return how many drafts could be accepted before the request's end."""
        most = request.num_prompt_tokens + request.sampling_params.max_tokens
        room = min(most, self._max_len) - request.num_tokens - 1
        return min(request.draft_limit, room)

    def _table(self, request: MirroredRequest, place: int | None) -> "array[int]":
        """Return the request's table; with a place among those with drafts, spare blocks follow.

        The model's own table may end before the next tokens, as their blocks are not yet given.
        """
        table = request.block_tables[self._group]
        if place is None:
            return table
        first = self._facts.num_gpu_blocks + place * self._num_spare
        return table + array("i", range(first, first + self._num_spare))

    def _computed(self, request: MirroredRequest, progress: DraftProgress, end: int) -> None:
        """Note that a request is computed to `end`, as far as its own blocks reach."""
        before = progress.position
        num_slots = len(request.block_tables[self._group]) * self._facts.block_size
        progress.position = max(before, min(end, num_slots))
        self._fill(request, before, progress.position)

    def _fill(self, request: MirroredRequest, start: int, end: int) -> None:
        size, table = self._facts.block_size, request.block_tables[self._group]
        for index in range(start // size, end // size):
            self._is_filled[table[index]] = 1

    def _draft(self, parts: list[ScheduledRequest], drafting: list[MirroredRequest]) -> None:
        """Compute all parts; then one more token for each request and further draft."""
        known = [request.num_tokens for request in drafting]
        counts = [self._num_drafts(request) for request in drafting]
        choosing = [part for part in parts if part.samples]
        chosen = self._compute(parts, drafting)
        places = list(range(len(drafting)))
        for number in range(1, max(counts, default=0) + 1):
            # The draft becomes the request's last token until all drafts are made.
            for place, token_id in zip(places, chosen, strict=True):
                drafting[place].token_ids.append(token_id)
            places = [place for place in places if counts[place] > number]
            if not places:
                break
            next_parts = [
                _part(
                    drafting[place],
                    choosing[place].request.block_tables[0],
                    known[place] + number - 1,
                    1,
                    samples=True,
                )
                for place in places
            ]
            chosen = self._compute(next_parts, [drafting[place] for place in places])
        for request, length in zip(drafting, known, strict=True):
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

    def _compute(self, parts: list[ScheduledRequest], choosing: list[MirroredRequest]) -> list[int]:
        """Compute the parts, and choose the next token of those that sample."""
        loaded, vocab_size = self._loaded, self._facts.vocab_size
        inputs = pack_step(parts, loaded.device)
        if loaded.vocab_size < vocab_size:  # the rows of the model's vocabulary that pad it
            inputs.input_ids.clamp_(max=loaded.vocab_size - 1)
        logits = compute_logits(loaded.model, self._backend, inputs, vocab_size)
        if not choosing:
            return []
        if logits.shape[1] < vocab_size:
            missing = vocab_size - logits.shape[1]
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return self._sampler.choose(logits, choosing)


_NO_PARAMS = SamplingParams()


def _part(
    request: MirroredRequest, table: "array[int]", start: int, num_tokens: int, *, samples: bool
) -> ScheduledRequest:
    """Return a part of a request as the draft model computes it: without prompt logprobs."""
    computed = MirroredRequest(
        request.req_id, request.token_ids, request.num_prompt_tokens, _NO_PARAMS, [table], 0, 0
    )
    return ScheduledRequest(computed, start, num_tokens, samples)
