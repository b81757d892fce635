"""The attention kernels compute plain attention over paged keys and values."""

import math
import random
from dataclasses import dataclass

import pytest
import torch

from tests.worker.cuda.interpreter import DEVICE, prepare_triton
from worker_proc.attention.interface import Scoring
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.kv.kv_tensors import KVTensors
from worker_proc.kv.window import first_visible

prepare_triton()
from worker_proc.cuda.attention import (  # noqa: E402
    DeviceStep,
    PagedStep,
    attend,
    choose_num_splits,
    store,
)

BLOCK_SIZE = 4
MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 5e-3}
FIRST_ROW = 2  # of the block table that a part has
PARTS = ((0, 7), (9, 1), (70, 1), (3, 5), (0, 1), (90, 20))
"""Position of the first token, and number of tokens, of each part of a step."""


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@dataclass
class Step:
    """A step of random texts over a pool in which all else is NaN."""

    place: PagedStep
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    texts: list[tuple[torch.Tensor, torch.Tensor]]  # keys and values of each part's context

    @classmethod
    def make(
        cls,
        spec: LayerSpec,
        dtype: torch.dtype,
        parts: tuple[tuple[int, int], ...],
        num_splits: int,
    ) -> "Step":
        generator = torch.Generator().manual_seed(5)

        def randn(length: int, heads: int, dim: int) -> torch.Tensor:
            values = torch.randn(heads, length, dim, generator=generator)
            return values.to(DEVICE, dtype).transpose(0, 1)  # strided, as transformers passes it

        ends = [start + size for start, size in parts]
        counts = [-(-end // BLOCK_SIZE) for end in ends]
        free = list(range(1, 1 + sum(counts)))
        random.Random(3).shuffle(free)
        table = torch.zeros(FIRST_ROW + len(parts), max(counts), dtype=torch.int32, device=DEVICE)
        pool = (1 + sum(counts), BLOCK_SIZE, spec.num_kv_heads)
        kv = KVTensors(
            torch.full((*pool, spec.head_dim), math.nan, dtype=dtype, device=DEVICE),
            torch.full((*pool, spec.value_head_dim), math.nan, dtype=dtype, device=DEVICE),
        )
        texts, first_rows = [], [0]
        for index, ((start, size), end) in enumerate(zip(parts, ends, strict=True)):
            first_rows.append(first_rows[-1] + size)
            first = first_visible(spec.window, start) // BLOCK_SIZE  # others have been given back
            for entry in range(first, counts[index]):
                table[FIRST_ROW + index, entry] = free.pop()
            keys = randn(end, spec.num_kv_heads, spec.head_dim)
            values = randn(end, spec.num_kv_heads, spec.value_head_dim)
            texts.append((keys, values))
            for position in range(first * BLOCK_SIZE, start):
                block = int(table[FIRST_ROW + index, position // BLOCK_SIZE])
                kv.keys[block, position % BLOCK_SIZE] = keys[position]
                kv.values[block, position % BLOCK_SIZE] = values[position]
        num_rows = first_rows[-1]
        query = randn(num_rows, spec.num_heads, spec.head_dim)
        new = [
            torch.cat([text[which][start:] for text, (start, _) in zip(texts, parts, strict=True)])
            for which in (0, 1)
        ]
        device_step = DeviceStep(
            ints(first_rows),
            ints([start for start, _ in parts]),
            ints([FIRST_ROW + index for index in range(len(parts))]),
            ints([0] * len(parts)),
            num_rows,
            sum(size == 1 for _, size in parts),
            num_splits,
        )
        return cls(PagedStep(device_step, table, kv), (query, new[0], new[1]), texts)

    def slot_of(self, part: int, position: int) -> tuple[int, int]:
        """Return block and slot of a token."""
        table = self.place.table[FIRST_ROW + part]
        return int(table[position // BLOCK_SIZE]), position % BLOCK_SIZE


def written_slots(step: Step, before: torch.Tensor) -> set[tuple[int, int]]:
    """Return block and slot of the keys that were NaN `before`, and are not now."""
    written = before.isnan() & ~step.place.kv.keys.isnan()
    return {(block, slot) for block, slot in written[:, :, 0, 0].nonzero().tolist()}


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
    """Contexts of several tiles of keys; windows of fewer keys than two tiles, and of more."""
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
    """Two programs for each of 100 multiprocessors, 256 tokens for each, and 4,096 results."""
    spec = LayerSpec(32, 4, 128, 128, None)
    assert choose_num_splits(num_parts, num_decodes, spec, longest, num_units=100) == num_splits
