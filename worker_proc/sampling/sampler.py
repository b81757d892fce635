"""Chooses the next token of each row: a pure function of logits, parameters, seed and ids.

The stages are, in order: raw logprobs if requested; min_tokens, bad_words, logit_bias, penalties,
allowed_token_ids and thinking budget (`logit_edits`); greedy rows take the most likely token; other
rows go through temperature, min_p, top_k, top_p and one draw (`inverse_cdf`). A row goes only
through the stages that its parameters require, and its token never depends on the other rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from protocol.core_worker import TokenLogprobs
from worker_proc.grammar.masks import RowMasks
from worker_proc.native.kernels import NativeLibrary
from worker_proc.sampling.inverse_cdf import MAX_VOCAB_SIZE
from worker_proc.sampling.logit_edits import SamplingRow
from worker_proc.sampling.native_choice import NativeChoice
from worker_proc.sampling.ranking import token_logprobs
from worker_proc.sampling.torch_choice import TorchChoice

_CPU_CHUNK_ELEMENTS = 2**19
_CUDA_CHUNK_ELEMENTS = 2**24
"""Number of scores processed at a time, with temporaries of about 40 bytes each. Larger chunks are
twice as slow on the CPU: the allocator returns their pages, and every tensor faults them in
again."""


class Choice(Protocol):
    """An implementation of choosing a step's tokens; all implementations choose the same tokens."""

    def choose(
        self, logits: Tensor, rows: Sequence[SamplingRow], masks: RowMasks | None
    ) -> tuple[list[int], list[int]]:
        """Return a token for each row, and the rows that are not finite, whose token is 0."""


MakeChoice = Callable[[int, Sequence[int], int], Choice]
"""Takes the size of the vocabulary, the EOS ids, and the number of rows to edit at a time."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One entry per row, in row order."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]  # None for rows without the parameter
    not_finite: list[int]
    """Rows whose logits hold NaN or +inf, or only -inf: their tokens are meaningless."""


class Sampler:
    """Samples next tokens; keeps no state."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device,
        library: NativeLibrary | None = None,
        make_choice: MakeChoice | None = None,
    ) -> None:
        """Use `make_choice` if given; otherwise `library`, on the CPU; otherwise torch."""
        if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(f"vocab_size is {vocab_size}, not in 1..{MAX_VOCAB_SIZE}")
        self._vocab_size = vocab_size
        on_cpu = device.type == "cpu"
        num_elements = _CPU_CHUNK_ELEMENTS if on_cpu else _CUDA_CHUNK_ELEMENTS
        self._chunk_rows = max(1, num_elements // vocab_size)
        self._choice: Choice
        if make_choice is not None:
            self._choice = make_choice(vocab_size, eos_token_ids, self._chunk_rows)
        elif on_cpu and library is not None:
            self._choice = NativeChoice(library, vocab_size, eos_token_ids)
        else:
            self._choice = TorchChoice(vocab_size, eos_token_ids, self._chunk_rows)

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, rows: Sequence[SamplingRow], masks: RowMasks | None = None
    ) -> SampledTokens:
        """Choose one token per row of raw logits, float [n, vocab], which are not changed.

        If edits ban every token whose logit is not -inf, the row takes the most likely token of its
        raw logits; a row with a mask then chooses among all tokens that the mask allows. A row that
        is not finite takes token 0.
        """
        assert logits.shape == (len(rows), self._vocab_size), logits.shape
        token_ids, not_finite = self._choice.choose(logits, rows, masks)
        return SampledTokens(token_ids, self._logprobs(logits, rows, token_ids), not_finite)

    @torch.inference_mode()
    def choose(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
        """Choose tokens like `sample`, without masks and logprobs."""
        return self._choice.choose(logits, rows, None)[0]

    @torch.inference_mode()
    def prompt_logprobs(
        self, logits: Tensor, next_token_ids: Sequence[int], num_top: int
    ) -> list[TokenLogprobs]:
        """Describe the prompt tokens that follow the positions of `logits`, float [m, vocab]."""
        assert logits.shape == (len(next_token_ids), self._vocab_size), logits.shape
        entries: list[TokenLogprobs] = []
        for start in range(0, len(next_token_ids), self._chunk_rows):
            ids = next_token_ids[start : start + self._chunk_rows]
            part = logits[start : start + self._chunk_rows]
            entries += token_logprobs(part, ids, [num_top] * len(ids))
        return entries

    def _logprobs(
        self, logits: Tensor, rows: Sequence[SamplingRow], token_ids: Sequence[int]
    ) -> list[TokenLogprobs | None]:
        entries: list[TokenLogprobs | None] = [None] * len(rows)
        asking = [
            (i, num_top)
            for i, row in enumerate(rows)
            if (num_top := row.sampling_params.logprobs) is not None
        ]
        for start in range(0, len(asking), self._chunk_rows):
            part, num_tops = zip(*asking[start : start + self._chunk_rows], strict=True)
            chosen = [token_ids[i] for i in part]
            candidates = [rows[i].sampling_params.logprob_token_ids for i in part]
            found = token_logprobs(logits[list(part)], chosen, num_tops, candidates)
            for i, entry in zip(part, found, strict=True):
                entries[i] = entry
        return entries
