"""Random texts that a module computes together in steps of several lengths, as requests are."""

from array import array
from collections.abc import Callable, Sequence

import torch

from protocol.sampling import SamplingParams
from worker_proc.inputs import StepInputs, pack_step
from worker_proc.request import MirroredRequest, ScheduledRequest

STEPS = (1, 21, 44, 1, 3)
"""Tokens of each text in a step; their sum exceeds transformers' chunks of 64."""
_CPU = torch.device("cpu")


def steps_of(num_tokens: int) -> list[int]:
    """Return the leading `STEPS` that fit in `num_tokens`, and a step for the remaining tokens."""
    steps, left = [], num_tokens
    for count in (*STEPS, num_tokens):
        if left:
            steps.append(min(count, left))
            left -= steps[-1]
    return steps


def descending_tables(num_texts: int, num_tokens: int, block_size: int) -> list["array[int]"]:
    """Return the block tables of texts, from block 1 on, each in descending order."""
    per_text = -(-num_tokens // block_size)
    return [
        array("i", range(last, last - per_text, -1))
        for last in range(per_text, 1 + num_texts * per_text, per_text)
    ]


def compute_in_steps(
    rows: torch.Tensor,
    steps: Sequence[int],
    tables: Sequence["array[int]"],
    compute: Callable[[torch.Tensor, StepInputs], torch.Tensor],
) -> torch.Tensor:
    """Return the results for the rows of texts, `[num_texts, T, ...]`.

    Args:
        rows: `[num_texts, T, size]`.
        steps: the number of tokens of each text in each step; their sum is T.
        tables: the block table of each text.
        compute: computes the packed rows of a step, `[1, rows, size]`.
    """
    num_texts, num_tokens, size = rows.shape
    requests = [
        MirroredRequest(number, [0] * num_tokens, num_tokens, SamplingParams(), [table], 0, 0)
        for number, table in enumerate(tables)
    ]
    found, start = [], 0
    for count in steps:
        inputs = pack_step(
            [ScheduledRequest(request, start, count, True) for request in requests], _CPU
        )
        packed = rows[:, start : start + count].reshape(1, -1, size)
        found.append(compute(packed, inputs).view(num_texts, count, -1))
        start += count
    return torch.cat(found, dim=1)
