"""A draft model changes no token; and where it is the model itself, each of its drafts is right.

The second property shows that its KV is caught up, whatever became of a request: one wrong position
would make it draft other tokens than the model samples.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from protocol.core_worker import LoadBlocks, ModelRunnerOutput, SchedulerOutput, StoreBlocks
from protocol.sampling import SamplingParams
from protocol.stores.index import BlockIndex
from scripts.testing import eventually
from tests.worker.checkpoints import ARCHITECTURES, build_checkpoint
from tests.worker.driving import Run, drive
from tests.worker.mini_scheduler import MiniScheduler
from tests.worker.parity import make_runner
from tests.worker.runners import draft_model_of
from worker_proc.drafting.draft_model import num_spare_blocks
from worker_proc.errors import CheckpointError, UnsupportedModel
from worker_proc.model_runner import ModelRunner
from worker_proc.offload.block_store import BlockStore
from worker_proc.offload.service import OffloadService
from worker_proc.runner import ComputedStep

NUM_DRAFTS = 3
NUM_BLOCKS, FEW_BLOCKS = 300, 50
MAX_TOKENS = 24
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}


def make_params(**more: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": MAX_TOKENS, "ignore_eos": True} | more))


PARAMS = [
    make_params(temperature=0.0),
    make_params(temperature=1.0, seed=1, logprobs=2),
    make_params(temperature=0.7, seed=2, top_p=0.9),
    make_params(temperature=1.2, seed=3, repetition_penalty=1.3, prompt_logprobs=1),
    make_params(temperature=0.0, frequency_penalty=0.5, ignore_eos=False),
    make_params(temperature=1.0, seed=4, top_k=5, max_tokens=2),
]
SHARED = list(range(40, 58))
PROMPTS = [[*SHARED, 5 + number, *range(70, 70 + 7 * number)] for number in range(len(PARAMS))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Build each architecture's checkpoint once."""
    built: dict[str, Path] = {}

    def build(name: str) -> Path:
        if name not in built:
            built[name] = tmp_path_factory.mktemp(name)
            build_checkpoint(built[name], BY_NAME[name].config())
        return built[name]

    return build


@pytest.fixture(scope="module")
def runner(checkpoint: Callable[[str], Path]) -> Callable[..., ModelRunner]:
    """Load each combination once; driving a runner resets it."""

    @functools.cache
    def make(model: str, draft: str | None, num_blocks: int = NUM_BLOCKS) -> ModelRunner:
        return make_runner(
            checkpoint(model),
            num_blocks,
            num_speculative_tokens=NUM_DRAFTS if draft else 0,
            speculative_model=checkpoint(draft) if draft else None,
            swap_space_bytes=2 << 20,
        )

    return make


@pytest.mark.parametrize(
    ("model", "draft"), [("llama", "qwen3"), ("llama", "llama"), ("gemma3", "gemma3")]
)
def test_tokens_and_logprobs_are_those_without_drafts(
    model: str, draft: str, runner: Callable[..., ModelRunner]
) -> None:
    """Prompts are whole or in chunks, requests stay on the host, and some drafts do not come."""
    alone = MiniScheduler(runner(model, None), 64)
    expected = alone.run(PROMPTS, PARAMS)
    guessing = runner(model, draft)
    for chunk, swap_every, spare in ((64, 0, 0), (5, 7, 3)):
        mini_scheduler = MiniScheduler(guessing, chunk, swap_every, spare)
        assert mini_scheduler.run(PROMPTS, PARAMS) == expected
        assert mini_scheduler.logprobs == alone.logprobs
        assert bool(mini_scheduler.num_swaps) == bool(swap_every)
        num_accepted = sum(accepted for _, accepted in mini_scheduler.accepted)
        num_verified = sum(verified for verified, _ in mini_scheduler.accepted)
        assert num_verified > MAX_TOKENS
        if model == draft:
            assert num_accepted == num_verified
        else:
            assert num_accepted < num_verified // 2


def test_blocks_are_the_same_bytes_after_they_were_read_from_a_store(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """A block that is read without that of the draft model counts as missing there."""
    writer, reader = (
        make_runner(
            checkpoint("llama"),
            NUM_BLOCKS,
            num_speculative_tokens=NUM_DRAFTS,
            speculative_model=checkpoint("llama"),
            kv_offload_bytes=2**20,
        )
        for _ in range(2)
    )
    prompt = list(range(10, 10 + 3 * writer.facts.block_size))
    drive(writer, [prompt], make_params(temperature=0.0))
    services = []
    for runner in (writer, reader):
        blocks, drafts = runner.block_memory, runner.draft_blocks
        assert blocks is not None
        assert drafts is not None
        store = BlockStore(tmp_path / "store", 2**24, blocks.block_bytes)
        services.append(OffloadService(blocks, [store], drafts=drafts))
    first, second = bytes(32), bytes([1] * 32)
    services[0].store(StoreBlocks([1, 2], [first, second]))
    name = writer.draft_blocks.name(first)  # type: ignore[union-attr]
    index = BlockIndex(tmp_path / "store" / "index")
    eventually(lambda: all(key in index for key in (first, second, name)), "written")
    writer.draft_blocks.note(2, is_filled=False)  # type: ignore[union-attr]
    services[0].store(StoreBlocks([2], [bytes([2] * 32)]))
    eventually(lambda: bytes([2] * 32) in index, "written")
    keys = [first, bytes([2] * 32)]
    assert services[1].load(LoadBlocks(1, [5, 6], keys)) is None
    eventually(services[1].take_results, "read")
    own, other = map(draft_model_of, (writer, reader))
    pools = zip(own._pool.all_tensors, other._pool.all_tensors, strict=True)
    assert all(torch.equal(one[1], two[5]) and one[1].any() for one, two in pools)
    assert [other.holds(block_id) for block_id in (5, 6)] == [True, False]


MODES: dict[str, tuple[int, dict[str, object], Callable[[Run], int]]] = {
    "whole": (NUM_BLOCKS, {"enable_prefix_caching": False}, lambda run: run.num_steps),
    "chunked": (
        NUM_BLOCKS,
        {"enable_prefix_caching": False, "max_num_batched_tokens": 16, "max_steps_in_flight": 2},
        lambda run: run.num_steps,
    ),
    "prefix_cache": (NUM_BLOCKS, {"max_num_seqs": 2}, lambda run: run.num_cached_tokens),
    "preempted": (
        FEW_BLOCKS,
        {"scheduler_reserve_full_isl": False, "max_num_batched_tokens": 48},
        lambda run: run.num_preemptions,
    ),
    "swapped": (
        FEW_BLOCKS,
        {"scheduler_reserve_full_isl": False, "enable_prefix_caching": False},
        lambda run: run.num_swaps,
    ),
}


@pytest.mark.parametrize(
    ("model", "mode"),
    [*(("llama", mode) for mode in MODES), ("gemma3", "chunked"), ("gemma3", "prefix_cache")],
)
def test_every_draft_of_the_model_itself_is_right(
    model: str, mode: str, runner: Callable[..., ModelRunner]
) -> None:
    num_blocks, options, happened = MODES[mode]
    alone = drive(runner(model, None, num_blocks), PROMPTS, PARAMS, **options)
    options = options | {"num_speculative_tokens": NUM_DRAFTS}
    run = drive(runner(model, model, num_blocks), PROMPTS, PARAMS, **options)
    assert run.output_token_ids == alone.output_token_ids
    assert happened(run)
    assert run.num_accepted_drafts == run.num_drafts > 3 * NUM_DRAFTS


class Intermittent:
    """A runner that makes drafts in some steps only."""

    swap_cost_tokens, attention, grammars = 0.0, "", None

    def __init__(self, runner: ModelRunner, num_without: int, num_drafts: int = NUM_DRAFTS) -> None:
        self.facts = runner.facts
        self.reset, self.sleep = runner.reset, runner.sleep
        self.num_with = 0
        """Steps in which drafts were wanted."""
        self._runner = runner
        self._num_without = num_without
        self._num_drafts = num_drafts
        self._known: set[int] = set()

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self._known |= {new.req_id for new in step.scheduled_new_reqs}
        self._known -= {*step.preempted_req_ids, *step.finished_req_ids}
        is_wanted = step.step_id % (self._num_without + 2) >= self._num_without
        self.num_with += is_wanted
        limits = dict.fromkeys(self._known, self._num_drafts if is_wanted else 0)
        return self._runner.execute(msgspec.structs.replace(step, draft_limits=limits))

    def launch(self, step: SchedulerOutput) -> ComputedStep:
        return ComputedStep(self.execute(step))


@pytest.mark.parametrize("max_num_seqs", [6, 2])
def test_requests_catch_up_when_drafts_are_wanted_again(
    max_num_seqs: int, runner: Callable[..., ModelRunner]
) -> None:
    """The blocks are their own, or those of a prefix computed without the draft model."""
    expected = drive(runner("llama", None), PROMPTS, PARAMS).output_token_ids
    intermittent = Intermittent(runner("llama", "llama"), 5)
    options = {"num_speculative_tokens": NUM_DRAFTS, "max_num_seqs": max_num_seqs}
    run = drive(intermittent, PROMPTS, PARAMS, **options)
    assert run.output_token_ids == expected
    assert run.num_cached_tokens > 0
    assert run.num_accepted_drafts == run.num_drafts >= 2 * intermittent.num_with > 2


def test_a_draft_model_with_another_tokenizer_is_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model, draft = tmp_path / "model", tmp_path / "draft"
    for directory, ids in ((model, {"a": 0, "b": 1}), (draft, {"a": 0, "b": 2})):
        build_checkpoint(directory, BY_NAME["llama"].config())
        tokenizer = {"model": {"vocab": ids}, "added_tokens": [{"content": "<s>", "id": 5}]}
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match=r"token 'b' has id 2 instead of 1"):
        make_runner(model, NUM_BLOCKS, num_speculative_tokens=2, speculative_model=draft)


def test_a_model_whose_blocks_are_all_freed_takes_no_draft_model(
    runner: Callable[..., ModelRunner],
) -> None:
    with pytest.raises(UnsupportedModel, match="no-enable-hybrid-kv-cache"):
        runner("mistral_window", "llama")


def test_its_cache_is_taken_from_the_same_memory(checkpoint: Callable[[str], Path]) -> None:
    """A draft model of the model's size halves the blocks, and its spare ones come on top."""
    memory = {"kv_cache_memory_bytes": 4 << 20}
    alone = make_runner(checkpoint("llama"), None, **memory)
    drafting = make_runner(
        checkpoint("llama"),
        None,
        num_speculative_tokens=NUM_DRAFTS,
        speculative_model=checkpoint("llama"),
        **memory,
    )
    num_spare = 64 * num_spare_blocks(4, NUM_DRAFTS)
    assert drafting.facts.num_gpu_blocks == (alone.facts.num_gpu_blocks - num_spare) // 2
