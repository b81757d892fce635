"""Creates the draft model of a runner, with its KV cache and its blocks in stores."""

from protocol.config import EngineConfig
from protocol.model_facts import ModelFacts
from worker_proc.decoder.install import install
from worker_proc.drafting.draft_model import DraftCache, DraftModel
from worker_proc.drafting.draft_model_states import DraftModelStates
from worker_proc.forward import attach_cache
from worker_proc.loading.checkpoint_identity import checkpoint_identity
from worker_proc.loading.draft import group_without_window
from worker_proc.loading.prepared import PreparedModel
from worker_proc.offload.drafts import DraftBlocks
from worker_proc.offload.layout import describe_draft
from worker_proc.offload.memory import NoMemory
from worker_proc.offload.slots import num_slots
from worker_proc.offload.staging import PoolMemory
from worker_proc.startup.cache_size import num_all_spare_blocks
from worker_proc.startup.calibrate import Calibration
from worker_proc.startup.parts import block_bytes_of, make_backend, make_draft_layout, make_sampler


def build_draft_model(
    prepared: PreparedModel,
    config: EngineConfig,
    calibration: Calibration,
    facts: ModelFacts,
    *,
    num_states: int,
) -> tuple[DraftModel | None, DraftBlocks | None]:
    """Return the draft model with its KV cache, and its blocks in the form that stores use.

    The cache has the blocks of the model and some spare ones. `num_states` is the number of state
    blocks, if the draft model has recurrent layers. Returns None for what is not configured.
    """
    if prepared.draft is None:
        return None, None
    own = prepared.of_draft(prepared.draft)
    loaded = own.loaded
    layout = make_draft_layout(loaded, config)
    backend = make_backend(loaded, layout, own.kernels)
    num_blocks = facts.num_gpu_blocks + num_all_spare_blocks(config)
    pool = attach_cache(loaded, backend, layout, num_blocks, num_state_blocks=num_states)
    install(own, calibration.draft_decoder, is_whole=calibration.draft_is_whole)
    group = group_without_window(facts.kv_groups)
    states = None
    if loaded.has_states:
        cache, block_size = config.cache, facts.block_size
        spacing = cache.snapshot_spacing(block_size) if cache.enable_prefix_caching else None
        states = DraftModelStates(num_states, block_size, spacing)
    num_spare = num_all_spare_blocks(config) // config.scheduler.max_num_seqs
    draft_model = DraftModel(
        loaded,
        backend,
        DraftCache(pool, group, num_spare, states),
        make_sampler(loaded, own.kernels, facts),
        facts,
        max_tokens=config.scheduler.max_num_batched_tokens,
    )
    if not facts.kv_layout:
        return draft_model, None
    if loaded.has_states:
        none = NoMemory(num_slots(config, facts, 0))
        return draft_model, DraftBlocks(none, draft_model, group, None)
    memory = PoolMemory(pool, num_slots(config, facts, block_bytes_of(loaded, layout)))
    path = str(config.model.speculative_model)
    name = describe_draft(checkpoint_identity(path) or path, backend.name, pool.all_tensors)
    return draft_model, DraftBlocks(memory, draft_model, group, name)
