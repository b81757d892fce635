"""What stages pass to each other arrives whole and in order; here they are threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.process.run_dir import exchange_prefix
from scripts.testing import eventually
from worker_proc.native.kernels import load_library
from worker_proc.parallel.adoption import SHARED_MEMORY, Adoption, RankMissing
from worker_proc.parallel.pipe import PipeSize, StagePipe
from worker_proc.parallel.share import Share
from worker_proc.parallel.stage import Stage
from worker_proc.runner import StepAbandoned

TIMEOUT_S = 60.0
WIDTH = 24
SIZE = PipeSize(num_rows=8, row_bytes=WIDTH * 4, num_words=5, num_steps=2)


def make_pipes(
    run_dir: Path, num_stages: int = 2, num_shares: int = 1, *, timeout_s: float = TIMEOUT_S
) -> list[StagePipe]:
    library = load_library()
    if library is None:
        pytest.skip("no compiled kernels")
    pipes = [
        StagePipe(
            library,
            Adoption(rank, num_stages * num_shares, str(run_dir), timeout_s=timeout_s),
            Stage(rank // num_shares, num_stages),
            Share(rank % num_shares, num_shares),
            SIZE,
        )
        for rank in range(num_stages * num_shares)
    ]
    for pipe in pipes:
        pipe.begin(1)
    return pipes


def shared_files(run_dir: Path) -> list[Path]:
    """Return the files of a run directory's ranks in shared memory."""
    return list(SHARED_MEMORY.glob(f"*{exchange_prefix(str(run_dir))}*"))


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result(TIMEOUT_S) for future in [threads.submit(call) for call in calls]]


def make_rows(num_rows: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, WIDTH, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_steps_of_all_sizes_arrive_at_the_last_stage(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """A step may have more rows than a slot, and a stage may be ahead."""
    counts = (1, 8, 3, 60, 9, 1, 17)
    first, middle, last = make_pipes(tmp_path, 3)

    def send() -> None:
        for seed, count in enumerate(counts):
            first.send(make_rows(count, seed, dtype))

    def pass_on() -> None:
        for count in counts:
            rows = torch.empty(count, WIDTH, dtype=dtype)
            middle.receive(rows)
            middle.send(rows + 1)

    def receive() -> list[torch.Tensor]:
        found = []
        for count in counts:
            found.append(torch.empty(count, WIDTH, dtype=dtype))
            last.receive(found[-1])
        return found

    _, _, found = at_once(send, pass_on, receive)
    for seed, (count, rows) in enumerate(zip(counts, found, strict=True)):
        assert torch.equal(rows, make_rows(count, seed, dtype) + 1)


@pytest.mark.parametrize("num_rows", [1, 8], ids=["files of one size", "files of two sizes"])
def test_ranks_with_rows_of_different_sizes_do_not_join(num_rows: int, tmp_path: Path) -> None:
    first, last = make_pipes(tmp_path)
    first._size = SIZE._replace(num_rows=num_rows)
    last._size = SIZE._replace(num_rows=num_rows, row_bytes=WIDTH * 2)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(first.has_tokens, 1)
        with pytest.raises(ValueError, match="sizes" if num_rows == 1 else "bytes; rank 1 needs"):
            last.has_tokens(1)
        last.leave()
        with pytest.raises((ValueError, StepAbandoned)):
            waiting.result(TIMEOUT_S)


def test_each_share_of_a_stage_passes_to_its_own(tmp_path: Path) -> None:
    pipes = make_pipes(tmp_path, num_shares=2)
    rows = [torch.empty(3, WIDTH) for _ in range(2)]
    sends = [partial(pipe.send, make_rows(3, seed)) for seed, pipe in enumerate(pipes[:2])]
    at_once(*sends, *(partial(pipes[2 + share].receive, rows[share]) for share in range(2)))
    for share in range(2):
        assert torch.equal(rows[share], make_rows(3, share))
        pipes[2 + share].publish([share])
        assert pipes[share].tokens(1) == [share]


def test_tokens_arrive_at_the_first_stage_as_late_as_it_takes_them(tmp_path: Path) -> None:
    first, last = make_pipes(tmp_path)
    at_once(partial(first.has_tokens, 1), partial(last.has_tokens, 1))
    sampled = [[step * 10 + place for place in range(step % 6)] for step in range(1, 40)]
    behind = first.max_steps_behind
    assert behind >= SIZE.num_steps
    for step, token_ids in enumerate(sampled, start=1):
        assert not first.has_tokens(step)
        last.publish(token_ids)
        assert first.has_tokens(step)
        if step > behind:
            early = sampled[step - behind - 1]
            assert first.tokens(step - behind) == early


def test_more_tokens_than_a_slot_has_are_an_error(tmp_path: Path) -> None:
    first, last = make_pipes(tmp_path)
    at_once(partial(first.has_tokens, 1), partial(last.has_tokens, 1))
    with pytest.raises(ValueError, match="16 words exceed 128 bytes"):
        last.publish(range(16))


def test_a_stage_that_waits_reports_it(tmp_path: Path) -> None:
    first, last = make_pipes(tmp_path)
    num_reports = 0

    def report() -> None:
        nonlocal num_reports
        num_reports += 1

    last.on_wait(report)
    rows = torch.empty(2, WIDTH)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(last.receive, rows)
        eventually(lambda: num_reports > 2, "reports")
        first.send(make_rows(2, 0))
        waiting.result(TIMEOUT_S)
    assert torch.equal(rows, make_rows(2, 0))


def test_a_stage_is_two_steps_ahead_at_most(tmp_path: Path) -> None:
    first, last = make_pipes(tmp_path)
    rows = torch.empty(1, WIDTH)
    at_once(partial(first.send, make_rows(1, 0)), partial(last.receive, rows))
    first.send(make_rows(1, 1))
    first.send(make_rows(1, 2))
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(first.send, make_rows(1, 3))
        assert not wait([waiting], timeout=0.2).done
        for seed in (1, 2, 3):
            last.receive(rows)
            assert torch.equal(rows, make_rows(1, seed))
        waiting.result(TIMEOUT_S)


@pytest.mark.parametrize("waits_for", ["rows", "tokens"])
@pytest.mark.parametrize("how", ["leave", "begin"])
def test_an_adoption_that_ends_for_one_stage_ends_the_waits_of_the_others(
    how: str, waits_for: str, tmp_path: Path
) -> None:
    """A core has died after it sent a step to one stage only."""
    pipes = make_pipes(tmp_path)
    at_once(*(partial(pipe.has_tokens, 1) for pipe in pipes))
    if waits_for == "rows":
        idle, blocked = pipes
        call = partial(blocked.receive, torch.empty(1, WIDTH))
    else:
        blocked, idle = pipes
        call = partial(blocked.tokens, 1)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(call)
        if how == "leave":
            idle.leave()
        else:
            idle.begin(2)
        with pytest.raises(StepAbandoned, match="left the adoption"):
            waiting.result(TIMEOUT_S)
    for pipe in pipes:
        pipe.begin(2)
    rows = torch.empty(1, WIDTH)
    at_once(partial(pipes[0].send, make_rows(1, 7)), partial(pipes[1].receive, rows))
    assert torch.equal(rows, make_rows(1, 7))


@pytest.mark.parametrize(
    ("place", "problem"), [(0, "rank 1 has not joined"), (1, "rank 0 has not made")]
)
def test_a_missing_stage_is_named_after_a_while(place: int, problem: str, tmp_path: Path) -> None:
    pipe = make_pipes(tmp_path, timeout_s=0.2)[place]
    with pytest.raises(RankMissing, match=problem):
        pipe.has_tokens(1)
    assert not shared_files(tmp_path)


def test_rows_that_do_not_come_are_named(tmp_path: Path) -> None:
    pipes = make_pipes(tmp_path, timeout_s=0.2)
    at_once(*(partial(pipe.has_tokens, 1) for pipe in pipes))
    with pytest.raises(RankMissing, match="the previous stage has not computed its rows"):
        pipes[1].receive(torch.empty(1, WIDTH))
    with pytest.raises(RankMissing, match="the last stage has not sampled its tokens"):
        pipes[0].tokens(1)
