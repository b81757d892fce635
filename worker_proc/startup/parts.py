"""Chooses the parts of a runner for a model and its device."""

from typing import TYPE_CHECKING

from protocol.config import AttentionName, EngineConfig, WorkerConfig
from protocol.model_facts import ModelFacts
from worker_proc.attention.compressed_backend import CompressedBackend
from worker_proc.attention.interface import AttentionBackend
from worker_proc.attention.native import NativeBackend, can_attend
from worker_proc.attention.no_attention import NoAttention
from worker_proc.attention.sdpa import Rule, SdpaBackend
from worker_proc.attention.texts import PortableTextBackend, TextBackend
from worker_proc.cuda.coverage import choose_attention
from worker_proc.cuda.device import uses_triton
from worker_proc.errors import UnsupportedModel
from worker_proc.kv import kv_tensors
from worker_proc.kv.kv_format import FORMATS, KVFormat
from worker_proc.kv.kv_groups import KVLayout, lay_out
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.native.kernels import NativeLibrary
from worker_proc.parallel.device_group import DeviceGroup
from worker_proc.parallel.share import Share
from worker_proc.sampling.sampler import MakeChoice, Sampler

if TYPE_CHECKING:
    from worker_proc.cuda.backend import CudaBackend, StepAttention
    from worker_proc.cuda.rank_group import RankGroup
    from worker_proc.cuda.steps_ahead import StepsAhead


def make_layout(loaded: LoadedModel, config: EngineConfig) -> KVLayout:
    """Group the layers that share block tables; with pipeline stages, all layers are one group."""
    format = FORMATS[config.cache.kv_cache_dtype]
    has_one_stage = config.parallel.pipeline_parallel_size == 1
    hybrid = config.cache.enable_hybrid_kv_cache and loaded.is_causal and has_one_stage
    return _lay_out(loaded, config, hybrid=hybrid, format=format)


def make_draft_layout(draft: LoadedModel, config: EngineConfig) -> KVLayout:
    """Put all layers in one group, which follows the tables of one group of the model.

    Its keys and values are not coded.
    """
    return _lay_out(draft, config, hybrid=False, format=KVFormat.PLAIN)


def _lay_out(
    loaded: LoadedModel, config: EngineConfig, *, hybrid: bool, format: KVFormat
) -> KVLayout:
    return lay_out(
        [layer.spec for layer in loaded.layers],
        config.cache.block_size,
        config.scheduler.max_num_batched_tokens,
        config.model.max_model_len or loaded.model_len,
        hybrid,
        format=format,
        has_attention=loaded.has_attention,
        has_states=loaded.has_states,
    )


def block_bytes_of(loaded: LoadedModel, layout: KVLayout) -> int:
    """Return the bytes of one block in all tensors of a group."""
    specs = [layer.spec for layer in loaded.layers]
    return kv_tensors.block_bytes_of(specs, layout, loaded.dtype)


def make_backend(
    loaded: LoadedModel,
    layout: KVLayout,
    library: NativeLibrary | None,
    worker: WorkerConfig | None = None,
) -> AttentionBackend:
    """Return the backend whose kernels support the layers, or the portable one.

    Raises UnsupportedModel if the backend that the settings require on CUDA does not support them.
    """
    worker = worker or WorkerConfig()
    specs = [layer.spec for layer in loaded.layers]
    if not specs:
        return NoAttention(has_kernels=library is not None)
    if not loaded.is_causal:
        if library is not None and can_attend(specs, loaded.dtype, loaded.device):
            return TextBackend(library, loaded.dtype)
        return PortableTextBackend()
    windows = [group.window for group in layout.groups]
    if any(spec.compressed is not None for spec in specs):
        assert library is not None  # such a model is refused without it
        return CompressedBackend(library, layout.block_size, loaded.dtype, specs, windows)
    if library is not None and can_attend(specs, loaded.dtype, loaded.device):
        return NativeBackend(
            library, layout.block_size, loaded.dtype, specs, windows, format=layout.format
        )
    if layout.format is not KVFormat.PLAIN:
        dtype = str(loaded.dtype).removeprefix("torch.")
        raise UnsupportedModel(
            f"kv_cache_dtype {layout.format.config_name} needs the native attention kernel, which"
            f" does not cover this model's heads in {dtype}"
        )
    chosen = choose_attention(loaded.layers, loaded.dtype, loaded.device, worker)
    if chosen is not None:
        return _make_cuda_backend(loaded, layout, chosen, worker)
    rules = {
        Rule(number, specs[index].window, specs[index].is_chunked)
        for number, group in enumerate(layout.groups)
        for index in group.layers
    }
    return SdpaBackend(rules, layout.block_size, loaded.dtype, loaded.device)


def _make_cuda_backend(
    loaded: LoadedModel, layout: KVLayout, chosen: AttentionName, worker: WorkerConfig
) -> "CudaBackend":
    from worker_proc.cuda.attention import TritonAttention
    from worker_proc.cuda.backend import CudaBackend

    size, device = layout.block_size, loaded.device
    attention: StepAttention
    if chosen is AttentionName.FLASHINFER:
        from worker_proc.cuda.flashinfer_attention import FlashInferAttention

        max_blocks = -(-loaded.model_len // size)
        attention = FlashInferAttention(size, max_blocks, loaded.dtype, device)
    else:
        specs = [layer.spec for layer in loaded.layers]
        exact = worker.batch_invariant
        attention = TritonAttention(specs, device, is_batch_invariant=exact)
    return CudaBackend(len(layout.groups), size, device, attention)


def make_sampler(
    loaded: LoadedModel, library: NativeLibrary | None, like: ModelFacts | None = None
) -> Sampler:
    """Return the sampler of a model's logits; `like`, if given, defines the tokens."""
    tokens = loaded if like is None else like
    make_choice: MakeChoice | None = None
    if uses_triton(loaded.device):
        from worker_proc.cuda.choice import TritonChoice

        make_choice = TritonChoice
    return Sampler(tokens.vocab_size, tokens.eos_token_ids, loaded.device, library, make_choice)


def make_steps_ahead(
    loaded: LoadedModel,
    backend: AttentionBackend,
    facts: ModelFacts,
    config: EngineConfig,
    group: DeviceGroup | None,
) -> "StepsAhead | None":
    """Return the runner of steps that do not involve the host, or None if the host takes part.

    Its decode graphs are not captured yet. `group` compares the tokens of several ranks.
    """
    if not uses_triton(loaded.device):
        return None
    from worker_proc.cuda.backend import CudaBackend
    from worker_proc.cuda.device_sampler import DeviceSampler
    from worker_proc.cuda.graphs import MAX_SIZE, DecodeGraphs
    from worker_proc.cuda.steps_ahead import StepsAhead

    if not isinstance(backend, CudaBackend):
        return None
    max_num_seqs, vocab_size = config.scheduler.max_num_seqs, facts.vocab_size
    sampler = DeviceSampler(backend, vocab_size, max(max_num_seqs, MAX_SIZE))
    graphs = None
    if not config.worker.enforce_eager:
        graphs = DecodeGraphs(
            loaded.model,
            backend,
            sampler,
            max_num_seqs=max_num_seqs,
            max_model_len=facts.max_model_len,
            block_size=facts.block_size,
            vocab_size=vocab_size,
            is_divided=config.parallel.num_ranks > 1,
        )
    return StepsAhead(loaded.model, backend, vocab_size, sampler, graphs=graphs, group=group)


def make_rank_group(loaded: LoadedModel, share: Share, timeout_s: float) -> "RankGroup | None":
    """Return the group that sums the rows of ranks on their GPUs; None: ranks use host memory."""
    if not uses_triton(loaded.device):
        return None
    from worker_proc.cuda.rank_group import RankGroup

    return RankGroup(share, loaded.device, timeout_s=timeout_s)
