"""Steps of random texts over a paged pool, for the attention kernels."""

import math
import random
from dataclasses import dataclass

import torch

from tests.worker.cuda.interpreter import DEVICE, prepare_triton
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.kv.kv_tensors import KVTensors
from worker_proc.kv.window import first_visible

prepare_triton()
from worker_proc.cuda.attention import DeviceStep, PagedStep  # noqa: E402

BLOCK_SIZE = 4
FIRST_ROW = 2  # of the block table that a part has


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
