"""Samples the tokens of a step on the host, with grammar masks, and verifies drafts."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch

from protocol.core_worker import PromptLogprobs, TokenLogprobs
from protocol.model_facts import ModelFacts
from worker_proc.grammar.compiler import GrammarCompiler
from worker_proc.grammar.following import grammar_state_of
from worker_proc.grammar.masks import MaskComputer, MaskedRows, RowMasks
from worker_proc.inputs import StepInputs
from worker_proc.request import MirroredRequest, ScheduledRequest
from worker_proc.sampling.sampler import Sampler
from worker_proc.sampling.verification import DraftedRow, count_valid, rows_to_sample

NOT_FINITE = "the model's logits for this request are not finite"


class StepTokens(NamedTuple):
    """The tokens that a step sampled; logprobs and errors by request id."""

    token_ids: list[int]
    num_tokens: list[int]
    """The number of tokens of each request that sampled; empty: one each."""
    logprobs: dict[int, list[TokenLogprobs]]
    errors: dict[int, str]


class StepSampler:
    """Samples steps on the host; keeps no state of requests."""

    def __init__(
        self,
        sampler: Sampler,
        facts: ModelFacts,
        grammars: GrammarCompiler | None,
        *,
        num_mask_threads: int,
    ) -> None:
        self._sampler = sampler
        self._facts = facts
        self._grammars = grammars
        self._num_mask_threads = num_mask_threads
        self._mask_computer: MaskComputer | None = None

    def begin_masks(self, inputs: StepInputs) -> Future[RowMasks] | None:
        """Start to compute the masks of the rows that `sample` will create, alongside the model."""
        requests = []
        row = 0
        for part in inputs.sampling:
            request, num_drafts = part.request, part.num_drafts
            if request.sampling_params.grammar is not None:
                state = grammar_state_of(request, self._grammars)
                drafts = request.draft_token_ids[:num_drafts]
                requests.append(MaskedRows(row, state, drafts))
            row += 1 + num_drafts
        if not requests:
            return None
        if self._mask_computer is None:
            assert self._grammars is not None
            self._mask_computer = MaskComputer(
                self._num_mask_threads,
                self._grammars.num_tokens,
                self._facts.vocab_size,
                self._grammars.special_token_ids,
            )
        return self._mask_computer.begin(requests)

    def sample(
        self, inputs: StepInputs, logits: torch.Tensor, masks: RowMasks | None
    ) -> StepTokens:
        """Sample the parts of a step that sample, and verify their drafts.

        `logits` is `[N, vocab_size]`, for `inputs.logits_indices`.
        """
        if not inputs.sampling:
            return StepTokens([], [], {}, {})
        if not self._facts.generates:  # `logits` are hidden states
            return StepTokens([0] * len(inputs.sampling), [], {}, {})
        rows = rows_to_sample(inputs.sampling)
        if len(rows) == len(inputs.sampling):
            return self.sample_rows(rows, logits, masks)
        return self.sample_rows(rows, logits, masks, inputs.sampling)

    def sample_rows(
        self,
        rows: Sequence[MirroredRequest | DraftedRow],
        logits: torch.Tensor,
        masks: RowMasks | None = None,
        drafted: Sequence[ScheduledRequest] = (),
    ) -> StepTokens:
        """Sample a token for each row; drop those after a wrong draft in the `drafted` parts."""
        sampled = self._sampler.sample(logits[: len(rows)], rows, masks)
        token_ids, counts = sampled.token_ids, list[int]()
        valid: Sequence[int] = range(len(rows))
        if drafted:
            counts, valid = count_valid(drafted, token_ids)
            token_ids = [token_ids[row] for row in valid]
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for row in valid if any(sampled.logprobs) else ():
            if (entry := sampled.logprobs[row]) is not None:
                logprobs.setdefault(rows[row].req_id, []).append(entry)
        lost = set(sampled.not_finite).intersection(valid)
        errors = {rows[row].req_id: NOT_FINITE for row in lost}
        return StepTokens(token_ids, counts, logprobs, errors)

    def prompt_logprobs(self, inputs: StepInputs, logits: torch.Tensor) -> list[PromptLogprobs]:
        """Return the logprobs of the prompt tokens that the step has computed."""
        found = []
        for part, first_row, num_rows in inputs.prompt_rows:
            num_top = part.request.sampling_params.prompt_logprobs
            assert num_top is not None
            first = part.start + 1
            entries = self._sampler.prompt_logprobs(
                logits[first_row : first_row + num_rows],
                part.request.token_ids[first : first + num_rows],
                num_top,
            )
            found.append(PromptLogprobs(part.request.req_id, first, entries))
        return found
