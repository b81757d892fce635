"""Adapters on a model in ranks or in stages give the tokens that they give on a whole one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, MixtralConfig, Phi3Config, PretrainedConfig, Qwen3Config

from protocol.adapters import WEIGHTS_FILE, AdapterError, read_adapter
from protocol.config import LoraConfig, NativeDecoder
from protocol.sampling import SamplingParams
from tests.worker.adapters.peft_adapters import write_adapter
from tests.worker.checkpoints import ARCHITECTURES, build_checkpoint
from tests.worker.driving import Run
from tests.worker.parallel.ranks import Ranks
from tests.worker.parallel.stages import DEEP, Stages
from tests.worker.parity import few_prompts
from tests.worker.recurrent_models import RECURRENT

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
CONFIGS = {one.name: one.config() for one in ARCHITECTURES if one.name in ("gpt2", "deepseek_v3")}
CONV = ("c_attn", "c_proj", "c_fc")
LATENT = ("q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
STATES = {one.name: one.config() for one in RECURRENT}
DELTA_TARGETS = (*ALL, "in_proj_qkv", "in_proj_z", "out_proj")
MAMBA2_TARGETS = (*ALL, "in_proj", "out_proj")
MAMBA_TARGETS = ("in_proj", "x_proj", "out_proj")
SHORT_TARGETS = ("q_proj", "k_proj", "v_proj", "in_proj", "out_proj", "w1", "w2", "w3")
LORA = LoraConfig(enable_lora=True, max_loras=4, max_lora_rank=16)
PARAMS = SamplingParams(max_tokens=10, temperature=0.8, seed=3, logprobs=2, ignore_eos=True)
MAX_DIFFERENCE = 2e-4
"""The greatest error of log-probabilities in float32, whose sums have another order in ranks."""
SLOW = pytest.mark.slow


def write_adapters(directory: Path, model: Any, targets: Sequence[str]) -> list[Path]:
    return [
        write_adapter(directory / f"a{n}", model, some, rank=(3, 16)[n], seed=n)
        for n, some in enumerate((targets[:1], targets))
    ]


def keep(runners: Sequence[Any], adapters: Sequence[Path]) -> list[int]:
    """Load the adapters at every rank; returns the ids of all, and 0 for none."""
    ids = [0]
    for path in adapters:
        adapter, _ = read_adapter(path.name, str(path))
        ids.append(adapter.adapter_id)
        for runner in runners:
            runner.adapters.put(adapter, runner.adapters.read(adapter))
    return ids


def drive(group: Ranks | Stages, adapters: Sequence[Path], **options: Any) -> Run:
    """Let requests have each of the adapters in turn, and none."""
    ids = keep(group.runners, adapters)
    prompts = few_prompts()
    of_prompts = [ids[number % len(ids)] for number in range(len(prompts))]
    return group.drive(prompts, PARAMS, adapter_ids=of_prompts, **options)


def assert_close(run: Run, expected: Run) -> None:
    assert run.output_token_ids == expected.output_token_ids
    for req_id, entries in expected.logprobs.items():
        found = [entry.logprob for entry in run.logprobs[req_id]]
        assert found == pytest.approx([entry.logprob for entry in entries], abs=MAX_DIFFERENCE)


def assert_effect(run: Run, group: Ranks | Stages) -> None:
    """The adapters change the requests that have one, and no others."""
    plain = group.drive(few_prompts(), PARAMS)
    for number, entries in plain.logprobs.items():
        assert (run.logprobs[number] == entries) == (number % 3 == 0)


@pytest.mark.parametrize(
    ("config", "targets", "num_ranks", "decoder"),
    [
        (LlamaConfig(**DEEP), ALL, 4, NativeDecoder.AUTO),
        (Phi3Config(**DEEP), FUSED, 2, NativeDecoder.AUTO),
        pytest.param(LlamaConfig(**DEEP), ALL, 2, NativeDecoder.OFF, marks=SLOW),
        pytest.param(Phi3Config(**DEEP), FUSED, 4, NativeDecoder.OFF, marks=SLOW),
        pytest.param(Qwen3Config(**DEEP), ALL, 2, NativeDecoder.AUTO, marks=SLOW),
        pytest.param(CONFIGS["gpt2"], CONV, 2, NativeDecoder.AUTO, marks=SLOW),
        pytest.param(STATES["qwen3_5_text"], DELTA_TARGETS, 2, NativeDecoder.AUTO, marks=SLOW),
        pytest.param(STATES["bamba"], MAMBA2_TARGETS, 2, NativeDecoder.AUTO, marks=SLOW),
        pytest.param(STATES["mamba"], MAMBA_TARGETS, 2, NativeDecoder.AUTO, marks=SLOW),
        pytest.param(STATES["lfm2"], SHORT_TARGETS, 2, NativeDecoder.AUTO, marks=SLOW),
        pytest.param(CONFIGS["deepseek_v3"], LATENT, 2, NativeDecoder.AUTO, marks=SLOW),
        pytest.param(
            MixtralConfig(**DEEP | {"num_local_experts": 4}),
            ATTENTION,
            2,
            NativeDecoder.AUTO,
            marks=SLOW,
        ),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_ranks_use_their_parts_of_adapters(
    config: PretrainedConfig,
    targets: Sequence[str],
    num_ranks: int,
    decoder: NativeDecoder,
    tmp_path: Path,
) -> None:
    """Several ranks may hold one KV head. Bits do not depend on what is computed beside."""
    model = build_checkpoint(tmp_path / "model", config)
    adapters = write_adapters(tmp_path, model, targets)
    expected = drive(Stages(tmp_path / "model", 1, lora=LORA), adapters)
    ranks = Ranks(tmp_path / "model", num_ranks, lora=LORA, native_decoder=decoder)
    facts = ranks.runners[0].facts
    assert facts.exact_resume, facts.exact_resume_reason
    run = drive(ranks, adapters)
    assert_close(run, expected)
    assert_effect(run, ranks)
    for settings in ({"max_num_seqs": 1}, {"max_num_batched_tokens": 7}):
        other = drive(ranks, adapters, **settings)
        assert other.output_token_ids == run.output_token_ids
        assert other.logprobs == run.logprobs


@pytest.mark.parametrize(
    ("config", "targets", "num_stages", "num_shares"),
    [
        (LlamaConfig(**DEEP), ALL, 2, 1),
        (CONFIGS["gpt2"], CONV, 2, 1),
        *(pytest.param(LlamaConfig(**DEEP), ALL, *one, marks=SLOW) for one in ((3, 1), (2, 2))),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_stages_use_the_matrices_of_their_layers(
    config: PretrainedConfig,
    targets: Sequence[str],
    num_stages: int,
    num_shares: int,
    tmp_path: Path,
) -> None:
    """An adapter may change layers of one stage only."""
    model = build_checkpoint(tmp_path / "model", config)
    adapters = write_adapters(tmp_path, model, targets)
    tensors = load_file(adapters[0] / WEIGHTS_FILE)
    first = {n: tensor for n, tensor in tensors.items() if ".layers.0." in n or ".h.0." in n}
    assert first
    save_file(first, adapters[0] / WEIGHTS_FILE)
    expected = drive(Stages(tmp_path / "model", 1, lora=LORA), adapters)
    stages = Stages(tmp_path / "model", num_stages, num_shares, lora=LORA)
    assert stages.facts.exact_resume, stages.facts.exact_resume_reason
    run = drive(stages, adapters)
    assert_close(run, expected)
    if num_shares == 1:
        assert run.logprobs == expected.logprobs
    assert_effect(run, stages)
    other = drive(stages, adapters, max_num_batched_tokens=7)
    assert (other.output_token_ids, other.logprobs) == (run.output_token_ids, run.logprobs)


def test_some_rank_refuses_what_cannot_be_used(tmp_path: Path) -> None:
    """The one that has the layer, or the values; a layer that no stage has is refused by all."""
    model = build_checkpoint(tmp_path / "model", LlamaConfig(**DEEP))
    stages = Stages(tmp_path / "model", 2, 2, lora=LORA)
    layer = "base_model.model.model.layers.{}.self_attn.q_proj"

    def errors(layer_number: int, change: Any) -> list[str]:
        path = write_adapter(tmp_path / "bad", model, ALL)
        tensors = load_file(path / WEIGHTS_FILE)
        change(tensors, layer.format(layer_number))
        save_file(tensors, path / WEIGHTS_FILE)
        adapter, _ = read_adapter("bad", str(path))
        found = []
        for runner in stages.runners:
            assert runner.adapters is not None
            try:
                runner.adapters.read(adapter)
                found.append("")
            except AdapterError as error:
                found.append(str(error))
        return found

    def last_row_is_infinite(tensors: dict[str, torch.Tensor], name: str) -> None:
        tensors[f"{name}.lora_B.weight"][-1, 0] = torch.inf

    def is_wide(tensors: dict[str, torch.Tensor], name: str) -> None:
        tensors[f"{name}.lora_A.weight"] = torch.ones(4, 9)

    def is_added(tensors: dict[str, torch.Tensor], name: str) -> None:
        for kind in "AB":
            tensors[f"{name}.lora_{kind}.weight"] = torch.ones(4, 4)

    found = errors(3, last_row_is_infinite)
    assert [bool(text) for text in found] == [False, False, False, True]
    assert "not finite" in found[3]
    found = errors(0, is_wide)
    assert [bool(text) for text in found] == [True, True, False, False]
    assert "has shape [4, 9]" in found[0]
    assert all("has matrices for model.layers.9.self" in text for text in errors(9, is_added))
