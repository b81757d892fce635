"""Names the meaning of a KV block's bytes, so that only equal workers share blocks."""

import hashlib
import logging
from collections.abc import Sequence

import msgspec
import torch

from protocol.config import EngineConfig
from protocol.model_facts import ModelFacts
from worker_proc.kv.kv_groups import Place

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
    """Add the layout of the blocks, if they can be kept in stores and are configured to be.

    `division` describes the layers of each stage, if there are several. It replaces the tensors,
    which differ between stages, because all ranks must have the same layout. `states` are tensors
    of recurrent states, in each of which a state block has a row. `places` are those of layers that
    share a tensor, within a block of it.
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
    """Return what a draft model's blocks depend on in addition to the model's layout."""
    return "\n".join([checkpoint, backend, *_shapes("", tensors)])


def _shapes(prefix: str, tensors: Sequence[torch.Tensor]) -> list[str]:
    return [f"{prefix}{tuple(tensor.shape[1:])} {tensor.dtype}" for tensor in tensors]
