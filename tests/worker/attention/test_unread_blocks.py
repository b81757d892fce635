"""Contents of other blocks than those of a text, and of those before its window, are never read."""

from array import array
from itertools import product
from typing import NamedTuple

import pytest
import torch

from tests.combinations import in_turn
from tests.worker.attention.texts import (
    CODES,
    CPU,
    DTYPES,
    LATENT_SPECS,
    LENGTHS,
    SPECS,
    Texts,
    native_backend,
)
from tests.worker.mini_scheduler import fill_with_nan
from worker_proc.attention.interface import AttentionBackend
from worker_proc.attention.sdpa import Rule, SdpaBackend
from worker_proc.kv.kv_format import KVFormat
from worker_proc.kv.kv_groups import LayerSpec


class Kind(NamedTuple):
    """A backend, and what its pools hold."""

    name: str
    dtype: torch.dtype
    format: KVFormat = KVFormat.PLAIN

    def backend(self, spec: LayerSpec, block_size: int) -> AttentionBackend:
        if self.name == "plain":
            return SdpaBackend({Rule(0, spec.window)}, block_size, self.dtype, CPU)
        return native_backend(block_size, self.dtype, [spec.window], format=self.format)


KINDS = (
    Kind("plain", torch.float32),
    *(Kind("native", dtype, format) for dtype in DTYPES for format in KVFormat),
)
PLAIN_KINDS = tuple(kind for kind in KINDS if kind.format not in CODES)
CODED_KINDS = tuple(kind for kind in KINDS if kind.format in CODES)
WINDOWED = (SPECS[1], SPECS[3], SPECS[5])
WINDOW_CUTS = ((4, 1), (16, 11), (32, 40))
MORE_WINDOW_CUTS = ((4, 40), (16, 2), (32, 1))
"""Blocks and chunks: a block before the window may end with one chunk, or in the middle of it."""


@pytest.mark.parametrize(
    ("kind_and_cut", "spec"),
    [
        *in_turn(product(PLAIN_KINDS, WINDOW_CUTS), [*WINDOWED, LATENT_SPECS[2]]),
        *in_turn(product(CODED_KINDS, [(16, 11)]), WINDOWED),
        *(
            pytest.param((kind, cut), spec, marks=pytest.mark.slow)
            for kind in PLAIN_KINDS
            for cut in MORE_WINDOW_CUTS
            for spec in (*WINDOWED, LATENT_SPECS[2])
        ),
    ],
    ids=str,
)
def test_blocks_before_the_window_are_never_read(
    kind_and_cut: tuple[Kind, tuple[int, int]], spec: LayerSpec
) -> None:
    """The table may still have them, or have the null block in their place."""
    kind, (block_size, chunk) = kind_and_cut
    assert spec.window is not None
    texts = Texts(spec, block_size, kind.dtype, format=kind.format)
    longest, num_tokens = len(LENGTHS) - 1, LENGTHS[-1]
    table = texts.requests[longest].block_tables[0]
    outputs = []
    for mode in ("kept", "stale", "null"):
        texts.requests[longest].block_tables = [table[:]]
        layer, rows = texts.layer(kind.backend(spec, block_size)), []
        if mode != "kept" and kind.name == "native":
            fill_with_nan(layer.kv.keys)
            fill_with_nan(layer.kv.values)
        for start in range(0, num_tokens, chunk):
            passed = max(start - spec.window + 1, 0) // block_size
            if mode != "kept":
                fill_with_nan(layer.kv.keys, [0, *table[:passed]])
                fill_with_nan(layer.kv.values, [0, *table[:passed]])
            if mode == "null":
                texts.requests[longest].block_tables = [array("i", [0] * passed) + table[passed:]]
            rows += texts.attend(layer, [(longest, start, min(chunk, num_tokens - start))])
        outputs.append(torch.cat(rows))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize(
    ("spec", "kind"),
    [*in_turn(SPECS, KINDS), *in_turn(LATENT_SPECS, PLAIN_KINDS)],
    ids=str,
)
def test_what_an_earlier_owner_left_in_a_block_is_never_read(spec: LayerSpec, kind: Kind) -> None:
    """A NaN beyond a request's context must not reach it."""
    texts = Texts(spec, 16, kind.dtype, format=kind.format)
    backend = kind.backend(spec, 16)
    outputs = []
    for is_nan in (False, True):
        layer = texts.layer(backend)
        if is_nan:
            fill_with_nan(layer.kv.keys)
            fill_with_nan(layer.kv.values)
        longer = [i for i, length in enumerate(LENGTHS) if length > 1]
        texts.attend(layer, [(i, 0, LENGTHS[i] - 1) for i in longer])
        outputs.append(torch.cat(texts.attend(layer, [(i, LENGTHS[i] - 1, 1) for i in longer])))
    clean, after_nan = outputs
    assert torch.equal(clean, after_nan)
