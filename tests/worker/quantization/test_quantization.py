"""Rounded weights: their grid, the kernels that read their codes, and models that are made of them.

Rows are multiplied by codes, and sums by scales: sums are those of the weights that codes stand
for, rounded in another order. What codes of 8 bits stand for is not rounded to bfloat16.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    LlamaConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from protocol.config import NativeDecoder, Quantization
from protocol.sampling import SamplingParams
from tests.combinations import in_turn
from tests.worker.bitwise import NUM_THREADS, compare, engine_config, exact
from tests.worker.checkpoints import SHAPE, build_checkpoint
from tests.worker.driving import Run, drive
from tests.worker.parity import make_prompts
from tests.worker.quantization.loads import MIXTURES, MODELS, load, quantized
from tests.worker.recurrent_models import KINDS
from tests.worker.runners import make_runners
from worker_proc.errors import UnsupportedModel
from worker_proc.model_runner import ModelRunner
from worker_proc.modules.coded_linear import computing_codes
from worker_proc.modules.experts.coded import computing_expert_codes, round_experts
from worker_proc.modules.experts.grouped import read_experts
from worker_proc.modules.rounding_refusals import check_rounding
from worker_proc.modules.weight_formats import WEIGHT_FORMATS
from worker_proc.native.build import compiler
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.packed_weights import Format, PackedWeight
from worker_proc.recurrent.state_spec import RecurrentSpec
from worker_proc.startup.load_runner import load_model_runner
from worker_proc.startup.prepare import prepare_model

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

QUANTIZATIONS = tuple(Quantization)


RECURRENT_NAMES = [one.name for one in KINDS]


def _each_once(
    names: Iterable[str], quantizations: Sequence[Quantization] = QUANTIZATIONS
) -> list[Any]:
    """Return every model with every code; by default each model has one code, in turn."""
    cases = []
    for place, name in enumerate(names):
        for number, quantization in enumerate(quantizations):
            is_slow = name == "mixtral" or number != place % len(quantizations)
            marks = pytest.mark.slow if is_slow else ()
            cases.append(pytest.param(name, quantization, marks=marks, id=f"{name}-{quantization}"))
    return cases


@pytest.mark.parametrize(("name", "quantization"), _each_once(MODELS))
def test_logits_are_the_same_bits_in_every_schedule(
    name: str, quantization: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_checkpoint(tmp_path, MODELS[name])

    def checked(runner: ModelRunner) -> ModelRunner:
        assert runner.facts.quantization == quantization
        assert runner._model.get_output_embeddings().packed.format is Format.INT8
        assert runner.facts.decoder == ("modules" if name == "gpt2" else "native")
        return exact(runner)

    plain = [engine_config(tmp_path, "bfloat16", threads) for threads in NUM_THREADS]
    configs = [quantized(config, quantization) for config in plain]
    compare(map(checked, make_runners(configs)), monkeypatch)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("qwen3", Quantization.W8A16),
        ("qwen3_moe", Quantization.W4A16),
        ("qwen3_moe", Quantization.W8A8),
        pytest.param("qwen3", Quantization.W4A16, marks=pytest.mark.slow),
        pytest.param("qwen3", Quantization.W8A8, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", Quantization.W8A16, marks=pytest.mark.slow),
    ],
)
def test_modules_take_the_place_of_the_native_decoder(
    name: str, quantization: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `--native-decoder off` codes are computed by the modules, in every schedule alike."""
    build_checkpoint(tmp_path, MODELS[name])
    config = quantized(engine_config(tmp_path, "bfloat16", 2), quantization)
    worker = msgspec.structs.replace(config.worker, native_decoder=NativeDecoder.OFF)
    config = msgspec.structs.replace(config, worker=worker)
    runner = load_model_runner(config, lambda *_: None)
    assert (runner.facts.decoder, runner.facts.exact_resume) == ("modules", True)
    compare([runner] * len(NUM_THREADS), monkeypatch)


UNROUNDED = (".dt_proj", ".router")
"""Name endings of linear layers that keep their weights."""


def rounded_model(
    directory: Path, quantization: Quantization, library: NativeLibrary
) -> PreTrainedModel:
    """Return transformers' model of a checkpoint with the weights that codes stand for.

    Those of linear layers and experts are rounded; the embedding and routers are not, nor what
    Mamba-1 multiplies by itself.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    formats = WEIGHT_FORMATS[quantization]
    for name, module in model.named_modules():
        is_layer = isinstance(module, nn.Linear) and not name.endswith(UNROUNDED)
        if is_layer and module.weight.numel():
            format = formats.head if module is model.lm_head else formats.layers
            library.packer.round(module.weight.detach(), format)
        if read_experts(module) is not None:
            round_experts(module, library, formats.layers)
    return model


@pytest.mark.parametrize(
    ("name", "quantization"),
    _each_once(["qwen3_moe", "dots1", *RECURRENT_NAMES, "mixtral"], [Quantization.W4A16]),
)
def test_tokens_of_mixtures_are_those_of_a_checkpoint_of_rounded_weights(
    name: str, quantization: Quantization, library: NativeLibrary, tmp_path: Path
) -> None:
    """The checkpoint of rounded weights is served without quantization.

    Codes round sums in another order: now and then a token differs, and those after it. Values
    of 8-bit codes cannot be stored in bfloat16.
    """
    for directory in (tmp_path / "plain", tmp_path / "rounded"):
        build_checkpoint(directory, MIXTURES[name], torch.bfloat16)
    rounded_model(tmp_path / "plain", quantization, library).save_pretrained(tmp_path / "rounded")
    prompts = make_prompts()
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    runners = load(tmp_path / "plain", quantization), load(tmp_path / "rounded", None)
    decoder = "native" if name in {"qwen3_moe", "mixtral"} else "modules"
    assert [runner.facts.decoder for runner in runners] == [decoder, decoder]
    found, want = (drive(runner, prompts, params, max_num_seqs=16) for runner in runners)
    plain = drive(load(tmp_path / "plain", None), prompts, params, max_num_seqs=16)

    def num_equal(run: Run) -> int:
        pairs = zip(run.output_token_ids, want.output_token_ids, strict=True)
        return sum(tokens == expected for tokens, expected in pairs)

    least = 0.7 * len(prompts)
    assert num_equal(found) >= least
    assert num_equal(plain) < least


@contextmanager
def coded_modules(modules: Sequence[nn.Module], *, of_rows: bool) -> Iterator[None]:
    """Make linear layers and experts compute with codes of weights, and `of_rows`."""
    with ExitStack() as stack:
        stack.enter_context(computing_codes(modules, of_rows=of_rows))
        for experts in (module for module in modules if read_experts(module) is not None):
            stack.enter_context(computing_expert_codes(experts, of_rows=of_rows))
        yield


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        *_each_once(["llama", "qwen3_moe", "lfm2", "dots1", "mixtral"]),
        ("llama_tied", Quantization.W8A16),
        *(
            pytest.param(name, Quantization.W8A16, marks=pytest.mark.slow)
            for name in RECURRENT_NAMES
            if name != "lfm2"
        ),
        *(
            pytest.param("dots1_routed_only", quantization, marks=pytest.mark.slow)
            for quantization in QUANTIZATIONS
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # without shared experts
def test_greedy_tokens_are_those_of_the_rounded_weights(
    name: str, quantization: Quantization, library: NativeLibrary, tmp_path: Path
) -> None:
    """transformers computes the expected tokens in float32.

    A token may differ only where transformers has two that are equally likely within rounding; or,
    rarely, where a router has two such experts.
    """
    llama = LlamaConfig(**SHAPE, tie_word_embeddings=name == "llama_tied")
    build_checkpoint(tmp_path, MIXTURES.get(name, llama), torch.bfloat16)
    model = rounded_model(tmp_path, quantization, library).float()
    formats = WEIGHT_FORMATS[quantization]
    rounds_rows = formats.layers is Format.INT8_FOR_CODES
    layers = [
        module
        for name, module in model.named_modules()
        if module is not model.lm_head
        and not name.endswith(UNROUNDED)
        and all(parameter.numel() for parameter in module.parameters(recurse=False))
    ]
    prompts = make_prompts()
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    run = drive(load(tmp_path, quantization), prompts, params, max_num_seqs=16)
    # A row that is rounded a little differently before may have other codes.
    min_equal, max_behind = (0.85, 0.2) if rounds_rows else (0.9, 0.05)
    # Rounding in bfloat16 alone puts one of about a thousand tokens a little further behind.
    min_close = 0.99 if quantization is Quantization.W8A16 else 1.0
    behind = []
    for prompt, tokens in zip(prompts, run.output_token_ids, strict=True):
        ids = torch.tensor([prompt + tokens])
        with (
            coded_modules([] if formats.layers is Format.INT4 else layers, of_rows=rounds_rows),
            coded_modules([model.lm_head], of_rows=False),
        ):
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens).unsqueeze(1))[:, 0]
        behind.append((logits.amax(1) - chosen) / logits.std(1))
    found = torch.cat(behind)
    assert len(found) == 16 * len(prompts)
    assert (found == 0).float().mean() > min_equal
    assert (found <= max_behind).float().mean() >= (0.97 if name in MIXTURES else min_close)
    assert name in MIXTURES or found.max() <= 2 * max_behind


def test_a_convolution_is_rounded_in_no_module_but_recurrent_ones() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(8, 8, 3))
    used = [name for name, _ in model.named_parameters()]
    with pytest.raises(UnsupportedModel, match=r"w8a16: 1 \(Conv1d\) has weights that are not"):
        check_rounding(model, used, Quantization.W8A16)
    check_rounding(model, used, Quantization.W8A16, [RecurrentSpec("1", 8, ())])


def test_rounding_changes_the_tokens(tmp_path: Path) -> None:
    """Without this, the comparison with transformers would prove nothing."""
    build_checkpoint(tmp_path, MODELS["llama"], torch.bfloat16)
    prompts = [[token % 500 for token in prompt] for prompt in make_prompts()]
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    outputs = {
        str(drive(load(tmp_path, quantization), prompts, params).output_token_ids)
        for quantization in (None, *QUANTIZATIONS)
    }
    assert len(outputs) == 4


SHARES = {Quantization.W8A16: 0.6, Quantization.W4A16: 0.35, Quantization.W8A8: 0.6}
"""The most memory of codes and scales, as a share of that of the weights."""


@pytest.mark.parametrize(("quantization", "is_mixture"), in_turn(SHARES, [False, True]))
def test_codes_take_the_place_of_the_weights(
    is_mixture: bool, quantization: Quantization, tmp_path: Path
) -> None:
    shape = SHAPE | {"hidden_size": 256, "intermediate_size": 512}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    config = Qwen3MoeConfig(**shape, **experts) if is_mixture else LlamaConfig(**shape)
    build_checkpoint(tmp_path, config, torch.bfloat16)

    stored = load_file(tmp_path / "model.safetensors")
    num_bytes = sum(t.nbytes for name, t in stored.items() if t.dim() > 1 and "embed" not in name)
    model = load(tmp_path, quantization)._model
    embedding = model.get_input_embeddings().weight
    assert all(p.is_meta for p in model.parameters() if p.dim() > 1 and p is not embedding)
    holders = [*model.modules(), *(vars(m).get("products") for m in model.modules())]
    packed = [
        value
        for holder in holders
        if holder is not None
        for value in vars(holder).values()
        if isinstance(value, PackedWeight)
    ]
    tensors = [t for weight in packed for t in (weight.panels, weight.scales) if t is not None]
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert 0 < sum(memory.values()) < SHARES[quantization] * num_bytes


def test_a_draft_model_is_not_rounded(tmp_path: Path) -> None:
    """It changes no token of the rounded model either."""
    build_checkpoint(tmp_path, MODELS["llama"], torch.bfloat16)
    config = quantized(engine_config(tmp_path, "bfloat16", 2), Quantization.W4A16)
    model = msgspec.structs.replace(config.model, speculative_model=str(tmp_path))
    scheduler = msgspec.structs.replace(config.scheduler, num_speculative_tokens=3)
    guessing = msgspec.structs.replace(config, model=model, scheduler=scheduler)
    prepared = prepare_model(guessing, lambda *_: None)
    assert prepared.draft is not None
    formats = [
        {
            value.format
            for module in loaded.model.modules()
            for value in vars(module).values()
            if isinstance(value, PackedWeight)
        }
        for loaded in (prepared.loaded, prepared.draft)
    ]
    assert formats[0] == {Format.INT4, Format.INT8}
    assert formats[1] <= {Format.UNITS, Format.COMPACT}
    prompts = [[token % 500 for token in prompt] for prompt in make_prompts()]
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    alone, guided = (load_model_runner(each, lambda *_: None) for each in (config, guessing))
    expected = drive(alone, prompts, params)
    found = drive(guided, prompts, params, num_speculative_tokens=3)
    assert found.output_token_ids == expected.output_token_ids
    assert 0 < found.num_accepted_drafts < found.num_drafts


def test_pages_of_the_mapped_checkpoint_are_not_written(tmp_path: Path) -> None:
    """Each would take memory of its own for as long as the embedding is a part of the file."""
    config = LlamaConfig(**(SHAPE | {"hidden_size": 256, "intermediate_size": 512}))
    build_checkpoint(tmp_path, config, torch.bfloat16)
    runner = load(tmp_path, Quantization.W8A16)
    written_kib = [
        int(size)
        for mapping in re.split(r"(?m)^(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text())
        if str(tmp_path) in mapping
        for size in re.findall(r"(?m)^Anonymous: +(\d+) kB", mapping)
    ]
    assert written_kib, "the embedding is a part of the file"
    assert runner.facts.quantization
    assert sum(written_kib) == 0
