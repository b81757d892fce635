"""The runner that computes: packs a step, runs the model over the paged cache, samples."""

import logging
import os
import time

import torch

from protocol.config import EngineConfig
from protocol.core_worker import (
    ModelFacts,
    ModelRunnerOutput,
    PromptLogprobs,
    SchedulerOutput,
    TokenLogprobs,
)
from worker_proc import kv_tensors
from worker_proc.attention.gathering import GatheringBackend
from worker_proc.attention.interface import AttentionBackend
from worker_proc.attention.native import NativeBackend, can_attend
from worker_proc.errors import CheckpointError
from worker_proc.forward import attach_cache, compute_logits
from worker_proc.fused import fuse_modules
from worker_proc.inputs import StepInputs, pack_step
from worker_proc.loader import LoadedModel, Progress, load_model
from worker_proc.memory import available_cache_bytes
from worker_proc.mirror import Mirror
from worker_proc.native.build import start_building
from worker_proc.native.kernels import NativeLibrary, load_library
from worker_proc.packed_linear import can_pack, pack_linears
from worker_proc.sampler import Sampler
from worker_proc.self_check import check_forward, num_blocks_needed

_log = logging.getLogger(__name__)


class ModelRunner:
    """Executes steps with a loaded model and its KV pool."""

    def __init__(self, loaded: LoadedModel, facts: ModelFacts, backend: AttentionBackend) -> None:
        """Take a model whose attention modules are attached to `backend`."""
        self._model = loaded.model
        self._device = loaded.device
        self._facts = facts
        self._backend = backend
        self._sampler = Sampler(facts.vocab_size, facts.eos_token_ids, loaded.device)
        self._mirror = Mirror(
            facts.block_size, facts.num_gpu_blocks, facts.max_model_len, facts.vocab_size
        )

    @property
    def facts(self) -> ModelFacts:
        """What the core must know before its first step."""
        return self._facts

    def reset(self) -> None:
        """Forget every request; the pool's content stays, and nobody may rely on it."""
        self._mirror.reset()

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step; see `Runner`."""
        began_ns = time.perf_counter_ns()
        scheduled = self._mirror.apply(step)
        if not scheduled:
            return ModelRunnerOutput(step.step_id, [])
        inputs = pack_step(scheduled, self._facts.block_size, self._device)
        logits = compute_logits(self._model, self._backend, inputs, self._facts.vocab_size)
        sampled, logprobs = self._sample(inputs, logits)
        prompt_logprobs = self._prompt_logprobs(inputs, logits)
        self._mirror.advance(scheduled, sampled)
        forward_ns = time.perf_counter_ns() - began_ns
        return ModelRunnerOutput(step.step_id, sampled, logprobs, prompt_logprobs, forward_ns)

    def _sample(
        self, inputs: StepInputs, logits: torch.Tensor
    ) -> tuple[list[int], dict[int, TokenLogprobs]]:
        ranges = [entry for entry in inputs.logits_ranges if entry.part.samples]
        if not ranges:
            return [], {}
        if len(ranges) != len(logits):
            rows = [entry.first_row + entry.num_prompt_rows for entry in ranges]
            logits = logits[torch.tensor(rows, device=logits.device)]
        requests = [entry.part.request for entry in ranges]
        sampled = self._sampler.sample(logits, requests)
        pairs = zip(requests, sampled.logprobs, strict=True)
        return sampled.token_ids, {
            request.req_id: entry for request, entry in pairs if entry is not None
        }

    def _prompt_logprobs(self, inputs: StepInputs, logits: torch.Tensor) -> list[PromptLogprobs]:
        found = []
        for part, first_row, num_rows in inputs.logits_ranges:
            num_top = part.request.sampling_params.prompt_logprobs
            if num_top is None or num_rows == 0:
                continue
            first = part.start + 1
            entries = self._sampler.prompt_logprobs(
                logits[first_row : first_row + num_rows],
                part.request.token_ids[first : first + num_rows],
                num_top,
            )
            found.append(PromptLogprobs(part.request.req_id, first, entries))
        return found


def load_model_runner(config: EngineConfig, progress: Progress) -> ModelRunner:
    """Load the configured checkpoint and size its KV cache.

    Args:
        config: of the engine.
        progress: called with (phase, done, total) in the phases "inspect", "load_weights",
            "pack_weights" and "allocate_cache".

    Raises:
        CheckpointError: a file or tensor is missing, or max_model_len is beyond the model's.
        UnsupportedModel: the model cannot be computed correctly here.
        InsufficientMemory: the KV cache cannot hold max_model_len.
    """
    device = resolve_device(config.model.device)
    if device.type == "cpu":
        start_building()
    torch.set_num_threads(config.worker.num_threads or len(os.sched_getaffinity(0)))
    loaded = load_model(config.model.model, config.model.dtype, device, progress)
    wanted_len = config.model.max_model_len
    if wanted_len is not None and wanted_len > loaded.model_len:
        raise CheckpointError(
            f"max_model_len {wanted_len} is greater than the {loaded.model_len} tokens"
            f" that {config.model.model} can compute"
        )
    library = load_library() if device.type == "cpu" else None
    if can_pack(loaded.dtype, device):
        progress("pack_weights", 0, 1)
        if library is not None:
            fuse_modules(loaded.model, library, loaded.dtype)
        pack_linears(loaded.model, lambda done, total: progress("pack_weights", done, total))
    return build_runner(loaded, config, library, progress)


def build_runner(
    loaded: LoadedModel, config: EngineConfig, library: NativeLibrary | None, progress: Progress
) -> ModelRunner:
    """Size and allocate the KV cache of a loaded model, connect the two, and check them."""
    progress("allocate_cache", 0, 1)
    specs = [layer.spec for layer in loaded.layers]
    block_size = config.cache.block_size
    backend = make_backend(loaded, block_size, library)
    attach_cache(loaded, backend, num_blocks_needed(block_size))
    check_forward(loaded, backend, block_size)
    size = kv_tensors.size_cache(
        available_bytes=available_cache_bytes(loaded, backend, config),
        block_bytes=kv_tensors.bytes_per_block(specs, block_size, loaded.dtype),
        block_size=block_size,
        model_len=loaded.model_len,
        max_model_len=config.model.max_model_len,
        num_blocks_override=config.cache.num_gpu_blocks_override,
    )
    if config.model.max_model_len is None and size.max_model_len < loaded.model_len:
        _log.warning(
            "max_model_len is %d instead of the model's %d: the KV cache holds no more",
            size.max_model_len,
            loaded.model_len,
        )
    attach_cache(loaded, backend, size.num_blocks)
    facts = ModelFacts(
        model=config.model.model,
        vocab_size=loaded.vocab_size,
        max_model_len=size.max_model_len,
        block_size=block_size,
        num_gpu_blocks=size.num_blocks,
        eos_token_ids=loaded.eos_token_ids,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=loaded.device.type,
    )
    progress("allocate_cache", 1, 1)
    return ModelRunner(loaded, facts, backend)


def make_backend(
    loaded: LoadedModel, block_size: int, library: NativeLibrary | None
) -> AttentionBackend:
    """Choose how attention is computed: by the native kernel where there is one."""
    specs = [layer.spec for layer in loaded.layers]
    if library is not None and can_attend(specs, loaded.dtype, loaded.device):
        return NativeBackend(library, block_size, loaded.dtype)
    windows = {spec.window for spec in specs}
    return GatheringBackend(windows, block_size, loaded.dtype, loaded.device)


def resolve_device(name: str) -> torch.device:
    """Return the device that `name` ("auto", "cpu", "cuda") stands for."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
