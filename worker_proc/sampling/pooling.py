"""Pools hidden states of the last layer, after its norm, to one vector for each prompt.

A mean is summed in float64, token after token, so that its bits do not depend on how the prompt was
chunked. The hidden states themselves are as exact as the logits.
"""

import math
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from protocol.sampling import MAX_EMBEDDING_SIZE, Pooling, PoolingType
from worker_proc.request import ScheduledRequest
from worker_proc.sampling.heads import Head

_ROWS_AT_ONCE = 256
"""Rows that are summed in one call, which bounds the memory of the float64 copy."""
_SHORTEST = 1e-12
"""Shorter vectors are not normalized to length 1."""


class Pooled(NamedTuple):
    """Packed vectors of prompts that end in a step, and the requests without a valid vector."""

    vectors: dict[int, bytes]
    not_finite: list[int]


class HiddenStates:
    """The last output of the model's part before the output layer: `[T, size]`."""

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """The size of a vector; 0: the part was not found, or its vectors are too large."""
        if self.rows is None or self.rows.dim() != 2 or self.rows.shape[1] > MAX_EMBEDDING_SIZE:
            return 0
        return self.rows.shape[1]


@contextmanager
def captured_hidden_states(model: Any) -> Iterator[HiddenStates]:
    """Keep hidden states while the model runs; without a model nothing is kept."""
    found = HiddenStates()

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output[0], torch.Tensor):
            found.rows = output[0][0]

    handles = [part.register_forward_hook(keep) for part in _parts_before_head(model)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _parts_before_head(model: Any) -> list[nn.Module]:
    """Return the modules that may compute hidden states; the outermost one returns last."""
    if model is None:
        return []
    # In Llama 4, the base model has another name than `base_model` looks for.
    named = model.base_model, model.get_decoder(), getattr(model, "model", None)
    return [part for part in dict.fromkeys(named) if part is not None and part is not model]


def pool(
    scheduled: Sequence[ScheduledRequest],
    first_rows: Sequence[int],
    pooling_req_ids: Set[int],
    hidden: torch.Tensor | None,
    head: Head | None = None,
) -> Pooled:
    """Pool the step's rows of `hidden`, and return the vectors of prompts that end."""
    assert hidden is not None, "the core accepts no such requests for this model"
    pooled = Pooled({}, [])
    for part, first in zip(scheduled, first_rows, strict=True):
        request = part.request
        if request.req_id not in pooling_req_ids:
            continue
        pooling = request.sampling_params.pooling
        assert pooling is not None
        rows = hidden[first : first + part.num_tokens]
        vector = _pooled_so_far(part, pooling.type, rows)
        if part.samples:
            if head is not None:
                vector = head(vector)
            vector = _finish(vector, pooling)
            if bool(vector.isfinite().all()):
                pooled.vectors[request.req_id] = vector.numpy().astype("<f4").tobytes()
            else:
                pooled.not_finite.append(request.req_id)
    return pooled


def _pooled_so_far(part: ScheduledRequest, type: PoolingType, rows: torch.Tensor) -> torch.Tensor:
    """Return the pooled value of all rows so far, and keep the partial result for later rows."""
    if type is PoolingType.LAST:
        return rows[-1].double()
    request = part.request
    before = request.pooled_so_far
    assert before is None or isinstance(before, torch.Tensor)
    assert before is not None or part.start == 0
    kept: torch.Tensor
    if type is PoolingType.CLS:
        kept = rows[0].double() if before is None else before
    elif type is PoolingType.MAX:
        kept = rows.amax(0).double()
        kept = kept if before is None else torch.maximum(kept, before)
    elif type is PoolingType.WEIGHTED_MEAN:
        kept = _add(before, rows, part.start + 1)
    else:
        kept = _add(before, rows)
    request.pooled_so_far = kept
    return kept / _divisor(type, part.end)


def _divisor(type: PoolingType, num_tokens: int) -> float:
    """Return the divisor of the sum over tokens."""
    if type is PoolingType.MEAN:
        return num_tokens
    if type is PoolingType.WEIGHTED_MEAN:
        return num_tokens * (num_tokens + 1) // 2
    if type is PoolingType.MEAN_SQRT_LEN:
        return math.sqrt(num_tokens)
    return 1


def _add(total: Any, rows: torch.Tensor, first_weight: int | None = None) -> torch.Tensor:
    """Add rows to a sum, unweighted or with the weights `first_weight`, `first_weight` + 1, ..."""
    for number, piece in enumerate(rows.split(_ROWS_AT_ONCE)):
        summands = piece.double()
        if first_weight is not None:
            first = first_weight + number * _ROWS_AT_ONCE
            weights = torch.arange(first, first + len(piece), device=rows.device)
            summands = summands * weights[:, None]
        if total is not None:
            summands = torch.cat((total[None], summands))
        total = summands.cumsum(0)[-1]  # unlike `sum`, it adds in row order
    assert isinstance(total, torch.Tensor)
    return total


def _finish(vector: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    vector = vector[: pooling.dimensions]
    if pooling.normalize:
        vector = vector / vector.norm().clamp_min(_SHORTEST)
    return vector.float().cpu()
