"""GGUF architectures of Gemma, whose embeddings are scaled by the root of their size."""

import math
from collections.abc import Mapping

from worker_proc.errors import UnsupportedModel
from worker_proc.gguf.architecture import (
    KV_HEADS,
    LOCAL_BASE,
    WINDOW,
    Architecture,
    Config,
    has_tensor,
    rotated_heads,
    window_layers,
)
from worker_proc.gguf.config_tensors import FREQUENCY_FACTORS
from worker_proc.gguf.joins import GATES_AND_FACTORS, Rows
from worker_proc.gguf.mapped import MappedFiles
from worker_proc.gguf.metadata import Metadata
from worker_proc.gguf.rotary import check_unscaled, rope_parameters

_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62
"""The layers of the models whose factor on queries does not follow from their head size."""
_USUAL_LOCAL_BASE = 10_000.0
_SHARED_LAYERS = "attention.shared_kv_layers"
_GEMMA3N_OWN_LAYERS = 20
"""The number of layers of Gemma-3n that have separate keys and values."""
_PER_LAYER = "embedding_length_per_layer_input"
_UNROTATED = 1e30
"""The divisor in files for the frequencies of values that are not rotated."""
_SPARSITY_DIGITS = 6


def _gemma(metadata: Metadata, file: MappedFiles) -> Config:
    return rotated_heads(metadata) | {"hidden_activation": "gelu_pytorch_tanh"}


def _scaled_queries(metadata: Metadata, num_layers: int) -> Config:
    """Return by what queries are scaled, which one size of model has of its own."""
    scalar = metadata.head_size()
    if metadata.integer("block_count") == num_layers:
        heads = metadata.integer("attention.head_count")
        scalar = metadata.integer("embedding_length") // heads
    return {"query_pre_attn_scalar": scalar}


def _gemma2(metadata: Metadata, file: MappedFiles) -> Config:
    return {
        **_gemma(metadata, file),
        **_scaled_queries(metadata, _GEMMA2_27B_LAYERS),
        "sliding_window": metadata.integer(WINDOW, 4096),
        **window_layers(metadata, 2),
        "attn_logit_softcapping": metadata.number_or_none("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number_or_none("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: Metadata, file: MappedFiles) -> Config:
    return {
        **_gemma(metadata, file),
        **_scaled_queries(metadata, _GEMMA3_27B_LAYERS),
        "sliding_window": metadata.integer(WINDOW),
        **window_layers(metadata, 6),
        "final_logit_softcapping": metadata.number_or_none("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": rope_parameters(metadata, file),
            "sliding_attention": _local_rope(metadata),
        },
    }


def _local_rope(metadata: Metadata) -> Config:
    """Return the parameters of the rotary embedding of layers with windows."""
    base = metadata.number(LOCAL_BASE, _USUAL_LOCAL_BASE)
    return {"rope_type": "default", "rope_theta": base}


def _embeddings_of_layers(metadata: Metadata, file: MappedFiles) -> Config:
    """Return the sizes of the embeddings that each layer has of its own; 0: it has none."""
    size = metadata.integer(_PER_LAYER, 0, min_value=0)
    table = file.header.tensors.get("per_layer_token_embd.weight")
    rows = {} if table is None else {"vocab_size_per_layer_input": table.shape[0]}
    return {"hidden_size_per_layer_input": size} | rows


def _own_layers(metadata: Metadata) -> int:
    """Return the layers of Gemma-3n that have keys and values of their own."""
    count = metadata.integer("block_count")
    usual = max(count - _GEMMA3N_OWN_LAYERS, 0)
    return count - metadata.integer(_SHARED_LAYERS, usual, min_value=0)


def _sparsity(metadata: Metadata, count: int) -> list[float]:
    """Return which share of activations is 0 in each layer; files have it in deviations."""
    deviations = metadata.numbers("activation_sparsity_scale", count)
    shares = [0.5 * (1.0 + math.erf(one / math.sqrt(2.0))) for one in deviations]
    return [round(share, _SPARSITY_DIGITS) for share in shares]


def _gemma3n(metadata: Metadata, file: MappedFiles) -> Config:
    count = metadata.integer("block_count")
    laurel = file.header.tensors.get("blk.0.laurel_l.weight")
    return {
        **_gemma(metadata, file),
        **window_layers(metadata, 5),
        **_embeddings_of_layers(metadata, file),
        "sliding_window": metadata.integer(WINDOW),
        "final_logit_softcapping": metadata.number_or_none("final_logit_softcapping", 30.0),
        "num_kv_shared_layers": count - _own_layers(metadata),
        "altup_active_idx": metadata.integer("altup.active_idx", 0, min_value=0),
        "altup_num_inputs": metadata.integer("altup.num_inputs", 4),
        "laurel_rank": 0 if laurel is None else laurel.shape[0],
        "activation_sparsity_pattern": _sparsity(metadata, count),
        "rope_parameters": {
            "full_attention": rope_parameters(metadata, file),
            "sliding_attention": _local_rope(metadata),
        },
    }


def _proportional_rope(metadata: Metadata, file: MappedFiles, size: int) -> Config:
    """Return the parameters of full attention: the first frequencies of a head rotate."""
    check_unscaled(metadata)
    base = metadata.number("rope.freq_base")
    factors = file.read_plain(FREQUENCY_FACTORS).float()
    num_rotated = int((factors == 1.0).sum())
    is_known = bool(
        (factors[:num_rotated] == 1.0).all() and (factors[num_rotated:] == _UNROTATED).all()
    )
    if factors.shape != (size // 2,) or not is_known:
        raise UnsupportedModel(
            f"{file.header.path}: {FREQUENCY_FACTORS} must have {size // 2} factors, which are 1"
            f" and, behind them, {_UNROTATED}"
        )
    share = 2 * num_rotated / size
    return {"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": base}


def _of_kind(values: list[int], kinds: list[str], kind: str) -> int:
    """Return the value that all layers of a kind have; 0: there are no such layers, or many."""
    found = {value for value, own in zip(values, kinds, strict=True) if own == kind}
    return found.pop() if len(found) == 1 else 0


def _gemma4(metadata: Metadata, file: MappedFiles) -> Config:
    count = metadata.integer("block_count")
    kinds = window_layers(metadata, 6)["layer_types"]
    size = metadata.head_size()
    local_size = metadata.integer("attention.key_length_swa", size)
    for key, expected in (
        ("attention.value_length_swa", local_size),
        ("rope.dimension_count", size),
        ("rope.dimension_count_swa", local_size),
    ):
        if metadata.integer(key, expected) != expected:
            raise metadata.unsupported(key, str(expected))
    heads = metadata.per_layer(KV_HEADS, count)
    widths = metadata.per_layer("feed_forward_length", count)
    num_shared = metadata.integer(_SHARED_LAYERS, 0, min_value=0)
    full = [number for number in range(count - num_shared) if kinds[number] == "full_attention"]
    has_values = [f"blk.{number}.attn_v.weight" in file.header.tensors for number in full]
    config = {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": kinds,
        "sliding_window": metadata.integer(WINDOW),
        "head_dim": local_size,
        "global_head_dim": size,
        "num_key_value_heads": _of_kind(heads, kinds, "sliding_attention") or max(heads),
        "num_global_key_value_heads": _of_kind(heads, kinds, "full_attention") or max(heads),
        "attention_k_eq_v": not all(has_values),
        "num_kv_shared_layers": num_shared,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "final_logit_softcapping": metadata.number_or_none("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": _proportional_rope(metadata, file, size),
            "sliding_attention": _local_rope(metadata),
        },
        **_embeddings_of_layers(metadata, file),
    }
    return config | (_gemma4_experts(metadata) if has_tensor(file, "ffn_gate_inp.weight") else {})


def _gemma4_experts(metadata: Metadata) -> Config:
    return {
        "enable_moe_block": True,
        "num_experts": metadata.integer("expert_count"),
        "top_k_experts": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
    }


def _unused_keys(num_own: int, count: int) -> frozenset[str]:
    """Return the tensors of layers whose keys and values are those of a layer before."""
    parts = ("attn_k", "attn_v", "attn_k_norm", "attn_v_norm")
    numbers = range(num_own, count)
    return frozenset(f"blk.{number}.{part}.weight" for number in numbers for part in parts)


def _gemma3n_unused(metadata: Metadata) -> frozenset[str]:
    return _unused_keys(_own_layers(metadata), metadata.integer("block_count"))


def _gemma4_unused(metadata: Metadata) -> frozenset[str]:
    count = metadata.integer("block_count")
    return _unused_keys(count - metadata.integer(_SHARED_LAYERS, 0, min_value=0), count)


_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_WITH_INPUTS = _FOUR_NORMS | {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_TOP_OF_INPUTS = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_GEMMA3N = _WITH_INPUTS | {
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_TOP_OF_GEMMA3N = _TOP_OF_INPUTS | {
    "altup_proj": "model.altup_projections.{}",
    "altup_unembd_proj": "model.altup_unembed_projections.{}",
}
_GEMMA4 = _WITH_INPUTS | {
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
_GEMMA4_JOINS = (
    Rows("experts.gate_up_proj", GATES_AND_FACTORS, whole="ffn_gate_up_exps.weight"),
    Rows("experts.down_proj", ("ffn_down_exps.weight",)),
)

GEMMAS: Mapping[str, Architecture] = {
    "gemma": Architecture("gemma", "GemmaForCausalLM", _gemma, norm_offset=1.0),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _gemma2, _FOUR_NORMS, norm_offset=1.0),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", _gemma3, _FOUR_NORMS, norm_offset=1.0
    ),
    "gemma3n": Architecture(
        "gemma3n_text",
        "Gemma3nForCausalLM",
        _gemma3n,
        _GEMMA3N,
        top=_TOP_OF_GEMMA3N,
        unused=_gemma3n_unused,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        "Gemma4ForCausalLM",
        _gemma4,
        _GEMMA4,
        joins=_GEMMA4_JOINS,
        top=_TOP_OF_INPUTS,
        unused=_gemma4_unused,
    ),
}
"""The architectures, by `general.architecture`."""
