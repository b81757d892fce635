"""The kernel that chooses tokens takes those of a full sort, by parameters on the device."""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from protocol.sampling import SamplingParams
from tests.worker.cuda.interpreter import DEVICE, prepare_triton
from tests.worker.sampling.rows import (
    EOS,
    VOCAB,
    Row,
    make_row,
    random_logits,
    random_params,
    random_rows,
    reference_token,
)
from worker_proc.request import MirroredRequest, ScheduledRequest
from worker_proc.sampling.sampler import Sampler

prepare_triton()
from worker_proc.cuda import choice  # noqa: E402
from worker_proc.cuda.choice import TritonChoice  # noqa: E402
from worker_proc.cuda.device_sampler import (  # noqa: E402
    FEED_TILE,
    ParameterLines,
    TokenCopy,
    feed_kernel,
)


def tokens(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    sampler = Sampler(logits.shape[1], EOS, DEVICE, make_choice=TritonChoice)
    return sampler.sample(logits.to(DEVICE), rows).token_ids


@pytest.mark.parametrize(
    ("tile", "num_near", "spread"), [(256, 2**14, 1.0), (512, 16, 3.0), (512, 2**14, 0.02)]
)
def test_equals_full_sort_reference(
    tile: int, num_near: int, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of several tiles, full of ties, with edits; lists of near tokens fit, or do not."""
    monkeypatch.setattr(choice, "MAX_TILE_TOKENS", tile)
    monkeypatch.setattr(choice, "MAX_NEAR", num_near)
    seed = tile + num_near
    logits, rows = random_logits(7, seed, spread), random_rows(7, seed)
    assert tokens(logits, rows) == [reference_token(logits[i], row) for i, row in enumerate(rows)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(8))
def test_many_rows_equal_the_reference(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "MAX_TILE_TOKENS", (64, 512)[seed % 2])
    monkeypatch.setattr(choice, "MAX_NEAR", (16, 64, 512)[seed % 3])
    logits, rows = (
        random_logits(100, seed, spread=(0.02, 1.0, 3.0, 12.0)[seed % 4]),
        random_rows(100, seed),
    )
    assert tokens(logits, rows) == [reference_token(logits[i], row) for i, row in enumerate(rows)]


def test_cuts_that_lie_far_from_the_best_token() -> None:
    """They end among 600 equal tokens that are 12.2 nats under it, outside the list."""
    logits = torch.zeros(1, 601)
    logits[0, 7] = 12.2
    shapes = [{"top_p": 0.9999}, {"top_k": 300}, {"top_k": 400, "top_p": 0.999}, {"min_p": 1e-9}]
    seeds = iter(range(10_000))  # the first of each shape that draws one of these
    rows = []
    for shape in shapes:
        for seed in seeds:
            row = make_row(SamplingParams(seed=seed, **shape))
            if reference_token(logits[0], row) != 7:
                rows.append(row)
                break
    expected = [reference_token(logits[0], row) for row in rows]
    assert tokens(logits.expand(len(rows), -1), rows) == expected
    assert len(rows) == len(shapes)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_reported(bad: float) -> None:
    logits = random_logits(3).float()
    logits[1, 400] = bad
    sampler = Sampler(VOCAB, EOS, DEVICE, make_choice=TritonChoice)
    rows = [make_row(SamplingParams(temperature=0.0))] * 3
    sampled = sampler.sample(logits.to(DEVICE), rows)
    assert sampled.not_finite == [1]
    assert sampled.token_ids == [int(logits[0].argmax()), 0, int(logits[2].argmax())]
    logits[1] = -float("inf")
    assert sampler.sample(logits.to(DEVICE), rows).not_finite == [1]


def part_of(params: SamplingParams) -> ScheduledRequest:
    return ScheduledRequest(MirroredRequest(0, [1], 1, params, [[1]], 0, 0), 0, 1, True)


def test_only_the_parameters_of_new_requests_are_sent() -> None:
    rng = random.Random(1)
    lines = ParameterLines(VOCAB, DEVICE)
    lines.reserve(8)
    parts = [part_of(random_params(rng)) for _ in range(5)]
    rows = [6, 0, 3, 2, 5]
    assert lines.update(rows, parts) == 5
    assert lines.update(rows[1:], parts[1:]) == 0
    tensor = lines.tensor
    parts[2] = part_of(random_params(rng))
    assert lines.update(rows, parts) == 1
    lines.reserve(8)
    assert lines.tensor is tensor
    for row, part in zip(rows, parts, strict=True):
        packed = choice.pack_parameters(part.request.sampling_params, VOCAB)
        assert bytes(tensor[row].cpu().numpy()) == packed
    assert not tensor[[1, 4, 7]].any(), "rows that fill up take the most likely token"
    lines.reserve(9)
    assert lines.update(rows, parts) == 5


def test_tokens_of_the_last_step_are_fed_where_the_host_does_not_know_them() -> None:
    chosen = torch.tensor([50, 60, -1], device=DEVICE)
    ids = torch.arange(FEED_TILE + 3, device=DEVICE)
    places = {1: ~1, 5: ~0, FEED_TILE + 1: ~2}
    for place, stand_in in places.items():
        ids[place] = stand_in
    feed_kernel[(2,)](ids, chosen, len(ids), TILE=FEED_TILE)
    expected = list(range(FEED_TILE + 3))
    expected[1], expected[5], expected[FEED_TILE + 1] = 60, 50, 0
    assert ids.tolist() == expected


def test_a_copy_holds_the_tokens_that_were_there() -> None:
    chosen = torch.tensor([5, 6], device=DEVICE)
    stream = torch.cuda.Stream() if DEVICE.type == "cuda" else None
    copy = TokenCopy(chosen, stream)
    chosen.zero_()
    assert copy.read() == [5, 6]
    assert copy.is_done
