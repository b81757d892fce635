"""The facts of a loaded and checked model, which its worker announces to the core."""

from protocol.config import EngineConfig, Quantization
from protocol.model_facts import ModelFacts
from worker_proc.kv.kv_groups import KVLayout
from worker_proc.kv.kv_tensors import CacheSize
from worker_proc.loading.draft import describe_speculation
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.loading.model_kind import ModelKind
from worker_proc.loading.prepared import PreparedModel
from worker_proc.modules.weight_formats import WEIGHT_FORMATS
from worker_proc.recurrent.state_spec import state_bytes
from worker_proc.startup.build import describe_build, kernels_of
from worker_proc.startup.calibrate import Calibration
from worker_proc.startup.parts import block_bytes_of
from worker_proc.startup.swap_space import share_swap_space


def facts_of(
    prepared: PreparedModel,
    config: EngineConfig,
    calibration: Calibration,
    layout: KVLayout,
    size: CacheSize,
) -> ModelFacts:
    """Return the facts of a model that serves with this layout and size of its cache.

    Raises InsufficientMemory if the swap space exceeds the free memory.
    """
    loaded, exactness = prepared.loaded, calibration.exactness
    head = loaded.head
    num_labels = head.num_outputs if head and loaded.kind is ModelKind.CLASSIFIES else 0
    swap = share_swap_space(
        config.cache.swap_space_bytes,
        block_bytes_of(loaded, layout),
        state_bytes(loaded.recurrent, loaded.dtype),
        size,
        has_attention=loaded.has_attention,
        has_states=loaded.has_states,
    )
    return ModelFacts(
        model=config.model.model,
        vocab_size=loaded.vocab_size,
        max_model_len=size.max_model_len,
        block_size=layout.block_size,
        num_gpu_blocks=size.num_blocks,
        eos_token_ids=loaded.eos_token_ids,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=loaded.device.type,
        kv_groups=layout.kv_groups(),
        num_host_blocks=swap.num_blocks,
        exact_resume=exactness.holds,
        exact_resume_reason=exactness.reason,
        embedding_size=calibration.embedding_size if head is None else head.num_outputs,
        decoder=prepared.executor.name if prepared.executor and calibration.decoder else "modules",
        speculation=describe_speculation(config),
        quantization=_describe_codes(loaded, config.model.quantization),
        kv_cache_dtype=layout.format.config_name,
        generates=loaded.kind is ModelKind.GENERATES,
        computes_whole_prompts=not loaded.is_causal,
        num_labels=num_labels,
        default_pooling=loaded.pooling,
        num_state_blocks=size.num_state_blocks,
        num_host_state_blocks=swap.num_states,
        state_swap_blocks=swap.state_cost_blocks,
        checkpoint=prepared.checkpoint,
        build=describe_build(prepared, config),
        kernels=kernels_of(prepared) if exactness.holds else "",
        tokenizer=prepared.files.tokenizer,
        weights=prepared.files.weights,
    )


def _describe_codes(loaded: LoadedModel, quantization: Quantization | None) -> str:
    """Describe the codes of the weights in memory, in words; empty: there are none."""
    if loaded.codes is None:
        return quantization or ""
    if quantization is None:
        return loaded.codes.description
    head = f"output layer {WEIGHT_FORMATS[quantization].head.name.lower()}"
    return ", ".join(filter(None, (loaded.codes.description, head)))
