"""Models with recurrent layers: states, their blocks, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig

from protocol.model_facts import ModelFacts
from protocol.sampling import SamplingParams
from tests.worker.checkpoints import build_checkpoint
from tests.worker.driving import drive, drive_with_errors
from tests.worker.parity import (
    BLOCK_SIZE,
    GREEDY,
    MAX_TOKENS,
    MODES,
    ROOMY,
    Serve,
    is_greedy,
    make_prompts,
    make_runner,
)
from tests.worker.recurrent_models import KINDS, RECURRENT
from worker_proc.errors import InsufficientMemory, UnsupportedModel
from worker_proc.inputs import StepInputs
from worker_proc.modules import recurrent_proof
from worker_proc.modules.recurrent_proof import MAX_ERROR
from worker_proc.recurrent import delta_rule
from worker_proc.recurrent.layers import recurrent_layers
from worker_proc.recurrent.sizing import choose_num_state_blocks
from worker_proc.recurrent.state_pool import StatePool
from worker_proc.recurrent.step_texts import texts_of
from worker_proc.sampling.step_sampler import NOT_FINITE
from worker_proc.startup.announcement import announcement

BY_NAME = {architecture.name: architecture for architecture in RECURRENT}
DELTA = BY_NAME["qwen3_5_text"]
FEW = 4
"""State blocks, one of which is never used: three requests can run at once."""
BAD_TOKEN = 200


@pytest.mark.parametrize("architecture", KINDS, ids=lambda a: a.name)
def test_few_state_blocks_are_shared_by_many_requests(architecture: Any, serve: Serve) -> None:
    served = serve(architecture)
    runner = make_runner(served.directory, ROOMY, num_state_blocks_override=FEW)
    assert runner.facts.num_state_blocks == FEW
    for options in ({}, {"max_num_batched_tokens": 16}):
        assert drive(runner, served.prompts, GREEDY, **options).output_token_ids == served.expected


def test_few_rows_may_differ_more_by_rounding() -> None:
    expected = torch.ones(3, 40, 4)
    for errors, is_accepted in (
        ([5e-3], True),
        ([5e-3] * 4, False),
        ([0.02], False),
        ([float("nan")], False),
    ):
        found = expected.clone()
        for row, error in enumerate(errors):
            found[-1, row] += error
        assert (recurrent_proof._greatest_error(found, expected) <= MAX_ERROR) == is_accepted


def test_states_are_lost_in_sleep_and_needed_no_more(serve: Serve) -> None:
    served = serve(KINDS[0])
    runner = make_runner(served.directory, ROOMY)
    assert drive(runner, served.prompts, GREEDY).output_token_ids == served.expected
    runner.reset()
    runner.sleep()
    states = runner._model.__dict__["state_pool"].tensors
    assert not any(bool(tensor.any()) for tensors in states.values() for tensor in tensors)
    assert drive(runner, served.prompts, GREEDY).output_token_ids == served.expected


def test_a_moved_step_has_the_texts_of_a_new_one(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(KINDS[2])
    runner = make_runner(served.directory, ROOMY)
    begin, num_moved = StatePool.begin_step, 0

    def compared(pool: StatePool, inputs: StepInputs) -> None:
        nonlocal num_moved
        begin(pool, inputs)
        num_moved += inputs.begun_blocks is not None
        assert list(pool.texts) == list(texts_of(inputs, BLOCK_SIZE))

    monkeypatch.setattr(StatePool, "begin_step", compared)
    assert drive(runner, served.prompts, GREEDY).output_token_ids == served.expected
    assert num_moved > 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen4_exp_text", "recurrent_gemma"], ids=str)
def test_layers_keep_nothing_of_the_steps_that_they_computed(name: str, tmp_path: Path) -> None:
    """The modules that keep their states in transformers' cache do not either."""
    build_checkpoint(tmp_path, BY_NAME[name].config())
    runner = make_runner(tmp_path, ROOMY)
    counts = []
    for _ in range(2):
        drive(runner, [[3, 4, 5], [6, 7] * 20], GREEDY)
        counts.append([_num_entries(layer) for layer in recurrent_layers(runner._model)])
    assert counts[0] == counts[1]
    assert all(counts[0])


def _num_entries(held: Any) -> int:
    """Return the number of entries in the lists of an object of the worker, and of its parts."""
    if isinstance(held, list | tuple | dict):
        entries = held.values() if isinstance(held, dict) else held
        return len(held) + sum(map(_num_entries, entries))
    is_own = type(held).__module__.startswith("worker_proc.recurrent")
    return _num_entries(vars(held)) if is_own and hasattr(held, "__dict__") else 0


def test_a_state_that_is_not_finite_stays_with_its_request(tmp_path: Path) -> None:
    """Requests that get its block afterwards begin with zeros."""
    build_checkpoint(tmp_path, DELTA.config())
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.embed_tokens.weight"][BAD_TOKEN] = torch.nan
    save_file(tensors, weights, {"format": "pt"})
    runner = make_runner(tmp_path, ROOMY, num_state_blocks_override=FEW)
    params = SamplingParams(temperature=0.0, max_tokens=9)
    good = [[3, 4, 5, 6, 7], [13, 14, 15], [16, 17, 18, 19], [20, 21]]
    outputs, errors = drive_with_errors(runner, [[8, BAD_TOKEN, 9, 10], *good], params, 0)
    assert errors == {0: NOT_FINITE}
    alone, none = drive_with_errors(runner, good, params, 0)
    assert none == {}
    assert outputs[1:] == alone
    assert all(alone)


def test_a_module_that_computes_something_else_is_refused(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(KINDS[0])
    monkeypatch.setattr(delta_rule, "EPSILON", 0.5)
    with pytest.raises(UnsupportedModel, match=r"linear_attn .* differs from its own forward"):
        make_runner(served.directory, ROOMY)


@pytest.mark.slow
def test_a_state_of_no_numbers_is_refused(tmp_path: Path) -> None:
    """A convolution of one tap has such a state."""
    config: Any = BY_NAME["zaya"].config()
    config.cca_time0 = config.cca_time1 = 1
    build_checkpoint(tmp_path, config)
    with pytest.raises(UnsupportedModel, match=r"qkv_proj: its state conv_state 0 has no numbers"):
        make_runner(tmp_path, ROOMY)


def test_a_model_without_attention_has_no_kv_cache(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, BY_NAME["mamba2"].config())
    runner = make_runner(tmp_path, None)
    facts = runner.facts
    assert [group.is_state for group in facts.kv_groups] == [True]
    assert facts.exact_resume
    assert facts.num_blocks_for(facts.max_model_len) == 0
    lines = list(announcement(facts, runner.attention))
    assert lines[0] == "context 1,048,576 tokens; no KV cache"
    assert lines[1] == f"recurrent states: {facts.num_state_blocks - 1:,} requests and prefixes"


@pytest.mark.parametrize("name", ["falcon_mamba", "mamba2"])
def test_a_residual_in_float32_is_rounded_for_the_layers(name: str, tmp_path: Path) -> None:
    """They convert rows to the type of a norm's weight."""
    build_checkpoint(tmp_path, BY_NAME[name].config())
    runner = make_runner(tmp_path, None, dtype="bfloat16")
    assert runner.facts.exact_resume, runner.facts.exact_resume_reason


@pytest.mark.parametrize(
    "architecture",
    [
        BY_NAME["olmo_hybrid"],  # its layers have parameters of two types
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in RECURRENT
            if one.name != "olmo_hybrid"
        ),
    ],
    ids=lambda a: a.name,
)
def test_every_kind_computes_in_bfloat16(architecture: Any, tmp_path: Path) -> None:
    build_checkpoint(tmp_path, architecture.config())
    runner = make_runner(tmp_path, ROOMY, dtype="bfloat16")
    assert runner.facts.exact_resume, runner.facts.exact_resume_reason
    prompts = [[3, 4, 5, 6, 7], [9, 10, 11] * 20]
    together = drive(runner, prompts, GREEDY).output_token_ids
    runner.reset()
    assert drive(runner, prompts, GREEDY, max_num_batched_tokens=16).output_token_ids == together


def test_tied_layers_are_packed_once(tmp_path: Path) -> None:
    """Those of Zamba2 have separate KV caches all the same."""
    build_checkpoint(tmp_path, BY_NAME["zamba2"].config())
    runner = make_runner(tmp_path, ROOMY)
    layers = [runner._model.get_submodule(f"model.layers.{number}") for number in (1, 2, 4, 5)]
    first, second, third, fourth = (layer.shared_transformer for layer in layers)
    for one, other, is_tied in (
        (first, third, True),
        (second, fourth, True),
        (first, second, False),
    ):
        for path in ("self_attn.o_proj", "feed_forward.down_proj"):
            assert (one.get_submodule(path) is other.get_submodule(path)) == is_tied
        assert one.self_attn.paged_layer is not other.self_attn.paged_layer
        assert one.self_attn.paged_layer.kv.keys is not other.self_attn.paged_layer.kv.keys


@pytest.mark.slow
@pytest.mark.parametrize("has_angles", [False, True])
@pytest.mark.parametrize("has_products", [False, True])
def test_layers_with_shared_weights_have_their_own_products_and_angles(
    has_products: bool, has_angles: bool, tmp_path: Path
) -> None:
    """Low-rank products in each layer, and rotated keys: parts that a Zamba2 may have or lack."""
    config: Any = BY_NAME["zamba2"].config()
    config.use_shared_attention_adapter, config.use_mem_rope = has_products, has_angles
    assert_greedy_in_every_mode(tmp_path, config)


@pytest.mark.slow
@pytest.mark.parametrize("num_channels", [32, 96])
def test_averages_may_have_another_width_than_the_rows(num_channels: int, tmp_path: Path) -> None:
    """Those of RWKV may; transformers' own states of it cannot."""
    config: Any = BY_NAME["rwkv"].config()
    config.attention_hidden_size = num_channels
    assert_greedy_in_every_mode(tmp_path, config)


def assert_greedy_in_every_mode(directory: Path, config: PretrainedConfig) -> None:
    """Compare with whole forwards: decoding with a cache by transformers may differ from them."""
    model = build_checkpoint(directory, config)
    prompts = make_prompts()
    runner = make_runner(directory, ROOMY)
    for mode in ("whole_prompts", "chunked", "prefix_cache"):
        outputs = drive(runner, prompts, GREEDY, **MODES[mode][1]).output_token_ids
        for prompt, output in zip(prompts, outputs, strict=True):
            assert is_greedy(model, prompt, output, MAX_TOKENS), mode


def test_the_number_of_state_blocks() -> None:
    def choose(
        available: int,
        has_attention: bool = True,
        override: int | None = None,
        num_speculative_tokens: int = 0,
    ) -> tuple[int, int]:
        return choose_num_state_blocks(
            available,
            100,
            max_num_seqs=8,
            has_attention=has_attention,
            num_speculative_tokens=num_speculative_tokens,
            override=override,
        )

    assert choose(10_000) == (17, 0)
    assert choose(2_000) == (10, 0)
    assert choose(2_000, has_attention=False) == (17, 0)
    assert choose(2_000, override=5) == (5, 0)
    assert choose(10_000, num_speculative_tokens=4) == (17, 32)
    assert choose(4_900, num_speculative_tokens=4) == (8, 15)
    assert choose(4_900, num_speculative_tokens=4, override=8) == (8, 15), "of a successor"
    assert choose(1_400, num_speculative_tokens=2) == (3, 2)
    with pytest.raises(InsufficientMemory, match="5 recurrent states need 500 bytes"):
        choose(999, num_speculative_tokens=2)
    for number in (590, 100):
        with pytest.raises(InsufficientMemory, match="3 recurrent states need 300 bytes"):
            choose(number)
    with pytest.raises(InsufficientMemory, match="30 recurrent states need"):
        choose(2_000, override=30)


def test_the_announcement_counts_states() -> None:
    facts = ModelFacts("m", 10, 64, 16, 9, [], num_state_blocks=5)
    assert "recurrent states: 4 requests and prefixes" in announcement(facts, "native kernel")
