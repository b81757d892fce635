"""Names what the bytes of a KV block stand for, so that only equal workers share blocks."""

import hashlib
import logging
from collections.abc import Sequence

import msgspec
import torch

from protocol.config import EngineConfig
from protocol.core_worker import ModelFacts
from worker_proc.kv.kv_groups import Place
from worker_proc.offload.service import MAX_READERS

_MOST_STAGED_BYTES = 2**28
_LEAST_STAGED = 8
_LEAST_STATES, _MOST_STATES = 2, 64
_NAME_BYTES = 8

log = logging.getLogger("troika.worker")


def with_layout(
    facts: ModelFacts,
    config: EngineConfig,
    tensors: Sequence[torch.Tensor],
    kernels: str,
    *,
    division: str = "",
    states: Sequence[torch.Tensor] = (),
    places: Sequence[Place] = (),
) -> ModelFacts:
    """Add the layout of the blocks, if they can be kept in stores and are to be kept.

    `division`: which layers each of several stages has. It stands for the tensors, which are others
    in each stage. All ranks of a stage have the same layout. `states`: tensors of recurrent
    states, of which a block has a row in each, too. `places`: of layers that share a tensor, within
    a block of it.
    """
    if not config.cache.keeps_blocks:
        return facts
    if facts.computes_whole_prompts or not (tensors or states or division):
        log.warning("KV blocks are kept in no store: prompts that are computed whole need none")
        return facts
    shapes = _shapes("", tensors) + _shapes("state ", states)
    parts = [
        facts.checkpoint or facts.model,
        *(facts.dtype, facts.kv_cache_dtype, facts.quantization, facts.decoder, facts.build),
        str(facts.block_size),
        msgspec.json.encode(facts.kv_groups).decode(),
        kernels,
        *([division] if division else shapes),
        *(f"place {place.group} {place.rows_at} {place.entries_at}" for place in places),
    ]
    name = hashlib.blake2b("\n".join(parts).encode(), digest_size=_NAME_BYTES).hexdigest()
    return msgspec.structs.replace(facts, kv_layout=name)


def describe_draft(checkpoint: str, backend: str, tensors: Sequence[torch.Tensor]) -> str:
    """Return what a draft model's blocks depend on besides what the layout of the model's names."""
    return "\n".join([checkpoint, backend, *_shapes("", tensors)])


def _shapes(prefix: str, tensors: Sequence[torch.Tensor]) -> list[str]:
    return [f"{prefix}{tuple(tensor.shape[1:])} {tensor.dtype}" for tensor in tensors]


def num_state_slots(block_bytes: int) -> int:
    """Return the states on their way at a time, of which those to be written wait in memory."""
    return MAX_READERS + min(
        max(_LEAST_STATES, _MOST_STAGED_BYTES // max(block_bytes, 1)), _MOST_STATES
    )


def num_slots(config: EngineConfig, facts: ModelFacts, block_bytes: int) -> int:
    """Return the blocks on their way at a time: as many as a step fills, if memory allows it."""
    per_step = -(-config.scheduler.max_num_batched_tokens // facts.block_size)
    most = max(_LEAST_STAGED, _MOST_STAGED_BYTES // max(block_bytes, 1))
    return MAX_READERS + min(per_step * len(facts.kv_groups), most)
