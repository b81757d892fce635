"""A whole model on the CUDA path: kernels proven at load, static decodes, tokens of `generate`."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from protocol.config import NativeDecoder
from tests.worker.checkpoints import ARCHITECTURES, Architecture, build_checkpoint
from tests.worker.cuda.interpreter import DEVICE, prepare_triton
from tests.worker.cuda.small_models import (
    GREEDY,
    MAX_TOKENS,
    NUM_DRAFTS,
    SMALL,
    make_runner,
    prove_briefly,
)
from tests.worker.cuda.triton_path import take_cuda_path
from tests.worker.driving import drive
from tests.worker.parity import generate, make_prompts
from tests.worker.runners import draft_model_of
from worker_proc.decoder import install, proof
from worker_proc.inputs import pack_step
from worker_proc.request import MirroredRequest, ScheduledRequest

prepare_triton()
from worker_proc.cuda.backend import CudaBackend  # noqa: E402

UNWRITTEN = 1e9
TRITON = {
    *("llama", "llama_tied", "qwen2", "qwen3", "mistral_window", "gemma2", "gemma3"),
    *("gemma3_vision", "granite", "olmo2", "smollm3", "glm4", "phi3"),
}
"""Families whose layers the kernels compute; of the others they compute norms and attention."""


@pytest.fixture(autouse=True)
def _cuda_path(monkeypatch: pytest.MonkeyPatch) -> None:
    take_cuda_path(monkeypatch)


def check_outputs(directory: Path, config: PretrainedConfig, decoder: str) -> None:
    model = build_checkpoint(directory, config)
    prompts = [prompt[:9] for prompt in make_prompts()[:3]]
    expected = [generate(model, prompt, MAX_TOKENS) for prompt in prompts]
    runner = make_runner(directory)
    assert (runner.facts.decoder, runner.attention) == (decoder, "Triton")
    run = drive(runner, prompts, GREEDY, max_num_batched_tokens=12, max_num_seqs=4)
    assert expected == run.output_token_ids
    assert runner._graphs is not None
    assert 4 in runner._graphs._decodes  # three requests, and a row that fills up


def test_outputs_equal_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are computed in chunks beside decodes, and decodes alone over static buffers."""
    prove_briefly(monkeypatch, 1.0)
    check_outputs(tmp_path, Qwen3Config(**SMALL), "triton")


@pytest.mark.slow
def test_every_draft_of_the_model_itself_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model's layers are proven, too, and it attends by tables of its own."""
    prove_briefly(monkeypatch, 1.0)
    model = build_checkpoint(tmp_path, Qwen3Config(**SMALL))
    prompts = [prompt[:9] for prompt in make_prompts()[:2]]
    runner = make_runner(tmp_path, draft=tmp_path)
    draft = draft_model_of(runner)
    assert isinstance(draft._backend, CudaBackend)
    assert draft._backend is not runner._backend
    assert "forward" in install.layer_modules(draft._loaded)[0].__dict__
    options = {"max_num_batched_tokens": 12, "num_speculative_tokens": NUM_DRAFTS}
    run = drive(runner, prompts, GREEDY, **options)
    assert run.output_token_ids == [generate(model, prompt, MAX_TOKENS) for prompt in prompts]
    assert run.num_accepted_drafts == run.num_drafts >= NUM_DRAFTS


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
@pytest.mark.timeout(300)
def test_outputs_of_every_family_equal_generate(architecture: Architecture, tmp_path: Path) -> None:
    decoder = "triton" if architecture.name in TRITON else "modules"
    check_outputs(tmp_path, architecture.config(), decoder)


def test_layers_are_proven_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prove_briefly(monkeypatch, 30.0)
    build_checkpoint(tmp_path, LlamaConfig(**SMALL))
    assert make_runner(tmp_path, "bfloat16").facts.decoder == "triton"


def test_a_decode_is_the_same_over_static_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool may have been released meanwhile, and rows may fill up the buffers."""
    build_checkpoint(tmp_path, LlamaConfig(**SMALL))
    runner = make_runner(tmp_path, native_decoder=NativeDecoder.OFF)
    graphs = runner._graphs
    assert graphs is not None
    requests = [MirroredRequest(i, [5 + i, 9, 11], 3, GREEDY, [[1 + i]], 0, 0) for i in range(3)]
    sleep = runner._pool.sleep

    def sleep_after_graphs() -> None:
        assert not graphs._decodes  # else their memory would stay
        sleep()

    monkeypatch.setattr(runner._pool, "sleep", sleep_after_graphs)

    def logits(start: int, size: int, *, is_static: bool) -> torch.Tensor:
        parts = [ScheduledRequest(request, start, size, True) for request in requests]
        inputs = pack_step(parts, DEVICE)
        found = graphs.compute(inputs) if is_static else None
        if found is None:
            assert not is_static or size > 1
            graphs_of, runner._graphs = runner._graphs, None
            found = runner._compute_logits(inputs)
            runner._graphs = graphs_of
        return found.clone()

    with torch.inference_mode():
        assert (
            graphs.compute(pack_step([ScheduledRequest(requests[0], 0, 2, True)], DEVICE)) is None
        )
        for _ in range(2):
            logits(0, 2, is_static=False)
            eager = logits(2, 1, is_static=False)
            torch.testing.assert_close(logits(2, 1, is_static=True), eager)
            runner._mirror.reset()
            runner.sleep()
            runner._pool.wake()
            runner._graphs = graphs


def test_rows_that_fill_a_decode_up_write_to_the_null_block_only(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, LlamaConfig(**SMALL))
    runner = make_runner(tmp_path, native_decoder=NativeDecoder.OFF)
    assert runner._graphs is not None
    requests = [MirroredRequest(i, [5, 9, 11], 3, GREEDY, [[1 + i]], 0, 0) for i in range(4)]
    for size in (4, 3):  # in the second step the last row still holds a token of the first
        for tensors in runner._pool.tensors:
            tensors.keys.fill_(UNWRITTEN)
        parts = [ScheduledRequest(request, 2, 1, True) for request in requests[:size]]
        with torch.inference_mode():
            assert runner._graphs.compute(pack_step(parts, DEVICE)) is not None
    for tensors in runner._pool.tensors:
        written = (tensors.keys != UNWRITTEN).any(dim=3).any(dim=2).nonzero().tolist()
        assert written == [[0, 0], [1, 2], [2, 2], [3, 2]]


def test_graphs_can_be_switched_off(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, LlamaConfig(**SMALL))
    runner = make_runner(tmp_path, native_decoder=NativeDecoder.OFF, enforce_eager=True)
    assert runner._graphs is None
    assert runner.facts.decoder == "modules"


def test_layers_that_compute_something_else_are_left_to_their_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prove_briefly(monkeypatch, 1.0)
    build_checkpoint(tmp_path, LlamaConfig(**SMALL))
    read = install.read_layers

    def scaled(*args: object) -> object:
        layers = read(*args)  # type: ignore[arg-type]
        return layers and [layer._replace(residual_factor=1.01) for layer in layers]

    for module in (install, proof):
        monkeypatch.setattr(module, "read_layers", scaled)
    assert make_runner(tmp_path).facts.decoder == "modules"
