"""The attention kernels compute plain attention over paged keys and values."""

import math

import pytest
import torch

from tests.worker.cuda.attention_steps import Step, ints, written_slots
from tests.worker.cuda.interpreter import DEVICE, prepare_triton
from worker_proc.attention.interface import Scoring
from worker_proc.kv.kv_groups import LayerSpec

prepare_triton()
from worker_proc.cuda.attention import (  # noqa: E402
    attend,
    choose_num_splits,
    store,
)

MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 5e-3}
PARTS = ((0, 7), (9, 1), (70, 1), (3, 5), (0, 1), (90, 20))
"""Position of the first token, and number of tokens, of each part of a step."""


def expected(
    step: Step,
    parts: tuple[tuple[int, int], ...],
    spec: LayerSpec,
    scoring: Scoring,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    outs = []
    rows = iter(step.rows[0].double().split([size for _, size in parts]))
    for (start, size), text in zip(parts, step.texts, strict=True):
        repeats = spec.num_heads // spec.num_kv_heads
        keys, values = (x.double().repeat_interleave(repeats, dim=1) for x in text)
        scores = torch.einsum("thd,lhd->htl", next(rows), keys) * scoring.scale
        if scoring.softcap is not None:
            scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
        queries = torch.arange(start, start + size, device=DEVICE)[:, None]
        seen = torch.arange(start + size, device=DEVICE)
        visible = seen <= queries
        if spec.window is not None:
            visible &= seen > queries - spec.window
        scores = scores.masked_fill(~visible, -math.inf)
        if sinks is not None:
            column = sinks.double()[:, None, None].expand(-1, size, 1)
            scores = torch.cat([scores, column], dim=2)
        weights = scores.softmax(dim=2)[:, :, : start + size]
        outs.append(torch.einsum("htl,lhd->thd", weights, values))
    return torch.cat(outs)


@pytest.mark.parametrize(
    ("spec", "dtype", "softcap", "has_sinks", "num_splits"),
    [
        (LayerSpec(4, 2, 16, 16, None), torch.float32, None, False, 1),
        (LayerSpec(2, 2, 16, 16, None), torch.bfloat16, None, False, 3),
        (LayerSpec(6, 2, 24, 12, 13), torch.float32, 2.0, True, 2),
        (LayerSpec(3, 1, 20, 20, 40), torch.float16, None, True, 1),
        (LayerSpec(1, 1, 144, 130, None), torch.float32, None, False, 1),
    ],
    ids=["grouped", "one_head_each_split", "window_cap_sinks_split", "window_sinks", "wide"],
)
def test_a_mixed_step_equals_plain_attention(
    spec: LayerSpec, dtype: torch.dtype, softcap: float | None, has_sinks: bool, num_splits: int
) -> None:
    """Nothing but the visible part of a text is read: all other slots hold NaN."""
    step = Step.make(spec, dtype, PARTS, num_splits)
    sinks = torch.linspace(-1.0, 2.0, spec.num_heads, device=DEVICE) if has_sinks else None
    scoring = Scoring(spec.head_dim**-0.5, softcap)
    query, key, value = step.rows
    store(step.place, key, value)
    found = attend(step.place, query, spec, scoring, sinks)
    error = (found.double() - expected(step, PARTS, spec, scoring, sinks)).abs().max()
    assert error < MAX_ERROR[dtype]


@pytest.mark.parametrize(
    ("window", "dtype"),
    [
        *((None, torch.float32), (100, torch.bfloat16), (140, torch.float32)),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((None, torch.bfloat16), (100, torch.float32), (140, torch.bfloat16))
        ),
    ],
    ids=str,
)
def test_keys_that_all_queries_of_a_tile_see_need_no_mask(
    window: int | None, dtype: torch.dtype
) -> None:
    """Contexts have several tiles of keys; windows have fewer keys than two tiles, or more."""
    spec = LayerSpec(2, 1, 16, 16, window)
    parts = ((0, 150), (190, 70), (128, 1), (191, 2))
    step = Step.make(spec, dtype, parts, 1)
    scoring = Scoring(0.25, None)
    query, key, value = step.rows
    store(step.place, key, value)
    found = attend(step.place, query, spec, scoring)
    error = (found.double() - expected(step, parts, spec, scoring, None)).abs().max()
    assert error < MAX_ERROR[dtype]


def test_kv_that_is_cached_already_goes_to_the_null_block() -> None:
    parts = ((5, 1), (2, 3))
    step = Step.make(LayerSpec(1, 1, 16, 16, None), torch.float32, parts, 1)
    kept = step.place.step._replace(kept_from=ints([6, 4]))
    before = step.place.kv.keys.clone()
    store(step.place._replace(step=kept), *step.rows[1:])
    assert written_slots(step, before) == {(0, 0), step.slot_of(1, 4)}


@pytest.mark.parametrize(
    ("num_parts", "num_decodes", "longest", "num_splits"),
    [
        (1, 1, 32_768, 50),
        (1, 1, 600, 2),
        (1, 1, 3, 1),
        (16, 16, 32_768, 3),
        (256, 256, 131_072, 1),
        (256, 1, 131_072, 16),
        (9000, 1, 131_072, 1),
        (1, 0, 0, 1),
    ],
)
def test_few_long_contexts_are_divided(
    num_parts: int, num_decodes: int, longest: int, num_splits: int
) -> None:
    """The bounds are two programs per multiprocessor, 256 tokens for each, and 4,096 results."""
    spec = LayerSpec(32, 4, 128, 128, None)
    assert choose_num_splits(num_parts, num_decodes, spec, longest, num_units=100) == num_splits
