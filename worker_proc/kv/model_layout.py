"""The layout of a model's KV cache, and the bytes of its blocks."""

from protocol.config import EngineConfig
from worker_proc.errors import InsufficientMemory
from worker_proc.kv import kv_tensors
from worker_proc.kv.kv_groups import KVLayout, lay_out
from worker_proc.loading.host_limits import available_memory
from worker_proc.loading.loader import LoadedModel


def make_layout(loaded: LoadedModel, config: EngineConfig) -> KVLayout:
    """Group the layers that share block tables."""
    return _lay_out(loaded, config, hybrid=config.cache.enable_hybrid_kv_cache)


def make_draft_layout(draft: LoadedModel, config: EngineConfig) -> KVLayout:
    """Put all layers in one group, which follows the tables of one group of the model."""
    return _lay_out(draft, config, hybrid=False)


def _lay_out(loaded: LoadedModel, config: EngineConfig, *, hybrid: bool) -> KVLayout:
    return lay_out(
        [layer.spec for layer in loaded.layers],
        config.cache.block_size,
        config.scheduler.max_num_batched_tokens,
        config.model.max_model_len or loaded.model_len,
        hybrid,
    )


def block_bytes_of(loaded: LoadedModel, layout: KVLayout) -> int:
    """Return the bytes of one block in all tensors of a group."""
    specs = [loaded.layers[index].spec for index in layout.tensor_layers]
    return kv_tensors.bytes_per_block(specs, layout.block_size, loaded.dtype)


def count_host_blocks(swap_space_bytes: int, block_bytes: int) -> int:
    """Return the number of blocks that the swap space holds; it must fit in free memory."""
    free = available_memory()
    if swap_space_bytes > free:
        raise InsufficientMemory(
            f"swap_space_bytes {swap_space_bytes} is more than the {free} bytes of free memory"
        )
    return swap_space_bytes // block_bytes
