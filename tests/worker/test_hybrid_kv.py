"""Windows give blocks back, blocks go to the host and return, and no token changes."""

import pytest

from protocol.core_worker import KVGroup
from protocol.sampling import SamplingParams
from tests.worker.checkpoints import ARCHITECTURES, WINDOW, Architecture
from tests.worker.driving import drive
from tests.worker.stand_in import StandIn
from tests.worker.test_parity import (
    BLOCK_SIZE,
    GREEDY,
    MAX_TOKENS,
    NUM_PROMPTS,
    ROOMY,
    Serve,
    make_runner,
)

WINDOWED = [a for a in ARCHITECTURES if a.name in {"mistral_window", "gemma2", "gemma3"}]
LLAMA, GEMMA3 = ARCHITECTURES[0], WINDOWED[-1]
WHOLE, CHUNK, SINGLE = 64, 5, 1
BLOCK_BYTES = 2 * 2 * 16 * BLOCK_SIZE * 4
"""Of one layer: keys and values, heads, dimensions, tokens, float32."""

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
        stand_in = StandIn(runner, chunk)
        outputs = stand_in.run(served.prompts, [GREEDY] * NUM_PROMPTS)
        assert served.expected == outputs, chunk
        assert stand_in.num_reused > 50, chunk


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
            stand_in = StandIn(runner, chunk, swap_every=2)
            assert stand_in.run(served.prompts, params) == expected
            assert stand_in.num_swaps > 10


def test_the_hosts_blocks_are_counted_from_the_bytes(serve: Serve) -> None:
    directory = serve(LLAMA).directory
    facts = make_runner(directory, ROOMY, swap_space_bytes=2 * BLOCK_BYTES * 9 - 1).facts
    assert facts.num_host_blocks == 8
    assert make_runner(directory, ROOMY).facts.num_host_blocks == 0
    one_layer_per_group = make_runner(serve(GEMMA3).directory, ROOMY, swap_space_bytes=BLOCK_BYTES)
    assert one_layer_per_group.facts.num_host_blocks == 1


def test_the_cost_of_a_swap_is_measured_where_there_is_a_host_pool(serve: Serve) -> None:
    directory = serve(LLAMA).directory
    assert make_runner(directory, ROOMY).swap_cost_tokens == 0.0
    # The least pool that is possible has room for one block of the measured prompt.
    for num_blocks in (2, ROOMY):
        runner = make_runner(directory, num_blocks, swap_space_bytes=2**20)
        assert 0.0 < runner.swap_cost_tokens < 100.0
