"""The number of slots that hold blocks in transit to or from a store."""

from protocol.config import EngineConfig
from protocol.model_facts import ModelFacts
from worker_proc.offload.service import MAX_READERS

_MAX_STAGED_BYTES = 2**28
_MIN_STAGED = 8
_MIN_STATES, _MAX_STATES = 2, 64


def num_state_slots(block_bytes: int) -> int:
    """Return the number of states in transit at a time; those to be written wait in memory."""
    return MAX_READERS + min(
        max(_MIN_STATES, _MAX_STAGED_BYTES // max(block_bytes, 1)), _MAX_STATES
    )


def num_slots(config: EngineConfig, facts: ModelFacts, block_bytes: int) -> int:
    """Return the number of blocks in transit: as many as a step fills, if memory allows it."""
    per_step = -(-config.scheduler.max_num_batched_tokens // facts.block_size)
    max_staged = max(_MIN_STAGED, _MAX_STAGED_BYTES // max(block_bytes, 1))
    return MAX_READERS + min(per_step * len(facts.kv_groups), max_staged)
