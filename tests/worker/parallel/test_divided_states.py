"""Stages of models with recurrent layers: each holds the states of its own layers."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from protocol.config import KVCacheDtype, Quantization
from protocol.model_facts import UNLIMITED_BLOCKS
from protocol.sampling import SamplingParams
from tests.worker.checkpoints import Architecture, build_checkpoint
from tests.worker.drafting.oracle import Oracle
from tests.worker.drafting.recurrent_requests import (
    FEW_STATES,
    NUM_DRAFTS,
    PARAMS,
    PREEMPTING,
    PROMPTS,
)
from tests.worker.driving import Run, check_schedules
from tests.worker.parallel.ranks import Ranks
from tests.worker.parallel.stages import SAMPLED, Stages
from tests.worker.parity import GREEDY, MAX_TOKENS, few_prompts, generate_all
from tests.worker.recurrent_models import KEY_DECAYS, RECURRENT
from worker_proc.drafting import repetitions
from worker_proc.errors import UnsupportedModel
from worker_proc.loading.passages import Passage
from worker_proc.parallel.division import mlp
from worker_proc.parallel.pipe import StagePipe
from worker_proc.runner import Runner

BY_NAME = {architecture.name: architecture for architecture in RECURRENT}
_BY_DEFAULT = ("qwen3_next", "bamba", "lfm2", "rwkv")
_REFUSED_IN_STAGES = ("qwen4_exp_text", "zaya")
SLOW = pytest.mark.slow
DRAFTING = {"num_speculative_tokens": NUM_DRAFTS, "adaptive_speculation": False}


def deep(name: str, **changes: Any) -> Callable[[], PretrainedConfig]:
    """Return what makes a configuration with twice the layers, so that each stage has all kinds.

    Those with shared attention keep their layers: in more of them tokens that transformers makes
    with a cache are other ones than without.
    """

    def config() -> PretrainedConfig:
        one = BY_NAME[name].config()
        values = one.to_dict() | changes
        for key in ("num_hidden_layers", "layer_types", "mlp_layer_types"):
            if key in values and name not in ("zamba", "zamba2"):
                values[key] *= 2
        return type(one).from_dict(values)

    return config


def states_of(runner: Runner) -> Any:
    return runner._model.__dict__["state_pool"]  # type: ignore[attr-defined]


def count_values(runners: Sequence[Runner], *, windows: bool = False) -> int:
    """Return how many values of states a text has at all ranks, of windows or of others."""
    tensors = [tensor for runner in runners for tensor in states_of(runner).all_tensors]
    return sum(tensor[0].numel() for tensor in tensors if (tensor.dim() == 3) is windows)


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(one, marks=[] if one.name in _BY_DEFAULT else SLOW)
        for one in RECURRENT
        if one.name not in _REFUSED_IN_STAGES
    ],
    ids=lambda one: one.name,
)
def test_stages_have_the_logprobs_of_one_worker(architecture: Architecture, tmp_path: Path) -> None:
    """A stage may have no recurrent layer, or no attention, though the model has both."""
    directory = tmp_path / "model"
    build_checkpoint(directory, architecture.config())
    one = Stages(directory, 1)
    prompts = few_prompts()
    alone = one.drive(prompts, SAMPLED)
    stages = Stages(directory, 2)
    for settings in ({}, {"max_num_batched_tokens": 7}, {"max_num_seqs": 1}):
        run = stages.drive(prompts, SAMPLED, **settings)
        assert run.output_token_ids == alone.output_token_ids
        assert run.logprobs == alone.logprobs
    assert one.facts.exact_resume, one.facts.exact_resume_reason
    assert stages.facts.exact_resume, stages.facts.exact_resume_reason
    kinds = [[group.is_state for group in each.facts.kv_groups] for each in (one, stages)]
    assert kinds[0] == kinds[1]
    assert stages.facts.decoder == one.facts.decoder == "modules"
    assert 0 < stages.facts.num_state_blocks < UNLIMITED_BLOCKS
    assert 0 < stages.facts.num_gpu_blocks < UNLIMITED_BLOCKS


@pytest.mark.parametrize("name", _REFUSED_IN_STAGES)
def test_layers_that_pass_on_more_than_their_rows_are_refused_in_stages(
    name: str, tmp_path: Path
) -> None:
    """Several streams of rows, or the states of a router, which the next layer's router adds."""
    build_checkpoint(tmp_path, BY_NAME[name].config())
    reason = "pipeline_parallel_size 2: its layers pass on more than a row for each token"
    with pytest.raises(UnsupportedModel, match=reason):
        Stages(tmp_path, 2)


@pytest.mark.parametrize(
    "name",
    [
        "lfm2",
        *(
            pytest.param(one, marks=SLOW)
            for one in ("qwen3_5_text", "granitemoehybrid", "zamba", "zamba2")
        ),
    ],
)
def test_stages_compute_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    """Stages have attention or none, and several of them may share it."""
    model = build_checkpoint(tmp_path / "model", deep(name)())
    prompts = few_prompts()
    expected = generate_all(model, prompts, MAX_TOKENS)
    for num_stages in (2, 3):
        stages = Stages(tmp_path / "model", num_stages)
        assert stages.drive(prompts).output_token_ids == expected
        assert stages.drive(prompts, max_num_batched_tokens=16).output_token_ids == expected


def test_a_stage_holds_the_states_of_its_own_layers(tmp_path: Path) -> None:
    build_checkpoint(tmp_path / "model", BY_NAME["qwen3_5_text"].config())
    first, second = Stages(tmp_path / "model", 2).runners
    assert list(states_of(first).tensors) == ["model.layers.0.linear_attn"]
    assert states_of(second).all_tensors == []
    assert first._pool.tensors == []  # type: ignore[attr-defined]
    for runner in (first, second):
        runner.reset()
        runner.sleep()
    assert not any(bool(tensor.any()) for tensor in states_of(first).all_tensors)


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3_5_text", "mamba2", "lfm2"),
        *(pytest.param(one.name, marks=SLOW) for one in KEY_DECAYS),
        *(pytest.param(one, marks=SLOW) for one in ("zamba", "zamba2")),
    ],
)
def test_tokens_do_not_depend_on_the_batch_the_cut_or_a_restart(name: str, tmp_path: Path) -> None:
    """The model is in bfloat16; rows that layers of Mamba-2 pass on are in float32."""
    build_checkpoint(tmp_path / "model", BY_NAME[name].config())
    prompts = few_prompts()
    alone = Stages(tmp_path / "model", 1, dtype="bfloat16").drive(prompts, SAMPLED)
    stages = Stages(tmp_path / "model", 2, dtype="bfloat16")
    dtype = torch.float32 if name == "mamba2" else torch.bfloat16
    assert {runner._part._dtype for runner in stages.runners[:1]} == {dtype}  # type: ignore[attr-defined]
    assert stages.drive(prompts, SAMPLED).logprobs == alone.logprobs
    check_schedules(stages.drive, prompts, SAMPLED, alone.output_token_ids)


def check_preempted(stages: Stages, expected: Run, **settings: Any) -> list[Run]:
    """Compare runs over few states, and few blocks with and without copies of states."""
    ways: list[dict[str, Any]] = [
        FEW_STATES | {"num_state_blocks": 7, "max_steps_in_flight": 2},
        PREEMPTING | {"num_blocks": 40, "swap_cost_tokens": 0.0},
        PREEMPTING | {"num_blocks": 40, "num_host_state_blocks": 0},
    ]
    runs = []
    for options in ways:
        run = stages.drive(PROMPTS, PARAMS, **settings | options)
        assert run.output_token_ids == expected.output_token_ids, options
        assert run.logprobs == expected.logprobs, options
        runs.append(run)
    assert sum(run.num_cached_tokens for run in runs) > 0
    assert runs[1].num_swaps > 0 == runs[2].num_swaps
    assert runs[2].num_preemptions > 0
    return runs


@pytest.mark.slow
def test_states_are_kept_copied_and_computed_again(tmp_path: Path) -> None:
    """Snapshots for the prefix cache, and states of preempted requests, reach every stage."""
    build_checkpoint(tmp_path / "model", deep("qwen3_5_text")())
    expected = Stages(tmp_path / "model", 1).drive(PROMPTS, PARAMS)
    check_preempted(Stages(tmp_path / "model", 2, swap_space_bytes=8 << 20), expected)


@pytest.mark.parametrize(
    ("name", "num_stages"),
    [
        ("lfm2", 2),
        *(
            pytest.param(*one, marks=SLOW)
            for one in (
                ("lfm2", 3),
                *((name, 2) for name in ("qwen3_5_text", "nemotron_h", "kimi_linear")),
                *((name, 2) for name in ("bailing_hybrid", "zamba")),
                ("zamba2", 3),
            )
        ),
    ],
)
def test_states_roll_back_in_every_stage(
    name: str, num_stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are right and wrong, and requests preempted, swapped and computed again."""
    build_checkpoint(tmp_path / "model", deep(name)())
    expected = Stages(tmp_path / "model", 1).drive(PROMPTS, PARAMS)
    texts = [a + b for a, b in zip(PROMPTS, expected.output_token_ids, strict=True)]
    monkeypatch.setattr(Oracle, "texts", texts)
    monkeypatch.setattr(repetitions, "NgramIndex", Oracle)
    stages = Stages(
        tmp_path / "model",
        num_stages,
        num_speculative_tokens=NUM_DRAFTS,
        swap_space_bytes=8 << 20,
    )
    for run in check_preempted(stages, expected, **DRAFTING):
        assert 0 < run.num_accepted_drafts < run.num_drafts
    # As if results came after the step that builds on them, which they may in all ranks but one.
    monkeypatch.setattr(StagePipe, "has_tokens", lambda pipe, step: False)
    check_preempted(stages, expected, **DRAFTING)
    for runner in stages.runners:
        states = runner._mirror._draft_states  # type: ignore[attr-defined]
        stages.reset()
        assert states.num_free == len(states._ids) >= NUM_DRAFTS


def test_drafts_need_blocks_for_their_states_in_every_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage with the fewest blocks decides how many drafts the last one makes."""
    build_checkpoint(tmp_path / "model", deep("lfm2")())
    expected = Stages(tmp_path / "model", 1).drive(PROMPTS, PARAMS)
    texts = [a + b for a, b in zip(PROMPTS, expected.output_token_ids, strict=True)]
    monkeypatch.setattr(Oracle, "texts", texts)
    monkeypatch.setattr(repetitions, "NgramIndex", Oracle)
    stages = Stages(tmp_path / "model", 2, num_speculative_tokens=NUM_DRAFTS)
    few = 5
    first, last = stages.runners
    for runner in (first, last):
        states = runner._mirror._draft_states  # type: ignore[attr-defined]
        assert states.num_free > few
        if runner is first:
            states._ids = states._ids[:few]
            states.max_used = runner._pipe._num_draft_states = few  # type: ignore[attr-defined]
    run = stages.drive(PROMPTS, PARAMS, **DRAFTING)
    assert run.output_token_ids == expected.output_token_ids
    assert last._mirror._draft_states.max_used == few  # type: ignore[attr-defined]
    assert 0 < run.num_accepted_drafts < run.num_drafts


def test_a_sampled_step_of_states_without_attention(tmp_path: Path) -> None:
    """No stage of a model without attention has KV blocks."""
    build_checkpoint(tmp_path / "model", BY_NAME["mamba2"].config())
    stages = Stages(tmp_path / "model", 2)
    assert [group.is_state for group in stages.facts.kv_groups] == [True]
    params = SamplingParams(max_tokens=8, temperature=0.7, seed=1, ignore_eos=True)
    expected = Stages(tmp_path / "model", 1).drive(few_prompts(), params)
    assert stages.drive(few_prompts(), params).output_token_ids == expected.output_token_ids
    assert stages.drive(few_prompts(), GREEDY).output_token_ids


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["granitemoehybrid", *(pytest.param(one, marks=SLOW) for one in ("qwen3_next", "lfm2"))]
)
@pytest.mark.parametrize(
    "settings",
    [{"quantization": Quantization.W8A16}, {"kv_cache_dtype": KVCacheDtype.INT8}],
    ids=["weights", "keys and values"],
)
def test_stages_round_as_one_worker_does(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    build_checkpoint(tmp_path / "model", deep(name)())
    prompts = few_prompts()
    expected = Stages(tmp_path / "model", 1, dtype="bfloat16", **settings).drive(prompts, SAMPLED)
    stages = Stages(tmp_path / "model", 2, dtype="bfloat16", **settings)
    for cut in ({}, {"max_num_batched_tokens": 7}):
        run = stages.drive(prompts, SAMPLED, **cut)
        assert run.output_token_ids == expected.output_token_ids
        assert run.logprobs == expected.logprobs


_ONE_GROUP: dict[str, Any] = {"mamba_n_groups": 1}
"""Its norm is of the heads of all ranks."""


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_stages", "changes"),
    [
        ("lfm2", 2, 1, {}),
        *(
            pytest.param(*case, marks=SLOW)
            for case in (
                ("qwen3_next", 2, 2, {}),
                ("qwen3_5_text", 2, 1, {}),
                ("qwen3_next", 2, 1, {}),
                ("qwen3_5_moe_text", 2, 1, {}),
                ("qwen3_5_text", 2, 2, {}),
                ("bamba", 2, 1, {}),
                ("bamba", 2, 1, _ONE_GROUP),
                ("bamba", 4, 1, {"num_key_value_heads": 2}),
                ("granitemoehybrid", 2, 1, _ONE_GROUP),
                ("granitemoehybrid", 2, 2, {}),
                ("granitemoehybrid", 2, 1, {"num_local_experts": 0}),
                ("mamba2", 2, 1, {}),
                ("mamba2", 4, 1, {}),
                ("falcon_h1", 2, 1, {}),
                ("falcon_h1", 2, 1, {"mamba_rms_norm": True}),
                ("falcon_h1", 2, 1, _ONE_GROUP | {"mamba_rms_norm": True}),
                ("nemotron_h", 2, 1, {}),
                ("nemotron_h", 2, 1, {"moe_latent_size": 32}),
                ("nemotron_h", 2, 2, {}),
                ("lfm2", 4, 2, {}),
                ("lfm2_moe", 2, 1, {}),
                ("lfm3", 2, 1, {}),
                ("olmo_hybrid", 2, 1, {}),
                ("kimi_linear", 4, 1, {}),
                ("bailing_hybrid", 2, 1, {}),
                ("mamba", 2, 1, {}),
                ("mamba", 4, 1, {}),
                ("mamba", 2, 2, {}),
                ("falcon_mamba", 2, 1, {}),
                ("jamba", 2, 1, {}),
                ("minimax", 2, 1, {}),
                ("minimax", 4, 1, {}),
                ("minimax", 2, 2, {}),
                ("recurrent_gemma", 2, 1, {}),
                ("recurrent_gemma", 4, 1, {}),
                ("recurrent_gemma", 2, 2, {}),
                ("rwkv", 2, 1, {}),
                ("rwkv", 4, 1, {}),
                ("rwkv", 2, 2, {}),
                ("zamba", 2, 1, {}),
                ("zamba", 4, 1, {"n_mamba_heads": 4}),
                ("zamba2", 2, 1, {}),
                ("zamba2", 4, 1, {}),
                ("zamba", 2, 2, {}),
                ("zamba2", 2, 2, {}),
            )
        ),
    ],
)
def test_ranks_divide_layers_with_a_state(
    name: str, num_ranks: int, num_stages: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Tokens are those of transformers; each rank holds the states of its own heads."""
    config: Any = deep(name, **changes)()
    model = build_checkpoint(tmp_path / "model", config)
    prompts = few_prompts()
    expected = generate_all(model, prompts, MAX_TOKENS)
    one = Stages(tmp_path / "model", 1).runners[0]
    ranks = Stages(tmp_path / "model", num_stages, num_ranks)
    for cut in ({}, {"max_num_batched_tokens": 16}, {"max_num_seqs": 1}):
        assert ranks.drive(prompts, **cut).output_token_ids == expected
    assert ranks.facts.exact_resume, ranks.facts.exact_resume_reason
    assert count_values(ranks.runners) == count_values([one])
    all_windows = count_values(ranks.runners, windows=True)
    counts = ("mamba_ngroups", "mamba_n_groups", "n_groups")
    groups = [getattr(config, key) for key in counts if hasattr(config, key)]
    # Ranks have the keys of one group, or all channels of the row before.
    if min(groups[:1], default=num_ranks) < num_ranks or name == "rwkv":
        assert all_windows > count_values([one], windows=True)
    else:
        assert all_windows == count_values([one], windows=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("lfm2", {}),
        ("qwen3_5_text", {}),
        ("bamba", {}),
        ("granitemoehybrid", _ONE_GROUP),
        ("falcon_h1", {}),
        ("nemotron_h", {}),
        ("olmo_hybrid", {}),
        ("kimi_linear", {}),
        ("jamba", {}),
        ("minimax", {}),
        ("zamba", {}),
        ("zamba2", {}),
    ],
)
def test_states_of_ranks_are_kept_copied_and_computed_again(
    name: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are snapshots, copies, and states before drafts, of which one rank has few."""
    build_checkpoint(tmp_path / "model", deep(name, **changes)())
    options = {"dtype": "bfloat16", "swap_space_bytes": 8 << 20}
    plain = Stages(tmp_path / "model", 1, 2, **options)
    expected = plain.drive(PROMPTS, PARAMS)
    check_preempted(plain, expected)
    for cut in ({"max_num_batched_tokens": 7}, {"max_num_seqs": 1}):
        assert plain.drive(PROMPTS, PARAMS, **cut).logprobs == expected.logprobs
    began = [tokens[:5] for tokens in expected.output_token_ids]
    resumed = plain.drive(PROMPTS, PARAMS, outputs=began)
    assert resumed.output_token_ids == expected.output_token_ids
    texts = [a + b for a, b in zip(PROMPTS, expected.output_token_ids, strict=True)]
    monkeypatch.setattr(Oracle, "texts", texts)
    monkeypatch.setattr(repetitions, "NgramIndex", Oracle)
    ranks = Stages(tmp_path / "model", 1, 2, num_speculative_tokens=NUM_DRAFTS, **options)
    few, second = 9, ranks.runners[1]
    states = second._mirror._draft_states  # type: ignore[attr-defined]
    states._ids = states._ids[:few]
    states.max_used = few
    second._drafter._min_states = partial(second._exchange.minimum, few)  # type: ignore[attr-defined]
    for run in check_preempted(ranks, expected, **DRAFTING):
        assert 0 < run.num_accepted_drafts < run.num_drafts
    first = ranks.runners[0]._mirror._draft_states  # type: ignore[attr-defined]
    assert first.max_used == few


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_stages", "num_ranks"),
    [("recurrent_gemma", 1, 2), ("rwkv", 1, 2), ("rwkv", 1, 4), ("rwkv", 2, 2)],
)
def test_ranks_that_preempt_nothing_have_the_same_bits_in_every_batch(
    name: str, num_stages: int, num_ranks: int, tmp_path: Path
) -> None:
    """The first one's windows free blocks, and the other one has no attention."""
    build_checkpoint(tmp_path / "model", deep(name)())
    ranks = Stages(tmp_path / "model", num_stages, num_ranks, dtype="bfloat16")
    expected = ranks.drive(PROMPTS, PARAMS)
    for cut in ({"max_num_batched_tokens": 7}, {"max_num_seqs": 1}, FEW_STATES):
        run = ranks.drive(PROMPTS, PARAMS, **cut)
        assert run.output_token_ids == expected.output_token_ids
        assert run.logprobs == expected.logprobs
    began = [tokens[:5] for tokens in expected.output_token_ids]
    resumed = ranks.drive(PROMPTS, PARAMS, outputs=began)
    assert resumed.output_token_ids == expected.output_token_ids


@pytest.mark.parametrize(
    ("name", "num_ranks", "changes", "reason"),
    [
        ("qwen3_5_text", 4, {}, "has 2 heads of keys and 4 of values"),
        pytest.param("mamba2", 3, {}, "has 8 heads", marks=SLOW),
        (
            "mamba2",
            2,
            {"hidden_size": 96, "num_heads": 12, "n_groups": 3},
            "has 3 groups of heads",
        ),
        ("mamba", 3, {}, "has 128 channels, divided 16 at a time"),
        ("minimax", 3, {}, "has 4 heads"),
        pytest.param("recurrent_gemma", 3, {}, "has 4 heads", marks=SLOW),
        pytest.param("rwkv", 3, {}, "has 64 channels, divided 16 at a time", marks=SLOW),
        ("rwkv", 2, {"intermediate_size": 97}, "feed_forward has 97 inner columns"),
        ("zamba", 4, {}, "has 2 heads of Mamba"),
        (
            "nemotron_h",
            2,
            {"moe_latent_size": 32, "mlp_bias": True},
            "fc2_latent_proj.bias is not known to be divided",
        ),
    ],
)
def test_other_layers_with_a_state_are_not_divided_among_ranks(
    name: str, num_ranks: int, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    build_checkpoint(tmp_path / "model", deep(name, **changes)())
    with pytest.raises(UnsupportedModel, match=f"tensor_parallel_size {num_ranks} .*: .*{reason}"):
        Ranks(tmp_path / "model", num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zamba", "zamba2"])
def test_stages_read_the_weights_that_their_layers_share(name: str, tmp_path: Path) -> None:
    """They read them once, even if the first layer that shares them is of another stage."""
    config: Any = BY_NAME[name].config()
    build_checkpoint(tmp_path / "model", config)
    shared = "shared_transf" if name == "zamba" else "shared_transformer"
    for runner in Stages(tmp_path / "model", 2 if name == "zamba" else 3).runners:
        model = runner._model  # type: ignore[attr-defined]
        own = [index for index, one in enumerate(model.model.layers) if type(one) is not Passage]
        hybrid = [index for index in own if config.layers_block_type[index] == "hybrid"]
        paths = [f"model.layers.{index}.{shared}.self_attn.o_proj" for index in hybrid]
        num_blocks = min(len(hybrid), getattr(config, "num_mem_blocks", 1))
        assert len({model.get_submodule(path) for path in paths}) == num_blocks > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zamba", "zamba2"])
def test_ranks_keep_one_part_of_weights_that_layers_share(name: str, tmp_path: Path) -> None:
    config: Any = BY_NAME[name].config()
    build_checkpoint(tmp_path / "model", config)
    shared = "shared_transf" if name == "zamba" else "shared_transformer"
    hybrid = [index for index, kind in enumerate(config.layers_block_type) if kind == "hybrid"]
    first, last = hybrid[0], hybrid[config.num_mem_blocks if name == "zamba2" else 1]
    for runner in Ranks(tmp_path / "model", 2).runners:
        for path in ("self_attn.o_proj", "feed_forward.down_proj"):
            one, other = (
                runner._model.get_submodule(f"model.layers.{layer}.{shared}.{path}")
                for layer in (first, last)
            )
            assert one is other


@pytest.mark.slow
def test_a_bias_that_every_rank_adds_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that differ little from the whole are refused, too."""
    config = deep("nemotron_h", moe_latent_size=32, mlp_bias=True)()
    build_checkpoint(tmp_path / "model", config)
    monkeypatch.setattr(mlp, "_AROUND_EXPERTS", ("fc1_latent_proj.", "fc2_latent_proj."))
    with pytest.raises(UnsupportedModel, match=r"the parts of .*mixer do not add up to it"):
        Ranks(tmp_path / "model", 2)
