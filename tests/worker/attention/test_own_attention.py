"""Attention in a model's own code is observed, proven, and computed over the paged cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BloomConfig, MptConfig, PretrainedConfig
from transformers.models.falcon.modeling_falcon import FalconLinear

from tests.worker.checkpoints import WINDOW, build_checkpoint, load_model
from tests.worker.own_attention_models import OWN_ATTENTION
from tests.worker.parity import make_runner
from worker_proc.attention.stand_ins import OwnCache, OwnCall
from worker_proc.errors import UnsupportedModel
from worker_proc.loading.plain_linears import make_linears_plain
from worker_proc.modules.own_attention import install, observation
from worker_proc.modules.own_attention.install import install_own_attention

MODELS = {architecture.name: architecture for architecture in OWN_ATTENTION}


def call_of(compute: Any) -> OwnCall:
    """Return what is recorded while `compute` attends with stand-ins: 5 rows behind 3 tokens."""
    calls: list[OwnCall] = []

    def attend(call: OwnCall) -> torch.Tensor:
        calls.append(call)
        return call.query.new_zeros(*call.query.shape[:2], call.value.shape[2])

    rows = torch.randn(3, 1, 4, 5, 8)
    key, value = OwnCache(attend, num_past=3).update(rows[1], rows[2], 0)
    out = compute(rows[0], key, value)
    assert out.shape[-2:] == (5, 8)
    return calls[0]


def test_scales_and_biases_are_observed_in_their_order() -> None:
    biases = torch.randn(4, 1, 8)

    def compute(query: torch.Tensor, key: Any, value: Any) -> Any:
        scores = (query @ key.transpose(-1, -2) + biases) * 0.5
        weights = torch.softmax((scores / 4).view(4, 5, 8).float(), dim=-1)
        return weights.to(query.dtype) @ value

    terms = call_of(compute).terms
    assert terms.scale == 0.125
    assert [(bias.tensor is biases, bias.factor) for bias in terms.biases] == [(True, 0.125)]


@pytest.mark.parametrize(
    ("operation", "problem"),
    [
        (torch.tanh, "tanh of scores"),
        (lambda scores: scores * torch.ones(8), "products with tensors of scores"),
        (lambda scores: scores.cumsum(-1), "cumsum of scores"),
    ],
)
def test_unknown_operations_are_refused_by_name(operation: Any, problem: str) -> None:
    def compute(query: torch.Tensor, key: Any, value: Any) -> Any:
        return torch.softmax(operation(query @ key.transpose(-1, -2)), dim=-1) @ value

    with pytest.raises(UnsupportedModel, match=problem):
        call_of(compute)


@pytest.mark.parametrize(
    ("name", "function", "result"),
    [
        ("bloom", "observed_biases", None),
        ("falcon_alibi", "observed_biases", None),
        ("gpt_neo", "_window", None),
        ("falcon_new", "_num_kv_heads", 1),
    ],
)
def test_a_module_that_differs_from_its_own_forward_is_refused(
    name: str, function: str, result: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_checkpoint(tmp_path, MODELS[name].config())
    loaded = load_model(tmp_path)
    monkeypatch.setattr(observation, function, lambda *args: result)
    with pytest.raises(UnsupportedModel, match="differs from its own forward"):
        install_own_attention(loaded)


def test_biases_windows_and_repeated_heads_are_observed(tmp_path: Path) -> None:
    found = {}
    for name in ("bloom", "gpt_neo", "falcon_new"):
        build_checkpoint(tmp_path / name, MODELS[name].config())
        loaded, layers = install_own_attention(load_model(tmp_path / name))
        found[name] = [(one.spec.window, one.spec.num_kv_heads, one.biases_of) for one in layers]
        if name == "bloom":
            biases = loaded.model.get_buffer(str(loaded.layers[1].biases))
            assert torch.equal(biases[0, :256], 0.25 * torch.arange(-255.0, 1))
            assert loaded.layers[1].bias_origin == 255
    assert found == {
        "bloom": [(None, 4, 0), (None, 4, 0)],
        "gpt_neo": [(None, 4, None), (WINDOW, 4, None)],
        "falcon_new": [(None, 2, None), (None, 2, None)],
    }


SIX_HEADS: dict[str, Any] = {"vocab_size": 199, "n_layers": 1, "d_model": 96, "n_heads": 6}
LONG = (
    MptConfig(**SIX_HEADS, max_seq_len=65_536),
    BloomConfig(vocab_size=199, n_layer=1, hidden_size=96, n_head=6, seq_length=65_536),
)
"""Their slopes are not powers of two: products with large positions are rounded."""


@pytest.mark.parametrize("config", LONG, ids=lambda config: config.model_type)
def test_biases_are_as_precise_in_a_model_of_long_contexts(
    config: PretrainedConfig, tmp_path: Path
) -> None:
    build_checkpoint(tmp_path, config)
    found = []
    for max_model_len in (None, 3000):
        loaded, _ = install_own_attention(load_model(tmp_path), max_model_len=max_model_len)
        [layer] = loaded.layers
        assert loaded.model_len == (max_model_len or 65_536)
        assert layer.bias_origin == loaded.model_len - 1
        found.append(loaded.model.get_buffer(str(layer.biases))[:, : loaded.model_len])
    whole, short = found
    assert torch.equal(whole[:, -3000:], short)
    slopes = -short[:, -2:-1]
    assert torch.equal(short, slopes * torch.arange(-2999, 1))


def test_heads_of_equal_weights_are_not_taken_for_copies(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, MODELS["gpt_neo"].config())
    loaded = load_model(tmp_path)
    for layer in loaded.layers:
        module = loaded.model.get_submodule(layer.module_name)
        for linear in (module.k_proj, module.v_proj):
            with torch.no_grad():
                linear.weight.copy_(linear.weight[:16].repeat(4, 1))
    _, layers = install_own_attention(loaded)
    assert [layer.spec.num_kv_heads for layer in layers] == [4, 4]


def test_a_module_that_gives_zeros_is_proven(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, MODELS["gpt_neo"].config())
    loaded = load_model(tmp_path)
    module = loaded.model.get_submodule(loaded.layers[0].module_name)
    torch.nn.init.zeros_(module.out_proj.weight)
    torch.nn.init.zeros_(module.out_proj.bias)
    install_own_attention(loaded)


def test_what_is_known_is_not_proven_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_checkpoint(tmp_path, MODELS["bloom"].config())
    first, proven = install_own_attention(load_model(tmp_path))
    monkeypatch.delattr(install, "prove")
    second, known = install_own_attention(load_model(tmp_path), proven)
    assert known == proven
    assert second.layers == first.layers
    tables = [one.model.get_buffer(str(one.layers[1].biases)) for one in (first, second)]
    assert torch.equal(*tables)


def test_bits_are_exact_and_the_cache_holds_no_copies(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, MODELS["falcon_new"].config())
    runner = make_runner(tmp_path, 50, dtype="bfloat16")
    assert runner.facts.exact_resume, runner.facts.exact_resume_reason
    assert runner._pool.tensors[0].keys.shape[1] == 2


def test_linear_layers_of_other_classes_become_plain_if_they_compute_the_same() -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    class Router(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> Any:
            return super().forward(input).topk(2)

    class Scaled(torch.nn.Linear):
        def __init__(self, factor: float) -> None:
            super().__init__(20, 20)
            self.factor = factor

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * self.factor

    class Late(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.cat([input[:, :16], 2 * input[:, 16:]], dim=1))

    model = torch.nn.Sequential(FalconLinear(20, 30), FalconLinear(30, 20, bias=False))
    model.append(Scaled(1.0)).append(Scaled(3.0)).append(Late(20, 20))
    model.append(Doubled(20, 20)).append(Router(20, 8))
    rows = torch.randn(3, 20)
    before = model(rows)
    make_linears_plain(model)
    plain = torch.nn.Linear
    kinds = [type(module) for module in model]
    assert kinds == [plain, plain, plain, Scaled, Late, Doubled, Router]
    torch.testing.assert_close(model(rows), before)
