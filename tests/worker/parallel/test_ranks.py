"""Ranks that hold parts of a model compute its tokens; here they are threads of one process."""

import os
import subprocess
from array import array
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import CohereConfig, LlamaConfig, Phi3Config

from protocol.config import NativeDecoder
from protocol.process.run_dir import exchange_prefix
from protocol.sampling import SamplingParams
from scripts.testing import eventually
from tests.families.configs import small_config
from tests.worker.checkpoints import ARCHITECTURES, SHAPE, Architecture, build_checkpoint
from tests.worker.driving import check_schedules, sampled_with_penalty
from tests.worker.parallel.ranks import (
    TIMEOUT_S,
    Ranks,
    at_once,
    compare_with_generate,
    make_exchanges,
)
from tests.worker.parity import few_prompts
from worker_proc.errors import UnsupportedModel
from worker_proc.parallel.adoption import SHARED_MEMORY, RankMissing
from worker_proc.parallel.exchange import RanksDiffer
from worker_proc.parallel.share import Share
from worker_proc.runner import StepAbandoned

REFUSED = {
    "gemma3n_shared": "keys of another layer",
    "gemma4_shared": "keys of another layer",
}
"""Architectures that cannot be divided yet, and a part of the reason."""


@pytest.mark.parametrize(
    ("config", "num_ranks"),
    [(LlamaConfig(**SHAPE), 4), (Phi3Config(**SHAPE), 2)],
    ids=["more ranks than KV heads", "fused matrices"],
)
def test_ranks_compute_the_tokens_of_the_whole_model(
    config: Any, num_ranks: int, tmp_path: Path
) -> None:
    ranks = compare_with_generate(tmp_path / "model", config, num_ranks)
    facts = ranks.runners[0].facts
    assert facts.decoder == "native"
    assert facts.exact_resume, facts.exact_resume_reason


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda one: one.name)
def test_every_architecture_is_divided_or_refused(
    architecture: Architecture, num_ranks: int, tmp_path: Path
) -> None:
    reason = REFUSED.get(architecture.name)
    if reason is None:
        compare_with_generate(tmp_path / "model", architecture.config(), num_ranks)
        return
    build_checkpoint(tmp_path / "model", architecture.config())
    with pytest.raises(UnsupportedModel, match=reason):
        Ranks(tmp_path / "model", num_ranks)


@pytest.mark.parametrize(
    "name",
    [
        *("deepseek_v3", "olmo2"),
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("gpt2", "gpt_oss", "olmoe")),
    ],
)
def test_other_families_have_the_same_bits_in_every_batch(name: str, tmp_path: Path) -> None:
    """They have latent rows, norms of all heads, fused matrices with biases, or experts."""
    [architecture] = [one for one in ARCHITECTURES if one.name == name]
    ranks = compare_with_generate(tmp_path / "model", architecture.config(), 2)
    facts = ranks.runners[0].facts
    assert facts.exact_resume, facts.exact_resume_reason
    params = SamplingParams(max_tokens=8, temperature=1.3, seed=1, logprobs=2, ignore_eos=True)
    ranks = Ranks(tmp_path / "model", 2, dtype="bfloat16")
    together = ranks.drive(few_prompts(), params)
    for settings in ({"max_num_seqs": 1}, {"max_num_batched_tokens": 7}):
        run = ranks.drive(few_prompts(), params, **settings)
        assert run.output_token_ids == together.output_token_ids
        assert run.logprobs == together.logprobs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_ranks_divide_mixtures_without_shared_experts(tmp_path: Path) -> None:
    config = small_config("dots1", n_shared_experts=0)
    ranks = compare_with_generate(tmp_path / "model", config, 2)
    assert ranks.runners[0].facts.exact_resume


def test_tokens_do_not_depend_on_the_batch_the_cut_or_a_restart(tmp_path: Path) -> None:
    """Modules or the native decoder sample in bfloat16, with a penalty and logprobs."""
    build_checkpoint(tmp_path / "model", LlamaConfig(**SHAPE))
    prompts = few_prompts()
    params = sampled_with_penalty(len(prompts))
    for decoder in NativeDecoder:
        ranks = Ranks(tmp_path / "model", 2, dtype="bfloat16", native_decoder=decoder)
        together = ranks.drive(prompts, params).output_token_ids
        check_schedules(ranks.drive, prompts, params, together)


@pytest.mark.parametrize(
    ("config", "num_ranks", "reason"),
    [
        (
            LlamaConfig(**SHAPE),
            3,
            "size 3 cannot divide the model: model.layers.0.self_attn has 4 heads",
        ),
        (LlamaConfig(**SHAPE | {"intermediate_size": 97}), 2, "mlp has 97 inner columns"),
        (CohereConfig(**SHAPE, use_qk_norm=True), 2, "q_norm.weight belongs to all heads at once"),
    ],
    ids=["heads", "columns", "norm"],
)
def test_what_cannot_be_divided_is_refused(
    config: Any, num_ranks: int, reason: str, tmp_path: Path
) -> None:
    build_checkpoint(tmp_path / "model", config)
    with pytest.raises(UnsupportedModel, match=reason):
        Ranks(tmp_path / "model", num_ranks)


def test_float16_is_refused(tmp_path: Path) -> None:
    build_checkpoint(tmp_path / "model", LlamaConfig(**SHAPE))
    with pytest.raises(UnsupportedModel, match="and the dtype is float16"):
        Ranks(tmp_path / "model", 2, dtype="float16")


def test_fewer_units_than_ranks_are_held_by_several() -> None:
    assert [list(Share(rank, 4).of(8)) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [list(Share(rank, 4).of(2)) for rank in range(4)] == [[0], [0], [1], [1]]
    assert [list(Share(rank, 4).of(0)) for rank in range(4)] == [[], [], [], []]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_those_of_float32_in_the_order_of_the_ranks(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Rows are exchanged in several parts, and lie apart in memory."""
    exchanges = make_exchanges(tmp_path, 3, slot_bytes=4096)
    generator = torch.Generator().manual_seed(0)
    for num_rows in (1, 200, 7):
        wide = torch.randn(3, num_rows, 40, generator=generator).to(dtype)
        parts = [each[:, :33] for each in wide.clone()]
        expected = ((wide[0].float() + wide[1].float()) + wide[2].float())[:, :33].to(dtype)
        at_once([partial(one.add, rows) for one, rows in zip(exchanges, parts, strict=True)])
        assert all(torch.equal(rows, expected) for rows in parts)
        columns = [each[:, :5].contiguous() for each in wide]
        gathered = at_once(
            [partial(one.gather, rows) for one, rows in zip(exchanges, columns, strict=True)]
        )
        assert all(torch.equal(found, torch.cat(columns, dim=1)) for found in gathered)


def test_ranks_that_have_sampled_other_tokens_fail(tmp_path: Path) -> None:
    exchanges = make_exchanges(tmp_path, 2)
    at_once([partial(one.agree, [5, 6]) for one in exchanges])
    at_once([partial(one.agree, []) for one in exchanges])
    tokens = ([5, 6], [5, 7])
    calls = [partial(one.agree, ids) for one, ids in zip(exchanges, tokens, strict=True)]
    with pytest.raises(RanksDiffer, match="sampled different tokens"):
        at_once(calls)


def left_behind(run_dir: Path) -> list[Path]:
    """Return the files of exchanges that are still there."""
    shared = SHARED_MEMORY.glob(f"*{exchange_prefix(str(run_dir))}*")
    found = [*shared, *run_dir.iterdir()]
    return [path for path in found if not path.name.startswith("ranks-")]


def test_without_room_in_shared_memory_ranks_use_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exchanges = make_exchanges(tmp_path, 2)
    allocate = os.posix_fallocate

    def fail_in_shared_memory(fd: int, first: int, num_bytes: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(SHARED_MEMORY)):
            raise OSError("no room")
        allocate(fd, first, num_bytes)

    monkeypatch.setattr("os.posix_fallocate", fail_in_shared_memory)
    rows = torch.ones(1, 4), torch.ones(1, 4)
    at_once([partial(one.add, each) for one, each in zip(exchanges, rows, strict=True)])
    assert torch.equal(rows[0], torch.full((1, 4), 2.0))
    assert "the ranks do not use /dev/shm: no room" in caplog.text
    assert not left_behind(tmp_path)


def test_a_file_that_finds_no_room_anywhere_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = make_exchanges(tmp_path, 2)
    monkeypatch.setattr("os.posix_fallocate", Mock(side_effect=OSError("no room")))
    with pytest.raises(OSError, match="no room"):
        first.add(torch.zeros(1, 4))
    assert not left_behind(tmp_path)


def test_a_rank_that_waits_reports_it(tmp_path: Path) -> None:
    """It does not hang: the one that it waits for does, perhaps."""
    first, second = make_exchanges(tmp_path, 2)
    num_reports = 0

    def report() -> None:
        nonlocal num_reports
        num_reports += 1

    first.on_wait(report)
    rows = torch.zeros(1, 4), torch.zeros(1, 4)
    at_once([partial(one.add, each) for one, each in zip((first, second), rows, strict=True)])
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(first.add, rows[0])
        eventually(lambda: num_reports > 2, "reports")
        second.add(rows[1])
        waiting.result(TIMEOUT_S)


def test_an_adoption_of_a_rank_that_is_dead_ends_no_wait(tmp_path: Path) -> None:
    """The group before this one was adopted under a greater epoch, and was killed."""
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    exchanges = make_exchanges(tmp_path, 2)
    (path,) = tmp_path.glob("ranks-*")
    words = array("q", path.read_bytes())
    words[3:6] = array("q", [dead.pid, 99, 99])
    with path.open("r+b") as file:  # in place: it is mapped
        file.write(words.tobytes())
    exchanges[0].begin(5)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(exchanges[0].add, torch.zeros(1, 4))
        assert not wait([waiting], timeout=0.2).done
        exchanges[1].begin(5)
        exchanges[1].add(torch.zeros(1, 4))
        waiting.result(TIMEOUT_S)


def test_a_missing_rank_is_named_after_a_while(tmp_path: Path) -> None:
    first, _ = make_exchanges(tmp_path, 2, timeout_s=0.2)
    with pytest.raises(RankMissing, match=r"rank 1 has not computed its part in 0\.2 s"):
        first.add(torch.zeros(1, 4))


def test_a_rank_without_a_first_one_gives_up(tmp_path: Path) -> None:
    _, second = make_exchanges(tmp_path, 2, timeout_s=0.2)
    with pytest.raises(RankMissing, match="rank 0 has not made"):
        second.add(torch.zeros(1, 4))


def test_a_rank_that_leaves_ends_the_waits_of_the_others(tmp_path: Path) -> None:
    """A core has died after it sent a step to one rank only, and the other rank is idle."""
    first, second = make_exchanges(tmp_path, 2)
    at_once([partial(one.add, torch.zeros(1, 4)) for one in (first, second)])
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(first.add, torch.zeros(1, 4))
        second.leave()
        with pytest.raises(StepAbandoned, match="left the adoption"):
            waiting.result(TIMEOUT_S)


def test_devices_begin_a_step_only_if_all_ranks_have_it(tmp_path: Path) -> None:
    """A rank that has published a step abandons it only where no rank can begin it any more."""
    groups = [Mock(), Mock()]
    first, second = make_exchanges(tmp_path, 2)
    for exchange, group in zip((first, second), groups, strict=True):
        exchange.group = group
    at_once([one.begin_step for one in (first, second)])
    assert [group.join.call_count for group in groups] == [1, 1]
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(first.begin_step)
        assert not wait([waiting], timeout=0.2).done
        second.leave()
        with pytest.raises(StepAbandoned):
            waiting.result(TIMEOUT_S)


def test_the_next_ranks_remove_the_file_of_a_first_one_that_died_while_it_joined(
    tmp_path: Path,
) -> None:
    """They do so before any of them makes the file at which their devices meet."""
    first, second = make_exchanges(tmp_path, 2)
    old = first._adoption.path("group-0-")
    old.touch()
    seen: list[bool] = []
    for exchange in (first, second):
        exchange.begin(2)
        exchange.group = Mock(join=lambda *_: seen.append(old.exists()))
    at_once([one.begin_step for one in (first, second)])
    assert seen == [False, False]


def test_a_step_that_all_ranks_have_begins_though_one_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank looks for the other one, which then begins the step and leaves at once."""
    first, second = make_exchanges(tmp_path, 2)
    first.group, second.group = Mock(), Mock()
    at_once([one.begin_step for one in (first, second)])
    native = first._joined()
    wait_for_all = native.wait

    def look_once(sequence: int, timeout_ns: int) -> int:
        found = wait_for_all(sequence, 0)
        if timeout_ns:
            second.begin_step()
            second.leave()
        return found

    monkeypatch.setattr(native, "wait", look_once)
    first.begin_step()


@pytest.mark.parametrize("has_joined", [True, False])
def test_an_adoption_ends_the_waits_of_the_one_before(has_joined: bool, tmp_path: Path) -> None:
    """A core has died after it sent a step to one rank only."""
    first, second = make_exchanges(tmp_path, 2)
    if has_joined:
        at_once([partial(one.add, torch.zeros(1, 4)) for one in (first, second)])
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(first.add, torch.zeros(1, 4))
        second.begin(2)
        with pytest.raises(StepAbandoned, match="left the adoption"):
            waiting.result(TIMEOUT_S)
    first.begin(2)
    rows = torch.ones(1, 4), torch.ones(1, 4)
    at_once([partial(one.add, each) for one, each in zip((first, second), rows, strict=True)])
    assert torch.equal(rows[0], torch.full((1, 4), 2.0))
