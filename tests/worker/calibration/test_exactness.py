"""When a worker declares exact resumption, and the reason where it does not."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Gemma3TextConfig, PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.chameleon.modeling_chameleon import ChameleonLayerNorm
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP

from tests.worker.bitwise import load
from tests.worker.checkpoints import ARCHITECTURES, build_checkpoint
from tests.worker.odd_models import CONFIGS
from worker_proc.attention.interface import IMPLEMENTATION, set_implementation
from worker_proc.attention.within_tokens import attend_in_tokens
from worker_proc.calibration import exactness
from worker_proc.calibration.plain_products import multiplies_by_elements, plain_products
from worker_proc.calibration.row_trials import ROW_COUNTS, repeats_rows
from worker_proc.calibration.token_parts import recorded_calls
from worker_proc.model_runner import ModelRunner
from worker_proc.modules import fusing, mlp
from worker_proc.native.build import build, compiler
from worker_proc.startup import parts

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build()
    directory = tmp_path_factory.mktemp("llama")
    build_checkpoint(directory, CONFIGS["llama"])
    return directory


def reason_of(runner: ModelRunner) -> str:
    """The reason that the runner gives for not declaring it."""
    assert not runner.facts.exact_resume
    assert runner.facts.exact_resume_reason
    return runner.facts.exact_resume_reason


def test_plain_attention_is_declared(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(llama, "float32").facts.exact_resume
    monkeypatch.setattr(parts, "can_attend", lambda *args: False)
    assert "plain attention" in reason_of(load(llama, "float32"))


def test_plain_products_are_declared(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dtype that cannot be packed, and layers that are not packed."""
    assert "for dtype float16" in reason_of(load(llama, "float16"))
    deepseek = next(a for a in ARCHITECTURES if a.name == "deepseek_v3")
    build_checkpoint(tmp_path, deepseek.config())
    assert load(tmp_path, "float32").facts.exact_resume
    monkeypatch.setattr(fusing, "fused_grouped_experts", lambda *_, **__: None)
    assert load(tmp_path, "float32").facts.exact_resume  # with gates by the module's own code
    monkeypatch.setattr(fusing, "own_gated_experts", lambda *_, **__: None)
    assert load(tmp_path, "float32").facts.exact_resume  # by the module's own forward
    monkeypatch.setattr(fusing, "pack_own_experts", lambda *_, **__: False)
    reason = reason_of(load(tmp_path, "float32"))
    assert "plain matrix products" in reason
    assert "model.layers.1.mlp.experts (DeepseekV3Experts)" in reason


def test_module_whose_bits_depend_on_the_place_is_found_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its MLP gives other results among many rows than among few."""
    config = CONFIGS["gemma3"]
    assert isinstance(config, Gemma3TextConfig)
    build_checkpoint(tmp_path, config)
    assert load(tmp_path, "float32").facts.exact_resume
    plain = Gemma3MLP.forward

    def forward(self: Gemma3MLP, hidden: torch.Tensor) -> torch.Tensor:
        return plain(self, hidden) * (1 + hidden.shape[1] // 17)

    monkeypatch.setattr(Gemma3MLP, "forward", forward)
    for module in (fusing, mlp):
        monkeypatch.setattr(module, "activation_of", lambda *args, **kwargs: None)
    assert "layers.0.mlp (Gemma3MLP) gives rows other bits" in reason_of(load(tmp_path, "float32"))


def test_difference_between_decode_and_prefill_is_found(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = exactness.compute_whole
    monkeypatch.setattr(
        exactness, "compute_whole", lambda *args: [rows * (1 + 2**-23) for rows in compute(*args)]
    )
    assert "computed at once" in reason_of(load(llama, "float32"))


@pytest.mark.parametrize(
    "shape",
    [(1, -1, 4), (1, -1, 2, 2), (1, -1, 4, 1), (-1, 4)],
    ids=["rows", "rows of heads", "as many heads as columns", "without a batch"],
)
def test_rows_are_tried_among_more_and_fewer(shape: tuple[int, ...]) -> None:
    """Rows may be anywhere in a result: decays have heads behind them, routers have no batch."""

    class Shaped(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden.reshape(shape)

    class FirstRowRules(Shaped):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden) + hidden.shape[1] // 17

    hidden = torch.randn(1, 8, 4)
    assert repeats_rows(FirstRowRules(), (hidden,), 16)
    assert not repeats_rows(FirstRowRules(), (hidden,), 17)
    for num_rows in ROW_COUNTS:
        assert repeats_rows(Shaped(), (hidden,), num_rows)


def test_factors_of_each_head_count_as_no_matrix() -> None:
    """Norms of Command R+ have such factors; a product with a weight of that shape is found."""

    class Product(CohereLayerNorm):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return torch.einsum("bthd,hd->bth", hidden, self.weight).unsqueeze(-1) * hidden

    class FirstRowRules(CohereLayerNorm):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            normed: torch.Tensor = super().forward(hidden)
            return normed + hidden.shape[1] // 17

    assert multiplies_by_elements(CohereLayerNorm((4, 16)))
    for other in (Product((4, 16)), FirstRowRules((4, 16)), nn.Linear(16, 16, bias=False)):
        assert not multiplies_by_elements(other)
        assert list(plain_products(nn.ModuleList([other])))


def test_factors_of_each_head_may_depend_on_positions() -> None:
    """A part without weights may be there, too, as in Inkling-2."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(4, 16))
            self.part = nn.Identity()

        def forward(self, rows: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            return self.part(rows * self.scale) * (1 + position_ids)[..., None, None]  # type: ignore[no-any-return]

    class Projected(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(16, 16)

    class FirstRowRules(Scaled):
        def forward(self, rows: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            return super().forward(rows, position_ids) + rows.shape[1] // 17

    assert multiplies_by_elements(Scaled())
    for other in (Projected(), FirstRowRules()):
        assert not multiplies_by_elements(other)


def test_attention_within_a_token_is_torchs() -> None:
    """The modules neither take a mask nor project rows; such matrices count as no product."""

    class Within(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Parameter(torch.rand(2, 16))
            self.config = PretrainedConfig()

        def forward(self, states: torch.Tensor) -> object:
            return ALL_ATTENTION_FUNCTIONS.get_interface("eager", print), states

    class Masked(Within):
        def forward(self, states: torch.Tensor, attention_mask: object = None) -> object:
            return ALL_ATTENTION_FUNCTIONS.get_interface("eager", print), states

    class Projecting(Within):
        def __init__(self) -> None:
            super().__init__()
            self.projection: nn.Module = nn.Linear(16, 16)

    within, masked, projecting = Within(), Masked(), Projecting()
    model = nn.ModuleList([within, masked, projecting])
    attend_in_tokens(model)
    projecting.projection = nn.Identity()  # as packed: no linear layer any more
    set_implementation(model, IMPLEMENTATION)
    assert within.config._attn_implementation == "sdpa"
    assert masked.config._attn_implementation == IMPLEMENTATION
    assert list(plain_products(model)) == ["1 (Masked)", "2 (Projecting)"]


def test_norms_whose_first_dimension_is_the_tokens_are_not_tried_with_other_heads() -> None:
    """Chameleon's norms of heads take no batch; others are tried as before."""

    class FirstRowRules(ChameleonLayerNorm):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            normed: torch.Tensor = super().forward(hidden)
            return normed + hidden.shape[-3] // 17

    heads, rows = torch.randn(7, 4, 16), torch.randn(1, 7, 16)
    for module, args, expected in (
        (ChameleonLayerNorm((4, 16)), heads, False),
        (FirstRowRules((4, 16)), heads, True),
        (nn.LayerNorm(16), rows, True),
    ):
        with recorded_calls(module) as calls:
            module(args)
        assert (module in calls) is expected


def test_a_vision_tower_that_text_never_reaches_does_not_count(tmp_path: Path) -> None:
    """Its convolution is a plain product; it is not built, and what text reaches is."""
    vision = next(a for a in ARCHITECTURES if a.name == "gemma3_vision")
    build_checkpoint(tmp_path, vision.config())
    runner = load(tmp_path, "float32")
    assert runner.facts.exact_resume, runner.facts.exact_resume_reason
    names = {name.split(".")[1] for name, _ in runner._model.named_parameters()}
    assert names == {"language_model"}
