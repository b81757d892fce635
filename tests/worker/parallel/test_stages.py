"""Stages that hold some of a model's layers compute its tokens; here they are threads."""

from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from gguf import GGMLQuantizationType
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    Glm4MoeConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from core_proc.links.workers import WorkerGroup
from protocol.config import (
    KVCacheDtype,
    NativeDecoder,
    Quantization,
    RecoveryConfig,
)
from protocol.core_worker import WorkerHello
from protocol.sampling import SamplingParams
from scripts.gguf.directory import make_directory
from tests.worker.checkpoints import (
    ARCHITECTURES,
    SHAPE,
    VOCAB_SIZE,
    Architecture,
    build_checkpoint,
)
from tests.worker.driving import check_schedules, sampled_with_penalty
from tests.worker.families import FAMILIES
from tests.worker.gguf import gguf_files
from tests.worker.parallel.stages import DEEP, NUM_LAYERS, SAMPLED, Stages
from tests.worker.parity import BLOCK_SIZE, MAX_TOKENS, few_prompts, generate_all
from tests.worker.quantization.float_layouts import fp8_blocks
from tests.worker.quantization.integer_layouts import int_quantized, pack_quantized
from tests.worker.quantization.layouts import WIDE, Layout
from tests.worker.quantization.quantized_checkpoints import write_quantized
from worker_proc.errors import UnsupportedModel
from worker_proc.loading.passages import Passage
from worker_proc.modules.packed_linear import PackedLinear
from worker_proc.parallel.adoption import Adoption
from worker_proc.parallel.stage import Stage


@pytest.mark.parametrize(
    ("config", "num_stages"),
    [
        (LlamaConfig(**DEEP), 2),
        pytest.param(Qwen3Config(**DEEP), 3, marks=pytest.mark.slow),
        (Qwen3Config(**DEEP | {"tie_word_embeddings": True}), 2),
        (Gemma2Config(**DEEP | {"sliding_window": 8, "query_pre_attn_scalar": 16}), 2),
        (MixtralConfig(**DEEP | {"num_local_experts": 4}), 2),
    ],
    ids=["llama", "three stages", "tied", "scaled embedding and windows", "experts"],
)
def test_stages_compute_the_tokens_of_the_whole_model(
    config: PretrainedConfig, num_stages: int, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    model = build_checkpoint(directory, config)
    model.set_attn_implementation("eager")
    prompts = few_prompts()
    expected = generate_all(model, prompts, MAX_TOKENS)
    stages = Stages(directory, num_stages)
    assert stages.drive(prompts).output_token_ids == expected
    assert stages.drive(prompts, max_num_batched_tokens=16).output_token_ids == expected
    one_by_one = stages.drive(prompts, max_num_seqs=1)
    assert one_by_one.output_token_ids == expected
    assert one_by_one.num_cached_tokens % BLOCK_SIZE == BLOCK_SIZE - 1, "all but a prompt's last"
    assert all(runner.facts == stages.facts for runner in stages.runners)
    assert stages.facts.exact_resume, stages.facts.exact_resume_reason
    assert stages.facts.decoder == "native"


def test_a_stage_whose_layers_the_native_decoder_does_not_compute_has_its_own_decoder(
    tmp_path: Path,
) -> None:
    """The core takes both for one group, and tokens depend on neither batch nor cut."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    config = Glm4MoeConfig(**DEEP | experts | {"first_k_dense_replace": 2})
    build_checkpoint(tmp_path / "model", config)
    stages = Stages(tmp_path / "model", 2)
    group = WorkerGroup(2, core_epoch=1, answering_rank=1)
    for rank, runner in enumerate(stages.runners):
        assert group.enter(b"%d" % rank, 2 + rank, WorkerHello(rank, 1, runner.facts))
    assert group.find_disagreement() is None
    assert group.facts.decoder == "native, modules"
    assert group.facts.exact_resume, group.facts.exact_resume_reason
    prompts = few_prompts()
    expected = stages.drive(prompts, SAMPLED)
    for settings in ({"max_num_batched_tokens": 7}, {"max_num_seqs": 1}):
        run = stages.drive(prompts, SAMPLED, **settings)
        assert run.output_token_ids == expected.output_token_ids
        assert run.logprobs == expected.logprobs


def test_ranks_divide_the_layers_of_stages(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    model = build_checkpoint(directory, LlamaConfig(**DEEP))
    model.set_attn_implementation("eager")
    prompts = few_prompts()
    expected = generate_all(model, prompts, MAX_TOKENS)
    stages = Stages(directory, 2, num_shares=2)
    assert stages.drive(prompts).output_token_ids == expected
    assert stages.drive(prompts, max_num_batched_tokens=16).output_token_ids == expected
    assert stages.facts.exact_resume, stages.facts.exact_resume_reason
    assert stages.facts.decoder == "native"


def test_a_stage_has_its_own_layers_only(tmp_path: Path) -> None:
    """No weight of another layer is read, and the KV cache has the stage's layers."""
    directory = tmp_path / "model"
    build_checkpoint(directory, LlamaConfig(**DEEP))
    for rank, runner in enumerate(Stages(directory, 2).runners):
        model, pool = runner._model, runner._pool  # type: ignore[attr-defined]
        own = Stage(rank, 2).layers(NUM_LAYERS)
        assert len(pool.tensors) == len(own) == 2
        for index, layer in enumerate(model.model.layers):
            assert isinstance(layer, Passage) == (index not in own)
        others = {type(module) for module in (model.model.embed_tokens, model.lm_head)}
        assert (nn.Embedding in others) == (rank == 0)
        assert any(issubclass(one, PackedLinear) for one in others) == (rank == 1)


def test_a_wait_is_as_long_as_the_first_steps_of_all_stages(tmp_path: Path) -> None:
    build_checkpoint(tmp_path / "model", LlamaConfig(**DEEP))
    for first_step_timeout_s, expected in ((5.0, 120.0), (300.0, 600.0)):
        recovery = RecoveryConfig(first_step_timeout_s=first_step_timeout_s)
        with patch("worker_proc.startup.load_runner.Adoption", wraps=Adoption) as made:
            Stages(tmp_path / "model", 2, recovery=recovery)
        assert [call.kwargs["timeout_s"] for call in made.call_args_list] == [expected] * 2


def test_layers_are_divided_evenly() -> None:
    """The output layer counts as some layers of the last stage, and each stage has a layer."""
    for num_layers, head_layers in product(range(1, 30), (0, 1, 5, 40)):
        for num_stages in range(1, num_layers + 1):
            stages = [Stage(place, num_stages) for place in range(num_stages)]
            parts = [stage.layers(num_layers, head_layers) for stage in stages]
            assert [layer for part in parts for layer in part] == list(range(num_layers))
            sizes = list(map(len, parts))
            assert min(sizes) >= 1
            assert sizes[-1] == min(sizes)
            if head_layers == 0:
                assert max(sizes) - min(sizes) <= 1
            elif sizes[-1] > 1:
                assert max(sizes) - (sizes[-1] + head_layers) <= 1
    assert [len(Stage(place, 2).layers(30, 4)) for place in range(2)] == [17, 13]


def test_tokens_do_not_depend_on_the_batch_the_cut_a_restart_or_the_stages(
    tmp_path: Path,
) -> None:
    """Modules or the native decoder sample in bfloat16, with a penalty and logprobs."""
    build_checkpoint(tmp_path / "model", LlamaConfig(**DEEP))
    prompts = few_prompts()
    params = sampled_with_penalty(len(prompts))
    for decoder in NativeDecoder:
        options: dict[str, Any] = {"dtype": "bfloat16", "native_decoder": decoder}
        alone = Stages(tmp_path / "model", 1, **options).drive(prompts, params).output_token_ids
        stages = Stages(tmp_path / "model", 2, **options)
        assert stages.drive(prompts, params).output_token_ids == alone
        check_schedules(stages.drive, prompts, params, alone)


def compare_with_one(directory: Path, **options: Any) -> Stages:
    """Check that two stages compute the tokens of one; returns the two."""
    prompts = few_prompts()
    one = Stages(directory, 1, **options)
    alone = one.drive(prompts, SAMPLED)
    stages = Stages(directory, 2, **options)
    for settings in ({}, {"max_num_batched_tokens": 7}):
        run = stages.drive(prompts, SAMPLED, **settings)
        assert run.output_token_ids == alone.output_token_ids
        assert run.logprobs == alone.logprobs  # tokens alone may hide that hidden states differ
    assert all(runner.facts == stages.facts for runner in stages.runners)
    assert stages.facts.quantization == one.facts.quantization
    assert stages.facts.exact_resume, stages.facts.exact_resume_reason
    assert stages.facts.decoder == one.facts.decoder
    return stages


_PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE}
_REFUSED = {
    **dict.fromkeys(["gemma3n_shared", "gemma4_shared", "gemma4"], "keys of another layer"),
    "mllama": "text does not pass through",
    "glm5_next": "its layers pass on more than a row for each token",
}
"""Architectures that cannot be divided, and why."""
_BY_DEFAULT = ("llama", "gemma3", "gpt_oss", "deepseek_v3", "mixtral", "gpt2", "gemma3n_shared")
"""One of each kind."""


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(one, marks=[] if one.name in _BY_DEFAULT else pytest.mark.slow)
        for one in (*ARCHITECTURES, *FAMILIES)
    ],
    ids=lambda one: one.name,
)
def test_every_architecture_has_its_logprobs_or_is_refused(
    architecture: Architecture, tmp_path: Path
) -> None:
    build_checkpoint(tmp_path / "model", architecture.config())
    reason = _REFUSED.get(architecture.name)
    if reason is None:
        compare_with_one(tmp_path / "model")
        return
    with pytest.raises(UnsupportedModel, match=f"pipeline_parallel_size 2: .*{reason}"):
        Stages(tmp_path / "model", 2)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            Gemma4TextConfig(**SHAPE | _PER_LAYER | {"num_kv_shared_layers": 0}),
            "its layers take more than the rows of the layer before",
        ),
        (
            Gemma3nTextConfig(
                **SHAPE | _PER_LAYER | {"num_kv_shared_layers": 0, "laurel_rank": 8},
                altup_num_inputs=2,
                activation_sparsity_pattern=None,
            ),
            "its layers pass on more than a row for each token",
        ),
    ],
    ids=["inputs for each layer", "several rows"],
)
def test_a_model_whose_layers_take_more_than_the_rows_is_refused(
    config: PretrainedConfig, reason: str, tmp_path: Path
) -> None:
    build_checkpoint(tmp_path / "model", config)
    with pytest.raises(UnsupportedModel, match=f"pipeline_parallel_size 2: {reason}"):
        Stages(tmp_path / "model", 2)


@pytest.mark.parametrize(
    ("config", "quantization"),
    [
        (LlamaConfig(**DEEP), Quantization.W8A16),
        (Qwen3Config(**DEEP | {"tie_word_embeddings": True}), Quantization.W8A8),
        (MixtralConfig(**DEEP | {"num_local_experts": 4}), Quantization.W4A16),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_stages_round_their_weights_as_one_worker_does(
    config: PretrainedConfig, quantization: Quantization, tmp_path: Path
) -> None:
    build_checkpoint(tmp_path / "model", config)
    compare_with_one(tmp_path / "model", dtype="bfloat16", quantization=quantization)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "layout",
    [pack_quantized(4, 32, is_symmetric=False), fp8_blocks(), int_quantized(codes_rows=True)],
    ids=lambda layout: layout.name,
)
def test_stages_read_the_codes_of_a_checkpoint(layout: Layout, dtype: str, tmp_path: Path) -> None:
    write_quantized(tmp_path / "model", layout, LlamaConfig(**WIDE | {"num_hidden_layers": 4}))
    compare_with_one(tmp_path / "model", dtype=dtype)


def test_stages_read_the_blocks_of_a_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedding and the output layer are in codes, too."""
    monkeypatch.setattr("scripts.gguf.cache.cache_directory", lambda: tmp_path / "cache")
    config = LlamaConfig(**gguf_files.WIDE | {"num_hidden_layers": 4})
    gguf_files.write_random_gguf(tmp_path / "model.gguf", config, GGMLQuantizationType.Q4_K)
    (tmp_path / "model").symlink_to(make_directory(tmp_path / "model.gguf"))
    compare_with_one(tmp_path / "model", dtype="bfloat16")


@pytest.mark.parametrize("kv_cache_dtype", [KVCacheDtype.INT8, KVCacheDtype.FP8])
def test_stages_have_keys_and_values_in_codes(kv_cache_dtype: KVCacheDtype, tmp_path: Path) -> None:
    build_checkpoint(tmp_path / "model", LlamaConfig(**DEEP))
    compare_with_one(tmp_path / "model", dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)


def test_the_blocks_of_stages_have_one_layout_which_names_the_division(tmp_path: Path) -> None:
    """Three layers are not divided into equal stages, and others than four into two."""
    layouts = set()
    for num_layers, num_stages in ((3, 1), (3, 2), (4, 2), (3, 3)):
        directory = tmp_path / f"{num_layers}-{num_stages}"
        build_checkpoint(directory, LlamaConfig(**SHAPE | {"num_hidden_layers": num_layers}))
        stages = Stages(directory, num_stages, kv_offload_bytes=2**20)
        assert all(runner.facts == stages.facts for runner in stages.runners)
        assert all(runner.block_memory is not None for runner in stages.runners)
        layouts.add(stages.facts.kv_layout)
    assert len(layouts) == 4


@pytest.mark.parametrize("swap_space_bytes", [0, 2**20])
def test_preempted_requests_continue(swap_space_bytes: int, tmp_path: Path) -> None:
    build_checkpoint(tmp_path / "model", LlamaConfig(**DEEP))
    prompts = few_prompts()
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    stages = Stages(tmp_path / "model", 2, swap_space_bytes=swap_space_bytes)
    expected = stages.drive(prompts, params).output_token_ids
    least = max(map(len, prompts)) + params.max_tokens
    num_blocks = 2 + 2 * -(-least // BLOCK_SIZE)
    run = stages.drive(prompts, params, num_blocks=num_blocks)
    assert run.num_preemptions > 0
    assert bool(run.num_swaps) == bool(swap_space_bytes)
    assert run.output_token_ids == expected


@pytest.mark.parametrize(
    ("config", "num_stages", "dtype", "reason"),
    [
        (LlamaConfig(**SHAPE), 3, "float32", "pipeline_parallel_size 3: the model has 2 layers"),
        (LlamaConfig(**SHAPE), 2, "float16", "float32 and bfloat16, and not in float16"),
    ],
    ids=["layers", "float16"],
)
def test_what_cannot_be_divided_is_refused_before_weights_are_read(
    config: PretrainedConfig,
    num_stages: int,
    dtype: str,
    reason: str,
    tmp_path: Path,
) -> None:
    build_checkpoint(tmp_path / "model", config)
    reads = patch("worker_proc.startup.prepare.load_checked", side_effect=OSError)
    with reads, pytest.raises(UnsupportedModel, match=reason):
        Stages(tmp_path / "model", num_stages, dtype=dtype)
