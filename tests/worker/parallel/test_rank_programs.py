"""Programs of the native decoder in which ranks add up rows; ranks are threads of one process."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, MixtralConfig

from protocol.config import NativeDecoder
from scripts.testing import eventually
from tests.worker.checkpoints import SHAPE, build_checkpoint
from tests.worker.parallel.ranks import (
    TIMEOUT_S,
    Ranks,
    at_once,
    compare_with_generate,
    make_exchanges,
)
from tests.worker.parity import GREEDY, MAX_TOKENS, few_prompts, generate
from worker_proc.decoder.whole import WholeModel
from worker_proc.native.structures import BufferArgs, Instruction, Kind, ProgramArgs, RunArgs
from worker_proc.parallel.adoption import RankMissing
from worker_proc.parallel.exchange import RankExchange
from worker_proc.runner import StepAbandoned

WIDTH = 33
"""Values of a row; rows lie further apart."""
SLOT_BYTES = 4096


def add_by_program(exchange: RankExchange, rows: torch.Tensor, num_threads: int = 1) -> None:
    """Replace rows by the sums of all ranks' in a program of two such instructions and no others.

    The second one adds up sums.
    """
    torch.set_num_threads(num_threads)  # of this thread
    buffers = BufferArgs(rows.data_ptr(), rows.stride(0) * rows.itemsize)
    code = (Instruction * 2)(*[Instruction(kind=Kind.ADD_RANKS, size=WIDTH) for _ in range(2)])
    run = RunArgs(ctypes.addressof(buffers), num_rows=len(rows))
    is_bf16 = rows.dtype == torch.bfloat16
    exchange.execute(ProgramArgs(ctypes.addressof(code), len(code), is_bf16), run)


def add_twice(exchange: RankExchange, rows: torch.Tensor) -> None:
    """Do the same by calls outside of a program."""
    for _ in range(2):
        exchange.add(rows[:, :WIDTH])


def make_rows(num_ranks: int, num_rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_ranks, num_rows, 48, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_program_has_the_sums_of_single_calls(
    num_threads: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """It may have more rows than a slot, and another rank may make single calls."""
    exchanges = make_exchanges(tmp_path, 3, slot_bytes=SLOT_BYTES)
    for num_rows in (1, 200, 7):
        expected = make_rows(3, num_rows, dtype)
        at_once([partial(add_twice, *each) for each in zip(exchanges, expected, strict=True)])
        found = make_rows(3, num_rows, dtype)
        calls = [
            partial(add_by_program, exchanges[0], found[0], num_threads),
            partial(add_by_program, exchanges[1], found[1]),
            partial(add_twice, exchanges[2], found[2]),
        ]
        at_once(calls)
        assert torch.equal(found, expected)


def test_a_program_continues_where_a_rank_was_missing(tmp_path: Path) -> None:
    """It reports the wait meanwhile, and adds nothing twice."""
    first, second = make_exchanges(tmp_path, 2, slot_bytes=SLOT_BYTES)
    num_reports = 0

    def report() -> None:
        nonlocal num_reports
        num_reports += 1

    rows, expected = make_rows(2, 100), make_rows(2, 100)
    at_once([partial(add_twice, *each) for each in zip((first, second), expected, strict=True)])
    first.on_wait(report)
    num_at_once = SLOT_BYTES // (WIDTH * rows.itemsize)
    parts = rows[1].split(num_at_once)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(add_by_program, first, rows[0], 2)
        for _ in range(2):
            for part in parts:
                num_before = num_reports
                eventually(lambda before=num_before: num_reports > before + 1, "reports")
                second.add(part[:, :WIDTH])
        waiting.result(TIMEOUT_S)
    assert torch.equal(rows, expected)


def test_a_program_ends_if_a_rank_stays_away(tmp_path: Path) -> None:
    first, _ = make_exchanges(tmp_path, 2, timeout_s=0.2)
    with pytest.raises(RankMissing, match=r"rank 1 has not computed its part in 0\.2 s"):
        first.add(torch.zeros(1, 4))
    (tmp_path / "other").mkdir()
    first, second = make_exchanges(tmp_path / "other", 2, timeout_s=0.2)
    at_once([partial(one.add, torch.zeros(1, 4)) for one in (first, second)])
    with pytest.raises(RankMissing, match=r"rank 1 has not computed its part in 0\.2 s"):
        add_by_program(first, make_rows(1, 1)[0])


def test_a_program_ends_if_a_rank_leaves_the_adoption(tmp_path: Path) -> None:
    first, second = make_exchanges(tmp_path, 2)
    at_once([partial(one.add, torch.zeros(1, 4)) for one in (first, second)])
    rows = make_rows(2, 1)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(add_by_program, first, rows[0])
        second.leave()
        with pytest.raises(StepAbandoned, match="left the adoption"):
            waiting.result(TIMEOUT_S)
    for one in (first, second):
        one.begin(2)
    found, expected = make_rows(2, 1), make_rows(2, 1)
    at_once([partial(add_by_program, *each) for each in zip((first, second), found, strict=True)])
    at_once([partial(add_twice, *each) for each in zip((first, second), expected, strict=True)])
    assert torch.equal(found, expected)


def test_rows_that_no_slot_holds_are_refused(tmp_path: Path) -> None:
    exchange, _ = make_exchanges(tmp_path, 2, slot_bytes=SLOT_BYTES)
    exchange.check_row(SLOT_BYTES)
    with pytest.raises(ValueError, match="a row of 4100 bytes exceeds a slot of 4096"):
        exchange.check_row(SLOT_BYTES + 4)


@pytest.mark.slow
def test_ranks_compute_whole_steps_in_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_checkpoint(tmp_path / "model", LlamaConfig(**SHAPE))
    ranks = Ranks(tmp_path / "model", 2)
    compute, num_calls = WholeModel.compute, 0

    def counted(*args: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return compute(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(WholeModel, "compute", counted)
    run = ranks.drive(few_prompts())
    assert num_calls == 2 * run.num_steps


@pytest.mark.slow
def test_one_rank_may_compute_with_modules_and_another_natively(tmp_path: Path) -> None:
    """What a rank computes with is proven for its own part: the proof may fail at one of them."""
    model = build_checkpoint(tmp_path / "model", LlamaConfig(**SHAPE))
    model.set_attn_implementation("eager")
    prompts = few_prompts()
    expected = [generate(model, prompt, MAX_TOKENS) for prompt in prompts]
    ranks = Ranks(tmp_path / "model", 2)
    ranks.runners[1] = Ranks(tmp_path / "model", 2, native_decoder=NativeDecoder.OFF).runners[1]
    assert [runner.facts.decoder for runner in ranks.runners] == ["native", "modules"]
    assert ranks.drive(prompts, GREEDY).output_token_ids == expected
    assert ranks.drive(prompts, GREEDY, max_num_batched_tokens=16).output_token_ids == expected


@pytest.mark.slow
def test_mixtures_of_experts_are_computed_natively(tmp_path: Path) -> None:
    config = MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)
    ranks = compare_with_generate(tmp_path / "model", config, 2)
    assert ranks.runners[0].facts.decoder == "native"
