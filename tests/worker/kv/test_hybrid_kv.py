"""Windows free blocks, blocks are swapped to the host and back, and no token changes."""

import mmap
from pathlib import Path

import pytest
import torch

from protocol.core_worker import BlockCopies
from protocol.model_facts import UNLIMITED_BLOCKS, KVGroup
from protocol.sampling import SamplingParams
from tests.worker.checkpoints import ARCHITECTURES, WINDOW, Architecture
from tests.worker.driving import drive
from tests.worker.mini_scheduler import MiniScheduler
from tests.worker.parity import (
    BLOCK_SIZE,
    GREEDY,
    MAX_TOKENS,
    NUM_PROMPTS,
    ROOMY,
    TIGHT,
    Serve,
    make_runner,
)
from tests.worker.steps import new, step
from worker_proc.errors import InsufficientMemory, MirrorError
from worker_proc.kv.kv_tensors import CacheSize
from worker_proc.startup.swap_space import SwapSpace, share_swap_space

WINDOWED = [a for a in ARCHITECTURES if a.name in {"mistral_window", "gemma2", "gemma3"}]
LLAMA, GEMMA3 = ARCHITECTURES[0], WINDOWED[-1]
WHOLE, CHUNK, SINGLE = 64, 5, 1
MIB = 2**20
BLOCK_BYTES = 2 * 2 * 16 * BLOCK_SIZE * 4
"""Bytes of one layer: keys and values, heads, dimensions, tokens, float32."""

every_backend = pytest.mark.usefixtures("_backend")
windowed = pytest.mark.parametrize("architecture", WINDOWED, ids=lambda a: a.name)


@every_backend
@windowed
def test_blocks_that_a_window_has_passed_are_never_read(
    architecture: Architecture, serve: Serve
) -> None:
    served = serve(architecture)
    runner = make_runner(served.directory, ROOMY)
    for chunk in (WHOLE, CHUNK, SINGLE):
        mini_scheduler = MiniScheduler(runner, chunk)
        outputs = mini_scheduler.run(served.prompts, [GREEDY] * NUM_PROMPTS)
        assert served.expected == outputs, chunk
        assert mini_scheduler.num_reused > 50, chunk


@windowed
def test_windows_may_be_left_to_attention(architecture: Architecture, serve: Serve) -> None:
    served = serve(architecture)
    runner = make_runner(served.directory, ROOMY, enable_hybrid_kv_cache=False)
    assert runner.facts.kv_groups == [KVGroup()]
    run = drive(runner, served.prompts, GREEDY, max_num_batched_tokens=48)
    assert served.expected == run.output_token_ids


def test_groups_follow_the_kinds_of_layers(serve: Serve) -> None:
    groups = {
        a.name: make_runner(serve(a).directory, ROOMY).facts.kv_groups for a in (LLAMA, *WINDOWED)
    }
    full = KVGroup()
    sliding = KVGroup(WINDOW, -(-(WINDOW - 1 + 512) // BLOCK_SIZE) + 1)
    assert groups == {
        "llama": [full],
        "mistral_window": [sliding],
        "gemma2": [full, sliding],
        "gemma3": [full, sliding, sliding],
    }


@every_backend
@pytest.mark.parametrize("architecture", [LLAMA, GEMMA3], ids=lambda a: a.name)
def test_tokens_survive_a_stay_on_the_host(architecture: Architecture, serve: Serve) -> None:
    served = serve(architecture)
    runner = make_runner(served.directory, ROOMY, swap_space_bytes=300 * 2 * BLOCK_BYTES)
    seeded = [
        SamplingParams(max_tokens=MAX_TOKENS, temperature=0.9, top_p=0.95, seed=seed)
        for seed in range(NUM_PROMPTS)
    ]
    undisturbed = drive(runner, served.prompts, seeded).output_token_ids
    for params, expected in (([GREEDY] * NUM_PROMPTS, served.expected), (seeded, undisturbed)):
        for chunk in (WHOLE, CHUNK):
            mini_scheduler = MiniScheduler(runner, chunk, swap_every=2)
            assert mini_scheduler.run(served.prompts, params) == expected
            assert mini_scheduler.num_swaps > 10


@every_backend
@pytest.mark.parametrize("architecture", [LLAMA, GEMMA3], ids=lambda a: a.name)
def test_preempting_by_swap_changes_no_token(architecture: Architecture, serve: Serve) -> None:
    served = serve(architecture)
    runner = make_runner(served.directory, TIGHT, swap_space_bytes=2**20)
    for chunk, caching in ((48, True), (16, False)):
        run = drive(
            *(runner, served.prompts, GREEDY),
            max_num_batched_tokens=chunk,
            enable_prefix_caching=caching,
            scheduler_reserve_full_isl=False,
        )
        assert served.expected == run.output_token_ids
        assert run.num_swaps > 0


def test_the_hosts_blocks_are_counted_from_the_bytes(serve: Serve) -> None:
    directory = serve(LLAMA).directory
    facts = make_runner(directory, ROOMY, swap_space_bytes=2 * BLOCK_BYTES * 9 - 1).facts
    assert facts.num_host_blocks == 8
    assert make_runner(directory, ROOMY).facts.num_host_blocks == 0
    one_layer_per_group = make_runner(serve(GEMMA3).directory, ROOMY, swap_space_bytes=BLOCK_BYTES)
    assert one_layer_per_group.facts.num_host_blocks == 1


def test_more_swap_space_than_there_is_memory_is_refused_by_name() -> None:
    with pytest.raises(InsufficientMemory, match="swap_space_bytes 70368744177663"):
        share_swap_space(2**46 - 1, 4096, 0, CacheSize(100, 64))


def test_states_have_their_share_of_the_swap_space() -> None:
    size = CacheSize(100, 64, num_state_blocks=10)
    assert share_swap_space(10_000, 100, 0, size) == SwapSpace(100)
    assert share_swap_space(10_000, 100, 500, size) == SwapSpace(70, 6, 5.0)
    found = share_swap_space(10_000, 0, 500, size, has_attention=False)
    assert found == SwapSpace(0, 20, 1.0)
    # Stages that have only one of the two: the others decide about the other one.
    assert share_swap_space(10_000, 0, 500, size) == SwapSpace(UNLIMITED_BLOCKS, 20)
    found = share_swap_space(10_000, 100, 0, size, has_states=True)
    assert found == SwapSpace(100, UNLIMITED_BLOCKS)
    assert share_swap_space(0, 100, 500, size) == SwapSpace()


def test_the_cost_of_a_swap_is_measured_where_there_is_a_host_pool(serve: Serve) -> None:
    directory = serve(LLAMA).directory
    assert make_runner(directory, ROOMY).swap_cost_tokens == 0.0
    # The measurement has its own pool: the served one may be of any size.
    for num_blocks in (2, ROOMY):
        runner = make_runner(directory, num_blocks, swap_space_bytes=2**20)
        assert 0.0 < runner.swap_cost_tokens < 100.0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@every_backend
def test_a_sleep_gives_the_memory_back_and_tokens_are_right_afterwards(serve: Serve) -> None:
    served = serve(GEMMA3)
    num_blocks, num_host_blocks = 48 * MIB // BLOCK_BYTES, 16 * MIB // BLOCK_BYTES
    runner = make_runner(served.directory, num_blocks, swap_space_bytes=16 * MIB)
    mini_scheduler = MiniScheduler(runner, CHUNK, swap_every=2)
    assert mini_scheduler.run(served.prompts, [GREEDY] * NUM_PROMPTS) == served.expected
    block_ids = list(range(1, 1 + num_host_blocks))
    runner._pool.swap(BlockCopies(block_ids, list(range(num_host_blocks))), BlockCopies())
    for tensors in runner._pool.tensors:
        tensors.keys.fill_(torch.nan)
        tensors.values.fill_(torch.nan)
    awake = resident_bytes()
    runner.sleep()
    assert not runner.prepare_memory()
    assert resident_bytes() < awake - 60 * MIB
    assert not any(tensors.keys.any() for tensors in runner._pool.tensors)
    run = drive(runner, served.prompts, GREEDY)
    assert served.expected == run.output_token_ids
    while runner.prepare_memory():
        pass
    mini_scheduler = MiniScheduler(runner, CHUNK, swap_every=2)
    assert mini_scheduler.run(served.prompts, [GREEDY] * NUM_PROMPTS) == served.expected


def test_sleep_is_refused_while_a_request_is_mirrored(serve: Serve) -> None:
    runner = make_runner(serve(LLAMA).directory, ROOMY)
    runner.execute(step(0, 6, [new(1)], counts={1: 6}))
    with pytest.raises(MirrorError, match="1 requests are mirrored"):
        runner.sleep()
    runner.execute(step(1, 0, finished=[1]))
    runner.sleep()
    runner.sleep()
    runner._pool.wake()
    runner.prepare_memory()
    runner.execute(step(2, 6, [new(1)], counts={1: 6}))
