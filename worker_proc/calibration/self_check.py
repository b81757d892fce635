"""Compares the paged forward with transformers' own, once, after a model has been loaded.

Code between the attention layers may rely on rows with a single text (a convolution, positions
counted from a mask), and would give wrong results for packed rows without an error. Two short texts
that are computed together in steps must give the same logits as each text alone.
"""

import math
import statistics
from array import array
from contextlib import nullcontext
from dataclasses import replace
from itertools import count, islice

import torch

from protocol.sampling import SamplingParams
from worker_proc.attention.interface import AttentionBackend, transformers_attention
from worker_proc.calibration.held_mixtures import HeldMixtures, Rows, mixtures_of
from worker_proc.errors import UnsupportedModel
from worker_proc.forward import compute_logits
from worker_proc.inputs import pack_step, to_device
from worker_proc.kv.kv_groups import KVLayout
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.recurrent.layers import own_forwards
from worker_proc.request import MirroredRequest, ScheduledRequest

TEXT_LENGTHS = (5, 3)
NUM_DECODED = 2
"""The number of tokens at the end of each text that are computed in separate steps."""
MAX_ERROR = {torch.float32: 0.01}
MAX_ERROR_OF_HALF = 0.15
"""Relative error of the median row, since rounding may send a row to another expert."""


def num_blocks_needed(layout: KVLayout) -> int:
    """Return the number of blocks that the pool must have for the check."""
    per_group = sum(-(-length // layout.block_size) for length in TEXT_LENGTHS)
    return 1 + per_group * layout.num_tables


def check_forward(
    loaded: LoadedModel, backend: AttentionBackend, layout: KVLayout
) -> list[torch.Tensor]:
    """Check the forward, which overwrites the first blocks; raise UnsupportedModel if it differs.

    Returns the logits of the last rows of each text, `[1 + NUM_DECODED, vocab_size]`. If rounding
    sends most rows to other experts, as it may in small models, the rows are compared again with
    the outputs of mixtures held.
    """
    texts = check_texts(loaded.vocab_size)
    try:
        paged = compute_stepwise(loaded, backend, layout)
        expected = [_expected_logits(loaded, text) for text in texts]
        difference = median_error(paged, expected)
        if not difference <= max_error(loaded.dtype) and mixtures_of(loaded.model):
            difference = _error_with_held_mixtures(loaded, backend, layout, texts)
    except (TypeError, AttributeError, LookupError, RuntimeError, ValueError) as error:
        kind = loaded.model.config.model_type
        raise UnsupportedModel(f"{kind}: its forward fails over packed rows: {error}") from error
    if not difference <= max_error(loaded.dtype):
        raise UnsupportedModel(
            f"{loaded.model.config.model_type}: its logits over packed rows differ from its logits"
            f" over separate rows (relative error {difference:.3g})"
        )
    return paged


def _error_with_held_mixtures(
    loaded: LoadedModel, backend: AttentionBackend, layout: KVLayout, texts: list[list[int]]
) -> float:
    held = HeldMixtures(loaded.model)
    expected = []
    for number, text in enumerate(texts):
        with held.recorded(number):
            expected.append(_expected_logits(loaded, text))
    difference = median_error(compute_stepwise(loaded, backend, layout, held), expected)
    return max(difference, held.error)


def max_error(dtype: torch.dtype) -> float:
    """Return the greatest relative error that is accepted between two computations of logits."""
    return MAX_ERROR.get(dtype, MAX_ERROR_OF_HALF)


def median_error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the median relative error of the rows of logits, or infinity if any error is NaN."""
    errors = [
        float((got - want).norm() / want.norm().clamp_min(1e-6))
        for got_rows, want_rows in zip(found, expected, strict=True)
        for got, want in zip(got_rows.float(), want_rows.float(), strict=True)
    ]
    return math.inf if any(map(math.isnan, errors)) else statistics.median(errors)


def compute_whole(
    loaded: LoadedModel,
    backend: AttentionBackend,
    layout: KVLayout,
    texts: list[list[int]],
    first_position: int = 0,
) -> list[torch.Tensor]:
    """Compute the texts in one step, in reverse order; return the rows of `check_forward`.

    With a later `first_position`, the model computes other angles; attention stays the same.
    """
    requests = trial_requests(layout, texts)
    parts = [ScheduledRequest(r, 0, len(r.token_ids), True) for r in reversed(requests)]
    inputs = pack_step(parts, loaded.device)
    ends = [first + part.num_tokens for first, part in zip(inputs.first_rows, parts, strict=True)]
    rows = [row for end in ends for row in range(end - 1 - NUM_DECODED, end)]
    inputs = replace(
        inputs,
        position_ids=inputs.position_ids + first_position,
        logits_indices=to_device(rows, loaded.device),
    )
    logits = compute_logits(loaded.model, backend, inputs, loaded.vocab_size)
    return list(logits.split(1 + NUM_DECODED))[::-1]


def check_texts(vocab_size: int) -> list[list[int]]:
    """Return the token ids of the texts of the check."""
    first, texts = 1, []
    for length in TEXT_LENGTHS:
        texts.append([(first + i) * 7919 % vocab_size for i in range(length)])
        first += length
    return texts


def compute_stepwise(
    loaded: LoadedModel,
    backend: AttentionBackend,
    layout: KVLayout,
    held: HeldMixtures | None = None,
) -> list[torch.Tensor]:
    """Return the last rows of each text, computed in steps: the rows of `check_forward`.

    If attention is not causal, a step computes a whole text, and nothing is held.
    """
    if not loaded.is_causal:
        texts = check_texts(loaded.vocab_size)
        return [compute_whole(loaded, backend, layout, [text])[0] for text in texts]
    requests = trial_requests(layout, check_texts(loaded.vocab_size))
    steps = []
    for back in range(NUM_DECODED, -1, -1):
        parts = []
        for request in requests:
            end = len(request.token_ids) - back
            start = 0 if back == NUM_DECODED else end - 1
            parts.append(ScheduledRequest(request, start, end - start, True))
        inputs = pack_step(parts, loaded.device)
        rows = [Rows(one.request.req_id, one.start, one.end) for one in parts]
        with nullcontext() if held is None else held.returned(rows):
            steps.append(compute_logits(loaded.model, backend, inputs, loaded.vocab_size))
    return list(torch.stack(steps, dim=1))


def trial_requests(layout: KVLayout, texts: list[list[int]]) -> list[MirroredRequest]:
    """Return requests over `texts` with separate block tables, from block 1 on."""
    requests = []
    free_blocks = count(1)
    for req_id, text in enumerate(texts):
        num_blocks = -(-len(text) // layout.block_size)
        tables = [array("i", islice(free_blocks, num_blocks)) for _ in range(layout.num_tables)]
        requests.append(MirroredRequest(req_id, text, len(text), SamplingParams(), tables, 0, 0))
    return requests


@torch.inference_mode()
def _expected_logits(loaded: LoadedModel, text: list[int]) -> torch.Tensor:
    model = loaded.model
    input_ids = torch.tensor([text], device=loaded.device)
    with transformers_attention(model), own_forwards(model):
        logits: torch.Tensor = model(input_ids=input_ids, use_cache=False).logits[0]
    return logits[-1 - NUM_DECODED :, : loaded.vocab_size]
