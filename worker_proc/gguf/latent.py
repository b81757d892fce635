"""GGUF architectures with multi-head latent attention: DeepSeek, and those with its layers."""

from collections.abc import Mapping

from worker_proc.gguf.architecture import (
    GATING,
    LOG_MULTIPLIER,
    NORMALIZED,
    ROUTED,
    SIGMOID,
    SOFTMAX,
    Architecture,
    Config,
    before_drafts,
    check_sigmoid,
    routed,
)
from worker_proc.gguf.joins import LATENT
from worker_proc.gguf.mapped import MappedFiles
from worker_proc.gguf.metadata import Metadata
from worker_proc.gguf.rotary import rope_parameters


def gating(file: MappedFiles) -> int:
    """Return how DeepSeek's routers score experts; old files show it by the biases of scores."""
    is_biased = any(name.endswith("exp_probs_b.bias") for name in file.header.tensors)
    return Metadata(file.header).integer(GATING, SIGMOID if is_biased else SOFTMAX)


def _latent(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what models with multi-head latent attention have in common."""
    rope = rope_parameters(metadata, file)
    multiplier = metadata.number_or_none(LOG_MULTIPLIER)
    if multiplier is not None and rope["rope_type"] == "yarn":
        scale = round(10 * multiplier, 6)  # files state a tenth
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    rotated, size = metadata.integer("rope.dimension_count"), metadata.latent_size("key_length")
    if rotated >= size:
        raise metadata.unsupported("rope.dimension_count", f"less than {size}, the values of a key")
    has_queries = metadata.get("attention.q_lora_rank") is not None
    return {
        "num_key_value_heads": metadata.integer("attention.head_count"),
        "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
        "q_lora_rank": metadata.integer("attention.q_lora_rank") if has_queries else None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": size - rotated,
        "v_head_dim": metadata.latent_size("value_length"),
        "rope_parameters": rope,
        "attention_bias": False,
        **routed(metadata),
    }


def _deepseek_v3(metadata: Metadata, file: MappedFiles) -> Config:
    if metadata.integer(GATING, SIGMOID) != SIGMOID:
        raise metadata.unsupported(GATING, f"{SOFTMAX} or {SIGMOID}, softmax or sigmoid")
    return _latent(metadata, file) | {"rope_interleave": True}


def _deepseek_v2(metadata: Metadata, file: MappedFiles) -> Config:
    if metadata.flag(NORMALIZED, default=False):
        raise metadata.unsupported(NORMALIZED, f"false with {GATING} {SOFTMAX}")
    own = _latent(metadata, file)
    is_greedy = own["n_group"] == 1
    return own | {"topk_method": "greedy" if is_greedy else "group_limited_greedy"}


def _glm_dsa(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what GLM-5 has: an indexer in all layers, or in those that files state."""
    check_sigmoid(metadata)
    kinds = ["full" if own else "shared" for own in _own_indexers(metadata)]
    return _latent(metadata, file) | {
        "index_n_heads": metadata.integer("attention.indexer.head_count"),
        "index_head_dim": metadata.integer("attention.indexer.key_length"),
        "index_topk": metadata.integer("attention.indexer.top_k"),
        "indexer_types": kinds,
    }


def _own_indexers(metadata: Metadata) -> list[bool]:
    """Return for each layer whether its indexer is its own, and not that of a layer before."""
    count = before_drafts(metadata)
    stated = metadata.get(_INDEXERS)
    if stated is None:
        is_late = metadata.integer("context_length") >= _LENGTH_OF_SHARED_INDEXERS
        stated = [not is_late or _has_own_indexer(number) for number in range(count)]
    is_list = isinstance(stated, list) and all(isinstance(one, bool) for one in stated)
    if not is_list or len(stated) < count or not stated[0]:
        raise metadata.unsupported(_INDEXERS, f"true or false for each of {count} layers")
    return list(stated[:count])


def _unused_indexers(metadata: Metadata) -> frozenset[str]:
    """Return the tensors of indexers in layers that share one; some files of GLM-5.2 have them."""
    parts = ("attn_k.weight", "attn_q_b.weight", "k_norm.weight", "k_norm.bias", "proj.weight")
    shared = [number for number, own in enumerate(_own_indexers(metadata)) if not own]
    return frozenset(f"blk.{number}.indexer.{part}" for number in shared for part in parts)


def _has_own_indexer(number: int) -> bool:
    """Return whether a layer of GLM-5.2 has an indexer of its own."""
    return number < 2 or number % 4 == 2


def _minicpm3(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what MiniCPM3 has; llama.cpp has fixed its scales, which files do not state."""
    size, rotated = (
        metadata.integer("attention.key_length"),
        metadata.integer("rope.dimension_count"),
    )
    if rotated >= size:
        raise metadata.unsupported("rope.dimension_count", f"less than {size}, the values of a key")
    width, heads = metadata.integer("embedding_length"), metadata.integer("attention.head_count")
    return {
        "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
        "q_lora_rank": metadata.integer("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": size - rotated,
        "v_head_dim": metadata.integer("attention.value_length", width // heads),
        "rope_parameters": rope_parameters(metadata, file),
        **_MINICPM3_SCALES,
    }


_INDEXERS = "attention.indexer.types"
_LENGTH_OF_SHARED_INDEXERS = 2**20
"""The context of GLM-5.2, in which layers share indexers if a file does not state which."""
_MINICPM3_SCALES = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
ATTENTION = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_LATENT = ROUTED | ATTENTION
_INDEXED = _LATENT | {
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}

DEEPSEEK_V2 = Architecture(
    "deepseek_v2", "DeepseekV2ForCausalLM", _deepseek_v2, _LATENT, joins=LATENT, drops_drafts=True
)
"""Files state deepseek2, as those of DeepSeek-V3 do, and score experts by softmax."""
DEEPSEEK_V3 = Architecture(
    "deepseek_v3", "DeepseekV3ForCausalLM", _deepseek_v3, _LATENT, joins=LATENT, drops_drafts=True
)
LATENTS: Mapping[str, Architecture] = {
    "deepseek2": DEEPSEEK_V3,
    "glm-dsa": Architecture(
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        _glm_dsa,
        _INDEXED,
        joins=LATENT,
        drops_drafts=True,
        unused=_unused_indexers,
    ),
    "minicpm3": Architecture("minicpm3", "MiniCPM3ForCausalLM", _minicpm3, ATTENTION),
}
"""The architectures, by `general.architecture`."""
