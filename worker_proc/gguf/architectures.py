"""The architectures that are read from GGUF files, as configurations of transformers.

Files state sizes under llama.cpp's keys; what its code has fixed for an architecture, such as an
activation, is not in them and is stated here.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from worker_proc.errors import CheckpointError, UnsupportedModel
from worker_proc.gguf.joins import GPT_OSS, LATENT, Join
from worker_proc.gguf.mapped import MappedFiles
from worker_proc.gguf.metadata import Metadata
from worker_proc.gguf.model_header import Header
from worker_proc.gguf.neutral import neutral_values
from worker_proc.gguf.rotary import rope_parameters

Config = dict[str, Any]
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62
"""Of the models whose queries are scaled by the width of a head that the model does not have."""
_GEMMA3_LOCAL_BASE = 10_000.0
_SMOLLM3_NO_ROPE_INTERVAL = 4
"""Every fourth layer has no rotary embedding."""
_NORMALIZED = "expert_weights_norm"
_GATING = "expert_gating_func"
_GROUPS, _USED_GROUPS = "expert_group_count", "expert_group_used_count"
_SOFTMAX, _SIGMOID = 1, 2
_DRAFTS = "nextn_predict_layers"
_TEMPERATURE = "attention.temperature_scale"
_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
_KV_HEADS = "attention.head_count_kv"
_WINDOW_PATTERN = "attention.sliding_window_pattern"


class Architecture(NamedTuple):
    """How files of an architecture become a checkpoint of transformers."""

    model_type: str
    model_class: str
    own_config: Callable[[Metadata, MappedFiles], Config]
    """Returns what its configuration has beside what all have in common."""
    names: Mapping[str, str] = {}
    """Parts of names of tensors beside, or instead of, those that all have in common.

    A part with `.weight` or `.bias` stands for a whole name within a layer.
    """
    permutes: bool = False
    """Whether rows of queries and keys lie in pairs that are rotated together."""
    norm_offset: float = 0.0
    """What has been added to the weights of norms."""
    joins: tuple[Join, ...] = ()
    """Weights that are several tensors."""
    drops_drafts: bool = False
    """Whether layers that draft tokens, behind the others, are left out."""

    def num_layers(self, metadata: Metadata) -> int:
        """Return the layers of the model."""
        count = metadata.integer("block_count")
        num_drafts = metadata.integer(_DRAFTS, 0, least=0) if self.drops_drafts else 0
        if num_drafts >= count:
            raise metadata.unsupported(_DRAFTS, f"less than {count}, the number of all layers")
        return count - num_drafts


def make_config(file: MappedFiles) -> Config:
    """Return the content of config.json; UnsupportedModel: a file of another architecture."""
    header = file.header
    architecture = architecture_of(file)
    metadata = Metadata(header)
    own = architecture.own_config(metadata, file)
    embedding = header.tensors.get("token_embd.weight")
    common: Config = {
        "model_type": architecture.model_type,
        "architectures": [architecture.model_class],
        "hidden_size": metadata.integer("embedding_length"),
        "num_hidden_layers": architecture.num_layers(metadata),
        "num_attention_heads": metadata.integer("attention.head_count"),
        "max_position_embeddings": metadata.integer("context_length"),
        "vocab_size": 0 if embedding is None else embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": rope_parameters(metadata, file),
        **_token_ids(header),
    }
    heads = metadata.integer("attention.head_count")
    common["num_key_value_heads"] = metadata.integer(_KV_HEADS, heads)
    if metadata.get("feed_forward_length") is not None:
        common["intermediate_size"] = metadata.integer("feed_forward_length")
    common["rms_norm_eps"] = metadata.number("attention.layer_norm_rms_epsilon")
    metadata.check_all_read(neutral_values(metadata))
    return common | own


def _token_ids(header: Header) -> Config:
    """Return the special tokens that config.json names."""
    ids = {}
    for name, stored in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        key = f"tokenizer.ggml.{stored}_token_id"
        number = header.metadata.get(key)
        if number is not None and type(number) is not int:
            raise CheckpointError(f"{header.path}: {key} is {number!r:.100}, and must be a token")
        ids[f"{name}_token_id"] = number
    return ids


def architecture_of(file: MappedFiles) -> Architecture:
    """Return the architecture of a file; UnsupportedModel: it is not read."""
    header = file.header
    name = header.architecture
    if name == "llama" and header.metadata.get("llama.expert_count"):
        return MIXTRAL
    if name == "mistral3" and not header.metadata.get(f"{name}.{_TEMPERATURE}"):
        return MISTRAL
    if name == "deepseek2" and _gating(file) == _SOFTMAX:
        return DEEPSEEK_V2
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModel(
            f"{header.path}: general.architecture is {name[:100]!r}; supported: {known}"
        )
    return ARCHITECTURES[name]


def _rotated_heads(metadata: Metadata) -> Config:
    """Return the size of heads of which every value is rotated."""
    size = metadata.head_size()
    if metadata.integer("rope.dimension_count", size) != size:
        raise metadata.unsupported("rope.dimension_count", f"{size}, the values of a head")
    return {"head_dim": size}


def _has(file: MappedFiles, tensor: str) -> bool:
    """Return whether the first layer has a tensor."""
    return f"blk.0.{tensor}" in file.header.tensors


def _has_bias(file: MappedFiles, part: str) -> bool:
    return _has(file, f"{part}.bias")


def _llama(metadata: Metadata, file: MappedFiles) -> Config:
    biases = {"attention_bias": _has_bias(file, "attn_q"), "mlp_bias": _has_bias(file, "ffn_up")}
    return _rotated_heads(metadata) | biases


def _experts(metadata: Metadata) -> Config:
    return {"num_experts_per_tok": metadata.integer("expert_used_count")}


def _mixtral(metadata: Metadata, file: MappedFiles) -> Config:
    own = {"num_local_experts": metadata.integer("expert_count"), "sliding_window": None}
    return _rotated_heads(metadata) | _experts(metadata) | own


def _mistral(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what Mistral Small has, whose files state mistral3 as those of Ministral 3 do."""
    metadata.get(_TEMPERATURE)
    return _rotated_heads(metadata) | {
        "sliding_window": None,
        "rope_parameters": _with_mscale(metadata, file),
    }


def _ministral3(metadata: Metadata, file: MappedFiles) -> Config:
    rope = _with_mscale(metadata, file)
    if rope["rope_type"] != "yarn":
        raise metadata.unsupported("rope.scaling.type", f'"yarn" beside {_TEMPERATURE}')
    rope["llama_4_scaling_beta"] = metadata.number(_TEMPERATURE)
    return _rotated_heads(metadata) | {"sliding_window": None, "rope_parameters": rope}


def _with_mscale(metadata: Metadata, file: MappedFiles) -> Config:
    """Return parameters of the rotary embedding with what keeps YaRN from scaling angles."""
    rope = rope_parameters(metadata, file)
    all_dim = metadata.number_or_none(_LOG_MULTIPLIER)
    if all_dim is not None and rope["rope_type"] != "yarn":
        raise metadata.unsupported(_LOG_MULTIPLIER, "0 without YaRN")
    return rope if all_dim is None else rope | {"mscale": 1.0, "mscale_all_dim": all_dim}


def _granite(metadata: Metadata, file: MappedFiles) -> Config:
    return _llama(metadata, file) | {
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "attention_multiplier": metadata.number("attention.scale"),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }


def _smollm3(metadata: Metadata, file: MappedFiles) -> Config:
    return _rotated_heads(metadata) | {"no_rope_layer_interval": _SMOLLM3_NO_ROPE_INTERVAL}


def _qwen2(metadata: Metadata, file: MappedFiles) -> Config:
    size = metadata.integer("embedding_length") // metadata.integer("attention.head_count")
    if _rotated_heads(metadata)["head_dim"] != size:
        raise metadata.unsupported("attention.key_length", str(size))
    return {"use_sliding_window": False}


def _qwen3(metadata: Metadata, file: MappedFiles) -> Config:
    own = {"attention_bias": _has_bias(file, "attn_q"), "use_sliding_window": False}
    return _rotated_heads(metadata) | own


def _without_images(
    own: Callable[[Metadata, MappedFiles], Config],
) -> Callable[[Metadata, MappedFiles], Config]:
    """Return how a model of images and texts is configured: for texts, as one of texts.

    Its angles come from three rows of positions, which are equal in texts; and layers to which
    features of images are added get none.
    """

    def config(metadata: Metadata, file: MappedFiles) -> Config:
        for key in ("rope.dimension_sections", "n_deepstack_layers"):
            metadata.get(key)
        return own(metadata, file)

    return config


def _glm4(metadata: Metadata, file: MappedFiles) -> Config:
    size = metadata.head_size()
    rope = rope_parameters(metadata, file)
    rope["partial_rotary_factor"] = metadata.integer("rope.dimension_count", size) / size
    bias = _has_bias(file, "attn_q")
    return {"head_dim": size, "rope_parameters": rope, "attention_bias": bias}


def _routed(metadata: Metadata) -> Config:
    """Return what mixtures with shared experts have, as DeepSeek names it."""
    num_experts = metadata.integer("expert_count")
    num_groups = metadata.integer(_GROUPS, 0, least=0) or 1
    num_used = metadata.integer(_USED_GROUPS, 0, least=0) or 1
    if num_experts % num_groups:
        raise metadata.unsupported(_GROUPS, f"a number that divides {num_experts} experts")
    if num_used > num_groups:
        raise metadata.unsupported(_USED_GROUPS, f"at most {num_groups}, the number of all groups")
    return {
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "n_routed_experts": num_experts,
        "n_shared_experts": metadata.integer("expert_shared_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0, least=0),
        "routed_scaling_factor": metadata.number_or_none("expert_weights_scale") or 1.0,
        "norm_topk_prob": metadata.flag(_NORMALIZED, default=False),
        "n_group": num_groups,
        "topk_group": num_used,
    }


def _glm4moe(metadata: Metadata, file: MappedFiles) -> Config:
    if metadata.integer(_GATING, _SIGMOID) != _SIGMOID:
        raise metadata.unsupported(_GATING, f"{_SIGMOID}, the sigmoid function")
    own = {"use_qk_norm": _has(file, "attn_q_norm.weight")}
    return _glm4(metadata, file) | _routed(metadata) | own


def _gating(file: MappedFiles) -> int:
    """Return how DeepSeek's routers score experts; old files show it by the biases of scores."""
    is_biased = any(name.endswith("exp_probs_b.bias") for name in file.header.tensors)
    return Metadata(file.header).integer(_GATING, _SIGMOID if is_biased else _SOFTMAX)


def _latent(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what models with multi-head latent attention have in common."""
    rope = rope_parameters(metadata, file)
    multiplier = metadata.number_or_none(_LOG_MULTIPLIER)
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
        **_routed(metadata),
    }


def _deepseek_v3(metadata: Metadata, file: MappedFiles) -> Config:
    if metadata.integer(_GATING, _SIGMOID) != _SIGMOID:
        raise metadata.unsupported(_GATING, f"{_SOFTMAX} or {_SIGMOID}, softmax or sigmoid")
    return _latent(metadata, file) | {"rope_interleave": True}


def _deepseek_v2(metadata: Metadata, file: MappedFiles) -> Config:
    if metadata.flag(_NORMALIZED, default=False):
        raise metadata.unsupported(_NORMALIZED, f"false with {_GATING} {_SOFTMAX}")
    own = _latent(metadata, file)
    is_greedy = own["n_group"] == 1
    return own | {"topk_method": "greedy" if is_greedy else "group_limited_greedy"}


def _ernie4_5(metadata: Metadata, file: MappedFiles) -> Config:
    return _rotated_heads(metadata) | {"use_bias": _has_bias(file, "attn_q")}


def _olmo2(metadata: Metadata, file: MappedFiles) -> Config:
    _qwen2(metadata, file)  # its heads have the same sizes
    return {"attention_bias": False}


def _seed_oss(metadata: Metadata, file: MappedFiles) -> Config:
    return _llama(metadata, file) | {"attention_out_bias": _has_bias(file, "attn_output")}


def _gpt_oss(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what it has beside limits and slopes of its activation, which are transformers'."""
    rope = rope_parameters(metadata, file)
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False
    return {
        **_rotated_heads(metadata),
        **_experts(metadata),
        **_window_layers(metadata, 2),
        "num_local_experts": metadata.integer("expert_count"),
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
        "sliding_window": metadata.integer("attention.sliding_window"),
        "attention_bias": _has_bias(file, "attn_q"),
        "rope_parameters": rope,
    }


def _lfm2(metadata: Metadata, file: MappedFiles) -> Config:
    """Return which layers attend: those that have keys and values."""
    count = metadata.integer("block_count")
    stated = metadata.get(_KV_HEADS)
    if not isinstance(stated, list) or len(stated) != count:
        raise metadata.unsupported(_KV_HEADS, f"a number for each of {count} layers")
    size = metadata.integer("embedding_length") // metadata.integer("attention.head_count")
    if _rotated_heads(metadata)["head_dim"] != size:
        raise metadata.unsupported("attention.key_length", str(size))
    return {
        "layer_types": ["full_attention" if heads else "conv" for heads in stated],
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
        "norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
    }


def _qwen_experts(metadata: Metadata) -> Config:
    return _experts(metadata) | {
        "num_experts": metadata.integer("expert_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2moe(metadata: Metadata, file: MappedFiles) -> Config:
    shared = metadata.integer("expert_shared_feed_forward_length")
    own = {
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": metadata.flag(_NORMALIZED, default=False),
    }
    return _qwen2(metadata, file) | _qwen_experts(metadata) | own


def _qwen3moe(metadata: Metadata, file: MappedFiles) -> Config:
    own = {"norm_topk_prob": metadata.flag(_NORMALIZED, default=True)}
    return _qwen3(metadata, file) | _qwen_experts(metadata) | own


def _gemma(metadata: Metadata, file: MappedFiles) -> Config:
    return _rotated_heads(metadata) | {"hidden_activation": "gelu_pytorch_tanh"}


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
        "sliding_window": metadata.integer("attention.sliding_window", 4096),
        **_window_layers(metadata, 2),
        "attn_logit_softcapping": metadata.number_or_none("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number_or_none("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: Metadata, file: MappedFiles) -> Config:
    local = metadata.number("rope.freq_base_swa", _GEMMA3_LOCAL_BASE)
    return {
        **_gemma(metadata, file),
        **_scaled_queries(metadata, _GEMMA3_27B_LAYERS),
        "sliding_window": metadata.integer("attention.sliding_window"),
        **_window_layers(metadata, 6),
        "final_logit_softcapping": metadata.number_or_none("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": rope_parameters(metadata, file),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _window_layers(metadata: Metadata, interval: int) -> Config:
    """Return the kinds of layers: of `interval` ones the last has no window, or as stated."""
    count = metadata.integer("block_count")
    stated = metadata.get(_WINDOW_PATTERN)
    if isinstance(stated, list):
        has_window = stated
        if len(stated) != count or not all(isinstance(one, bool) for one in stated):
            raise metadata.unsupported(_WINDOW_PATTERN, f"true or false for each of {count} layers")
    else:
        interval = metadata.integer(_WINDOW_PATTERN, interval)
        has_window = [number % interval < interval - 1 for number in range(count)]
    kinds = ["sliding_attention" if one else "full_attention" for one in has_window]
    return {"layer_types": kinds}


def _phi3(metadata: Metadata, file: MappedFiles) -> Config:
    size = metadata.head_size()
    rope = rope_parameters(metadata, file)
    rotated = metadata.integer("rope.dimension_count", size)
    rope["partial_rotary_factor"] = rotated / size
    length = metadata.integer("context_length")
    window = metadata.integer("attention.sliding_window", 0, least=0)
    return {
        "rope_parameters": rope,
        "original_max_position_embeddings": rope.get("original_max_position_embeddings", length),
        "sliding_window": window or None,
    }


_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_ROUTED = _EXPERTS | {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_LATENT = _ROUTED | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_NORM_BEHIND = {"post_attention_norm": "post_attention_layernorm"}
_GPT_OSS = _NORM_BEHIND | {
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GLM4 = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
_LFM2 = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}

MIXTRAL = Architecture("mixtral", "MixtralForCausalLM", _mixtral, _MIXTRAL, permutes=True)
"""Files state llama, and a number of experts."""
MISTRAL = Architecture("mistral", "MistralForCausalLM", _mistral, permutes=True)
"""Files state mistral3, and no temperature of attention."""
DEEPSEEK_V2 = Architecture(
    "deepseek_v2", "DeepseekV2ForCausalLM", _deepseek_v2, _LATENT, joins=LATENT, drops_drafts=True
)
"""Files state deepseek2, as those of DeepSeek-V3 do, and score experts by softmax."""
ARCHITECTURES: Mapping[str, Architecture] = {
    "deepseek2": Architecture(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        _deepseek_v3,
        _LATENT,
        joins=LATENT,
        drops_drafts=True,
    ),
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM", _ernie4_5),
    "gemma": Architecture("gemma", "GemmaForCausalLM", _gemma, norm_offset=1.0),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _gemma2, _FOUR_NORMS, norm_offset=1.0),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", _gemma3, _FOUR_NORMS, norm_offset=1.0
    ),
    "glm4": Architecture("glm4", "Glm4ForCausalLM", _glm4, _GLM4),
    "glm4moe": Architecture(
        "glm4_moe", "Glm4MoeForCausalLM", _glm4moe, _ROUTED | _NORM_BEHIND, drops_drafts=True
    ),
    "gpt-oss": Architecture("gpt_oss", "GptOssForCausalLM", _gpt_oss, _GPT_OSS, joins=GPT_OSS),
    "granite": Architecture("granite", "GraniteForCausalLM", _granite, permutes=True),
    "lfm2": Architecture("lfm2", "Lfm2ForCausalLM", _lfm2, _LFM2),
    "llama": Architecture("llama", "LlamaForCausalLM", _llama, permutes=True),
    "mistral3": Architecture("ministral3", "Ministral3ForCausalLM", _ministral3, permutes=True),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", _olmo2, _NORMS_BEHIND),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _phi3, _FUSED),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _qwen2),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", _qwen2moe, _EXPERTS | _SHARED),
    "qwen2vl": Architecture("qwen2", "Qwen2ForCausalLM", _without_images(_qwen2)),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _qwen3),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3moe, _EXPERTS),
    "qwen3vl": Architecture("qwen3", "Qwen3ForCausalLM", _without_images(_qwen3)),
    "qwen3vlmoe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", _without_images(_qwen3moe), _EXPERTS
    ),
    "seed_oss": Architecture("seed_oss", "SeedOssForCausalLM", _seed_oss, _NORM_BEHIND),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", _smollm3, permutes=True),
}
"""By `general.architecture`. Mistral's files state llama."""
