"""Attention over compressed entries: what is stored and proven, and what is refused."""

import random
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek_v4

from protocol.config.settings import configure
from protocol.sampling import SamplingParams
from tests.worker.checkpoints import build_checkpoint, load_model
from tests.worker.compressed_models import DEEPSEEK_V4, with_window
from tests.worker.driving import drive
from tests.worker.hollow_checkpoints import assert_refused_before_weights, write_hollow
from tests.worker.parity import generate, make_runner
from worker_proc.attention.compression import compression_of
from worker_proc.errors import UnsupportedModel
from worker_proc.loading.loader import check_model
from worker_proc.loading.text_model import auto_class
from worker_proc.modules import compressed
from worker_proc.modules.compressed import install_compressed
from worker_proc.modules.experts.router import ROW_STEP, RowBlocks
from worker_proc.modules.grouped_linear import GroupedLinear, pack_grouped_linears
from worker_proc.native.build import build, compiler
from worker_proc.native.kernels import NativeLibrary
from worker_proc.startup import required_kernels
from worker_proc.startup.load_runner import load_model_runner
from worker_proc.startup.parts import block_bytes_of, make_layout
from worker_proc.startup.refusals import check_compressed

pytestmark = pytest.mark.usefixtures("two_threads")
needs_kernels = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
MAX_TOKENS = 40
LENGTHS = (700, 127, 513, 1000)
SHARED, OWN_LENGTHS = 300, (5, 77, 400)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    build_checkpoint(tmp_path, DEEPSEEK_V4.config())
    return tmp_path


@pytest.mark.slow
@needs_kernels
@pytest.mark.timeout(600)
@pytest.mark.parametrize("window", [128, 20])
def test_outputs_of_long_texts_equal_generate(window: int, tmp_path: Path) -> None:
    """Groups have 4 and 128 tokens, are cut at other places, and follow cached prefixes.

    The blocks of rows that neither windows nor groups reach are freed, and used again.
    """
    build()
    config = with_window(window)
    build_checkpoint(tmp_path, config)
    model = auto_class(config).from_pretrained(tmp_path, dtype=torch.float32).eval()
    rng = random.Random(3)
    make = lambda count: [rng.randrange(3, config.vocab_size) for _ in range(count)]  # noqa: E731
    shared = make(SHARED)
    prompts = [*map(make, LENGTHS), *(shared + make(count) for count in OWN_LENGTHS)]
    expected = [generate(model, prompt, MAX_TOKENS) for prompt in prompts]
    assert len(set(map(tuple, expected))) == len(prompts)
    runner = make_runner(tmp_path, 1200)
    assert runner.facts.exact_resume
    assert {group.window for group in runner.facts.kv_groups} == {None, 128}
    greedy = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    for options in (
        {"enable_prefix_caching": False, "max_num_batched_tokens": 512},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 16},
        {"max_num_seqs": 2},
    ):
        run = drive(runner, prompts, greedy, **({"max_num_seqs": 16} | options))
        assert run.output_token_ids == expected, options
    assert run.num_cached_tokens > 0


@pytest.mark.slow
@needs_kernels
def test_of_entries_with_equal_scores_the_earlier_ones_are_selected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few heads give many scores of 0, and topk returns those in no defined order."""
    build()
    config = DEEPSEEK_V4.config()
    config.index_n_heads, config.index_topk = 2, 1
    build_checkpoint(tmp_path, config)
    model = auto_class(config).from_pretrained(tmp_path, dtype=torch.float32).eval()
    rng = random.Random(5)
    prompts = [[rng.randrange(3, config.vocab_size) for _ in range(80)] for _ in range(6)]
    params = SamplingParams(max_tokens=10, temperature=0.0, logprobs=0, ignore_eos=True)
    run = drive(make_runner(tmp_path, 400), prompts, params, max_num_seqs=16)
    num_equal = 0

    def first_highest(scores: torch.Tensor, count: int, dim: int) -> SimpleNamespace:
        nonlocal num_equal
        values, indices = scores.sort(dim=dim, descending=True, stable=True)
        last, next_one = values[..., count - 1], values[..., count]
        num_equal += int(((last == next_one) & next_one.isfinite()).sum())
        return SimpleNamespace(indices=indices[..., :count])

    select = deepseek_v4.DeepseekV4Indexer.forward

    def select_in_order(*args: Any, **kwargs: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "topk", first_highest)
            return select(*args, **kwargs)

    monkeypatch.setattr(deepseek_v4.DeepseekV4Indexer, "forward", select_in_order)
    for number, (prompt, output) in enumerate(zip(prompts, run.output_token_ids, strict=True)):
        with torch.inference_mode():
            rows = model(torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0, 79:]
        expected = rows.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0]
        found = [entry.logprob for entry in run.logprobs[number]]
        torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=1e-4)
    assert num_equal > 0


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("block_size", [4, 6, 16, 32])
def test_blocks_hold_what_is_announced_of_any_size(block_size: int, directory: Path) -> None:
    """The last token of a group has the entry in its block, wherever the group begins."""
    build()
    prompts = [[7 + 3 * i + 11 * j for j in range(40 + i)] for i in range(3)]
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    outputs = []
    for size in (block_size, 16):
        settings = configure(
            model=str(directory),
            **{"device": "cpu", "dtype": "float32", "num_threads": 1, "block_size": size},
            num_gpu_blocks_override=100,
        )
        runner = load_model_runner(settings, lambda *_: None)
        outputs.append(drive(runner, prompts, params, max_num_seqs=4).output_token_ids)
        loaded = load_model(directory, "float32")
        [tensor] = runner._pool.all_tensors
        assert tensor[0].nbytes == block_bytes_of(loaded, make_layout(loaded, settings))
    assert outputs[0] == outputs[1]


@pytest.mark.slow
@needs_kernels
def test_rows_of_a_step_are_not_kept_after_it(directory: Path) -> None:
    build()
    runner = make_runner(directory, 100)
    drive(runner, [list(range(3, 40))], SamplingParams(max_tokens=3))
    found = {*filter(None, map(compression_of, runner._model.modules()))}
    assert len(found) == 4
    assert not any(compression.contributions or compression.index for compression in found)


OTHERS: list[tuple[type[Any], Callable[..., Any]]] = [
    (deepseek_v4.DeepseekV4CSACompressor, lambda out: (out[0] * 1.01, out[1])),
    (deepseek_v4.DeepseekV4HCACompressor, lambda out: (out[0] + 0.01, out[1])),
    (deepseek_v4.DeepseekV4Indexer, lambda out: (out - 1).clamp_min(-1)),
    (deepseek_v4.DeepseekV4Attention, lambda out: (out[0] * 1.01, None)),
]
"""Classes, with what their forward over whole texts might return instead."""


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize(("kind", "change"), OTHERS, ids=lambda one: one.__name__)
def test_modules_that_compute_something_else_are_refused(
    kind: type[Any],
    change: Callable[..., Any],
    directory: Path,
    library: NativeLibrary,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = kind.forward

    @wraps(forward)
    def other(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        rows = out[0] if isinstance(out, tuple) else out
        is_plain = rows.numel() > 0  # compressors return nothing where the kernel attends
        if kind is deepseek_v4.DeepseekV4Attention:
            is_plain = self.config._attn_implementation == "eager"
        return change(out) if is_plain else out

    loaded = load_model(directory, "float32")
    monkeypatch.setattr(kind, "forward", other)
    with pytest.raises(UnsupportedModel, match="differs from its own forward"):
        install_compressed(loaded, library)


@pytest.mark.slow
@needs_kernels
def test_what_is_proven_is_not_tried_again(
    directory: Path, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(directory, "float32")
    proven = install_compressed(loaded, library)
    assert proven == [layer.module_name for layer in loaded.layers]
    monkeypatch.setattr(compressed, "_least_error", None)
    again = load_model(directory, "float32")
    assert install_compressed(again, library, proven) == proven
    for model in (loaded.model, again.model):
        found = [compression_of(model.get_submodule(name)) for name in proven]
        taken = [one and [*one.parameters] for one in found]
        both = ["compressor", "indexer"]
        assert taken == [None, both, both[:1], both, both[:1]]


@pytest.mark.slow
@needs_kernels
def test_groups_of_a_linear_layer_are_packed_if_they_compute_the_same(
    directory: Path, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = deepseek_v4.DeepseekV4GroupedLinear
    model = load_model(directory, "float32").model
    pack_grouped_linears(model, library)
    assert sum(isinstance(module, GroupedLinear) for module in model.modules()) == 5
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, rows: forward(self, rows).flip(-2))
    model = load_model(directory, "float32").model
    pack_grouped_linears(model, library)
    assert sum(isinstance(module, kind) for module in model.modules()) == 5


def test_blocks_of_rows_keep_the_tokens_of_their_rows() -> None:
    table = torch.arange(50) * 3

    def route(rows: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flat = rows.reshape(-1, rows.shape[-1])
        return flat, table[tokens.reshape(-1)].unsqueeze(1)

    blocks = RowBlocks(route, 2**11)  # few rows at once
    rows, tokens = torch.randn(1, 3 * ROW_STEP + 2, 4), torch.arange(50).flip(0).unsqueeze(0)
    found = blocks(rows, tokens)
    assert torch.equal(found[0], rows[0])
    assert torch.equal(found[1][:, 0], table[tokens[0]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kv_cache_dtype": "int8"}, "int8: deepseek_v4 attends over compressed entries"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 2: .* which one worker computes"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size 2: .* which one worker computes"),
        ({"dtype": "float16"}, "float32 and bfloat16, not in float16"),
        ({"quantization": "w8a16", "dtype": "bfloat16"}, "nor of experts"),
    ],
)
@needs_kernels
def test_settings_are_refused_before_the_weights(
    settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    assert_refused_before_weights(tmp_path, DEEPSEEK_V4.config(), settings, reason)


@pytest.mark.slow
def test_another_device_is_refused(tmp_path: Path) -> None:
    write_hollow(tmp_path, DEEPSEEK_V4.config())
    checked = check_model(str(tmp_path), "float32", torch.device("cpu"), lambda *_: None)
    with pytest.raises(UnsupportedModel, match="only the CPU computes, not cuda"):
        check_compressed(
            checked._replace(device=torch.device("cuda")), configure(model=str(tmp_path))
        )


@pytest.mark.slow
def test_a_machine_without_kernels_is_refused_before_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler() -> Path:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(required_kernels, "build", no_compiler)
    monkeypatch.setattr(required_kernels, "load_library", lambda: None)
    write_hollow(tmp_path, DEEPSEEK_V4.config())
    phases: list[str] = []
    config = configure(model=str(tmp_path), device="cpu", num_threads=1)
    with pytest.raises(UnsupportedModel, match=r"entries needs the native kernels: no C\+\+ comp"):
        load_model_runner(config, lambda phase, done, total: phases.append(phase))
    assert "load_weights" not in phases
