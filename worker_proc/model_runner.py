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
from worker_proc.attention.gathering import GatheringBackend, Rule
from worker_proc.attention.interface import AttentionBackend
from worker_proc.attention.native import NativeBackend, can_attend
from worker_proc.errors import CheckpointError, InsufficientMemory
from worker_proc.forward import attach_cache, compute_logits
from worker_proc.fused import fuse_modules
from worker_proc.inputs import StepInputs, pack_step
from worker_proc.kv_groups import KVLayout, lay_out
from worker_proc.kv_pool import KVPool
from worker_proc.loader import LoadedModel, Progress, load_model
from worker_proc.memory import available_cache_bytes, free_host_bytes
from worker_proc.mirror import Mirror
from worker_proc.native.build import start_building
from worker_proc.native.kernels import NativeLibrary, load_library
from worker_proc.packed_linear import can_pack, pack_linears
from worker_proc.sampler import Sampler
from worker_proc.self_check import check_forward, num_blocks_needed
from worker_proc.swap_cost import measure_swap_cost

_log = logging.getLogger(__name__)


class ModelRunner:
    """Executes steps with a loaded model and its KV pool."""

    def __init__(
        self,
        loaded: LoadedModel,
        facts: ModelFacts,
        backend: AttentionBackend,
        pool: KVPool,
        swap_cost_tokens: float,
    ) -> None:
        """Take a model whose attention modules are attached to `backend` and `pool`."""
        self._model = loaded.model
        self._device = loaded.device
        self._facts = facts
        self._backend = backend
        self._pool = pool
        self._sampler = Sampler(facts.vocab_size, facts.eos_token_ids, loaded.device)
        self._mirror = Mirror(facts)
        self._swap_cost_tokens = swap_cost_tokens

    @property
    def facts(self) -> ModelFacts:
        """What the core must know before its first step."""
        return self._facts

    @property
    def swap_cost_tokens(self) -> float:
        """As measured when the model was loaded."""
        return self._swap_cost_tokens

    def reset(self) -> None:
        """Forget every request; the pool's content stays, and nobody may rely on it."""
        self._mirror.reset()

    def sleep(self) -> None:
        """Give the memory of the KV back until the next step; see `Runner`."""
        self._mirror.check_empty()
        self._pool.sleep()

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step; see `Runner`."""
        began_ns = time.perf_counter_ns()
        scheduled = self._mirror.apply(step)
        self._pool.swap(step.swap_out, step.swap_in)
        if not scheduled:
            return ModelRunnerOutput(step.step_id, [])
        self._pool.wake()
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
    layout = make_layout(loaded, config)
    backend = make_backend(loaded, layout, library)
    attach_cache(loaded, backend, layout, num_blocks_needed(layout))
    check_forward(loaded, backend, layout)
    specs = [loaded.layers[index].spec for index in layout.tensor_layers]
    block_bytes = kv_tensors.bytes_per_block(specs, layout.block_size, loaded.dtype)
    size = kv_tensors.size_cache(
        available_bytes=available_cache_bytes(loaded, backend, layout, config),
        block_bytes=block_bytes,
        layout=layout,
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
    num_host_blocks = count_host_blocks(config.cache.swap_space_bytes, block_bytes)
    swap_cost_tokens = measure_swap_cost(loaded, backend, layout) if num_host_blocks else 0.0
    facts = ModelFacts(
        model=config.model.model,
        vocab_size=loaded.vocab_size,
        max_model_len=size.max_model_len,
        block_size=layout.block_size,
        num_gpu_blocks=size.num_blocks,
        eos_token_ids=loaded.eos_token_ids,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=loaded.device.type,
        kv_groups=layout.kv_groups(),
        num_host_blocks=num_host_blocks,
    )
    pool = attach_cache(loaded, backend, layout, facts.num_gpu_blocks, facts.num_host_blocks)
    progress("allocate_cache", 1, 1)
    return ModelRunner(loaded, facts, backend, pool, swap_cost_tokens)


def count_host_blocks(swap_space_bytes: int, block_bytes: int) -> int:
    """Return how many blocks the host can keep.

    Raises:
        InsufficientMemory: the host does not have that much; names the setting and what there is.
    """
    free = free_host_bytes()
    if swap_space_bytes > free:
        raise InsufficientMemory(
            f"swap_space_bytes {swap_space_bytes} is more than the {free} bytes of free memory"
        )
    return swap_space_bytes // block_bytes


def make_layout(loaded: LoadedModel, config: EngineConfig) -> KVLayout:
    """Decide which layers share block tables."""
    return lay_out(
        [layer.spec for layer in loaded.layers],
        config.cache.block_size,
        config.scheduler.max_num_batched_tokens,
        config.model.max_model_len or loaded.model_len,
        config.cache.enable_hybrid_kv_cache,
    )


def make_backend(
    loaded: LoadedModel, layout: KVLayout, library: NativeLibrary | None
) -> AttentionBackend:
    """Choose how attention is computed: by the native kernel where there is one."""
    specs = [layer.spec for layer in loaded.layers]
    if library is not None and can_attend(specs, loaded.dtype, loaded.device):
        return NativeBackend(library, layout.block_size, loaded.dtype, layout.windows)
    rules = {
        Rule(number, specs[index].window)
        for number, group in enumerate(layout.groups)
        for index in group.layers
    }
    return GatheringBackend(rules, layout.block_size, loaded.dtype, loaded.device)


def resolve_device(name: str) -> torch.device:
    """Return the device that `name` ("auto", "cpu", "cuda") stands for."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
