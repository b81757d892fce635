"""Layers share block tables by window; a request holds no more blocks than its windows need."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from protocol.model_facts import KVGroup, ModelFacts
from worker_proc.errors import InsufficientMemory
from worker_proc.kv.kv_groups import MAX_GROUPS, CompressedSpec, KVLayout, LayerSpec, lay_out
from worker_proc.kv.kv_tensors import block_bytes_of, bytes_per_block, size_cache
from worker_proc.kv.window import first_visible

FAR = 10_000


def spec(window: int | None, num_kv_heads: int = 2) -> LayerSpec:
    return LayerSpec(4, num_kv_heads, 16, 16, window)


def layout(
    windows: list[int | None], *, block_size: int = 4, chunk: int = 8, hybrid: bool = True
) -> KVLayout:
    return lay_out([spec(w) for w in windows], block_size, chunk, FAR, hybrid)


def sizes(found: KVLayout) -> list[tuple[int | None, int]]:
    return [(group.window, len(group.layers)) for group in found.groups]


def test_every_layer_is_in_one_group_of_its_window() -> None:
    windows: list[int | None] = [None if i % 6 == 5 else 512 for i in range(26)]
    found = layout(windows)
    assert sizes(found) == [(None, 4), *[(512, 4)] * 5, (512, 2)]
    assert sorted(i for group in found.groups for i in group.layers) == list(range(26))
    assert all(windows[i] == group.window for group in found.groups for i in group.layers)
    assert found.tensor_layers == (5, 11, 17, 23)


@pytest.mark.parametrize(
    ("num_full", "num_sliding", "expected"),
    [
        (10, 12, [(None, 10), (9, 12)]),
        (8, 10, [(None, 8), (9, 10)]),
        (8, 11, [(None, 8), (9, 8), (9, 3)]),
        (0, 3, [(9, 3)]),
        (3, 0, [(None, 3)]),
    ],
)
def test_kinds_of_about_equal_number_fill_a_group_each(
    num_full: int, num_sliding: int, expected: list[tuple[int | None, int]]
) -> None:
    assert sizes(layout([None] * num_full + [9] * num_sliding)) == expected


def test_layers_that_share_kv_are_in_no_group_and_take_no_memory() -> None:
    own = [spec(9), spec(None), spec(9)]
    sharing = [replace(spec(9), kv_source=2), replace(spec(None), kv_source=1)]
    found = lay_out([*own, *sharing], 4, 8, FAR, True)
    assert found == lay_out(own, 4, 8, FAR, True)
    wide = [spec(9), spec(None, num_kv_heads=4)]
    assert sizes(lay_out([*wide, replace(wide[0], kv_source=0)], 4, 8, FAR, True)) == [(None, 2)]


def test_layers_that_cannot_share_tensors_form_one_group() -> None:
    unequal = [spec(None), spec(9, num_kv_heads=4)]
    assert sizes(lay_out(unequal, 4, 8, FAR, True)) == [(None, 2)]
    alike_in_window = [spec(9), spec(9, num_kv_heads=4)]
    assert sizes(lay_out(alike_in_window, 4, 8, FAR, True)) == [(9, 2)]
    assert sizes(layout([None, 9, 9], hybrid=False)) == [(None, 3)]
    assert sizes(layout([None] + [9] * MAX_GROUPS)) == [(None, 1 + MAX_GROUPS)]


def test_a_window_that_passes_nothing_is_none() -> None:
    specs = [spec(None), spec(100)]
    assert sizes(lay_out(specs, 4, 8, 100, True)) == [(None, 2)]
    assert sizes(lay_out(specs, 4, 8, 101, True)) == [(None, 1), (100, 1)]


def test_no_request_needs_more_blocks_than_its_windows_allow() -> None:
    rng = random.Random(2)
    for _ in range(200):
        window, chunk, size = rng.randint(1, 40), rng.randint(1, 40), rng.randint(1, 9)
        [group] = layout([window], block_size=size, chunk=chunk).kv_groups()
        held = [
            (start + count - 1) // size - first_visible(window, start) // size + 1
            for start in range(100)
            for count in range(1, chunk + 1)
        ]
        assert group.max_blocks is not None
        assert group.max_blocks - 1 <= max(held) <= group.max_blocks


def test_lengths_that_fit_agree_with_the_facts_sent_to_the_core() -> None:
    found = layout([None, 9, 9], block_size=4, chunk=8)
    assert found.kv_groups() == [KVGroup(), *[KVGroup(9, 5)] * 2]
    facts = ModelFacts("m", 9, FAR, 4, 99, [], kv_groups=found.kv_groups())
    for num_blocks in range(60):
        longest = found.num_tokens_in(num_blocks, 200)
        assert facts.num_blocks_for(longest) <= num_blocks
        assert longest == 200 or facts.num_blocks_for(longest + 1) > num_blocks


def test_windows_let_longer_texts_fit() -> None:
    for windows, fitting in ([None, None], 10 * 4 + 1), ([9, 9], 500):
        found = layout(list(windows), block_size=4, chunk=8)
        size = size_cache(11 * 80, 80, found, model_len=500, max_model_len=None)
        assert (size.num_blocks, size.max_model_len) == (11, fitting)
    with pytest.raises(InsufficientMemory, match="that fits is 21"):
        size_cache(11 * 80, 80, layout([None, 9]), model_len=500, max_model_len=300)


def test_a_block_takes_the_bytes_of_one_group() -> None:
    specs = [spec(None), spec(9), spec(9)]
    [index] = lay_out(specs, 4, 8, FAR, True).tensor_layers
    assert bytes_per_block([specs[index]], 4, torch.bfloat16) == 4 * 2 * (16 + 16) * 2


LATENT = LayerSpec(64, 1, 512, 512, None, is_latent=True)
SLIDING = replace(LATENT, compressed=CompressedSpec(128))
SPARSE = replace(LATENT, compressed=CompressedSpec(128, 4, 2, 128, 64, 512))
HEAVY = replace(LATENT, compressed=CompressedSpec(128, 128))
PUBLISHED = [HEAVY, HEAVY, *[HEAVY, SPARSE] * 20, HEAVY]
"""The layers of transformers' default configuration of DeepSeek-V4."""


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("block_size", [4, 16, 48, 256])
@pytest.mark.parametrize("specs", [PUBLISHED, [SPARSE], [SLIDING, SLIDING, HEAVY]])
def test_layers_with_entries_have_separate_places_in_a_block(
    specs: list[LayerSpec], block_size: int, hybrid: bool
) -> None:
    found = lay_out(specs, block_size, 2048, 2**20, hybrid)
    taken: dict[int, list[range]] = {}
    for spec_, place in zip(specs, found.places, strict=True):
        compressed = spec_.compressed
        assert compressed is not None
        num_rows = block_size * compressed.row_width(512)
        taken.setdefault(place.group, []).append(range(place.rows_at, place.rows_at + num_rows))
        num_entries = compressed.block_entries(block_size) * compressed.entry_width(512)
        taken.setdefault(0, []).append(range(place.entries_at, place.entries_at + num_entries))
    for parts in taken.values():
        ordered = sorted(filter(len, parts), key=lambda part: part.start)
        for one, other in pairwise(ordered):
            assert one.stop <= other.start
        assert ordered[-1].stop <= found.block_numbers
    assert block_bytes_of(specs, found, torch.bfloat16) == 2 * found.block_numbers
    assert [group.window for group in found.groups] == [None, *[128] * (len(found.groups) - 1)]
    assert (len(found.groups) > 1) == hybrid


def test_entries_alone_are_kept_of_long_texts() -> None:
    """The cache keeps a sixteenth of the rows of 131,072 tokens, those of a long step included."""
    num_bytes = []
    for hybrid in (False, True):
        found = lay_out(PUBLISHED, 16, 2048, 2**20, hybrid)
        num_blocks = found.num_blocks_for(131_072)
        num_bytes.append(num_blocks * block_bytes_of(PUBLISHED, found, torch.bfloat16))
    assert num_bytes[1] * 16 < num_bytes[0]


def test_blocks_keep_all_rows_that_entries_are_made_of() -> None:
    """The tokens of an entry may reach further than the window."""
    wide = replace(HEAVY, compressed=CompressedSpec(13, 128))
    overlapping = replace(SPARSE, compressed=CompressedSpec(3, 4, 2, 128, 64, 512))
    assert lay_out([wide, SLIDING], 16, 2048, FAR, True).groups[1].window == 128
    assert lay_out([overlapping], 16, 2048, FAR, True).groups[1].window == 8
    assert sizes(lay_out([wide], 16, 2048, 128, True)) == [(None, 1)]  # it passes no token


def test_models_of_many_layers_have_larger_blocks_and_no_more_groups_than_messages_hold() -> None:
    specs = [SPARSE, HEAVY] * 100
    found = lay_out(specs, 4, 2048, 2**20, True)
    assert len(found.groups) <= MAX_GROUPS
    assert sorted(i for group in found.groups[1:] for i in group.layers) == list(range(200))
