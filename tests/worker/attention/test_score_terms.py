"""Terms of scores that follow from rows are proven, and computed over the paged cache."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from transformers import DogeConfig
from transformers.models.doge.modeling_doge import DogeAttention
from transformers.models.inkling.modeling_inkling import InklingRelativeLogits
from transformers.models.inkling2.modeling_inkling2 import Inkling2SlidingAttention

from protocol.config.settings import configure
from tests.worker.checkpoints import SHAPE, WINDOW, build_checkpoint, load_model
from tests.worker.driving import drive
from tests.worker.hollow_checkpoints import assert_refused_before_weights, write_hollow
from tests.worker.parity import (
    GREEDY,
    MAX_TOKENS,
    MODES,
    ROOMY,
    TIGHT,
    generate,
    make_prompts,
    make_runner,
)
from tests.worker.score_term_models import SCORE_TERMS, WIDE
from worker_proc.attention.indexers import ALL_TOKENS
from worker_proc.attention.interface import Rows, paged_attention
from worker_proc.attention.probed_layer import RowTerms
from worker_proc.attention.recorder import NUM_PROBE_TOKENS
from worker_proc.attention.score_terms import KEY_BIAS_DIMS, with_key_biases
from worker_proc.errors import UnsupportedModel
from worker_proc.loading import inspection
from worker_proc.loading.loader import check_model
from worker_proc.loading.text_model import auto_class
from worker_proc.modules import score_terms
from worker_proc.modules.score_terms import prove_score_terms
from worker_proc.native.build import build, compiler
from worker_proc.native.kernels import NativeLibrary
from worker_proc.startup.refusals import check_score_terms

needs_kernels = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
MODELS = {architecture.name: architecture for architecture in (*SCORE_TERMS, *WIDE)}
DISTANCES = 21


def test_key_biases_are_added_to_scores() -> None:
    """bfloat16 rounds the inverse of most scales."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-3)):
        query, key = torch.randn(1, 4, 3, 8).to(dtype), torch.randn(1, 2, 5, 8).to(dtype)
        biases = torch.randn(1, 2, 1, 5).to(dtype)
        scale = 128**-0.5
        own = biases.repeat_interleave(2, dim=1)
        wide = [one.float() for one in with_key_biases(query, key, own, scale)]
        scores = wide[0] @ wide[1].repeat_interleave(2, dim=1).mT * scale
        plain = query.float() @ key.float().repeat_interleave(2, dim=1).mT * scale
        torch.testing.assert_close(scores, plain + own.float(), rtol=tolerance, atol=tolerance)


def test_chosen_tokens_add_nothing_to_scores() -> None:
    """What takes the place of a mask where indexers choose all tokens changes no score."""
    attended: list[Rows] = []

    def attend(layer: object, rows: Rows, scoring: object) -> torch.Tensor:
        attended.append(rows)
        return rows.query

    backend = SimpleNamespace(attend=attend)
    layer = SimpleNamespace(spec=SimpleNamespace(head_dim=8), backend=backend)
    module: Any = SimpleNamespace(paged_layer=layer)
    query, key, value = torch.randn(3, 1, 4, 5, 8)
    paged_attention(module, query, key, value, ALL_TOKENS)  # type: ignore[arg-type]
    paged_attention(module, query, key, value, None)
    masked, plain = attended
    assert all(map(torch.equal, masked, plain))


def test_the_probe_records_terms(tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    for name in ("inkling_text", "inkling2_text", "doge"):
        MODELS[name].config().save_pretrained(tmp_path / name)
        inspected = inspection.inspect_config(str(tmp_path / name), "float32", torch.device("cpu"))
        layers = inspected.probed.layers
        found[name] = [(one.row_terms, one.spec.window, one.spec.head_dim) for one in layers]
    for name, has_sinks in (("inkling_text", False), ("inkling2_text", True)):
        sliding = RowTerms(WINDOW, has_sinks), WINDOW, 16
        assert found[name] == [sliding, (RowTerms(DISTANCES, has_sinks), None, 16)] * 2
    biased = RowTerms(has_key_biases=True), None, 16 + KEY_BIAS_DIMS
    assert found["doge"] == [biased] * 2


@pytest.mark.parametrize("num_shared_experts", [2, NUM_PROBE_TOKENS])
def test_experts_are_not_counted_as_rows(num_shared_experts: int, tmp_path: Path) -> None:
    """They are not even if as many experts share a row as the probe has rows."""
    config = MODELS["inkling_text"].config()
    config.n_shared_experts = num_shared_experts
    config.save_pretrained(tmp_path)
    inspected = inspection.inspect_config(str(tmp_path), "float32", torch.device("cpu"))
    shapes = {"": (1, 0, config.hidden_size), "gammas": (0, num_shared_experts)}
    names = [f"model.layers.{layer}.mlp.shared_experts" for layer in (1, 2)]
    assert inspected.probed.argument_shapes == dict.fromkeys(names, shapes)


def test_a_context_ends_where_keys_would_be_hidden(tmp_path: Path) -> None:
    config = DogeConfig(**{key: SHAPE[key] for key in SHAPE if key != "head_dim"})
    config.keep_window_size = 99
    config.save_pretrained(tmp_path)
    inspected = inspection.inspect_config(str(tmp_path), "float32", torch.device("cpu"))
    assert inspected.model_len == 99


def test_mixtures_that_mix_tokens_are_refused(tmp_path: Path) -> None:
    DogeConfig(hidden_size=64, num_hidden_layers=1, is_moe=True).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="experts of a token by the number of tokens"):
        inspection.inspect_config(str(tmp_path), "float32", torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@needs_kernels
@pytest.mark.parametrize("name", ["inkling2_wide", "doge_window"])
def test_outputs_equal_generate_and_bits_do_not_depend_on_steps(name: str, tmp_path: Path) -> None:
    build()
    config = MODELS[name].config()
    build_checkpoint(tmp_path, config)
    model = auto_class(config).from_pretrained(tmp_path, dtype=torch.float32).eval()
    model.set_attn_implementation("eager")
    prompts = make_prompts()
    expected = [generate(model, prompt, MAX_TOKENS) for prompt in prompts]
    for dtype in ("float32", "bfloat16"):
        runners = {blocks: make_runner(tmp_path, blocks, dtype=dtype) for blocks in (ROOMY, TIGHT)}
        for mode, (num_blocks, options) in MODES.items():
            runner = runners[num_blocks]
            assert runner.facts.exact_resume, runner.facts.exact_resume_reason
            run = drive(runner, prompts, GREEDY, **({"max_num_seqs": 16} | options))
            if dtype == "bfloat16" and mode == next(iter(MODES)):
                expected = run.output_token_ids
            assert run.output_token_ids == expected, (dtype, mode)


def _other_bias(out: torch.Tensor) -> torch.Tensor:
    return out * 1.01


class Changed(NamedTuple):
    """A method, and what it might return in a module's own forward instead."""

    name: str
    kind: type[Any]
    method: str
    change: Callable[[Any], Any]


CHANGED = (
    Changed("inkling_text", InklingRelativeLogits, "forward", _other_bias),
    Changed(
        "inkling2_text", Inkling2SlidingAttention, "forward", lambda out: (out[0] * 1.01, None)
    ),
    Changed("doge", DogeAttention, "prepare_dynamic_mask", _other_bias),
)


@pytest.mark.parametrize("changed", CHANGED, ids=lambda changed: changed.name)
def test_modules_that_compute_something_else_are_refused(
    changed: Changed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = getattr(changed.kind, changed.method)

    @wraps(own)
    def other(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = own(self, *args, **kwargs)
        return changed.change(out) if self.config._attn_implementation == "eager" else out

    build_checkpoint(tmp_path, MODELS[changed.name].config())
    loaded = load_model(tmp_path, "float32")
    prove_score_terms(loaded, None)
    monkeypatch.setattr(changed.kind, changed.method, other)
    with pytest.raises(UnsupportedModel, match="differs from its own forward"):
        prove_score_terms(loaded, None)


@pytest.mark.slow
@needs_kernels
def test_what_is_proven_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_checkpoint(tmp_path, MODELS["inkling_text"].config())
    library = NativeLibrary(build())
    loaded = load_model(tmp_path, "float32")
    proven = prove_score_terms(loaded, library)
    assert proven == [layer.module_name for layer in loaded.layers]
    monkeypatch.setattr(score_terms, "_greatest_error", None)
    assert prove_score_terms(load_model(tmp_path, "float32"), library, proven) == proven


def test_logits_of_tokens_that_only_fill_up_are_not_counted(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, MODELS["inkling_text"].config())
    assert load_model(tmp_path).vocab_size == SHAPE["vocab_size"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("doge", {"kv_cache_dtype": "int8"}, "int8: doge has scores with a bias of each key"),
        ("doge", {"tensor_parallel_size": 2}, "tensor_parallel_size 2: .* one worker computes"),
        ("inkling_text", {"tensor_parallel_size": 2}, "by distance, which one worker computes"),
        ("inkling2_text", {"pipeline_parallel_size": 2}, "by distance, which one worker computes"),
        ("inkling_text", {"quantization": "w8a16"}, "rel_logits_proj .* not those of a linear"),
    ],
)
@needs_kernels
def test_settings_are_refused_before_the_weights(
    name: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    assert_refused_before_weights(tmp_path, MODELS[name].config(), settings, reason)


@pytest.mark.slow
def test_another_device_is_refused(tmp_path: Path) -> None:
    write_hollow(tmp_path, MODELS["doge"].config())
    checked = check_model(str(tmp_path), "float32", torch.device("cpu"), lambda *_: None)
    with pytest.raises(UnsupportedModel, match="only the CPU computes, not cuda"):
        check_score_terms(
            checked._replace(device=torch.device("cuda")), configure(model=str(tmp_path))
        )
