"""FlashInfer attends over the engine's blocks; a stand-in checks each call and computes."""

import math
import sys
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma2Config

from protocol.config import AttentionName, NativeDecoder, WorkerConfig
from protocol.config.settings import ConfigError, configure
from protocol.sampling import SamplingParams
from tests.worker.checkpoints import SHAPE, build_checkpoint
from tests.worker.cuda.flashinfer_stand_in import install_stand_in
from tests.worker.cuda.interpreter import DEVICE, prepare_triton
from tests.worker.cuda.small_models import GREEDY, make_runner
from tests.worker.cuda.triton_path import set_uses_triton, take_cuda_path
from tests.worker.driving import drive
from tests.worker.parity import make_prompts
from worker_proc.attention.interface import PagedLayer, Rows, Scoring
from worker_proc.attention.probed_layer import ProbedLayer
from worker_proc.cuda.coverage import choose_attention
from worker_proc.cuda.page_table import page_table
from worker_proc.errors import UnsupportedModel
from worker_proc.inputs import pack_step
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.kv.kv_tensors import KVTensors
from worker_proc.request import MirroredRequest, ScheduledRequest

prepare_triton()
from worker_proc.cuda.attention import TritonAttention  # noqa: E402
from worker_proc.cuda.backend import CudaBackend, StepAttention  # noqa: E402
from worker_proc.cuda.flashinfer_attention import FlashInferAttention  # noqa: E402

BLOCK_SIZE, NUM_BLOCKS, MAX_BLOCKS = 4, 40, 16
DTYPE = torch.bfloat16
MAX_ERROR = 0.03
SMALL = SHAPE | {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL |= {"num_hidden_layers": 4, "sliding_window": 6}
PROMPTS = [prompt[:7] for prompt in make_prompts()[:2]]
STEPS = {"max_num_batched_tokens": 8, "max_num_seqs": 3, "max_steps_in_flight": 2}
FLASHINFER = {"attention_backend": AttentionName.FLASHINFER}


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    take_cuda_path(monkeypatch)
    return install_stand_in(monkeypatch)


def part_of(start: int, size: int, blocks: list[int]) -> ScheduledRequest:
    tokens = [1] * (start + size)
    tables = [array("i", blocks)]
    request = MirroredRequest(blocks[-1], tokens, len(tokens), SamplingParams(), tables, 0, 0)
    return ScheduledRequest(request, start, size, True)


def flashinfer() -> FlashInferAttention:
    return FlashInferAttention(BLOCK_SIZE, MAX_BLOCKS, DTYPE, DEVICE)


def compute(
    attention: StepAttention,
    spec: LayerSpec,
    scoring: Scoring,
    parts: list[ScheduledRequest],
    null: float,
) -> torch.Tensor:
    """Attend over random keys and values; the null block, and what nothing sees, is `null`."""
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, DTYPE)

    pool = [randn(NUM_BLOCKS, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim) for _ in range(2)]
    for tensor in pool:
        tensor[0] = null
    for part in parts:  # behind its end the last block has values of another request
        for tensor in pool:
            tensor[part.request.block_tables[0][-1], (part.end - 1) % BLOCK_SIZE + 1 :] = null
    backend = CudaBackend(1, BLOCK_SIZE, DEVICE, attention)
    layer = PagedLayer(spec, KVTensors(*pool), backend)
    inputs = pack_step(parts, DEVICE)
    backend.begin_step(inputs)
    num_rows = inputs.input_ids.shape[1]
    query = randn(spec.num_heads, num_rows, spec.head_dim).transpose(0, 1)
    new = [randn(spec.num_kv_heads, num_rows, spec.head_dim).transpose(0, 1) for _ in range(2)]
    return backend.attend(layer, Rows(query, *new), scoring)


@pytest.mark.parametrize("is_decode", [True, False])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, 2.0)])
def test_a_step_equals_that_of_the_engines_kernels(
    window: int | None, softcap: float | None, is_decode: bool, stand_in: Any
) -> None:
    """Blocks that a window has passed may have been freed; the null block is NaN."""
    spec, scoring = LayerSpec(4, 2, 64, 64, window), Scoring(0.1, softcap)
    passed = 0 if window else 3
    parts = [part_of(17, 1, [passed, 7, passed, 9, 2]), part_of(0, 1, [5])]
    if not is_decode:
        parts.insert(1, part_of(6, 5, [11, 12, 13]))
        if window:
            parts[0].request.block_tables[0][1] = 0
    elif window:
        parts[0].request.block_tables[0][1] = 0
    expected = compute(TritonAttention([spec], DEVICE), spec, scoring, parts, math.nan)
    found = compute(flashinfer(), spec, scoring, parts, math.nan)
    torch.testing.assert_close(found, expected, atol=MAX_ERROR, rtol=0.02)
    assert [type(plan).__name__ for plan in stand_in.plans] == [
        f"Batch{'Decode' if is_decode else 'Prefill'}WithPagedKVCacheWrapper"
    ]


def test_pages_begin_where_the_window_does() -> None:
    parts = [part_of(9, 1, [3, 4, 5]), part_of(0, 6, [6, 7]), part_of(7, 1, [8, 9])]
    whole = page_table(parts, 0, None, BLOCK_SIZE, 4)
    assert whole.indptr == [0, 3, 5, 7, 8]
    assert whole.indices.tolist() == [3, 4, 5, 6, 7, 8, 9, 0]
    assert whole.last_page_len == [2, 2, 4, 1]
    seen = page_table(parts, 0, 4, BLOCK_SIZE)  # from positions 6, 0 and 4 on
    assert seen.indptr == [0, 2, 4, 5]
    assert seen.indices.tolist() == [4, 5, 6, 7, 9]


def test_a_graph_that_is_replayed_sees_the_pages_of_its_new_step(stand_in: Any) -> None:
    """What it replays is a run of the first step's wrapper; other sizes share a buffer with it."""
    attention, spec, scoring = flashinfer(), LayerSpec(2, 2, 64, 64, None), Scoring(0.1, None)
    pool = [torch.randn(NUM_BLOCKS, BLOCK_SIZE, 2, 64).to(DEVICE, DTYPE) for _ in range(2)]
    layer: Any = SimpleNamespace(spec=spec, group=0)
    place: Any = SimpleNamespace(kv=KVTensors(*pool))
    query = torch.randn(3, 2, 64).to(DEVICE, DTYPE)
    attention.begin_static_step((), 3)
    attention.attend(place, query, layer, scoring)
    captured = stand_in.plans[-1]
    parts = [part_of(9, 1, [3, 4, 5]), part_of(4, 1, [6, 7])]
    attention.begin_static_step(parts[:1], 2)
    attention.begin_static_step(parts, 3)
    found = captured.run(query, (pool[0], pool[1]))
    attention.begin_step(parts, [0, 1, 2])
    expected = attention.attend(place, query[:2], layer, scoring)
    assert torch.equal(found[:2], expected)
    torch.testing.assert_close(found[2], pool[1][0, 0])


def test_a_graph_of_one_row_has_a_wrapper_that_other_decodes_do_not_plan(stand_in: Any) -> None:
    attention, spec, scoring = flashinfer(), LayerSpec(2, 2, 64, 64, None), Scoring(0.1, None)
    pool = [torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 2, 64, device=DEVICE, dtype=DTYPE)] * 2
    place: Any = SimpleNamespace(kv=KVTensors(*pool))
    layer: Any = SimpleNamespace(spec=spec, group=0)
    attention.begin_static_step((), 1)
    attention.attend(place, torch.zeros(1, 2, 64).to(DEVICE, DTYPE), layer, scoring)
    captured = stand_in.plans[-1]
    attention.begin_step([part_of(4, 1, [6, 7]), part_of(0, 1, [5])], [0, 1, 2])
    assert stand_in.plans[-1] is not captured


def test_a_plan_waits_for_the_copies_of_the_ones_before(stand_in: Any) -> None:
    """The planner's pinned memory is written at once, and read when the device comes to it."""
    attention, spec = flashinfer(), LayerSpec(2, 2, 64, 64, None)
    pool = [torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 2, 64, device=DEVICE, dtype=DTYPE)] * 2
    place: Any = SimpleNamespace(kv=KVTensors(*pool))
    query = torch.zeros(1, 2, 64, device=DEVICE, dtype=DTYPE)
    events: list[tuple[str, int]] = []

    def note(name: str) -> Any:
        return lambda: events.append((name, len(stand_in.plans)))

    stand_in.plans.clear()
    event: Any = SimpleNamespace(synchronize=note("waited"), record=note("recorded"))
    attention._copied = event
    for group in (0, 0, 1):
        part = part_of(3, 1, [5])
        part.request.block_tables.append(array("i", [6]))
        attention.begin_step([part], [0, 1])
        layer: Any = SimpleNamespace(spec=spec, group=group)
        attention.attend(place, query, layer, Scoring(0.1, None))
    expected = [("waited", 0), ("recorded", 1)]
    expected += [("waited", 1), ("recorded", 2), ("waited", 2), ("recorded", 3), ("recorded", 4)]
    assert events == expected


def test_a_model_is_planned_once_for_layers_that_are_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in: Any
) -> None:
    """Prompts in chunks beside decodes, and decodes over static buffers, give PyTorch's tokens.

    Of the four layers two have a window, and all have a soft cap.
    """
    build_checkpoint(tmp_path, Gemma2Config(**SMALL))
    options = {"native_decoder": NativeDecoder.OFF}
    with monkeypatch.context() as patch:
        set_uses_triton(patch, False)
        plain = make_runner(tmp_path, "float16", **options)
    expected = drive(plain, PROMPTS, GREEDY, **STEPS).output_token_ids
    runner = make_runner(tmp_path, "float16", **options, **FLASHINFER)
    assert runner.attention == "FlashInfer"
    assert not runner.facts.exact_resume
    stand_in.plans.clear()
    stand_in.num_runs = 0
    run = drive(runner, PROMPTS, GREEDY, **STEPS)
    assert run.output_token_ids == expected
    assert run.num_ahead
    if DEVICE.type == "cpu":  # the stand-in waits for a GPU, so no graphs are captured there
        assert any(plan.buffers is not None for plan in stand_in.plans)
    num_plans = len(stand_in.plans)
    assert 2 * run.num_ahead <= num_plans <= 2 * run.num_steps
    assert stand_in.num_runs == 2 * num_plans


def wanting(name: AttentionName) -> WorkerConfig:
    return WorkerConfig(attention_backend=name)


LAYER = ProbedLayer("layers.0.attn", LayerSpec(8, 2, 128, 128, None))
CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("layer", "dtype", "reason"),
    [
        (replace(LAYER, sinks="sinks"), DTYPE, "layers.0.attn has attention sinks"),
        (replace(LAYER, biases="biases"), DTYPE, "layers.0.attn adds biases to its scores"),
        (replace(LAYER, spec=replace(LAYER.spec, head_dim=96)), DTYPE, "heads of 96 dimensions"),
        (replace(LAYER, spec=replace(LAYER.spec, value_head_dim=64)), DTYPE, "values of 64"),
        (
            replace(LAYER, spec=replace(LAYER.spec, is_chunked=True, window=8)),
            DTYPE,
            "attends within chunks",
        ),
        (LAYER, torch.float32, "needs dtype bfloat16 or float16"),
    ],
)
def test_what_flashinfer_does_not_compute_is_refused(
    layer: ProbedLayer, dtype: torch.dtype, reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=f"^attention_backend flashinfer: .*{reason}"):
        choose_attention([layer], dtype, CUDA, wanting(AttentionName.FLASHINFER))


def test_a_backend_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choose_attention([LAYER], DTYPE, CUDA, wanting(AttentionName.FLASHINFER))
    assert chosen is AttentionName.FLASHINFER
    monkeypatch.undo()
    cpu = torch.device("cpu")
    with pytest.raises(UnsupportedModel, match=r"needs a CUDA device, but the model .* on cpu"):
        choose_attention([LAYER], DTYPE, cpu, wanting(AttentionName.FLASHINFER))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedModel, match=r"not installed; run pip install flashinfer-"):
        choose_attention([LAYER], DTYPE, CUDA, wanting(AttentionName.FLASHINFER))


def test_a_library_that_cannot_be_imported_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    reason = r"^attention_backend flashinfer: its import fails \(ModuleNotFoundError"
    with pytest.raises(UnsupportedModel, match=reason):
        flashinfer()


def test_triton_is_chosen_where_it_covers_a_model() -> None:
    wide = replace(LAYER, spec=replace(LAYER.spec, head_dim=512))
    assert (
        choose_attention([LAYER], DTYPE, CUDA, wanting(AttentionName.AUTO)) is AttentionName.TRITON
    )
    assert choose_attention([wide], DTYPE, CUDA, wanting(AttentionName.AUTO)) is None
    assert choose_attention([LAYER], DTYPE, CUDA, wanting(AttentionName.TRITON_ATTN)) == "triton"
    with pytest.raises(UnsupportedModel, match=r"^attention_backend triton: .* 512 dimensions"):
        choose_attention([wide], DTYPE, CUDA, wanting(AttentionName.TRITON))


def test_names_of_vllm_are_known() -> None:
    names = {"FLASHINFER": AttentionName.FLASHINFER, "TRITON_ATTN": AttentionName.TRITON_ATTN}
    for text, name in names.items():
        config = configure(model="demo", device="cuda", attention_backend=text)
        assert config.worker.attention_backend is name
    with pytest.raises(ConfigError, match="'flash' is not one of auto, triton, triton_attn, fl"):
        configure(attention_backend="flash")
    with pytest.raises(ConfigError, match="attention_backend triton needs device cuda"):
        configure(device="cpu", attention_backend="triton")
    assert WorkerConfig().attention_backend is AttentionName.AUTO
